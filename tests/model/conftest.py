"""Both ways to compute on CPU: the C kernels, and torch's operators."""

import pytest
import torch
from torch import Tensor

from mini_engine.model import cpu_kernels
from mini_engine.model.cpu_kernels import CPUKernels
from tests.not_run import not_run


@pytest.fixture(scope="session")
def kernels() -> CPUKernels:
    found = cpu_kernels.load()
    if found is None:
        not_run("downloads", "no C compiler here (CC, cc) that builds the kernels; torch's operators are tested")
    return found


@pytest.fixture(params=["kernels", "torch"])
def use_kernels(request: pytest.FixtureRequest) -> bool:
    """For load_model."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    return request.param == "kernels"


def activations(rows: int, inputs: int, seed: int) -> Tensor:
    """With outliers, as a decoder's are; of several rows one is all zeros."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
    x[:, seed % inputs] *= 50
    x[1:2] = 0
    return x


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in float64."""
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
