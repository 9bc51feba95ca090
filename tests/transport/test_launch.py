"""Launching and shaking hands: real engines on the mock device, and peers that say the wrong thing."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from mini_engine.config import EngineConfig
from mini_engine.engine_core.io import OUTPUT_LINGER_MS
from mini_engine.exceptions import EngineDeadError, VLLMValidationError
from mini_engine.transport import launch
from mini_engine.transport.client import AsyncMPClient
from mini_engine.transport.launch import EngineHandles, launch_engines, wait_for_remote_engines
from mini_engine.transport.listeners import bind_listeners
from mini_engine.wire.handshake import engine_identity
from tests.server.serving import wait_ended
from tests.transport.fake_engine import FakeEngine

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps({"vocab_size": 1000, "max_position_embeddings": 128}))
    return EngineConfig(model=str(directory), executor="mock")


def wait_gone(pids: list[int]) -> None:
    wait_ended([process for process in psutil.process_iter() if process.pid in pids], DEADLINE_S)


# ── local ───────────────────────────────────────────────────────────────────────────────────────────────


def test_two_real_engines_start_answer_and_stop(config: EngineConfig) -> None:
    async def main() -> list[int]:
        listeners = bind_listeners()
        engines = await asyncio.to_thread(launch_engines, listeners, config, count=2, ready_timeout_s=DEADLINE_S)
        client = AsyncMPClient(listeners, engines.identities, engines=engines)
        responses = await client.wait_ready(DEADLINE_S)
        assert [response.max_model_len for response in responses if response] == [128, 128]
        assert await client.call_utility_async("get_supported_tasks") == ["generate"]
        assert engines.identities == [engine_identity(0), engine_identity(1)]
        client.shutdown()
        assert [process.returncode for process in engines.processes] == [0, 0]
        return [process.pid for process in engines.processes]

    wait_gone(asyncio.run(main()))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("engine-watch")]


def test_a_child_that_ends_during_start_up_is_seen_with_its_exit_code(tmp_path: Path) -> None:
    """Soon: what it would tell the front-end, which reads nothing yet, it does not hold on to."""
    listeners = bind_listeners()
    broken = EngineConfig(model=str(tmp_path), executor="mock")  # no config.json
    before = time.monotonic()
    with pytest.raises(VLLMValidationError, match=r"EngineCore 0 ended during start-up with exit code 2; see its log above"):
        launch_engines(listeners, broken, ready_timeout_s=DEADLINE_S)
    assert time.monotonic() - before < OUTPUT_LINGER_MS / 1000
    listeners.close()


def spawn_instead(monkeypatch: pytest.MonkeyPatch, code: str) -> list[subprocess.Popen[bytes]]:
    """Let launch start this program instead of an engine."""
    started: list[subprocess.Popen[bytes]] = []

    def spawn(config: EngineConfig, address: str, index: int, parent_fd: int) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code, address, str(parent_fd)], pass_fds=[parent_fd]))
        return started[-1]

    monkeypatch.setattr(launch, "_spawn", spawn)
    return started


def test_the_engines_own_end_is_told_before_that_of_a_front_end_which_heard_of_it(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn_instead(monkeypatch, "import sys; sys.exit(2)")  # after a first look at the processes: Python takes its time
    front_end = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(1)"])
    front_end.wait(DEADLINE_S)
    listeners = bind_listeners()
    with pytest.raises(VLLMValidationError, match="EngineCore 0 ended during start-up with exit code 2"):
        launch_engines(listeners, config, ready_timeout_s=DEADLINE_S, front_ends=[front_end])
    listeners.close()


def test_a_child_killed_during_start_up_is_seen_with_its_signal(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn_instead(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    listeners = bind_listeners()
    with pytest.raises(EngineDeadError, match=r"signal 9 \(SIGKILL\)"):
        launch_engines(listeners, config, ready_timeout_s=DEADLINE_S)
    listeners.close()


def test_a_child_that_says_nothing_is_stopped_at_the_deadline(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    started = spawn_instead(monkeypatch, "import os, sys; os.read(int(sys.argv[2]), 1)")  # until its parent is gone
    listeners = bind_listeners()
    with pytest.raises(EngineDeadError, match=r"not ready within 0.2 s \(engine 0: NEW, engine 1: NEW\)"):
        launch_engines(listeners, config, count=2, ready_timeout_s=0.2)
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2
    listeners.close()


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        EngineHandles([process], [], -1).shutdown(timeout=0.1)
        assert process.returncode == -signal.SIGKILL


def test_an_engine_whose_parent_is_killed_stops(config: EngineConfig) -> None:
    code = """
