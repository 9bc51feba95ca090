"""InprocClient: the engine in the caller's own process and thread, behind the same calls as over the wire. For `LLM`, tests, notebooks.

Nothing is encoded. get_output() makes one step; with overlap, the device runs the next one between two calls. What is refused comes
back as an ERROR output from the next get_output(), as it would over the wire.

In place of forms 4 and 8 of a request.    vLLM: v1/engine/core_client.py::InprocClient
"""

from collections import deque
from typing import Any

from mini_engine.config import EngineConfig
from mini_engine.engine_core.core import EngineCore
from mini_engine.engine_core.utility import invoke_utility
from mini_engine.exceptions import EngineGenerateError
from mini_engine.executor.abstract import Executor
from mini_engine.wire.handshake import EngineCoreReadyResponse
from mini_engine.wire.messages import EngineCoreOutputs, EngineCoreRequest


class InprocClient:
    """One engine, one client (client_index 0), one thread."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        self.engine_core = EngineCore(config, executor)
        self._refused: deque[EngineCoreOutputs] = deque()

    @property
    def ready_response(self) -> EngineCoreReadyResponse:
        return self.engine_core.ready_response()

    def add_request(self, request: EngineCoreRequest) -> None:
        request.client_index = 0
        refused = self.engine_core.admit(self.engine_core.preprocess(request))
        if refused is not None:
            self._refused.append(refused)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.engine_core.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        """Refusals if there are any, else what one step gives; empty when there is nothing to do or a step had no output."""
        if self._refused:
            return self._refused.popleft()
        outputs, _ = self.engine_core.step_fn()
        return outputs.get(0) or EngineCoreOutputs()

    def call_utility(self, method: str, *args: Any) -> Any:
        """The result of a utility. Raises EngineGenerateError with the engine's failure message."""
        output = invoke_utility(self.engine_core, 0, method, list(args))
        if output.result is None:
            raise EngineGenerateError(output.failure_message or method)
        return output.result.value

    def shutdown(self) -> None:
        self.engine_core.shutdown()
