"""Logits: equal to transformers' (eager attention) for every family, and to themselves however the work is cut and placed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mini_engine.config import Quantization
from mini_engine.model import sdpa_attention
from mini_engine.model.config import ModelConfig
from mini_engine.model.cpu_attention import CPUAttentionBackend
from mini_engine.model.cpu_kernels import CPUKernels
from mini_engine.model.decoder import Decoder
from mini_engine.model.layers import inverse_frequencies
from mini_engine.model.loader import load_model
from tests.model.paged import PagedRun, dense_logits
from tests.tiny_model import FAMILIES, LLAMA3_ROPE, Family, load_reference, make_tiny_model

VARIANTS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "llama-rope3-tied": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3-bias": {"attention_bias": True},
    "llama-no-gqa": {"num_kv_heads": 6},
    "llama-one-kv-head": {"num_kv_heads": 1},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3-rope3-tied": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "num_heads": 3, "num_kv_heads": 3},
}


def random_sequences(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, n).tolist() for n in lengths]


@pytest.fixture(scope="module", params=VARIANTS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: Family = request.param.split("-")[0]
    return make_tiny_model(tmp_path_factory.mktemp(request.param), family, **VARIANTS[request.param])


@pytest.fixture(scope="module")
def model64(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("model64")), torch.float64)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 4e-5)])
def test_logits_equal_transformers(model_dir: Path, dtype: torch.dtype, tolerance: float) -> None:
    """200 tokens: past original_max_position_embeddings of the scaled rope. (transformers norms and softmaxes in float32 at best.)"""
    model, reference = load_model(model_dir, dtype, use_kernels=False), load_reference(model_dir, dtype)
    (sequence,) = random_sequences(1, [200])
    with torch.inference_mode():
        expected = reference(torch.tensor([sequence])).logits[0]
        run = PagedRun(model, [sequence], block_size=16, seed=1)
        for n in (100, 1, 60, 39):
            run.step([(0, n)])
    torch.testing.assert_close(run.all_logits(0), expected, rtol=0, atol=tolerance)


def test_any_batching_equals_transformers(model_dir: Path, use_kernels: bool) -> None:
    """Float32, as it is served: sequences cut and mixed at random, on random blocks. Causal: a beginning's logits are the whole's."""
    model, wholes = load_model(model_dir, use_kernels=use_kernels), random_sequences(5, [90, 90, 90, 90])
    with torch.inference_mode():
        expected = load_reference(model_dir)(torch.tensor(wholes)).logits

    @given(data=st.data(), block_size=st.sampled_from([16, 32] if use_kernels else [1, 3, 16, 32]))
    @settings(max_examples=12)
    def check(data: st.DataObject, block_size: int) -> None:
        lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4), label="lengths")
        run = PagedRun(model, [whole[:n] for whole, n in zip(wholes, lengths, strict=False)], block_size, data.draw(st.integers(0, 99)))
        with torch.inference_mode():
            while todo := [i for i, n in enumerate(lengths) if run.computed[i] < n]:
                chosen = data.draw(st.lists(st.sampled_from(todo), min_size=1, unique=True), label="chosen")
                sizes = st.integers(1, 60) | st.just(1)
                run.step([(i, min(data.draw(sizes, label="n"), lengths[i] - run.computed[i])) for i in chosen])
        for i, n in enumerate(lengths):
            torch.testing.assert_close(run.all_logits(i), expected[i, :n], rtol=0, atol=1e-4)

    check()


@given(
    head_dim=st.sampled_from([16, 64, 80, 128]),
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    factor=st.floats(1, 64),
    low=st.floats(0.5, 2),
    width=st.floats(0.5, 6),
    original=st.sampled_from([64, 2048, 8192]),
)
def test_llama3_rope_has_transformers_bits(head_dim: int, theta: float, factor: float, low: float, width: float, original: int) -> None:
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
    rope |= {"low_freq_factor": low, "high_freq_factor": low + width}
    sizes = {"vocab_size": 8, "hidden_size": head_dim, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8, "rms_norm_eps": 1e-5, "rope_parameters": rope, **sizes}
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(head_dim=head_dim, rope_parameters=rope), torch.device("cpu"))
    assert torch.equal(inverse_frequencies(head_dim, ModelConfig.from_dict(config).rope), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_close(family: Family, dtype: torch.dtype, tmp_path: Path) -> None:
    """Nothing is computed in a type too small for it: the error against float64 is no larger than transformers' own, twice over."""
    make_tiny_model(tmp_path, family)
    (sequence,) = random_sequences(2, [100])
    with torch.inference_mode():
        exact = dense_logits(load_model(tmp_path, torch.float64), sequence)
        ours = dense_logits(load_model(tmp_path, dtype), sequence).double()
        theirs = load_reference(tmp_path, dtype)(torch.tensor([sequence])).logits[0].double()
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 50])  # around block_size = 16
def test_chunked_prefill_equals_dense(model64: Decoder, chunk: int) -> None:
    (sequence,) = random_sequences(3, [50])
    with torch.inference_mode():
        run = PagedRun(model64, [sequence], block_size=16, seed=3)
        while run.computed[0] < 50:
            run.step([(0, min(chunk, 50 - run.computed[0]))])
        torch.testing.assert_close(run.all_logits(0), dense_logits(model64, sequence), rtol=0, atol=1e-12)


