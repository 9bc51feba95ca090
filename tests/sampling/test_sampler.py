"""The whole sampler: frequencies, seeds, independence of rows, logprobs."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mini_engine.sampling import topk_topp
from mini_engine.sampling.logprobs import gather_logprobs, join_prompt_logprobs, prompt_logprobs
from mini_engine.sampling.metadata import SamplingMetadata, SamplingRow, request_seed
from mini_engine.sampling.sampler import Sampler, SamplerOutput
from mini_engine.sampling.topk_topp import Filters, filtered_candidates, uniform
from mini_engine.sampling_params import SamplingParams
from mini_engine.wire.messages import Tensor
from tests.sampling import reference
from tests.sampling.test_processors import VOCAB, random_logits, row, rows


def sample(logits: torch.Tensor, batch: list[SamplingRow]) -> SamplerOutput:
    return Sampler().forward(logits.clone(), SamplingMetadata.from_requests(batch, logits.device, logits.shape[1]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_frequencies(options: dict) -> None:
    """Chi-squared over 20,000 draws. False alarm: 1e-6 per case, were the seeds random; they are fixed, so never or for ever."""
    draws = 20_000
    logits = torch.from_numpy(np.random.default_rng(7).normal(0, 2, VOCAB)).float()
    one = row([3, 5], [1], **options)
    expected = reference.distribution(logits.numpy(), one) * draws
    batch = [
        SamplingRow(one.params, seed, position, one.prompt_token_ids, one.output_token_ids) for seed in range(40) for position in range(50)
    ]
    counts = np.zeros(VOCAB)
    for repeat in range(draws // len(batch)):
        for r in batch:
            r.seed_key += 1000 * (repeat > 0)
        got = sample(logits.expand(len(batch), VOCAB), batch).sampled_token_ids
        counts += np.bincount(got.numpy(), minlength=VOCAB)
    assert not counts[expected == 0].any(), "a token was drawn that is out of play"
    rare = expected < 10  # chi-squared needs about ten per cell: the rare ones share one
    observed, wanted = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    z = 4.753  # one-sided 1e-6; Wilson and Hilferty's cube-root approximation of the quantile
    limit = degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, (statistic, degrees)


def test_uniforms_are_uniform_and_unrelated() -> None:
    """Neighbouring seeds, positions and indices: 100 bins, and no correlation along any axis. Limits at 5 sigma, seeds fixed."""
    u = uniform(torch.arange(50).repeat_interleave(20), torch.arange(20).repeat(50), torch.arange(500)).numpy()
    assert u.min() > 0 and u.max() < 1
    bins = np.bincount((u.ravel() * 100).astype(int), minlength=100)
    assert ((bins - 5000) ** 2 / 5000).sum() < 99 + 5 * math.sqrt(2 * 99)
    cube = u.reshape(50, 20, 500) - 0.5
    for axis in range(3):
        a, b = np.take(cube, range(1, cube.shape[axis]), axis), np.take(cube, range(cube.shape[axis] - 1), axis)
        assert abs((a * b).sum() * 12) < 5 * math.sqrt(a.size)


@given(batch=st.lists(rows(), min_size=2, max_size=6), seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_row_does_not_depend_on_its_neighbours(batch: list[SamplingRow], seed: int, data: st.DataObject) -> None:
    for r in batch:
        r.params.logprobs = data.draw(st.sampled_from([None, 0, 3]))
    logits = random_logits(len(batch), seed)
    order = data.draw(st.permutations(range(len(batch))))
    together = sample(logits[order], [batch[i] for i in order])
    for place, i in enumerate(order):
        alone = sample(logits[i : i + 1], [batch[i]])
        assert together.sampled_token_ids[place] == alone.sampled_token_ids[0]
        if (k := batch[i].params.logprobs) is not None:
            assert together.logprobs is not None and alone.logprobs is not None
            a, b = together.logprobs.slice(place, place + 1), alone.logprobs
            np.testing.assert_array_equal(a.logprob_token_ids[:, : k + 1], b.logprob_token_ids[:, : k + 1])
            np.testing.assert_allclose(a.logprobs[:, : k + 1], b.logprobs[:, : k + 1], rtol=0, atol=1e-6)
            assert a.sampled_token_ranks == b.sampled_token_ranks


@given(batch=st.lists(rows(), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=100)
def test_every_draw_is_in_play_and_greedy_is_the_argmax(batch: list[SamplingRow], seed: int) -> None:
    logits = random_logits(len(batch), seed)
    for token, x, r in zip(sample(logits, batch).sampled_token_ids.tolist(), logits.numpy(), batch, strict=True):
        left = reference.processed(x, r)
        if np.isfinite(left).any():
            assert reference.distribution(x, r)[token] > 0
        else:
            assert token == 0


def test_a_seed_alone_in_a_crowd_and_after_preemption() -> None:
    """Eight steps three ways: alone; among neighbours that come and go; forgotten after three steps, then resumed with a new row."""
    logits = random_logits(8, 5)

    def follow(make_batch: Callable[[int, SamplingRow], tuple[list[SamplingRow], int]]) -> list[int]:
        output: list[int] = []
        for step in range(8):
            batch, place = make_batch(step, row(list(output), [1, 2], seed=42, temperature=1.0, frequency_penalty=0.3, top_p=0.95))
            x = random_logits(len(batch), 100 + step)
            x[place] = logits[step]
            output.append(int(sample(x, batch).sampled_token_ids[place]))
        return output

    def crowd(step: int, mine: SamplingRow) -> tuple[list[SamplingRow], int]:
        others = [row([1] * step, seed=s, temperature=s % 3 / 2, top_k=s) for s in range(step + 2)]
        place = step % (len(others) + 1)
        return [*others[:place], mine, *others[place:]], place

    alone = follow(lambda step, mine: ([mine], 0))
    assert follow(crowd) == alone
    kept = row([], [1, 2], seed=42, temperature=1.0, frequency_penalty=0.3, top_p=0.95)
    metadata = SamplingMetadata.from_requests([kept], "cpu", VOCAB)
    tokens: list[int] = []
    for step in range(8):
        if step == 3:  # preempted and resumed: nothing but the tokens survived
            kept = row(list(tokens), [1, 2], seed=42, temperature=1.0, frequency_penalty=0.3, top_p=0.95)
            metadata = SamplingMetadata.from_requests([kept], "cpu", VOCAB)
        metadata.refresh([kept])
        tokens.append(int(Sampler().forward(logits[step : step + 1].clone(), metadata).sampled_token_ids[0]))
        kept.output_token_ids, kept.position = list(tokens), len(tokens)
    assert tokens == alone


class Operators(TorchDispatchMode):
    """The torch operators that run inside: name → most rows of a tensor as wide as the vocabulary that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = [len(a) for a in args if isinstance(a, torch.Tensor) and a.dim() > 1 and a.shape[-1] >= VOCAB]
        name = func.overloadpacket.__name__
        self.rows[name] = max([self.rows.get(name, 0), *wide])
        return func(*args, **(kwargs or {}))


