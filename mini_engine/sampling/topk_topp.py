"""Random sampling: which tokens stay in play (min-p, top-k, top-p), and drawing one of them.

Draw      Gumbel-max: argmax(log w + Gumbel noise) falls on i with probability w_i / sum(w). A row without filters does it twice, first
          among groups of 256 tokens by their summed weight, then inside the winning group: the same distribution from 450 noise
          values instead of 49,152. A row with filters does it once, among its candidates.
Filters   each keeps the tokens from some logit upwards, and nearly always a few dozen are left: so only the most likely ones are
          looked at, 32 times more where that was not enough. Tokens that tie with the last one kept are kept too: no result hangs on
          how a sort breaks ties, or on how many were looked at.
Noise     a hash of (seed, position, index): no state, so neighbours, batch order and preemption cannot change it.

At form 7 of a request.    vLLM: v1/sample/ops/topk_topp_sampler.py (exponential noise from generators there)
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 256  #: tokens per group of the first draw; part of what a seed means
_SEARCH = 128  #: how many of the most likely tokens the filters look at first
_GROUP_COUNTER = 1 << 40  #: noise indices of groups start here; those of tokens at 0


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN, _MUL1, _MUL2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: every bit of the result depends on every bit of x."""
    x = (x ^ _shift(x, 30)) * _MUL1
    x = (x ^ _shift(x, 27)) * _MUL2
    return x ^ _shift(x, 31)


def uniform(seeds: Tensor, positions: Tensor, index: Tensor) -> Tensor:
    """float64 in (0, 1), both ends excluded: seeds [n] int64, positions [n] int64, index [m] or [n, m] int64 → [n, m]."""
    stream = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    bits = _mix(stream[:, None] + (index + 1) * _GOLDEN)
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52  # 52 bits: with 53 the largest would round to 1, and log(-log(1)) is infinite


def _gumbel(seeds: Tensor, positions: Tensor, index: Tensor) -> Tensor:
    return -(-uniform(seeds, positions, index).log()).log()


def _weights(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """exp(logits / temperature), scaled so that the largest of each row is 1; all 0 where every logit is -inf. A new tensor."""
    shifted = logits - logits.amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)  # the clamp: -inf - -inf is NaN
    if temperature is not None:
        shifted /= temperature[:, None]
    return shifted.exp_()


def sample(logits: Tensor, temperature: Tensor | None, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token per row, softmax(logits / temperature) distributed: logits [n, vocab], the others [n] → [n] int64."""
    n, vocab = logits.shape
    weights = pad(_weights(logits, temperature), (0, -vocab % GROUP)).view(n, -1, GROUP)
    groups = torch.arange(weights.shape[1], device=logits.device)
    group = (weights.sum(-1, dtype=torch.float64).log() + _gumbel(seeds, positions, groups + _GROUP_COUNTER)).argmax(-1)
    members = weights[torch.arange(n, device=logits.device), group].double().log()
    index = group[:, None] * GROUP + torch.arange(GROUP, device=logits.device)
    member = (members + _gumbel(seeds, positions, index)).argmax(-1)
    return (group * GROUP + member).clamp_max(vocab - 1)  # the clamp: NaN logits would win with a padding token


@dataclass(slots=True)
class Filters:
    """What the rows keep; [n] each. min-p first, then top-k, then top-p of what those left."""

    top_k: Tensor  #: int64; 0: all
    top_p: Tensor  #: float64; the token with which the sum reaches p is the last one kept; 1: all
    min_p: Tensor  #: float64; at least so many times as likely as the most likely; 0: all

    def rows(self, rows: Tensor) -> "Filters":
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def keep(self, weights: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        """weights [n, w]: of the w most likely tokens, descending; whole [n]: the sum over the vocabulary.

        Returns kept [n, w] bool, and known [n] bool: whether no token beyond the w can be kept, and kept is right."""
        k, p = self.top_k[:, None], self.top_p[:, None]
        kth = weights.gather(-1, (k - 1).clamp(0, weights.shape[-1] - 1))
        kept = (weights >= self.min_p[:, None]) & ((k == 0) | (weights >= kth))
        narrowed = (self.top_k > 0) | (self.min_p > 0)
        known = ~narrowed | ~kept[:, -1]
        reached = (weights * kept).cumsum(-1)
        wanted = p * torch.where(narrowed[:, None], reached[:, -1:], whole[:, None])
        crossing = (reached < wanted).sum(-1, keepdim=True).clamp_max(weights.shape[-1] - 1)
        kept &= (p == 1) | (weights >= weights.gather(-1, crossing))
        return kept, known & ~kept[:, -1]


def filtered_candidates(logits: Tensor, temperature: Tensor | None, filters: Filters) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What the filters leave, for logits [n, vocab]: (rows [m], token ids [m, w], log weights [m, w] float64, -inf where not kept).

    Each row is in one of the parts; a part is as wide as its rows need."""
    vocab, parts = logits.shape[-1], []
    rows, width = torch.arange(len(logits), device=logits.device), _SEARCH
    plain_p = (filters.top_p < 1) & (filters.top_k == 0) & (filters.min_p == 0)
    whole = torch.ones_like(filters.top_p)  # needed by rows with top-p alone, the others know their sum
    if plain_p.any():
        weights = _weights(logits[plain_p], None if temperature is None else temperature[plain_p])
        # in two stages: torch splits the sum of one long row over threads, and a row alone would differ from a row in a crowd
        whole[plain_p] = pad(weights, (0, -vocab % GROUP)).view(len(weights), -1, GROUP).sum(-1, dtype=torch.float64).sum(-1)
    while len(rows):
        width = min(width, vocab)
        values, tokens = (logits if len(rows) == len(logits) else logits[rows]).topk(width, dim=-1)
        weights = _weights(values.double(), None if temperature is None else temperature[rows])
        kept, known = filters.rows(rows).keep(weights, whole[rows])
        known |= width == vocab
        parts.append((rows[known], tokens[known], torch.where(kept, weights.log(), -torch.inf)[known]))
        rows, width = rows[~known], width * 32
    return parts


def filtered_sample(logits: Tensor, temperature: Tensor | None, filters: Filters, seeds: Tensor, positions: Tensor) -> Tensor:
    """sample(), among what the filters leave. A row of nothing but -inf gives token 0."""
    drawn = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    for rows, tokens, scores in filtered_candidates(logits, temperature, filters):
        best = (scores + _gumbel(seeds[rows], positions[rows], tokens)).argmax(-1, keepdim=True)
        drawn[rows] = torch.where(scores[:, 0] > -torch.inf, tokens.gather(-1, best)[:, 0], 0)
    return drawn
