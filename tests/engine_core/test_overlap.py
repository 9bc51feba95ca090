"""EngineCore.step_with_batch_queue: the next step is on its way before the last one's result is looked at, and nobody can tell.

The device of these tests runs a step when the test says so.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.config import EngineConfig, MockConfig
from mini_engine.engine_core.core import EngineCore
from mini_engine.engine_core.inproc import InprocClient
from mini_engine.executor.mock import MockExecutor, mock_generate
from mini_engine.scheduler.async_scheduler import AsyncScheduler
from mini_engine.scheduler.scheduler import Scheduler
from mini_engine.step import ModelRunnerOutput, SchedulerOutput
from mini_engine.wire.messages import FinishReason
from tests.engine_core.harness import VOCAB_SIZE, Streams, make_request, mock_config
from tests.tiny_model import load_reference, make_tiny_model, reference_greedy

DEADLINE_S = 20


class GatedExecutor(MockExecutor):
    """A mock device that does a step for each release()."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._may_run = threading.Semaphore(0)
        self.handed_over = 0

    def release(self, steps: int = 1) -> None:
        self._may_run.release(steps)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False):  # type: ignore[no-untyped-def]
        self.handed_over += 1
        return super().execute_model(scheduler_output, non_block)

    def _forward(self, scheduler_output: SchedulerOutput, handed_over: float) -> ModelRunnerOutput | None:
        assert self._may_run.acquire(timeout=DEADLINE_S), "nobody released the step"
        return super()._forward(scheduler_output, handed_over)


@pytest.fixture
def gated(model: Path) -> Iterator[tuple[EngineCore, GatedExecutor]]:
    config = mock_config(model)
    executor = GatedExecutor(config)
    engine = EngineCore(config, executor)
    yield engine, executor
    executor.release(100)
    engine.shutdown()


def add(engine: EngineCore, request_id: str, prompt: list[int], max_tokens: int = 9, **params: object) -> None:
    assert engine.admit(engine.preprocess(make_request(request_id, prompt, max_tokens, **params))) is None


def tokens(outputs: dict, request_id: str) -> list[int]:
    return [token for message in outputs.values() for out in message.outputs if out.request_id == request_id for token in out.new_token_ids]


# ── what the queue does ─────────────────────────────────────────────────────────────────────────────────


def test_second_step_is_handed_over_before_the_first_has_run(gated: tuple[EngineCore, GatedExecutor]) -> None:
    engine, executor = gated
    add(engine, "r", [1, 2], 3)
    assert engine.step_fn() == ({}, True)  # there is room in the queue: no waiting
    assert executor.handed_over == 1 and len(engine.batch_queue) == 1
    executor.release()
    outputs, executed = engine.step_fn()
    assert executed and tokens(outputs, "r") == mock_generate([1, 2], 1, VOCAB_SIZE)
    assert executor.handed_over == 2  # its input is the token just reported, which it had without us
    assert not engine.batch_queue[0].forward.done()


def test_the_twins_take_the_same_steps(gated: tuple[EngineCore, GatedExecutor]) -> None:
    """step() of an engine that could overlap leaves nothing in flight."""
    engine, executor = gated
    add(engine, "r", [1, 2], 2)
    executor.release(3)
    assert tokens(engine.step()[0], "r") + tokens(engine.step()[0], "r") == mock_generate([1, 2], 2, VOCAB_SIZE)
    assert not engine.batch_queue and engine.has_work()  # the device has to be told
    assert engine.step()[1] is False
    assert not engine.has_work() and engine.step() == ({}, False) == engine.step_with_batch_queue()


def test_extra_step_at_the_end(gated: tuple[EngineCore, GatedExecutor]) -> None:
    """A stop token is seen when the step after it is in flight: that step's token goes nowhere, and then the device forgets."""
    engine, executor = gated
    right = mock_generate([1, 2], 3, VOCAB_SIZE)
    add(engine, "r", [1, 2], 9, stop_token_ids=[right[2]])
    executor.release(100)
    streams = Streams()
    calls = 0
    while engine.has_work():
        outputs, _ = engine.step_fn()
        calls += 1
        for message in outputs.values():
            streams.add(message)
    assert streams.tokens["r"] == right and streams.last["r"].finish_reason is FinishReason.STOP
    assert executor.handed_over == 5  # 3 tokens, one too many, one empty
    assert executor._requests == {} and engine.scheduler.kv_cache_manager.usage == 0
    assert streams.stats[-1].kv_cache_usage == 0.0


