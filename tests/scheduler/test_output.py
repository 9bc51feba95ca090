"""What a step's result becomes: when a request is over, what its client is told, and which numbers come along."""

import time

import numpy as np
import pytest

from mini_engine.config import EngineConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.kv_cache.block_hash import get_request_block_hasher
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler.request import Request, RequestStatus
from mini_engine.scheduler.scheduler import Scheduler
from mini_engine.scheduler.utils import check_stop
from mini_engine.step import ModelRunnerOutput
from mini_engine.wire.messages import EngineCoreEventType, EngineCoreOutputs, EngineCoreRequest, FinishReason, LogprobsLists
from tests.scheduler.traces import Engine, make_params


def make_engine(**config: object) -> Engine:
    return Engine(EngineConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=64, **config), 50)  # type: ignore[arg-type]


def run_step(scheduler: Scheduler, **result: object) -> dict[int, EngineCoreOutputs]:
    output = scheduler.schedule()
    tokens = [[9] for _ in output.sampled_req_ids]
    return scheduler.update_from_output(
        output, ModelRunnerOutput(**{"req_ids": output.sampled_req_ids, "sampled_token_ids": tokens, **result})
    )


# ── check_stop ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("token", "params", "status", "stop_reason"),
    [
        (7, make_params(eos=7, stop=[7], max_tokens=1), RequestStatus.FINISHED_STOPPED, None),  # EOS before stop ids: no stop_reason
        (7, make_params(stop=[6, 7], max_tokens=1), RequestStatus.FINISHED_STOPPED, 7),  # stop ids before length
        (7, make_params(stop=[6], max_tokens=1), RequestStatus.FINISHED_LENGTH_CAPPED, None),
        (7, make_params(stop=[6], max_tokens=2), None, None),
        (7, SamplingParams(max_tokens=9, min_tokens=5, stop_token_ids=[7]), RequestStatus.FINISHED_STOPPED, 7),  # masked, not asked
        (7, SamplingParams(max_tokens=5, min_tokens=5, ignore_eos=True), None, None),
    ],
)
def test_check_stop_order(token: int, params: SamplingParams, status: RequestStatus | None, stop_reason: int | None) -> None:
    request = Request("r", [1, 2], params)
    request.append_output_token_id(token)
    assert check_stop(request) == (status is not None)
    assert request.status == (status or RequestStatus.WAITING) and request.stop_reason == stop_reason


def test_last_allowed_token_may_still_stop() -> None:
    test_check_stop_order(7, make_params(stop=[7], max_tokens=1), RequestStatus.FINISHED_STOPPED, 7)


def test_check_stop_at_max_model_len() -> None:
    request = Request("r", [1, 2], make_params(max_tokens=50))
    request.max_num_tokens = 4  # as a scheduler with that max_model_len lowers it
    request.append_output_token_id(3)
    assert not check_stop(request)
    request.append_output_token_id(3)
    assert check_stop(request) and request.status.finish_reason is FinishReason.LENGTH


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────


def test_stop_token_is_sent_and_nothing_after_it() -> None:
    """Also when a step brings several tokens for a request."""
    engine = make_engine()
    engine.add("r", [1, 2], make_params(max_tokens=50, stop=[5]))
    output = engine.scheduler.schedule()
    [message] = engine.scheduler.update_from_output(output, ModelRunnerOutput(["r"], [[4, 5, 6]])).values()
    [out] = message.outputs
    assert (out.new_token_ids, out.finish_reason, out.stop_reason) == ([4, 5], FinishReason.STOP, 5)
    assert out.num_nans_in_logits == 0  # nil here kills a stock front-end


def test_prompt_chunk_makes_no_output() -> None:
    engine = make_engine(long_prefill_token_threshold=3)
    engine.add("long", list(range(8)))
    engine.add("short", [1])
    assert [[out.request_id for out in run_step(engine.scheduler)[0].outputs] for _ in range(3)] == [
        ["short"],
        ["short"],
        ["long", "short"],
    ]


