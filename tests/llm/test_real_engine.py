"""AsyncLLM over a real EngineCore process on the mock device: many requests, wrong ones, and an engine that dies or stands still."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from mini_engine.config import EngineConfig, MockConfig
from mini_engine.exceptions import EngineDeadError
from mini_engine.executor.mock import mock_generate
from mini_engine.llm.async_llm import AsyncLLM
from mini_engine.llm.collector import RequestOutputCollector
from mini_engine.llm.input_processor import InputProcessor
from mini_engine.llm.output_processor import OutputProcessor, OutputProcessorStats
from mini_engine.outputs import RequestOutput
from mini_engine.render.model_files import ModelFiles
from mini_engine.render.renderer import Renderer
from mini_engine.render.tokenizer import Tokenizer
from mini_engine.sampling_params import RequestOutputKind, SamplingParams
from mini_engine.transport.client import AsyncMPClient, ClientStats
from mini_engine.transport.launch import launch_engines
from mini_engine.transport.listeners import bind_listeners
from tests.text.tiny_tokenizers import byte_level

pytestmark = pytest.mark.anyio
DELTA = RequestOutputKind.DELTA
VOCAB_SIZE = 400
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config))
    byte_level().backend.save(str(directory / "tokenizer.json"))
    return directory


@asynccontextmanager
async def serving(model: Path, **options: Any) -> AsyncIterator[AsyncLLM]:
    config = EngineConfig(model=str(model), executor="mock", **options)
    listeners = bind_listeners()
    engines = await asyncio.to_thread(launch_engines, listeners, config, ready_timeout_s=DEADLINE_S)
    client = AsyncMPClient(listeners, engines.identities, engines=engines)
    responses = await client.wait_ready(DEADLINE_S)
    max_model_len = min(response.max_model_len for response in responses if response)
    files, tokenizer = ModelFiles.load(model), Tokenizer.load(model)
    renderer = Renderer(files, tokenizer, max_model_len)
    engine = AsyncLLM(client, renderer, InputProcessor(files, tokenizer, max_model_len), OutputProcessor(tokenizer))
    try:
        yield engine
    finally:
        await engine.shutdown()
        renderer.close()


def pid_of(engine: AsyncLLM) -> int:
    assert engine.client._engines is not None
    return engine.client._engines.processes[0].pid


async def collect(engine: AsyncLLM, prompt: list[int], params: SamplingParams, request_id: str = "r") -> list[RequestOutput]:
    async with asyncio.timeout(DEADLINE_S):
        return [output async for output in engine.generate(prompt, params, request_id)]


def token_ids(outputs: list[RequestOutput]) -> list[int]:
    """Of the first answer. How many outputs carry them is the reader's pace: the collector joins what was not taken yet."""
    return [token for output in outputs for token in output.outputs[0].token_ids]


def greedy(max_tokens: int, **kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, output_kind=DELTA, **kwargs)


