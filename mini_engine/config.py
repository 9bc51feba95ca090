"""Configuration: plain data, checked once, passed down explicitly. No global state, nothing read from the environment.

`EngineConfig` is all that an EngineCore needs; the launcher hands it to the child process as JSON. `ServerConfig` is what only the
API server needs. Field names are vLLM's flags with underscores; the defaults are DESIGN §3's.

Stands before a request's path, imported by both sides.    vLLM: config/, engine/arg_utils.py
"""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from mini_engine.exceptions import VLLMValidationError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"  #: a name, resolved by model/default_model.py to a directory in the user's cache

ExecutorBackend = Literal["uniproc", "mock"]
SchedulingPolicy = Literal["fcfs", "priority"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
AsyncScheduling = Literal["auto", "on", "off"]
Quantization = Literal["none", "int8"]

#: the seams where a learner's file may replace a part of ours (DESIGN §4); overlay.py says what each must provide
OVERLAY_SEAMS = ("wire.codec", "scheduler.schedule", "kv_cache.block_pool", "text.detokenizer", "text.stop", "server.sse")


def _one_of(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise VLLMValidationError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}", parameter=name)


def _at_least(name: str, value: float | None, minimum: float) -> None:
    if value is not None and value < minimum:
        raise VLLMValidationError(f"{name} must be at least {minimum}, got {value!r}", parameter=name)


@dataclass(frozen=True, slots=True)
class MockConfig:
    """Knobs of the mock device (executor/mock.py). Times are milliseconds; steps count from 1; None is never."""

    step_ms: float = 0.0  #: how long each step takes, spent asleep with the GIL released
    crash_at_step: int | None = None  #: this step raises, as a broken worker would
    hang_at_step: int | None = None  #: this step never returns
    vocab_size: int | None = None  #: None: the tokenizer's
    num_blocks: int = 4096  #: KV blocks when num_gpu_blocks_override is not given


@dataclass(slots=True)
class EngineConfig:
    """One EngineCore: model, limits, KV cache, device."""

    model: str = DEFAULT_MODEL  #: a directory, a hub id, or DEFAULT_MODEL
    executor: ExecutorBackend = "uniproc"
    dtype: DType = "auto"  #: auto: float32 on CPU, the checkpoint's on CUDA
    quantization: Quantization = "none"  #: int8: linear weights per output channel, activations per step; CPU only
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
        _one_of("executor", self.executor, get_args(ExecutorBackend))
        _one_of("dtype", self.dtype, get_args(DType))
        _one_of("quantization", self.quantization, get_args(Quantization))
        _one_of("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        _one_of("async_scheduling", self.async_scheduling, get_args(AsyncScheduling))
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_threads", "kv_cache_memory_bytes"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_gpu_blocks_override", self.num_gpu_blocks_override, 2)  # the null block, and one to use
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise VLLMValidationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "a step gives every running request one token"
            )
        for seam in self.overlay:
            _one_of("overlay", seam, OVERLAY_SEAMS)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for the child process."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of to_dict. Raises VLLMValidationError for an unknown name or a value out of range."""
        unknown = data.keys() - {f.name for f in fields(cls)}
        if unknown:
            raise VLLMValidationError(f"unknown engine option(s): {', '.join(sorted(unknown))}")
        return cls(**{**data, "mock": MockConfig(**data.get("mock", {}))})


@dataclass(slots=True)
class ServerConfig:
    """The API server: where it listens, what it calls the model, how it renders."""

    host: str = "127.0.0.1"
    port: int = 8000  #: 0: any free port, printed and readable from the server
    served_model_name: str | None = None  #: None: the last part of EngineConfig.model
    api_key: str | None = None  #: guards /v1 and /inference only
    chat_template: str | None = None  #: file; None: the model's
    renderer_num_workers: int = 1  #: threads of the render pool
    output_chunk_size: int = 128  #: outputs of one message handled before the event loop gets a turn (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)
    max_body_bytes: int = 32 << 20
    engine_ready_timeout_s: float = 600.0  #: from launch to READY
    shutdown_timeout_s: float = 5.0  #: how long open streams may finish after SIGTERM
    root_path: str = ""

    def model_name(self, model: str) -> str:
        """The name that /v1/models and every response carry."""
        return self.served_model_name or Path(model).name
