"""The messages between the API server and EngineCore, field by field as vLLM 0.32.0 sends them.

Array structs: FIELD ORDER IS THE FORMAT. Append with a default, never insert. A shorter array takes the defaults, a longer one's
tail is ignored, and msgspec always writes the whole array (omit_defaults has no effect on array_like structs, msgspec #720).
Map structs (events, stats, SamplingParams): names are the format, unknown names are ignored.
A position that this project does not use is typed `Any = None`: any value decodes, nothing looks at it. (`object` would say the
same, but msgspec then calls the decoder's hook for every such position: 0.7 instead of 0.2 µs per output.)

Stands at forms 3, 4, 8 of a request; knows no socket.    vLLM: v1/engine/__init__.py, v1/outputs.py, v1/metrics/stats.py; WIRE §1
"""

import enum
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mini_engine.sampling_params import SamplingParams

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"  #: the one raw frame, sent to every client, that says no further output will come


class EngineCoreRequestType:
    """First frame of a request message: one byte. 04 and 05 never travel: they wake the busy loop inside the process."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    WAKEUP = b"\x05"


class FinishReason(enum.IntEnum):
    """Why a request ended; an int on the wire, `str()` gives the OpenAI word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


# ── down: front-end → EngineCore ────────────────────────────────────────────────────────────────────────


class EngineCoreRequest(msgspec.Struct, array_like=True, gc=False):
    """ADD: one request for one answer (n > 1 is n of these). Positions 0 to 21; the first nine are required."""

    request_id: str  #: internal id, unique among live requests
    prompt_token_ids: list[int] | None
    mm_features: Any
    sampling_params: SamplingParams | None
    pooling_params: Any
    arrival_time: float  #: wall clock, time.time()
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    client_index: int = 0  #: which of the front-ends that share this engine gets the outputs
    current_wave: int = 0
    priority: int = 0  #: lower runs first, with --scheduling-policy priority
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Any = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: Any = None


class UtilityRequest(msgspec.Struct, array_like=True):
    """UTILITY: call a method of EngineCore by name. call_id is an unsigned 64-bit number, chosen by the caller."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


# ── up: EngineCore → front-end ──────────────────────────────────────────────────────────────────────────


class Tensor(np.ndarray):
    """A numpy array that the wire writes and reads as a torch tensor: dtype `int32`, not `<i4`. Made with `array.view(Tensor)`."""


class LogprobsLists(NamedTuple):
    """Logprobs of sampled tokens. Column 0 is the sampled token, then the k most likely, most likely first."""

    logprob_token_ids: np.ndarray  #: [n, k + 1] int32
    logprobs: np.ndarray  #: [n, k + 1] float32
    sampled_token_ranks: np.ndarray  #: [n]; 1 is the most likely
    cu_num_generated_tokens: list[int] | None = None

    def slice(self, start: int, stop: int) -> "LogprobsLists":
        """Rows [start, stop) of a batch, one request's own."""
        return LogprobsLists(self.logprob_token_ids[start:stop], self.logprobs[start:stop], self.sampled_token_ranks[start:stop])


class LogprobsTensors(NamedTuple):
    """Prompt logprobs: row i scores prompt token i + 1, so a prompt of P tokens has P - 1 rows. Column 0 is that token."""

    logprob_token_ids: Tensor  #: [P - 1, k + 1] int32
    logprobs: Tensor  #: [P - 1, k + 1] float32
    selected_token_ranks: Tensor  #: [P - 1] int32
    cu_num_generated_tokens: list[int] | None = None
    cu_num_generated_tokens_tensor: Any = None  #: unused; a stock engine sends five elements, and a NamedTuple refuses extra ones


class EngineCoreEventType(enum.IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct):
    """A map on the wire. The timestamp is the *engine's* monotonic clock: only differences mean something elsewhere."""

    type: EngineCoreEventType
    timestamp: float


class PrefillStats(msgspec.Struct):
    """Where the prompt's KV came from. Sent once, with a request's first output."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """What one request gained in one step. Positions 0 to 17. The output with a finish_reason is the request's last."""

    request_id: str
    new_token_ids: list[int]  #: the EOS or stop token that ended the request is included
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsTensors | None = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: Any = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0  #: never nil: a stock front-end dies of it (WIRE T1)
    mm_cache_miss_hashes: Any = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None
    prompt_token_id_logprobs: Any = None


class PrefixCacheStats(msgspec.Struct):
    """Counted in tokens since the last message."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, int] = {}


class SchedulerStats(msgspec.Struct):
    """A map with all 18 keys, always: vllm-rs refuses a map without them (WIRE §13)."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: dict[str, int] = {}
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0  #: used blocks / all but the null block, in [0, 1]
    iteration_details: Any = None
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: Any = None
    kv_cache_eviction_events: list[Any] = []
    spec_decoding_stats: Any = None
    kv_connector_stats: Any = None
    ec_connector_stats: Any = None
    waiting_lora_adapters: dict[str, int] = {}
    running_lora_adapters: dict[str, int] = {}
    cudagraph_stats: Any = None
    perf_stats: Any = None


class UtilityResult(msgspec.Struct, array_like=True):
    """`[type_info, value]`. type_info stays nil: anything else would be pickle (WIRE §1.7). A void result is [nil, nil]."""

    type_info: None = None
    value: Any = None


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Reply to one UtilityRequest: a failure message, or a result; never neither."""

    call_id: int
    failure_message: str | None = None
    result: UtilityResult | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """All that one step has for one front-end. Positions 0 to 8."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0  #: engine monotonic clock; 0.0 means now
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()
