"""RequestOutputCollector: the one-slot mailbox between the output handler and one request's reader.

Promises  Coalescing, not back-pressure: a slow reader sees fewer, larger outputs and slows nobody. Nothing is lost, and nothing comes
          after the terminal item (an output with finished=True, or an exception).
Differs   from vLLM in one point: there an exception replaces an unread output. Here the reader gets the unread output first and the
          exception next; an exception after an unread final output is dropped, because the request had ended already.
Callers   one reader; put() never waits. Event loop thread only.

Stands at form 9 of a request.    vLLM: v1/engine/output_processor.py::RequestOutputCollector; WIRE §4
"""

import asyncio

from mini_engine.outputs import RequestOutput
from mini_engine.sampling_params import RequestOutputKind


class RequestOutputCollector:
    __slots__ = ("_error", "_output", "_waiter", "output_kind")

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self.output_kind = output_kind
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | Exception) -> None:
        """Store, or merge with what has not been read. Ignored after a terminal item that is still unread."""
        unread = self._output
        if self._error is not None or (unread is not None and unread.finished):
            return
        if isinstance(item, Exception):
            self._error = item
        elif unread is None:
            self._output = item
        else:
            unread.add(item, self.output_kind)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def get_nowait(self) -> RequestOutput | None:
        """Everything since the last call as one output, or None. Raises the exception that was put, after the outputs before it."""
        output = self._output
        if output is not None:
            self._output = None
            return output
        if self._error is not None:
            raise self._error
        return None

    async def get(self) -> RequestOutput:
        """Waits for what get_nowait() returns. A cancelled get takes nothing."""
        while (output := self.get_nowait()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return output
