"""AsyncMPClient when its engine dies, however it dies: who hears of it, and what still arrives."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgpack
import pytest

from mini_engine.exceptions import EngineDeadError
from mini_engine.transport.client import AsyncMPClient
from mini_engine.transport.launch import EngineHandles
from mini_engine.transport.listeners import Listeners, bind_listeners
from mini_engine.wire.handshake import engine_identity
from tests.transport.clients import DEADLINE_S, connect, next_output, request
from tests.transport.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def everybody_hears(client: AsyncMPClient, kill: Callable[[], object], match: str) -> None:
    """A reader and a utility caller wait; after kill() both get EngineDeadError, and so does everyone who comes later."""
    waiters = [asyncio.create_task(client.get_output_async()), asyncio.create_task(client.call_utility_async("f"))]
    await asyncio.sleep(0)
    kill()
    async with asyncio.timeout(DEADLINE_S):
        errors = await asyncio.gather(*waiters, return_exceptions=True)
    for error in errors:
        assert isinstance(error, EngineDeadError), error
        assert match in str(error)
    assert client.dead_error is not None
    for late in (client.get_output_async(), client.call_utility_async("f"), client.add_request_async(request())):
        with pytest.raises(EngineDeadError, match=re.escape(match)):
            await late
    client.abort_requests(["r"])  # never raises
    await asyncio.sleep(0)
    assert client.statistics().pending_utilities == client.statistics().pending_aborts == 0


async def test_dead_frame(pair: tuple[AsyncMPClient, FakeEngine]) -> None:
    client, engine = pair
    await everybody_hears(client, lambda: engine.send(b"ENGINE_CORE_DEAD"), "ENGINE_CORE_DEAD")


async def test_what_came_before_death_is_delivered_first(pair: tuple[AsyncMPClient, FakeEngine]) -> None:
    client, engine = pair
    engine.send([0, [["r", [1]]]])
    engine.send(b"ENGINE_CORE_DEAD")
    engine.send([0, [["r", [2]]]])  # after its own obituary: not read
    assert (await next_output(client)).outputs[0].new_token_ids == [1]
    with pytest.raises(EngineDeadError):
        await next_output(client)


async def test_what_a_process_sent_before_it_ended_is_delivered_first() -> None:
    with FakeEngine() as engine:
        client = await connect(bind_listeners(), engine)
        engine.send([0, [["r", [1]]]])
        assert client._output.poll(1000 * DEADLINE_S)  # it is here, and nobody has read it
        client._on_exit("it ended")  # as the watching thread would: runs before the reader's turn
        assert (await next_output(client)).outputs[0].new_token_ids == [1]
        with pytest.raises(EngineDeadError, match="it ended"):
            await next_output(client)
        client.shutdown()


GOOD = msgpack.packb([0, [["r", [1, 2, 300], None, None, None, 0]], None, 1.5])


@pytest.mark.parametrize(
    "frames",
    [
        *([GOOD[:cut]] for cut in range(1, len(GOOD))),
        [b"\xff" * 20],
        [msgpack.packb([0, [["r", [1], None, None, None, 9]]])],  # no such finish reason
        [msgpack.packb([0, [["r", [1], [["<i4", [1, 200], 1], ["<f4", [1, 200], 7], ["<i8", [1], 3], None]]]]), b"\0" * 800],
        [msgpack.packb([0, [["r", [True]]]])],
        [b"\x91" * 100_000],  # nested deeper than any decoder goes
    ],
)
async def test_an_undecodable_output_is_a_death_with_a_reason(frames: list[bytes]) -> None:
    with FakeEngine() as engine:
        client = await connect(bind_listeners(), engine)
        engine.send([0, [["r", [7]]]])
        engine.send(*frames)
        engine.send([0, [["r", [8]]]])
        assert (await next_output(client)).outputs[0].new_token_ids == [7]
        with pytest.raises(EngineDeadError, match="does not decode"):  # and 8 is not delivered: a stream must not have a hole
            await next_output(client)
        client.shutdown()


class Logged(logging.Handler):
    """An event that the client's `count`-th log record sets."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.event = asyncio.Event()
        logging.getLogger("mini_engine.transport.client").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.count -= "stranger" in record.getMessage()
        if self.count == 0:
            self.event.set()

    def close(self) -> None:
        logging.getLogger("mini_engine.transport.client").removeHandler(self)
        super().close()


