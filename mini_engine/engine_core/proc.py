"""EngineCoreProc: an EngineCore in a process of its own. Handshake, the busy loop, the end. Started as

    python -m mini_engine.engine_core.proc --config JSON --handshake-address ADDR --engine-index N [--headless] [--parent-fd FD]

    core-loop (main thread)      handshake → build the engine → start IO → READY → loop → ABORT outputs → ENGINE_CORE_DEAD
    core-input, core-output      io.py
    core-watch                   lifetime.py: SIGTERM, SIGINT, parent gone

The loop: without work, sleep in input_queue.get(); with work, take what has arrived without waiting, then one step, and so on.
Exit codes: 0 asked to stop, 1 died, 2 cannot work as configured.
Promises  ENGINE_CORE_DEAD is the last frame to every front-end on every way out that can still send, the orderly one included: a
          remote front-end learns of an engine's end by nothing else (WIRE T15).
Not here  any policy: what to schedule, when to stop a request (scheduler/).

Forms 4, 5 and 8 of a request.    vLLM: v1/engine/core.py::EngineCoreProc
"""

import argparse
import gc
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import setproctitle
import zmq

from mini_engine.config import EngineConfig
from mini_engine.engine_core.core import EngineCore, finish_outputs
from mini_engine.engine_core.io import EngineCoreIO, linger_ms, send_engine_dead
from mini_engine.engine_core.lifetime import LifetimeWatch
from mini_engine.engine_core.utility import invoke_utility
from mini_engine.exceptions import VLLMValidationError
from mini_engine.observe.logging import setup
from mini_engine.scheduler.request import RequestStatus
from mini_engine.wire.codec import MsgpackDecoder
from mini_engine.wire.handshake import EngineHandshakeMetadata, EngineZmqAddresses, HandshakeStatus, engine_identity
from mini_engine.wire.messages import EngineCoreOutputs, EngineCoreRequestType, FinishReason, SchedulerStats, UtilityOutput

logger = logging.getLogger("mini_engine.engine_core.proc")  # not __name__, which is "__main__" when the process is this module

HANDSHAKE_TIMEOUT_S = 300  #: from HELLO to INIT
MAX_MESSAGES_PER_STEP = 256  #: taken in between two steps; a call that fails takes 30 µs


