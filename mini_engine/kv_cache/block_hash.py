"""Block hashes: the name under which the KV of one full block can be found again.

    h(i) = SHA-256( pickle( (h(i - 1) or NONE_HASH, token ids of block i, extra keys or None) ) )

A hash covers the *whole* prefix through its parent, so equal hashes mean equal KV. It must resist collisions: a prompt is user input,
and a found collision reads another user's KV. Pickled bytes are only ever hashed here, never loaded. Same bytes as vLLM 0.32.0 with
its default `sha256`, so external routers see one cache (WIRE §6 has vectors). Extra keys are tagged tuples, never bare strings: a
LoRA named like somebody's cache_salt is another block.

Prompt blocks are hashed on the core-input thread, output blocks when they are published; each once.
Stands at form 5 of a request.    vLLM: v1/core/kv_cache_utils.py::hash_block_tokens, get_request_block_hasher
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

BlockHash = bytes
ExtraKeys = tuple[tuple[str, ...], ...]


class CacheableRequest(Protocol):
    """All that kv_cache/ knows of a request (scheduler/request.py has the rest)."""

    request_id: str
    all_token_ids: list[int]
    num_tokens: int
    num_computed_tokens: int
    cache_salt: str | None
    skip_reading_prefix_cache: bool
    num_preemptions: int
    block_hashes: list[BlockHash]

    def update_block_hashes(self) -> None:
        """Extend block_hashes to all full blocks of all_token_ids."""


def sha256(obj: Any) -> BlockHash:
    """SHA-256 of the object's pickle. Protocol 5 is named, not "highest": the hash must not change with the Python version."""
    return hashlib.sha256(pickle.dumps(obj, protocol=5)).digest()


NONE_HASH: BlockHash = sha256("vllm-none-hash")  #: the parent of every first block; vLLM's constant without PYTHONHASHSEED


def hash_block_tokens(parent: BlockHash | None, token_ids: Sequence[int], extra_keys: ExtraKeys | None = None) -> BlockHash:
    """Hash of one full block, given the hash of the block before it (None: it is the first)."""
    return sha256((parent or NONE_HASH, tuple(token_ids), extra_keys))


def get_request_block_hasher(block_size: int) -> Callable[[CacheableRequest], list[BlockHash]]:
    """A function that hashes those full blocks of a request which have no hash yet. Costs O(new tokens), not O(all)."""

    def hash_new_full_blocks(request: CacheableRequest) -> list[BlockHash]:
        first = len(request.block_hashes)
        parent = request.block_hashes[-1] if first else None
        token_ids = request.all_token_ids
        hashes: list[BlockHash] = []
        for start in range(first * block_size, request.num_tokens - block_size + 1, block_size):
            # The salt goes into block 0 only; every later block inherits it through its parent.
            extra_keys = (("cache_salt", request.cache_salt),) if start == 0 and request.cache_salt else None
            parent = hash_block_tokens(parent, token_ids[start : start + block_size], extra_keys)
            hashes.append(parent)
        return hashes

    return hash_new_full_blocks
