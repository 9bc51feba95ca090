"""Request: what the engine core knows of one request, and the few counters that scheduling is about.

    0 ≤ num_cached_tokens ≤ num_computed_tokens ≤ num_tokens + num_output_placeholders ≤ max_num_tokens
                  num_prompt_tokens ≤ num_tokens < max_num_tokens

There is no prefill state and no decode state: a running request's num_computed_tokens catches up with its num_tokens, by many tokens
in a step or by one, and each time it does, one more token is sampled. Preemption sets num_computed_tokens back to 0 and keeps the tokens.
A placeholder is a token that a step in flight will have sampled: the worker knows it before this side does (async_scheduler.py).

Form 5 of a request. Built on the core-input thread (hashing the prompt is the costly part), then the core loop's alone.
vLLM: v1/request.py
"""

import enum
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Self

from mini_engine.exceptions import VLLMValidationError
from mini_engine.kv_cache.block_hash import BlockHash, CacheableRequest
from mini_engine.sampling_params import SamplingParams
from mini_engine.wire.messages import EngineCoreEvent, EngineCoreEventType, EngineCoreRequest, FinishReason, PrefillStats


class RequestStatus(enum.IntEnum):
    """Everything after PREEMPTED is final."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()  #: in the waiting queue again; the worker has forgotten it
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """What the client is told; None while not finished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
}

BlockHasher = Callable[[CacheableRequest], list[BlockHash]]  #: kv_cache/block_hash.py::get_request_block_hasher

#: positions of an ADD, and sampling parameters, that would change tokens and that nothing here acts on yet: refused, never ignored
_UNBUILT_FIELDS = ("mm_features", "pooling_params", "lora_request", "prompt_embeds", "resumable")
_UNBUILT_PARAMS = ("structured_outputs", "thinking_token_budget", "repetition_detection", "logprob_token_ids")


@dataclass(eq=False, repr=False)
class Request:
    """One live request. Compared by identity; ordered by (priority, arrival_time, request_id), lower first."""

    request_id: str
    prompt_token_ids: InitVar[list[int]]
    sampling_params: SamplingParams
    _: KW_ONLY
    arrival_time: float = 0.0  #: wall clock
    client_index: int = 0
    priority: int = 0
    cache_salt: str | None = None
    trace_headers: dict[str, str] | None = None
    block_hasher: BlockHasher | None = None  #: None: prefix caching is off

    def __post_init__(self, prompt_token_ids: list[int]) -> None:
        params = self.sampling_params
        assert prompt_token_ids and params.max_tokens is not None
        # never changed after construction, as the fields above
        self.eos_token_id = params._eos_token_id
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.skip_reading_prefix_cache = bool(params.skip_reading_prefix_cache)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + params.max_tokens  #: the scheduler lowers it to its own limit
        # grows with every sampled token
        self.all_token_ids = list(prompt_token_ids)  #: prompt, then output
        self.num_tokens = self.num_prompt_tokens  #: len(all_token_ids)
        self.block_hashes: list[BlockHash] = []  #: of the leading full blocks; output blocks lag until they are published
        # the scheduler's alone
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0  #: tokens whose KV is there, or will be after the steps already scheduled
        self.num_output_placeholders = 0  #: tokens that steps in flight sample; without overlap always 0
        self.last_step_id = 0  #: the last step that computes something of it; without overlap always 0
        self.num_cached_tokens = 0  #: of the computed ones, how many the last admission found in the prefix cache
        self.num_preemptions = 0
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] = []  #: not yet sent
        self.prefill_stats: PrefillStats | None = None  #: from the first admission until the first output
        self.update_block_hashes()

    @classmethod
    def from_engine_core_request(cls, request: EngineCoreRequest, block_hasher: BlockHasher | None = None) -> Self:
        """The request an ADD asks for. block_hasher: None when prefix caching is off.

        Raises VLLMValidationError for what this engine would have to guess or ignore; the caller answers with an ERROR output.
        """

        def refuse(parameter: str, value: object, why: str) -> VLLMValidationError:
            return VLLMValidationError(f"{parameter} {why} (got {value!r:.80})", parameter=parameter, value=value)

        for name in _UNBUILT_FIELDS:
            if value := getattr(request, name):
                raise refuse(name, value, "is not supported by this engine")
        params = request.sampling_params
        if not request.prompt_token_ids:
            raise refuse("prompt_token_ids", request.prompt_token_ids, "must hold at least one token")
        if params is None:
            raise refuse("sampling_params", params, "is required: this engine generates text and nothing else")
        if params.max_tokens is None:
            raise refuse("max_tokens", params.max_tokens, "must be an integer here: the front-end fills it in")
        for name in _UNBUILT_PARAMS:
            if value := getattr(params, name):
                raise refuse(name, value, "is not supported by this engine")
        return cls(
            request.request_id,
            request.prompt_token_ids,
            params,
            arrival_time=request.arrival_time,
            client_index=request.client_index,
            priority=request.priority,
            cache_salt=request.cache_salt,
            trace_headers=request.trace_headers,
            block_hasher=block_hasher,
        )

    def __lt__(self, other: "Request") -> bool:
        return (self.priority, self.arrival_time, self.request_id) < (other.priority, other.arrival_time, other.request_id)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, computed {self.num_computed_tokens} of {self.num_tokens} tokens)"

    def append_output_token_id(self, token_id: int) -> None:
        """One sampled token more. Its block is hashed when it is published, not here: this runs for every token."""
        self.all_token_ids.append(token_id)
        self.num_tokens += 1

    def update_block_hashes(self) -> None:
        """Hash the full blocks that have no hash yet. Costs O(new tokens)."""
        if self.block_hasher is not None:
            self.block_hashes += self.block_hasher(self)

    def record_event(self, event_type: EngineCoreEventType, timestamp: float | None = None) -> None:
        """Remember an event for the next output. The clock is monotonic; None is now."""
        self.events.append(EngineCoreEvent(event_type, time.monotonic() if timestamp is None else timestamp))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """Hand over the events not yet sent; None when there are none, which is what the wire wants."""
        events, self.events = self.events, []
        return events or None