async def test_remote_a_strangers_output_is_dropped_and_its_leaving_no_death() -> None:
    with FakeEngine() as engine:
        client = await connect(bind_listeners(local=False), engine)
        engine.send([0, [["r", [1]]]])
        assert (await next_output(client)).outputs[0].new_token_ids == [1]
        with FakeEngine(b"\x07\x00") as stranger, closing(Logged(3)) as logged:
            stranger.connect(client._listeners.input_address, client._listeners.output_address)
            stranger.send(b"\xff garbage")
            stranger.send([0, [["r", [666]]]])
            stranger.send(b"ENGINE_CORE_DEAD")
            async with asyncio.timeout(DEADLINE_S):
                await logged.event.wait()
        engine.send([0, [["r", [2]]]])
        assert (await next_output(client)).outputs[0].new_token_ids == [2]
        assert client.dead_error is None
        client.shutdown()


async def test_remote_an_engine_that_connected_before_the_client_was_made_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = Listeners.adopt

    def adopt_slowly(listeners: Listeners, sock: Any) -> None:
        """ZMQ accepts on its own thread as soon as the socket is bound: here it always wins."""
        adopt(listeners, sock)
        assert sock.poll(1000 * DEADLINE_S)

    monkeypatch.setattr(Listeners, "adopt", adopt_slowly)
    with FakeEngine() as engine:
        listeners = bind_listeners(local=False)
        engine.connect(listeners.input_address, listeners.output_address)
        engine.send([0, [["r", [1]]]])
        client = AsyncMPClient(listeners, [engine.identity])
        await client.wait_ready(DEADLINE_S)
        assert (await next_output(client)).outputs[0].new_token_ids == [1]
        client.shutdown()


async def test_remote_a_lost_connection_is_death() -> None:
    with FakeEngine() as engine:
        client = await connect(bind_listeners(local=False), engine)
        await everybody_hears(client, engine.close, "connection to an EngineCore was lost")
        client.shutdown()


async def test_remote_what_an_engine_sent_before_its_connection_was_lost_is_delivered_first() -> None:
    with FakeEngine() as engine:
        client = await connect(bind_listeners(local=False), engine)
        for token in range(20):  # more than one turn's worth
            engine.send([0, [["r", [token]]]])
        assert client._output.poll(1000 * DEADLINE_S)
        engine.context.destroy(linger=1000)  # what is under way still arrives
        assert client._monitor is not None and client._monitor.socket.poll(1000 * DEADLINE_S)  # both are here, nothing is read
        assert [(await next_output(client)).outputs[0].new_token_ids[0] for _ in range(20)] == list(range(20))
        with pytest.raises(EngineDeadError, match="connection to an EngineCore was lost"):
            await next_output(client)
        client.shutdown()


def start_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=subprocess.PIPE)


@pytest.mark.parametrize(("command", "kill", "told"), [("exit", 0, "exit code 3"), ("wait", signal.SIGKILL, "signal 9 (SIGKILL)")])
async def test_local_the_process_is_the_sentinel(command: str, kill: int, told: str) -> None:
    process = start_process()
    assert process.stdin is not None
    stdin = process.stdin
    with FakeEngine() as engine:
        handles = EngineHandles([process], [engine.identity], os.dup(0))
        client = await connect(bind_listeners(), engine, engines=handles)
        await everybody_hears(client, lambda: process.send_signal(kill) if command == "wait" else stdin.close(), told)
        client.shutdown()
        stdin.close()
    assert process.returncode is not None


async def test_an_engine_that_ends_before_it_is_ready_is_not_waited_for() -> None:
    process = start_process()
    assert process.stdin is not None
    client = AsyncMPClient(bind_listeners(), [engine_identity(0)], engines=EngineHandles([process], [engine_identity(0)], os.dup(0)))
    waiter = asyncio.create_task(client.wait_ready(DEADLINE_S))
    await asyncio.sleep(0)
    process.stdin.close()
    with pytest.raises(EngineDeadError, match="exit code 3"):
        await waiter
    client.shutdown()
