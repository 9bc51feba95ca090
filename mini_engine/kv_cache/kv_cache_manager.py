"""KV cache manager: how many blocks a request needs, which cached ones it can share, and when its own become shareable.

A request's block table, an append-only list, entry i for tokens [i * block_size, (i + 1) * block_size):

    tokens   0 ......... num_computed ........ num_computed + num_new .......... len(table) * block_size
             |  KV written  |  written by this step  |       room in the last block       |
             |<---------------- cdiv(num_computed + num_new, block_size) blocks ---------->|

Promises  allocate_slots() gives all that a step needs, or None and changes nothing; a hash is published only for tokens that are
          computed in this step or before it, so whoever finds it in the same step is scheduled behind the writer.
          Blocks that a request gives up while a step in flight still computes something of it are held until that step is accounted
          for: nobody gets them meanwhile. Steps run in order, so on one device a new owner's writes would come last anyhow; but
          nothing else that reads or writes a block (a copy, a second stream, a transfer) would keep to that order.
Callers   a preempted request that was part of the step being built: undo_allocate_slots() before free().
Stands at form 6 of a request; knows no queue and no tensor.    vLLM: v1/core/kv_cache_manager.py, kv_cache_coordinator.py
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from mini_engine import overlay as overlays
from mini_engine.kv_cache.block_hash import CacheableRequest
from mini_engine.kv_cache.block_pool import BlockPool, BlockPoolStats, KVCacheBlock
from mini_engine.wire.messages import PrefixCacheStats

NO_BLOCKS: Sequence[KVCacheBlock] = ()


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


class KVCacheManager:
    """Block tables of all live requests over one BlockPool."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True, overlay: Mapping[str, str] | None = None) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        pool_class = overlays.load(overlay or {}, "kv_cache.block_pool", BlockPool)
        self.block_pool: BlockPool = pool_class(num_blocks, enable_caching)
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[str, int] = {}  #: leading blocks of the table that carry a hash; same keys as req_to_blocks
        self.held_blocks: dict[int, list[KVCacheBlock]] = {}  #: step in flight → blocks given up that it may write
        self._accounted_step_id = 0
        self.prefix_cache_stats = PrefixCacheStats()  #: since the last make_prefix_cache_stats()

    @property
    def usage(self) -> float:
        """Used share of the pool, in [0, 1]."""
        return self.block_pool.get_usage()

    # ── prefix cache ───────────────────────────────────────────────────────────────────────────────────

    def get_computed_blocks(self, request: CacheableRequest) -> tuple[Sequence[KVCacheBlock], int]:
        """Longest cached prefix of `request`: its blocks, and its length in tokens.

        The length is a multiple of block_size and < request.num_tokens: the last token is always computed, for its logits.
        The blocks are not held yet: until allocate_slots() touches them, any allocation may evict them. A miss is ((), 0).
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return NO_BLOCKS, 0
        request.update_block_hashes()  # a preempted request comes back with its output
        blocks: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            if (block := self.block_pool.get_cached_block(block_hash)) is None:
                break
            blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def record_prefix_cache_stats(self, request: CacheableRequest, num_hits: int) -> None:
        """Count an admitted request's lookup; one that did not look is not counted."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return
        stats = self.prefix_cache_stats
        if request.num_preemptions > 0:
            stats.preempted_requests += 1
            stats.preempted_queries += request.num_tokens
            stats.preempted_hits += num_hits
        else:
            stats.requests += 1
            stats.queries += request.num_tokens
            stats.hits += num_hits

    def make_prefix_cache_stats(self) -> PrefixCacheStats:
        """Hand over the counts since the last call."""
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes. False, and nothing changed, while a request holds blocks."""
        if not self.block_pool.reset_prefix_cache():
            return False
        self.prefix_cache_stats.reset = True
        return True

    # ── block tables ───────────────────────────────────────────────────────────────────────────────────

    def allocate_slots(
        self,
        request: CacheableRequest,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] = NO_BLOCKS,
        full_sequence_must_fit: bool = False,
    ) -> Sequence[KVCacheBlock] | None:
        """Make room for num_new_tokens more tokens of `request`; returns the blocks appended to its table, hits not among them.

        None when the pool cannot give them; then nothing has changed. new_computed_blocks: what get_computed_blocks() found, on
        admission only; they become the head of the table. full_sequence_must_fit: refuse also when all the tokens that `request`
        has now would not fit, though only num_new_tokens are allocated: a prompt that is admitted in chunks should not starve half-way.
        """
        request_id, block_size = request.request_id, self.block_size
        blocks = self.req_to_blocks.get(request_id)
        num_tokens = request.num_computed_tokens + num_new_tokens
        if blocks is None:
            num_tokens += len(new_computed_blocks) * block_size
            num_needed = cdiv(request.num_tokens if full_sequence_must_fit else num_tokens, block_size) - len(new_computed_blocks)
            # A hit that nobody owns is in the free list: touching it takes it from what is left for new blocks.
            num_needed += sum(block.ref_cnt == 0 for block in new_computed_blocks)
            if num_needed > self.block_pool.get_num_free_blocks():
                return None
            self.block_pool.touch(new_computed_blocks)  # before any allocation, which could evict them
            blocks = self.req_to_blocks[request_id] = list(new_computed_blocks)
            self.num_cached_block[request_id] = len(blocks)

        new_blocks = NO_BLOCKS
        if (num_new_blocks := cdiv(num_tokens, block_size) - len(blocks)) > 0:
            if num_new_blocks > self.block_pool.get_num_free_blocks():
                return None
            new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
            blocks += new_blocks
        if self.enable_caching and num_tokens // block_size > self.num_cached_block[request_id]:
            self.cache_blocks(request, min(num_tokens, request.num_tokens))
        return new_blocks

    def cache_blocks(self, request: CacheableRequest, num_tokens: int) -> None:
        """Publish the full blocks of the first num_tokens tokens, which are computed or part of the step being built."""
        num_cached, num_full = self.num_cached_block[request.request_id], num_tokens // self.block_size
        if num_full <= num_cached:
            return
        if len(request.block_hashes) < num_full:
            request.update_block_hashes()
        blocks = self.req_to_blocks[request.request_id]
        self.block_pool.cache_full_blocks(blocks[num_cached:num_full], request.block_hashes[num_cached:num_full])
        self.num_cached_block[request.request_id] = num_full

    def undo_allocate_slots(self, request: CacheableRequest, num_computed_tokens: int) -> None:
        """Take back what the step being built gave beyond the first num_computed_tokens: hashes and blocks. It will not write them.

        Nobody has found them: waiting requests are only admitted in steps without a preemption.
        """
        blocks, num_written = self.req_to_blocks[request.request_id], num_computed_tokens // self.block_size
        for block in blocks[num_written : self.num_cached_block[request.request_id]]:
            self.block_pool.uncache_block(block)
        self.num_cached_block[request.request_id] = min(num_written, self.num_cached_block[request.request_id])
        num_kept = cdiv(num_computed_tokens, self.block_size)
        self.block_pool.free_blocks(reversed(blocks[num_kept:]))
        del blocks[num_kept:]

    def free(self, request: CacheableRequest, last_step_id: int = 0) -> None:
        """Give up the request's blocks, tail first (see BlockPool.free_blocks). No blocks: nothing happens.

        last_step_id: the last step that may write them. If it is in flight, it keeps them until release().
        """
        if (blocks := self.req_to_blocks.pop(request.request_id, None)) is not None:
            del self.num_cached_block[request.request_id]
            if last_step_id > self._accounted_step_id:
                self.held_blocks.setdefault(last_step_id, []).extend(reversed(blocks))
            else:
                self.block_pool.free_blocks(reversed(blocks))

    def release(self, step_id: int) -> None:
        """A step is accounted for, in the order of the steps: what was held for it is free."""
        self._accounted_step_id = step_id
        if (blocks := self.held_blocks.pop(step_id, None)) is not None:
            self.block_pool.free_blocks(blocks)

    def get_block_ids(self, request_id: str) -> list[int]:
        """The request's whole block table."""
        return [block.block_id for block in self.req_to_blocks[request_id]]

    def statistics(self) -> BlockPoolStats:
        """The pool's snapshot."""
        return self.block_pool.statistics()

    def check(self, requests: Iterable[CacheableRequest]) -> None:
        """AssertionError unless tables, reference counts, hashes and free list agree. `requests`: all live ones. O(pool)."""
        by_id = {request.request_id: request for request in requests}
        assert self.req_to_blocks.keys() <= by_id.keys(), f"blocks of dead requests: {self.req_to_blocks.keys() - by_id.keys()}"
        assert self.req_to_blocks.keys() == self.num_cached_block.keys()
        for request_id, blocks in self.req_to_blocks.items():
            request, num_cached = by_id[request_id], self.num_cached_block[request_id]
            assert num_cached * self.block_size <= request.num_computed_tokens <= len(blocks) * self.block_size, request_id
            for i, block in enumerate(blocks):
                assert block.block_hash == (request.block_hashes[i] if i < num_cached else None), f"{request_id} block {i}: {block}"
        assert all(step_id > self._accounted_step_id for step_id in self.held_blocks), "blocks are held for a step that is over"
        tables = chain(self.req_to_blocks.values(), self.held_blocks.values())
        self.block_pool.check(Counter(block.block_id for blocks in tables for block in blocks))
