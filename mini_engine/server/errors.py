"""The one error table: which exception becomes which HTTP status and which OpenAI error.

    raised before the first byte of the answer   the status of the table, body {"error": {message, type, param, code}}
    raised after it                              no status is left to change: one SSE event with the same body, then [DONE]
    the client is gone                           nobody to tell: the work is cancelled (respond.py)
    anything not in the table                    500 without details for the client, the traceback for the log

Stands beside forms 1 and 9 of a request.    vLLM: entrypoints/serve/utils/error_response.py
"""

import logging
from dataclasses import dataclass

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mini_engine.exceptions import EngineDeadError, EngineGenerateError, MiniEngineError, VLLMValidationError

logger = logging.getLogger(__name__)


class ModelNotFoundError(MiniEngineError):
    """The request names a model that this server does not serve."""


class BodyTooLargeError(MiniEngineError):
    """The request body is longer than ServerConfig.max_body_bytes."""


class EngineUnavailableError(EngineDeadError):
    """A new request to a server whose engine is dead. One that was in flight gets the EngineDeadError itself."""


class ServerStoppingError(MiniEngineError):
    """The server was told to stop, and the time for open requests is over."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One row of the table."""

    status: int
    type: str
    code: str | None = None


#: looked up along the exception's MRO, so a subclass without a row of its own takes its parent's
ERROR_TABLE: dict[type[Exception], ErrorKind] = {
    VLLMValidationError: ErrorKind(400, "invalid_request_error"),
    ModelNotFoundError: ErrorKind(404, "invalid_request_error", "model_not_found"),
    BodyTooLargeError: ErrorKind(413, "invalid_request_error"),
    EngineGenerateError: ErrorKind(500, "server_error"),
    EngineDeadError: ErrorKind(500, "server_error", "engine_dead"),
    EngineUnavailableError: ErrorKind(503, "server_error", "engine_dead"),
    ServerStoppingError: ErrorKind(503, "server_error", "server_stopping"),
    MiniEngineError: ErrorKind(500, "server_error"),
}
_UNKNOWN = ErrorKind(500, "server_error")


def error_kind(error: BaseException) -> ErrorKind:
    """The row for this exception; the 500 for bugs when there is none."""
    if isinstance(error, HTTPException):  # the router's 404 and 405
        return ErrorKind(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    return next((ERROR_TABLE[cls] for cls in type(error).__mro__ if cls in ERROR_TABLE), _UNKNOWN)


def render_error(message: str, kind: ErrorKind, param: str | None = None) -> bytes:
    """The JSON body, as OpenAI shapes it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}})


def error_body(error: BaseException) -> tuple[ErrorKind, bytes]:
    """Row and JSON body for an exception. An unexpected one is logged here, once, with its traceback."""
    kind = error_kind(error)
    message = error.detail if isinstance(error, HTTPException) else str(error)
    if kind is _UNKNOWN:
        logger.error("unexpected error while serving a request", exc_info=error)
        message = f"internal error ({type(error).__name__}); the server's log has the details"
    return kind, render_error(message, kind, getattr(error, "parameter", None))


def error_response(error: BaseException) -> Response:
    """A whole HTTP answer. 413 closes the connection: the rest of the body is not going to be read."""
    kind, body = error_body(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if kind.status == 413:
        headers["connection"] = "close"
    return Response(body, kind.status, headers, media_type="application/json")
