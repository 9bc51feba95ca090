"""One generation, from the parsed request to the last byte, watched by its connection.

    work task     prepare (render, submit) → outputs → bytes; awaits send(), so a slow reader meets coalescing collectors, not a queue
    watch task    reads the connection; when the client is gone it ends first, and the work is cancelled: queued, prefilling or decoding,
                  streaming or not, all n answers (closing the output iterator aborts them in the engine)

The status line waits for the first output: until then a refusal by the engine can still have its own HTTP status (errors.py).
Held by Service.in_flight until done; Service.stop_generations() cancels it at shutdown, and then the client gets a terminal error.

Stands at forms 2 to 9 of a request.    vLLM: entrypoints/serve/utils/api_utils.py::with_cancellation, StreamingResponse
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_engine.outputs import RequestOutput
from mini_engine.server.errors import ServerStoppingError, error_body, error_response
from mini_engine.server.format import ChunkFormatter
from mini_engine.server.service import Service
from mini_engine.server.sse import DONE_PAYLOAD

ANSWERS_AT_ONCE = 8  #: of one output, rendered between two turns of the event loop

Outputs = AsyncGenerator[RequestOutput, None]
Prepare = Callable[[], Awaitable[Outputs]]


class GenerationResponse(Response):
    """An ASGI response that does the work itself; the route has only validated and described it."""

    def __init__(self, service: Service, prepare: Prepare, formatter: ChunkFormatter, *, stream: bool) -> None:
        self.service, self.prepare, self.formatter, self.stream = service, prepare, formatter, stream
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns when the last byte is sent or the client is gone; both tasks have ended by then, whatever happened."""
        answer = self._stream if self.stream else self._whole
        work = asyncio.create_task(answer(scope, receive, send), name="generation")
        watch = asyncio.create_task(_until_disconnect(receive), name="disconnect-watch")
        self.service.in_flight.add(work)
        work.add_done_callback(self.service.in_flight.discard)
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            work.cancel()  # no effect when it is done
            await asyncio.wait((work, watch))
        if not work.cancelled():
            work.result()  # a bug in the work is not swallowed

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        try:
            async with aclosing(_in_parts(await self.prepare())) as outputs:
                async for output in outputs:
                    self.formatter.add_whole(output)
            response = Response(self.formatter.whole(), media_type="application/json")
        except asyncio.CancelledError:
            response = error_response(self._stopping_or_reraise())
        except Exception as e:
            response = error_response(e)
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        encode_event = self.service.encode_event
        error: BaseException | None = None
        try:
            async with aclosing(_in_parts(await self.prepare())) as outputs:
                async for output in outputs:
                    if body := self.formatter.events(output):
                        if not started:
                            started = True
                            await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
                        await send({"type": "http.response.body", "body": body, "more_body": True})
            tail = self.formatter.last_events()
        except asyncio.CancelledError:
            error = self._stopping_or_reraise()
        except Exception as e:
            error = e
        if error is not None:
            if not started:
                await error_response(error)(scope, receive, send)
                return
            tail = encode_event(error_body(error)[1])
        await send({"type": "http.response.body", "body": tail + encode_event(DONE_PAYLOAD), "more_body": False})

    def _stopping_or_reraise(self) -> ServerStoppingError:
        """Called while handling CancelledError: told apart are shutdown, which is answered, and a client that left."""
        if not self.service.stopping:
            raise
        return ServerStoppingError("the server is shutting down; this request was not finished")


async def _in_parts(outputs: Outputs) -> Outputs:
    """The outputs, those of many answers in parts, with a turn of the loop between them: 20 logprobs a token take time to render."""
    async with aclosing(outputs):
        async for output in outputs:
            answers = output.outputs
            for i in range(0, len(answers) or 1, ANSWERS_AT_ONCE):
                if i:
                    await asyncio.sleep(0)
                output.outputs = answers[i : i + ANSWERS_AT_ONCE]
                yield output


_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


async def _until_disconnect(receive: Receive) -> None:
    """The body was read before, so whatever arrives now is the end of the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
