"""Scheduling: who gets tokens in a step, who gives way, and in which order."""

from pathlib import Path

import pytest

from mini_engine.config import EngineConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.scheduler.request import RequestStatus
from mini_engine.step import SchedulerOutput
from mini_engine.wire.messages import FinishReason
from tests.scheduler.traces import Engine, make_params, reference


def make_engine(num_blocks: int = 100, max_model_len: int = 1 << 30, **config: object) -> Engine:
    """num_blocks: to use, the null block not counted."""
    options = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, **config}
    return Engine(EngineConfig(**options), num_blocks + 1, max_model_len)  # type: ignore[arg-type]


def tokens_of(first: int, n: int) -> list[int]:
    return list(range(first, first + n))


# ── budget and order ────────────────────────────────────────────────────────────────────────────────────


def test_prefill_is_chunked_and_mixed_with_decode() -> None:
    """A decoding request keeps its one token a step while a long prompt takes the rest of the budget."""
    engine = make_engine(max_num_batched_tokens=8)
    engine.add("short", tokens_of(0, 3))
    assert engine.step().num_scheduled_tokens == {"short": 3}
    engine.add("long", tokens_of(100, 20))
    steps = [engine.step() for _ in range(4)]
    assert [dict(step.num_scheduled_tokens) for step in steps] == [
        {"short": 1, "long": 7},
        {"short": 1, "long": 7},
        {"short": 1, "long": 6},
        {"short": 1, "long": 1},
    ]
    assert [step.sampled_req_ids for step in steps] == [["short"], ["short"], ["short", "long"], ["short", "long"]]
    assert all(step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values()) for step in steps)


def test_running_requests_come_before_waiting_ones() -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=5)
    engine.add("a", tokens_of(0, 9))
    engine.add("b", tokens_of(20, 2))
    assert [list(engine.step().num_scheduled_tokens.items()) for _ in range(3)] == [
        [("a", 5)],
        [("a", 4), ("b", 1)],
        [("a", 1), ("b", 1)],
    ]


def test_max_num_seqs_limits_the_running_ones() -> None:
    engine = make_engine(max_num_seqs=2)
    for i in range(4):
        engine.add(f"r{i}", tokens_of(10 * i, 3), make_params(max_tokens=i + 1))
    assert list(engine.step().num_scheduled_tokens) == ["r0", "r1"]
    assert engine.counts() == (1, 2)  # r0 wanted one token only
    assert list(engine.step().num_scheduled_tokens) == ["r1", "r2"]


@pytest.mark.parametrize(("others", "chunks"), [(True, [3, 3, 3, 1]), (False, [10])])
def test_long_prefill_threshold_applies_only_when_others_wait(others: bool, chunks: list[int]) -> None:
    engine = make_engine(long_prefill_token_threshold=3)
    engine.add("long", tokens_of(0, 10))
    if others:
        engine.add("other", tokens_of(50, 2), make_params(max_tokens=50))
    assert [engine.step().num_scheduled_tokens["long"] for _ in chunks] == chunks


def test_fcfs_keeps_the_order_of_arrival() -> None:
    engine = make_engine(max_num_seqs=1)
    for name, priority in [("a", 3), ("b", 2), ("c", 1)]:
        engine.add(name, [1, 2, 3], make_params(max_tokens=1), priority=priority)
    assert [list(engine.step().num_scheduled_tokens) for _ in range(3)] == [["a"], ["b"], ["c"]]


def test_priority_orders_by_priority_then_arrival_then_id() -> None:
    engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
    for name, priority, arrival in [("d", 1, 1.0), ("c", 1, 1.0), ("b", 1, 0.0), ("a", 0, 9.0)]:
        engine.add(name, [1, 2, 3], make_params(max_tokens=1), priority=priority, arrival_time=arrival)
    assert [list(engine.step().num_scheduled_tokens) for _ in range(4)] == [["a"], ["b"], ["c"], ["d"]]


def test_order_of_running_is_the_order_of_admission() -> None:
    """Never that of a set or an address, however many come and go. REGRESSIONS row 22."""
    engine = make_engine(num_blocks=400, max_num_seqs=64, max_num_batched_tokens=128)
    for i in range(40):
        engine.add(f"r{i}", [i, i + 1], make_params(max_tokens=1 + i % 4))
    alive = [f"r{i}" for i in range(40)]
    for step in range(4):
        assert list(engine.step().num_scheduled_tokens) == alive
        alive = [f"r{i}" for i in range(40) if i % 4 > step]
    engine.scheduler.schedule()
    for i in range(40):
        engine.add(f"s{i}", [i], None)
    ended = engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert ended == [(f"s{i}", 0) for i in range(40)]
    assert engine.scheduler.schedule().finished_req_ids == [f"s{i}" for i in range(40)]


