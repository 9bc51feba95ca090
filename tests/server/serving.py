"""`mini-engine serve` as a real process on a free port, and what tests ask of it."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import httpx
import psutil

CLI = [sys.executable, "-m", "mini_engine.entrypoints.cli"]
START_S = 30.0  #: generous: the machine may be busy; a start takes half a second
MESSAGES = [{"role": "user", "content": "hi"}]


def wait_until(condition: Callable[[], Any], what: str | Callable[[], str], timeout: float = 10.0) -> Any:
    """The condition's first true value. Looks every 10 ms: what is waited for happens in another process. `what`: for the failure."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {timeout:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.01)
    return value


def wait_ended(processes: Collection[psutil.Process], timeout: float = 10.0) -> None:
    """Until all have ended. A zombie has: whoever inherited it has only not asked yet."""

    def running() -> list[psutil.Process]:
        return [process for process in processes if _status(process) not in (None, psutil.STATUS_ZOMBIE)]

    wait_until(lambda: not running(), lambda: f"still running: {running()}", timeout)


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status() if process.is_running() else None
    except psutil.NoSuchProcess:
        return None


class Served:
    """A server that is ready. `stop()` in any case; the fixtures do."""

    def __init__(self, *options: str) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by stop()
        command = [*CLI, "serve", "--executor", "mock", "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, stdin=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.client: httpx.Client | None = None
        try:
            assert select.select([self.process.stdout], [], [], START_S)[0], f"not ready after {START_S:g} s: {self.errors()}"
            self.ready_line = self.process.stdout.readline()
            match = re.fullmatch(r"ready: (http://\S+)  model (\S+)\n", self.ready_line)
            assert match, f"{self.ready_line!r} {self.errors()}"
            self.url, self.model = match.groups()
            self.client = self.new_client()
        except BaseException:
            self.stop()
            raise

    def new_client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=20)

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()

    @property
    def core(self) -> psutil.Process:
        (core,) = psutil.Process(self.process.pid).children()
        return core

    def get(self, path: str, **options: Any) -> httpx.Response:
        assert self.client is not None
        return self.client.get(path, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        assert self.client is not None
        return self.client.post(path, json=body)

    def gauge(self, name: str) -> float:
        match = re.search(rf"^vllm:{name}{{.*}} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert match, name
        return float(match[1])

    def wait_gauges(self, **values: float) -> None:
        def now() -> dict[str, float]:
            return {name: self.gauge(name) for name in values}

        wait_until(lambda: now() == values, lambda: f"{now()} instead of {values}")

    def wait_idle(self) -> None:
        self.wait_gauges(num_requests_running=0, num_requests_waiting=0, kv_cache_usage_perc=0)
        assert self.get("/load").json() == {"server_load": 0}

    def signal_and_wait(self, signum: signal.Signals, timeout: float = 15.0) -> int:
        self.process.send_signal(signum)
        return self.process.wait(timeout)

    def stop(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.process.poll() is None:
            with contextlib.suppress(psutil.Error, ValueError):
                self.core.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Served]:
    served = Served(*options)
    try:
        yield served
    finally:
        served.stop()


def run_cli(*arguments: str, stdin: str = "", timeout: float = 50) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NO_PROXY": "*", "COLUMNS": "200"}
    return subprocess.run([*CLI, *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=timeout, env=environment)