@contextmanager
def startup_handshake(address: str, engine_index: int, headless: bool) -> Iterator[EngineZmqAddresses]:
    """HELLO, then the addresses that INIT brings; READY when the body has ended well, nothing when it raised (WIRE §2.2)."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.IDENTITY, engine_identity(engine_index))
        sock.setsockopt(zmq.LINGER, linger_ms(address))
        sock.connect(address)
        sock.send(msgspec.msgpack.encode(HandshakeStatus("HELLO", local=not headless, headless=headless)))
        if headless:
            logger.info("waiting for a front-end at %s", address)
        if not sock.poll(HANDSHAKE_TIMEOUT_S * 1000):
            sock.setsockopt(zmq.LINGER, 0)
            raise RuntimeError(f"no front-end answered at {address} within {HANDSHAKE_TIMEOUT_S} s")
        try:
            addresses = MsgpackDecoder(EngineHandshakeMetadata).decode(sock.recv_multipart()).addresses
        except msgspec.DecodeError as e:
            raise RuntimeError(f"the front-end at {address} sent an INIT that cannot be read: {e}") from e
        if not addresses.inputs or len(addresses.inputs) != len(addresses.outputs):
            raise RuntimeError(f"INIT must have as many inputs as outputs, and one at least, got {addresses.inputs}, {addresses.outputs}")
        yield addresses
        sock.send(msgspec.msgpack.encode(HandshakeStatus("READY", local=not headless, headless=headless)))


class EngineCoreProc(EngineCore):
    """Constructed READY. Everything here runs on the core loop's thread, but for request_shutdown()."""

    def __init__(self, config: EngineConfig, handshake_address: str, engine_index: int, *, headless: bool, watch: LifetimeWatch) -> None:
        self._shutdown_reason: str | None = None
        with startup_handshake(handshake_address, engine_index, headless) as addresses:
            watch.addresses += addresses.outputs
            watch.attach(partial(send_engine_dead, addresses.outputs))
            super().__init__(config, engine_index=engine_index)
            self.io = EngineCoreIO(addresses, engine_index, self.preprocess, self.aborts_queue, config.overlay)
            self.io.start(msgspec.msgpack.encode(self.ready_response()))
            watch.attach(self.io.stop_output, self.request_shutdown)
            gc.collect()
            gc.freeze()  # what is there now stays: no collection need look at it again, in the middle of a step

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────

    def run_busy_loop(self) -> None:
        """Until request_shutdown(). Raises what breaks the engine."""
        while self._shutdown_reason is None:
            self._process_input_queue()
            outputs, _ = self.step_fn()
            for item in outputs.items():
                self.io.output_queue.put(item)
            if outputs and not self.has_work():  # the load is told to one front-end at a time: that there is none any more, to all
                for client_index in set(range(len(self.io.addresses.outputs))) - outputs.keys():
                    self.io.output_queue.put((client_index, EngineCoreOutputs(scheduler_stats=SchedulerStats())))
        logger.info("stopping: %s", self._shutdown_reason)

    def _process_input_queue(self) -> None:
        """Sleep until there is work; then take in what has arrived, without waiting, and not so much that a flood stops the streams."""
        while not self.has_work() and self._shutdown_reason is None:
            self._handle_client_request(*self.io.input_queue.get())
        for _ in range(min(self.io.input_queue.qsize(), MAX_MESSAGES_PER_STEP)):
            self._handle_client_request(*self.io.input_queue.get())

    def _handle_client_request(self, request_type: bytes, payload: Any) -> None:
        """While shutting down, a request is aborted and a call fails: everybody gets an answer."""
        stopping = self._shutdown_reason is not None
        match request_type:
            case EngineCoreRequestType.ADD:
                outputs = finish_outputs(payload.request_id, FinishReason.ABORT) if stopping else self.admit(payload)
                if outputs is not None:
                    self.io.output_queue.put((payload.client_index, outputs))
            case EngineCoreRequestType.ABORT:
                self.abort_requests_in_order(payload)
            case EngineCoreRequestType.UTILITY:
                client_index, call = payload
                if stopping:
                    output = UtilityOutput(call.call_id, f"Call to {call.method:.80} method failed: the engine is shutting down")
                else:
                    output = invoke_utility(self, call.call_id, call.method, call.args)
                self.io.output_queue.put((client_index, EngineCoreOutputs(utility_output=output)))
            case EngineCoreRequestType.EXECUTOR_FAILED:
                raise RuntimeError(payload)
            case EngineCoreRequestType.WAKEUP:
                self._shutdown_reason = self._shutdown_reason or payload

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────

    def request_shutdown(self, reason: str) -> None:
        """Ask the loop to leave. Any thread."""
        self.io.input_queue.put((EngineCoreRequestType.WAKEUP, reason))

    def shutdown(self) -> None:
        """Answer everybody, say ENGINE_CORE_DEAD, release the device.

        Input first, so that what has arrived by then is all there is to answer; the device last: it may be what is broken.
        """
        self.io.stop_input()
        if self._shutdown_reason is not None:  # a dead engine's requests are told by ENGINE_CORE_DEAD; its scheduler may be what broke
            for request_id, client_index in self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED):
                self.io.output_queue.put((client_index, finish_outputs(request_id, FinishReason.ABORT)))
            while not self.io.input_queue.empty():
                self._handle_client_request(*self.io.input_queue.get())
        self.io.stop_output()
        super().shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """The process. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="mini_engine.engine_core.proc", description="One EngineCore process, started by a launcher.")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--handshake-address", required=True)
    parser.add_argument("--engine-index", type=int, default=0)
    parser.add_argument("--headless", action="store_true", help="the front-end is on another machine, or was not started by our launcher")
    parser.add_argument("--parent-fd", type=int, help="read end of a pipe; its EOF says that the parent is gone")
    args = parser.parse_args(argv)
    setup("core")
    setproctitle.setproctitle("mini-engine: core")
    setproctitle.setthreadtitle("core-loop")
    watch = LifetimeWatch(args.parent_fd, args.handshake_address)
    engine: EngineCoreProc | None = None
    try:
        config = EngineConfig.from_dict(json.loads(args.config))
        engine = EngineCoreProc(config, args.handshake_address, args.engine_index, headless=args.headless, watch=watch)
        engine.run_busy_loop()
        return 0
    except VLLMValidationError as e:
        logger.error("%s", e)
        return 2 if engine is None else 1
    except Exception:
        logger.exception("EngineCore died" if engine is not None else "EngineCore failed to start")
        return 1
    finally:
        if engine is not None:
            engine.shutdown()
        else:
            watch.send_dead()
        watch.close()


if __name__ == "__main__":
    sys.exit(main())
