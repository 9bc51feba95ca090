"""Processors, penalties and filters against the float64 reference, over random logits and random mixtures of parameters."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.sampling.metadata import SamplingMetadata, SamplingRow
from mini_engine.sampling.topk_topp import filtered_candidates
from mini_engine.sampling_params import SamplingParams
from tests.sampling import reference

VOCAB = 300  # not a multiple of the 256 tokens of a group

tokens = st.integers(0, VOCAB - 1)
maybe = st.booleans()


@st.composite
def rows(draw: st.DrawFn) -> SamplingRow:
    """A row in which each feature is on half of the time."""
    options: dict = {"temperature": draw(st.sampled_from([0.0, 0.5, 1.0, 1.7]))}
    for name, values in {
        "top_k": st.integers(1, VOCAB + 5),
        "top_p": st.floats(0.05, 0.99),
        "min_p": st.floats(0.001, 0.9),
        "repetition_penalty": st.sampled_from([0.5, 1.1, 2.0]),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), max_size=5),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=40),
        "stop_token_ids": st.lists(tokens, max_size=3),
    }.items():
        if draw(maybe):
            options[name] = draw(values)
    output = draw(st.lists(st.integers(0, 5), max_size=12))  # few different tokens: bad words match, counts grow
    params = SamplingParams(**options, max_tokens=100, min_tokens=draw(st.integers(0, 12)))
    params._bad_words_token_ids = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=4))
    return SamplingRow(params, draw(st.integers(0, 2**64 - 1)), len(output), draw(st.lists(tokens, max_size=20)), output)


def random_logits(n: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 4, (n, vocab)))


def after_processors(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    logits = logits.clone()
    for step in (metadata.processors, metadata.penalties):
        if step is not None:
            step.apply(logits)
    return logits


@given(batch=st.lists(rows(), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=150)
def test_processors_equal_the_reference_in_any_mixture(batch: list[SamplingRow], seed: int) -> None:
    logits = random_logits(len(batch), seed)
    got = after_processors(logits, SamplingMetadata.from_requests(batch, "cpu", VOCAB))
    want = np.stack([reference.processed(x, row) for x, row in zip(logits.numpy(), batch, strict=True)])
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-5)  # parameters are float32 in the engine


def kept_tokens(logits: torch.Tensor, batch: Sequence[SamplingRow]) -> torch.Tensor:
    """[n, vocab] bool: what each random row may still draw."""
    m = SamplingMetadata.from_requests(batch, "cpu", logits.shape[1])
    kept = torch.ones(logits.shape, dtype=torch.bool)
    if m.filters is not None:
        rows = m.random_rows[m.num_unfiltered :]
        temperature = m.temperature[m.num_unfiltered :] if m.temperature is not None else None
        kept[rows] = False
        for part, tokens, scores in filtered_candidates(logits[rows], temperature, m.filters):
            for i, ids, score in zip(part.tolist(), tokens, scores, strict=True):
                kept[rows[i], ids[score.isfinite()]] = True
    return kept


@given(batch=st.lists(rows(), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=150)
def test_filters_keep_what_the_reference_keeps(batch: list[SamplingRow], seed: int) -> None:
    for row in batch:
        row.params.temperature = row.params.temperature or 1.0
        row.params.logit_bias = row.params.allowed_token_ids = row.params._bad_words_token_ids = None
        row.params.min_tokens = 0
        row.params.repetition_penalty, row.params.frequency_penalty, row.params.presence_penalty = 1.0, 0.0, 0.0
    logits = random_logits(len(batch), seed)
    got = kept_tokens(logits, batch).numpy()
    for kept, x, row in zip(got, logits.numpy(), batch, strict=True):
        want = reference.distribution(x, row) > 0
        assert (kept == want).all(), (np.flatnonzero(kept), np.flatnonzero(want), row.params)


def row(output: Sequence[int] = (), prompt: Sequence[int] = (), seed: int = 0, **options: object) -> SamplingRow:
    bad_words = options.pop("bad_words_token_ids", None)
    params = SamplingParams(**{"max_tokens": 100, **options})  # type: ignore[arg-type]
    params._bad_words_token_ids = bad_words  # type: ignore[assignment]
    return SamplingRow(params, seed, len(output), prompt, output)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.49, 1), (0.5, 1), (0.5000001, 2), (0.75, 2), (0.76, 3), (0.875, 3), (0.99, 4), (1.0, 4)],
)
def test_the_token_that_crosses_p_is_kept(top_p: float, kept: int) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125 - 1e-9]], dtype=torch.float64).log()  # sums 1/2, 3/4, 7/8, 1
    assert kept_tokens(logits, [row(top_p=top_p)]).sum() == kept


@pytest.mark.parametrize(
    "options", [{"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 1 - 1e-6}, {"min_p": 0.5}, {"top_k": 500}, {"top_k": 9000}], ids=str
)
@pytest.mark.parametrize("more", [{}, {"min_p": 0.6}, {"top_k": 6000, "top_p": 0.95}], ids=str)
def test_what_lies_beyond_the_first_look_is_found(options: dict, more: dict) -> None:
    """A nearly flat distribution: thousands of tokens are kept. Beside it a peaked one, which is settled at once."""
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(np.stack([rng.normal(0, 0.1, 20_000), rng.normal(0, 5, 20_000)]))
    one = row(**{**options, **more})
    kept = kept_tokens(logits, [one, one]).numpy()
    for got, x in zip(kept, logits.numpy(), strict=True):
        assert (got == (reference.distribution(x, one) > 0)).all()


def test_ties_at_the_cut_are_all_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert kept_tokens(logits, [row(top_k=2)]).tolist() == [[True, True, True, True, False]]
    assert kept_tokens(torch.zeros(1, 5000), [row(top_p=0.1)]).all()  # all are as likely as the one that crosses p


def test_top_p_counts_only_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()  # of the first two alone, 0.4 is 4/7
    assert kept_tokens(logits, [row(top_p=0.5, top_k=2)]).sum() == 1
    assert kept_tokens(logits, [row(top_p=0.5)]).sum() == 2


def test_nothing_is_built_that_no_row_asks_for() -> None:
    m = SamplingMetadata.from_requests([row(temperature=0.0), row(temperature=0.0)], "cpu", VOCAB)
    assert (m.temperature, m.filters, m.seeds, m.processors, m.penalties) == (None,) * 5
    assert m.all_greedy and not m.needs_position and not m.needs_history and m.max_num_logprobs is None


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    batch = [
        row([VOCAB + 7, 1], [VOCAB, -1], repetition_penalty=2.0, frequency_penalty=1.0),
        row(logit_bias={VOCAB: 5.0}, stop_token_ids=[VOCAB], min_tokens=3, bad_words_token_ids=[[VOCAB + 1], []]),
        row(allowed_token_ids=[VOCAB, 3]),
    ]
    got = after_processors(random_logits(3, 0), SamplingMetadata.from_requests(batch, "cpu", VOCAB))
    assert got[2].isfinite().nonzero().flatten().tolist() == [3]
    assert torch.equal(got[1], random_logits(3, 0)[1])


def test_refresh_equals_building_anew() -> None:
    """min_tokens ends, a bad word starts to match, counts grow: the kept metadata follows, step by step."""
    options: list[dict] = [
        {"min_tokens": 2, "stop_token_ids": [4, 5]},
        {"bad_words_token_ids": [[7, 8, 9]]},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {},
    ]
    batch = [row([], [1, 2], **o) for o in options]
    kept = SamplingMetadata.from_requests(batch, "cpu", VOCAB)
    for step, token in enumerate([7, 8, 8, 7, 8, 3]):
        for r in batch:
            r.output_token_ids = [*r.output_token_ids, token]
            r.position += 1
        kept.refresh(batch)
        anew = SamplingMetadata.from_requests(
            [row(list(r.output_token_ids), [1, 2], **o) for r, o in zip(batch, options, strict=True)], "cpu", VOCAB
        )
        logits = random_logits(4, step)
        assert torch.equal(after_processors(logits, kept), after_processors(logits, anew)), step
        assert kept.positions is not None and anew.positions is not None and torch.equal(kept.positions, anew.positions)
