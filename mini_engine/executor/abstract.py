"""The executor contract: what the engine core may ask of the device, whatever is behind it.

    start-up   __init__ loads → get_kv_cache_spec → determine_num_available_blocks → initialize_from_config
    each step  execute_model(scheduler_output)    the forward; None: the logits wait on the device for …
               sample_tokens(grammar_output)      … this, which returns the step's ModelRunnerOutput

Promises  steps run in the order of the calls, one at a time, on one device thread; with non_block=True a call returns at once with a
          Future, so two steps may be in flight. Sampled tokens stay with the device and feed the next step.
Callers   alternate execute_model and sample_tokens; the engine core's one thread makes all calls, except shutdown() (any thread).
Errors    a broken device raises from the call, or from the Future; after that the executor is unusable.

Stands between forms 6 and 7 of a request.    vLLM: v1/executor/abstract.py::Executor
"""

from abc import ABC, abstractmethod
from concurrent.futures import Future

from mini_engine.config import EngineConfig
from mini_engine.step import GrammarOutput, KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput


class Executor(ABC):
    """One device, or one group of devices that step together."""

    max_model_len: int  #: longest sequence the model can take; known after __init__, as the next two
    vocab_size: int
    dtype: str  #: of weights and KV, torch's name
    overlaps = True  #: whether overlap gains anything; known after __init__. Not where a step needs the host's cores and its GIL

    @staticmethod
    def get_class(config: EngineConfig) -> "type[Executor]":
        """The class that config.executor names. Imported here, so that the mock needs no torch."""
        if config.executor == "mock":
            from mini_engine.executor.mock import MockExecutor

            return MockExecutor
        from mini_engine.executor.uniproc import UniProcExecutor

        return UniProcExecutor

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once: 2 is overlap."""
        asked = self.config.async_scheduling
        return 2 if asked == "on" or (asked == "auto" and self.overlaps) else 1

    @abstractmethod
    def get_kv_cache_spec(self) -> KVCacheSpec:
        """What one block costs."""

    @abstractmethod
    def determine_num_available_blocks(self, spec: KVCacheSpec) -> int:
        """How many blocks fit in the memory there is, block 0 (the null block) included."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache and warm up. After this, steps may come."""

    @abstractmethod
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> Future[ModelRunnerOutput | None] | ModelRunnerOutput | None:
        """Forward of one step. None: call sample_tokens next. A ModelRunnerOutput: nothing was scheduled, the step is done."""

    @abstractmethod
    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Future[ModelRunnerOutput] | ModelRunnerOutput:
        """Sample from the logits of the execute_model before it; grammar_output masks the rows it names."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release device and threads. Idempotent; a step that hangs is not waited for."""