import asyncio, json, sys
from mini_engine.config import EngineConfig
from mini_engine.transport.launch import launch_engines
from mini_engine.transport.listeners import bind_listeners
listeners = bind_listeners()
engines = launch_engines(listeners, EngineConfig.from_dict(json.loads(sys.argv[1])))
print(engines.processes[0].pid, listeners.directory, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, json.dumps(config.to_dict())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        assert psutil.pid_exists(int(pid))
        parent.kill()
    wait_gone([int(pid)])
    assert not Path(directory).exists()  # nobody else was left to remove it


def test_a_temporary_directory_too_long_for_a_socket_is_named_and_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / ("x" * 100)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with pytest.raises(VLLMValidationError, match=f"cannot listen at {directory}/mini_engine-.*: set TMPDIR to a shorter path"):
        bind_listeners()
    assert list(directory.iterdir()) == []


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(VLLMValidationError, match=r"cannot listen at .*203\.0\.113\.1.*: Cannot assign"):
        bind_listeners(local=False, host="203.0.113.1")


# ── remote ──────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def waiting(count: int = 1, ready_timeout_s: float = DEADLINE_S) -> Iterator[tuple[str, Future[list[bytes]], Any]]:
    """A front-end that waits for remote engines: (its endpoint, what it returns or raises, its listeners)."""
    listeners = bind_listeners(local=False)
    bound: Future[str] = Future()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            wait_for_remote_engines,
            listeners,
            address="127.0.0.1",
            port=0,
            count=count,
            ready_timeout_s=ready_timeout_s,
            on_bound=bound.set_result,
        )
        yield bound.result(DEADLINE_S), future, listeners
        future.exception(DEADLINE_S)
    listeners.close()


def test_the_handshake_of_a_headless_engine() -> None:
    with waiting(count=2) as (endpoint, future, listeners), FakeEngine() as zero, FakeEngine(b"\x01\x00") as one:
        one.hello(endpoint)
        zero.hello(endpoint, an_unknown_key=1)
        for engine in (zero, one):
            addresses = engine.receive_init()["addresses"]
            assert (addresses["inputs"], addresses["outputs"]) == ([listeners.input_address], [listeners.output_address])
            engine.say({"status": "READY", "local": False, "headless": True, "parallel_config_hash": "x"})
        assert future.result(DEADLINE_S) == [b"\x00\x00", b"\x01\x00"]


WRONG_PEERS: dict[str, tuple[Callable[[FakeEngine, str], None], str]] = {
    "identity": (
        lambda e, a: (setattr(e, "identity", b"\x05\x00"), e.hello(a))[1],
        r"engine 5 said HELLO.*waits for engine 0.*--engine-index",
    ),
    "local": (lambda e, a: e.hello(a, local=True, headless=False), "local=True, headless=False"),
    "not headless": (lambda e, a: e.hello(a, headless=False), "headless=False; expected"),
    "ready first": (lambda e, a: e.hello(a, status="READY"), "'READY' while NEW"),
    "hello twice": (lambda e, a: (e.hello(a), e.say({"status": "HELLO", "local": False, "headless": True}))[1], "'HELLO' while CONNECTED"),
    "another word": (lambda e, a: e.hello(a, status="HI"), "'HI' while NEW"),
    "missing key": (lambda e, a: (e.hello(a), e.say({"status": "READY"}))[1], "does not speak the handshake"),
}


