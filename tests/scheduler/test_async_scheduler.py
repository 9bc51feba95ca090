"""Overlap: a step is scheduled while one is in flight. What is known late, what is known in time, and whose blocks are whose meanwhile.

The engine of these tests (traces.py) keeps one step in flight and checks after every move that no block is both free and touched by it.
"""

import pytest

from mini_engine.config import EngineConfig
from mini_engine.step import SchedulerOutput
from mini_engine.wire.messages import FinishReason
from tests.scheduler.traces import Engine, make_params, reference


def make_engine(num_blocks: int = 100, **config: object) -> Engine:
    """num_blocks: to use, the null block not counted."""
    options = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, **config}
    return Engine(EngineConfig(**options), num_blocks + 1, depth=2)  # type: ignore[arg-type]


def tokens_of(first: int, n: int) -> list[int]:
    return list(range(first, first + n))


def until_preemption(engine: Engine) -> SchedulerOutput:
    for _ in range(100):
        if (output := engine.step()).preempted_req_ids:
            return output
    raise AssertionError("nobody was preempted")


def answer(prompt: list[int], n: int) -> list[int]:
    return reference(prompt, make_params(max_tokens=n), 1 << 30)[0]


# ── placeholders ────────────────────────────────────────────────────────────────────────────────────────


def test_next_step_does_not_wait_for_the_token() -> None:
    engine = make_engine()
    request = engine.add("r", tokens_of(0, 3), make_params(max_tokens=9))
    counters = []
    for _ in range(3):
        engine.step()
        counters.append((request.num_tokens, request.num_output_placeholders, request.num_computed_tokens))
    assert counters == [(3, 1, 3), (4, 1, 4), (5, 1, 5)]  # as seen after the step, when the oldest one has been accounted for
    assert [dict(output.num_scheduled_tokens) for output, _, _ in engine.in_flight] == [{"r": 1}]


def test_length_is_known_in_time() -> None:
    """The last token that a limit allows is in flight: no step is wasted on what comes after it. A stop token is known too late."""
    engine = make_engine()
    engine.add("length", tokens_of(0, 3), make_params(max_tokens=3))
    engine.run()
    assert [list(step[0]) for step in engine.log] == [["length"]] * 3 + [[]] * 2  # nothing to schedule; the worker is told
    engine = make_engine()
    engine.add("stop", tokens_of(0, 3), make_params(stop=[answer(tokens_of(0, 3), 3)[2]]))
    engine.run()
    assert [list(step[0]) for step in engine.log] == [["stop"]] * 4 + [[]]
    assert engine.seen["token of a request that is over"] == 1


def test_whoever_is_skipped_delays_nobody() -> None:
    engine = make_engine()
    engine.add("a", [1], make_params(max_tokens=1))
    engine.add("b", [2], make_params(max_tokens=3))
    assert [list(engine.step().num_scheduled_tokens) for _ in range(3)] == [["a", "b"], ["b"], ["b"]]


def test_prompt_chunks_follow_each_other_without_waiting() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add("r", tokens_of(0, 20), make_params(max_tokens=4))
    assert [engine.step().num_scheduled_tokens["r"] for _ in range(5)] == [8, 8, 4, 1, 1]
    engine.run()
    assert engine.tokens("r") == answer(tokens_of(0, 20), 4)


# ── what is in flight when a request ends ───────────────────────────────────────────────────────────────


def test_blocks_of_an_ended_request_are_held_for_the_step_in_flight() -> None:
    """REGRESSIONS row 7: the result of step 2 ends it while step 3, which computes it once more, may still write its blocks."""
    prompt = tokens_of(0, 7)
    engine = make_engine(num_blocks=4, enable_prefix_caching=False)
    engine.add("a", prompt, make_params(eos=answer(prompt, 2)[1]))
    for _ in range(3):
        engine.step()
    manager = engine.scheduler.kv_cache_manager
    assert engine.outputs["a"][-1].finish_reason is FinishReason.STOP
    assert {step_id: len(blocks) for step_id, blocks in manager.held_blocks.items()} == {3: 3}  # the third is for its 9th token
    engine.add("b", tokens_of(50, 7), make_params(max_tokens=3))
    assert not engine.step().num_scheduled_tokens  # 1 block is free, 2 are needed; then step 3 is accounted for
    assert not manager.held_blocks
    assert engine.step().num_scheduled_tokens == {"b": 7}
    engine.run()
    assert engine.tokens("b") == answer(tokens_of(50, 7), 3)


def test_blocks_of_an_aborted_request_are_held_for_the_step_in_flight() -> None:
    engine = make_engine(num_blocks=3)
    engine.add("a", tokens_of(0, 9))
    engine.step()
    engine.abort(["a"])
    engine.check()
    engine.add("b", tokens_of(50, 9))
    assert not engine.step().num_scheduled_tokens
    assert engine.step().num_scheduled_tokens == {"b": 9}
    engine.run()
    assert engine.tokens("a") == [] and len(engine.tokens("b")) == 3


