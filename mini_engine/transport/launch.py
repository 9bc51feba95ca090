"""Launch: start EngineCore processes, or wait for ones started elsewhere, and shake hands with each.

Promises  Returns when every engine has said READY, or raises EngineDeadError, with the reason, and has left nothing running.
          An engine whose parent dies, however it dies, sees its end of a pipe close and stops.
Order     per engine NEW ─HELLO→ CONNECTED (we answer INIT) ─READY→ READY. An engine that says anything else is a wrong peer: fail, don't
          wait. What nobody sent on purpose (a port scanner's bytes) is logged and ignored.

Stands before any request. Blocking; runs before the event loop or beside it.    vLLM: v1/engine/utils.py; WIRE §2
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from mini_engine.config import EngineConfig
from mini_engine.exceptions import EngineDeadError, VLLMValidationError
from mini_engine.transport.listeners import Listeners
from mini_engine.transport.liveness import ProcessMonitor, describe_exit
from mini_engine.wire.codec import MsgpackDecoder
from mini_engine.wire.handshake import EngineHandshakeMetadata, EngineZmqAddresses, HandshakeStatus, engine_identity

logger = logging.getLogger(__name__)

POLL_MS = 50  #: how often a waiting handshake looks at the child processes
STOP_TIMEOUT_S = 5.0  #: between SIGTERM and SIGKILL
ENGINE_END_S = 2.0  #: from an engine's word that it ends, which a front-end may hear and end too, to its exit code, which says why


@dataclass(slots=True)
class EngineHandles:
    """Local engines that are ready, and how to stop them."""

    processes: list[subprocess.Popen[bytes]]
    identities: list[bytes]
    _alive_fd: int  #: write end of the pipe whose closing tells the engines that we are gone; -1 once closed
    _monitor: ProcessMonitor | None = field(default=None)

    def watch(self, on_exit: Callable[[str], None]) -> None:
        """From now on `on_exit(message)` is called, from another thread, when an engine ends."""
        self._monitor = ProcessMonitor(self.processes, on_exit)

    def shutdown(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM, up to `timeout` seconds, then SIGKILL; every process is reaped when this returns. Idempotent."""
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("EngineCore (pid %d) did not stop within %g s: killed", process.pid, timeout)
                process.kill()
                process.wait()
        if self._alive_fd >= 0:
            os.close(self._alive_fd)
            self._alive_fd = -1
        if self._monitor is not None:
            self._monitor.join()


