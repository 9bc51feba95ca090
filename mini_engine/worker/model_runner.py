"""ModelRunner: one step as tensors. From a SchedulerOutput to hidden states to sampled tokens, and the memory between steps.

    execute_model   forget what finished → note what is new → lay the step's tokens end to end → forward → logits, kept here
    sample_tokens   logits → tokens, which go back to the scheduler *and* into the batch: the next step reads them from there

The order of the step's tokens is the runner's own: single tokens first, longest context first (see attention.py); which request is
whose is restored for the logits, whose rows are in the order of sampled_req_ids. A request's numbers do not depend on that order.

Owns the KV cache and the input batch; called on one thread.    vLLM: v1/worker/gpu_model_runner.py::GPUModelRunner
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_engine.model.decoder import Decoder
from mini_engine.sampling.logprobs import join_prompt_logprobs, prompt_logprobs
from mini_engine.sampling.metadata import SamplingMetadata
from mini_engine.sampling.sampler import Sampler
from mini_engine.step import GrammarOutput, KVCacheConfig, ModelRunnerOutput, SchedulerOutput
from mini_engine.wire.messages import LogprobsTensors
from mini_engine.worker.input_batch import InputBatch

DUMMY_BLOCK_SIZE = 16  #: of dummy_run's own cache: one that every attention takes
PROMPT_LOGPROBS_TILE = 128  #: prompt positions whose logits are in memory at once


@dataclass(slots=True)
class PendingStep:
    """What execute_model leaves for sample_tokens."""

    req_ids: list[str]  #: SchedulerOutput.sampled_req_ids
    rows: np.ndarray  #: [n] their rows of the batch
    logits: Tensor | None  #: [n, vocab_size]; None when n is 0
    prompt_logprobs: dict[str, LogprobsTensors]  #: of the prompts that end in this step


class ModelRunner:
    """Steps of one model on one device. Steps may come once initialize_kv_cache() has been called."""

    def __init__(self, model: Decoder, max_num_reqs: int, max_model_len: int | None = None, seed: int = 0) -> None:
        self.model, self.max_num_reqs, self.seed = model, max_num_reqs, seed
        self.max_model_len = max_model_len or model.config.max_model_len
        self.sampler = Sampler()
        self.pending: PendingStep | None = None
        self._metadata: tuple[tuple[int, bytes], SamplingMetadata] | None = None
        self._prompt_logprobs: dict[str, list[LogprobsTensors]] = {}  #: requests that wait for theirs, and the chunks so far

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache and the batch; no request can be longer than all blocks together."""
        max_model_len = min(self.max_model_len, (config.num_blocks - 1) * config.block_size)
        self.attention = self.model.attention_backend(config.block_size)
        self.kv_caches = self.attention.new_kv_caches(config.num_blocks)
        self.batch = InputBatch(self.max_num_reqs, max_model_len, config.block_size, self.seed)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """The forward of one step. None: call sample_tokens next. A ModelRunnerOutput (empty): there was nothing to compute."""
        assert self.pending is None, "sample_tokens was not called for the step before"
        self._update_batch(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return ModelRunnerOutput()
        batch, scheduled = self.batch, scheduler_output.num_scheduled_tokens
        rows = np.fromiter((batch.row_of[r] for r in scheduled), np.int64, len(scheduled))
        query_lens = np.fromiter(scheduled.values(), np.int64, len(scheduled))
        seq_lens = batch.num_computed_tokens[rows] + query_lens
        assert (seq_lens <= batch.num_tokens[rows]).all(), "scheduled beyond the tokens that are known"
        order = np.lexsort((-seq_lens, query_lens > 1))  # the last key decides first
        rows, query_lens, seq_lens = rows[order], query_lens[order], seq_lens[order]

        ends = np.cumsum(query_lens)
        token_rows = np.repeat(rows, query_lens)
        positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, query_lens)
        metadata = self.attention.build(rows, query_lens, seq_lens, positions, batch.block_table.table)
        hidden = self.model.forward(
            self._to_device(batch.token_ids[token_rows, positions]), self._to_device(positions), self.kv_caches, metadata
        )

        req_ids = scheduler_output.sampled_req_ids
        last_token = np.empty(batch.num_reqs, np.int64)
        last_token[rows] = ends - 1
        sampled_rows = np.fromiter((batch.row_of[r] for r in req_ids), np.int64, len(req_ids))
        logits = self.model.compute_logits(hidden[self._to_device(last_token[sampled_rows])]) if req_ids else None
        prompt_logprobs = self._compute_prompt_logprobs(hidden, rows, query_lens, ends) if self._prompt_logprobs else {}
        self.pending = PendingStep(req_ids, sampled_rows, logits, prompt_logprobs)
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """One token for each of the step's sampled_req_ids."""
        assert grammar_output is None, "structured output requests are refused before they are scheduled"
        assert self.pending is not None, "execute_model was not called"
        pending, self.pending = self.pending, None
        if pending.logits is None:
            return ModelRunnerOutput()
        logits = pending.logits.to(torch.promote_types(pending.logits.dtype, torch.float32))  # float64 stays, for tests
        output = self.sampler.forward(logits, self._sampling_metadata(pending.rows))
        token_ids = output.sampled_token_ids.tolist()
        self.batch.append_tokens(pending.rows, token_ids)
        return ModelRunnerOutput(pending.req_ids, [[t] for t in token_ids], output.logprobs, pending.prompt_logprobs)

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int) -> None:
        """A step of `num_tokens` in one block of its own, thrown away after: for warm-up, and to see what a step takes in memory."""
        attention = self.model.attention_backend(DUMMY_BLOCK_SIZE)
        lens, positions = np.array([num_tokens]), np.arange(num_tokens)
        block_table = np.zeros((1, -(-num_tokens // DUMMY_BLOCK_SIZE)), np.int32)
        metadata = attention.build(np.array([0]), lens, lens, positions, block_table)
        on_device = self._to_device(positions)
        hidden = self.model.forward(torch.zeros_like(on_device), on_device, attention.new_kv_caches(1), metadata)
        self.model.compute_logits(hidden[: self.max_num_reqs]).float()

    def _update_batch(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self.batch.remove_request(req_id)
            self._prompt_logprobs.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self.batch.add_request(new)
            # one that comes back with output has delivered them before its preemption
            if new.sampling_params.prompt_logprobs is not None and len(new.prefill_token_ids) == new.num_prompt_tokens:
                self._prompt_logprobs[new.req_id] = []
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, block_ids, num_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            row = self.batch.row_of[req_id]
            self.batch.num_computed_tokens[row] = num_computed
            if block_ids:
                self.batch.block_table.append_row(row, block_ids)

    def _compute_prompt_logprobs(
        self, hidden: Tensor, rows: np.ndarray, query_lens: np.ndarray, ends: np.ndarray
    ) -> dict[str, LogprobsTensors]:
        """Score the prompt tokens that follow this step's positions, a tile at a time; returns the prompts that are complete."""
        complete = {}
        for row, query_len, end in zip(rows.tolist(), query_lens.tolist(), ends.tolist(), strict=True):
            req_id = self.batch.req_ids[row]
            if (chunks := self._prompt_logprobs.get(req_id)) is None:
                continue
            sampling_row = self.batch.sampling_rows[row]
            num_logprobs = sampling_row.params.prompt_logprobs
            assert num_logprobs is not None
            computed = int(self.batch.num_computed_tokens[row])
            following = sampling_row.prompt_token_ids[computed + 1 : computed + query_len + 1]
            for i in range(0, max(len(following), 1), PROMPT_LOGPROBS_TILE):  # once at least: a prompt of one token has 0 rows
                targets = following[i : i + PROMPT_LOGPROBS_TILE]
                first = end - query_len + i
                chunks.append(prompt_logprobs(self.model.compute_logits(hidden[first : first + len(targets)]), num_logprobs, targets))
            if computed + query_len == len(sampling_row.prompt_token_ids):
                complete[req_id] = join_prompt_logprobs(self._prompt_logprobs.pop(req_id))
        return complete

    def _sampling_metadata(self, rows: np.ndarray) -> SamplingMetadata:
        """Built anew only when the rows or their requests changed."""
        sampling_rows = [self.batch.sampling_rows[row] for row in rows.tolist()]
        key = (self.batch.version, rows.tobytes())
        if self._metadata is not None and self._metadata[0] == key:
            self._metadata[1].refresh(sampling_rows)
            return self._metadata[1]
        metadata = SamplingMetadata.from_requests(sampling_rows, self.model.device, self.model.config.vocab_size)
        self._metadata = (key, metadata)
        return metadata

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)