def test_abort_while_two_steps_are_in_flight(gated: tuple[EngineCore, GatedExecutor]) -> None:
    """It arrives while the loop waits for the first of them: neither step's token is anybody's, and the same id may come again at once."""
    engine, executor = gated
    add(engine, "r", [1, 2])
    engine.step_fn()
    engine.aborts_queue.put(["r"])
    executor.release()
    outputs, _ = engine.step_fn()
    assert tokens(outputs, "r") == []
    engine.abort_requests_in_order(["r"])
    add(engine, "r", [7, 8, 9], 2)
    executor.release(100)
    streams = Streams()
    while engine.has_work():
        for message in engine.step_fn()[0].values():
            streams.add(message)
    assert streams.tokens["r"] == mock_generate([7, 8, 9], 2, VOCAB_SIZE)


def test_reset_waits_for_a_step_that_nobody_else_waits_for(gated: tuple[EngineCore, GatedExecutor]) -> None:
    engine, executor = gated
    add(engine, "r", list(range(40)), 2, stop_token_ids=mock_generate(list(range(40)), 1, VOCAB_SIZE))
    executor.release(2)
    engine.step_fn()
    outputs, _ = engine.step_fn()
    assert outputs[0].outputs[0].finish_reason is FinishReason.STOP
    assert engine.scheduler.kv_cache_manager.usage > 0  # held for the step in flight
    assert engine.reset_prefix_cache() is True
    assert engine.scheduler.kv_cache_manager.statistics().num_cached_blocks == 0
    add(engine, "again", list(range(40)), 9)
    assert engine.reset_prefix_cache() is True  # queued requests hold no blocks
    executor.release(100)
    engine.step_fn()
    assert engine.reset_prefix_cache() is False


def test_device_failure_is_the_forwards(model: Path) -> None:
    """Raised when its step is accounted for, though what is behind it in the device's queue may have done something."""
    engine = EngineCore(mock_config(model, MockConfig(num_blocks=64, crash_at_step=1)))
    add(engine, "r", [1])
    engine.step_fn()
    with pytest.raises(RuntimeError, match="crash at step 1"):
        engine.step_fn()
    engine.shutdown()


# ── depth 2 = depth 1 ───────────────────────────────────────────────────────────────────────────────────


@given(st.data())
def test_any_trace_gives_the_same_with_and_without_overlap(model: Path, data: st.DataObject) -> None:
    """Arrivals, priorities, shared prefixes, a tiny pool, stops, aborts in and between steps; check=True looks at every step."""
    shape = {
        "block_size": data.draw(st.sampled_from([1, 4])),
        "num_gpu_blocks_override": data.draw(st.integers(14, 40)),
        "max_num_batched_tokens": data.draw(st.integers(4, 64)),
        "max_num_seqs": 4,
        "scheduling_policy": data.draw(st.sampled_from(["fcfs", "priority"])),
    }
    num_requests = data.draw(st.integers(1, 9))
    prompts = [data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)) for _ in range(num_requests)]
    answers = [mock_generate(prompt, 20, VOCAB_SIZE) for prompt in prompts]
    stops = [data.draw(st.sampled_from([None, *answer[:6]])) for answer in answers]
    lengths = [data.draw(st.integers(1, 12)) for _ in prompts]
    script = data.draw(st.lists(st.tuples(st.sampled_from(["step", "step", "abort", "abort early"]), st.integers(0, num_requests - 1))))
    results = []
    for async_scheduling in ("off", "on"):
        engine = EngineCore(mock_config(model, async_scheduling=async_scheduling, **shape))
        streams, aborted, arrived = Streams(), set(), 0
        moves = list(script)
        while moves or arrived < num_requests or engine.has_work():
            if arrived < num_requests:
                request = make_request(
                    str(arrived), prompts[arrived], lengths[arrived], stop_token_ids=[stops[arrived]] * bool(stops[arrived])
                )
                request.priority = arrived % 3
                refused = engine.admit(engine.preprocess(request))
                if refused is not None:
                    streams.add(refused)
                arrived += 1
            move, victim = moves.pop() if moves else ("step", 0)
            if move == "abort":
                engine.abort_requests([str(victim)])
                aborted.add(str(victim))
            elif move == "abort early":
                engine.aborts_queue.put([str(victim)])
                aborted.add(str(victim))
            for message in engine.step_fn()[0].values():
                streams.add(message)
        assert engine.scheduler.kv_cache_manager.usage == 0
        engine.shutdown()
        for i in range(num_requests):
            got = streams.tokens[str(i)]
            assert got == answers[i][: len(got)]
        results.append({i: (streams.tokens[i], out.finish_reason, out.stop_reason) for i, out in streams.last.items() if i not in aborted})
        assert len(results[-1]) == num_requests - len(aborted & {str(i) for i in range(num_requests)})
    assert results[0] == results[1]