# ── preemption ──────────────────────────────────────────────────────────────────────────────────────────


def until_preemption(engine: Engine) -> SchedulerOutput:
    for _ in range(100):
        if (output := engine.step()).preempted_req_ids:
            return output
    raise AssertionError("nobody was preempted")


def test_fcfs_preempts_the_last_admitted_and_brings_it_back_first() -> None:
    engine = make_engine(num_blocks=6, max_num_seqs=3, enable_prefix_caching=False)
    for name in "abc":
        engine.add(name, tokens_of(10 * ord(name), 7))
    engine.add("d", tokens_of(0, 3))
    output = until_preemption(engine)
    assert output.preempted_req_ids == ["c"] and list(output.num_scheduled_tokens) == ["a", "b"]
    assert not output.scheduled_new_reqs  # nobody is admitted in a step that preempts
    assert [request.request_id for request in engine.scheduler.waiting] == ["c", "d"]
    engine.run()
    for name in "abc":
        assert engine.tokens(name) == reference(tokens_of(10 * ord(name), 7), make_params(), 24)[0]


def test_preempted_request_starts_again_from_its_own_tokens() -> None:
    """It is computed again as one prompt, output included, from what the cache still holds. REGRESSIONS row 4: no stale count."""
    engine = make_engine(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=4)
    engine.add("a", tokens_of(0, 8), make_params(max_tokens=9))
    engine.add("b", tokens_of(50, 8), make_params(max_tokens=9))
    assert until_preemption(engine).preempted_req_ids == ["b"]
    request = engine.scheduler.requests["b"]
    assert (request.status, request.num_computed_tokens, request.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    known = request.num_tokens
    assert known > 8
    while not (output := engine.step()).scheduled_new_reqs:
        pass
    [new] = output.scheduled_new_reqs
    assert (new.req_id, new.num_prompt_tokens, len(new.prefill_token_ids)) == ("b", 8, known)
    assert request.num_cached_tokens == new.num_computed_tokens
    engine.run()
    assert engine.tokens("b") == reference(tokens_of(50, 8), make_params(max_tokens=9), 24)[0]


def test_resumed_request_is_sampled_at_its_last_known_token_only() -> None:
    """The chunks of a recompute may end past the prompt, inside the output: those are still no tokens. REGRESSIONS row 5."""
    engine = make_engine(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=10, enable_prefix_caching=False)
    for name, first in [("a", 0), ("b", 50)]:
        engine.add(name, tokens_of(first, 8), make_params(max_tokens=9))
    until_preemption(engine)
    while not (output := engine.step()).scheduled_new_reqs:
        pass
    [new] = output.scheduled_new_reqs
    assert new.num_prompt_tokens < output.num_scheduled_tokens["b"] < len(new.prefill_token_ids)
    assert output.sampled_req_ids == []
    assert engine.step().sampled_req_ids == ["b"]
    engine.run()
    assert engine.tokens("b") == reference(tokens_of(50, 8), make_params(max_tokens=9), 24)[0]


def test_priority_victim_scheduled_in_this_step_gives_its_budget_back() -> None:
    """The least important may already be in the step when blocks run out: its tokens are free again, and nothing of it stays in."""
    engine = make_engine(num_blocks=4, scheduling_policy="priority")
    engine.add("low", tokens_of(0, 6), make_params(max_tokens=50), priority=5)
    engine.step()
    engine.add("high", tokens_of(20, 8), make_params(max_tokens=50), priority=0)
    output = until_preemption(engine)
    assert output.preempted_req_ids == ["low"]
    assert output.num_scheduled_tokens == {"high": 1} and output.total_num_scheduled_tokens == 1
    assert output.scheduled_cached_reqs.req_ids == output.sampled_req_ids == ["high"]
    engine.run()


def test_kv_of_a_cancelled_step_is_never_a_hit() -> None:
    """A victim's blocks that only this step would have written are not published: its return computes them."""
    engine = make_engine(num_blocks=6, long_prefill_token_threshold=6, scheduling_policy="priority")
    engine.add("low", tokens_of(0, 20), make_params(max_tokens=3), priority=5)
    engine.add("other", [50], make_params(max_tokens=1), priority=9)
    engine.step()
    engine.add("high", tokens_of(60, 4), make_params(max_tokens=3), priority=0)
    engine.step()
    # This step first gives "low" tokens 12 to 17, which fill its block 3 and take the last free block, then "high" needs one.
    assert engine.step().preempted_req_ids == ["low"]
    while not (output := engine.step()).scheduled_new_reqs:
        pass
    assert output.scheduled_new_reqs[0].num_computed_tokens == 12
    engine.run()


# ── limits ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("num_blocks", "max_model_len", "effective"), [(5, 1000, 20), (500, 32, 32)])
def test_prompt_that_can_never_fit_is_refused_with_both_numbers(num_blocks: int, max_model_len: int, effective: int) -> None:
    engine = make_engine(num_blocks=num_blocks, max_model_len=max_model_len)
    assert engine.scheduler.max_model_len == effective
    with pytest.raises(VLLMValidationError, match=f"{effective} tokens.*max_model_len is {effective}") as error:
        engine.add("long", tokens_of(0, effective))
    assert error.value.parameter == "prompt_token_ids"
    assert not engine.scheduler.has_requests()
    engine.add("fits", tokens_of(0, effective - 1))
    engine.run()
    assert len(engine.tokens("fits")) == 1
    assert engine.outputs["fits"][-1].finish_reason is FinishReason.LENGTH


def test_prompt_as_long_as_the_engine_is_refused() -> None:
    """It would leave no room for a single output token, and a scheduler that took it could never finish it."""
    engine = make_engine(num_blocks=5)
    with pytest.raises(VLLMValidationError):
        engine.add("long", tokens_of(0, 20))


def test_what_outgrows_the_engine_ends_by_length() -> None:
    """Two requests that want more than the whole pool: each ends at its capacity, none is retried for ever. REGRESSIONS row 3."""
    engine = make_engine(num_blocks=4)
    for name in "ab":
        engine.add(name, tokens_of(10 * ord(name), 5), make_params(max_tokens=10_000))
    engine.run(max_steps=200)
    for name in "ab":
        assert len(engine.tokens(name)) == 16 - 5
        assert engine.outputs[name][-1].finish_reason is FinishReason.LENGTH


def test_live_request_id_is_refused_and_a_finished_one_is_free() -> None:
    engine = make_engine()
    engine.add("r", [1, 2, 3], make_params(max_tokens=2))
    with pytest.raises(VLLMValidationError, match="in use"):
        engine.scheduler.add_request(engine.request("r", [4]))
    engine.run()
    first = engine.tokens("r")
    engine.add("r", [1, 2, 3], make_params(max_tokens=2))
    engine.run()
    assert engine.tokens("r") == first == reference([1, 2, 3], make_params(max_tokens=2), 400)[0]


# ── prefix cache ────────────────────────────────────────────────────────────────────────────────────────


def test_exact_repeat_shares_blocks_with_the_running_original() -> None:
    """The second is a hit while the first still runs, and ends first: the first must keep its blocks. REGRESSIONS row 6."""
    engine = make_engine(num_blocks=12)
    engine.add("a", tokens_of(0, 8), make_params(max_tokens=12))
    engine.add("b", tokens_of(0, 8), make_params(max_tokens=2))
    first = engine.step()
    assert [new.num_computed_tokens for new in first.scheduled_new_reqs] == [0, 4]
    assert first.scheduled_new_reqs[0].block_ids[0] == first.scheduled_new_reqs[1].block_ids[0]
    for i in range(4):
        engine.add(f"filler{i}", tokens_of(100 + 10 * i, 8), make_params(max_tokens=2))
    engine.run()
    assert engine.tokens("a") == reference(tokens_of(0, 8), make_params(max_tokens=12), 48)[0]


def test_reused_block_is_no_longer_a_hit() -> None:
    """After its blocks went to somebody else, a prompt is computed again. REGRESSIONS row 1."""
    engine = make_engine(num_blocks=4, max_num_seqs=1)
    for name, first in [("a", 0), ("b", 50), ("c", 100), ("again", 0)]:
        engine.add(name, tokens_of(first, 9), make_params(max_tokens=4))
    engine.run()
    assert engine.tokens("again") == engine.tokens("a")
    assert engine.seen["hit"] == 0 and engine.scheduler.kv_cache_manager.statistics().num_evictions > 0


def test_prefix_is_evicted_from_its_tail() -> None:
    """A little pressure costs a prompt its last blocks, not the first, without which the others are worthless."""
    engine = make_engine(num_blocks=6, max_num_seqs=1)
    for name, prompt in [("a", tokens_of(0, 17)), ("b", tokens_of(50, 7)), ("again", tokens_of(0, 17))]:
        engine.add(name, prompt, make_params(max_tokens=1))
    steps = [engine.step() for _ in range(3)]
    assert [step.scheduled_new_reqs[0].num_computed_tokens for step in steps] == [0, 0, 16]
    engine.add("c", tokens_of(100, 15), make_params(max_tokens=1))
    engine.run()
    engine.add("once more", tokens_of(0, 17))
    assert engine.step().scheduled_new_reqs[0].num_computed_tokens == 8


def test_salts_do_not_share() -> None:
    engine = make_engine()
    for name, salt in [("a", None), ("b", "x"), ("c", "x"), ("d", "y")]:
        engine.add(name, tokens_of(0, 9), cache_salt=salt)
    assert [new.num_computed_tokens for new in engine.step().scheduled_new_reqs] == [0, 0, 8, 0]


def test_reset_prefix_cache() -> None:
    engine = make_engine()
    engine.add("a", tokens_of(0, 9), make_params(max_tokens=3))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.make_stats().prefix_cache_stats.reset
    engine.add("b", tokens_of(0, 9))
    assert engine.step().scheduled_new_reqs[0].num_computed_tokens == 0


# ── cost ────────────────────────────────────────────────────────────────────────────────────────────────


def test_waiting_head_costs_one_lookup_a_step() -> None:
    """A long prompt that does not fit is not looked up again block by block every step, and is admitted as soon as it fits."""
    engine = make_engine(num_blocks=60, max_num_batched_tokens=256)
    engine.add("seed", tokens_of(0, 161), make_params(max_tokens=1))
    engine.run()
    engine.add("running", tokens_of(300, 80), make_params(max_tokens=30))
    engine.step()
    engine.add("waiting", [*tokens_of(0, 160), *tokens_of(1000, 60)], make_params(max_tokens=1))
    engine.step()
    assert engine.counts() == (1, 1)
    pool = engine.scheduler.kv_cache_manager.block_pool
    lookups: list[bytes] = []
    pool.get_cached_block = lambda h: lookups.append(h) or type(pool).get_cached_block(pool, h)  # type: ignore[method-assign, func-returns-value]
    steps = 0
    while "running" in engine.scheduler.requests:
        engine.step()
        steps += 1
    assert steps == 28 and len(lookups) <= steps
    assert "waiting" in engine.step().num_scheduled_tokens


def test_idle_engine_checks_itself() -> None:
    """Fully, not only its counters: a leaked reference is found when the engine runs out of work."""
    engine = make_engine()
    engine.add("a", tokens_of(0, 9), make_params(max_tokens=1))
    engine.step()
    engine.scheduler.kv_cache_manager.block_pool.blocks[3].ref_cnt = 1
    with pytest.raises(AssertionError):
        engine.scheduler.schedule()


def test_abort_order_is_the_callers() -> None:
    """Blocks are freed in that order, so every later allocation depends on it. REGRESSIONS row 22."""
    engine = make_engine(max_num_seqs=40)
    for i in range(40):
        engine.add(f"r{i}", [i])
    engine.step()
    ids = [f"r{i}" for i in reversed(range(40))]
    assert [request_id for request_id, _ in engine.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)] == ids
    assert engine.step().finished_req_ids == ids