@pytest.mark.parametrize("name", WRONG_PEERS)
def test_a_wrong_peer_fails_the_start_at_once_and_says_what_is_wrong(name: str) -> None:
    act, match = WRONG_PEERS[name]
    with waiting() as (endpoint, future, _), FakeEngine() as engine:
        act(engine, endpoint)
        with pytest.raises(EngineDeadError, match=match):
            future.result(DEADLINE_S)


HELLO = msgpack.packb({"status": "HELLO", "local": False, "headless": True})


@pytest.mark.parametrize(
    "garbage",
    [HELLO[:cut] for cut in range(0, len(HELLO), 5)]
    + [b"\x81\xa1x" + b"\x91" * 100_000, b"\xff" * 9, b"GET / HTTP/1.1\r\n\r\n", b"x" * (4 << 20)],
)
def test_garbage_from_nobody_in_particular_is_ignored(garbage: bytes) -> None:
    with waiting() as (endpoint, future, _), FakeEngine(b"scanner") as scanner, FakeEngine() as engine:
        scanner.handshake = scanner._dealer(endpoint)
        scanner.say(garbage)
        engine.hello(endpoint)
        engine.receive_init()
        engine.say({"status": "READY", "local": False, "headless": True})
        assert future.result(DEADLINE_S) == [engine.identity]


def test_garbage_from_the_engine_that_is_waited_for_fails() -> None:
    with waiting() as (endpoint, future, _), FakeEngine() as engine:
        engine.handshake = engine._dealer(endpoint)
        engine.say(HELLO[:-3])
        with pytest.raises(EngineDeadError, match="engine 0 does not speak the handshake of vLLM"):
            future.result(DEADLINE_S)


def test_a_second_engine_with_the_same_identity_does_not_disturb_the_first() -> None:
    with waiting() as (endpoint, future, _), FakeEngine() as engine, FakeEngine() as double:
        engine.hello(endpoint)
        engine.receive_init()
        double.hello(endpoint)  # ZMQ keeps the identity for whoever had it first
        engine.say({"status": "READY", "local": False, "headless": True})
        assert future.result(DEADLINE_S) == [engine.identity]
        assert not double.handshake.poll(0)


def test_no_engine_in_time() -> None:
    with waiting(count=2, ready_timeout_s=0.1) as (_, future, _listeners), pytest.raises(EngineDeadError, match=r"within 0.1 s"):
        future.result(DEADLINE_S)


def test_a_taken_port_is_told() -> None:
    listeners = bind_listeners(local=False)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(EngineDeadError, match=f"cannot wait for engines at tcp://127.0.0.1:{port}"):
            wait_for_remote_engines(listeners, address="127.0.0.1", port=port)
    listeners.close()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_a_real_headless_engine_serves_and_its_death_is_noticed(config: EngineConfig, kill: signal.Signals) -> None:
    async def main(listeners: Any, identities: list[bytes], process: subprocess.Popen[bytes]) -> float:
        client = AsyncMPClient(listeners, identities)
        await client.wait_ready(DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            assert await client.call_utility_async("get_supported_tasks") == ["generate"]
        waiter = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0)
        killed_at = time.monotonic()
        process.send_signal(kill)
        with pytest.raises(EngineDeadError):
            async with asyncio.timeout(DEADLINE_S):
                await waiter
        client.shutdown()
        return time.monotonic() - killed_at

    with waiting() as (endpoint, future, listeners):
        arguments = ["--config", json.dumps(config.to_dict()), "--handshake-address", endpoint, "--headless"]
        process = subprocess.Popen([sys.executable, "-m", "mini_engine.engine_core.proc", *arguments])
        try:
            assert asyncio.run(main(listeners, future.result(DEADLINE_S), process)) < 3.0
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()
