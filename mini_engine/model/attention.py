"""Paged attention: each request reads its own blocks and nothing else, whatever else is in the step.

A layer's KV cache is one tensor [num_blocks, block_size, 2, num_kv_heads, head_dim]: a token's K and V lie side by side, so a step
writes both with one copy and reads both with one gather. Block 0 is the null block: padding is written there and never read.

The step's tokens come as runs, one per request: first requests with one new token, longest context first, then the longer runs. They
are cut into groups, computed one after the other: some requests with one new token each, or a piece of one longer run. A group gathers
its contexts into a buffer that stays in the processor's cache and is overwritten by the next group; contexts are never copied whole
at once. Query heads that share a KV head read it where it is (enable_gqa): nothing is repeated.

Masked slots hold other requests' old KV or zeros: finite, weighted with an exact 0. So the cache starts as zeros, not as empty memory.

Stands at form 6 of a request.    vLLM: v1/attention/backends/cpu_attn.py, v1/attention/ops/paged_attn.py
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_TILE = 512  #: tokens of one long run computed at once: bounds the mask, and skips keys that a whole tile may not see
GATHER_BYTES = {"cpu": 1 << 22, "cuda": 1 << 30}  #: context gathered by one group: on CPU what stays in the caches, on CUDA any
WASTE_BYTES = {"cpu": 1 << 18, "cuda": 1 << 30}  #: padding read by one group before a group of its own is cheaper


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Requests computed together: tokens [start, stop) of the step, num_reqs times the same number of new tokens."""

    start: int
    stop: int
    num_reqs: int
    context_len: int  #: longest context in the group, the new tokens included
    block_ids: Tensor | None  #: [num_reqs * blocks per request]; None: the new tokens are the whole context
    mask: Tensor | None  #: additive, [num_reqs, 1, 1, context_len] or [query_len, context_len]; None: no slot needs hiding


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's reads and writes, built once and used by every layer."""

    slot_mapping: Tensor  #: [num_tokens] int64; slot = block * block_size + offset
    groups: list[AttentionGroup]
    gathered: Tensor  #: the buffer that groups share, [most blocks of a group, elements of a block]

    @classmethod
    def build(
        cls,
        slot_mapping: np.ndarray,  # [num_tokens] int64, -1 = padding
        query_lens: Sequence[int],  # new tokens of each request, all requests with one first
        seq_lens: Sequence[int],  # context of each, the new tokens included
        block_table: np.ndarray,  # [num_reqs, >= blocks of the longest] ids
        kv_cache: Tensor,  # any layer's: for shape, dtype and device
    ) -> "AttentionMetadata":
        """Cut the step into groups. Raises nothing; the lengths and the table are the runner's to get right."""
        builder = _GroupBuilder(block_table, kv_cache)
        num_decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
        builder.add_decodes(seq_lens[:num_decodes])
        for i in range(num_decodes, len(query_lens)):
            builder.add_run(i, query_lens[i], seq_lens[i])
        rows = max((len(g.block_ids) for g in builder.groups if g.block_ids is not None), default=0)
        return cls(
            slot_mapping=torch.from_numpy(np.maximum(slot_mapping, 0)).to(kv_cache.device),
            groups=builder.groups,
            gathered=kv_cache.new_empty(rows, kv_cache[0].numel()),
        )


class _GroupBuilder:
    def __init__(self, block_table: np.ndarray, kv_cache: Tensor) -> None:
        self.block_table = block_table
        self.block_size = kv_cache.shape[1]
        self.device, self.dtype = kv_cache.device, kv_cache.dtype
        token_bytes = kv_cache[0, 0].numel() * kv_cache.element_size()
        self.max_tokens = GATHER_BYTES[self.device.type] // token_bytes
        self.max_waste = WASTE_BYTES[self.device.type] // token_bytes
        self.groups: list[AttentionGroup] = []
        self.start = 0  #: first token not in a group yet

    def _blocks(self, first: int, last: int, context_len: int) -> Tensor:
        """Block ids of requests [first, last), each padded to the same number (with whatever their rows hold: it gets masked)."""
        num_blocks = -(-context_len // self.block_size)
        return torch.from_numpy(self.block_table[first:last, :num_blocks].astype(np.int64).ravel()).to(self.device)

    def add_decodes(self, seq_lens: Sequence[int]) -> None:
        first = 0
        while first < len(seq_lens):
            longest, last, waste = seq_lens[first], first + 1, 0
            while last < len(seq_lens) and (last + 1 - first) * longest <= self.max_tokens:
                waste += longest - seq_lens[last]
                if waste > self.max_waste:
                    break
                last += 1
            lens = np.asarray(seq_lens[first:last])
            mask = None
            if lens[-1] != longest:
                hidden = torch.from_numpy(np.arange(longest) >= lens[:, None]).to(self.device)
                mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)[:, None, None]
            self.groups.append(AttentionGroup(first, last, last - first, longest, self._blocks(first, last, longest), mask))
            first = last
        self.start = first

    def add_run(self, i: int, query_len: int, seq_len: int) -> None:
        if query_len == seq_len:  # no context before: causal attention over the new tokens alone
            self.groups.append(AttentionGroup(self.start, self.start + query_len, 1, seq_len, None, None))
            self.start += query_len
            return
        for offset in range(seq_len - query_len, seq_len, QUERY_TILE):  # position of the tile's first token
            tile_len = min(QUERY_TILE, seq_len - offset)
            context_len = offset + tile_len
            mask = torch.full((tile_len, context_len), -torch.inf, dtype=self.dtype, device=self.device).triu_(offset + 1)
            blocks = self._blocks(i, i + 1, context_len)
            self.groups.append(AttentionGroup(self.start, self.start + tile_len, 1, context_len, blocks, mask))
            self.start += tile_len


def new_kv_cache(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """One zeroed tensor per layer. On CPU the pages become memory when first written."""
    shape = (num_blocks, block_size, 2, num_kv_heads, head_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]


def paged_attention(q: Tensor, kv: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Write the step's K and V, then attend: q [num_rows, num_heads, head_dim], kv [num_rows, 2, num_kv_heads, head_dim].

    Returns [num_rows, num_heads * head_dim]. Rows past the step's tokens are padding: not written, and zeros in the result. All of the
    step is written before any of it is read: a request that hits the prefix another one computes in the same step reads finished KV.
    """
    num_rows, num_heads, head_dim = q.shape
    num_tokens = len(metadata.slot_mapping)
    slots = kv_cache.view(-1, *kv.shape[1:])
    slots.index_copy_(0, metadata.slot_mapping, kv[:num_tokens])
    blocks = kv_cache.view(kv_cache.shape[0], -1)
    outputs = []
    for group in metadata.groups:
        if group.block_ids is None:
            context = kv[group.start : group.stop].unsqueeze(0)
        else:
            gathered = metadata.gathered[: len(group.block_ids)]
            torch.index_select(blocks, 0, group.block_ids, out=gathered)
            context = gathered.view(group.num_reqs, -1, *kv.shape[1:])[:, : group.context_len]
        query = q[group.start : group.stop].view(group.num_reqs, -1, num_heads, head_dim).transpose(1, 2)
        key, value = context[:, :, 0].transpose(1, 2), context[:, :, 1].transpose(1, 2)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=group.mask, is_causal=group.block_ids is None, enable_gqa=num_heads != key.shape[1]
        )
        outputs.append(out.transpose(1, 2).reshape(group.stop - group.start, num_heads * head_dim))
    if num_rows > num_tokens:
        outputs.append(q.new_zeros(num_rows - num_tokens, num_heads * head_dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
