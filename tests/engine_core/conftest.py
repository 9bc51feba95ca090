"""A model directory for the mock device."""

from pathlib import Path

import pytest

from tests.engine_core.harness import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))
