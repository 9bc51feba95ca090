"""Scheduler: which tokens of which requests are computed in the next step, and what the sampled tokens mean.

One rule: every request's num_computed_tokens catches up with its num_tokens, within a budget of tokens per step. A long prompt does it
in chunks, a prefix hit starts further on, a decoding request is one token behind, a preempted one starts again at 0.

schedule()            running requests first, in order; blocks run out → preempt the least important until they suffice. Then, if nobody
                      was preempted, waiting ones while budget, max_num_seqs and blocks last. Counters move here, not when results arrive.
update_from_output()  appends the sampled tokens, ends what is over, makes the messages to the front-ends.

Promises  each step costs a small constant per scheduled token; no order comes from a set; a request that add_request() accepted can
          always finish: alone, it fits, and whoever is first in order is never preempted.
Not here  how many blocks (kv_cache/), tensors (worker/), threads: all calls come from the core loop.
Form 6 of a request, and the first half of form 8.    vLLM: v1/core/sched/scheduler.py
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from types import MethodType

from mini_engine import overlay as overlays
from mini_engine.config import EngineConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.kv_cache.block_hash import BlockHash
from mini_engine.kv_cache.kv_cache_manager import KVCacheManager
from mini_engine.scheduler.request import Request, RequestStatus
from mini_engine.scheduler.request_queue import create_request_queue
from mini_engine.scheduler.utils import check_queues, check_stop
from mini_engine.step import KVCacheConfig, ModelRunnerOutput, NewRequestData, SchedulerOutput
from mini_engine.wire.messages import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, PrefillStats, SchedulerStats

IDLE_CHECK_SHARE = 0.01  #: at most this share of the time goes into the full self-check of an idle engine


class Scheduler:
    """All requests of one engine core. `max_model_len` is the effective one: no request can outgrow the pool, it ends by length first."""

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        self.policy = config.scheduling_policy
        self.max_num_running_reqs = config.max_num_seqs
        self.max_num_scheduled_tokens = config.max_num_batched_tokens
        self.long_prefill_token_threshold = config.long_prefill_token_threshold
        self.check_every_step = config.check
        self.block_size = kv_cache_config.block_size
        self.kv_cache_manager = KVCacheManager(kv_cache_config.num_blocks, self.block_size, config.enable_prefix_caching, config.overlay)
        self.max_model_len = min(max_model_len, (kv_cache_config.num_blocks - 1) * self.block_size)

        self.requests: dict[str, Request] = {}  #: id → request, all that are not finished: running and waiting together
        self.running: list[Request] = []  #: in order of admission
        self.waiting = create_request_queue(self.policy)  #: new and preempted ones
        self.finished_req_ids: list[str] = []  #: since the last schedule(): the next step tells the worker
        self.step_id = 0
        self._refused: tuple[Request, int, BlockHash | None] | None = None  #: see _still_refused
        self._next_idle_check = 0.0  #: monotonic
        if (theirs := overlays.load(config.overlay, "scheduler.schedule", None)) is not None:
            self.schedule = MethodType(theirs, self)  # type: ignore[method-assign]

    # ── what comes in, what goes out ───────────────────────────────────────────────────────────────────

    def add_request(self, request: Request) -> None:
        """Queue a request. VLLMValidationError when it can never be served; then nothing has changed."""
        if request.request_id in self.requests:
            raise VLLMValidationError(f"request_id {request.request_id!r} is in use by a live request", parameter="request_id")
        if request.num_prompt_tokens >= self.max_model_len:
            raise VLLMValidationError(
                f"the prompt has {request.num_prompt_tokens} tokens, but this engine's max_model_len is {self.max_model_len}, "
                "and at least one of them is needed for the output: shorten the prompt",
                parameter="prompt_token_ids",
                value=request.num_prompt_tokens,
            )
        request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)
        self.requests[request.request_id] = request
        self.waiting.add_request(request)
        request.record_event(EngineCoreEventType.QUEUED)

    def finish_requests(self, request_ids: Iterable[str] | None, status: RequestStatus) -> list[tuple[str, int]]:
        """End requests from outside (abort, shutdown); None means all. Unknown and finished ids are ignored: aborts arrive twice.

        Returns (id, client_index) of those really ended here, in the given order. No output is made for them.
        """
        assert status.is_finished
        ids = list(self.requests) if request_ids is None else dict.fromkeys(request_ids)
        ended = [self.requests[request_id] for request_id in ids if request_id in self.requests]
        if waiting := [request for request in ended if request.status is not RequestStatus.RUNNING]:
            self.waiting.remove_requests(waiting)
        for request in ended:
            request.status = status
            self._free_request(request)
        if len(waiting) < len(ended):
            self._remove_finished_from_running()
        return [(request.request_id, request.client_index) for request in ended]

    def _free_request(self, request: Request) -> None:
        """Nothing of a finished request stays but its id, until the worker has been told. Its queue entry is the caller's to remove."""
        self.kv_cache_manager.free(request, request.last_step_id)
        self.finished_req_ids.append(request.request_id)
        del self.requests[request.request_id]

    def _remove_finished_from_running(self) -> None:
        self.running = [request for request in self.running if not request.status.is_finished]

    # ── the step: which tokens ─────────────────────────────────────────────────────────────────────────

    def schedule(self) -> SchedulerOutput:
        """The next step; an empty one (total 0) when there is nothing to do but to tell the worker who has finished."""
        self.step_id += 1
        output = SchedulerOutput(step_id=self.step_id, finished_req_ids=self.finished_req_ids)
        self.finished_req_ids = []
        # The threshold keeps one long prompt from taking the whole budget from others; alone, there is nobody to keep it from.
        chunk = self.max_num_scheduled_tokens
        if self.long_prefill_token_threshold and len(self.requests) > 1:
            chunk = self.long_prefill_token_threshold
        now = time.monotonic()
        budget, stalled = self._schedule_running(output, chunk, now)
        if not stalled and not output.preempted_req_ids:
            budget = self._schedule_waiting(output, budget, chunk, now)
        assert budget >= 0 and len(self.running) <= self.max_num_running_reqs
        output.total_num_scheduled_tokens = self.max_num_scheduled_tokens - budget
        if not self.requests:
            self._check_idle(now)
        return output

    def _schedule_running(self, output: SchedulerOutput, chunk: int, now: float) -> tuple[int, bool]:
        """Give each running request its next tokens, preempting from the least important end.

        Returns the budget left, and whether someone sits this step out for lack of blocks: those that are held for a step in flight
        are free by the next step. Until then nobody else is preempted, and nobody is admitted, who would take them.
        """
        budget = self.max_num_scheduled_tokens
        running = self.running
        cached_reqs = output.scheduled_cached_reqs
        add_req_id, add_block_ids = cached_reqs.req_ids.append, cached_reqs.new_block_ids.append
        add_num_computed, add_sampled = cached_reqs.num_computed_tokens.append, output.sampled_req_ids.append
        num_scheduled_tokens, allocate_slots = output.num_scheduled_tokens, self.kv_cache_manager.allocate_slots
        held_blocks, stalled = self.kv_cache_manager.held_blocks, False
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            num_computed = request.num_computed_tokens
            num_known = request.num_tokens + request.num_output_placeholders
            num_new = num_known - num_computed
            if num_new == 0 or num_known == request.max_num_tokens:  # all it has, or will ever have, is in flight already
                index += 1
                continue
            if num_new != 1:
                num_new = min(num_new, chunk, budget)

            while (new_blocks := allocate_slots(request, num_new)) is None and not held_blocks:
                victim = max(running) if self.policy == "priority" else running[-1]
                victim_index = running.index(victim)
                del running[victim_index]
                if victim_index < index:  # only by priority can it stand before `request`, scheduled in this step
                    index -= 1
                budget += self._preempt_request(victim, output, now)
                if victim is request:
                    return budget, stalled
            if new_blocks is None:
                stalled = True
                index += 1
                continue

            request_id = request.request_id
            add_req_id(request_id)
            add_block_ids([block.block_id for block in new_blocks] if new_blocks else None)
            add_num_computed(num_computed)
            num_scheduled_tokens[request_id] = num_new
            request.num_computed_tokens = num_computed = num_computed + num_new
            if num_computed == num_known:
                add_sampled(request_id)
            budget -= num_new
            index += 1
        return budget, stalled

    def _preempt_request(self, request: Request, output: SchedulerOutput, now: float) -> int:
        """Take back a running request's blocks and queue it again. Returns its tokens of this step, which are free again.

        Recompute, not swap: its tokens, the output too, will be computed again as one prompt, less what the cache still has.
        """
        request_id = request.request_id
        restored = output.num_scheduled_tokens.pop(request_id, 0)
        if restored:
            cached_reqs = output.scheduled_cached_reqs
            position = cached_reqs.req_ids.index(request_id)
            del cached_reqs.req_ids[position], cached_reqs.new_block_ids[position], cached_reqs.num_computed_tokens[position]
            if request_id in output.sampled_req_ids:
                output.sampled_req_ids.remove(request_id)
            self.kv_cache_manager.undo_allocate_slots(request, request.num_computed_tokens - restored)
        self.kv_cache_manager.free(request, request.last_step_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_cached_tokens = 0
        request.num_preemptions += 1
        request.record_event(EngineCoreEventType.PREEMPTED, now)
        self.waiting.prepend_request(request)
        output.preempted_req_ids.append(request_id)
        return restored

    def _schedule_waiting(self, output: SchedulerOutput, budget: int, chunk: int, now: float) -> int:
        """Admit waiting requests in queue order; the first that does not fit stops it. Returns the budget left."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            if self._still_refused(request):
                break
            hit_blocks, num_computed = self.kv_cache_manager.get_computed_blocks(request)
            num_new = min(request.num_tokens - num_computed, chunk, budget)
            if self.kv_cache_manager.allocate_slots(request, num_new, hit_blocks, full_sequence_must_fit=True) is None:
                missing = request.block_hashes[len(hit_blocks) : (request.num_tokens - 1) // self.block_size][:1]
                self._refused = (request, self.kv_cache_manager.block_pool.get_num_free_blocks(), missing[0] if missing else None)
                break
            self._refused = None
            self.waiting.pop_request()
            self.running.append(request)
            request_id = request.request_id
            self.kv_cache_manager.record_prefix_cache_stats(request, num_computed)
            if request.num_preemptions == 0:
                request.prefill_stats = PrefillStats(
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_computed_tokens=request.num_prompt_tokens - num_computed,
                    num_cached_tokens=num_computed,
                    num_local_cached_tokens=num_computed,
                )
            request.record_event(EngineCoreEventType.SCHEDULED, now)
            output.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=request_id,
                    prefill_token_ids=request.all_token_ids.copy(),  # a resumed one brings its output along
                    num_prompt_tokens=request.num_prompt_tokens,
                    sampling_params=request.sampling_params,
                    block_ids=self.kv_cache_manager.get_block_ids(request_id),
                    num_computed_tokens=num_computed,
                )
            )
            output.num_scheduled_tokens[request_id] = num_new
            if num_computed + num_new == request.num_tokens:
                output.sampled_req_ids.append(request_id)
            request.status = RequestStatus.RUNNING
            request.num_cached_tokens = num_computed
            request.num_computed_tokens = num_computed + num_new
            budget -= num_new
        return budget

    def _still_refused(self, request: Request) -> bool:
        """The head of the queue did not fit, and nothing happened since that could change it: O(1), where looking again is O(prompt).

        It lacks blocks: more must become free, or the first block that its prefix hit lacked must be published. An admission
        forgets the refusal: it may have taken hits out of the free list.
        """
        if self._refused is None or self._refused[0] is not request:
            return False
        _, num_free, missing = self._refused
        pool = self.kv_cache_manager.block_pool
        return pool.get_num_free_blocks() <= num_free and (missing is None or pool.get_cached_block(missing) is None)

    # ── the step's result ──────────────────────────────────────────────────────────────────────────────

    def update_from_output(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Take in the sampled tokens of a step; returns the message for each front-end, by client_index.

        A request ended meanwhile (abort) is skipped. A prompt chunk makes no output. Stats go into one message, an empty one if need be.
        """
        outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        logprobs, prompt_logprobs = model_output.logprobs, model_output.prompt_logprobs_dict
        row = 0  #: of logprobs
        stopped_any = False
        for request, token_ids in zip(self._sampled_requests(scheduler_output), model_output.sampled_token_ids, strict=True):
            if logprobs is not None:
                first_row, row = row, row + len(token_ids)
            if request is None:
                continue
            stopped = False
            for num_kept, token_id in enumerate(token_ids, 1):
                request.append_output_token_id(token_id)
                if check_stop(request):
                    stopped = True
                    token_ids = token_ids[:num_kept]  # nothing is said after the end
                    break
            if (prefill_stats := request.prefill_stats) is not None:
                request.prefill_stats = None
                if self.kv_cache_manager.enable_caching:  # all full blocks of the prompt are published by now
                    num_published = request.num_prompt_tokens // self.block_size * self.block_size
                    prefill_stats.num_cache_creation_tokens = num_published - prefill_stats.num_cached_tokens
            new_logprobs = None
            if logprobs is not None and request.sampling_params.logprobs is not None:
                new_logprobs = logprobs.slice(first_row, first_row + len(token_ids))
            finish_reason = None
            if stopped:
                stopped_any = True
                finish_reason = request.status.finish_reason
                if request.num_computed_tokens == 0:  # preempted while its last token was in flight: it ends in the queue
                    self.waiting.remove_requests([request])
                self._free_request(request)
            outputs[request.client_index].append(
                EngineCoreOutput(
                    request.request_id,
                    token_ids,
                    new_logprobs,
                    prompt_logprobs.get(request.request_id) if prompt_logprobs else None,
                    finish_reason=finish_reason,
                    stop_reason=request.stop_reason,
                    events=request.take_events() if request.events else None,
                    trace_headers=request.trace_headers,
                    prefill_stats=prefill_stats,
                )
            )
        if stopped_any:
            self._remove_finished_from_running()

        messages = {client_index: EngineCoreOutputs(outputs=outs) for client_index, outs in outputs.items()}
        if not messages:
            messages[0] = EngineCoreOutputs()
        next(iter(messages.values())).scheduler_stats = self.make_stats()
        if self.check_every_step:
            self.check()
        return messages

    def _sampled_requests(self, scheduler_output: SchedulerOutput) -> Iterable[Request | None]:
        """Whose the tokens of a step are, in the order of sampled_req_ids; None: ended meanwhile."""
        return map(self.requests.get, scheduler_output.sampled_req_ids)

    # ── questions ──────────────────────────────────────────────────────────────────────────────────────

    def has_requests(self) -> bool:
        """Whether a step is needed."""
        return bool(self.requests or self.finished_req_ids)

    def make_stats(self) -> SchedulerStats:
        """Levels now, and prefix-cache counts since the last call."""
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_stats=self.kv_cache_manager.make_prefix_cache_stats(),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, nothing changed, while any request holds blocks."""
        return self.kv_cache_manager.reset_prefix_cache()

    def _check_idle(self, now: float) -> None:
        """The full self-check whenever the engine runs out of work, but seldom enough not to delay a client that sends one by one."""
        if now >= self._next_idle_check:
            self.check()
            self._next_idle_check = now + (time.monotonic() - now) / IDLE_CHECK_SHARE

    def check(self) -> None:
        """AssertionError unless queues, counters, block tables, reference counts and hashes all agree. O(pool + requests)."""
        check_queues(self.requests, self.running, list(self.waiting))
        self.kv_cache_manager.check(self.requests.values())
        if not self.requests and not self.kv_cache_manager.held_blocks:
            assert self.kv_cache_manager.usage == 0.0, "blocks are in use, but no request is there"
