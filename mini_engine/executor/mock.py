"""The mock device: a "model" whose next token is a pure function of the prefix, and a KV cache that makes block tables matter.

The KV cache holds one 63-bit hash per token slot. Computing the token at position p reads the slot of p - 1, mixes the token in, and
writes the slot of p; the sampled token is a function of the last slot. So a wrong block table, a block freed too early or a prefix
hit on foreign KV gives wrong tokens, and `mock_generate` (no cache, no blocks) says which tokens are right.

Promises  greedy whatever the sampling parameters; O(1) per scheduled token; no torch; ready in well under a second.
          A step takes config.mock.step_ms asleep (GIL released), on one device thread: the perfect GPU to study overlap on. Like a
          GPU's, its step starts when it was handed over or when the one before ended, whichever is later: that the thread has to
          wait for the GIL, and what computing hashes takes, counts as part of the step.
Not here  the values of a real model; special tokens are never sampled, so a request ends by max_tokens or a stop_token_id.

Stands at form 7 of a request, in place of worker/ + model/ + sampling/.    vLLM: no counterpart (its tests mock the executor likewise)
"""

import json
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mini_engine.config import EngineConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.executor.abstract import Executor
from mini_engine.step import GrammarOutput, KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput
from mini_engine.wire.messages import LogprobsLists

_ROOT = 0x1F3D5B79A2C4E608  #: the hash before any token
_JUNK = -1  #: what a slot holds before anyone wrote it; no hash is negative
_MASK = (1 << 63) - 1
_LN2 = math.log(2.0)


def _mix(prefix_hash: int, token: int) -> int:
    return ((prefix_hash ^ token) * 6364136223846793005 + 1442695040888963407) & _MASK


