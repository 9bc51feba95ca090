"""One step, as data: what the scheduler asks of the worker, and what comes back. The second boundary of the engine.

The worker keeps each request's tokens, block table and sampled tokens; a step sends only what changed. Phase is data: a worker
never guesses from counts whether a request is "prefilling"; `sampled_req_ids` says whose last logits become a token.
Crosses no process boundary of its own (the wire is wire/); dataclasses and numpy only.

Stands at forms 6 and 7 of a request.    vLLM: v1/core/sched/output.py, v1/outputs.py, v1/kv_cache_interface.py
"""

from dataclasses import dataclass, field

import numpy as np

from mini_engine.sampling_params import SamplingParams
from mini_engine.wire.messages import LogprobsLists, LogprobsTensors


@dataclass(slots=True)
class NewRequestData:
    """A request that the worker does not know: new, or resumed after a preemption (the worker forgot it then)."""

    req_id: str
    prefill_token_ids: list[int]  #: prompt, then what had been generated before a preemption
    num_prompt_tokens: int  #: prefill_token_ids[:num_prompt_tokens] is the prompt
    sampling_params: SamplingParams
    block_ids: list[int]  #: the whole block table: entry i holds the KV of tokens [i * block_size, (i + 1) * block_size)
    num_computed_tokens: int  #: KV of tokens [0, num_computed_tokens) is there already (prefix cache)


@dataclass(slots=True)
class CachedRequestData:
    """Requests the worker knows, column-wise: entry i of every list belongs to req_ids[i]."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[list[int] | None] = field(default_factory=list)  #: appended to the block table; None: nothing new
    num_computed_tokens: list[int] = field(default_factory=list)  #: before this step


@dataclass(slots=True)
class SchedulerOutput:
    """The work of one step. For request r, tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens[r]) are computed.

    Iteration order of num_scheduled_tokens is the order of scheduling, the same on every rank. A request may read KV that one before
    it in that order writes in this very step (two equal prompts arriving together): a worker writes a layer's KV before it reads any.
    A token inside that range which the worker itself sampled in an earlier step is not sent: the worker has it.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    sampled_req_ids: list[str] = field(default_factory=list)  #: in scheduling order; the others are prompt chunks
    finished_req_ids: list[str] = field(default_factory=list)  #: since the last step: the worker forgets them *before* this one
    preempted_req_ids: list[str] = field(default_factory=list)  #: in this step: forgotten likewise
    step_id: int = 0  #: counts schedule() calls, for traces


@dataclass(slots=True)
class GrammarOutput:
    """Token bitmask for the structured-output requests of a step, rows in scheduling order."""

    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray  #: [rows, cdiv(vocab_size, 32)] int32, bit set = token allowed


@dataclass(slots=True)
class ModelRunnerOutput:
    """What one step computed. sampled_token_ids[i] belongs to req_ids[i]; req_ids == SchedulerOutput.sampled_req_ids."""

    req_ids: list[str] = field(default_factory=list)
    sampled_token_ids: list[list[int]] = field(default_factory=list)  #: one token each, more with speculation
    logprobs: LogprobsLists | None = None  #: one row per sampled token, in req_ids order
    prompt_logprobs_dict: dict[str, LogprobsTensors] = field(default_factory=dict)  #: complete, in the step that ends the prompt


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What the KV of one block costs on one worker; the engine core divides memory by page_size_bytes."""

    block_size: int  #: tokens per block
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over all layers: K and V."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The engine core's answer: how many blocks the worker allocates. Block 0 is the null block, never handed out."""

    num_blocks: int
    block_size: int
