"""The small routes: models, health, ping, version, load, metrics.

    /health   503 once the EngineCore is dead; says nothing about an engine that hangs
    /ping     asks the engine through the queue that requests take; 503 when it does not answer in time, with the reason

Beside the request's path.    vLLM: entrypoints/openai/models/, entrypoints/serve/instrumentator/
"""

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

import mini_engine
from mini_engine.exceptions import EngineDeadError
from mini_engine.server.errors import EngineUnavailableError, ErrorKind, render_error
from mini_engine.server.service import Service, service_of

router = APIRouter()
PING_TIMEOUT_S = 5.0  #: a long CPU prefill step takes seconds, and is no fault
_STUCK = ErrorKind(503, "server_error", "engine_stuck")


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _model_card(service: Service) -> dict[str, object]:
    card = {"id": service.model_name, "object": "model", "created": service.created, "owned_by": "mini_engine"}
    return card | {"root": service.model_name, "parent": None, "max_model_len": service.max_model_len}


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    return _json({"object": "list", "data": [_model_card(service_of(request))]})


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> Response:
    service = service_of(request)
    service.check_model(model)
    return _json(_model_card(service))


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    service_of(request).check_engine()
    return Response(status_code=200)


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request, timeout_s: Annotated[float, Query(gt=0, le=60)] = PING_TIMEOUT_S) -> Response:
    """Is the engine turning? 200 with the round trip, or 503 with what is wrong."""
    service = service_of(request)
    start = time.monotonic()
    try:
        await service.engine.ping(timeout_s)
    except TimeoutError:
        message = f"the engine has not answered for {timeout_s:g} s: the process lives, but is stuck or in a very long step"
        return Response(render_error(message, _STUCK), 503, media_type="application/json")
    except EngineDeadError as e:
        raise EngineUnavailableError(str(e)) from e
    return _json({"status": "ok", "round_trip_ms": round(1e3 * (time.monotonic() - start), 3)})


@router.get("/version")
async def version() -> Response:
    return _json({"version": mini_engine.__version__})


@router.get("/load")
async def load(request: Request) -> Response:
    return _json({"server_load": service_of(request).statistics().in_flight})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    logger = service_of(request).metrics
    body, content_type = logger.expose(request.headers.get("accept", "")) if logger is not None else (b"", "text/plain")
    return Response(body, headers={"content-type": content_type})