def launch_engines(
    listeners: Listeners,
    config: EngineConfig,
    *,
    count: int = 1,
    ready_timeout_s: float = 600.0,
    more_listeners: Sequence[Listeners] = (),
    front_ends: Sequence[subprocess.Popen[bytes]] = (),
) -> EngineHandles:
    """Start `count` engines on this machine and return when all are ready.

    `more_listeners`: of the front-ends with client_index 1, 2, and so on. `front_ends`: processes to watch meanwhile.
    Raises EngineDeadError when one exits, says something wrong, or is not ready in time, VLLMValidationError when one exits because of its
    configuration; then all engines have been stopped.
    """
    assert listeners.local and listeners.directory is not None, "local engines need local listeners"
    address = f"ipc://{listeners.directory / 'handshake'}"
    identities = [engine_identity(index) for index in range(count)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    alive_read, alive_write = os.pipe()
    handles = EngineHandles([], identities, alive_write)
    try:
        with _bind_handshake(context, address) as sock:
            for index in range(count):
                handles.processes.append(_spawn(config, address, index, alive_read))
            _shake_hands(sock, identities, [listeners, *more_listeners], handles.processes, front_ends, ready_timeout_s)
    except BaseException:
        handles.shutdown()
        raise
    finally:
        os.close(alive_read)
        context.destroy(linger=0)
    return handles


def wait_for_remote_engines(
    listeners: Listeners,
    *,
    address: str,
    port: int,
    count: int = 1,
    ready_timeout_s: float = 600.0,
    on_bound: Callable[[str], None] | None = None,
    more_listeners: Sequence[Listeners] = (),
    front_ends: Sequence[subprocess.Popen[bytes]] = (),
) -> list[bytes]:
    """Bind the handshake at tcp://address:port (0: any free port), wait for `count` headless engines, and return their identities.

    `on_bound` is told the endpoint that engines have to connect to. Else as launch_engines.
    """
    identities = [engine_identity(index) for index in range(count)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with _bind_handshake(context, f"tcp://{address}:{port}") as sock:
            endpoint = sock.getsockopt_string(zmq.LAST_ENDPOINT)
            logger.info("waiting for %d headless engine(s) at %s", count, endpoint)
            if on_bound is not None:
                on_bound(endpoint)
            _shake_hands(sock, identities, [listeners, *more_listeners], [], front_ends, ready_timeout_s)
    finally:
        context.destroy(linger=0)
    return identities


def _bind_handshake(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    sock = context.socket(zmq.ROUTER)
    sock.linger = 0
    try:
        sock.bind(address)
    except zmq.ZMQError as e:
        sock.close()
        raise EngineDeadError(f"cannot wait for engines at {address}: {e}") from e
    return sock


def _spawn(config: EngineConfig, address: str, index: int, parent_fd: int) -> subprocess.Popen[bytes]:
    arguments = ["--config", json.dumps(config.to_dict()), "--handshake-address", address, "--engine-index", str(index)]
    return subprocess.Popen(
        [sys.executable, "-m", "mini_engine.engine_core.proc", *arguments, "--parent-fd", str(parent_fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=[parent_fd],
        process_group=0,  # Ctrl-C is for the parent, which lets open streams end before it stops the engine
    )


def _shake_hands(
    sock: zmq.Socket[bytes],
    identities: Sequence[bytes],
    listeners: Sequence[Listeners],
    processes: Sequence[subprocess.Popen[bytes]],
    front_ends: Sequence[subprocess.Popen[bytes]],
    timeout_s: float,
) -> None:
    """Bring every identity to READY. `processes` are watched meanwhile; none means remote, headless engines."""
    local = bool(processes)
    init = msgspec.msgpack.encode(
        EngineHandshakeMetadata(EngineZmqAddresses([each.input_address for each in listeners], [each.output_address for each in listeners]))
    )
    decoder = MsgpackDecoder(HandshakeStatus)
    states = dict.fromkeys(identities, "NEW")
    deadline = time.monotonic() + timeout_s
    while any(state != "READY" for state in states.values()):
        if any(front_end.poll() is not None for front_end in front_ends):
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in processes:
                    process.wait(ENGINE_END_S)
        for what, watched in (("EngineCore", processes), ("front-end process", front_ends)):
            for index, process in enumerate(watched):
                if (returncode := process.poll()) is not None:
                    error = VLLMValidationError if returncode == 2 else EngineDeadError  # 2: it cannot work as configured
                    raise error(f"{what} {index} ended during start-up with {describe_exit(returncode)}; see its log above")
        if time.monotonic() > deadline:
            missing = ", ".join(f"{_name(i)}: {state}" for i, state in states.items() if state != "READY")
            raise EngineDeadError(f"EngineCore not ready within {timeout_s:g} s ({missing})")
        if not sock.poll(POLL_MS):
            continue
        identity, *frames = sock.recv_multipart()
        try:
            message = decoder.decode([b"".join(frames)])
        except msgspec.DecodeError as e:
            if identity not in states:  # never harms the healthy side
                logger.warning("ignored %d undecodable bytes on the handshake socket from %r", sum(map(len, frames)), identity)
                continue
            raise EngineDeadError(f"{_name(identity)} does not speak the handshake of vLLM 0.32.0: {e}") from e
        if identity not in states:
            expected = ", ".join(map(_name, states))
            raise EngineDeadError(f"{_name(identity)} said {message.status}, but this front-end waits for {expected}: check --engine-index")
        if (message.local, message.headless) != (local, not local):
            raise EngineDeadError(
                f"{_name(identity)} says local={message.local}, headless={message.headless}; "
                f"expected local={local}, headless={not local}: a headless engine needs a front-end that waits for remote engines"
            )
        state = states[identity]
        if (state, message.status) == ("NEW", "HELLO"):
            sock.send_multipart([identity, init])
            states[identity] = "CONNECTED"
        elif (state, message.status) == ("CONNECTED", "READY"):
            states[identity] = "READY"
        else:
            raise EngineDeadError(f"{_name(identity)} said {message.status!r} while {state}; HELLO, then READY was expected")
        logger.debug("%s is %s", _name(identity), states[identity])


def _name(identity: bytes) -> str:
    return f"engine {int.from_bytes(identity, 'little')}" if len(identity) == 2 else f"peer {identity!r}"
