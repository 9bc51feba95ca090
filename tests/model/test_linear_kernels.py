"""Linear layers on torch's own operators: where the C kernels are not, and for bfloat16."""

import logging

import pytest
import torch

from mini_engine.model import linear_kernels
from mini_engine.model.layers import Linear
from mini_engine.model.linear_kernels import packed_kernel
from tests.model.conftest import activations, exact


def layer(outputs: int, inputs: int, bias: bool) -> Linear:
    linear = Linear(inputs, (outputs,), bias, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(outputs)
    for tensor in linear.slots(["x"]).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 16, 16), (3, 40, 24), (32, 96, 64), (300, 17, 33)])
def test_packed_float32_is_exact(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    linear, x = layer(outputs, inputs, bias), activations(rows, inputs, 1)
    expected = exact(x, linear.weight, linear.bias)
    linear.pack(packed_kernel)
    assert linear.kernel is not None and linear.weight.numel() == 0
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-4)
    hidden = torch.ones(rows, outputs)
    linear.add_to(hidden, x)
    torch.testing.assert_close(hidden, linear(x) + 1)


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
        linear.pack(packed_kernel)
    assert torch.equal(linear(x), expected)
    (record,) = caplog.records  # once, not per layer
    assert "_reorder_linear_weight" in record.message
    monkeypatch.undo()
    linear_kernels._has_packed_linear.cache_clear()
