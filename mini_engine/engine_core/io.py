"""The two IO threads of an EngineCore process, and the queues between them and the core loop.

    front-ends ─ROUTER/DEALER→ core-input  ─input_queue→  core-loop ─output_queue→ core-output ─PUSH/PULL→ front-ends
                                    └───────aborts_queue────↗

core-input   decodes, checks, builds Requests (hashing prompts), so that the loop does not; owns the DEALER sockets, one per front-end.
core-output  encodes and sends; owns the PUSH sockets. Both let go of the GIL while they wait for a socket or a queue.

Promises  nothing that arrives ends a thread: a message that makes no sense is that request's ERROR, that call's failure, or a log line
          (WIRE T3, T8). If a thread dies all the same, by our fault, every front-end gets ENGINE_CORE_DEAD at once and the core
          loop is told: an engine is never alive but deaf.
          Everything put into output_queue before stop_output() is sent before ENGINE_CORE_DEAD, which is always the last frame.
Not here  what the messages do (core.py, proc.py).

Forms 4 and 8 of a request.    vLLM: v1/engine/core.py::EngineCoreProc.process_input_sockets, process_output_sockets
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import msgspec
import setproctitle
import zmq

from mini_engine.engine_core.core import Refusal
from mini_engine.exceptions import VLLMValidationError
from mini_engine.scheduler.request import Request
from mini_engine.wire.codec import MsgpackDecoder, MsgpackEncoder
from mini_engine.wire.handshake import EngineZmqAddresses, engine_identity
from mini_engine.wire.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
    UtilityRequest,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0  #: from thread start to connected sockets
OUTPUT_LINGER_MS = 4000  #: how long the last frames may take after the sockets are closed
LOCAL_LINGER_MS = 500  #: the same on this machine: a front-end that is there takes them at once, and sees a process end without them


def linger_ms(address: str) -> int:
    """How long a socket that is closed may go on sending to `address`."""
    return LOCAL_LINGER_MS if address.startswith("ipc:") else OUTPUT_LINGER_MS


@contextmanager
def _push_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Iterator[zmq.Socket[bytes]]:
    with context.socket(zmq.PUSH) as sock:
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.LINGER, linger_ms(address))
        sock.connect(address)
        yield sock


def send_engine_dead(output_addresses: Sequence[str]) -> None:
    """ENGINE_CORE_DEAD to every front-end over sockets of its own, for when there is no output thread. Waits at most the linger."""
    with zmq.Context() as context:
        for address in output_addresses:
            try:
                with _push_socket(context, address) as sock:
                    sock.send(ENGINE_CORE_DEAD)
            except zmq.ZMQError as e:  # the others must hear of it all the same
                logger.error("could not tell %s that the engine is dead: %s", address, e)


def _readable(field: msgspec.Raw) -> Any:
    """One field of a message that makes no sense, by itself: None if it cannot be read, so that it hides no other."""
    try:
        return msgspec.msgpack.decode(field)
    except Exception:  # e.g. a map as the key of a map, text that is no UTF-8
        return None


class EngineCoreIO:
    """Threads, sockets and queues. Made, started and stopped by the core loop's thread."""

    def __init__(
        self,
        addresses: EngineZmqAddresses,
        engine_index: int,
        preprocess: Callable[[EngineCoreRequest], Request | Refusal],
        aborts_queue: queue.SimpleQueue[list[str]],
        overlay: Mapping[str, str] = {},
    ) -> None:
        self.addresses = addresses
        self.engine_index = engine_index
        self.aborts_queue = aborts_queue
        #: (request type, Request | Refusal | list of ids | (client_index, UtilityRequest) | reason), for the core loop
        self.input_queue: queue.SimpleQueue[tuple[bytes, Any]] = queue.SimpleQueue()
        #: (client_index, message), or ENGINE_CORE_DEAD: the end
        self.output_queue: queue.SimpleQueue[tuple[int, EngineCoreOutputs] | bytes] = queue.SimpleQueue()
        self._preprocess = preprocess
        self._encoder = MsgpackEncoder(overlay)
        self._add_decoder = MsgpackDecoder(EngineCoreRequest)
        self._abort_decoder = MsgpackDecoder(list[str])
        self._utility_decoder = MsgpackDecoder(UtilityRequest)
        self._fields_decoder = MsgpackDecoder(list[msgspec.Raw])
        self._input_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its end ends the input thread
        self._threads = [
            threading.Thread(target=self._run, args=(self.process_output_sockets,), name="core-output"),
            threading.Thread(target=self._run, args=(self.process_input_sockets,), name="core-input"),
        ]
        self._ready = threading.Barrier(len(self._threads) + 1)

    def start(self, ready_payload: bytes) -> None:
        """Connect everything; `ready_payload` is each front-end's first frame. Raises RuntimeError if a thread fails to start."""
        self._ready_payload = ready_payload
        for thread in self._threads:
            thread.start()
        try:
            self._ready.wait(START_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise RuntimeError(f"the IO threads did not connect to {self.addresses.inputs} and {self.addresses.outputs}") from None

    def stop_input(self) -> None:
        """Nothing more enters input_queue after this."""
        self._input_context.term()  # the thread's poll raises ContextTerminated; returns when its sockets are closed
        self._threads[1].join()

    def stop_output(self) -> None:
        """Everything queued, then ENGINE_CORE_DEAD, is sent, or the linger is over. Any thread."""
        self.output_queue.put(ENGINE_CORE_DEAD)
        self._threads[0].join(OUTPUT_LINGER_MS / 1000 + 1)

    def _run(self, body: Callable[[], None]) -> None:
        name = threading.current_thread().name
        setproctitle.setthreadtitle(name)
        try:
            body()
        except zmq.ContextTerminated:
            pass  # stop_input()
        except BaseException:
            logger.exception("%s died", name)
            self._ready.abort()
            self.input_queue.put((EngineCoreRequestType.EXECUTOR_FAILED, f"thread {name} died"))
            if body == self.process_output_sockets:
                send_engine_dead(self.addresses.outputs)
            else:
                self.output_queue.put(ENGINE_CORE_DEAD)

    # ── core-input ──────────────────────────────────────────────────────────────────────────────────────

    def process_input_sockets(self) -> None:
        """Input thread. Owns the DEALER sockets: opened, used and closed here only (zmq sockets are not thread-safe)."""
        with ExitStack() as stack:
            poller = zmq.Poller()
            client_indices: dict[Any, int] = {}
            for client_index, address in enumerate(self.addresses.inputs):
                sock = stack.enter_context(self._input_context.socket(zmq.DEALER))
                sock.setsockopt(zmq.IDENTITY, engine_identity(self.engine_index))
                sock.setsockopt(zmq.RCVHWM, 0)
                sock.setsockopt(zmq.LINGER, 0)
                sock.connect(address)
                sock.send(self._ready_payload)  # until it has this, a ROUTER drops what it has for us
                poller.register(sock, zmq.POLLIN)
                client_indices[sock] = client_index
            self._ready.wait(START_TIMEOUT_S)
            while True:
                for sock, _ in poller.poll():
                    self._receive(client_indices[sock], sock.recv_multipart())

    def _receive(self, client_index: int, frames: list[bytes]) -> None:
        """One message, which arrived on the socket of this front-end. Never raises for what it says."""
        kind, *payload = frames
        try:
            match kind:
                case EngineCoreRequestType.ADD:
                    request = self._add_decoder.decode(payload)
                    if not self._is_client(request.client_index):
                        raise VLLMValidationError(f"client_index must be in [0, {len(self.addresses.outputs)}), got {request.client_index}")
                    self.input_queue.put((kind, self._preprocess(request)))
                case EngineCoreRequestType.ABORT:
                    request_ids = self._abort_decoder.decode(payload)
                    # In both queues: at once if a step is running, and again in order, behind an ADD that may still be queued.
                    self.aborts_queue.put(request_ids)
                    self.input_queue.put((kind, request_ids))
                case EngineCoreRequestType.UTILITY:
                    call = self._utility_decoder.decode(payload)
                    asked = call.client_index if self._is_client(call.client_index) else client_index
                    self.input_queue.put((kind, (asked, call)))
                case _:
                    raise VLLMValidationError("unknown type")
        except (msgspec.DecodeError, VLLMValidationError) as e:
            self._refuse(client_index, kind, payload, str(e))

    def _refuse(self, client_index: int, kind: bytes, payload: list[bytes], reason: str) -> None:
        """Answer a message that makes no sense. Whose is it? What can be read without types says: the id is needed, the client may be
        the one whose socket it came on. Else there is nobody to tell but the log."""
        try:
            fields = [_readable(field) for field in self._fields_decoder.decode(payload)]
        except msgspec.DecodeError:
            fields = []
        match kind, fields:
            case EngineCoreRequestType.ADD, [str(request_id), *rest]:
                asked = rest[10] if len(rest) > 10 else None
                refusal = Refusal(request_id, asked if self._is_client(asked) else client_index, reason)
                self.input_queue.put((kind, refusal))
            case EngineCoreRequestType.UTILITY, [_, call_id, *_] if type(call_id) is int:  # not a bool: no client could decode the answer
                reply = EngineCoreOutputs(utility_output=UtilityOutput(call_id, f"malformed utility call: {reason}"))
                self.output_queue.put((client_index, reply))
            case _:
                logger.error("ignored a message %.20r (%d frames) from front-end %d: %s", kind, 1 + len(payload), client_index, reason)

    def _is_client(self, client_index: object) -> TypeGuard[int]:
        return type(client_index) is int and 0 <= client_index < len(self.addresses.outputs)

    # ── core-output ─────────────────────────────────────────────────────────────────────────────────────

    def process_output_sockets(self) -> None:
        """Output thread. Owns the PUSH sockets: opened, used and closed here only.

        Frame 0 is copied by zmq, so one buffer serves for ever, whoever reads late or never. Auxiliary frames are arrays' own memory,
        which zmq holds a reference to.
        """
        buffer = bytearray()
        with zmq.Context() as context, ExitStack() as stack:
            sockets = [stack.enter_context(_push_socket(context, address)) for address in self.addresses.outputs]
            self._ready.wait(START_TIMEOUT_S)
            while not isinstance(item := self.output_queue.get(), bytes):
                client_index, outputs = item
                outputs.engine_index = self.engine_index
                frame, *arrays = self._encoder.encode_into(outputs, buffer)
                sockets[client_index].send(frame, zmq.SNDMORE if arrays else 0)
                if arrays:
                    sockets[client_index].send_multipart(arrays, copy=False)
            for sock in sockets:
                sock.send(ENGINE_CORE_DEAD)
