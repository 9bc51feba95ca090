"""`mini-engine serve --frontend python|rust`: what the parent hands down, what it watches, and how it ends."""

from __future__ import annotations

import json
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from mini_engine.entrypoints.frontend_child import parse_args_json
from mini_engine.entrypoints.supervise import FrontEndOptions, find_vllm_rs
from mini_engine.exceptions import VLLMValidationError
from tests.interop import peers
from tests.interop.cases import TEXT
from tests.interop.peers import MOCK, NAME, running
from tests.interop.test_death import LONG, SLOW, stream
from tests.server.serving import CLI, run_cli, wait_ended, wait_until


def script(path: Path, body: str) -> str:
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# ── choosing ────────────────────────────────────────────────────────────────────────────────────────────


def test_which_front_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def choose(kind: str | None = None, count: int = 1, grpc_port: int | None = None) -> tuple[str, int]:
        options = FrontEndOptions.choose(kind, count, None, grpc_port)
        return options.kind, options.count

    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    assert (choose(), choose(count=3), choose("rust")) == (("inline", 1), ("python", 3), ("rust", 1))
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert (choose(), choose("inline")) == (("rust", 1), ("inline", 1))
    assert not caplog.records and choose(count=4) == ("rust", 1)
    assert "--api-server-count 4 is ignored" in caplog.text
    for arguments, word in (
        ({"kind": "java"}, "java"),
        ({"kind": "inline", "count": 2}, "python"),
        ({"kind": "python", "grpc_port": 1}, "rust"),
    ):
        with pytest.raises(VLLMValidationError, match=word):
            choose(**arguments)  # type: ignore[arg-type]


def test_finding_the_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    with pytest.raises(VLLMValidationError, match="make interop"):
        find_vllm_rs(None)
    with pytest.raises(VLLMValidationError, match=r"/no/such.*--vllm-rs"):
        find_vllm_rs("/no/such")
    for folder in ("cache/bin", "path"):  # the later one comes first
        (tmp_path / folder).mkdir(parents=True)
        found = script(tmp_path / folder / "vllm-rs", "")
        assert find_vllm_rs(None) == found
    assert find_vllm_rs(str(tmp_path / "cache/bin/vllm-rs")) == str(tmp_path / "cache/bin/vllm-rs")


def test_a_missing_binary_is_one_line(tmp_path: Path) -> None:
    run = run_cli("serve", "--frontend", "rust", "--vllm-rs", str(tmp_path / "nothing"), *MOCK)
    assert (run.returncode, run.stdout) == (2, "") and run.stderr.startswith("error: no executable file") and "make interop" in run.stderr


# ── handing down ────────────────────────────────────────────────────────────────────────────────────────

LOOKS_AROUND = """
import json, os, socket, sys
def look(fd):
    with socket.socket(fileno=os.dup(fd)) as s:
        listens = s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return [s.family.name, listens, str(s.getsockname())]
fds = {name: look(int(sys.argv[sys.argv.index(name) + 1])) for name in sys.argv if name.endswith("-fd")}
print("SEEN" + json.dumps({"argv": sys.argv[1:], "fds": fds}), flush=True)
sys.exit(7)
"""


def test_the_child_gets_what_vllm_gives(tmp_path: Path) -> None:
    """The arguments and descriptors of WIRE §11. The child's exit before it serves ends the start, and the engine."""
    binary = script(tmp_path / "vllm-rs", LOOKS_AROUND)
    options = ["--vllm-rs", binary, "--grpc-port", "0", "--port", "0", "--api-key", "k", "--shutdown-timeout", "2.5"]
    with running(*CLI, "serve", "--frontend", "rust", *options, *MOCK) as process:
        assert process.popen.wait(30) in (1, 7)  # before READY it is an engine that did not start; after it, the child's own
        seen = json.loads(process.wait_for(r"SEEN(\{.*\})")[1])
        assert "exit code 7" in process.output()
    argv = seen["argv"]
    assert argv[0] == "frontend" and argv[-2] == "--args-json"
    assert argv[argv.index("--engine-start-index") :][:6] == [
        "--engine-start-index",
        "0",
        "--engine-count",
        "1",
        "--data-parallel-size",
        "1",
    ]
    assert seen["fds"]["--listen-fd"][:2] == seen["fds"]["--grpc-listen-fd"][:2] == ["AF_INET", 0]  # bound, not listening
    assert seen["fds"]["--input-listener-fd"][:2] == seen["fds"]["--output-listener-fd"][:2] == ["AF_UNIX", 1]
    arguments = json.loads(argv[-1])
    assert arguments["served_model_name"] == [NAME] and Path(arguments["model_tag"]).is_dir()
    assert arguments["api_key"] == ["k"] and arguments["shutdown_timeout"] == 3


