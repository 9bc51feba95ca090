"""examples/small_frontend.py: an independent front-end, from the wire's description alone, over our engine."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import httpx
import pytest

from mini_engine.executor.mock import mock_generate
from tests.interop import peers
from tests.interop.peers import running

FILE = Path(__file__).parents[2] / "examples/small_frontend.py"
VOCAB = 49152


def test_it_imports_nothing_of_ours_and_is_small() -> None:
    source = FILE.read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"msgpack", "zmq"}
    assert len(source.splitlines()) < 180


@pytest.fixture(scope="module")
def served():
    with running(sys.executable, str(FILE), "--port", "0", "--rpc-port", "*") as front_end:
        rpc_port = front_end.wait_for(r"engine at tcp://127.0.0.1:(\d+)")[1]
        with peers.our_engine(rpc_port, *peers.MOCK) as engine:
            url = front_end.wait_for(r"ready: (\S+)")[1]
            with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
                yield client, engine


def lines(response: httpx.Response) -> tuple[list[int], str, object]:
    parts = [json.loads(line) for line in response.text.splitlines()]
    assert all(part["finish_reason"] is None for part in parts[:-1])
    return [token for part in parts for token in part["token_ids"]], parts[-1]["finish_reason"], parts[-1]["stop_reason"]


def test_tokens_in_tokens_out(served) -> None:
    client, _ = served
    for prompt in ([504, 3575, 282], [9] * 40, list(range(100, 400))):
        expected = mock_generate(prompt, 8, VOCAB)
        assert lines(client.post("/generate", json={"prompt_token_ids": prompt, "max_tokens": 8})) == (expected, "length", None)
        stop = expected[3]
        stopped = lines(client.post("/generate", json={"prompt_token_ids": prompt, "max_tokens": 8, "stop_token_ids": [stop]}))
        assert stopped == (expected[: expected.index(stop) + 1], "stop", stop)
    for bad in ({}, {"prompt_token_ids": []}, {"prompt_token_ids": ["a"]}, {"prompt_token_ids": [1], "max_tokens": 99999}):
        assert client.post("/generate", json=bad).status_code == 400


def test_a_client_that_leaves_and_an_engine_that_stops(served) -> None:
    client, engine = served
    with client.stream("POST", "/generate", json={"prompt_token_ids": [9], "max_tokens": 8000}) as response:
        next(response.iter_lines())
    assert lines(client.post("/generate", json={"prompt_token_ids": [9], "max_tokens": 2}))[1] == "length"
    with client.stream("POST", "/generate", json={"prompt_token_ids": [9], "max_tokens": 8000}) as response:
        left = response.iter_lines()
        next(left)
        engine.popen.terminate()
        assert json.loads(list(left)[-1])["finish_reason"] == "abort"  # the engine said it before it went
    while (late := client.post("/generate", json={"prompt_token_ids": [9]})).status_code == 200:  # the engine's last frame is on its way
        assert lines(late)[1] in ("abort", "error")
    assert late.status_code == 400
