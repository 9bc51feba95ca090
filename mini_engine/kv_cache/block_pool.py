"""Block pool: who owns each KV block, which free block goes next, and which block holds which prefix.

Promises  free + used + null == num_gpu_blocks; a block with ref_cnt > 0 is never handed out; a hash in the map names a block whose
          KV is that prefix, until the block is handed out again: handing out *is* eviction.
Layout    free_block_queue: the ref_cnt == 0 blocks, next victim first:  [unhashed, last freed first] … [hashed, least recently freed first]
          cached_block_hash_to_block: hash → {block_id: block}, for several may hold the same prefix (tables are append-only: a
          duplicate is kept, not merged). A hashed block may be free: it is still a hit, until its turn comes.
Callers   never read a block after free_blocks(); touch() it first if someone else may free it; free a request's blocks tail first.
Seam      `kv_cache.block_pool` (overlay.py): a class with the public methods below; its blocks have block_id, ref_cnt, block_hash.
Not here  how many blocks a request needs (kv_cache_manager.py); tensors (worker/).
vLLM: v1/core/block_pool.py::BlockPool, v1/core/kv_cache_utils.py::FreeKVCacheBlockQueue
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mini_engine.kv_cache.block_hash import BlockHash

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block: its owners, and the prefix it is known for."""

    block_id: int
    ref_cnt: int = 0  #: requests whose block table has it; the null block's is not counted
    block_hash: BlockHash | None = None  #: set while the hash map has it: full, and written or certain to be


class FreeKVCacheBlockQueue:
    """The free blocks in order of reuse. A hit takes a block out of the *middle*, so every operation is O(1) per block.

    An OrderedDict is a doubly linked list with an index to its nodes, in C; vLLM threads one of its own through the blocks.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._blocks = OrderedDict((block.block_id, block) for block in blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first n blocks. The caller has compared n with num_free_blocks."""
        assert n <= len(self._blocks), (n, len(self._blocks))
        return [self._blocks.popitem(last=False)[1] for _ in range(n)]

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out wherever it is. KeyError when it is not free."""
        del self._blocks[block.block_id]

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the end, in this order: taken last."""
        for block in blocks:
            self._blocks[block.block_id] = block

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the front, in this order: blocks[0] is taken next."""
        self.append_n(blocks)
        for block in reversed(blocks):
            self._blocks.move_to_end(block.block_id, last=False)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All of them, next victim first. For checks and tests: O(free)."""
        return list(self._blocks.values())


@dataclass(frozen=True, slots=True)
class BlockPoolStats:
    """BlockPool.statistics(): an immutable snapshot."""

    num_gpu_blocks: int  #: all, the null block included
    num_free_blocks: int  #: may be handed out now, evictable cached ones included
    num_cached_blocks: int  #: blocks that a prefix can be found in, free or not
    num_evictions: int  #: cached blocks handed out for something else since the start
    peak_used_blocks: int  #: most blocks with ref_cnt > 0 at once since the start


