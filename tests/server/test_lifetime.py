"""Start, stop and death of `mini-engine serve`: what clients, probes and the shell see."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mini_engine.entrypoints.serve import bind_http
from mini_engine.exceptions import VLLMValidationError
from tests.server.fake import parse_sse
from tests.server.serving import CLI, MESSAGES, START_S, Served, run_cli, serving, wait_ended, wait_until

LONG: dict[str, Any] = {"prompt": [9], "max_tokens": 8000, "ignore_eos": True}


class Background:
    """Requests on threads; `answers` fills as they end: (status, body, seconds since `mark()`)."""

    def __init__(self, server: Served, bodies: list[dict[str, Any]]) -> None:
        self.answers: list[tuple[int, bytes, float]] = []
        self.first_bytes = threading.Semaphore(0)
        self._zero = time.monotonic()
        self.threads = [threading.Thread(target=self._run, args=(server, body)) for body in bodies]
        for thread in self.threads:
            thread.start()

    def _run(self, server: Served, body: dict[str, Any]) -> None:
        with server.new_client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            raw = b""
            for data in response.iter_raw():
                if not raw:
                    self.first_bytes.release()
                raw += data
            self.answers.append((response.status_code, raw, time.monotonic() - self._zero))

    def mark(self) -> None:
        self._zero = time.monotonic()

    def since_mark(self) -> float:
        return time.monotonic() - self._zero

    def join(self, timeout: float = 15.0) -> list[tuple[int, bytes, float]]:
        for thread in self.threads:
            thread.join(timeout)
            assert not thread.is_alive(), "a request has not ended"
        return self.answers


def test_names_that_the_operating_system_shows(server: Served) -> None:
    assert psutil.Process(server.process.pid).cmdline()[0] == "mini-engine: api"
    assert server.core.cmdline()[0] == "mini-engine: core"


def test_killed_engine() -> None:
    """Open streams, an answer that is not streamed, and queued ones: all end with an error within a second. 503, then exit 1."""
    with serving("--mock-step-ms", "10", "--max-num-seqs", "6") as server:
        bodies = [LONG | {"stream": True} for _ in range(8)] + [LONG]
        background = Background(server, bodies)
        for _ in range(4):
            assert background.first_bytes.acquire(timeout=10)
        server.wait_gauges(num_requests_running=6, num_requests_waiting=3)
        core = server.core
        background.mark()
        core.kill()
        answers = background.join()
        died = time.monotonic()
        assert max(seconds for _, _, seconds in answers) < 1.0
        for status, raw, _ in answers:
            if status == 200:
                error = list(parse_sse(raw))[-1]["error"]
            else:
                assert status == 500
                error = json.loads(raw)["error"]
            assert error["code"] == "engine_dead" and "SIGKILL" in error["message"]
        assert server.get("/health").status_code == server.get("/ping").status_code == 503
        response = server.post("/v1/completions", **LONG)  # a new one: not now, perhaps elsewhere
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead" and "log" not in response.text
        assert server.process.wait(15) == 1
        assert background.since_mark() > 4 and time.monotonic() - died < 8


def test_crashing_engine_says_why() -> None:
    with serving("--mock-crash-at-step", "5") as server:
        response = server.post("/v1/completions", **LONG)
        assert response.status_code == 500 and response.json()["error"]["code"] == "engine_dead"
        assert server.get("/health").status_code == 503
        assert server.signal_and_wait(signal.SIGTERM) == 1
        assert "step 5" in server.errors()


def test_stopped_engine_is_told_from_a_dead_one() -> None:
    with serving("--mock-step-ms", "5") as server:
        background = Background(server, [{"prompt": [9], "max_tokens": 100, "ignore_eos": True, "stream": True}])
        assert background.first_bytes.acquire(timeout=10)
        server.core.send_signal(signal.SIGSTOP)
        wait_until(lambda: server.core.status() == psutil.STATUS_STOPPED, "SIGSTOP")
        response = server.get("/ping", params={"timeout_s": 0.3})
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_stuck"
        assert "0.3 s" in response.json()["error"]["message"]
        assert server.get("/health").status_code == 200
        server.core.send_signal(signal.SIGCONT)
        assert server.get("/ping").status_code == 200
        ((_, raw, _),) = background.join()
        assert list(parse_sse(raw))[-1]["choices"][0]["finish_reason"] == "length"


def test_hanging_engine_is_stuck() -> None:
    with serving("--mock-hang-at-step", "3", "--shutdown-timeout", "0.1") as server:
        background = Background(server, [LONG])
        server.wait_gauges(num_requests_running=1)
        wait_until(lambda: server.get("/ping", params={"timeout_s": 0.2}).status_code == 503, "the engine hangs")
        assert server.signal_and_wait(signal.SIGTERM, 25) == 0
        ((status, raw, _),) = background.join()
        assert status == 503 and json.loads(raw)["error"]["code"] == "server_stopping"


@pytest.mark.parametrize("frontend", ["inline", "python"])
def test_a_trusted_template_that_never_ends_does_not_keep_the_server(frontend: str) -> None:
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    with serving("--trust-request-chat-template", "--frontend", frontend) as server:
        with pytest.raises(httpx.ReadTimeout), server.new_client() as client:
            client.post("/v1/chat/completions", json={"messages": MESSAGES, "chat_template": endless}, timeout=0.5)
        assert server.signal_and_wait(signal.SIGTERM) == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stop_lets_open_streams_end(signum: signal.Signals) -> None:
    with serving("--mock-step-ms", "5", "--shutdown-timeout", "10") as server:
        background = Background(server, [{"prompt": [9], "max_tokens": 100, "ignore_eos": True, "stream": True}])
        assert background.first_bytes.acquire(timeout=10)
        assert server.signal_and_wait(signum) == 0
        ((_, raw, _),) = background.join()
        assert list(parse_sse(raw))[-1]["choices"][0]["finish_reason"] == "length"
        with pytest.raises(OSError):  # noqa: PT011  refused or reset
            socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=1).close()


def test_stop_ends_with_a_terminal_error_what_takes_too_long() -> None:
    with serving("--mock-step-ms", "10", "--shutdown-timeout", "0.2", "--max-num-seqs", "1") as server:
        background = Background(server, [LONG | {"stream": True}])
        assert background.first_bytes.acquire(timeout=10)
        queued = Background(server, [LONG | {"stream": True}, LONG])
        server.wait_gauges(num_requests_waiting=2)
        assert server.signal_and_wait(signal.SIGTERM) == 0
        ((_, raw, _),) = background.join()
        assert list(parse_sse(raw))[-1]["error"]["code"] == "server_stopping"
        assert [(status, json.loads(raw)["error"]["code"]) for status, raw, _ in queued.join()] == [(503, "server_stopping")] * 2


def test_second_interrupt_does_not_wait() -> None:
    with serving("--mock-step-ms", "10", "--shutdown-timeout", "60") as server:
        background = Background(server, [LONG | {"stream": True}])
        assert background.first_bytes.acquire(timeout=10)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "may end within 60" in server.errors(), "it says that it is stopping")
        assert server.signal_and_wait(signal.SIGINT, 10) == 130
        background.join()


def test_busy_port_fails_at_once(server: Served) -> None:
    port = server.url.rpartition(":")[2]
    run = run_cli("serve", "--executor", "mock", "--port", port, "--model", "no/such/model/is/asked/for")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: Address already in use (choose another")


@pytest.mark.parametrize("frontend", ["inline", "python"])
def test_a_server_may_come_back_at_once(frontend: str) -> None:
    """Though connections that the first one closed are in TIME_WAIT on its port."""
    with serving("--frontend", frontend) as first:
        assert first.get("/health").status_code == 200  # a keep-alive connection; the server is the one to close it
        assert first.signal_and_wait(signal.SIGTERM) == 0
        port = first.url.rpartition(":")[2]
        with serving("--frontend", frontend, "--port", port) as second:
            assert second.url == first.url and second.get("/health").status_code == 200


def test_two_that_start_do_not_share_a_port() -> None:
    with bind_http("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(VLLMValidationError, match="Address already in use"):
            bind_http("127.0.0.1", port)


WAITS = [*CLI, "serve", "--executor", "mock", "--port", "0", "--data-parallel-size-local", "0", "--data-parallel-rpc-port", "0"]


def test_interrupt_while_starting_leaves_nothing() -> None:
    process = subprocess.Popen(WAITS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "waiting for 1 headless engine(s) at tcp://" in process.stderr.readline()
    process.terminate()
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_front_ends_that_wait_for_an_engine_end_with_their_parent(signum: signal.Signals) -> None:
    """However it ends; not after the time that open requests would have, nor after the engine's."""
    process = subprocess.Popen([*WAITS, "--api-server-count", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    front_ends: list[psutil.Process] = []
    try:

        def waiting() -> bool:
            front_ends[:] = psutil.Process(process.pid).children()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile: look again
                names = [{(task / "comm").read_text()[:5] for task in Path(f"/proc/{f.pid}/task").iterdir()} for f in front_ends]
                return len(names) == 2 and all("ZMQbg" in each for each in names)
            return False

        wait_until(waiting, "both have their sockets", START_S)
        process.send_signal(signum)
        out, err = process.communicate(timeout=10)
        assert (process.returncode, out) == ({signal.SIGTERM: 0, signal.SIGINT: 130}.get(signum, -signum), "")
        assert "killed" not in err and "Traceback" not in err
        wait_ended(front_ends, timeout=5)
    finally:
        for each in (process, *front_ends):  # all: each holds the pipes
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()


def test_connections_that_are_cut_off_leave_no_traceback() -> None:
    """At shutdown's end: requests whose bodies are half there, and an answer that is not read."""
    with serving("--shutdown-timeout", "0.1", "--max-num-seqs", "256") as server, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))

        def send(length: int, body: bytes) -> None:
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(address)
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length + body)

        for _ in range(20):
            send(1000, b"{")
        prompt = "all work and no play " * 1500
        body = json.dumps({"prompt": prompt, "echo": True, "n": 250, "temperature": 1, "max_tokens": 2, "stream": True}).encode()
        send(len(body), body)  # 8 MB of answer
        wait_until(lambda: server.gauge("num_requests_running") == 0 and server.gauge("generation_tokens_total") == 500, "it is computed")
        assert server.get("/load").json() == {"server_load": 1}
        assert server.signal_and_wait(signal.SIGTERM) == 0
        assert "Traceback" not in server.errors() and "ERROR" not in server.errors()


def test_headless_engine(tmp_path: Path) -> None:
    """The engine in a process that is not our child, over TCP: serves, and its death is noticed."""
    with subprocess.Popen(WAITS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as front_end:
        assert front_end.stderr is not None and front_end.stdout is not None
        match = re.search(r"tcp://127.0.0.1:(\d+)", front_end.stderr.readline())
        assert match
        engine = subprocess.Popen([*CLI, "engine", "--executor", "mock", "--data-parallel-rpc-port", match[1]], stderr=subprocess.DEVNULL)
        try:
            url = front_end.stdout.readline().split()[1]
            with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
                response = client.post("/v1/completions", json={"prompt": [9], "max_tokens": 5})
                assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 5
                engine.kill()
                engine.wait()
                wait_until(lambda: client.get("/health").status_code == 503, "the engine's death is noticed")
            front_end.terminate()
            assert front_end.wait(10) == 1
        finally:
            engine.kill()
            engine.wait()
            front_end.terminate()
