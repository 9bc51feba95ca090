"""Random traces for the scheduler: everything that happens to an engine, from a seed, over the shadow KV.

run_trace(seed) builds an engine of random shape (tiny pool, small blocks, either policy), throws requests at it, aborts some at every
moment, and checks after every step. In the end each request's tokens equal those of the same request alone: `reference()`, which knows
nothing of batches, blocks or steps; so with overlap (depth=2) they equal those without. Returns how often each interesting thing
happened, so that a fuzz that tests nothing is noticed.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from mini_engine.config import EngineConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.kv_cache.block_hash import get_request_block_hasher
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler.async_scheduler import AsyncScheduler
from mini_engine.scheduler.request import Request, RequestStatus
from mini_engine.scheduler.scheduler import Scheduler
from mini_engine.step import KVCacheConfig, ModelRunnerOutput, SchedulerOutput
from mini_engine.wire.messages import EngineCoreOutput, FinishReason
from tests.shadow_kv import ShadowWorker, check_blocks, next_token


def make_params(max_tokens: int = 16, eos: int | None = None, stop: list[int] | None = None, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, _eos_token_id=eos, stop_token_ids=stop, logprobs=logprobs)


def reference(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], FinishReason, int | None]:
    """(output tokens, finish reason, stop reason) of the request alone."""
    output: list[int] = []
    while True:
        output.append(token := next_token(prompt + output))
        if token == params._eos_token_id:
            return output, FinishReason.STOP, None
        if token in (params.stop_token_ids or ()):
            return output, FinishReason.STOP, token
        if len(prompt) + len(output) == max_model_len or len(output) == params.max_tokens:
            return output, FinishReason.LENGTH, None


@dataclass
class Engine:
    """Scheduler and shadow worker of one trace, and what the clients saw."""

    config: EngineConfig
    num_blocks: int
    max_model_len: int = 1 << 30
    depth: int = 1  # steps in flight at most; 2 is overlap
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, frozenset[int]]] = field(default_factory=deque)
    outputs: dict[str, list[EngineCoreOutput]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    log: list[tuple[object, ...]] = field(default_factory=list)  #: every step: what was scheduled, on which blocks

    def __post_init__(self) -> None:
        kv_config = KVCacheConfig(self.num_blocks, self.config.block_size)
        self.scheduler = (AsyncScheduler if self.depth > 1 else Scheduler)(self.config, kv_config, self.max_model_len)
        self.salts: dict[str, str | None] = {}
        self.worker = ShadowWorker(self.num_blocks, self.config.block_size, tag=self.salts.get)
        self.hasher = get_request_block_hasher(self.config.block_size) if self.config.enable_prefix_caching else None

    def request(self, request_id: str, prompt: list[int], params: SamplingParams | None = None, **more: object) -> Request:
        """A request of this engine, not added. more: priority, arrival_time, cache_salt, client_index."""
        return Request(request_id, prompt, params or make_params(), block_hasher=self.hasher, **{"arrival_time": 0.0, **more})  # type: ignore[arg-type]

    def add(self, request_id: str, prompt: list[int], params: SamplingParams | None = None, **more: object) -> Request:
        request = self.request(request_id, prompt, params, **more)
        self.scheduler.add_request(request)
        self.salts[request_id] = request.cache_salt
        self.outputs[request_id] = []
        return request

    def step(self, abort_in_flight: list[str] | None = None) -> SchedulerOutput:
        """What EngineCore.step() or step_with_batch_queue() does, checked; returns what was scheduled.

        abort_in_flight: ended after the forward, before its result is taken in (the abort fast path).
        """
        running = [request.request_id for request in self.scheduler.running]
        output = self.scheduler.schedule()
        self.in_flight.append((output, self.worker.execute(output), self.worker.touched))
        self.check()
        self.log.append((dict(output.num_scheduled_tokens), [n.block_ids for n in output.scheduled_new_reqs], output.preempted_req_ids))
        self._count(output, running)
        if len(self.in_flight) == self.depth or not output.total_num_scheduled_tokens:
            self.account(abort_in_flight)
        return output

    def account(self, abort_in_flight: list[str] | None = None) -> None:
        """Hand the result of the oldest step in flight back."""
        output, result, _ = self.in_flight[0]
        if abort_in_flight:
            self.abort(abort_in_flight, "in flight")
            if self.depth > 1:
                self.check()
        self.in_flight.popleft()
        live = self.scheduler.requests
        preempted = [request for request in self.scheduler.waiting if request.request_id in result.req_ids and request.num_preemptions]
        self.seen["token of a request that is over"] += sum(request_id not in live for request_id in result.req_ids)
        self.seen["token of a preempted request"] += len(preempted)
        for message in self.scheduler.update_from_output(output, result).values():
            for out in message.outputs:
                self.outputs[out.request_id].append(out)
        self.seen["ended in the queue"] += sum(request.request_id not in live for request in preempted)
        self.check()

    def check(self) -> None:
        self.scheduler.check()
        in_flight = frozenset[int]().union(*(touched for _, _, touched in self.in_flight))
        check_blocks(self.scheduler.kv_cache_manager, in_flight)
        self.seen["block held for a step in flight"] += len(self.scheduler.kv_cache_manager.held_blocks)

    def abort(self, request_ids: list[str], moment: str = "") -> None:
        for request_id in request_ids:
            if (request := self.scheduler.requests.get(request_id)) is not None:
                self.seen[f"aborted {moment or request.status.name}"] += 1
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left, the worker's memory included."""
        for _ in range(max_steps):
            if self.scheduler.has_requests():
                self.step()
            elif self.in_flight:
                self.account()
            else:
                return
        raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.requests}")

    def tokens(self, request_id: str) -> list[int]:
        return [token for out in self.outputs[request_id] for token in out.new_token_ids]

    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self.scheduler.running), len(self.scheduler.waiting)

    def _count(self, output: SchedulerOutput, running: list[str]) -> None:
        seen = self.seen
        seen["step"] += 1
        seen["preemption"] += len(output.preempted_req_ids)
        sampled = set(output.sampled_req_ids)
        seen["chunk"] += sum(request_id not in sampled for request_id in output.num_scheduled_tokens)
        seen["several preempted in a step"] += len(output.preempted_req_ids) > 1
        last = max((running.index(request_id) for request_id in output.scheduled_cached_reqs.req_ids), default=-1)
        seen["preempted after being scheduled"] += sum(running.index(request_id) < last for request_id in output.preempted_req_ids)
        seen["sat out for lack of blocks"] += self.depth > 1 and any(
            request.request_id not in output.num_scheduled_tokens
            and request.num_tokens + request.num_output_placeholders < request.max_num_tokens
            and output.total_num_scheduled_tokens < self.config.max_num_batched_tokens
            for request in self.scheduler.running
        )
        written = {i for new in output.scheduled_new_reqs for i in new.block_ids[new.num_computed_tokens // self.config.block_size :]}
        for new in output.scheduled_new_reqs:
            resumed = len(new.prefill_token_ids) > new.num_prompt_tokens
            seen["resumed"] += resumed
            if new.num_computed_tokens:
                seen["hit"] += 1
                seen["resumed with a hit"] += resumed
                hits = new.block_ids[: new.num_computed_tokens // self.config.block_size]
                seen["hit on a block written in the same step"] += bool(written & set(hits))
                seen["whole prompt cached"] += new.num_computed_tokens + self.config.block_size == len(new.prefill_token_ids)


def run_trace(seed: int, depth: int = 1) -> Engine:
    """One random trace, checked throughout. The returned engine is idle."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 4, 8])
    max_num_seqs = rng.choice([1, 2, 3, 4, 6])
    policy = rng.choice(["fcfs", "fcfs", "priority"])
    config = EngineConfig(
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, rng.choice([1, 2, 5, 8, 16, 64])),
        long_prefill_token_threshold=rng.choice([0, 0, 0, 1, 3, block_size]),
        enable_prefix_caching=rng.random() < 0.85,
        scheduling_policy=policy,  # type: ignore[arg-type]
    )
    engine = Engine(config, num_blocks=rng.choice([3, 4, 6, 8, 12, 20]) + 1, max_model_len=rng.choice([1 << 30, 1 << 30, 24]), depth=depth)
    max_model_len = engine.scheduler.max_model_len
    bases = [[rng.randrange(50) for _ in range(40)] for _ in range(rng.choice([1, 2, 3]))]
    wanted: dict[str, tuple[list[int], SamplingParams]] = {}
    num_requests = rng.randint(3, 12)

    while len(engine.salts) + engine.seen["refused"] < num_requests or engine.scheduler.has_requests() or engine.in_flight:
        while len(engine.salts) + engine.seen["refused"] < num_requests and rng.random() < 0.5:
            request_id = f"r{len(engine.salts) + engine.seen['refused']}"
            base = rng.choice(bases)
            shared = rng.choice([rng.randint(0, 20), block_size * rng.randint(1, 4)])
            prompt = base[:shared] + [rng.randrange(50) for _ in range(rng.choice([0, 0, 1, 3, block_size]))] or [7]
            if wanted and rng.random() < 0.3:
                prompt = list(rng.choice(list(wanted.values()))[0])  # an exact repeat
            params = make_params(rng.choice([1, 2, 5, 20, 60]), eos=rng.choice([None, 3]), stop=rng.choice([[], [4, 5], [3]]))
            more = {"cache_salt": rng.choice([None, None, "a", "b"]), "priority": rng.randint(-1, 2), "arrival_time": rng.randint(0, 3)}
            if len(prompt) >= max_model_len:
                with pytest.raises(VLLMValidationError, match=f"{len(prompt)} tokens.* {max_model_len},"):
                    engine.scheduler.add_request(engine.request(request_id, prompt, params, **more))
                engine.seen["refused"] += 1
            else:
                engine.add(request_id, prompt, params, **more)
                wanted[request_id] = (prompt, params)
        live = list(engine.scheduler.requests)
        if live and rng.random() < 0.06:
            engine.abort(aborted := rng.sample(live, min(len(live), rng.choice([1, 1, 2]))))
            if depth > 1 and rng.random() < 0.5:  # the same id again, while a token of the first one is in flight perhaps
                prompt, params = wanted[aborted[0]]
                assert engine.tokens(aborted[0]) == reference(prompt, params, max_model_len)[0][: len(engine.tokens(aborted[0]))]
                wanted[aborted[0]] = rng.choice(bases)[: rng.randint(1, min(20, max_model_len - 1))], params
                engine.add(aborted[0], *wanted[aborted[0]])
                engine.seen["id used again"] += 1
        abort_in_flight = [rng.choice(live)] if live and rng.random() < 0.04 else None
        if engine.scheduler.has_requests():
            engine.step(abort_in_flight)
        elif engine.in_flight:
            engine.account()
        assert engine.seen["step"] < 5000, f"seed {seed}: no end"

    for request_id, (prompt, params) in wanted.items():
        tokens, outputs = engine.tokens(request_id), engine.outputs[request_id]
        expected, finish_reason, stop_reason = reference(prompt, params, max_model_len)
        if outputs and outputs[-1].finish_reason is not None:
            assert (tokens, outputs[-1].finish_reason, outputs[-1].stop_reason) == (expected, finish_reason, stop_reason), request_id
            engine.seen[f"ended by {finish_reason} {'' if stop_reason is None else 'token'}".strip()] += 1
            engine.seen["outgrew the engine"] += len(prompt) + len(tokens) == max_model_len
        else:
            assert tokens == expected[: len(tokens)], request_id
            engine.seen["never ended"] += 1
        assert all(out.finish_reason is None for out in outputs[:-1]), f"{request_id}: more after its last output"
    num_aborted = sum(n for name, n in engine.seen.items() if name.startswith("aborted"))
    assert engine.seen["never ended"] + engine.seen["id used again"] == num_aborted
    assert engine.counts() == (0, 0) and not engine.worker.tokens
    engine.seen["eviction"] += engine.scheduler.kv_cache_manager.statistics().num_evictions
    return engine
