"""AsyncLLM: many requests at once over one engine. Three roles on one event loop, and who waits for whom.

    request coroutines   generate(): check, register, send; then wait for this request's collector. One per HTTP request.
    output_handler       the only task here: takes messages from the client, lets OutputProcessor spread them over the collectors,
                         aborts what a stop string ended. It never waits for a reader.
    control plane        abort, ping, utilities, shutdown: between the two, no task of their own.

Law       Registered before sent, forgotten when its terminal output is made; whatever ends generate() early (cancel at any await, the
          reader's break, an exception) aborts the request here and in the engine. So nothing leaks and nothing is answered twice.
Fairness  A message of more than output_chunk_size outputs is handled in slices, with a turn of the loop between them; so is a request
          for more answers than that.
Death     The handler ends by EngineDeadError or by a fault of its own; either way every waiting reader gets EngineDeadError at once.

Forms 3 and 9 of a request.    vLLM: v1/engine/async_llm.py::AsyncLLM; WIRE §4
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from mini_engine.exceptions import EngineDeadError
from mini_engine.llm.collector import RequestOutputCollector
from mini_engine.llm.input_processor import InputProcessor
from mini_engine.llm.output_processor import OutputProcessor, OutputProcessorStats
from mini_engine.observe.stats import IterationStats
from mini_engine.outputs import RequestOutput
from mini_engine.render.renderer import Renderer
from mini_engine.sampling_params import SamplingParams
from mini_engine.transport.client import AsyncMPClient, ClientStats
from mini_engine.wire.messages import SchedulerStats

logger = logging.getLogger(__name__)


class StatLogger(Protocol):
    """Where statistics go (observe/metrics.py)."""

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None: ...


@dataclass(frozen=True, slots=True)
class AsyncLLMStats:
    """AsyncLLM.statistics(): everything is zero when nothing is in flight."""

    requests: OutputProcessorStats
    client: ClientStats


class AsyncLLM:
    """Make it on the event loop, with a client that is ready; `shutdown()` ends it and stops the client's engines."""

    def __init__(
        self,
        client: AsyncMPClient,
        renderer: Renderer,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        *,
        stat_logger: StatLogger | None = None,
        output_chunk_size: int = 128,
        log_requests: bool = False,
    ) -> None:
        self.client = client
        self.renderer = renderer
        self.input_processor = input_processor
        self.output_processor = output_processor
        self._stat_logger = stat_logger
        self._output_chunk_size = output_chunk_size
        self._log_requests = log_requests
        self._handler_error: EngineDeadError | None = None
        self._output_handler = asyncio.create_task(self._run_output_handler(), name="output_handler")
        self._output_handler.add_done_callback(self._on_handler_done)

    # ── request coroutines ──────────────────────────────────────────────────────────────────────────────

    async def generate(
        self,
        inputs: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, until one is `finished`. `inputs` is text or token ids; `prompt` the text that the outputs carry.

        Raises VLLMValidationError before the first output when the request cannot be served, EngineDeadError at any time.
        Leave the loop early, or cancel, and the request is aborted.
        """
        self._raise_if_dead()
        arrival_time = time.time()
        if isinstance(inputs, str):
            prompt, inputs = inputs, await self.renderer.tokenize_prompt(inputs)
        request = self.input_processor.process_inputs(request_id, inputs, params, arrival_time, priority, cache_salt)
        self._raise_if_dead()  # it may have died meanwhile, and then nobody would end this request
        if self._log_requests:
            told = msgspec.to_builtins(request.sampling_params)  # what is not the default
            logger.info("Received request %s: params: %s, prompt tokens: %d", request_id, told, len(request.prompt_token_ids or ()))
        collector = RequestOutputCollector(params.output_kind)
        finished = False
        try:
            for i, child in enumerate(self.output_processor.add_request(request, prompt, collector)):
                if i % self._output_chunk_size == self._output_chunk_size - 1:
                    await asyncio.sleep(0)
                await self.client.add_request_async(child)
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._abort([request.request_id], internal=True)

    # ── output_handler ──────────────────────────────────────────────────────────────────────────────────

    async def _run_output_handler(self) -> None:
        chunk_size, process_outputs = self._output_chunk_size, self.output_processor.process_outputs
        while True:
            message = await self.client.get_output_async()
            outputs = message.outputs
            iteration_stats = IterationStats()
            for start in range(0, len(outputs), chunk_size):
                if start:
                    await asyncio.sleep(0)
                chunk = outputs if len(outputs) <= chunk_size else outputs[start : start + chunk_size]
                _, reqs_to_abort = process_outputs(chunk, message.timestamp, iteration_stats)
                if reqs_to_abort:
                    self.client.abort_requests(reqs_to_abort)
            if self._stat_logger is not None:
                self._stat_logger.record(message.scheduler_stats, iteration_stats if outputs else None)

    def _on_handler_done(self, task: asyncio.Task[None]) -> None:
        """However the handler ended, nobody waits for ever."""
        if task.cancelled():
            error = EngineDeadError("the front-end was shut down")
        elif isinstance(cause := task.exception(), EngineDeadError):
            error = cause
        else:
            logger.error("the output handler failed: no request can be answered any more", exc_info=cause)
            error = EngineDeadError(f"the front-end's output handler failed: {cause!r}")
        self._handler_error = error
        self.output_processor.propagate_error(error)

    # ── control plane ───────────────────────────────────────────────────────────────────────────────────

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why nothing can be answered any more; None while all is well."""
        return self.client.dead_error or self._handler_error

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End every request that carries this id (or one of these), the caller's own: its reader gets a last output, "abort"."""
        self._abort([request_id] if isinstance(request_id, str) else request_id, internal=False)

    async def ping(self, timeout: float) -> None:
        """Ask the engine something, through the same queue as requests, so the answer proves that its loop turns.

        Raises TimeoutError after `timeout` seconds: the process is there, but stuck. Raises EngineDeadError.
        """
        self._raise_if_dead()
        try:
            async with asyncio.timeout(timeout):
                await self.client.call_utility_async("get_supported_tasks")
        except TimeoutError:
            raise TimeoutError(f"EngineCore did not answer within {timeout:g} s: the process is alive, its loop is stuck") from None

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached KV. False when a running request still needs some."""
        return bool(await self.client.call_utility_async("reset_prefix_cache"))

    def statistics(self) -> AsyncLLMStats:
        return AsyncLLMStats(self.output_processor.statistics(), self.client.statistics())

    async def shutdown(self, timeout: float = 5.0) -> None:
        """End the handler, tell every reader, stop the client and its engines. Idempotent."""
        self._output_handler.cancel()
        await asyncio.wait([self._output_handler])
        self.client.shutdown(timeout)

    def _abort(self, request_ids: Iterable[str], *, internal: bool) -> None:
        """Never raises and never waits: it runs while a coroutine is being cancelled."""
        iteration_stats = IterationStats()
        _, reqs_to_abort = self.output_processor.abort_requests(request_ids, iteration_stats, internal=internal)
        if reqs_to_abort:
            self.client.abort_requests(reqs_to_abort)
            if self._stat_logger is not None:
                self._stat_logger.record(None, iteration_stats)

    def _raise_if_dead(self) -> None:
        if (error := self.dead_error) is not None:
            raise EngineDeadError(str(error))
