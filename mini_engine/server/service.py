"""Service: what every route needs, made once per app; and the registry of generations in flight.

No globals: two apps in one process have two services. `statistics()` is what /load and the tests read.

Stands between forms 1 and 3 of a request.    vLLM: the app.state that entrypoints/openai/api_server.py::init_app_state fills
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Request

from mini_engine.config import ServerConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.observe.metrics import PrometheusStatLogger
from mini_engine.server.errors import EngineUnavailableError, ModelNotFoundError
from mini_engine.server.sse import EncodeEvent, encode_event

if TYPE_CHECKING:
    from mini_engine.llm.async_llm import AsyncLLM


@dataclass(frozen=True, slots=True)
class ServiceStats:
    in_flight: int  #: generations whose answer is not complete
    stopping: bool


@dataclass(slots=True, eq=False)
class Service:
    engine: "AsyncLLM"
    config: ServerConfig
    model_name: str
    max_model_len: int
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
    metrics: PrometheusStatLogger | None = None  #: None: /metrics is empty
    priority_scheduling: bool = False
    encode_event: EncodeEvent = encode_event  #: the seam server.sse
    created: int = field(default_factory=lambda: int(time.time()))  #: of the model, as /v1/models says it
    in_flight: set[asyncio.Task[None]] = field(default_factory=set)  #: respond.py adds and removes
    stopping: bool = False

    def check_request(self, model: str | None, priority: int) -> None:
        """Before any work: is the engine alive, and is this what it serves? A missing model name means the one we have."""
        self.check_engine()
        if model is not None:
            self.check_model(model)
        if priority and not self.priority_scheduling:
            raise VLLMValidationError(
                f"priority must be 0 unless the server runs with --scheduling-policy priority, got {priority}", parameter="priority"
            )

    def check_engine(self) -> None:
        if self.engine.errored:
            raise EngineUnavailableError(str(self.engine.dead_error or "EngineCore died"))

    def check_model(self, model: str) -> None:
        if model != self.model_name:
            raise ModelNotFoundError(f"the model {model[:200]!r} does not exist; this server has {self.model_name!r}")

    def stop_generations(self) -> None:
        """Shutdown's deadline: every open generation ends now, with a terminal error that its client can read."""
        self.stopping = True
        for task in self.in_flight:
            task.cancel()

    def statistics(self) -> ServiceStats:
        return ServiceStats(len(self.in_flight), self.stopping)


def service_of(request: Request) -> Service:
    return request.app.state.service