def mock_token(prefix_hash: int, vocab_size: int) -> int:
    """The token that follows a prefix: spread evenly over the vocabulary without its ends, where tokenizers keep special tokens.

    Left out are the lowest 256 ids (a quarter of a small vocabulary) and the highest 64th: SmolLM2 has its special tokens in 0..16,
    Llama 3 and Qwen have theirs in the last 0.3 %.
    """
    low = min(256, vocab_size // 4)
    high = vocab_size - max(1, vocab_size // 64)
    x = prefix_hash ^ (prefix_hash >> 29)  # the low bits of a power-of-two LCG are weak: fold the high ones in
    return low + (x * 0x9E3779B97F4A7C15 >> 17 & _MASK) % (high - low)


def mock_generate(prompt_token_ids: Sequence[int], n: int, vocab_size: int) -> list[int]:
    """The oracle: the `n` tokens that the mock gives after this prompt, computed without cache, blocks, batches or steps."""
    prefix_hash = _ROOT
    for token in prompt_token_ids:
        prefix_hash = _mix(prefix_hash, token)
    tokens: list[int] = []
    for _ in range(n):
        tokens.append(mock_token(prefix_hash, vocab_size))
        prefix_hash = _mix(prefix_hash, tokens[-1])
    return tokens


@dataclass(slots=True)
class _DeviceRequest:
    """What a worker keeps of a request. Device thread only."""

    token_ids: list[int]  #: prompt and everything sampled so far
    block_ids: list[int]
    num_logprobs: int | None


class MockExecutor(Executor):
    """Executor over the mock device. Reads config.json of the model directory for vocab_size and max_position_embeddings."""

    dtype = "float32"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        from mini_engine.model.default_model import resolve_model

        file = resolve_model(config.model, weights=False) / "config.json"
        try:
            model_config = json.loads(file.read_bytes())
            self.vocab_size = int(config.mock.vocab_size or model_config["vocab_size"])
            self.max_model_len = int(model_config["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise VLLMValidationError(f"the mock needs vocab_size and max_position_embeddings in {file}: {e!r}") from e
        if self.vocab_size < 4:
            raise VLLMValidationError(f"the mock needs a vocabulary of at least 4 tokens, got {self.vocab_size}")
        self._requests: dict[str, _DeviceRequest] = {}
        self._kv = np.empty(0, np.int64)
        self._logits: list[tuple[str, int]] = []  # (request id, last hash): the "logits" that wait between forward and sampling
        self._step = 0
        self._busy_until = 0.0  # monotonic: the end of the last step
        self._stopped = threading.Event()
        self._device = ThreadPoolExecutor(1, "mock-device")

    def get_kv_cache_spec(self) -> KVCacheSpec:
        """One int64 per token: the K and the V of one layer, one head, one float32."""
        return KVCacheSpec(self.config.block_size, num_layers=1, num_kv_heads=1, head_size=1, dtype_bytes=4)

    def determine_num_available_blocks(self, spec: KVCacheSpec) -> int:
        return self.config.mock.num_blocks

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._kv = np.full(kv_cache_config.num_blocks * kv_cache_config.block_size, _JUNK, np.int64)

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> Future[ModelRunnerOutput | None] | ModelRunnerOutput | None:
        future = self._device.submit(self._forward, scheduler_output, time.monotonic())
        return future if non_block else future.result()

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Future[ModelRunnerOutput] | ModelRunnerOutput:
        assert grammar_output is None, "structured output is refused at admission"
        future = self._device.submit(self._sample)
        return future if non_block else future.result()

    def shutdown(self) -> None:
        self._stopped.set()
        self._device.shutdown(wait=True, cancel_futures=True)

    # ── device thread ───────────────────────────────────────────────────────────────────────────────────

    def _forward(self, scheduler_output: SchedulerOutput, handed_over: float) -> ModelRunnerOutput | None:
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return ModelRunnerOutput()
        self._step += 1
        mock = self.config.mock
        if self._step == mock.crash_at_step:
            raise RuntimeError(f"mock device: told to crash at step {self._step}")
        if self._step == mock.hang_at_step:
            self._stopped.wait()
            raise RuntimeError(f"mock device: shut down while it hung at step {self._step}, as told")
        starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        last_hash = {
            req_id: self._compute(self._requests[req_id], starts[req_id], starts[req_id] + n)
            for req_id, n in scheduler_output.num_scheduled_tokens.items()
        }
        self._logits = [(req_id, last_hash[req_id]) for req_id in scheduler_output.sampled_req_ids]
        if mock.step_ms:
            self._busy_until = max(self._busy_until, handed_over) + mock.step_ms / 1000
            time.sleep(max(0.0, self._busy_until - time.monotonic()))
        return None

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._requests.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._requests[new.req_id] = _DeviceRequest(
                list(new.prefill_token_ids), list(new.block_ids), self._num_logprobs(new.sampling_params.logprobs)
            )
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._requests[req_id].block_ids.extend(new_block_ids or ())

    def _num_logprobs(self, logprobs: int | None) -> int | None:
        return self.vocab_size if logprobs == -1 else logprobs and min(logprobs, self.vocab_size)  # as the real sampler

    def _compute(self, request: _DeviceRequest, start: int, end: int) -> int:
        """Tokens [start, end): read the slot before them, write theirs, return the last hash."""
        size, kv = self.config.block_size, self._kv
        prefix_hash = int(kv[request.block_ids[(start - 1) // size] * size + (start - 1) % size]) if start else _ROOT
        while start < end:
            slot = request.block_ids[start // size] * size + start % size
            stop = min(end, (start // size + 1) * size)  # to the end of this block
            hashes = [prefix_hash := _mix(prefix_hash, token) for token in request.token_ids[start:stop]]
            kv[slot : slot + stop - start] = hashes
            start = stop
        return prefix_hash

    def _sample(self) -> ModelRunnerOutput:
        output = ModelRunnerOutput()
        wanted = [k for req_id, _ in self._logits if (k := self._requests[req_id].num_logprobs) is not None]
        for req_id, prefix_hash in self._logits:
            token = mock_token(prefix_hash, self.vocab_size)
            self._requests[req_id].token_ids.append(token)
            output.req_ids.append(req_id)
            output.sampled_token_ids.append([token])
        if wanted:
            output.logprobs = self._logprobs([tokens[0] for tokens in output.sampled_token_ids], max(wanted))
        self._logits = []
        return output

    def _logprobs(self, sampled: list[int], k: int) -> LogprobsLists:
        """The sampled token is the most likely; the token r - 1 ids further has rank r and probability 2 ** -r."""
        ranks = np.concatenate(([1], np.arange(1, k + 1)))  # column 0: the sampled token, then the k most likely ones
        ids = (np.array(sampled)[:, None] + ranks - 1) % self.vocab_size
        logprobs = np.broadcast_to((-_LN2 * ranks).astype(np.float32), ids.shape)
        return LogprobsLists(ids.astype(np.int32), logprobs, np.ones(len(sampled), np.int64))
