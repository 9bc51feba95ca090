"""Worker: one device. Chooses device and dtype, loads the model, says how many KV blocks fit, and runs the steps.

Every method is called on the same thread, the constructor too: torch keeps a team of OpenMP threads per calling thread, and a second
team on the same cores makes both slow.

Stands at form 6 of a request.    vLLM: v1/worker/gpu_worker.py, v1/worker/cpu_worker.py
"""

import logging
import os
import time

import torch

from mini_engine.config import EngineConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.model.config import ModelConfig
from mini_engine.model.default_model import resolve_model
from mini_engine.model.loader import load_model
from mini_engine.step import GrammarOutput, KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput
from mini_engine.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 32  #: enough to start the threads and to touch every weight


class Worker:
    """Loaded and ready for get_kv_cache_spec() when the constructor returns."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = choose_device(config.device)
        torch.set_num_threads(config.num_threads or os.cpu_count() or 1)
        started = time.monotonic()
        model_dir = resolve_model(config.model)
        self.dtype = choose_dtype(config.dtype, ModelConfig.from_dir(model_dir).dtype, self.device)
        if config.quantization == "int8" and (self.device.type, self.dtype) != ("cpu", torch.float32):
            raise VLLMValidationError(
                f"quantization int8 works on float32 on CPU, not on {str(self.dtype).removeprefix('torch.')} on {self.device}; "
                "leave one of them out",
                parameter="quantization",
            )
        self.model = load_model(model_dir, self.dtype, self.device, config.quantization)
        self.runner = ModelRunner(self.model, config.max_num_seqs, config.max_model_len, config.seed)
        logger.info(
            "model %s: %.0f MiB of %s weights%s on %s in %.1f s, %d threads%s",
            model_dir,
            self.model.num_bytes / 2**20,
            str(self.dtype).removeprefix("torch."),
            ", packed as int8" if config.quantization == "int8" else "",
            self.device,
            time.monotonic() - started,
            torch.get_num_threads(),
            "" if self.model.kernels is None else ", C kernels",
        )

    def get_kv_cache_spec(self) -> KVCacheSpec:
        c = self.model.config
        return KVCacheSpec(self.config.block_size, c.num_layers, c.num_kv_heads, c.head_dim, self.dtype.itemsize)

    def determine_num_available_blocks(self, spec: KVCacheSpec) -> int:
        """Blocks in the memory set aside: on CPU what the configuration says, on CUDA its share minus what a full step takes.

        0 or 1 is an answer too; the engine core says what to do about it."""
        if self.device.type == "cpu":
            available = self.config.kv_cache_memory_bytes
        else:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.runner.dummy_run(self.config.max_num_batched_tokens)
            free, total = torch.cuda.mem_get_info(self.device)
            others = total - free - torch.cuda.memory_reserved(self.device)  # other processes, and CUDA itself
            available = int(total * self.config.gpu_memory_utilization) - others - torch.cuda.max_memory_allocated(self.device)
        return max(available, 0) // spec.page_size_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate, and run one small step so that the first request does not pay for it.

        Raises VLLMValidationError when the cache is larger than the machine: an allocation need not fail before the pages are written."""
        wanted = kv_cache_config.num_blocks * self.get_kv_cache_spec().page_size_bytes
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.device.type == "cpu" and wanted > memory:
            message = f"a KV cache of {wanted} bytes is more than this machine's memory of {memory}: lower kv_cache_memory_bytes"
            raise VLLMValidationError(f"{message} or num_gpu_blocks_override", parameter="kv_cache_memory_bytes", value=wanted)
        self.runner.initialize_kv_cache(kv_cache_config)
        self.runner.dummy_run(WARM_UP_TOKENS)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        return self.runner.sample_tokens(grammar_output)


def choose_device(name: str) -> torch.device:
    """auto: CUDA when there is a GPU. EngineConfig has checked the kind. Raises VLLMValidationError for a GPU that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise VLLMValidationError(f"device {name!r}: this torch ({torch.__version__}) sees no GPU", parameter="device", value=name)
    return torch.device(name)


def choose_dtype(name: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """auto: float32 on CPU, on CUDA the checkpoint's. Any other name is torch's."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else (checkpoint or "float32")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise VLLMValidationError(
            f"the checkpoint's torch_dtype is {name!r}, which is none of torch's; name one with --dtype", parameter="dtype", value=name
        )
    return dtype
