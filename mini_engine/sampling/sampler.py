"""Sampler: from logits to one token per row, and, where asked, its logprobs.

Order     raw logprobs are of the logits as they come; then allowed tokens, bad words, min_tokens, logit bias (logits_processors.py),
          penalties (penalties.py); greedy rows take the argmax; the others divide by temperature, filter by min-p, top-k and top-p,
          and draw (topk_topp.py).
Promises  a row's token depends on its own logits and its own SamplingRow, never on its neighbours. What no row asks for is not done.
          A row whose every token is masked gives token 0: a valid id, the same each time.
Not here  the model (model/), which rows sample in this step (scheduler/), stop conditions (scheduler/).

At form 7 of a request.    vLLM: v1/sample/sampler.py::Sampler
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.sampling.logprobs import sample_logprobs
from mini_engine.sampling.metadata import SamplingMetadata
from mini_engine.sampling.topk_topp import filtered_sample, sample
from mini_engine.wire.messages import LogprobsLists


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What one step's rows became."""

    sampled_token_ids: Tensor  #: [n] int64, on the device of the logits
    logprobs: LogprobsLists | None  #: n rows; None when no row asked


class Sampler:
    """Stateless: all that matters is in the metadata."""

    @torch.inference_mode()
    def forward(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """logits [n, vocab], row i for metadata's row i; they may be overwritten. Float64 stays so (tests), all else becomes float32."""
        assert logits.shape == (metadata.num_rows, metadata.vocab_size), (logits.shape, metadata.num_rows, metadata.vocab_size)
        if logits.dtype != torch.float64:
            logits = logits.float()  # the same tensor if it is float32 already
        raw = logits
        asked = metadata.logprob_rows
        if metadata.max_num_logprobs is not None:
            if len(asked) < len(logits):
                raw = logits[asked]
            elif metadata.processors is not None or metadata.penalties is not None:
                raw = logits.clone()  # they write in place
        if metadata.processors is not None:
            metadata.processors.apply(logits)
        if metadata.penalties is not None:
            metadata.penalties.apply(logits)
        sampled = self._sample(logits, metadata)
        logprobs = None
        if metadata.max_num_logprobs is not None:
            logprobs = sample_logprobs(raw, metadata.max_num_logprobs, asked, sampled)
        return SamplerOutput(sampled, logprobs)

    def _sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        if metadata.all_greedy:
            return logits.argmax(-1)
        assert metadata.seeds is not None and metadata.positions is not None
        rows, split = metadata.random_rows, metadata.num_unfiltered
        some = logits if rows == list(range(len(logits))) else logits[rows]
        t, seeds, positions = metadata.temperature, metadata.seeds, metadata.positions
        drawn = []
        if split:
            drawn.append(sample(some[:split], t if t is None else t[:split], seeds[:split], positions[:split]))
        if metadata.filters is not None:
            drawn.append(filtered_sample(some[split:], t if t is None else t[split:], metadata.filters, seeds[split:], positions[split:]))
        sampled = torch.empty(len(logits), dtype=torch.int64, device=logits.device) if metadata.all_random else logits.argmax(-1)
        sampled[rows] = torch.cat(drawn)
        return sampled
