"""The client leaves: whatever the phase, the generation is cancelled, all n of it, and nothing is left in a registry."""

import asyncio
from typing import Any

import pytest
from anyio import wait_all_tasks_blocked

from tests.server.fake import asgi_client, chat_body, completion_body, make_app, parse_sse

pytestmark = pytest.mark.anyio

ROUTES = [
    ("/v1/chat/completions", chat_body()),
    ("/v1/completions", completion_body()),
    ("/v1/completions", completion_body(prompt=["a", "b"])),
]


async def settle() -> None:
    await asyncio.sleep(0)
    await wait_all_tasks_blocked()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("step", [0, 2])  # queued or prefilling; decoding
async def test_leaving_cancels(path: str, body: dict[str, Any], stream: bool, step: int) -> None:
    engine, app = make_app()
    engine.gates[step] = asyncio.Event()  # never set
    async with asgi_client(app, path, body | {"stream": stream, "n": 4}) as client:
        await engine.started.wait()
        await settle()
        assert engine.open and app.state.service.statistics().in_flight == 1
        client.disconnect()
        await client.task
    assert not engine.open and sorted(engine.aborted) == sorted(r["id"] for r in engine.requests)
    assert app.state.service.statistics().in_flight == 0


async def test_leaving_while_the_prompt_is_rendered() -> None:
    engine, app = make_app()
    engine.renderer.gate = asyncio.Event()
    async with asgi_client(app, *ROUTES[0]) as client:
        await settle()
        client.disconnect()
        await client.task
    assert not engine.requests and app.state.service.statistics().in_flight == 0 and not client.messages


async def test_leaving_in_the_middle_of_the_body_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    engine, app = make_app()
    async with asgi_client(app, "/v1/completions", completion_body(), complete=False) as client:
        await settle()
        client.disconnect()
        await client.task
    assert not engine.requests and not caplog.records


async def test_the_server_cancels_the_handler() -> None:
    """uvicorn's last resort at shutdown: the ASGI task itself is cancelled."""
    engine, app = make_app()
    engine.gates[1] = asyncio.Event()
    async with asgi_client(app, "/v1/completions", completion_body(stream=True)) as client:
        await client.sent.wait()
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
    assert not engine.open and app.state.service.statistics().in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [0, 2])
async def test_shutdown_ends_open_generations_with_a_terminal_error(stream: bool, step: int) -> None:
    engine, app = make_app()
    engine.gates[step] = asyncio.Event()
    async with asgi_client(app, "/v1/completions", completion_body(stream=stream)) as client:
        await engine.started.wait()
        await settle()
        app.state.service.stop_generations()
        await client.task
        assert client.messages[-1].get("more_body", False) is False
        if stream and step:
            assert client.messages[0]["status"] == 200
            assert list(parse_sse(client.body))[-1]["error"]["code"] == "server_stopping"
        else:
            assert client.messages[0]["status"] == 503 and b"server_stopping" in client.body
    assert not engine.open


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_body_that_is_complete_too_late_begins_nothing(path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    engine, app = make_app()
    async with asgi_client(app, path, body | {"stream": True}, complete=False) as client:
        await settle()
        app.state.service.stop_generations()
        client.complete()
        await client.task
        assert client.messages[0]["status"] == 503 and b"server_stopping" in client.body
    assert not engine.requests and not caplog.records
