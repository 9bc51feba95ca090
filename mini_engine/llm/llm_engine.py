"""LLMEngine: the synchronous counterpart of AsyncLLM. No task, no queue: step() runs one engine step and returns what it gave.

Promises  the same input and output processing as the server's, so the same text, logprobs and errors.
Callers   one thread. `client` is an InprocClient or anything with these three of its methods; who closes the engine owns this object.

Forms 3 and 9 of a request, offline.    vLLM: v1/engine/llm_engine.py::LLMEngine
"""

from collections.abc import Sequence
from typing import Protocol

from mini_engine.llm.input_processor import InputProcessor
from mini_engine.llm.output_processor import OutputProcessor
from mini_engine.observe.stats import IterationStats
from mini_engine.outputs import RequestOutput
from mini_engine.sampling_params import SamplingParams
from mini_engine.wire.messages import EngineCoreOutputs, EngineCoreRequest


class EngineCoreClient(Protocol):
    """What engine_core/inproc.py offers; spelled out because the front-end must not import it."""

    def add_request(self, request: EngineCoreRequest) -> None: ...
    def abort_requests(self, request_ids: list[str]) -> None: ...
    def get_output(self) -> EngineCoreOutputs: ...


class LLMEngine:
    def __init__(self, client: EngineCoreClient, input_processor: InputProcessor, output_processor: OutputProcessor) -> None:
        self.client = client
        self.input_processor = input_processor
        self.output_processor = output_processor

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
    ) -> None:
        """Check and queue. `prompt` is only carried into the outputs. Raises VLLMValidationError, and then nothing was queued."""
        request = self.input_processor.process_inputs(request_id, prompt_token_ids, params, priority=priority)
        for child in self.output_processor.add_request(request, prompt):
            self.client.add_request(child)

    def step(self) -> list[RequestOutput]:
        """One step of the engine; outputs of the requests that gained something."""
        message = self.client.get_output()
        request_outputs, reqs_to_abort = self.output_processor.process_outputs(message.outputs, message.timestamp, IterationStats())
        if reqs_to_abort:
            self.client.abort_requests(reqs_to_abort)
        return request_outputs

    def abort_requests(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """End requests by the caller's ids; their last outputs, "abort", are returned."""
        request_outputs, reqs_to_abort = self.output_processor.abort_requests(request_ids, IterationStats(), internal=False)
        self.client.abort_requests(reqs_to_abort)
        return request_outputs

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()
