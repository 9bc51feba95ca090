"""build_app: the FastAPI application over one engine client. It owns no process, no socket and no engine.

Every error leaves in OpenAI's shape, the router's own 404, 405 and 422 too. /docs and /openapi.json describe the request bodies,
though the routes parse them themselves (size limit first, then the field law, then pydantic).

Stands around forms 1 and 9 of a request.    vLLM: entrypoints/openai/api_server.py::build_app
"""

import time
from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

import mini_engine
from mini_engine.config import ServerConfig
from mini_engine.exceptions import MiniEngineError, VLLMValidationError
from mini_engine.observe.metrics import PrometheusStatLogger
from mini_engine.server import chat, completions, misc
from mini_engine.server.errors import error_response
from mini_engine.server.middleware import EdgeMiddleware
from mini_engine.server.protocol import ChatCompletionRequest, CompletionRequest
from mini_engine.server.service import Service
from mini_engine.server.sse import EncodeEvent, encode_event

if TYPE_CHECKING:
    from mini_engine.llm.async_llm import AsyncLLM

_BODIES: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatCompletionRequest, "/v1/completions": CompletionRequest}
_MODE: Literal["validation"] = "validation"


def build_app(
    engine: "AsyncLLM",
    config: ServerConfig,
    *,
    model_name: str,
    max_model_len: int,
    default_sampling_params: dict[str, Any] | None = None,
    priority_scheduling: bool = False,
    metrics: PrometheusStatLogger | None = None,
    encode_event: EncodeEvent = encode_event,
) -> FastAPI:
    """The app; `app.state.service` is its Service. `metrics` is what /metrics shows, `encode_event` the seam server.sse."""
    app = FastAPI(title="mini_engine", version=mini_engine.__version__, root_path=config.root_path)
    app.state.service = Service(
        engine=engine,
        config=config,
        model_name=model_name,
        max_model_len=max_model_len,
        default_sampling_params=default_sampling_params or {},
        priority_scheduling=priority_scheduling,
        metrics=metrics,
        encode_event=encode_event,
        created=int(time.time()),
    )
    for router in (chat.router, completions.router, misc.router):
        app.include_router(router)
    for error in (MiniEngineError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, _on_error)
    app.add_middleware(EdgeMiddleware, api_key=config.api_key)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):  # a query parameter; bodies are not FastAPI's business here
        problem = error.errors()[0]
        name = str(problem["loc"][-1])
        error = VLLMValidationError(f"{name}: {problem['msg']}", parameter=name)
    return error_response(error)


def _openapi(app: FastAPI) -> dict[str, Any]:
    if not app.openapi_schema:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        reference = "#/components/schemas/{model}"
        models, definitions = models_json_schema([(model, _MODE) for model in _BODIES.values()], ref_template=reference)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for path, model in _BODIES.items():
            content = {"application/json": {"schema": models[(model, _MODE)]}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        app.openapi_schema = schema
    return app.openapi_schema
