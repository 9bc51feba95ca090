"""Configuration: plain data, checked once, passed down explicitly. No global state, nothing read from the environment.

`EngineConfig` is all that an EngineCore needs; the launcher hands it to the child process as JSON. `ServerConfig` is what only the
API server needs. Field names are vLLM's flags with underscores; the defaults are DESIGN §3's.

Stands before a request's path, imported by both sides.    vLLM: config/, engine/arg_utils.py
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from mini_engine.exceptions import VLLMValidationError, wrong_type
from mini_engine.overlay import SEAMS

DEFAULT_MODEL = "SmolLM2-135M-Instruct"  #: a name, resolved by model/default_model.py to a directory in the user's cache

ExecutorBackend = Literal["uniproc", "mock"]
SchedulingPolicy = Literal["fcfs", "priority"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
AsyncScheduling = Literal["auto", "on", "off"]
Quantization = Literal["none", "int8"]


def _check_types(config: Any, prefix: str = "") -> None:
    """Every field against its annotation; nothing is converted."""
    for field_ in fields(config):
        try:
            msgspec.convert(value := getattr(config, field_.name), field_.type)
        except msgspec.ValidationError:
            raise wrong_type(prefix + field_.name, field_.type, value) from None


def _known(what: str, given: Mapping[str, object], cls: type) -> None:
    names = [f.name for f in fields(cls)]
    if unknown := sorted(map(str, given.keys() - set(names))):
        hints = [f'; write mock={{"{name[5:]}": …}} for {name}' for name in unknown if name.startswith("mock_")]
        known = "".join(hints) or f"; there are {', '.join(names)}"
        raise VLLMValidationError(f"unknown {what}(s): {', '.join(unknown)}{known}", parameter=unknown[0])


def _at_least(name: str, value: float | None, minimum: float) -> None:
    if value is not None and not value >= minimum:
        raise VLLMValidationError(f"{name} must be at least {minimum}, got {value!r}", parameter=name)


@dataclass(frozen=True, slots=True)
class MockConfig:
    """Knobs of the mock device (executor/mock.py). Times are milliseconds; steps count from 1; None is never."""

    step_ms: float = 0.0  #: how long each step takes, spent asleep with the GIL released
    crash_at_step: int | None = None  #: this step raises, as a broken worker would
    hang_at_step: int | None = None  #: this step never returns
    vocab_size: int | None = None  #: None: the tokenizer's
    num_blocks: int = 4096  #: KV blocks when num_gpu_blocks_override is not given

    def __post_init__(self) -> None:
        _check_types(self, "mock.")
        for name, minimum in (("step_ms", 0), ("crash_at_step", 1), ("hang_at_step", 1), ("vocab_size", 4), ("num_blocks", 1)):
            _at_least(f"mock.{name}", getattr(self, name), minimum)


@dataclass(slots=True)
class EngineConfig:
    """One EngineCore: model, limits, KV cache, device."""

    model: str = DEFAULT_MODEL  #: a directory, a hub id, or DEFAULT_MODEL
    executor: ExecutorBackend = "uniproc"
    dtype: DType = "auto"  #: auto: float32 on CPU, the checkpoint's on CUDA
    quantization: Quantization = "none"  #: int8: linear weights per output channel, activations per row; CPU only
    device: str = "auto"  #: auto: cuda when there is one, else cpu
    max_model_len: int | None = None  #: None: the model's, cut down to what the KV cache can hold
    max_num_seqs: int = 128  #: requests in one step
    max_num_batched_tokens: int = 2048  #: tokens in one step
    block_size: int = 16  #: tokens per KV block
    num_gpu_blocks_override: int | None = None  #: use exactly this many blocks (block 0, the null block, included)
    kv_cache_memory_bytes: int = 1 << 30  #: KV memory on CPU
    gpu_memory_utilization: float = 0.9  #: share of a GPU's memory for weights, activations and KV
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    async_scheduling: AsyncScheduling = "auto"
    long_prefill_token_threshold: int = 0  #: longest chunk of one prompt in a step while others run; 0: no limit
    seed: int = 0  #: for requests without a seed of their own
    num_threads: int | None = None  #: torch intra-op threads; None: one per core
    mock: MockConfig = field(default_factory=MockConfig)
    overlay: dict[str, str] = field(default_factory=dict)  #: seam → file (overlay.py)
    check: bool = False  #: verify the block pool and the queues after every step (MINI_ENGINE_CHECK=1 sets it in the CLI)

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_threads", "kv_cache_memory_bytes"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_model_len", self.max_model_len, 2)  # a prompt of one token, and its answer
        _at_least("num_gpu_blocks_override", self.num_gpu_blocks_override, 2)  # the null block, and one to use
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if not re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", self.device):
            raise VLLMValidationError(f"device must be auto, cpu or cuda, got {self.device!r}", parameter="device", value=self.device)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise VLLMValidationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "a step gives every running request one token"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            message = f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}"
            raise VLLMValidationError(message, parameter="gpu_memory_utilization")
        for seam in self.overlay:
            if seam not in SEAMS:
                raise VLLMValidationError(f"overlay must be one of {', '.join(SEAMS)}, got {seam!r}", parameter="overlay")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for the child process."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of to_dict. Raises VLLMValidationError for an unknown name, a wrong type or a value out of range."""
        _known("engine option", data, cls)
        if isinstance(mock := data.get("mock"), Mapping):
            _known("mock option", mock, MockConfig)
            data = {**data, "mock": MockConfig(**mock)}
        return cls(**data)


@dataclass(slots=True)
class ServerConfig:
    """The API server: where it listens, what it calls the model, how it renders."""

    host: str = "127.0.0.1"
    port: int = 8000  #: 0: any free port, printed and readable from the server
    served_model_name: str | None = None  #: None: the last part of EngineConfig.model
    api_key: str | None = None  #: guards /v1 and /inference only
    chat_template: str | None = None  #: file; None: the model's
    trust_request_chat_template: bool = False  #: else a request with a template of its own is refused: a template is a program
    renderer_num_workers: int = 1  #: threads of the render pool
    output_chunk_size: int = 128  #: outputs of one message handled before the event loop gets a turn (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)
    max_body_bytes: int = 32 << 20  #: of a request, and of all that its answers' messages to the engine repeat of it
    engine_ready_timeout_s: float = 600.0  #: from launch to READY
    shutdown_timeout_s: float = 5.0  #: how long open streams may finish after SIGTERM
    root_path: str = ""
    disable_log_stats: bool = False  #: no statistics line (observe/stat_line.py); /metrics stays
    disable_uvicorn_access_log: bool = False  #: no line per HTTP request
    enable_log_requests: bool = False  #: a line per generation: its parameters, how long its prompt is

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise VLLMValidationError("api_key must not be empty: leave it out to serve everybody", parameter="api_key")

    def model_name(self, model: str) -> str:
        """The name that /v1/models and every response carry."""
        return self.served_model_name or Path(model).name
