"""InprocClient: the engine in the caller's own process and thread, behind the same calls as over the wire. For `LLM`, tests, notebooks.

Nothing is encoded. get_output() makes one step; with overlap, the device runs the next one between two calls. What is refused comes
back as an ERROR output from the next get_output(), as it would over the wire.

Promises  A call that was interrupted while it waited for the device, by Ctrl-C or by what another signal's handler raised, changed
          nothing, and the next one goes on. Any other exception out of the engine is its end: every later call raises EngineDeadError
          with the cause.

In place of forms 4 and 8 of a request.    vLLM: v1/engine/core_client.py::InprocClient
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mini_engine.config import EngineConfig
from mini_engine.engine_core.core import EngineCore
from mini_engine.engine_core.utility import invoke_utility
from mini_engine.exceptions import EngineDeadError, EngineGenerateError
from mini_engine.executor.abstract import Executor
from mini_engine.wire.handshake import EngineCoreReadyResponse
from mini_engine.wire.messages import EngineCoreOutputs, EngineCoreRequest


class InprocClient:
    """One engine, one client (client_index 0), one thread."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        self.engine_core = EngineCore(config, executor)
        self._refused: deque[EngineCoreOutputs] = deque()
        self._dead: str | None = None  #: why. Not the exception: its traceback would keep the caller, and so the model, alive

    @contextmanager
    def _alive(self) -> Iterator[EngineCore]:
        """The engine, for one call; notes what ended it. Raises EngineDeadError if something has."""
        if self._dead is not None:
            raise EngineDeadError(f"the engine is gone, make a new one; it ended by {self._dead}")
        try:
            yield self.engine_core
        except BaseException as e:
            if not self.engine_core.waiting:
                self._dead = f"{type(e).__name__}: {e}"
            raise
        finally:
            self.engine_core.waiting = False

    @property
    def ready_response(self) -> EngineCoreReadyResponse:
        return self.engine_core.ready_response()

    def add_request(self, request: EngineCoreRequest) -> None:
        request.client_index = 0
        with self._alive() as engine:
            refused = engine.admit(engine.preprocess(request))
        if refused is not None:
            self._refused.append(refused)

    def abort_requests(self, request_ids: list[str]) -> None:
        if self._dead is None:  # else nothing lives
            with self._alive() as engine:
                engine.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        """Refusals if there are any, else what one step gives; empty when there is nothing to do or a step had no output."""
        if self._refused:
            return self._refused.popleft()
        with self._alive() as engine:
            outputs, _ = engine.step_fn()
        return outputs.get(0) or EngineCoreOutputs()

    def call_utility(self, method: str, *args: Any) -> Any:
        """The result of a utility. Raises EngineGenerateError with the engine's failure message."""
        with self._alive() as engine:
            output = invoke_utility(engine, 0, method, list(args))
        if output.result is None:
            raise EngineGenerateError(output.failure_message or method)
        return output.result.value

    def shutdown(self) -> None:
        self._dead = self._dead or "being closed"
        self.engine_core.shutdown()
