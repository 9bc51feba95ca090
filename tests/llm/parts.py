"""Front-end parts over a tiny tokenizer, and a client that stands in for the transport: no engine, no socket."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mini_engine.exceptions import EngineDeadError
from mini_engine.llm.input_processor import InputProcessor
from mini_engine.llm.output_processor import OutputProcessor
from mini_engine.render.model_files import ModelFiles
from mini_engine.sampling_params import SamplingParams
from mini_engine.transport.client import ClientStats
from mini_engine.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from tests.text.tiny_tokenizers import byte_level

MAX_MODEL_LEN = 64
EOS, OTHER_EOS = 0, 1  # of byte_level()
VOCAB_SIZE = byte_level().vocab_size


def model_files(eos_token_ids: Sequence[int] = (EOS, OTHER_EOS)) -> ModelFiles:
    return ModelFiles(Path("."), {}, {}, VOCAB_SIZE, MAX_MODEL_LEN, list(eos_token_ids), {})


def input_processor(eos_token_ids: Sequence[int] = (EOS, OTHER_EOS)) -> InputProcessor:
    return InputProcessor(model_files(eos_token_ids), byte_level(), MAX_MODEL_LEN)


def output_processor() -> OutputProcessor:
    return OutputProcessor(byte_level())


def make_request(params: SamplingParams, prompt: Sequence[int] = (5, 6, 7), request_id: str = "r") -> EngineCoreRequest:
    return input_processor().process_inputs(request_id, prompt, params)


def outputs_of(
    request_id: str, groups: Sequence[Sequence[int]], finish: FinishReason | None = FinishReason.LENGTH
) -> list[EngineCoreOutput]:
    """One output per group of tokens; the last one ends the request."""
    outputs = [EngineCoreOutput(request_id, list(group)) for group in groups]
    outputs[-1].finish_reason = finish
    return outputs


class FakeClient:
    """AsyncMPClient's interface; a test plays the engine through `requests`, `aborted` and `feed()`."""

    def __init__(self, send_steps: int = 0) -> None:
        self.requests: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.dead_error: EngineDeadError | None = None
        self.send_steps = send_steps  #: turns of the loop that each send takes, so that it can be cancelled
        self.sent = asyncio.Event()
        self._outputs: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = asyncio.Queue()

    def feed(self, outputs: Iterable[EngineCoreOutput]) -> None:
        self._outputs.put_nowait(EngineCoreOutputs(outputs=list(outputs), timestamp=1.0))

    def die(self, message: str = "killed") -> None:
        self.dead_error = EngineDeadError(message)
        self._outputs.put_nowait(self.dead_error)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        for _ in range(self.send_steps):
            await asyncio.sleep(0)
        self.requests.append(request)
        self.sent.set()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.aborted.extend(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        item = await self._outputs.get()
        if isinstance(item, EngineDeadError):
            raise item
        return item

    async def call_utility_async(self, method: str, *args: object) -> Any:
        await asyncio.get_running_loop().create_future()  # never answered

    def statistics(self) -> ClientStats:
        return ClientStats(0, 0, self._outputs.qsize())

    def shutdown(self, timeout: float = 5.0) -> None:
        self.dead_error = self.dead_error or EngineDeadError("shut down")
