"""build_app: the FastAPI application over one engine client. It owns no process, no socket and no engine.

Every error leaves in OpenAI's shape, the router's own 404, 405 and 422 too. /docs and /openapi.json describe the request bodies,
though the routes parse them themselves (size limit first, then the field law, then pydantic).

Stands around forms 1 and 9 of a request.    vLLM: entrypoints/openai/api_server.py::build_app
"""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

import mini_engine
from mini_engine.exceptions import MiniEngineError, VLLMValidationError
from mini_engine.server import chat, completions, misc
from mini_engine.server.errors import error_response
from mini_engine.server.middleware import EdgeMiddleware
from mini_engine.server.protocol import ChatCompletionRequest, CompletionRequest
from mini_engine.server.service import Service

_BODIES: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatCompletionRequest, "/v1/completions": CompletionRequest}


def build_app(service: Service) -> FastAPI:
    """The app over one service, its `app.state.service`."""
    app = FastAPI(title="mini_engine", version=mini_engine.__version__)
    app.root_path, app.state.service = service.config.root_path, service
    for router in (chat.router, completions.router, misc.router):
        app.include_router(router)
    for error in (MiniEngineError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, _on_error)
    app.add_middleware(EdgeMiddleware, api_key=service.config.api_key)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):  # a query parameter; bodies are not FastAPI's business here
        problem = error.errors()[0]
        name = str(problem["loc"][-1])
        error = VLLMValidationError(f"{name}: {problem['msg']}", parameter=name)
    elif isinstance(error, HTTPException) and error.status_code in (404, 405):
        allowed = (error.headers or {}).get("Allow")
        instead = f" but {allowed}" if allowed else ""
        error.detail = f"no {request.method} {request.url.path[:200]} is served{instead}; GET /docs lists what this server answers"
    return error_response(error)


def _openapi(app: FastAPI) -> dict[str, Any]:
    if not app.openapi_schema:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path, model in _BODIES.items():
            body = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schema["components"]["schemas"] |= body.pop("$defs") | {model.__name__: body}
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        app.openapi_schema = schema
    return app.openapi_schema
