"""UniProcExecutor: one worker in this process, on a thread of its own.

All torch calls, from loading to sampling, happen on that thread (see worker.py for why). The queue in front of it keeps the order of
the calls, so a step may be handed over while the one before still runs: its input tokens are in the worker by the time it starts.

Stands between forms 6 and 7 of a request.    vLLM: v1/executor/uniproc_executor.py
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

# Before torch is loaded, for its OpenMP: how long a thread that waits for the others looks before it sleeps. Without end (the default),
# a step beside another busy process (the API server, on two cores) was seen to take twenty times as long; not at all costs a wake-up for
# every operator, a fifth of a step at batch 1. This is some ten microseconds. A setting of the user's stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from mini_engine.config import EngineConfig
from mini_engine.executor.abstract import Executor
from mini_engine.step import GrammarOutput, KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput
from mini_engine.worker.worker import Worker

JOIN_TIMEOUT_S = 5.0  #: how long shutdown() waits for a step in flight; a daemon thread does not hold up the process after that


class UniProcExecutor(Executor):
    """The default executor."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name="core-worker", daemon=True)
        self._thread.start()
        try:
            self._worker: Worker | None = self._submit(Worker, config).result()
        except BaseException:
            self.shutdown()
            raise
        self.max_model_len = self._worker.model.config.max_model_len
        self.vocab_size = self._worker.model.config.vocab_size
        self.overlaps = self._worker.device.type != "cpu"
        self.dtype = str(self._worker.dtype).removeprefix("torch.")

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "the executor is shut down"
        return self._worker

    def get_kv_cache_spec(self) -> KVCacheSpec:
        return self.worker.get_kv_cache_spec()

    def determine_num_available_blocks(self, spec: KVCacheSpec) -> int:
        return self._submit(self.worker.determine_num_available_blocks, spec).result()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._submit(self.worker.initialize_from_config, kv_cache_config).result()

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> Future[ModelRunnerOutput | None] | ModelRunnerOutput | None:
        future = self._submit(self.worker.execute_model, scheduler_output)
        return future if non_block else future.result()

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Future[ModelRunnerOutput] | ModelRunnerOutput:
        future = self._submit(self.worker.sample_tokens, grammar_output)
        return future if non_block else future.result()

    def shutdown(self) -> None:
        self._worker = None  # the last reference but the thread's own: weights and KV cache go when it ends
        self._calls.put(None)
        self._thread.join(JOIN_TIMEOUT_S)

    def _submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call, args))
        return future


def _run_calls(calls: "queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]") -> None:
    """The thread. A call's exception goes to whoever waits for its future; None is put last."""
    while (item := calls.get()) is not None:
        future, call, args = item
        try:
            future.set_result(call(*args))
        except BaseException as e:  # even SystemExit: nobody waits for this thread, everybody for the future
            future.set_exception(e)
        del item, future, call, args  # hold nothing while idle