async def test_a_thousand_at_once_each_ends_once_with_its_own_tokens(model: Path) -> None:
    async with serving(model, num_gpu_blocks_override=400, max_num_seqs=256) as engine:
        prompts = [[3 + i % 300, 7, 3 + i // 300] * (1 + i % 9) for i in range(1000)]
        streams = await asyncio.gather(*(collect(engine, prompt, greedy(4 + i % 13), str(i)) for i, prompt in enumerate(prompts)))
        for i, (prompt, outputs) in enumerate(zip(prompts, streams, strict=True)):
            assert [output.finished for output in outputs].index(True) == len(outputs) - 1
            assert {output.request_id for output in outputs} == {str(i)}
            assert token_ids(outputs) == mock_generate(prompt, 4 + i % 13, VOCAB_SIZE)
            assert outputs[-1].outputs[0].finish_reason == "length"
        assert engine.statistics().requests == OutputProcessorStats(0, 0, 0)
        async with asyncio.timeout(DEADLINE_S):  # a last message, with statistics alone, may be on its way to the output handler
            while engine.statistics().client != ClientStats(0, 0, 0):  # noqa: ASYNC110  the client has a count, no event
                await asyncio.sleep(0)


async def test_limits_come_from_the_engine(model: Path) -> None:
    async with serving(model, num_gpu_blocks_override=5) as engine:  # 4 usable blocks of 16
        assert engine.input_processor.max_model_len == 64
        with pytest.raises(ValueError, match=r"64 tokens.*maximum model length of 64"):
            await collect(engine, [5] * 64, greedy(1))
        assert (await collect(engine, [5] * 60, SamplingParams(max_tokens=None, output_kind=DELTA)))[-1].finished


async def test_what_only_the_engine_refuses_is_an_error_of_that_request(model: Path) -> None:
    async with serving(model) as engine:
        request = engine.input_processor.process_inputs("r", [5], greedy(3))
        assert request.sampling_params is not None
        request.sampling_params.max_tokens = None  # no front-end sends this
        collector = RequestOutputCollector(DELTA)
        engine.output_processor.add_request(request, None, collector)
        await engine.client.add_request_async(request)
        async with asyncio.timeout(DEADLINE_S):
            output = await collector.get()
        assert output.finished and output.outputs[0].finish_reason == "error"
        assert output.error is not None and "max_tokens" in output.error
        assert (await collect(engine, [5], greedy(3)))[-1].finished  # the others go on


async def test_several_answers_and_logprobs(model: Path) -> None:
    async with serving(model) as engine:
        params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=5, logprobs=2, output_kind=RequestOutputKind.FINAL_ONLY)
        (output,) = await collect(engine, [5, 6], params)
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        for completion in output.outputs:
            assert len(completion.token_ids) == len(completion.logprobs or []) == 5
            assert [next(iter(position)) for position in completion.logprobs or []] == completion.token_ids


@pytest.mark.parametrize("n", [1, 4])
async def test_whoever_leaves_frees_the_engine(model: Path, n: int) -> None:
    """Left while it runs; then the engine is empty again: its own prefix cache can be reset, which a running request forbids."""
    async with serving(model, mock=MockConfig(step_ms=20.0)) as engine:  # runs for 8 s when nobody ends it
        params = SamplingParams(n=n, temperature=1.0, max_tokens=400, output_kind=DELTA)
        stream = engine.generate([5, 6], params, "r")
        async with asyncio.timeout(DEADLINE_S):
            async with aclosing(stream):
                async for _ in stream:
                    assert not await engine.reset_prefix_cache()
                    break
            assert engine.statistics().requests == OutputProcessorStats(0, 0, 0)
            assert await engine.reset_prefix_cache()  # a call is sent after what was aborted before it
        assert token_ids(await collect(engine, [5], greedy(3))) == mock_generate([5], 3, VOCAB_SIZE)


async def test_a_killed_engine_ends_every_stream_within_a_second(model: Path) -> None:
    async with serving(model, mock=MockConfig(step_ms=20.0)) as engine:  # 8 s: the first still runs when the last has started
        started = [asyncio.Event() for _ in range(20)]

        async def stream(i: int) -> None:
            async for _ in engine.generate([5, i], greedy(400), str(i)):
                started[i].set()

        tasks = [asyncio.create_task(stream(i)) for i in range(20)]
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(event.wait() for event in started))
        killed_at = time.monotonic()
        os.kill(pid_of(engine), signal.SIGKILL)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - killed_at < 1.0
        assert all(isinstance(error, EngineDeadError) and "signal 9 (SIGKILL)" in str(error) for error in errors)
        assert engine.errored
        assert engine.statistics().requests == OutputProcessorStats(0, 0, 0)
        with pytest.raises(EngineDeadError):
            await collect(engine, [5], greedy(1))


async def test_a_crashing_engine_says_so(model: Path) -> None:
    async with serving(model, mock=MockConfig(crash_at_step=3)) as engine:
        with pytest.raises(EngineDeadError, match=r"ENGINE_CORE_DEAD|exit code"):
            await collect(engine, [5], greedy(100))


async def test_a_stopped_engine_is_alive_but_does_not_answer_and_goes_on_when_continued(model: Path) -> None:
    async with serving(model, mock=MockConfig(step_ms=1.0)) as engine:
        task = asyncio.create_task(collect(engine, [5, 6], greedy(60)))
        await engine.ping(DEADLINE_S)
        process = psutil.Process(pid_of(engine))
        process.suspend()
        try:
            with pytest.raises(TimeoutError, match=r"did not answer within 0.2 s"):
                await engine.ping(0.2)
            assert not engine.errored
            assert engine.statistics().client.pending_utilities == 0
        finally:
            process.resume()
        assert token_ids(await task) == mock_generate([5, 6], 60, VOCAB_SIZE)
        await engine.ping(DEADLINE_S)


async def test_a_hanging_device_is_reported_by_ping_and_shutdown_still_ends(model: Path) -> None:
    async with serving(model, mock=MockConfig(hang_at_step=2)) as engine:
        stream = engine.generate([5], greedy(10), "r")
        async with asyncio.timeout(DEADLINE_S):
            await anext(stream)
        with pytest.raises(TimeoutError, match="stuck"):
            await engine.ping(0.1)
        waiter = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await engine.shutdown(timeout=0.5)
        with pytest.raises(EngineDeadError):
            await waiter


async def test_two_engines_side_by_side(model: Path) -> None:
    async with serving(model) as a, serving(model, num_gpu_blocks_override=5) as b:
        one, other = await asyncio.gather(collect(a, [5, 6], greedy(8)), collect(b, [5, 6], greedy(8)))
        for outputs in (one, other):
            assert token_ids(outputs) == mock_generate([5, 6], 8, VOCAB_SIZE)


def test_everything_works_under_uvloop(model: Path) -> None:
    async def main() -> None:
        async with serving(model, mock=MockConfig(step_ms=0.2)) as engine:
            streams = await asyncio.gather(*(collect(engine, [5, i], greedy(30), str(i)) for i in range(100)))
            for i, outputs in enumerate(streams):
                assert token_ids(outputs) == mock_generate([5, i], 30, VOCAB_SIZE)
            await engine.ping(DEADLINE_S)
            os.kill(pid_of(engine), signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await collect(engine, [5], greedy(400))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
