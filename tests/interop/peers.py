"""Front-ends and engines as real processes, ours and vLLM's, in every combination that can be had here.

    ours/ours        mini-engine serve                                       vllm-rs/ours     mini-engine serve --frontend rust
    python/ours      mini-engine serve --frontend python                     vllm/ours        vllm serve --data-parallel-size-local 0
    ours/vllm        vllm serve --headless, and mini-engine serve            ours@vllm        VLLM_RUST_FRONTEND_PATH=mini-engine vllm serve

`front-end/engine`; `ours@vllm` is our front-end process as the child of stock vLLM's supervisor.
Ports: ours are bound by the kernel's choice and read from a log; a stock process must be told one, and gets one just seen free.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil

from mini_engine.cache import cache_dir
from mini_engine.entrypoints.supervise import find_vllm_rs
from mini_engine.exceptions import VLLMValidationError
from mini_engine.model.default_model import prepare
from tests.not_run import not_run
from tests.server.serving import CLI, wait_until

NAME = "SmolLM2-135M-Instruct"  #: every pair serves under this name
START_S = 100.0  #: a stock engine takes 30 s on two idle cores
MOCK = ("--executor", "mock", "--mock-step-ms", "2")
REAL = ("--dtype", "float32", "--max-model-len", "2048")
STOCK = ("--served-model-name", NAME, "--host", "127.0.0.1")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "*"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@cache
def model_dir(weights: bool) -> str:
    return str(prepare(weights=weights))


def vllm_rs() -> str:
    try:
        return find_vllm_rs(os.environ.get("MINI_ENGINE_VLLM_RS"))
    except VLLMValidationError as e:
        not_run("downloads", str(e))


def stock_vllm() -> str:
    """The `vllm` command of an environment with vLLM's CPU build."""
    command = Path(os.environ.get("MINI_ENGINE_STOCK_VLLM") or cache_dir() / "vllm-cpu/bin/python").parent / "vllm"
    if not command.exists():
        not_run("stock-vllm", f"no {command}; get it with `make interop`")
    return str(command)


