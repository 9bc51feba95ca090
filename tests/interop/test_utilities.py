"""Utility calls of vLLM's own front-ends to our engine: what it has is answered, what it lacks fails, and nothing hangs or dies of it."""

from __future__ import annotations

import pytest

from tests.interop import peers
from tests.interop.cases import TEXT
from tests.interop.peers import MOCK, NAME

ANSWERED = [("POST", "/reset_prefix_cache"), ("POST", "/reset_mm_cache"), ("GET", "/is_sleeping"), ("GET", "/is_paused")]
FAIL = [("POST", "/sleep?level=1"), ("POST", "/wake_up"), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/collective_rpc")]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(peers.vllm_rs, id="vllm-rs"),
        pytest.param(peers.stock_vllm, id="vllm", marks=[pytest.mark.interop, pytest.mark.timeout(180)]),
    ],
)
def test_every_utility_gets_an_answer(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # shows the control routes
    with peers.stock_front_end([command()], *MOCK) as server:
        for method, path in ANSWERED:
            response = server.client.request(method, path, timeout=10)
            assert response.status_code == 200, (path, response.text)
            assert "is_" not in path or list(response.json().values()) == [False]
        for method, path in FAIL:
            body, alone = {"method": "x"} if "rpc" in path else None, {"connection": "close"}  # vLLM closes it anyway, after a 500
            response = server.client.request(method, path, json=body, headers=alone, timeout=10)
            assert 500 <= response.status_code < 600, (path, response.text)
        body = {"model": NAME, "prompt": "still there?", "max_tokens": 3}
        assert server.post(TEXT, body).json()["usage"]["completion_tokens"] == 3
