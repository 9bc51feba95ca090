"""Penalties: tokens that were seen get another logit. Repetition over prompt and output, frequency and presence over output alone.

Order     repetition first (a positive logit is divided by it, a negative one multiplied), then frequency times the count, then
          presence; as in vLLM, and the order matters.
Cost      per step and penalised row: the tokens that are new, and one gather and scatter over the *different* tokens the row has
          seen. Nothing has the size of the vocabulary.

At form 7 of a request.    vLLM: v1/sample/ops/penalties.py, model_executor/layers/utils.py::apply_penalties
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from mini_engine.sampling_params import SamplingParams


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


class TokenCounts:
    """The different tokens one request has seen, and how often each is in the output. Grows with it, never shrinks."""

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        unique = np.unique(np.asarray(prompt_token_ids, np.int64))
        self._tokens = unique[(unique >= 0) & (unique < vocab_size)]
        self._counts = np.zeros(len(self._tokens), np.float32)
        self._slots = {token: slot for slot, token in enumerate(self._tokens.tolist())}
        self._size = len(self._tokens)  # used entries of _tokens and _counts; the rest is room
        self._num_outputs = 0  # output tokens counted so far
        self._vocab_size = vocab_size

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Count the output tokens that came since the last call."""
        for token in output_token_ids[self._num_outputs :]:
            if not 0 <= token < self._vocab_size:
                continue
            slot = self._slots.setdefault(token, self._size)
            if slot == self._size:
                if slot == len(self._tokens):
                    self._tokens, self._counts = np.resize(self._tokens, 2 * slot + 16), np.resize(self._counts, 2 * slot + 16)
                self._tokens[slot], self._counts[slot] = token, 0
                self._size += 1
            self._counts[slot] += 1
        self._num_outputs = len(output_token_ids)

    @property
    def tokens(self) -> np.ndarray:
        """[m] int64, each once, in the order they were met."""
        return self._tokens[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """[m] float32: occurrences in the output; 0 for a token of the prompt only."""
        return self._counts[: self._size]


class _Row(Protocol):
    """The part of SamplingRow that penalties read and write."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    counts: TokenCounts | None


@dataclass(slots=True)
class Penalties:
    """All penalised rows of a batch, flat: entry i is token tokens[i] of row rows[i]."""

    rows: Tensor  #: [m] int64
    tokens: Tensor  #: [m] int64
    counts: Tensor  #: [m]
    repetition: Tensor  #: [m], as are the next two
    frequency: Tensor
    presence: Tensor

    @classmethod
    def from_rows(cls, rows: Sequence[_Row], device: torch.device, vocab_size: int) -> Self | None:
        """None when no row has a penalty. Brings the rows' TokenCounts up to date."""
        tokens, counts, columns, lengths = [], [], [], []
        for i, row in enumerate(rows):
            params = row.params
            if not has_penalties(params):
                continue
            if row.counts is None:
                row.counts = TokenCounts(row.prompt_token_ids, vocab_size)
            row.counts.update(row.output_token_ids)
            tokens.append(row.counts.tokens)
            counts.append(row.counts.counts)
            columns.append((i, params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
            lengths.append(len(tokens[-1]))
        if not columns:
            return None
        flat = np.repeat(np.array(columns, np.float64), lengths, axis=0).T

        def on_device(array: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(array).to(device, dtype)

        return cls(
            on_device(flat[0], torch.int64),
            on_device(np.concatenate(tokens), torch.int64),
            on_device(np.concatenate(counts), torch.float32),
            *(on_device(column, torch.float32) for column in flat[1:]),
        )

    def apply(self, logits: Tensor) -> None:  # logits [n, vocab], changed in place
        seen = logits[self.rows, self.tokens]
        seen = torch.where(seen > 0, seen / self.repetition, seen * self.repetition)
        seen = seen - self.frequency * self.counts - self.presence * (self.counts > 0)
        logits[self.rows, self.tokens] = seen