def test_messages_are_per_client_and_one_carries_the_stats() -> None:
    engine = make_engine()
    for i, client in enumerate([2, 0, 2]):
        engine.add(f"r{i}", [i], client_index=client)
    messages = run_step(engine.scheduler)
    assert {client: [out.request_id for out in message.outputs] for client, message in messages.items()} == {2: ["r0", "r2"], 0: ["r1"]}
    assert [message.scheduler_stats is not None for message in messages.values()] == [True, False]


def test_step_without_outputs_still_carries_stats_to_client_0() -> None:
    engine = make_engine()
    engine.add("r", [1, 2], make_params(max_tokens=1), client_index=3)
    assert run_step(engine.scheduler)[3].outputs[0].finish_reason is FinishReason.LENGTH
    assert engine.scheduler.has_requests()  # the worker has to be told
    output = engine.scheduler.schedule()
    assert output.total_num_scheduled_tokens == 0 and output.finished_req_ids == ["r"]
    messages = engine.scheduler.update_from_output(output, ModelRunnerOutput())
    assert list(messages) == [0] and messages[0].outputs == [] and messages[0].scheduler_stats is not None
    assert not engine.scheduler.has_requests()


def test_stats_are_levels_and_prefix_counts_since_the_last_message() -> None:
    engine = make_engine()
    for name in ("a", "b"):
        engine.add(name, list(range(9)), make_params(max_tokens=2))
    stats = run_step(engine.scheduler)[0].scheduler_stats
    assert stats is not None and (stats.num_running_reqs, stats.num_waiting_reqs) == (2, 0)
    assert stats.kv_cache_usage == pytest.approx(4 / 49)
    assert (stats.prefix_cache_stats.requests, stats.prefix_cache_stats.queries, stats.prefix_cache_stats.hits) == (2, 18, 8)
    stats = run_step(engine.scheduler)[0].scheduler_stats
    assert stats is not None and (stats.num_running_reqs, stats.kv_cache_usage, stats.prefix_cache_stats.queries) == (0, 0.0, 0)


def test_aborted_in_flight_says_nothing() -> None:
    engine = make_engine()
    engine.add("a", [1, 2])
    engine.add("b", [3, 4])
    engine.step(abort_in_flight=["a"])
    assert engine.outputs["a"] == [] and len(engine.outputs["b"]) == 1


def test_logprob_rows_belong_to_their_request() -> None:
    """Row i is the i-th sampled token of the step, whether or not its request asked, or is still there."""
    engine = make_engine()
    for name, logprobs in [("gone", 1), ("no", None), ("yes", 1)]:
        engine.add(name, [1, 2], make_params(logprobs=logprobs))
    output = engine.scheduler.schedule()
    engine.abort(["gone"])
    rows = LogprobsLists(np.arange(6).reshape(3, 2), np.arange(6.0).reshape(3, 2), np.arange(3))
    result = ModelRunnerOutput(output.sampled_req_ids, [[7], [8], [9]], logprobs=rows)
    no, yes = engine.scheduler.update_from_output(output, result)[0].outputs
    assert no.new_logprobs is None and yes.new_logprobs is not None
    assert yes.new_logprobs.logprob_token_ids.tolist() == [[4, 5]] and yes.new_logprobs.sampled_token_ranks.tolist() == [2]


# ── events and prefill stats ────────────────────────────────────────────────────────────────────────────


def test_events_and_prefill_stats_come_with_the_first_output_only() -> None:
    before = time.monotonic()
    engine = make_engine()
    for name in ("a", "b"):
        engine.add(name, list(range(10)))
    first, second = run_step(engine.scheduler)[0].outputs
    for out in (first, second):
        assert out.events is not None
        assert [event.type for event in out.events] == [EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]
        assert before <= out.events[0].timestamp <= out.events[1].timestamp <= time.monotonic()
    a, b = first.prefill_stats, second.prefill_stats
    assert a is not None and (a.num_prompt_tokens, a.num_computed_tokens, a.num_cached_tokens, a.num_cache_creation_tokens) == (
        10,
        10,
        0,
        8,
    )
    assert b is not None and (b.num_prompt_tokens, b.num_computed_tokens, b.num_cached_tokens, b.num_cache_creation_tokens) == (10, 2, 8, 0)
    assert b.num_local_cached_tokens == 8
    assert all(out.events is None and out.prefill_stats is None for out in run_step(engine.scheduler)[0].outputs)