def test_abort_is_idempotent_and_names_the_clients() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add("a", [1, 2], client_index=1)
    engine.add("b", [3, 4], client_index=2)
    engine.step()
    scheduler = engine.scheduler
    assert scheduler.finish_requests(["b", "nobody", "a", "b"], RequestStatus.FINISHED_ABORTED) == [("b", 2), ("a", 1)]
    assert scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED) == []
    assert engine.counts() == (0, 0) and not scheduler.requests and scheduler.has_requests()  # the worker has to be told
    assert engine.step().finished_req_ids == ["b", "a"]
    assert not scheduler.has_requests()


# ── overlay seams ───────────────────────────────────────────────────────────────────────────────────────


def test_overlay_parts_take_the_place_of_ours(tmp_path: Path) -> None:
    """A learner's schedule() and BlockPool really run, in this engine only."""
    schedule, pool = tmp_path / "schedule.py", tmp_path / "pool.py"
    schedule.write_text("def schedule(self):\n    self.calls = getattr(self, 'calls', 0) + 1\n    return type(self).schedule(self)\n")
    pool.write_text("from mini_engine.kv_cache import block_pool\nclass BlockPool(block_pool.BlockPool):\n    theirs = True\n")
    engine = make_engine(overlay={"scheduler.schedule": str(schedule), "kv_cache.block_pool": str(pool)})
    engine.add("r", [1, 2, 3], make_params(max_tokens=4))
    engine.run()
    assert engine.tokens("r") == reference([1, 2, 3], make_params(max_tokens=4), 400)[0]
    assert engine.scheduler.calls == engine.seen["step"] == 5  # type: ignore[attr-defined]
    assert engine.scheduler.kv_cache_manager.block_pool.theirs  # type: ignore[attr-defined]
    assert type(make_engine().scheduler.kv_cache_manager.block_pool).__module__ == "mini_engine.kv_cache.block_pool"
