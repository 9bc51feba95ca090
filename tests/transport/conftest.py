"""A client and its engine, over unix sockets and over TCP."""

from collections.abc import AsyncIterator

import pytest

from mini_engine.transport.client import AsyncMPClient
from mini_engine.transport.listeners import bind_listeners
from tests.transport.clients import connect
from tests.transport.fake_engine import FakeEngine


@pytest.fixture(params=["local", "remote"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[AsyncMPClient, FakeEngine]]:
    with FakeEngine() as engine:
        client = await connect(bind_listeners(local=request.param == "local"), engine)
        yield client, engine
        client.shutdown()