def test_preemption_is_an_event_and_keeps_the_first_prefill_stats() -> None:
    engine = Engine(EngineConfig(block_size=4, max_num_seqs=2, max_num_batched_tokens=64), 5)
    for name, prompt in [("a", [1, 2, 3]), ("b", [4, 5, 6])]:
        engine.add(name, prompt, make_params(max_tokens=12))
    engine.run()
    events = [event.type.name for out in engine.outputs["b"] for event in out.events or []]
    assert events == ["QUEUED", "SCHEDULED", "PREEMPTED", "SCHEDULED"]
    assert [out.prefill_stats is not None for out in engine.outputs["b"]] == [True] + [False] * 11


def test_cache_creation_counts_from_the_first_admission() -> None:
    """A request preempted before its first output reports what its *first* lookup found; seen by comparison with vLLM's scheduler."""
    engine = Engine(EngineConfig(block_size=4, max_num_seqs=3, max_num_batched_tokens=64, long_prefill_token_threshold=4), 7)
    for name, prompt in [("a", list(range(7))), ("b", list(range(50, 66)))]:
        engine.add(name, prompt, make_params(max_tokens=12))
    engine.run()
    assert [e.type.name for e in engine.outputs["b"][0].events or []] == ["QUEUED", "SCHEDULED", "PREEMPTED", "SCHEDULED"]
    stats = engine.outputs["b"][0].prefill_stats
    assert stats is not None and engine.seen["resumed with a hit"] + engine.seen["hit"] > 0
    assert (stats.num_prompt_tokens, stats.num_computed_tokens, stats.num_cached_tokens, stats.num_cache_creation_tokens) == (16, 16, 0, 16)


# ── what an ADD may ask for ─────────────────────────────────────────────────────────────────────────────


def make_add(prompt: list[int] | None = [1, 2], params: SamplingParams | None = SamplingParams(), **more: object) -> EngineCoreRequest:  # noqa: B006
    return EngineCoreRequest("r", prompt, None, params, None, 1.0, None, None, None, **more)  # type: ignore[arg-type]


def test_request_from_add() -> None:
    add = make_add(list(range(9)), make_params(max_tokens=3), client_index=2, priority=-1)
    request = Request.from_engine_core_request(add, get_request_block_hasher(4))
    assert (request.request_id, request.client_index, request.priority, request.arrival_time) == ("r", 2, -1, 1.0)
    assert len(request.block_hashes) == 2 and request.num_tokens == request.num_prompt_tokens == 9
    request.append_output_token_id(5)
    assert add.prompt_token_ids == list(range(9)) and request.all_token_ids[9:] == [5]  # the sender's list is not ours to grow


@pytest.mark.parametrize(
    ("add", "parameter"),
    [
        (make_add(prompt=None), "prompt_token_ids"),
        (make_add(prompt=[]), "prompt_token_ids"),
        (make_add(params=None), "sampling_params"),
        (make_add(params=SamplingParams(max_tokens=None)), "max_tokens"),
        (make_add(params=SamplingParams(structured_outputs={"regex": "a"})), "structured_outputs"),
        (make_add(params=SamplingParams(thinking_token_budget=5)), "thinking_token_budget"),
        (make_add(params=SamplingParams(repetition_detection={"min_count": 3})), "repetition_detection"),
        (make_add(params=SamplingParams(logprob_token_ids=[1])), "logprob_token_ids"),
        (make_add(resumable=True), "resumable"),
        (make_add(prompt_embeds=["float32", [1, 8], 1]), "prompt_embeds"),
    ],
)
def test_what_would_change_tokens_is_refused_by_name(add: EngineCoreRequest, parameter: str) -> None:
    with pytest.raises(VLLMValidationError, match=parameter) as error:
        Request.from_engine_core_request(add)
    assert error.value.parameter == parameter


def test_what_cannot_change_tokens_is_ignored() -> None:
    """vllm-rs sends some of these with every request."""
    Request.from_engine_core_request(make_add(reasoning_ended=False, reasoning_parser_kwargs={}, session_id="s", external_req_id="x"))
