"""IterationStats: counts, and intervals that are only as long as both their ends are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.observe.stats import IterationStats, RequestStateStats
from mini_engine.wire.messages import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason, PrefillStats

EVENTS = [EngineCoreEvent(EngineCoreEventType.QUEUED, 10.0), EngineCoreEvent(EngineCoreEventType.SCHEDULED, 10.5)]


def first_output(**changes: object) -> EngineCoreOutput:
    prefill = PrefillStats(num_prompt_tokens=40, num_computed_tokens=8, num_cached_tokens=32)
    return EngineCoreOutput("r", [7], events=EVENTS, prefill_stats=prefill, **changes)


def test_a_request_from_queue_to_end() -> None:
    request = RequestStateStats(arrival_time=100.0)
    first = IterationStats(iteration_timestamp=101.0)
    first.update_from_output(first_output(), 11.0, request)
    assert first.time_to_first_tokens_iter == [1.0]
    assert (first.num_prompt_tokens, first.num_cached_tokens) == (40, 32)
    last = IterationStats(iteration_timestamp=102.0)
    last.update_from_output(EngineCoreOutput("r", [8, 9], finish_reason=FinishReason.LENGTH), 13.0, request)
    last.update_from_finished_request(FinishReason.LENGTH, 40, 3, request)
    assert last.inter_token_latencies == {2.0: 1}
    (finished,) = last.finished_requests
    assert (finished.e2e_latency, finished.queued_time, finished.prefill_time) == (2.0, 0.5, 0.5)
    assert (finished.decode_time, finished.inference_time, finished.mean_time_per_output_token) == (2.0, 2.5, 1.0)
    assert (finished.num_generation_tokens, finished.num_computed_tokens, finished.max_tokens_param) == (3, 8, 3)


def test_preemption_is_counted_and_moves_no_timestamp() -> None:
    request = RequestStateStats()
    stats = IterationStats()
    stats.update_from_output(first_output(), 11.0, request)
    events = [EngineCoreEvent(EngineCoreEventType.PREEMPTED, 12.0), EngineCoreEvent(EngineCoreEventType.SCHEDULED, 14.0)]
    stats.update_from_output(EngineCoreOutput("r", [8], events=events), 15.0, request)
    assert (stats.num_preempted_reqs, request.num_preemptions, request.scheduled_ts) == (1, 1, 10.5)


def test_without_events_or_tokens_intervals_are_unknown_not_nonsense() -> None:
    """An engine that reports no events, and a request that ended in the queue: None, not a clock reading minus zero."""
    silent = RequestStateStats(arrival_time=100.0)
    stats = IterationStats(iteration_timestamp=101.0)
    stats.update_from_output(EngineCoreOutput("r", [7]), 3555.0, silent)
    stats.update_from_finished_request(FinishReason.STOP, 4, None, silent)
    queued = RequestStateStats(arrival_time=100.0)
    stats.update_from_output(EngineCoreOutput("q", [], events=EVENTS[:1], finish_reason=FinishReason.ABORT), 3556.0, queued)
    stats.update_from_finished_request(FinishReason.ABORT, 4, None, queued)
    for finished in stats.finished_requests:
        assert (finished.queued_time, finished.prefill_time, finished.inference_time) == (None, None, None)
        assert finished.mean_time_per_output_token is None
    assert len(stats.time_to_first_tokens_iter) == 1
    assert stats.finished_requests[1].decode_time is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=40))
def test_every_token_and_every_interval_is_counted_once(steps: list[tuple[int, int]]) -> None:
    """Requests in any order: intervals counted = outputs after each request's first, and a shared interval is one entry."""
    stats, requests, now = IterationStats(), {}, 1.0
    for which, num_tokens in steps:
        request = requests.setdefault(which, RequestStateStats())
        stats.update_from_output(EngineCoreOutput(str(which), [0] * num_tokens), now, request)
        now += 0.5
    assert stats.num_generation_tokens == sum(count for _, count in steps) == sum(r.num_generation_tokens for r in requests.values())
    assert stats.inter_token_latencies.total() == len(steps) - len(requests)
    waited = sum(value * times for value, times in stats.inter_token_latencies.items())
    assert waited == pytest.approx(sum(r.last_token_ts - r.first_token_ts for r in requests.values()))
