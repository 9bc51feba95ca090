"""Logits processors: which tokens a row may not take, and which it is pushed towards.

Order     allowed_token_ids, bad_words, min_tokens, logit_bias; penalties follow (sampler.py). vLLM's order; as a masked logit is
          -inf and stays so whatever is added, only "bias before penalties" can be told from outside.
Promises  token ids outside the vocabulary are ignored: they come from the wire, and one request must not hurt the others.
          Flat (row, token) pairs: a batch in which nobody asks pays nothing, a row that asks pays for its own tokens.

At form 7 of a request.    vLLM: v1/sample/logits_processor/builtin.py, v1/sample/ops/bad_words.py
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from mini_engine.sampling.row import SamplingRow

Pairs = tuple[Tensor, Tensor]  #: rows [m] int64, tokens [m] int64


def _pairs(tokens_of_row: Iterable[tuple[int, Iterable[int]]], device: torch.device, vocab_size: int) -> Pairs | None:
    flat = [(row, token) for row, tokens in tokens_of_row for token in tokens if 0 <= token < vocab_size]
    if not flat:
        return None
    rows, tokens = torch.tensor(flat, dtype=torch.int64, device=device).unbind(1)
    return rows, tokens


def forbidden_tokens(row: SamplingRow) -> set[int]:
    """Tokens that bad_words and min_tokens take from this row at its present position.

    A bad word of several tokens forbids its last one, and only where the output ends with the ones before it."""
    params, output = row.params, row.output_token_ids
    forbidden = set(params._all_stop_token_ids) if row.position < params.min_tokens else set()
    for word in params._bad_words_token_ids or ():
        prefix = len(word) - 1
        if prefix == 0 or (0 < prefix <= len(output) and list(output[-prefix:]) == word[:-1]):
            forbidden.add(word[-1])
    return forbidden


def _changes(row: SamplingRow) -> bool:
    """Whether forbidden_tokens(row) may be another set at the next position."""
    return row.position < row.params.min_tokens or any(len(word) > 1 for word in row.params._bad_words_token_ids or ())


@dataclass(slots=True)
class LogitsProcessors:
    """The processors of one batch, as index tensors."""

    device: torch.device
    vocab_size: int
    allowed_rows: list[int] = field(default_factory=list)  #: rows with allowed_token_ids: everything else is masked there
    allowed: Pairs | None = None
    forbidden: Pairs | None = None
    bias: Pairs | None = None
    bias_values: Tensor | None = None  #: [m], of `bias`
    depends_on_position: bool = False

    @classmethod
    def from_rows(cls, rows: Sequence[SamplingRow], device: torch.device, vocab_size: int) -> Self | None:
        """None when no row asks for any."""
        self = cls(device, vocab_size)
        allowed = {i: row.params.allowed_token_ids for i, row in enumerate(rows) if row.params.allowed_token_ids is not None}
        self.allowed_rows = list(allowed)
        self.allowed = _pairs(allowed.items(), device, vocab_size)
        biases = [
            (i, token, bias)
            for i, row in enumerate(rows)
            for token, bias in (row.params.logit_bias or {}).items()
            if 0 <= token < vocab_size
        ]
        if biases:
            self.bias = _pairs(((i, [token]) for i, token, _ in biases), device, vocab_size)
            self.bias_values = torch.tensor([bias for *_, bias in biases], dtype=torch.float32, device=device)
        self.refresh(rows)
        used = self.allowed_rows or self.forbidden is not None or self.bias is not None or self.depends_on_position
        return self if used else None

    def refresh(self, rows: Sequence[SamplingRow]) -> None:
        """Same requests, later positions. Call again only while `depends_on_position`."""
        self.forbidden = _pairs(((i, forbidden_tokens(row)) for i, row in enumerate(rows)), self.device, self.vocab_size)
        self.depends_on_position = any(_changes(row) for row in rows)

    def apply(self, logits: Tensor) -> None:  # logits [n, vocab], changed in place
        if self.allowed_rows:
            kept = logits[self.allowed] if self.allowed is not None else None
            logits[self.allowed_rows] = -torch.inf
            if self.allowed is not None and kept is not None:
                logits[self.allowed] = kept
        if self.forbidden is not None:
            logits[self.forbidden] = -torch.inf
        if self.bias is not None and self.bias_values is not None:
            logits[self.bias] += self.bias_values
