"""Block pool: who owns each KV block, which free block goes next, and which block holds which prefix.

Promises  free + used + null == num_gpu_blocks; a block with ref_cnt > 0 is never handed out; a hash in the map names a block whose
          KV is that prefix, until the block is handed out again: handing out *is* eviction.
Layout    free_block_queue: the ref_cnt == 0 blocks, next victim first:  [unhashed, last freed first] … [hashed, least recently freed first]
          cached_block_hash_to_block: hash → block, or {block_id: block} when several hold the same prefix (tables are append-only:
          a duplicate is kept, not merged). A hashed block may be free: it is still a hit, until its turn comes.
Callers   never read a block after free_blocks(); touch() it first if someone else may free it; free a request's blocks tail first.
Seam      `kv_cache.block_pool` (overlay.py): a class with the public methods below; its blocks have block_id, ref_cnt, block_hash.
Not here  how many blocks a request needs (kv_cache_manager.py); tensors (worker/).
vLLM: v1/core/block_pool.py::BlockPool, v1/core/kv_cache_utils.py::FreeKVCacheBlockQueue
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mini_engine.kv_cache.block_hash import BlockHash

logger = logging.getLogger(__name__)


class KVCacheBlock:
    """One block: its owners, the prefix it is known for, and its neighbours while it is free."""

    __slots__ = ("block_hash", "block_id", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0  #: requests whose block table has it; the null block's is not counted
        self.block_hash: BlockHash | None = None  #: set while the hash map has it: full, and written or certain to be
        self.prev_free_block: KVCacheBlock | None = None  #: both None unless the block is free; FreeKVCacheBlockQueue's alone
        self.next_free_block: KVCacheBlock | None = None

    def __repr__(self) -> str:
        block_hash = self.block_hash.hex()[:8] if self.block_hash else None
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={block_hash})"


class FreeKVCacheBlockQueue:
    """Doubly linked list through the blocks themselves: a hit takes a block out of the *middle* in O(1), and nothing is allocated.

    A sentinel closes the ring, so that no operation has a special case:   sentinel ⇄ first … last ⇄ sentinel.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._sentinel = KVCacheBlock(-1)
        self._sentinel.prev_free_block = self._sentinel.next_free_block = self._sentinel
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first n blocks. The caller has compared n with num_free_blocks."""
        assert n <= self.num_free_blocks, (n, self.num_free_blocks)
        taken: list[KVCacheBlock] = []
        block = self._sentinel.next_free_block
        for _ in range(n):
            assert block is not None
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        assert block is not None
        self._sentinel.next_free_block = block
        block.prev_free_block = self._sentinel
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out wherever it is. O(1)."""
        before, after = block.prev_free_block, block.next_free_block
        assert before is not None and after is not None, f"{block} is not free"
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the end, in this order: taken last."""
        last = self._sentinel.prev_free_block
        assert last is not None
        self._link(last, blocks, self._sentinel)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the front, in this order: blocks[0] is taken next."""
        first = self._sentinel.next_free_block
        assert first is not None
        self._link(self._sentinel, blocks, first)

    def _link(self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock], after: KVCacheBlock) -> None:
        for block in blocks:
            before.next_free_block = block
            block.prev_free_block = before
            before = block
        before.next_free_block = after
        after.prev_free_block = before
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All of them, next victim first. For checks and tests: O(free)."""
        blocks: list[KVCacheBlock] = []
        block = self._sentinel.next_free_block
        while block is not self._sentinel:
            assert block is not None
            blocks.append(block)
            block = block.next_free_block
        return blocks


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
        self.cached_block_hash_to_block: dict[BlockHash, KVCacheBlock | dict[int, KVCacheBlock]] = {}
        self._num_evictions = 0
        self._min_free_blocks = num_gpu_blocks - 1

    # ── the hash map ───────────────────────────────────────────────────────────────────────────────────

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """A block that holds this prefix (the first published of several), or None. It is not held: touch() it to keep it."""
        found = self.cached_block_hash_to_block.get(block_hash)
        return next(iter(found.values())) if isinstance(found, dict) else found

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], block_hashes: Sequence[BlockHash]) -> None:
        """Publish: from now on blocks[i] is found under block_hashes[i]. Its KV is written, or will be before any reader's step."""
        cached = self.cached_block_hash_to_block
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            assert block.block_hash is None and block.ref_cnt > 0, block
            block.block_hash = block_hash
            found = cached.get(block_hash)
            if found is None:
                cached[block_hash] = block
            elif isinstance(found, dict):
                found[block.block_id] = block
            else:
                cached[block_hash] = {found.block_id: found, block.block_id: block}

    def uncache_block(self, block: KVCacheBlock) -> bool:
        """Take back a publication. False when the block had none."""
        block_hash, block.block_hash = block.block_hash, None
        if block_hash is None:
            return False
        found = self.cached_block_hash_to_block[block_hash]
        if isinstance(found, dict) and len(found) > 1:
            del found[block.block_id]
        else:
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
            num_cached_blocks=sum(len(f) if isinstance(f, dict) else 1 for f in self.cached_block_hash_to_block.values()),
            num_evictions=self._num_evictions,
            peak_used_blocks=self.num_gpu_blocks - 1 - self._min_free_blocks,
        )

    def check(self, owners: Mapping[int, int]) -> None:
        """AssertionError unless everything adds up. owners: block id → how many block tables have it. O(blocks)."""
        free = self.free_block_queue.get_all_free_blocks()
        assert len(free) == self.free_block_queue.num_free_blocks, "free list and its count disagree"
        free_ids = {block.block_id for block in free}
        assert len(free_ids) == len(free), "a block is free twice"
        assert not (both := free_ids & owners.keys()), f"blocks both free and owned: {sorted(both)}"
        assert len(free_ids) + len(owners) + 1 == self.num_gpu_blocks, "a block is neither free nor owned"
        assert 0 not in free_ids and 0 not in owners, "the null block was handed out"
        num_hashed = 0
        for block in self.blocks:
            assert block.ref_cnt == owners.get(block.block_id, 0), f"{block}: {owners.get(block.block_id, 0)} tables have it"
            if block.block_hash is not None:
                num_hashed += 1
                found = self.cached_block_hash_to_block.get(block.block_hash)
                assert found is block or (isinstance(found, dict) and found.get(block.block_id) is block), f"{block} is not in the map"
        assert num_hashed == self.statistics().num_cached_blocks, "the hash map names a block that does not hold that hash"
