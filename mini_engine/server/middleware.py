"""What happens around every route: the API key, the request id, the limit of the body. Pure ASGI, nothing between app and socket.

The key guards /v1 and /inference only (health and metrics stay open to probes), and is compared in constant time.
Every answer carries x-request-id: the client's own if it sent a printable one, else a new one; response ids are made of it.

Stands before form 1 of a request.    vLLM: entrypoints/serve/middleware/ (AuthenticationMiddleware, XRequestIdMiddleware)
"""

import re
import secrets
import uuid

from fastapi import Request
from starlette._utils import get_route_path
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.exceptions import VLLMValidationError
from mini_engine.server.errors import BodyTooLargeError, ErrorKind, render_error

GUARDED = ("/v1", "/inference")
_PRINTABLE = re.compile(rb"[\x21-\x7e]{1,128}")
_UNAUTHORIZED = ErrorKind(401, "invalid_request_error", "invalid_api_key")


class EdgeMiddleware:
    """Outermost: request id, then the key."""

    def __init__(self, app: ASGIApp, api_key: str | None = None) -> None:
        self.app = app
        self.expected = None if api_key is None else b"Bearer " + api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _PRINTABLE.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        scope["mini_engine.request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        # the path that the router will look at: a root path is stripped in its way, or not at all
        guarded = get_route_path(scope).startswith(GUARDED) and scope["method"] != "OPTIONS"
        if self.expected is not None and guarded and not secrets.compare_digest(headers.get(b"authorization", b""), self.expected):
            body = render_error("this server needs its API key: send the header 'Authorization: Bearer KEY'", _UNAUTHORIZED)
            refusal = Response(body, _UNAUTHORIZED.status, {"www-authenticate": "Bearer"}, media_type="application/json")
            return await refusal(scope, receive, send_with_id)
        return await self.app(scope, receive, send_with_id)


async def read_body(request: Request, limit: int) -> bytearray:
    """The whole body. Raises BodyTooLargeError after `limit` bytes: more is never held."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise BodyTooLargeError(f"the request body may have at most {limit} bytes")
    except ClientDisconnect:
        raise VLLMValidationError("the client left before its request was complete") from None  # nobody reads it; no bug to log
    if not body:
        raise VLLMValidationError("the request has no body; it must be a JSON object")
    return body