@given(data=st.data(), seed=st.integers(0, 2**16), block_size=st.sampled_from([1, 2, 7, 16]))
def test_any_batching_equals_dense(model64: Decoder, data: st.DataObject, seed: int, block_size: int) -> None:
    """Mixed steps of chunks and single tokens, any blocks, junk everywhere else: float64, so a wrong index cannot hide."""
    sequences = random_sequences(seed, data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6), label="lengths"))
    with torch.inference_mode():
        run = PagedRun(model64, sequences, block_size, seed)
        while todo := [i for i, s in enumerate(sequences) if run.computed[i] < len(s)]:
            chosen = data.draw(st.lists(st.sampled_from(todo), min_size=1, unique=True), label="chosen")
            sizes = st.integers(1, 12) | st.just(1)
            run.step([(i, min(data.draw(sizes, label="n"), len(sequences[i]) - run.computed[i])) for i in chosen])
        for i, sequence in enumerate(sequences):
            torch.testing.assert_close(run.all_logits(i), dense_logits(model64, sequence), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("gather", "waste", "tile"), [(1, 1, 1), (2000, 1 << 30, 3), (1 << 30, 1, 4), (1 << 30, 1 << 30, 7)])
def test_grouping_changes_nothing(model64: Decoder, gather: int, waste: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to cut a step into groups: one request each, all together with padding, prefill tiles that do not divide the chunk."""
    monkeypatch.setitem(sdpa_attention.GATHER_BYTES, "cpu", gather)
    monkeypatch.setitem(sdpa_attention.WASTE_BYTES, "cpu", waste)
    monkeypatch.setattr(sdpa_attention, "QUERY_TILE", tile)
    lengths = [40, 3, 17, 16, 25, 1]
    sequences = random_sequences(4, lengths)
    with torch.inference_mode():
        run = PagedRun(model64, sequences, block_size=4, seed=4)
        run.step([(i, max(1, n - 9)) for i, n in enumerate(lengths) if n > 1])
        run.step([(0, 5), (1, 1), (2, 1), (4, 1), (5, 1)])
        run.step([(0, 1), (2, 5), (3, 9)])
        run.step([(i, len(s) - run.computed[i]) for i, s in enumerate(sequences) if run.computed[i] < len(s)])
        for i, sequence in enumerate(sequences):
            torch.testing.assert_close(run.all_logits(i), dense_logits(model64, sequence), rtol=0, atol=1e-12)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_give_the_same_bits_in_any_batch(kernels: CPUKernels, family: Family, quantization: Quantization, tmp_path: Path) -> None:
    """Not close: equal. Sequences that span several of attention.c's KEYS, cut and mixed at random, on 1 to 3 threads, NaN in all else."""
    model = load_model(make_tiny_model(tmp_path, family), quantization=quantization)
    wholes, threads = random_sequences(6, [300, 140, 90, 20]), torch.get_num_threads()
    with torch.inference_mode():
        expected = [dense_logits(model, whole) for whole in wholes]

    @given(seed=st.integers(0, 2**32), block_size=st.sampled_from([16, 32, 48]), num_threads=st.integers(1, 3))
    @settings(max_examples=15)
    def check(seed: int, block_size: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        rng, run = np.random.default_rng(seed), PagedRun(model, wholes, block_size, seed)
        with torch.inference_mode():
            while todo := [i for i, whole in enumerate(wholes) if run.computed[i] < len(whole)]:
                chosen = rng.choice(todo, rng.integers(1, len(todo) + 1), replace=False).tolist()
                sizes = np.where(rng.random(len(chosen)) < 0.3, 1, rng.integers(1, 130, len(chosen))).tolist()
                run.step([(i, min(n, len(wholes[i]) - run.computed[i])) for i, n in zip(chosen, sizes, strict=True)])
        for i, logits in enumerate(expected):
            assert torch.equal(run.all_logits(i), logits)

    try:
        check()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("block_size", "head_dim", "kernel"), [(16, 16, True), (48, 32, True), (8, 16, False), (16, 24, False)])
def test_what_the_c_attention_does_not_take_is_said(
    kernels: CPUKernels, block_size: int, head_dim: int, kernel: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(make_tiny_model(tmp_path, head_dim=head_dim))
    assert isinstance(model.attention_backend(block_size), CPUAttentionBackend) == kernel
    assert kernel == (f"not block size {block_size} and heads of {head_dim}" not in caplog.text)
    (sequence,) = random_sequences(7, [40])
    with torch.inference_mode():
        run = PagedRun(model, [sequence], block_size, seed=0)
        run.step([(0, 40)])
        torch.testing.assert_close(
            run.all_logits(0), dense_logits(load_model(tmp_path, torch.float64), sequence).float(), rtol=0, atol=1e-4
        )


def test_a_step_writes_its_own_slots_only(use_kernels: bool, tmp_path: Path) -> None:
    model = load_model(make_tiny_model(tmp_path), use_kernels=use_kernels)
    attention = model.attention_backend(16)
    kv_caches = attention.new_kv_caches(4)
    metadata = attention.build(np.array([1]), np.array([2]), np.array([18]), np.array([16, 17]), np.array([[1, 1], [3, 2]], np.int32))
    with torch.inference_mode():
        model.forward(torch.tensor([5, 6]), torch.tensor([16, 17]), kv_caches, metadata)
    config = model.config
    for cache in kv_caches:
        assert int((cache.view(4, -1) != 0).any(1).nonzero()) == 2
        assert int((cache != 0).sum()) == 2 * 2 * config.num_kv_heads * config.head_dim
