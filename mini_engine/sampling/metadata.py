"""SamplingMetadata: the rows of a batch turned into tensors, once per batch; only what moves is made anew at each step.

Promises  a feature that no row asks for is None here, and costs nothing.
Callers   the same requests in the same order: keep the object and call refresh(rows) each step (free when neither `needs_position`
          nor `needs_history`); any other batch: from_requests() again.

At form 7 of a request.    vLLM: v1/sample/metadata.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mini_engine.sampling.logits_processors import LogitsProcessors
from mini_engine.sampling.penalties import Penalties
from mini_engine.sampling.row import SamplingRow as SamplingRow
from mini_engine.sampling.row import request_seed as request_seed
from mini_engine.sampling.topk_topp import Filters
from mini_engine.sampling_params import SamplingParams


@dataclass(slots=True)
class SamplingMetadata:
    """One batch of n rows, r of them random (not greedy)."""

    num_rows: int
    device: torch.device
    vocab_size: int
    random_rows: list[int]  #: r rows that draw a random number: those without filters, then those with
    num_unfiltered: int  #: how many of random_rows have neither top-k nor top-p nor min-p
    temperature: Tensor | None  #: [r] float32, as random_rows
    filters: Filters | None  #: [r - num_unfiltered]
    seeds: Tensor | None  #: [r] int64, the 64 bits of seed_key
    positions: Tensor | None  #: [r] int64
    processors: LogitsProcessors | None
    penalties: Penalties | None
    logprob_rows: list[int]  #: rows that asked for logprobs
    max_num_logprobs: int | None  #: the most any row asked for; None: nobody did

    @property
    def all_greedy(self) -> bool:
        return not self.random_rows

    @property
    def all_random(self) -> bool:
        return len(self.random_rows) == self.num_rows

    @property
    def needs_position(self) -> bool:
        """Whether the next token depends on how many there are already."""
        return bool(self.random_rows) or (self.processors is not None and self.processors.depends_on_position)

    @property
    def needs_history(self) -> bool:
        """Whether the next token depends on which tokens there are already."""
        return self.penalties is not None or (self.processors is not None and self.processors.depends_on_position)

    @classmethod
    def from_requests(cls, rows: Sequence[SamplingRow], device: torch.device | str, vocab_size: int) -> Self:
        """Row i of the logits belongs to rows[i]."""
        device = torch.device(device)
        random_rows = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        filtered = [i for i in random_rows if rows[i].params.top_p < 1 or rows[i].params.min_p > 0 or 0 < rows[i].params.top_k < vocab_size]
        random_rows = sorted({*random_rows} - {*filtered}) + filtered
        temperatures = [rows[i].params.temperature for i in random_rows]
        asked = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
        self = cls(
            num_rows=len(rows),
            device=device,
            vocab_size=vocab_size,
            random_rows=random_rows,
            num_unfiltered=len(random_rows) - len(filtered),
            temperature=torch.tensor(temperatures, dtype=torch.float32, device=device) if set(temperatures) - {1.0} else None,
            filters=_filters([rows[i].params for i in filtered], device, vocab_size) if filtered else None,
            seeds=None,
            positions=None,
            processors=LogitsProcessors.from_rows(rows, device, vocab_size),
            penalties=Penalties.from_rows(rows, device, vocab_size),
            logprob_rows=list(asked),
            max_num_logprobs=max((vocab_size if k == -1 else min(k, vocab_size) for k in asked.values()), default=None),
        )
        if random_rows:
            # torch has no unsigned 64-bit arithmetic: the same 64 bits, read as signed
            signed = [(rows[i].seed_key + 2**63) % 2**64 - 2**63 for i in random_rows]
            self.seeds = torch.tensor(signed, dtype=torch.int64, device=device)
            self._set_positions(rows)
        return self

    def refresh(self, rows: Sequence[SamplingRow]) -> None:
        """The same requests in the same order, further on."""
        if self.random_rows:
            self._set_positions(rows)
        if self.processors is not None and self.processors.depends_on_position:
            self.processors.refresh(rows)
        if self.penalties is not None:
            self.penalties = Penalties.from_rows(rows, self.device, self.vocab_size)

    def _set_positions(self, rows: Sequence[SamplingRow]) -> None:
        self.positions = torch.tensor([rows[i].position for i in self.random_rows], dtype=torch.int64, device=self.device)


def _filters(params: Sequence[SamplingParams], device: torch.device, vocab_size: int) -> Filters:
    return Filters(
        torch.tensor([p.top_k if 0 < p.top_k < vocab_size else 0 for p in params], dtype=torch.int64, device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
    )
