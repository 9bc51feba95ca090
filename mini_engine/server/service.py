"""Service: what every route needs, made once per app; and the registry of generations in flight.

No globals: two apps in one process have two services. `statistics()` is what /load and the tests read.

Stands between forms 1 and 3 of a request.    vLLM: the app.state that entrypoints/openai/api_server.py::init_app_state fills
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request

from mini_engine.config import ServerConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.observe.metrics import PrometheusStatLogger
from mini_engine.sampling_params import SamplingParams
from mini_engine.server.errors import EngineUnavailableError, ModelNotFoundError, ServerStoppingError
from mini_engine.server.protocol import MAX_ANSWERS, GenerationRequest
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

    def check_request(self, request: GenerationRequest, params: SamplingParams, num_bytes: int, num_prompts: int = 1) -> None:
        """Before any work: are we and the engine alive, is this what we serve, and no more than one may ask for in `num_bytes`?"""
        self.check_engine()
        if self.stopping:
            raise ServerStoppingError("the server is shutting down; this request was not begun")
        if request.model is not None:  # else it means the one we have
            self.check_model(request.model)
        if request.priority and not self.priority_scheduling:
            message = f"priority must be 0 unless the server runs with --scheduling-policy priority, got {request.priority}"
            raise VLLMValidationError(message, parameter="priority")
        num_answers, limit = num_prompts * request.n, self.config.max_body_bytes
        if num_answers > MAX_ANSWERS:
            message = f"one request may ask for at most {MAX_ANSWERS} answers (prompts times n), got {num_answers}"
            raise VLLMValidationError(message, parameter="n", value=num_answers)
        # each answer is a message of its own to the engine, with its prompt and all parameters
        if (cost := max(num_bytes * request.n, len(msgspec.msgpack.encode(params)) * num_answers)) > limit:
            message = f"a body of {num_bytes} bytes for {num_answers} answers means {cost} bytes for the engine; at most {limit} are taken"
            raise VLLMValidationError(message, parameter="n", value=num_answers)

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
