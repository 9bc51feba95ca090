"""AsyncMPClient against an engine that shares no code with it: what goes down, what comes up, and an orderly end."""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from mini_engine.exceptions import EngineDeadError, EngineGenerateError
from mini_engine.transport.client import AsyncMPClient
from mini_engine.transport.listeners import Listeners, bind_listeners
from mini_engine.wire.handshake import engine_identity
from tests.transport.clients import DEADLINE_S, connect, in_thread, next_output, request
from tests.transport.fake_engine import READY_RESPONSE, FakeEngine

pytestmark = pytest.mark.anyio


async def test_ready_frame_in_full_and_empty() -> None:
    listeners = bind_listeners()
    with FakeEngine(engine_identity(0)) as first, FakeEngine(engine_identity(1)) as second:
        first.connect(listeners.input_address, listeners.output_address)  # before anybody reads: it waits in the backlog
        client = AsyncMPClient(listeners, [first.identity, second.identity])
        second.connect(listeners.input_address, listeners.output_address, ready=b"")
        responses = await client.wait_ready(DEADLINE_S)
        client.shutdown()
    assert responses[0] is not None
    assert responses[0].max_model_len == READY_RESPONSE["max_model_len"]
    assert responses[1] is None


async def test_no_ready_frame_in_time_names_the_engine() -> None:
    client = AsyncMPClient(bind_listeners(), [engine_identity(3)])
    with pytest.raises(EngineDeadError, match=r"engine\(s\) \[3\] within 0.05 s"):
        await client.wait_ready(0.05)
    client.shutdown()


async def test_ready_frame_of_another_version_is_an_error_with_its_path() -> None:
    listeners = bind_listeners()
    with FakeEngine() as engine:
        client = AsyncMPClient(listeners, [engine.identity])
        engine.connect(listeners.input_address, listeners.output_address, ready={"max_model_len": 5})
        with pytest.raises(EngineDeadError, match="num_gpu_blocks"):
            await client.wait_ready(DEADLINE_S)
        client.shutdown()


async def test_an_engine_of_another_release_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    listeners = bind_listeners()
    with FakeEngine() as engine:
        client = AsyncMPClient(listeners, [engine.identity])
        engine.connect(listeners.input_address, listeners.output_address, ready={**READY_RESPONSE, "vllm_version": "0.33.1"})
        await client.wait_ready(DEADLINE_S)
        client.shutdown()
    assert "0.33.1" in caplog.text


async def test_strangers_on_the_request_socket_change_nothing(pair: tuple[AsyncMPClient, FakeEngine]) -> None:
    client, engine = pair
    listeners = client._listeners
    with FakeEngine(b"\x05\x00") as wrong, FakeEngine(engine.identity) as double:
        wrong.connect(listeners.input_address, listeners.output_address)
        double.connect(listeners.input_address, listeners.output_address)  # ZMQ refuses a second bearer of a living identity
        await client.add_request_async(request("r1"))
        _, payload = await in_thread(engine.receive)
        assert payload[0] == "r1"
        assert not double.requests.poll(0)
    assert client.dead_error is None


async def test_requests_go_down_as_the_wire_wants(pair: tuple[AsyncMPClient, FakeEngine]) -> None:
    client, engine = pair
    await client.add_request_async(request("r1"))
    kind, payload = await in_thread(engine.receive)
    assert (kind, len(payload), payload[:2], payload[11]) == (b"\x00", 22, ["r1", [1, 2]], 0)


async def test_aborts_of_one_turn_are_one_message(pair: tuple[AsyncMPClient, FakeEngine]) -> None:
    client, engine = pair
    client.abort_requests(["a"])
    client.abort_requests(["b", "c"])
    assert client.statistics().pending_aborts == 3
    assert await in_thread(engine.receive) == (b"\x01", ["a", "b", "c"])
    assert client.statistics().pending_aborts == 0


async def test_outputs_come_up_in_order_and_with_arrays(pair: tuple[AsyncMPClient, FakeEngine]) -> None:
    client, engine = pair
    ids, values = np.arange(200, dtype="<i4").reshape(1, 200), np.zeros((1, 200), dtype="<f4")
    ranks = msgpack.ExtType(3, np.array([1], dtype="<i8").tobytes())
    logprobs = [["<i4", [1, 200], 1], ["<f4", [1, 200], 2], ["<i8", [1], ranks], None]
    engine.send([0, [["r", [5]]]])
    engine.send([0, []])  # neither outputs nor stats: not worth a wake-up
    engine.send([0, [["r", [6], logprobs]], None, 2.0], ids.tobytes(), values.tobytes())
    assert (await next_output(client)).outputs[0].new_token_ids == [5]
    second = (await next_output(client)).outputs[0]
    assert second.new_token_ids == [6]
    np.testing.assert_array_equal(second.new_logprobs.logprob_token_ids, ids)


