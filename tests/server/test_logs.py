"""What a running server writes to its log, and the options that say less or more. Its statistics line: tests/observe/test_stat_line.py."""

import re
import socket

import pytest

from tests.interop import peers
from tests.server.serving import MESSAGES, Served, serving, wait_until

MOCK = ("--executor", "mock")
ACCESS = r"\d\d:\d\d:\d\d\.\d{3} \[api\] INFO uvicorn\.access: 127\.0\.0\.1:\d+ - "


def test_a_line_per_http_request_not_per_token(server: Served) -> None:
    def lines() -> list[str]:
        return [line for line in server.errors().splitlines() if "/logged" in line or "uvicorn.error" in line]

    assert server.post("/v1/completions?x=/logged", prompt=[9], max_tokens=40, stream=True, ignore_eos=True).status_code == 200
    assert server.get("/no/such%0Aroute/logged").status_code == 404
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as sock:
        sock.sendall(b"no HTTP\r\n\r\n")
        assert b"400" in sock.recv(1000)
    generation, unknown, warning = wait_until(lambda: (found := lines())[2:] and found, "three lines")
    assert re.fullmatch(ACCESS + r'"POST /v1/completions\?x=/logged HTTP/1\.1" 200', generation)
    assert re.fullmatch(ACCESS + r'"GET /no/such%0Aroute/logged HTTP/1\.1" 404', unknown)
    assert "[api] WARNING uvicorn.error: " in warning  # in our format too
    assert "Received request" not in server.errors()  # unless asked for


@pytest.mark.parametrize("processes", [(), ("--api-server-count", "2")])
def test_options(processes: tuple[str, ...]) -> None:
    """As they reach the one process, or the children that serve."""
    with serving("--disable-uvicorn-access-log", "--enable-log-requests", *processes) as served:
        params = {"max_tokens": 3, "temperature": 0, "stop": ["a\nb"]}
        assert served.post("/v1/chat/completions", messages=MESSAGES, **params, request_id="mine").status_code == 200
        tag = r"\[api [01]\]" if processes else r"\[api\]"
        said = re.search(rf"^\S+ {tag} INFO \S+: (Received request .*)$", served.errors(), re.MULTILINE)
        assert said and "chatcmpl-mine" in said[1] and "'max_tokens': 3" in said[1] and re.search(r"prompt tokens: \d\d$", said[1])
        assert "uvicorn.access" not in served.errors()


@pytest.mark.interop
def test_options_reach_vllm_rs() -> None:
    with peers.serve("rust", *MOCK, "--enable-log-requests", "--disable-log-stats", "--disable-uvicorn-access-log") as served:
        assert served.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
