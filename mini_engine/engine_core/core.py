"""EngineCore: scheduler and executor, one step at a time. No socket, no thread, no queue of its own but the one for early aborts.

    preprocess()          EngineCoreRequest → Request, or Refusal    any thread: it hashes the prompt
    admit()               Request → the scheduler's queue            from here on: one thread, the core loop's
    step()                schedule → forward → sample → early aborts → update; the messages to the front-ends
    step_with_batch_queue()     the same in two halves: schedule → forward → sample of one step, then early aborts → update of the
                          one before, whose result came meanwhile. step_fn is the one of the two that this engine uses.

Promises  a request is refused with an ERROR output that says why, or it is live until its own last output.
Callers   EngineCoreProc's busy loop, InprocClient, tests and notebooks: all drive step_fn() themselves, while has_work().
Not here  policy (scheduler/), the device (executor/), sockets and threads (proc.py, io.py).

Forms 5 to 8 of a request pass through here.    vLLM: v1/engine/core.py::EngineCore
"""

import logging
import queue
import uuid
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from mini_engine.config import EngineConfig
from mini_engine.engine_core.utility import utility
from mini_engine.exceptions import VLLMValidationError
from mini_engine.executor.abstract import Executor
from mini_engine.kv_cache.block_hash import get_request_block_hasher
from mini_engine.scheduler.async_scheduler import AsyncScheduler
from mini_engine.scheduler.request import Request, RequestStatus
from mini_engine.scheduler.scheduler import Scheduler
from mini_engine.step import KVCacheConfig, ModelRunnerOutput, SchedulerOutput
from mini_engine.wire.handshake import EngineCoreReadyResponse
from mini_engine.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

logger = logging.getLogger(__name__)

VLLM_VERSION = "0.32.0"  #: the release whose wire this is; stock front-ends show it and do not check it


