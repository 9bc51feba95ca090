"""Statistics that the API server keeps of each request and of each message from the engine; metrics.py turns them into Prometheus series.

Promises  the cost per token is a few additions: intervals that many requests share (they were computed in the same two steps) are
          counted once per distinct value, not listed per request.
Clocks    arrival is wall clock, in this process; QUEUED, SCHEDULED and token times are the engine's monotonic clock, of which only
          differences mean something here. The two are never mixed.

Filled at form 9 of a request, by llm/output_processor.py.
vLLM: v1/metrics/stats.py::IterationStats, RequestStateStats, FinishedRequestStats
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from mini_engine.wire.messages import EngineCoreEventType, EngineCoreOutput, FinishReason


@dataclass(slots=True)
class RequestStateStats:
    """What one live request has seen so far. A timestamp of 0.0 has not happened, or the engine did not report it."""

    arrival_time: float = 0.0  #: wall clock
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0  #: first time; preemption does not move it
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_cached_tokens: int = 0  #: of the prompt, from prefill_stats


@dataclass(frozen=True, slots=True)
class FinishedRequestStats:
    """One request, looked back upon. Seconds; None: not known, because the request never got there or the engine sends no events."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    num_computed_tokens: int  #: of the prompt: those whose KV was not cached
    num_preemptions: int
    max_tokens_param: int | None
    e2e_latency: float  #: arrival to last output
    queued_time: float | None  #: QUEUED to the first SCHEDULED
    prefill_time: float | None  #: the first SCHEDULED to the first token
    decode_time: float | None  #: first to last token
    inference_time: float | None  #: the first SCHEDULED to the last token
    mean_time_per_output_token: float | None  #: decode_time per token after the first


@dataclass(slots=True)
class IterationStats:
    """Everything new in one EngineCoreOutputs message. Made for it, filled while it is processed, recorded, thrown away."""

    iteration_timestamp: float = field(default_factory=time.time)  #: wall clock
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0  #: of requests that got their first token
    num_cached_tokens: int = 0  #: of these, tokens whose KV was there already
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    n_params_iter: list[int] = field(default_factory=list)  #: `n` of each user's request that ended, all its answers included
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)  #: its longest answer
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies: Counter[float] = field(default_factory=Counter)  #: seconds → how many outputs came after that interval

    def update_from_output(self, output: EngineCoreOutput, engine_core_timestamp: float, req_stats: RequestStateStats) -> None:
        """Count one output."""
        num_new, is_first = len(output.new_token_ids), not req_stats.num_generation_tokens
        self.num_generation_tokens += num_new
        req_stats.num_generation_tokens += num_new
        for event in output.events or ():
            if event.type == EngineCoreEventType.QUEUED:
                req_stats.queued_ts = event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED:
                req_stats.scheduled_ts = req_stats.scheduled_ts or event.timestamp
            else:
                self.num_preempted_reqs += 1
                req_stats.num_preemptions += 1
        if output.prefill_stats is not None:
            req_stats.num_cached_tokens = output.prefill_stats.num_cached_tokens
            self.num_cached_tokens += req_stats.num_cached_tokens
            self.num_prompt_tokens += output.prefill_stats.num_prompt_tokens
        if not num_new:  # a request that ended without a token (abort, error) has no token times
            return
        if is_first:
            req_stats.first_token_ts = engine_core_timestamp
            self.time_to_first_tokens_iter.append(self.iteration_timestamp - req_stats.arrival_time)
        else:
            self.inter_token_latencies[engine_core_timestamp - req_stats.last_token_ts] += 1
        req_stats.last_token_ts = engine_core_timestamp

    def update_from_finished_request(
        self, finish_reason: FinishReason, num_prompt_tokens: int, max_tokens_param: int | None, req_stats: RequestStateStats
    ) -> None:
        """Look back upon a request after its last output was counted."""
        s = req_stats
        decode_time = _between(s.first_token_ts, s.last_token_ts)
        later_tokens = s.num_generation_tokens - 1
        self.finished_requests.append(
            FinishedRequestStats(
                finish_reason=finish_reason,
                num_prompt_tokens=num_prompt_tokens,
                num_generation_tokens=s.num_generation_tokens,
                num_computed_tokens=num_prompt_tokens - s.num_cached_tokens,
                num_preemptions=s.num_preemptions,
                max_tokens_param=max_tokens_param,
                e2e_latency=self.iteration_timestamp - s.arrival_time,
                queued_time=_between(s.queued_ts, s.scheduled_ts),
                prefill_time=_between(s.scheduled_ts, s.first_token_ts),
                decode_time=decode_time,
                inference_time=_between(s.scheduled_ts, s.last_token_ts),
                mean_time_per_output_token=decode_time / later_tokens if decode_time is not None and later_tokens > 0 else None,
            )
        )


def _between(start: float, end: float) -> float | None:
    """Seconds from `start` to `end`, None when one of the two was not seen."""
    return end - start if start and end else None
