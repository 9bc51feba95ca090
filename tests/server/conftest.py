"""One real server for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.server.serving import Served, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with serving(
        "--mock-step-ms", "2", "--max-num-batched-tokens", "256", "--max-num-seqs", "256", "--trust-request-chat-template"
    ) as served:
        yield served
