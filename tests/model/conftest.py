"""Both ways to compute on CPU: the C kernels, and torch's operators."""

import pytest

from mini_engine.model import cpu_kernels
from mini_engine.model.cpu_kernels import CpuKernels
from tests.not_run import not_run


@pytest.fixture(scope="session")
def kernels() -> CpuKernels:
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