def test_our_own_child_reads_the_same_arguments(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mini_engine")
    given = {
        "model_tag": "m",
        "served_model_name": ["a", "b"],
        "api_key": ["k"],
        "shutdown_timeout": 0,
        "dtype": "float32",
        "chat_template": None,
    }
    engine, server = parse_args_json(json.dumps(given))
    assert (engine.model, server.served_model_name, server.api_key, server.shutdown_timeout_s) == ("m", "a", "k", 0)
    assert "without effect on this front-end: dtype" in caplog.text
    monkeypatch.setenv("MINI_ENGINE_API_KEY", "from the environment")
    assert parse_args_json('{"model_tag": "m"}')[1].api_key == "from the environment"
    monkeypatch.setenv("MINI_ENGINE_API_KEY", "")
    assert parse_args_json('{"model_tag": "m"}')[1].api_key is None
    for wrong in ("", "[]", "{}", '{"model_tag": 1}', '{"model_tag": "m", "api_key": ["a", "b"]}'):
        with pytest.raises(VLLMValidationError):
            parse_args_json(wrong)


def test_a_key_guards_and_is_not_on_the_command_line() -> None:
    with peers.serve("python", *MOCK, "--api-key", "swordfish") as server:
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", headers={"authorization": "Bearer swordfish"}).json()["data"][0]["id"] == NAME
        for process in psutil.Process(server.front_end.popen.pid).children(recursive=True):
            assert "swordfish" not in " ".join(process.cmdline())


def test_descriptors_that_are_no_sockets() -> None:
    run = run_cli(
        "frontend", "--listen-fd", "0", "--input-listener-fd", "0", "--output-listener-fd", "0", "--args-json", '{"model_tag": "m"}'
    )
    assert run.returncode == 2 and "not the parent's sockets" in run.stderr


# ── watching and ending ─────────────────────────────────────────────────────────────────────────────────


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.parametrize("kind", ["python", "rust"])
def test_sigterm_lets_open_streams_end_then_stops_all(kind: str) -> None:
    with peers.serve(kind, *SLOW) as server:
        children = family(server.front_end.popen.pid)
        answers = []
        body = LONG | {"max_tokens": 60, "stream": True}
        began = threading.Event()

        def ask() -> None:
            with httpx.Client(base_url=server.url, trust_env=False) as client, client.stream("POST", TEXT, json=body) as response:
                for line in response.iter_lines():
                    began.set()
                    answers.append(line)

        thread = threading.Thread(target=ask)
        thread.start()
        assert began.wait(10)
        server.front_end.popen.terminate()
        assert server.front_end.popen.wait(15) == 0
        thread.join(10)
        assert "data: [DONE]" in answers and '"finish_reason":"length"' in "".join(answers)
        assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize("kind", ["python", "rust"])
def test_a_front_end_that_is_killed_takes_the_engine_with_it(kind: str) -> None:
    with peers.serve(kind, *MOCK) as server:
        children = family(server.front_end.popen.pid)
        (front_end,) = [child for child in children if not " ".join(child.cmdline()).startswith("mini-engine: core")]
        front_end.kill()
        assert server.front_end.popen.wait(15) == 1
        assert "SIGKILL" in server.front_end.output()
        assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize("kind", ["python", "rust"])
def test_a_parent_that_is_killed_leaves_nothing(kind: str) -> None:
    with peers.serve(kind, *MOCK) as server:
        children = family(server.front_end.popen.pid)
        assert len(children) == 2
        server.front_end.popen.kill()
        wait_ended(children, timeout=15)


def test_a_second_interrupt_does_not_wait() -> None:
    with peers.serve("python", *SLOW, "--shutdown-timeout", "60") as server, stream(server):
        server.front_end.popen.send_signal(signal.SIGINT)
        server.front_end.wait_for("open request")
        server.front_end.popen.send_signal(signal.SIGINT)
        assert server.front_end.popen.wait(10) == 130


# ── several front-ends ──────────────────────────────────────────────────────────────────────────────────


def test_two_front_ends_over_one_engine() -> None:
    """Both serve from one HTTP socket; each gets the answers to its own requests, and an abort of one leaves the other's alone."""
    with peers.serve("python", *SLOW, "--api-server-count", "2") as server:

        def find_apis() -> list[psutil.Process]:
            return [p for p in family(server.front_end.popen.pid) if " ".join(p.cmdline()).startswith("mini-engine: api")]

        wait_until(lambda: len(find_apis()) == 2, "both are there: one that answers is enough for the ready line")
        apis = find_apis()
        port = int(server.url.rpartition(":")[2])
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        body = json.dumps(LONG | {"max_tokens": 100, "stream": True})
        request = f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        opened: list[socket.socket] = []

        def busy() -> list[int]:
            return [sum(c.status == "ESTABLISHED" and c.laddr.port == port for c in api.net_connections("tcp")) for api in apis]

        try:
            while not all(busy()):
                assert len(opened) < 200, f"one of them never accepts: {busy()}"
                opened.append(socket.create_connection(("127.0.0.1", port), timeout=20))
                opened[-1].sendall(request)
                assert select.select(opened[-1:], [], [], 20)[0], "no answer began"
            texts = set()
            for sock in opened:
                raw = b""
                while data := sock.recv(1 << 16):
                    raw += data
                texts.add(b"".join(re.findall(rb'"text":"((?:[^"\\]|\\.)*)"', raw)))
                assert b"[DONE]" in raw and b'"finish_reason":"length"' in raw
            assert len(texts) == 1 and len(texts.pop()) > 100
        finally:
            for sock in opened:
                sock.close()
        apis[1].terminate()
        assert server.front_end.popen.wait(15) == 0


# ── gRPC ────────────────────────────────────────────────────────────────────────────────────────────────

GRPC = """
import sys, grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    def call(name, request=b""):
        raw = lambda x: x
        return channel.unary_unary(name, request_serializer=raw, response_deserializer=raw)(request, timeout=10)
    print("health", call("/grpc.health.v1.Health/Check"))
    print("info", call("/vllm.Control/GetServerInfo"))
    print("asleep", call("/vllm.Control/IsSleeping"))
    try:
        call("/vllm.Control/PauseGeneration")
    except grpc.RpcError as e:
        print("pause", e.code(), e.details())
"""


@pytest.mark.interop
def test_the_real_grpc_services_over_our_utilities() -> None:
    """grpcio is in the environment of stock vLLM."""
    python = Path(peers.stock_vllm()).parent / "python"
    with peers.serve("rust", *MOCK, "--grpc-port", "0") as server:
        address = server.front_end.wait_for(r"gRPC server is ready.* addr=(\S+)")[1]
        with running(str(python), "-c", GRPC, address, GRPC_VERBOSITY="ERROR") as client:
            assert client.popen.wait(30) == 0, client.output()
            assert r"health b'\x08\x01'" in client.output()  # SERVING
            assert "0.32.0" in client.output()  # of our ready frame, as the rest of it
            assert "asleep b''" in client.output()  # false
            assert "Call to pause_scheduler method failed" in client.output()


FORKED_ON = """
import os, queue, signal, sys
from mini_engine.entrypoints.serve import sigterm_interrupts
from mini_engine.entrypoints.supervise import _FrontEnds

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
front_ends = _FrontEnds(queue.SimpleQueue(), 1)
with sigterm_interrupts():
    try:
        front_ends.start([sys.executable, "-c", "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"], [], dict(os.environ))
    finally:
        front_ends.processes[0].wait()
raise AssertionError("the signal is lost")
"""


def test_a_signal_while_a_front_end_is_forked_is_heard() -> None:
    """Python drops what a handler raises there, and the server would go on. The front-end itself has no signal blocked."""
    run = subprocess.run([sys.executable, "-c", FORKED_ON], capture_output=True, text=True, timeout=30)
    assert (run.returncode, run.stdout, run.stderr) == (0, "set()\n", "")