def operators_of(batch: list[SamplingRow]) -> dict[str, int]:
    metadata, logits = SamplingMetadata.from_requests(batch, "cpu", VOCAB), random_logits(len(batch), 0).float()
    with Operators() as operators:
        metadata.refresh(batch)
        Sampler().forward(logits, metadata)
    del operators.rows["to"]  # of what is float32 already: nothing
    return operators.rows


@pytest.mark.parametrize(
    ("options", "never"),
    [
        ({"temperature": 0.0, "logprobs": 2}, {"sort", "cumsum", "_log_softmax", "index_put_", "exp", "exp_", "clone"}),
        ({"temperature": 1.0}, {"topk", "sort", "cumsum", "logsumexp", "div_", "clone"}),
        ({"temperature": 0.7}, {"topk", "sort", "cumsum", "logsumexp", "clone"}),
        ({"temperature": 0.7, "top_k": 5}, {"sort", "logsumexp", "clone"}),
    ],
    ids=str,
)
def test_no_operator_runs_for_what_no_row_asks(options: dict, never: set[str]) -> None:
    assert operators_of([row(temperature=0.0)] * 3) == {"argmax": 3}
    assert not operators_of([row(**options)] * 3).keys() & never


def test_one_row_s_wishes_cost_that_row_only() -> None:
    everything = row([1], [2], temperature=0.7, top_k=5, top_p=0.5, logprobs=3, frequency_penalty=1.0, logit_bias={3: 1.0})
    rows = operators_of([*[row(temperature=0.0)] * 63, everything])
    assert {name for name, n in rows.items() if n > 1} <= {"argmax", "index", "index_put_"}  # the last two: single entries, or one row


def test_seeds_and_positions_make_a_difference() -> None:
    flat = torch.zeros(64, 4096)
    seeds, positions = torch.arange(64) // 8, torch.arange(64) % 8
    assert len(set(topk_topp.sample(flat, None, seeds, positions).tolist())) > 55  # 64 draws of 4,096: 0.5 collisions expected


def test_request_seed() -> None:
    params, seeded = SamplingParams(), SamplingParams(seed=-5)
    assert request_seed(params, 0, "a") == request_seed(params, 0, "a")
    assert len({request_seed(params, e, r) for e, r in itertools.product((0, 1), ("a", "b"))}) == 4
    assert request_seed(seeded, 0, "a") == request_seed(seeded, 1, "b") == 2**64 - 5


