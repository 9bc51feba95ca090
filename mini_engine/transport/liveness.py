"""Liveness: who tells us that an engine is gone, before a request waits for ever.

Local     the process itself: one thread per engine waits for its exit, which a kill -9 causes as well as a crash.
Remote    the connection: the ZMTP heartbeats that listeners.py sets, and a monitor on our PULL socket. A killed process closes its
          connection at once, a machine that vanished stops answering. Nothing of it shows on the wire.
Both      ENGINE_CORE_DEAD, where the engine can still say it (client.py).

Beside a request's path.    vLLM: core_client.py::MPClientEngineMonitor (local only: remote engines are not monitored there)
"""

import logging
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)


def describe_exit(returncode: int) -> str:
    """`exit code 3`, or `signal 9 (SIGKILL)`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {-returncode} ({signal.Signals(-returncode).name})"
    except ValueError:
        return f"signal {-returncode}"


class ProcessMonitor:
    """Calls `on_exit(message)` when a process ends, once per process, from a thread of its own."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], on_exit: Callable[[str], None]) -> None:
        def wait(index: int, process: subprocess.Popen[bytes]) -> None:
            returncode = process.wait()
            on_exit(f"EngineCore {index} (pid {process.pid}) ended with {describe_exit(returncode)}")

        self._threads = [
            # daemon: a caller that never shuts down must not hang the interpreter's exit
            threading.Thread(target=wait, args=(index, process), name=f"engine-watch-{index}", daemon=True)
            for index, process in enumerate(processes)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Only after every process was stopped."""
        for thread in self._threads:
            thread.join()


class ConnectionMonitor:
    """Which connections to our PULL socket are engines', and whether one of them has closed.

    A PUSH peer has no name, so the first `count` connections that stay open are taken for the engines'. Later ones are strangers,
    whose coming, going and garbage are nobody's death. Made before the socket is bound: what it did not see is a stranger. Event
    loop thread only.
    """

    def __init__(self, sock: zmq.Socket[bytes], count: int) -> None:
        self.socket = sock.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        self.sealed = False  #: every engine has said that it is ready: what is lost from now on is lost for good
        self._count = count
        self._peers: set[int] = set()  # descriptors, as ZMQ's events and SRCFD name them
        self._watched = sock

    def read_events(self) -> bool:
        """Take all pending events. True when an engine's connection has closed since it was sealed."""
        lost = False
        while True:
            try:
                event = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return lost
            if event["event"] == zmq.Event.ACCEPTED:
                if len(self._peers) < self._count:  # one that connects after its ready frame is counted too
                    self._peers.add(event["value"])
            elif event["value"] in self._peers:
                if self.sealed:
                    lost = True  # it stays a peer: what it sent before it went may still be unread
                else:
                    self._peers.remove(event["value"])

    def is_engine(self, frame: zmq.Frame) -> bool:
        """Whether a message came over an engine's connection."""
        return frame.get(zmq.SRCFD) in self._peers

    def close(self) -> None:
        self._watched.disable_monitor()
