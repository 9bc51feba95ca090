"""Paged attention by torch's scaled_dot_product_attention, over blocks that are gathered first.

A layer's KV cache is one tensor [num_blocks, block_size, 2, num_kv_heads, head_dim]: a token's K and V lie side by side, so a step
writes both with one copy and reads both with one gather.

The step's tokens come as runs, one per request: first requests with one new token, longest context first, then the longer runs. They
are cut into groups, computed one after the other: some requests with one new token each, or a piece of one longer run. A group gathers
its contexts into a buffer that stays in the processor's cache and is overwritten by the next group; contexts are never copied whole
at once. Query heads that share a KV head read it where it is (enable_gqa): nothing is repeated.

Masked slots hold other requests' old KV or zeros: finite, weighted with an exact 0. So the cache starts as zeros, not as empty memory.

Stands at form 6 of a request.    vLLM: v1/attention/ops/paged_attn.py
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import RMSNorm

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


class SDPABackend:
    """torch.nn.functional.scaled_dot_product_attention over gathered blocks."""

    def __init__(self, config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.block_size, self.dtype, self.device = config, block_size, dtype, device

    def new_kv_caches(self, num_blocks: int) -> list[Tensor]:
        c = self.config
        shape = (num_blocks, self.block_size, 2, c.num_kv_heads, c.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(c.num_layers)]

    def build(
        self, rows: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, positions: np.ndarray, block_table: np.ndarray
    ) -> "SDPAMetadata":
        index, offset = np.divmod(positions, self.block_size)
        slots = block_table[np.repeat(rows, query_lens), index].astype(np.int64) * self.block_size + offset
        builder = _GroupBuilder(self, block_table[rows])
        num_decodes = int((query_lens == 1).sum())
        builder.add_decodes(seq_lens[:num_decodes].tolist())
        for i in range(num_decodes, len(query_lens)):
            builder.add_run(i, int(query_lens[i]), int(seq_lens[i]))
        num_blocks = max((len(g.block_ids) for g in builder.groups if g.block_ids is not None), default=0)
        gathered = torch.empty(num_blocks, self.block_size * builder.token_size, dtype=self.dtype, device=self.device)
        return SDPAMetadata(self.config, torch.from_numpy(slots).to(self.device), builder.groups, gathered)


class _GroupBuilder:
    def __init__(self, backend: SDPABackend, block_table: np.ndarray) -> None:
        self.block_table = block_table  #: [num_reqs, width]
        self.block_size, self.device, self.dtype = backend.block_size, backend.device, backend.dtype
        self.token_size = 2 * backend.config.num_kv_heads * backend.config.head_dim
        token_bytes = self.token_size * self.dtype.itemsize
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


@dataclass(frozen=True, slots=True)
class SDPAMetadata:
    config: ModelConfig
    slot_mapping: Tensor  #: [num_tokens] int64; slot = block * block_size + offset
    groups: list[AttentionGroup]
    gathered: Tensor  #: the buffer that groups share, [most blocks of a group, elements of a block]

    def attend(self, qkv: Tensor, qk_norm: RMSNorm | None, cos: Tensor, sin: Tensor, kv_cache: Tensor) -> Tensor:
        num_heads, num_kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = qkv.view(len(qkv), -1, head_dim)
        qk, q = qkv[:, : num_heads + num_kv_heads], qkv[:, :num_heads]
        if qk_norm is not None:
            qk.copy_(qk_norm(qk))
        rotate_(qk, cos, sin)
        kv = qkv[:, num_heads:].view(len(qkv), 2, num_kv_heads, head_dim)
        kv_cache.view(-1, *kv.shape[1:]).index_copy_(0, self.slot_mapping, kv)
        blocks = kv_cache.view(kv_cache.shape[0], -1)
        outputs = []
        for group in self.groups:
            if group.block_ids is None:
                context = kv[group.start : group.stop].unsqueeze(0)
            else:
                gathered = self.gathered[: len(group.block_ids)]
                torch.index_select(blocks, 0, group.block_ids, out=gathered)
                context = gathered.view(group.num_reqs, -1, *kv.shape[1:])[:, : group.context_len]
            query = q[group.start : group.stop].view(group.num_reqs, -1, num_heads, head_dim).transpose(1, 2)
            key, value = context[:, :, 0].transpose(1, 2), context[:, :, 1].transpose(1, 2)
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=group.mask, is_causal=group.block_ids is None, enable_gqa=num_heads != num_kv_heads
            )
            outputs.append(out.transpose(1, 2).reshape(group.stop - group.start, num_heads * head_dim))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place on x [n, heads, head_dim]. (x1, x2) → (x1 cos - x2 sin, x2 cos + x1 sin): the roll swaps x1 and x2."""
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)
