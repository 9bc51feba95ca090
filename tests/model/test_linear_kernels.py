"""The packed linear layers against plain float64 arithmetic: exact where they say so, within the rounding of int8 where they do not."""

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.config import EngineConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.model import linear_kernels
from mini_engine.model.int8_kernel import LEVELS, int8_kernel
from mini_engine.model.layers import Linear
from mini_engine.model.linear_kernels import packed_kernel
from mini_engine.model.loader import load_model
from mini_engine.worker import worker
from mini_engine.worker.worker import Worker
from tests.model.paged import dense_logits
from tests.tiny_model import FAMILIES, Family, make_tiny_model
from tools.quality import TEXT, measure

SIZES = [(1, 16, 16), (3, 40, 24), (32, 96, 64), (300, 17, 33)]  # rows, outputs, inputs


def layer(outputs: int, inputs: int, bias: bool) -> Linear:
    linear = Linear(inputs, (outputs,), bias, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(outputs)
    for tensor in linear.slots(["x"]).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return linear


def activations(rows: int, inputs: int, seed: int) -> torch.Tensor:
    """With outliers, as a decoder's are; of several rows one is all zeros."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
    x[:, seed % inputs] *= 50
    x[1:2] = 0
    return x


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_packed_float32_is_exact(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    linear, x = layer(outputs, inputs, bias), activations(rows, inputs, 1)
    expected = torch.nn.functional.linear(x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double())
    linear.pack()
    assert linear.kernel is not None and linear.weight.numel() == 0
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_int8_is_within_its_rounding(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    """|error| <= sum |x| * half a weight step + sum |w| * half a step of the second activation term, and float32's own rounding."""
    linear, x = layer(outputs, inputs, bias), activations(rows, inputs, 2)
    weight = linear.weight.double()
    exact = torch.nn.functional.linear(x.double(), weight, None if linear.bias is None else linear.bias.double())
    linear.pack("int8")
    weight_step = weight.abs().amax(1) / 127
    activation_step = x.double().abs().amax(1) / LEVELS / (2 * LEVELS)
    bound = x.double().abs().sum(1)[:, None] * weight_step / 2 + activation_step[:, None] / 2 * (weight.abs().sum(1) + inputs * weight_step)
    error = (linear(x).double() - exact).abs()
    assert (error <= bound * 1.01 + 1e-5 * exact.abs().amax() + 1e-6).all()
    assert error.max() > 0  # it is not the exact kernel under another name


@given(seed=st.integers(0, 2**16), rows=st.integers(2, 40), scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_an_int8_row_does_not_depend_on_its_neighbours(seed: int, rows: int, scale: float) -> None:
    kernel = int8_kernel(layer(32, 48, False).weight, None)
    x = activations(rows, 48, seed)
    x[1:] *= scale
    together = kernel(x)
    assert torch.equal(kernel(x[:1]), together[:1])
    torch.testing.assert_close(torch.cat([kernel(row[None]) for row in x]), together, rtol=0, atol=0)


def test_largest_values_do_not_saturate() -> None:
    """Without VNNI, pairs of products are summed in 16 bits: the largest activation times the largest weight, twice, must fit."""
    y = int8_kernel(torch.ones(16, 64), None)(torch.ones(1, 64))
    torch.testing.assert_close(y, torch.full((1, 16), 64.0))


def test_missing_operators_are_said_and_survived(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class NoOperators:
        """torch.ops.mkldnn of a torch that dropped them."""

    linear_kernels._has_packed_linear.cache_clear()
    monkeypatch.setattr(torch.ops, "mkldnn", NoOperators())
    linear, x = layer(16, 16, True), activations(2, 16, 3)
    expected = linear(x)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert packed_kernel(linear.weight, linear.bias) is None
        linear.pack()
    assert torch.equal(linear(x), expected)
    (record,) = caplog.records  # once, not per layer
    assert "_reorder_linear_weight" in record.message
    monkeypatch.undo()
    linear_kernels._has_packed_linear.cache_clear()
    monkeypatch.setattr("mini_engine.model.int8_kernel._OPERATOR", "gone")
    with pytest.raises(VLLMValidationError, match="fbgemm"):
        int8_kernel(linear.weight, None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_int8_model_is_close_to_the_exact_one(tmp_path: Path, family: Family, tied: bool) -> None:
    """With biases (qwen2), and with an embedding that is the head too: the head is packed, the embedding stays exact."""
    make_tiny_model(tmp_path, family, tie_word_embeddings=tied)
    sequence = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        exact = dense_logits(load_model(tmp_path), sequence)
        int8 = dense_logits(load_model(tmp_path, quantization="int8"), sequence)
    assert 0 < (exact - int8).abs().mean() < 0.05 * exact.std()


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"dtype": "float16"}])
def test_int8_beside_another_type_is_refused(tmp_path: Path, changes: dict[str, str]) -> None:
    make_tiny_model(tmp_path)
    with pytest.raises(VLLMValidationError, match="int8 works on float32 on CPU"):
        Worker(EngineConfig(str(tmp_path), device="cpu", quantization="int8", num_threads=1, **changes))


def test_int8_on_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "choose_device", torch.device)
    with pytest.raises(VLLMValidationError, match=r"int8 works on float32 on CPU, not .* on cuda"):
        Worker(EngineConfig(str(make_tiny_model(tmp_path)), device="cuda", quantization="int8", num_threads=1))


@pytest.mark.model
def test_int8_costs_little_quality() -> None:
    """On the committed text; measured when this was written: perplexity 25.78 → 26.0, 93 % the same likeliest token."""
    result = measure(EngineConfig().model, TEXT.read_text(encoding="utf-8"), "int8", num_threads=1)
    assert result["tokens"] > 800
    assert result["perplexity"] < 1.02 * result["perplexity_float32"]
    assert result["same_likeliest_token"] > 0.9
