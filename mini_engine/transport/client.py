"""AsyncMPClient: one front-end's sockets to its engines. Requests go down, outputs come up, utility calls are answered.

Promises  After an engine's death every waiter, present and future, gets EngineDeadError, once what had arrived before it has been read.
          A send never waits and never vanishes: an engine that is gone raises.
Frames    A frame that cannot be decoded means that outputs were lost, and nobody knows whose: streams would wait for ever. So it is the
          death of the engine that sent it, told with the reason. What comes over a stranger's connection (TCP only) is logged and dropped.
Threads   everything happens on the event loop; only an engine process's exit is reported from another thread.
Reading   A ZMQ descriptor is edge-triggered: it says "something changed", so each callback reads until nothing is left, or comes back by
          itself. Measured under uvloop: 23 µs of CPU per message where zmq.asyncio takes 49, and 2 µs where it takes 13 with a backlog.
Not here  which outputs belong to whom (llm/output_processor.py); starting engines (launch.py).

Stands at forms 4 and 8 of a request.    vLLM: v1/engine/core_client.py::AsyncMPClient; WIRE §1.1, §2.8, §3.6
"""

import asyncio
import itertools
import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from mini_engine.exceptions import EngineDeadError, EngineGenerateError
from mini_engine.transport.launch import EngineHandles
from mini_engine.transport.listeners import Listeners
from mini_engine.transport.liveness import ConnectionMonitor
from mini_engine.wire.codec import MsgpackDecoder, MsgpackEncoder
from mini_engine.wire.handshake import EngineCoreReadyResponse
from mini_engine.wire.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
    UtilityRequest,
)

logger = logging.getLogger(__name__)

WIRE_VERSION = "0.32."  #: of vLLM; an engine of another one may lay its arrays out differently
MESSAGES_PER_TURN = 8  #: messages read before other callbacks of the loop get their turn


@dataclass(frozen=True, slots=True)
class ClientStats:
    """AsyncMPClient.statistics()"""

    pending_utilities: int  #: calls without an answer
    pending_aborts: int  #: ids to be sent in this turn of the loop
    unread_outputs: int  #: messages that the output handler has not taken