async def test_a_backlog_is_read_without_further_edges(pair: tuple[AsyncMPClient, FakeEngine]) -> None:
    client, engine = pair
    for token in range(500):
        engine.send([0, [["r", [token]]]])
    assert [(await next_output(client)).outputs[0].new_token_ids[0] for _ in range(500)] == list(range(500))


async def test_utility_calls(pair: tuple[AsyncMPClient, FakeEngine]) -> None:
    client, engine = pair

    def serve() -> Any:
        kind, call = engine.receive()
        assert kind == b"\x03"
        engine.answer([0, call[1] ^ 1], "for somebody else")  # an unknown call_id is ignored
        engine.answer(call, ["generate"])
        engine.answer(engine.receive()[1], failure="Call to nothing method failed: no such method")
        engine.answer(engine.receive()[1])
        return call

    server = asyncio.create_task(in_thread(serve))
    assert await client.call_utility_async("get_supported_tasks") == ["generate"]
    with pytest.raises(EngineGenerateError, match="no such method"):
        await client.call_utility_async("nothing", 1)
    assert await client.call_utility_async("void") is None
    call = await server
    assert call[0] == 0 and 0 < call[1] < 2**64 and call[2:] == ["get_supported_tasks", []]
    assert client.statistics().pending_utilities == 0


async def test_a_cancelled_utility_call_leaves_nothing(pair: tuple[AsyncMPClient, FakeEngine]) -> None:
    client, engine = pair
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await client.call_utility_async("slow")
    assert client.statistics().pending_utilities == 0
    engine.answer((await in_thread(engine.receive))[1], "too late")
    engine.send([0, [["r", [1]]]])
    assert (await next_output(client)).outputs[0].new_token_ids == [1]  # the late answer harmed nobody


async def test_several_engines_take_turns_and_all_hear_of_aborts() -> None:
    listeners = bind_listeners()
    with FakeEngine(engine_identity(0)) as first, FakeEngine(engine_identity(1)) as second:
        client = AsyncMPClient(listeners, [first.identity, second.identity])
        for engine in (first, second):
            engine.connect(listeners.input_address, listeners.output_address)
        await client.wait_ready(DEADLINE_S)
        await client.add_request_async(request("a"))
        await client.add_request_async(request("b"))
        client.abort_requests(["a"])
        assert [(await in_thread(engine.receive))[1][0] for engine in (first, second)] == ["a", "b"]
        assert [(await in_thread(engine.receive))[1] for engine in (first, second)] == [["a"], ["a"]]
        call = asyncio.create_task(client.call_utility_async("f"))
        for engine, result in ((second, 2), (first, 1)):
            engine.answer((await in_thread(engine.receive))[1], result)
        assert await call == 1
        client.shutdown()


# ── the end ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_shutdown_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    fds_before = set(os.listdir("/proc/self/fd"))
    with FakeEngine() as engine:
        listeners = bind_listeners()
        directory = listeners.directory
        assert directory is not None and directory.stat().st_mode & 0o777 == 0o700
        client = await connect(listeners, engine)
        waiter = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0)
        client.shutdown()
        client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await waiter
    assert not directory.exists()
    assert set(os.listdir("/proc/self/fd")) <= fds_before
    assert not [r for r in caplog.records if r.levelname == "ERROR"]  # a wanted end is not an error


async def test_listeners_work_through_inherited_descriptors() -> None:
    """What a parent hands to a front-end in another process: numbers and nothing else (issue 5)."""
    ours = bind_listeners()
    theirs = Listeners(os.dup(ours.input_fd), os.dup(ours.output_fd), ours.input_address, ours.output_address, ours.local)
    ours_directory, ours.directory = ours.directory, None
    ours.close()
    with FakeEngine() as engine:
        client = await connect(theirs, engine)
        await client.add_request_async(request("r"))
        assert (await in_thread(engine.receive))[1][0] == "r"
        client.shutdown()
    assert isinstance(ours_directory, Path)
    for file in ours_directory.iterdir():
        file.unlink()
    ours_directory.rmdir()


async def test_two_clients_side_by_side() -> None:
    with FakeEngine() as a, FakeEngine() as b:
        clients = [await connect(bind_listeners(local=local), engine) for local, engine in ((True, a), (False, b))]
        for token, engine in enumerate((a, b)):
            engine.send([0, [["r", [token]]]])
        assert [(await next_output(client)).outputs[0].new_token_ids for client in clients] == [[0], [1]]
        for client in clients:
            client.shutdown()
