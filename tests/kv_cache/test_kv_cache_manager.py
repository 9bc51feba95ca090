"""KV cache manager: exactly the blocks a step needs, all or nothing; what may be shared, and when."""

import pytest

from mini_engine.kv_cache.block_hash import get_request_block_hasher
from mini_engine.kv_cache.kv_cache_manager import KVCacheManager, cdiv
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler.request import Request

HASHER = get_request_block_hasher(4)


def make_request(request_id: str, prompt: list[int], cache_salt: str | None = None, skip: bool | None = None) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=100, skip_reading_prefix_cache=skip)
    return Request(request_id, prompt, params, cache_salt=cache_salt, block_hasher=HASHER)


def admit(manager: KVCacheManager, request: Request, num_new: int | None = None, full: bool = False) -> int | None:
    """As the scheduler does it; returns the hit's length, None when there is no room."""
    blocks, num_hit = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hit if num_new is None else num_new
    if manager.allocate_slots(request, num_new, blocks, full_sequence_must_fit=full) is None:
        return None
    request.num_computed_tokens = num_hit + num_new
    return num_hit


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8, 9, 16, 17])
def test_blocks_are_exactly_those_the_tokens_need(num_tokens: int, chunk: int) -> None:
    """Around every multiple of the block size, whatever the chunks: REGRESSIONS row 25."""
    manager, request = KVCacheManager(20, 4, enable_caching=False), make_request("r", list(range(num_tokens)))
    while request.num_computed_tokens < num_tokens:
        num_new = min(chunk, num_tokens - request.num_computed_tokens)
        before = len(manager.req_to_blocks.get("r", []))
        new_blocks = manager.allocate_slots(request, num_new)
        request.num_computed_tokens += num_new
        assert new_blocks is not None
        assert len(manager.get_block_ids("r")) == before + len(new_blocks) == cdiv(request.num_computed_tokens, 4)
        manager.check([request])


def test_chunk_over_several_blocks_gets_them_all() -> None:
    test_blocks_are_exactly_those_the_tokens_need(num_tokens=17, chunk=9)


def test_exact_multiple_takes_no_spare_block() -> None:
    test_blocks_are_exactly_those_the_tokens_need(num_tokens=8, chunk=8)


def test_no_room_changes_nothing() -> None:
    manager, request = KVCacheManager(4, 4), make_request("r", list(range(9)))
    assert admit(manager, request) == 0
    table = manager.get_block_ids("r")
    assert manager.allocate_slots(request, 4) is None
    assert manager.get_block_ids("r") == table
    assert admit(manager, make_request("other", [50])) is None
    assert "other" not in manager.req_to_blocks
    manager.check([request])


def test_full_hit_leaves_the_last_token_to_compute() -> None:
    """An exact repeat, its length a multiple of the block size: one block is computed again, for the logits. REGRESSIONS row 2."""
    manager = KVCacheManager(10, 4)
    assert admit(manager, make_request("a", list(range(8)))) == 0
    repeat = make_request("b", list(range(8)))
    assert admit(manager, repeat) == 4
    assert manager.get_block_ids("b")[0] == manager.get_block_ids("a")[0]
    assert manager.get_block_ids("b")[1] != manager.get_block_ids("a")[1]
    assert admit(manager, make_request("c", list(range(9)))) == 8


def test_hit_stops_at_the_first_miss_and_at_the_salt() -> None:
    manager = KVCacheManager(10, 4)
    admit(manager, make_request("a", list(range(12))))
    assert manager.get_computed_blocks(make_request("b", [0, 1, 2, 3, 9, 9, 9, 9, 8, 9, 10, 11, 0]))[1] == 4
    assert manager.get_computed_blocks(make_request("c", list(range(12)), cache_salt="s"))[1] == 0


def test_only_computed_tokens_are_published() -> None:
    """Publish after compute: a chunk publishes its full blocks, not the ones that are merely allocated or known."""
    manager, request = KVCacheManager(10, 4), make_request("a", list(range(16)))
    admit(manager, request, num_new=6, full=True)
    assert manager.get_computed_blocks(make_request("b", list(range(16))))[1] == 4
    manager.allocate_slots(request, 6)
    assert manager.get_computed_blocks(make_request("b", list(range(16))))[1] == 12


def test_unpublish_takes_back_what_will_not_be_written() -> None:
    manager, request = KVCacheManager(10, 4), make_request("a", list(range(16)))
    admit(manager, request, num_new=6)
    manager.allocate_slots(request, 6)  # the step that is now cancelled
    manager.undo_allocate_slots(request, num_computed_tokens=6)
    assert manager.get_computed_blocks(make_request("b", list(range(16))))[1] == 4
    manager.free(request)
    manager.check([])


def test_hits_in_the_free_list_count_as_room_taken() -> None:
    """3 free blocks, 2 of them the hit: only 1 is left for new tokens."""
    manager, first = KVCacheManager(4, 4), make_request("a", list(range(8)))
    admit(manager, first)
    manager.free(first)
    assert admit(manager, make_request("b", list(range(17))), num_new=8) is None
    request = make_request("b", list(range(12)))
    assert admit(manager, request) == 8
    manager.check([request])


def test_hit_survives_its_own_admission() -> None:
    """The new blocks of an admission must not evict the blocks of its own hit: touched first, allocated second."""
    manager, first = KVCacheManager(4, 4), make_request("a", list(range(9)))
    admit(manager, first)
    manager.free(first)
    request = make_request("b", list(range(9)))
    assert admit(manager, request) == 8
    assert len(set(manager.get_block_ids("b"))) == 3


def test_full_sequence_must_fit_looks_beyond_the_chunk() -> None:
    manager = KVCacheManager(4, 4)
    assert admit(manager, make_request("a", list(range(13))), num_new=4, full=True) is None
    assert admit(manager, make_request("b", list(range(12))), num_new=4, full=True) == 0
    assert len(manager.get_block_ids("b")) == 1


def test_prefix_cache_off_or_skipped() -> None:
    manager = KVCacheManager(20, 4, enable_caching=False)
    admit(manager, make_request("a", list(range(8))))
    assert admit(manager, make_request("b", list(range(8)))) == 0
    assert manager.statistics().num_cached_blocks == 0
    manager = KVCacheManager(20, 4)
    admit(manager, make_request("a", list(range(9))))
    skipping = make_request("b", list(range(9)), skip=True)
    assert admit(manager, skipping) == 0
    manager.record_prefix_cache_stats(skipping, 0)
    assert manager.make_prefix_cache_stats().requests == 0


def test_check_finds_a_table_that_disagrees() -> None:
    manager, request = KVCacheManager(6, 4), make_request("a", list(range(8)))
    admit(manager, request)
    manager.check([request])
    manager.req_to_blocks["a"].pop()
    with pytest.raises(AssertionError):
        manager.check([request])
    with pytest.raises(AssertionError, match="dead"):
        manager.check([])
