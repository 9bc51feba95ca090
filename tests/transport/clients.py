"""A connected AsyncMPClient, and how tests wait for what it gets."""

import asyncio
from collections.abc import Callable
from typing import Any

from mini_engine.sampling_params import SamplingParams
from mini_engine.transport.client import AsyncMPClient
from mini_engine.transport.listeners import Listeners
from mini_engine.wire.messages import EngineCoreRequest
from tests.transport.fake_engine import FakeEngine

DEADLINE_S = 10.0


def request(request_id: str = "r") -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [1, 2], None, SamplingParams(), None, 1.0, None, None, None)


async def connect(listeners: Listeners, engine: FakeEngine, **kwargs: Any) -> AsyncMPClient:
    client = AsyncMPClient(listeners, [engine.identity], **kwargs)
    engine.connect(listeners.input_address, listeners.output_address)
    await client.wait_ready(DEADLINE_S)
    return client


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.to_thread(function, *args)


async def next_output(client: AsyncMPClient) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return await client.get_output_async()