class AsyncMPClient:
    """Talks to engines that were launched already. Make it on the event loop; `wait_ready()` comes first, `shutdown()` last.

    Owns `listeners`, and `engines` when given: both are closed by shutdown(). Requests go to the engines in turn, aborts to all of them
    (an engine ignores ids that it does not know).
    """

    def __init__(
        self,
        listeners: Listeners,
        identities: Sequence[bytes],
        client_index: int = 0,
        *,
        engines: EngineHandles | None = None,
        overlay: Mapping[str, str] = {},
    ) -> None:
        self.client_index = client_index
        self.dead_error: EngineDeadError | None = None
        self._loop = asyncio.get_running_loop()
        self._listeners = listeners
        self._identities = list(identities)
        self._next_engine = itertools.cycle(self._identities)
        self._encoder = MsgpackEncoder(overlay)
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._responses: dict[bytes, EngineCoreReadyResponse | None] = {}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._waiter: asyncio.Future[None] | None = None  # of the one task in get_output_async()
        self._utilities: dict[int, asyncio.Future[object]] = {}
        self._aborts: list[str] = []
        self._closed = False

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._input = listeners.open_socket(self._context, zmq.ROUTER)
        self._output = listeners.open_socket(self._context, zmq.PULL)
        self._monitor = None if listeners.local else ConnectionMonitor(self._output, len(self._identities))
        listeners.adopt(self._input)
        listeners.adopt(self._output)
        self._readers: list[int] = []  # descriptors of the sockets
        self._read_on(self._input, self._read_input)
        self._read_on(self._output, self._read_output)
        if self._monitor is not None:
            self._read_on(self._monitor.socket, self._read_monitor)
        self._engines = engines
        if engines is not None:
            engines.watch(self._on_exit)

    # ── for the front-end ───────────────────────────────────────────────────────────────────────────────

    async def wait_ready(self, timeout: float) -> list[EngineCoreReadyResponse | None]:
        """Every engine's ready frame, in the order of `identities`; None for one that sent an empty frame.

        Until then the ROUTER does not know the engines, and a request would have nowhere to go. Raises EngineDeadError.
        """
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._ready)
        except TimeoutError:
            missing = [int.from_bytes(i, "little") for i in self._identities if i not in self._responses]
            raise EngineDeadError(f"no ready frame from engine(s) {missing} within {timeout:g} s") from None
        return [self._responses[identity] for identity in self._identities]

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Raises EngineDeadError. It never suspends: when it returns, the request is on its way."""
        request.client_index = self.client_index
        self._send(next(self._next_engine), EngineCoreRequestType.ADD, request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Abort at the end of this turn of the loop, together with all others of this turn. Never raises, never waits: for clean-up."""
        if not self._aborts:
            self._loop.call_soon(self._flush_aborts)
        self._aborts.extend(request_ids)

    async def call_utility_async(self, method: str, *args: object) -> object:
        """Run a method of every EngineCore, between steps, and return the first engine's result.

        Waits as long as the engine does not answer; bound it with asyncio.timeout. Raises EngineGenerateError with the engine's own
        words when the method fails, EngineDeadError when the engine is gone. A cancelled call leaves nothing behind.
        """
        self._flush_aborts()  # what was aborted before this call is aborted before the engine sees it
        # call ids: unsigned, 64 bits, unique among front-ends too
        calls = {uuid.uuid1().int >> 64: identity for identity in self._identities}
        try:
            for call_id, identity in calls.items():
                self._utilities[call_id] = self._loop.create_future()
                self._send(identity, EngineCoreRequestType.UTILITY, UtilityRequest(self.client_index, call_id, method, list(args)))
            results = await asyncio.gather(*(self._utilities[call_id] for call_id in calls))
        finally:
            for call_id in calls:
                self._utilities.pop(call_id, None)
        return results[0]

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next message with outputs or stats. One task only. Raises EngineDeadError when there will be none."""
        while not self._outputs:
            self._raise_if_dead()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

    def statistics(self) -> ClientStats:
        return ClientStats(len(self._utilities), len(self._aborts), len(self._outputs))

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the engines that were given (up to `timeout` seconds, then killed), close sockets and listeners. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._die("the client was shut down")
        if self._engines is not None:
            self._engines.shutdown(timeout)
        if self._monitor is not None:
            self._monitor.close()
        self._context.destroy(linger=0)
        self._listeners.close()

    # ── down ────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, identity: bytes, request_type: bytes, message: object) -> None:
        self._raise_if_dead()
        frames = self._encoder.encode(message)
        try:
            self._input.send_multipart([identity, request_type, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as e:  # EHOSTUNREACH: it has closed its connection
            self._die(f"EngineCore {int.from_bytes(identity, 'little')} cannot be reached: {e}")
            self._raise_if_dead()

    def _flush_aborts(self) -> None:
        request_ids, self._aborts = self._aborts, []
        if not request_ids:  # a utility call has sent them already
            return
        try:
            for identity in self._identities:
                self._send(identity, EngineCoreRequestType.ABORT, request_ids)
        except EngineDeadError:
            logger.debug("%d abort(s) not sent: the engine is gone", len(request_ids))

    # ── up ──────────────────────────────────────────────────────────────────────────────────────────────

    def _read_on(self, sock: zmq.Socket[bytes], callback: Callable[[], None]) -> None:
        fd = sock.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._readers.append(fd)
        self._loop.add_reader(fd, callback)
        self._loop.call_soon(callback)  # what came before the reader was there has no edge left to show

    def _read_input(self) -> None:
        """Ready frames. Nothing else is sent on this socket."""
        while self._alive():
            try:
                identity, *payload = self._input.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if identity not in self._identities or identity in self._responses or len(payload) != 1:
                logger.warning("ignored an unexpected message of %d frames from %r on the request socket", len(payload), identity)
                continue
            try:
                self._responses[identity] = MsgpackDecoder(EngineCoreReadyResponse).decode(payload) if payload[0] else None
            except msgspec.DecodeError as e:
                self._die(f"the ready frame of engine {int.from_bytes(identity, 'little')} is not one of vLLM 0.32.0: {e}")
                return
            response = self._responses[identity]
            if response is not None and not response.vllm_version.startswith(WIRE_VERSION):
                logger.warning("EngineCore is of vLLM %s, this wire of %s: expect trouble", response.vllm_version, WIRE_VERSION)
            if len(self._responses) == len(self._identities) and not self._ready.done():
                if self._monitor is not None:
                    self._monitor.sealed = True
                self._ready.set_result(None)

    def _read_output(self, limit: int | None = MESSAGES_PER_TURN) -> None:
        """Take what is there, at most `limit` messages in this turn of the loop."""
        for _ in itertools.count() if limit is None else range(limit):
            if not self._alive():
                return
            try:
                frames = self._output.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._handle_output(frames)
        self._loop.call_soon(self._read_output)

    def _handle_output(self, frames: list[zmq.Frame]) -> None:
        if self._monitor is not None:
            self._read_monitor()  # first: it may hold the news that this connection is an engine's
            if not self._monitor.is_engine(frames[0]):
                logger.warning("ignored a message of %d frames from a stranger's connection to the output socket", len(frames))
                return
        if len(frames) == 1 and frames[0].buffer == ENGINE_CORE_DEAD:
            self._die("EngineCore has stopped (ENGINE_CORE_DEAD)", logging.WARNING)  # an ordered stop says it too
            return
        try:
            message: EngineCoreOutputs = self._decoder.decode([frame.buffer for frame in frames])
        except msgspec.DecodeError as e:
            logger.error("undecodable output of %d bytes, starting with %r: %s", len(frames[0]), frames[0].bytes[:64], e)
            self._die(f"EngineCore sent an output that does not decode ({e}); the answers in it are lost")
            return
        if message.utility_output is not None:
            self._finish_utility(message.utility_output)
        if message.outputs or message.scheduler_stats is not None:
            self._outputs.append(message)
            self._wake()

    def _finish_utility(self, output: UtilityOutput) -> None:
        future = self._utilities.get(output.call_id)
        if future is None or future.done():  # the caller gave up
            return
        if output.failure_message is not None:
            future.set_exception(EngineGenerateError(output.failure_message))
        else:
            future.set_result(output.result.value if output.result is not None else None)

    # ── death ───────────────────────────────────────────────────────────────────────────────────────────

    def _read_monitor(self) -> None:
        assert self._monitor is not None
        if self._alive() and self._monitor.read_events():
            # not from here: a message may be in the middle of being handled
            self._loop.call_soon(self._on_gone, "the connection to an EngineCore was lost")

    def _on_exit(self, message: str) -> None:
        """An engine process ended. Called by its watching thread; the loop may be gone already."""
        try:
            self._loop.call_soon_threadsafe(self._on_gone, message)
        except RuntimeError:
            logger.debug("after the event loop: %s", message)

    def _on_gone(self, message: str) -> None:
        """What an engine sent before it went is still good, and may name the cause itself (ENGINE_CORE_DEAD): read it first."""
        self._read_output(limit=None)
        self._die(message)

    def _die(self, message: str, level: int = logging.ERROR) -> None:
        """No more output will come: everybody who waits is told. The first cause counts."""
        if self.dead_error is not None:
            return
        if not self._closed:
            logger.log(level, "%s; the engine's own log may say more", message)  # clients, who cannot see it, get the message alone
        self.dead_error = EngineDeadError(message)
        for fd in self._readers:  # they are not read any more, and an unread descriptor would keep the loop spinning
            self._loop.remove_reader(fd)
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._utilities.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDeadError(message))
                future.exception()  # counts as retrieved: perhaps nobody waits
        self._wake()

    def _alive(self) -> bool:
        return self.dead_error is None

    def _raise_if_dead(self) -> None:
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))  # a new one: an exception collects the traceback of every raise

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