def test_blocks_are_held_no_longer_than_needed() -> None:
    """A request that ends by length is in no step any more: its blocks are free at once."""
    engine = make_engine()
    engine.add("a", [1, 2], make_params(max_tokens=2))
    engine.add("b", [3, 4], make_params(max_tokens=9))
    for _ in range(3):
        engine.step()
    assert "a" not in engine.scheduler.requests and not engine.scheduler.kv_cache_manager.held_blocks


def test_token_in_flight_is_never_the_next_owners_of_the_id() -> None:
    """Aborted, and the id used again, before the result of a step with the first one is there."""
    engine = make_engine()
    engine.add("r", tokens_of(0, 5))
    for _ in range(3):
        engine.step()
    engine.abort(["r"])
    engine.add("r", tokens_of(50, 5), make_params(max_tokens=4))
    engine.run()
    assert engine.tokens("r") == answer(tokens_of(50, 5), 4)
    assert engine.scheduler.requests == {}


# ── preemption ──────────────────────────────────────────────────────────────────────────────────────────


def make_crowd(num_blocks: int = 6, **config: object) -> Engine:
    engine = make_engine(num_blocks, max_num_seqs=3, **config)
    for name in "abc":
        engine.add(name, tokens_of(10 * ord(name), 7), make_params(max_tokens=12))
    return engine


def test_blocks_of_a_preempted_request_are_held_and_nobody_else_gives_way() -> None:
    """They help one step later: until then who needs them sits out, the others go on, and one victim is enough."""
    engine = make_crowd()
    engine.add("d", [7], make_params(max_tokens=2))
    output = until_preemption(engine)
    assert output.preempted_req_ids == ["c"] and not output.num_scheduled_tokens  # "a" and "b" need a block each
    assert not output.scheduled_new_reqs
    assert list(engine.step().num_scheduled_tokens) == ["a", "b"]
    engine.run()
    for name in "abc":
        assert engine.tokens(name) == answer(tokens_of(10 * ord(name), 7), 12), name


def test_nobody_is_admitted_past_a_request_that_sits_out() -> None:
    """Blocks are held for a step in flight, and too few are free: a newcomer must not take those, though they would do for it."""
    engine = make_engine(num_blocks=8, long_prefill_token_threshold=8, enable_prefix_caching=False)
    engine.add("long", tokens_of(0, 24), make_params(max_tokens=2))
    engine.add("other", tokens_of(50, 8))
    engine.step()  # 2 blocks each
    engine.step()  # 4 and 3: one is free, "long" needs two
    engine.abort(["other"])
    engine.add("new", [99], make_params(max_tokens=1))
    output = engine.step()
    assert output.num_scheduled_tokens == {} and len(engine.scheduler.waiting) == 1
    assert list(engine.step().num_scheduled_tokens) == ["long", "new"]
    engine.run()


def test_preempted_request_still_gets_its_token_in_flight() -> None:
    engine = make_crowd()
    known = len(engine.scheduler.requests["c"].all_token_ids)
    while "c" in {request.request_id for request in engine.scheduler.running} or known == 7:
        known = engine.scheduler.requests["c"].num_tokens
        engine.step()
    assert engine.scheduler.requests["c"].num_tokens == known + 1 and engine.seen["token of a preempted request"] == 1
    engine.run()
    assert engine.tokens("c") == answer(tokens_of(10 * ord("c"), 7), 12)


def test_preempted_request_may_end_in_the_queue() -> None:
    """Its token in flight is the one that ends it."""
    engine = make_crowd()
    until_preemption(engine)
    stop = engine.tokens("c")[-1]
    engine = make_engine(6, max_num_seqs=3)
    for name in "abc":
        engine.add(name, tokens_of(10 * ord(name), 7), make_params(max_tokens=12, eos=stop if name == "c" else None))
    until_preemption(engine)
    assert engine.seen["ended in the queue"] == 1
    assert engine.outputs["c"][-1].finish_reason is FinishReason.STOP and engine.counts() == (2, 0)
    engine.run()


def test_cancelled_part_of_a_step_gives_its_blocks_back_at_once() -> None:
    """A victim that this very step has given a block: no step in flight knows that block."""
    engine = make_engine(num_blocks=6, scheduling_policy="priority", enable_prefix_caching=False)
    engine.add("low", tokens_of(0, 11), make_params(max_tokens=50), priority=5)
    engine.step()
    engine.add("high", tokens_of(20, 8), make_params(max_tokens=50), priority=0)
    engine.step()
    output = engine.step()  # first "low" takes the last free block, then "high" needs one
    assert output.preempted_req_ids == ["low"] and output.num_scheduled_tokens == {"high": 1}
    engine.run()


def test_two_steps_in_flight_are_the_limit() -> None:
    engine = make_engine()
    engine.add("r", [1])
    engine.scheduler.schedule()
    engine.scheduler.schedule()
    with pytest.raises(AssertionError, match=r"steps \[1, 2\]"):
        engine.scheduler.schedule()