@dataclass(frozen=True, slots=True)
class Refusal:
    """An ADD that cannot be served, and why. Takes the Request's way to the core loop, which knows what is live."""

    request_id: str
    client_index: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that the device has been given. What it samples is behind its forward: the device keeps the order."""

    scheduler_output: SchedulerOutput
    forward: Future[ModelRunnerOutput | None]
    sampled: Future[ModelRunnerOutput] | None  #: None: nothing was scheduled, so the forward has the result


def finish_outputs(request_id: str, finish_reason: FinishReason, stop_reason: str | None = None) -> EngineCoreOutputs:
    """The last word on a request that ends without a token."""
    output = EngineCoreOutput(request_id, [], finish_reason=finish_reason, stop_reason=stop_reason)
    return EngineCoreOutputs(outputs=[output], finished_requests={request_id})


class EngineCore:
    """The engine behind the boundary. Raises VLLMValidationError from __init__ for a configuration that cannot work."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None, *, engine_index: int = 0) -> None:
        self.config = config
        self.engine_index = engine_index
        self.instance_id = uuid.uuid4().hex
        self.executor = executor or Executor.get_class(config)(config)
        try:
            self.kv_cache_config, max_model_len = self._initialize_kv_cache()
            self.batch_queue_size = self._choose_batch_queue_size()
            scheduler_class = AsyncScheduler if self.batch_queue_size > 1 else Scheduler
            self.scheduler = scheduler_class(config, self.kv_cache_config, max_model_len)
        except BaseException:
            self.executor.shutdown()
            raise
        self._block_hasher = get_request_block_hasher(config.block_size) if config.enable_prefix_caching else None
        self.step_fn = self.step_with_batch_queue if self.batch_queue_size > 1 else self.step
        #: oldest first; between two calls of step_fn() at most batch_queue_size - 1, and one more after an interrupted one
        self.batch_queue: deque[StepInFlight] = deque()
        self.waiting = False  #: for the device. An exception here is an interrupt and has changed nothing: call step_fn() again
        #: ids to abort before the step in flight is accounted for; see process_aborts_queue
        self.aborts_queue: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._num_early_aborts = 0  #: taken from aborts_queue, their twins in the input queue not yet seen

    def _choose_batch_queue_size(self) -> int:
        """2: overlap."""
        size, why = self.executor.max_concurrent_batches, f"async_scheduling={self.config.async_scheduling}"
        if "scheduler.schedule" in self.config.overlay:
            size, why = 1, "the schedule() in place of ours need not know of placeholders"
        logger.info("async scheduling is %s (%s)", "on" if size > 1 else "off", why)
        return size

    def _initialize_kv_cache(self) -> tuple[KVCacheConfig, int]:
        """Blocks from memory, and the longest request they allow."""
        config, executor = self.config, self.executor
        spec = executor.get_kv_cache_spec()
        num_blocks = config.num_gpu_blocks_override or executor.determine_num_available_blocks(spec)
        size = config.block_size
        num_tokens = (num_blocks - 1) * size  # block 0 is the null block
        if num_tokens <= 0:
            raise VLLMValidationError(
                f"no room for a KV cache: one block of {size} tokens takes {spec.page_size_bytes:,} bytes, and two are needed; "
                "raise kv_cache_memory_bytes (CPU) or gpu_memory_utilization (GPU)"
            )
        asked = config.max_model_len
        cache_limit = f"what a KV cache of {num_blocks} blocks of {size} tokens holds, one unused (more memory, more blocks)"
        for limit, whose in ((executor.max_model_len, "the model's own"), (num_tokens, cache_limit)):
            if asked is not None and asked > limit:
                raise VLLMValidationError(
                    f"max_model_len {asked} is more than {limit}, {whose}: ask for at most that", parameter="max_model_len", value=asked
                )
        max_model_len = asked or min(executor.max_model_len, num_tokens)
        mib = num_blocks * spec.page_size_bytes / 2**20
        logger.info("KV cache: %d blocks of %d tokens = %d tokens, %.1f MiB", num_blocks, size, num_tokens, mib)
        note = "" if asked or max_model_len == executor.max_model_len else f" (the model's {executor.max_model_len} would not fit)"
        logger.info("max_model_len %d%s; room for %.1f requests of that length", max_model_len, note, num_tokens / max_model_len)
        kv_cache_config = KVCacheConfig(num_blocks, size)
        executor.initialize_from_config(kv_cache_config)
        return kv_cache_config, max_model_len

    def ready_response(self) -> EngineCoreReadyResponse:
        """What the front-ends have to know and to respect."""
        config, kv = self.config, self.kv_cache_config
        num_tokens = (kv.num_blocks - 1) * kv.block_size
        return EngineCoreReadyResponse(
            max_model_len=self.scheduler.max_model_len,
            num_gpu_blocks=kv.num_blocks,
            block_size=kv.block_size,
            dtype=self.executor.dtype,
            vllm_version=VLLM_VERSION,
            data_parallel_rank=self.engine_index,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            instance_id=self.instance_id,
            kv_cache_size_tokens=num_tokens,
            kv_cache_max_concurrency=num_tokens / self.scheduler.max_model_len,
            effective_attention_block_size=kv.block_size,
        )

    # ── requests in ─────────────────────────────────────────────────────────────────────────────────────

    def preprocess(self, request: EngineCoreRequest) -> Request | Refusal:
        """Form 4 → form 5. Any thread. Never raises: one request's trouble is that request's."""
        ids, vocab_size = request.prompt_token_ids or [0], self.executor.vocab_size
        try:
            if (worst := min(ids)) < 0 or (worst := max(ids)) >= vocab_size:  # a foreign front-end's; the device would read what lies there
                raise VLLMValidationError(f"prompt_token_ids: {worst} is not in the vocabulary; ids are in [0, {vocab_size - 1}]")
            refused_later = len(ids) >= self.scheduler.max_model_len  # by admit(); a client chose the length, so nothing is hashed
            return Request.from_engine_core_request(request, None if refused_later else self._block_hasher)
        except VLLMValidationError as e:
            reason = str(e)
        except Exception as e:
            logger.exception("request %.80r could not be prepared", request.request_id)
            reason = f"internal error: {type(e).__name__}: {e}"
        return Refusal(request.request_id, request.client_index, reason)

    def admit(self, request: Request | Refusal) -> EngineCoreOutputs | None:
        """Queue a request, or answer with an ERROR output for its client. Never raises for what a client can cause.

        A second ADD with the id of a live request: to the client that owns the first, an ERROR output would be the end of the
        *first* (outputs carry nothing but the id), which goes on here. So it is logged and dropped, and the id still gets exactly
        one last output. Another client's streams are its own: it gets the ERROR. (Stock vLLM dies of either, WIRE T8.)
        """
        live = self.scheduler.requests.get(request.request_id)
        if live is not None and live.client_index == request.client_index:
            logger.error("dropped an ADD: its client has a live request with the same id %.80r already", request.request_id)
            return None
        try:
            if isinstance(request, Request):
                self.scheduler.add_request(request)
                return None
            reason = request.reason
        except VLLMValidationError as e:
            reason = str(e)
        logger.warning("refused request %.80r: %s", request.request_id, reason)
        return finish_outputs(request.request_id, FinishReason.ERROR, reason)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests at their client's wish: no output follows. Unknown and finished ids are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def abort_requests_in_order(self, request_ids: list[str]) -> None:
        """An abort that has arrived through the input queue: behind its ADD for certain. Its twin in aborts_queue is used up with it,
        lest it hit a later request with the same id."""
        if self._num_early_aborts:
            self._num_early_aborts -= 1  # the twin was taken during a step
        else:
            self.aborts_queue.get_nowait()  # it is there: the input thread puts it there first
        self.abort_requests(request_ids)

    def process_aborts_queue(self) -> None:
        """Aborts that arrived during the forward: taken before update, so that no token is accounted to a request nobody waits for."""
        while not self.aborts_queue.empty():
            self._num_early_aborts += 1
            self.abort_requests(self.aborts_queue.get_nowait())

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────

    def has_work(self) -> bool:
        """Whether step_fn() has something to do: requests, or a step in flight, of requests that are over perhaps."""
        return bool(self.batch_queue) or self.scheduler.has_requests()

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """One step: (messages by client_index, whether the model ran). Nothing to do: ({}, False).

        An exception is the end of the engine: counters have moved, the device is in doubt. But see `waiting`.
        """
        if not self.has_work():
            return {}, False
        if not self.batch_queue:  # else the last call was interrupted
            self._launch()
        step = self.batch_queue[0]
        return self._account(step), step.sampled is not None

    def step_with_batch_queue(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """One step's beginning and another's end, else as step(): the messages are of the oldest step in flight.

        Filling the queue comes first: while there is room and something to run, the call returns without waiting for a result, ({}, True).
        """
        executed = False
        if self.scheduler.has_requests() and len(self.batch_queue) < self.batch_queue_size:
            executed = self._launch().sampled is not None
            if executed and len(self.batch_queue) < self.batch_queue_size:
                return {}, True
        if not self.batch_queue:
            return {}, False
        return self._account(self.batch_queue[0]), executed

    def _launch(self) -> StepInFlight:
        """Schedule a step and hand it to the device. Waits for nothing."""
        scheduler_output = self.scheduler.schedule()
        forward, sampled = self.executor.execute_model(scheduler_output, non_block=True), None
        if scheduler_output.total_num_scheduled_tokens:
            sampled = self.executor.sample_tokens(None, non_block=True)
        self.batch_queue.append(StepInFlight(scheduler_output, forward, sampled))  # type: ignore[arg-type]  # non_block: futures
        return self.batch_queue[-1]

    def _account(self, step: StepInFlight) -> dict[int, EngineCoreOutputs]:
        """Wait for the result of the oldest step in flight, and tell the scheduler."""
        done: queue.SimpleQueue[object] = queue.SimpleQueue()
        (step.sampled or step.forward).add_done_callback(done.put)  # the last of the two calls, which ends even if the first has failed
        self.waiting = True
        done.get()  # and not result(): that is Python code, which an interrupt would leave anywhere, its lock held or not
        self.waiting = False
        model_output = step.forward.result()
        if step.sampled is not None:
            model_output = step.sampled.result()
        assert model_output is not None
        self.process_aborts_queue()
        outputs = self.scheduler.update_from_output(step.scheduler_output, model_output)
        self.batch_queue.popleft()
        return outputs

    def shutdown(self) -> None:
        """Release the device. Idempotent."""
        self.executor.shutdown()

    # ── utilities: what a front-end may call by name (WIRE §3.6) ────────────────────────────────────────

    @utility
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """False, and nothing changed, while any request holds blocks; running requests are never reset."""
        while self.batch_queue and not self.scheduler.requests:
            self._account(self.batch_queue[0])  # only it holds blocks; its message has no output, and newer stats will follow
        return self.scheduler.reset_prefix_cache()

    get_supported_tasks = utility(lambda self: ["generate"])
    reset_mm_cache = reset_encoder_cache = utility(lambda self: None)  # no multimodal input; a stock front-end waits for the answer
    is_sleeping = is_scheduler_paused = utility(lambda self: False)
    list_loras = utility(lambda self: list[int]())
    get_weight_version = utility(lambda self: "default")