class BlockPool:
    """The blocks 0 … num_gpu_blocks - 1. Block 0 is the null block: a valid index for padding, never anybody's, never freed."""

    def __init__(self, num_gpu_blocks: int, enable_caching: bool) -> None:
        assert num_gpu_blocks >= 2, num_gpu_blocks
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(i) for i in range(num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.cached_block_hash_to_block: dict[BlockHash, dict[int, KVCacheBlock]] = {}
        self._num_evictions = 0
        self._min_free_blocks = num_gpu_blocks - 1

    # ── the hash map ───────────────────────────────────────────────────────────────────────────────────

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """A block that holds this prefix (the first published of several), or None. It is not held: touch() it to keep it."""
        same = self.cached_block_hash_to_block.get(block_hash)
        return next(iter(same.values())) if same else None

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], block_hashes: Sequence[BlockHash]) -> None:
        """Publish: from now on blocks[i] is found under block_hashes[i]. Its KV is written, or will be before any reader's step."""
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            assert block.block_hash is None and block.ref_cnt > 0, block
            block.block_hash = block_hash
            self.cached_block_hash_to_block.setdefault(block_hash, {})[block.block_id] = block

    def uncache_block(self, block: KVCacheBlock) -> bool:
        """Take back a publication. False when the block had none."""
        block_hash, block.block_hash = block.block_hash, None
        if block_hash is None:
            return False
        same = self.cached_block_hash_to_block[block_hash]
        del same[block.block_id]
        if not same:
            del self.cached_block_hash_to_block[block_hash]
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix (the weights changed, say). Refused, False, while any block is in use."""
        if (in_use := self.num_gpu_blocks - 1 - self.get_num_free_blocks()) > 0:
            logger.warning("prefix cache not reset: %d blocks are in use", in_use)
            return False
        self.cached_block_hash_to_block.clear()
        for block in self.blocks:
            block.block_hash = None
        return True

    # ── ownership ──────────────────────────────────────────────────────────────────────────────────────

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """The next num_blocks free blocks, each with ref_cnt 1 and no hash. The caller has compared with get_num_free_blocks()."""
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            if block.block_hash is not None and self.uncache_block(block):  # evicted: its KV is about to be overwritten
                self._num_evictions += 1
            assert block.ref_cnt == 0, block
            block.ref_cnt = 1
        self._min_free_blocks = min(self._min_free_blocks, self.free_block_queue.num_free_blocks)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add one owner to each block. A free one leaves the free list, so nothing can evict it any more."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
        self._min_free_blocks = min(self._min_free_blocks, self.free_block_queue.num_free_blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one owner of each block, given in the order in which they should be reused: a request's tail first.

        Of those nobody owns now, blocks without a hash go to the *front* of the free list (useless to anyone, and warm in the cache
        of the machine), blocks with one to the *end*: least recently used first, and within a request the deep blocks before the
        shallow ones, because a prefix is worthless once its first block is gone.
        """
        unhashed: list[KVCacheBlock] = []
        hashed: list[KVCacheBlock] = []
        for block in ordered_blocks:
            assert block.ref_cnt > 0, block
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (unhashed if block.block_hash is None else hashed).append(block)
        self.free_block_queue.prepend_n(unhashed)
        self.free_block_queue.append_n(hashed)

    # ── numbers ────────────────────────────────────────────────────────────────────────────────────────

    def get_num_free_blocks(self) -> int:
        """Blocks that get_new_blocks() could hand out now, evictable ones included."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Used share of all blocks but the null block, in [0, 1]."""
        return 1.0 - self.get_num_free_blocks() / (self.num_gpu_blocks - 1)

    def statistics(self) -> BlockPoolStats:
        """A snapshot for metrics and tests. O(cached blocks)."""
        return BlockPoolStats(
            num_gpu_blocks=self.num_gpu_blocks,
            num_free_blocks=self.get_num_free_blocks(),
            num_cached_blocks=sum(map(len, self.cached_block_hash_to_block.values())),
            num_evictions=self._num_evictions,
            peak_used_blocks=self.num_gpu_blocks - 1 - self._min_free_blocks,
        )

    def check(self, owners: Mapping[int, int]) -> None:
        """AssertionError unless everything adds up. owners: block id → how many block tables have it. O(blocks)."""
        free_ids = {block.block_id for block in self.free_block_queue.get_all_free_blocks()}
        assert not (both := free_ids & owners.keys()), f"blocks both free and owned: {sorted(both)}"
        assert len(free_ids) + len(owners) + 1 == self.num_gpu_blocks, "a block is neither free nor owned"
        assert 0 not in free_ids and 0 not in owners, "the null block was handed out"
        num_hashed = 0
        for block in self.blocks:
            assert block.ref_cnt == owners.get(block.block_id, 0), f"{block}: {owners.get(block.block_id, 0)} tables have it"
            if block.block_hash is not None:
                num_hashed += 1
                same = self.cached_block_hash_to_block.get(block.block_hash, {})
                assert same.get(block.block_id) is block, f"{block} is not in the map"
        assert num_hashed == self.statistics().num_cached_blocks, "the hash map names a block that does not hold that hash"
