"""Clients that leave and engines that die, under every front-end: blocks come back, streams end, nothing waits for ever."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from tests.interop import peers
from tests.interop.cases import CHAT, MESSAGES, TEXT
from tests.interop.peers import NAME, Process, Server
from tests.server.serving import wait_until

LONG: dict[str, Any] = {"model": NAME, "prompt": [9], "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
SLOW = ("--executor", "mock", "--mock-step-ms", "10")

Start = Callable[..., AbstractContextManager[Server]]


def vllm_rs_serve(*options: str) -> AbstractContextManager[Server]:
    return peers.stock_front_end([peers.vllm_rs()], *options)


def vllm_serve(*options: str) -> AbstractContextManager[Server]:
    return peers.stock_front_end([peers.stock_vllm()], *options)


def supervised(kind: str) -> Start:
    return lambda *options: peers.serve(kind, *options)


STOCK_PYTHON = pytest.param(vllm_serve, id="vllm", marks=[pytest.mark.interop, pytest.mark.timeout(180)])
FRONT_ENDS = [
    pytest.param(supervised("python"), id="python"),
    pytest.param(supervised("rust"), id="rust"),
    pytest.param(vllm_rs_serve, id="vllm-rs"),
    STOCK_PYTHON,
]


@contextlib.contextmanager
def stream(server: Server, **more: Any):
    with server.client.stream("POST", TEXT, json=LONG | {"stream": True} | more) as response:
        events = response.iter_lines()
        assert next(events).startswith("data: ")
        yield events


@pytest.mark.parametrize("start", FRONT_ENDS)
def test_a_client_that_leaves_frees_its_blocks(start: Start) -> None:
    with start(*SLOW) as server:
        with stream(server), stream(server, prompt=[7] * 200):
            server.wait_gauge("num_requests_running", 2)
            assert server.gauge("kv_cache_usage_perc") > 0
        server.wait_idle()
        with pytest.raises(httpx.ReadTimeout):  # not streamed: the client hangs up while it waits
            server.client.post(TEXT, json=LONG, timeout=0.3)
        server.wait_idle()
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(CHAT, json={"model": NAME, "messages": MESSAGES, "max_tokens": 2000}, timeout=0.3)
        server.wait_idle()


def ends_with_an_error_or_an_abort(events: Any) -> None:
    """The stream is over, and what it said last is no ordinary end."""
    last = [line.removeprefix("data: ") for line in events if line.startswith("data: ") and line != "data: [DONE]"][-1]
    said = json.loads(last)
    assert "error" in said or said["choices"][0]["finish_reason"] == "abort", last


@pytest.mark.parametrize("start", [pytest.param(vllm_rs_serve, id="vllm-rs"), STOCK_PYTHON, pytest.param(peers.ours_headless, id="ours")])
@pytest.mark.parametrize("how", ["SIGTERM", "exception"])
def test_a_headless_engine_says_that_it_is_gone(start: Start, how: str) -> None:
    """ENGINE_CORE_DEAD: open streams end, /health tells. Nothing else would tell a stock front-end."""
    options = () if how == "SIGTERM" else ("--mock-crash-at-step", "60")
    with start(*SLOW, *options) as server:
        assert server.engine is not None
        with stream(server) as events:
            if how == "SIGTERM":
                server.engine.popen.terminate()
            ends_with_an_error_or_an_abort(events)
        assert server.engine.popen.wait(10) == (0 if how == "SIGTERM" else 1)

        def told() -> bool:
            try:
                return server.get("/health").status_code == 503
            except httpx.TransportError:  # stock Python exits at once
                return server.front_end.popen.wait(20) is not None

        wait_until(told, "/health says 503, or the front-end has ended")


def test_kill_9_of_a_headless_engine_ends_our_streams() -> None:
    with peers.ours_headless(*SLOW) as server:
        assert server.engine is not None
        with stream(server) as events:
            server.engine.popen.kill()
            killed = time.monotonic()
            ends_with_an_error_or_an_abort(events)
            assert time.monotonic() - killed < 3
        assert server.get("/health").status_code == 503
        assert server.front_end.popen.wait(15) == 1


@pytest.mark.parametrize("kind", ["python", "rust"])
def test_kill_9_of_a_supervised_engine_ends_streams_and_the_server(kind: str) -> None:
    with peers.serve(kind, *SLOW) as server, stream(server) as events:
        core = server.front_end.named("mini-engine: core")
        core.kill()
        killed = time.monotonic()
        with contextlib.suppress(httpx.TransportError):  # vllm-rs closes the connection, ours sends an error event
            ends_with_an_error_or_an_abort(events)
        assert time.monotonic() - killed < 6
        assert server.front_end.popen.wait(25) == 1


@pytest.mark.interop
@pytest.mark.model
@pytest.mark.timeout(180)
def test_our_front_end_over_a_stock_engine_that_is_left_and_that_dies() -> None:
    with peers.over_stock_engine() as server:
        with stream(server):
            server.wait_gauge("num_requests_running", 1)
            assert server.gauge("kv_cache_usage_perc") > 0
        server.wait_idle()
        with stream(server) as events:
            assert server.engine is not None
            _kill_core(server.engine)
            killed = time.monotonic()
            ends_with_an_error_or_an_abort(events)
            assert time.monotonic() - killed < 3
        assert server.get("/health").status_code == 503


def _kill_core(engine: Process) -> None:
    engine.named("VLLM::EngineCore").send_signal(signal.SIGKILL)
