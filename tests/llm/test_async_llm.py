"""AsyncLLM over a client that a test drives: whatever ends a request, nothing of it stays, here or in the engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import pytest

from mini_engine.exceptions import EngineDeadError, VLLMValidationError
from mini_engine.llm.async_llm import AsyncLLM
from mini_engine.llm.output_processor import OutputProcessorStats
from mini_engine.observe.stats import IterationStats
from mini_engine.outputs import RequestOutput
from mini_engine.render.renderer import Renderer
from mini_engine.sampling_params import RequestOutputKind, SamplingParams
from mini_engine.wire.messages import EngineCoreOutput, FinishReason, SchedulerStats
from tests.llm.parts import MAX_MODEL_LEN, FakeClient, input_processor, model_files, output_processor, outputs_of
from tests.text.tiny_tokenizers import byte_level

pytestmark = pytest.mark.anyio
DELTA = RequestOutputKind.DELTA
EMPTY = OutputProcessorStats(0, 0, 0)
DEADLINE_S = 10.0


class Recorder:
    def __init__(self) -> None:
        self.finished: list[str] = []

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        if iteration_stats is not None:
            self.finished += [str(f.finish_reason) for f in iteration_stats.finished_requests]


@asynccontextmanager
async def llm(client: FakeClient, **kwargs: Any) -> AsyncIterator[AsyncLLM]:
    renderer = Renderer(model_files(), byte_level(), MAX_MODEL_LEN)
    engine = AsyncLLM(client, renderer, input_processor(), output_processor(), **kwargs)  # type: ignore[arg-type]
    yield engine
    await engine.shutdown()
    renderer.close()


async def collect(
    engine: AsyncLLM, prompt: Any = (5, 6), params: SamplingParams | None = None, request_id: str = "r"
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params or SamplingParams(output_kind=DELTA), request_id)]


async def blocked() -> None:
    """Until every other task waits for something."""
    await asyncio.sleep(0)
    await anyio.wait_all_tasks_blocked()


async def test_text_and_ids_in_outputs_out() -> None:
    client = FakeClient()
    async with llm(client) as engine:
        task = asyncio.create_task(collect(engine, "the fox"))
        await client.sent.wait()
        (request,) = client.requests
        assert request.prompt_token_ids == byte_level().encode("the fox")
        client.feed(outputs_of(request.request_id, [[9], [10]]))
        outputs = await task
        assert outputs[-1].finished and outputs[-1].prompt == "the fox"
        assert [t for output in outputs for t in output.outputs[0].token_ids] == [9, 10]
        assert (client.aborted, engine.statistics().requests) == ([], EMPTY)


async def test_a_wrong_request_is_refused_before_anything_is_registered() -> None:
    client = FakeClient()
    async with llm(client) as engine:
        with pytest.raises(VLLMValidationError):
            await collect(engine, [])
        with pytest.raises(VLLMValidationError):
            await collect(engine, "x" * 100_000)
        assert (client.requests, engine.statistics().requests) == ([], EMPTY)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt", ["the fox", (5, 6)], ids=["text", "ids"])
async def test_cancelled_at_every_await_point_nothing_stays(prompt: Any, n: int) -> None:
    """Cancel after 0, 1, 2 … turns of the loop, through rendering and sending (each takes some turns here), waiting and reading."""

    async def tokenize_prompt(text: str) -> list[int]:
        for _ in range(3):  # the pool's thread would decide how many
            await asyncio.sleep(0)
        return byte_level().encode(text)

    all_sent = read_some = False
    for turns in range(40):
        client = FakeClient(send_steps=2)
        async with llm(client) as engine:
            engine.renderer.tokenize_prompt = tokenize_prompt  # type: ignore[method-assign, assignment]
            params = SamplingParams(output_kind=DELTA, n=n, temperature=1.0)
            task = asyncio.create_task(collect(engine, prompt, params))
            fed = 0
            for _ in range(turns):
                if len(client.requests) == n and not client.statistics().unread_outputs:
                    fed += 1
                    client.feed([EngineCoreOutput(request.request_id, [9]) for request in client.requests])
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.statistics().requests == EMPTY
            assert {request.request_id for request in client.requests} <= set(client.aborted)
            all_sent |= len(client.requests) == n
            read_some |= bool(fed)
    assert all_sent and read_some, "never got that far"


async def test_a_request_for_many_answers_lets_others_have_their_turn() -> None:
    client, seen = FakeClient(), set()
    async with llm(client, output_chunk_size=10) as engine:
        task = asyncio.create_task(collect(engine, params=SamplingParams(output_kind=DELTA, n=35)))
        while len(client.requests) < 35:
            await asyncio.sleep(0)
            seen.add(len(client.requests))
        assert seen >= {9, 19, 29, 35}
        task.cancel()
        await asyncio.wait([task])
        assert engine.statistics().requests == EMPTY and len(client.aborted) == 35


async def test_a_reader_that_leaves_early_aborts() -> None:
    client = FakeClient()
    recorder = Recorder()
    async with llm(client, stat_logger=recorder) as engine:

        async def leave() -> None:
            async with aclosing(engine.generate([5], SamplingParams(output_kind=DELTA), "r")) as outputs:
                async for _ in outputs:
                    break

        task = asyncio.create_task(leave())
        await client.sent.wait()
        client.feed([EngineCoreOutput(client.requests[0].request_id, [9])])
        await task
        assert client.aborted == [client.requests[0].request_id]
        assert engine.statistics().requests == EMPTY
        assert recorder.finished == ["abort"]


async def test_abort_by_the_callers_id_ends_the_stream_properly() -> None:
    client = FakeClient()
    async with llm(client) as engine:
        tasks = [asyncio.create_task(collect(engine, request_id=i)) for i in ("a", "a", "b")]
        await blocked()
        await engine.abort("a")
        await engine.abort(["nobody"])
        for task in tasks[:2]:
            assert [(o.finished, o.outputs[0].finish_reason) for o in await task] == [(True, "abort")]
        assert sorted(client.aborted) == sorted(r.request_id for r in client.requests if r.external_req_id == "a")
        assert not tasks[2].done()
        client.feed(outputs_of(client.requests[2].request_id, [[9]]))
        await tasks[2]


async def test_a_stop_string_is_aborted_in_the_engine() -> None:
    client = FakeClient()
    async with llm(client) as engine:
        task = asyncio.create_task(collect(engine, params=SamplingParams(output_kind=DELTA, stop="fox")))
        await client.sent.wait()
        client.feed([EngineCoreOutput(client.requests[0].request_id, byte_level().encode("fox", add_special_tokens=False))])
        outputs = await task
        assert outputs[-1].outputs[0].stop_reason == "fox"
        await blocked()
        assert client.aborted == [client.requests[0].request_id]


async def test_a_large_message_is_handled_in_slices_with_a_turn_between() -> None:
    client = FakeClient()
    async with llm(client, output_chunk_size=4) as engine:
        tasks = [asyncio.create_task(collect(engine, request_id=str(i))) for i in range(10)]
        await blocked()
        turns = [0]

        async def count() -> None:
            while engine.statistics().requests.num_requests:
                turns.append(engine.statistics().requests.num_requests)
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        client.feed([EngineCoreOutput(r.request_id, [9], finish_reason=FinishReason.LENGTH) for r in client.requests])
        await asyncio.gather(counter, *tasks)
        assert {10, 6, 2} <= set(turns)


async def test_a_slow_reader_gets_fewer_larger_outputs() -> None:
    client = FakeClient()
    async with llm(client) as engine:
        stream = engine.generate([5], SamplingParams(output_kind=DELTA), "r")
        first = asyncio.create_task(anext(stream))
        await client.sent.wait()
        request_id = client.requests[0].request_id
        client.feed([EngineCoreOutput(request_id, [9])])
        assert (await first).outputs[0].token_ids == [9]
        for output in outputs_of(request_id, [[10], [11], [12]]):
            client.feed([output])
        await blocked()
        rest = [output async for output in stream]
        assert [output.outputs[0].token_ids for output in rest] == [[10, 11, 12]]


# ── death ───────────────────────────────────────────────────────────────────────────────────────────────


async def everyone_hears(engine: AsyncLLM, client: FakeClient, kill: Callable[[], Awaitable[None]], match: str) -> None:
    tasks = [asyncio.create_task(collect(engine, params=SamplingParams(n=n, output_kind=DELTA))) for n in (1, 2)]
    await blocked()
    await kill()
    async with asyncio.timeout(DEADLINE_S):
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
            assert match in str(error)
    assert engine.errored and match in str(engine.dead_error)
    assert engine.statistics().requests == EMPTY
    with pytest.raises(EngineDeadError, match=match):
        await collect(engine)
    with pytest.raises(EngineDeadError, match=match):
        await engine.ping(1.0)


async def test_the_engines_death_ends_every_stream() -> None:
    client = FakeClient()

    async def kill() -> None:
        client.die()

    async with llm(client) as engine:
        await everyone_hears(engine, client, kill, "killed")


async def test_a_request_that_was_being_rendered_when_the_engine_died(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    async with llm(client) as engine:
        dead = asyncio.Event()

        async def tokenize_prompt(text: str) -> list[int]:
            await dead.wait()
            return [5]

        monkeypatch.setattr(engine.renderer, "tokenize_prompt", tokenize_prompt)
        task = asyncio.create_task(collect(engine, "text"))
        await blocked()
        client.die()
        await blocked()
        dead.set()
        with pytest.raises(EngineDeadError):
            async with asyncio.timeout(DEADLINE_S):
                await task
        assert (client.requests, engine.statistics().requests) == ([], EMPTY)


async def test_a_fault_of_the_output_handler_ends_every_stream(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient()

    class Faulty:
        def record(self, *_: object) -> None:
            raise ZeroDivisionError("a logger's bug")

    async def kill() -> None:
        client.feed([EngineCoreOutput("unknown", [1])])

    async with llm(client, stat_logger=Faulty()) as engine:
        await everyone_hears(engine, client, kill, "a logger's bug")
    assert "the output handler failed" in caplog.text


async def test_shutdown_ends_every_stream_and_is_idempotent() -> None:
    client = FakeClient()
    async with llm(client) as engine:
        await everyone_hears(engine, client, engine.shutdown, "shut down")


async def test_ping_says_that_the_engine_is_stuck_and_for_how_long() -> None:
    async with llm(FakeClient()) as engine:
        with pytest.raises(TimeoutError, match=r"did not answer within 0.02 s"):
            await engine.ping(0.02)
        assert not engine.errored
