"""How an EngineCore process ends: on SIGTERM, on SIGINT, with its parent; orderly if it can, but in any case.

One thread, core-watch, waits for a signal or for the end of the parent's pipe, tells the core loop, and gives it SHUTDOWN_DEADLINE_S
to leave. A loop that is stuck in a device call cannot be reached; then the front-ends get ENGINE_CORE_DEAD from here, and the process
ends. While the engine is still being built there is nothing to tidy up: ENGINE_CORE_DEAD if the front-ends are known, and the end.

Why a thread: a Python signal handler runs on the main thread between two bytecodes, where it may not touch the loop's queue or locks;
set_wakeup_fd is written to even while the main thread is inside C.

Beside the request's path.    vLLM: v1/engine/core.py::run_engine_core (signal handlers), v1/utils.py (parent sentinel)
"""

import logging
import os
import select
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

SHUTDOWN_DEADLINE_S = 5.0


class LifetimeWatch:
    """Made, attached and closed on the main thread of the process."""

    def __init__(self, parent_fd: int | None, address: str) -> None:
        """parent_fd: read end of a pipe whose only write end the parent holds; it reads EOF when the parent is gone. None: no parent."""
        self.addresses = [address]  #: where the parent has made sockets
        self._lock = threading.Lock()
        self._request_shutdown: Callable[[str], None] | None = None
        self.send_dead: Callable[[], None] = lambda: None  #: ENGINE_CORE_DEAD to the front-ends that are known
        self._left = threading.Event()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._watched = [self._read_fd] if parent_fd is None else [self._read_fd, parent_fd]
        signal.set_wakeup_fd(self._write_fd)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: None)  # a handler of Python's there must be, or nothing is written to the wakeup fd
        self._thread = threading.Thread(target=self._run, name="core-watch", daemon=True)
        self._thread.start()

    def attach(self, send_dead: Callable[[], None], request_shutdown: Callable[[str], None] | None = None) -> None:
        """How to tell the front-ends, once they are known; how to tell the core loop, once there is one. Called from core-watch."""
        with self._lock:
            self.send_dead, self._request_shutdown = send_dead, request_shutdown

    def close(self) -> None:
        """The process is leaving by itself."""
        self._left.set()
        os.write(self._write_fd, b"\0")
        self._thread.join()

    def _wait(self) -> tuple[str, int]:
        """(why to stop, the exit code for stopping at once)."""
        ready, _, _ = select.select(self._watched, [], [])
        if self._read_fd not in ready:
            for directory in (Path(address.removeprefix("ipc://")).parent for address in self.addresses):
                if directory.name.startswith("mini_engine-"):  # transport/listeners.py's, and nobody else is left to remove it
                    shutil.rmtree(directory, ignore_errors=True)
            return "the parent process is gone", 1
        signum = os.read(self._read_fd, 1)[0]
        return (signal.Signals(signum).name, 128 + signum) if signum else ("", 0)

    def _run(self) -> None:
        reason, exit_code = self._wait()
        if self._left.is_set():
            return
        with self._lock:
            if self._request_shutdown is None:
                logger.warning("stopped while starting: %s", reason)
                self.send_dead()
                os._exit(exit_code)
        self._request_shutdown(reason)
        if not self._left.wait(SHUTDOWN_DEADLINE_S):
            logger.critical("the core loop did not stop within %.0f s (a device call that hangs?): leaving without it", SHUTDOWN_DEADLINE_S)
            self.send_dead()
            os._exit(1)