def test_a_row_with_nothing_left_gives_token_zero_and_harms_nobody() -> None:
    masked = [
        row(allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2, temperature=t, **o) for t in (0.0, 1.0) for o in ({}, {"top_k": 2})
    ]
    masked.append(row(allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2, top_p=0.5, min_p=0.1))
    fine = [row(seed=9), row(temperature=0.0)]
    logits = random_logits(len(masked) + 2, 3)
    got = sample(logits, [*masked, *fine]).sampled_token_ids.tolist()
    assert got[: len(masked)] == [0] * len(masked)
    assert got[len(masked) :] == sample(logits[len(masked) :], fine).sampled_token_ids.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logprobs_are_of_the_raw_logits(dtype: torch.dtype) -> None:
    batch = [
        row(logprobs=5, temperature=0.0),
        row(temperature=0.3, top_k=3),
        row(logprobs=0, temperature=0.0, logit_bias={17: 100.0}),  # drives the choice, not the logprob
        row(logprobs=2, repetition_penalty=2.0, prompt=list(range(50)), seed=4),
    ]
    logits = random_logits(4, 11).to(dtype)
    out = sample(logits, batch)
    assert out.logprobs is not None
    ids, logprobs, ranks, _ = out.logprobs
    assert (ids.shape, ids.dtype, logprobs.dtype) == ((4, 6), np.int32, np.float32)
    want = logits.double().log_softmax(-1).numpy()
    assert out.sampled_token_ids[2] == 17
    for i in (0, 2, 3):
        assert ids[i, 0] == out.sampled_token_ids[i]
        np.testing.assert_allclose(logprobs[i], want[i, ids[i]], rtol=0, atol=1e-5)
        assert ranks[i] == (want[i] >= want[i, ids[i, 0]]).sum()
        np.testing.assert_allclose(logprobs[i, 1:], np.sort(want[i])[::-1][:5], rtol=0, atol=1e-5)
    assert ranks[0] == 1
    assert not ids[1].any() and not logprobs[1].any() and ranks[1] == 0  # did not ask
    others = sample(logits[[0, 2, 3]], [batch[0], batch[2], batch[3]]).logprobs  # where all rows ask, nothing is picked out
    assert others is not None
    for a, b in zip(others[:3], (ids, logprobs, ranks), strict=True):
        np.testing.assert_allclose(a, b[[0, 2, 3]], rtol=0, atol=1e-6)


def test_the_whole_vocabulary_as_logprobs() -> None:
    out = sample(random_logits(1, 0), [row(logprobs=-1)])
    assert out.logprobs is not None and sorted(out.logprobs.logprob_token_ids[0, 1:]) == list(range(VOCAB))
    assert np.exp(out.logprobs.logprobs[0, 1:].astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("k", [0, 3, -1])
def test_prompt_logprobs_in_chunks_equal_the_whole(k: int) -> None:
    logits, following = random_logits(9, 2), [5, 3, 299, 0, 1, 7, 7, 7, 8]
    whole = prompt_logprobs(logits, k, following)
    joined = join_prompt_logprobs([prompt_logprobs(logits[a:b], k, following[a:b]) for a, b in ((0, 1), (1, 6), (6, 9))])
    for a, b in zip(whole[:3], joined[:3], strict=True):
        assert isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    want = logits.log_softmax(-1).numpy()
    np.testing.assert_allclose(whole.logprobs[:, 0], want[np.arange(9), following], rtol=0, atol=1e-5)
    assert whole.logprob_token_ids.shape == (9, (VOCAB if k == -1 else k) + 1)
    assert (whole.logprob_token_ids.dtype, whole.selected_token_ranks.dtype) == (np.int32, np.int32)


def test_the_caller_s_logits_are_left_alone_by_what_changes_nothing() -> None:
    logits = random_logits(2, 1)
    before = logits.clone()
    Sampler().forward(
        logits, SamplingMetadata.from_requests([row(top_p=0.9, temperature=0.7), row(temperature=0.0, logprobs=1)], "cpu", VOCAB)
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_alone_has_the_bits_of_a_row_in_a_crowd(num_threads: int) -> None:
    """With a real vocabulary: torch splits a long sum over threads, depending on how many rows there are."""
    logits = torch.randn(64, 49_152, generator=torch.Generator().manual_seed(0)) * 4
    chosen, none = logits.argmin(-1), torch.zeros(64)
    filters = Filters(none.long(), torch.full((64,), 0.9, dtype=torch.float64), none.double())
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        crowd = gather_logprobs(logits, 5, chosen)[1]
        for i in range(64):
            assert np.array_equal(gather_logprobs(logits[i : i + 1], 5, chosen[i : i + 1])[1][0], crowd[i])
        kept = {int(r): scores for rs, _, part in filtered_candidates(logits, None, filters) for r, scores in zip(rs, part, strict=True)}
        for i in range(64):
            parts = filtered_candidates(logits[i : i + 1], None, filters.rows(torch.tensor([i])))
            (alone,) = [scores for _, _, part in parts for scores in part]
            assert torch.equal(alone, kept[i])
    finally:
        torch.set_num_threads(threads)
