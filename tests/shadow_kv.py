"""Shadow KV: a worker with no model, whose every KV slot remembers the *whole token prefix* that wrote it.

It sees what a real worker sees, SchedulerOutput and nothing else. If any slot that a request reads holds anything but that request's own
prefix, an AssertionError says whose. So a wrong block table, a stale hash, a block freed too early, a count that ran ahead, all show in
the step that would have read foreign KV, not in text that looks a little odd. The sampled token is a pure function of the prefix.

Drive it in the order in which steps were scheduled; results may be handed back later (overlap: the worker keeps its own tokens). What a
step may touch until then is in `touched`: check_blocks() wants to know.
"""

import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from mini_engine.kv_cache.kv_cache_manager import KVCacheManager
from mini_engine.step import ModelRunnerOutput, SchedulerOutput


def next_token(prefix: Sequence[int], vocab_size: int = 50) -> int:
    """What this "model" samples after `prefix`."""
    return zlib.crc32(array("q", prefix)) % vocab_size


class ShadowWorker:
    """tag(req_id): what else must be equal for KV to be shared, the cache_salt say; the scheduler never tells a worker."""

    def __init__(self, num_blocks: int, block_size: int, tag: Callable[[str], object] = lambda req_id: None) -> None:
        self.num_blocks, self.block_size, self.tag = num_blocks, block_size, tag
        self.slots: dict[int, object] = {}  # slot → (tag, prefix)
        self.tokens: dict[str, list[int]] = {}
        self.block_ids: dict[str, list[int]] = {}
        self.touched: frozenset[int] = frozenset()  # blocks of the last step's requests

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in [*output.finished_req_ids, *output.preempted_req_ids]:  # may be unknown: it can end before its first step
            self.tokens.pop(req_id, None), self.block_ids.pop(req_id, None)
        start = {}
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.tokens, f"{new.req_id} is not new"
            self.tokens[new.req_id], self.block_ids[new.req_id] = list(new.prefill_token_ids), list(new.block_ids)
            start[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for req_id, new_ids, num_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            self.block_ids[req_id] += new_ids or []
            start[req_id] = num_computed
        assert start.keys() == output.num_scheduled_tokens.keys()
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens

        result = ModelRunnerOutput(req_ids=list(output.sampled_req_ids))
        sampling = iter([*output.sampled_req_ids, None])
        awaited = next(sampling)
        for req_id, num_scheduled in output.num_scheduled_tokens.items():
            tokens, end = self.tokens[req_id], start[req_id] + num_scheduled
            assert num_scheduled >= 1 and end <= len(tokens), f"{req_id}: tokens [{start[req_id]}, {end}) of {len(tokens)}"
            assert (end == len(tokens)) == (req_id == awaited), f"{req_id}: sampled exactly when it reaches its last token, in order"
            slots, tag = self.slots_of(req_id, end), self.tag(req_id)
            for position in range(start[req_id], end):
                self.slots[slots[position]] = (tag, tokens[: position + 1])
            for position, slot in enumerate(slots):
                assert self.slots.get(slot) == (tag, tokens[: position + 1]), (
                    f"{req_id} reads foreign KV at {position}: {self.slots.get(slot)}"
                )
            if req_id == awaited:
                awaited = next(sampling)
                tokens.append(next_token(tokens))
                result.sampled_token_ids.append([tokens[-1]])
        assert awaited is None, f"{awaited} is to be sampled but not scheduled"
        self.touched = frozenset(block_id for req_id in output.num_scheduled_tokens for block_id in self.block_ids[req_id])
        return result

    def slots_of(self, req_id: str, num_tokens: int) -> list[int]:
        ids, size = self.block_ids[req_id], self.block_size
        assert len(ids) == len(set(ids)) >= -(-num_tokens // size) and all(0 < i < self.num_blocks for i in ids), f"{req_id}: table {ids}"
        return [ids[i // size] * size + i % size for i in range(num_tokens)]


def check_blocks(manager: KVCacheManager, in_flight: Collection[int] = ()) -> None:
    """free ⊎ referenced ⊎ in flight = all blocks but the null block; a reference count is the number of tables that have the block.

    in_flight: `touched` of the steps whose results the scheduler has not seen. Who has given such a block up still counts as a table.
    """
    owners = Counter(block.block_id for blocks in manager.req_to_blocks.values() for block in blocks)
    free = [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]
    assert not (both := set(in_flight) & set(free)), f"blocks both free and referenced by a step in flight: {both}"
    flying = set(in_flight) - owners.keys()
    assert sorted([*free, *owners, *flying]) == list(range(1, manager.block_pool.num_gpu_blocks)), (free, owners, flying)
    for block in manager.block_pool.blocks:
        assert block.ref_cnt >= owners[block.block_id] if block.block_id in in_flight else block.ref_cnt == owners[block.block_id], block