class Process:
    """A child with its output in a file; it and all that it started are gone after stop()."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by stop()
        self.popen = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=os.environ | ENVIRONMENT | environment
        )

    def output(self) -> str:
        self.log.seek(0)
        return re.sub(r"\x1b\[[\d;]*m", "", self.log.read())

    def wait_for(self, pattern: str, timeout: float = START_S) -> re.Match[str]:
        def look() -> re.Match[str] | None:
            found = re.search(pattern, self.output())
            assert found or self.popen.poll() is None, f"ended with {self.popen.returncode}: {self.output()[-3000:]}"
            return found

        return wait_until(look, lambda: f"no {pattern!r} in {self.output()[-3000:]}", timeout)

    def named(self, name: str) -> psutil.Process:
        """The one process below this one whose command line begins so."""
        (found,) = [p for p in psutil.Process(self.popen.pid).children(recursive=True) if " ".join(p.cmdline()).startswith(name)]
        return found

    def stop(self, timeout: float = 20.0) -> int:
        """Exit status."""
        try:
            family = psutil.Process(self.popen.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        self.popen.terminate()
        try:
            return self.popen.wait(timeout)
        finally:
            self.popen.kill()
            self.popen.wait()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=5)
            self.log.close()


class Server:
    """Something that answers at `url`."""

    def __init__(self, url: str, front_end: Process, engine: Process | None = None) -> None:
        self.url, self.front_end, self.engine = url, front_end, engine
        self.client = httpx.Client(base_url=url, trust_env=False, timeout=60)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.client.post(path, json=body) if not isinstance(body, bytes) else self.client.post(path, content=body)

    def gauge(self, name: str) -> float:
        match = re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert match, name
        return float(match[1])

    def wait_gauge(self, name: str, value: float) -> None:
        wait_until(lambda: self.gauge(name) == value, lambda: f"{name} is {self.gauge(name)} instead of {value}")

    def wait_idle(self) -> None:
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            self.wait_gauge(name, 0)


@contextlib.contextmanager
def running(*command: str, **environment: str) -> Iterator[Process]:
    process = Process(*command, **environment)
    try:
        yield process
    finally:
        if not process.log.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):  # killed then; who cares about a clean end has stopped it before
                process.stop()


@contextlib.contextmanager
def answering(url: str, front_end: Process, engine: Process | None = None) -> Iterator[Server]:
    server = Server(url, front_end, engine)

    def healthy() -> bool:
        for process in filter(None, (front_end, engine)):
            assert process.popen.poll() is None, process.output()[-3000:]
        with contextlib.suppress(httpx.TransportError):
            return server.get("/health").status_code == 200
        return False

    with server.client:
        wait_until(healthy, "it does not answer /health", START_S)
        yield server


# ── the combinations ────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def serve(kind: str, *options: str) -> Iterator[Server]:
    """`mini-engine serve --frontend KIND`: our engine, launched and supervised by us."""
    more = ("--vllm-rs", vllm_rs()) if kind == "rust" else ()
    with running(*CLI, "serve", "--port", "0", "--frontend", kind, *more, *options) as process:
        url = process.wait_for(r"ready: (http://\S+)  model")[1]
        with answering(url, process) as server:
            yield server


@contextlib.contextmanager
def our_front_end(*options: str) -> Iterator[tuple[Process, str]]:
    """Waiting for a headless engine; (process, its rpc port)."""
    command = [*CLI, "serve", "--port", "0", "--data-parallel-size-local", "0", "--data-parallel-rpc-port", "0", *options]
    with running(*command) as process:
        yield process, process.wait_for(r"headless engine\(s\) at tcp://127.0.0.1:(\d+)")[1]


@contextlib.contextmanager
def our_engine(rpc_port: str | int, *options: str) -> Iterator[Process]:
    with running(*CLI, "engine", "--data-parallel-rpc-port", str(rpc_port), *options) as process:
        yield process


@contextlib.contextmanager
def ours_headless(*options: str) -> Iterator[Server]:
    with our_front_end() as (front_end, rpc_port), our_engine(rpc_port, *options) as engine:
        url = front_end.wait_for(r"ready: (http://\S+)  model")[1]
        with answering(url, front_end, engine) as server:
            yield server


@contextlib.contextmanager
def stock_front_end(command: list[str], *options: str) -> Iterator[Server]:
    """A front-end of vLLM's without an engine of its own, and our headless engine."""
    rpc_port, port = free_port(), free_port()
    where = ["--data-parallel-size-local", "0", "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(rpc_port)]
    full = [*command, "serve", model_dir(False), *STOCK, "--port", str(port), *where]
    url = f"http://127.0.0.1:{port}"
    with running(*full) as front_end, our_engine(rpc_port, *options) as engine, answering(url, front_end, engine) as server:
        yield server


@contextlib.contextmanager
def over_stock_engine() -> Iterator[Server]:
    """Our front-end, unchanged, over vLLM's EngineCore."""
    command = stock_vllm()
    with our_front_end() as (front_end, rpc_port):
        where = [
            "--headless",
            "--data-parallel-size-local",
            "1",
            "--data-parallel-address",
            "127.0.0.1",
            "--data-parallel-rpc-port",
            rpc_port,
        ]
        with running(command, "serve", model_dir(True), *REAL, "--enforce-eager", *where) as engine:
            url = front_end.wait_for(r"ready: (http://\S+)  model")[1]
            with answering(url, front_end, engine) as server:
                yield server


@contextlib.contextmanager
def under_stock_supervisor() -> Iterator[Server]:
    """Stock vLLM launches its engine, and our front-end where it expects vllm-rs."""
    program, port = Path(sys.executable).parent / "mini-engine", free_port()
    environment = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(program)}
    command = [stock_vllm(), "serve", model_dir(True), *REAL, "--enforce-eager", *STOCK, "--port", str(port)]
    with running(*command, **environment) as process, answering(f"http://127.0.0.1:{port}", process) as server:
        yield server