@pytest.mark.parametrize("num_blocks", [9, 40])
def test_real_model_gives_the_same_with_and_without_overlap(tmp_path: Path, num_blocks: int) -> None:
    """On the CPU, where it is off unless asked for. Logprobs and penalties too: the worker's memory of a request runs one step ahead."""
    directory = make_tiny_model(tmp_path)
    prompts = [[5, 9, 77, 31], [5, 9, 77, 31, 8, 4, 100], [200, 3, 3, 50, 60]]
    params = [{"logprobs": 2}, {"repetition_penalty": 1.3, "min_tokens": 4}, {"temperature": 0.9, "seed": 4}]
    streams = []
    for async_scheduling in ("auto", "on"):
        client = InprocClient(
            EngineConfig(
                model=str(directory),
                device="cpu",
                num_threads=1,
                block_size=4,
                num_gpu_blocks_override=num_blocks,
                max_num_batched_tokens=8,
                max_num_seqs=4,
                async_scheduling=async_scheduling,  # type: ignore[arg-type]
                check=True,
            )
        )
        assert client.engine_core.batch_queue_size == (2 if async_scheduling == "on" else 1)
        streams.append(Streams())
        for i, prompt in enumerate(prompts):
            request = make_request(str(i), prompt, 14)
            for name, value in params[i].items():
                setattr(request.sampling_params, name, value)
            client.add_request(request)
        while client.engine_core.has_work():
            streams[-1].add(client.get_output())
        client.shutdown()
    assert streams[0].tokens == streams[1].tokens
    assert streams[0].tokens["0"] == reference_greedy(load_reference(directory), prompts[0], 14)


# ── when ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "overlaps", "size"),
    [("auto", True, 2), ("auto", False, 1), ("on", True, 2), ("on", False, 2), ("off", True, 1), ("off", False, 1)],
)
def test_on_where_it_helps_or_is_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: str, overlaps: bool, size: int
) -> None:
    monkeypatch.setattr(MockExecutor, "overlaps", overlaps)
    caplog.set_level("INFO")
    engine = EngineCore(mock_config(model, async_scheduling=asked))
    assert engine.batch_queue_size == size and type(engine.scheduler) is (AsyncScheduler if size == 2 else Scheduler)
    assert f"async scheduling is {'on' if size == 2 else 'off'} (async_scheduling={asked})" in caplog.text
    engine.shutdown()


def test_a_learners_schedule_turns_it_off(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    theirs = tmp_path / "schedule.py"
    theirs.write_text("def schedule(self):\n    return type(self).schedule(self)\n")
    engine = EngineCore(mock_config(model, async_scheduling="on", overlay={"scheduler.schedule": str(theirs)}))
    assert engine.batch_queue_size == 1 and "async scheduling is off (the schedule()" in caplog.text
    engine.shutdown()
