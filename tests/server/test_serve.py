"""`mini-engine serve --executor mock`, as a process: real sockets, the openai client, floods, clients that leave."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.executor.mock import mock_generate
from mini_engine.render.model_files import ModelFiles
from mini_engine.server.protocol import MAX_ANSWERS
from tests.server.fake import parse_sse
from tests.server.serving import MESSAGES, Served, serving
from tests.server.test_fields import JSON, NAMES

VOCAB = 49152


def test_openai_client_both_ways(server: Served) -> None:
    assert server.client is not None
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="x", http_client=openai.DefaultHttpxClient(trust_env=False), max_retries=0
    ) as client:
        asked: Any = {"model": server.model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        whole = client.chat.completions.create(**asked)
        text, logprobs, finish = "", [], []
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                logprobs += (choice.logprobs and choice.logprobs.content) or []
                finish.append(choice.finish_reason)
            usage = chunk.usage
        assert text == whole.choices[0].message.content and finish[-1] == "length" and not any(finish[:-1])
        assert usage and whole.usage and usage.completion_tokens == whole.usage.completion_tokens == 12
        assert whole.choices[0].logprobs and logprobs == whole.choices[0].logprobs.content
        completion = client.completions.create(model=server.model, prompt=["a", "b c"], max_tokens=3, n=2, temperature=1)
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        with pytest.raises(openai.BadRequestError, match="colour"):
            client.chat.completions.create(**asked, extra_body={"colour": "red"})


def test_tokens_are_the_mock_devices(server: Served) -> None:
    """Whatever batch, chunk or block table they went through. Prompts as ids, several, longer than a step takes."""
    prompts = [[(7 * i + j) % 40_000 + 100 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 300, 700))]
    answer = server.post("/v1/completions", prompt=prompts, max_tokens=20, return_token_ids=True, ignore_eos=True).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [mock_generate(prompt, 20, VOCAB) for prompt in prompts]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompts


def test_stop_string_and_stop_token(server: Served) -> None:
    asked = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    whole = server.post("/v1/completions", **asked).json()["choices"][0]
    stop = whole["text"][10:14]
    expected = whole["text"][: whole["text"].index(stop)]
    for stream in (False, True):
        response = server.post("/v1/completions", **asked, stop=[stop], stream=stream)
        choices = [c["choices"][0] for c in parse_sse(response.content)] if stream else response.json()["choices"]
        assert "".join(c["text"] for c in choices) == expected
        assert choices[-1]["finish_reason"] == "stop" and choices[-1]["stop_reason"] == stop
        assert all(c["text"] for c in choices[:-1])
    token = whole["token_ids"][4]
    stopped = server.post("/v1/completions", **asked, stop_token_ids=[token]).json()["choices"][0]
    assert stopped["stop_reason"] == token and stopped["token_ids"] == whole["token_ids"][: whole["token_ids"].index(token) + 1]
    server.wait_idle()


def test_chat_options_reach_the_template(server: Served) -> None:
    base = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    prompts = [
        server.post("/v1/chat/completions", **base, **more).json()["choices"][0]["prompt_token_ids"]
        for more in (
            {},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True},
            {"chat_template": "{{ messages[0].content }}{{ mark }}", "chat_template_kwargs": {"mark": "!"}},
        )
    ]
    assert len({tuple(prompt) for prompt in prompts}) == 4 and prompts[0][: len(prompts[1])] == prompts[1]
    assert server.post("/v1/chat/completions", **base, continue_final_message=True).json()["error"]["param"] == "continue_final_message"
    for wrong in (
        {"chat_template": "{% if"},
        {"chat_template": "{{ '%c'|format(55555) }}"},
        {"chat_template_kwargs": {"chat_template": ""}},
    ):
        assert server.post("/v1/chat/completions", **base, **wrong).status_code == 400, wrong


def test_too_long_names_both_numbers(server: Served) -> None:
    limit = server.get("/v1/models").json()["data"][0]["max_model_len"]
    response = server.post("/v1/completions", prompt=[9] * (limit + 5), max_tokens=1)
    assert response.status_code == 400
    assert str(limit) in response.json()["error"]["message"] and str(limit + 5) in response.json()["error"]["message"]
    response = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 2_000_000}])
    assert response.status_code == 400 and str(limit) in response.json()["error"]["message"]


def test_one_request_cannot_ask_for_any_number_of_answers(server: Served) -> None:
    asked = {"prompt": [[9]] * (MAX_ANSWERS // 2), "max_tokens": 1, "temperature": 1}
    assert len(server.post("/v1/completions", **asked, n=2).json()["choices"]) == MAX_ANSWERS
    too_many, too_large = f"at most {MAX_ANSWERS} answers (prompts times n), got", f"less than or equal to {MAX_ANSWERS}"
    for path, body, said in (
        ("/v1/completions", asked | {"n": 3}, too_many),
        ("/v1/completions", asked | {"prompt": ["a"] * (MAX_ANSWERS + 1)}, too_many),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": MAX_ANSWERS + 1}, too_large),
    ):
        error = server.post(path, **body).json()["error"]
        assert error["param"] == "n" and said in error["message"]
    server.wait_idle()


def test_the_servers_limit_is_the_engines() -> None:
    """KV for 63 tokens: admission, /v1/models and the error use what the engine's READY said."""
    with serving("--num-gpu-blocks-override", "5", "--served-model-name", "small", "--api-key", "k") as small:
        assert small.client is not None
        small.client.headers["authorization"] = "Bearer k"
        (card,) = small.get("/v1/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == ("small", 64) and small.model == "small"
        assert small.post("/v1/completions", prompt=[9] * 63, max_tokens=1).status_code == 200
        assert "64" in small.post("/v1/completions", prompt=[9] * 64, max_tokens=1).json()["error"]["message"]
        choice = small.post("/v1/completions", prompt=[9] * 60, max_tokens=100, ignore_eos=True).json()["choices"][0]
        assert choice["finish_reason"] == "length"


@settings(max_examples=150)
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    more=st.dictionaries(st.sampled_from(sorted(set(NAMES) - {"n", "prompt"})) | st.text(max_size=5), JSON, max_size=3),
    prompt=st.text(max_size=8) | st.lists(st.integers(-1, 60_000), max_size=5) | JSON,
)
def test_no_body_makes_the_server_fail(server: Served, path: str, more: dict[str, Any], prompt: Any) -> None:
    subject = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    response = server.post(path, **({"max_tokens": 2} | subject | more))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


async def post_raw(server: Served, body: dict[str, Any]) -> bytes:
    """The answer's body over a connection of its own; httpx needs ten times longer for a thousand of them."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n"), head
    answer = b""
    while size := int(await reader.readline(), 16):
        answer += (await reader.readexactly(size + 2))[:-2]
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.anyio
async def test_a_thousand_at_once(server: Served) -> None:
    """Every one finishes, with exactly one terminal chunk each, and memory does not keep what is over."""

    async def one(i: int) -> None:
        body = {"prompt": [100 + i, 200 + i], "max_tokens": 8, "ignore_eos": True, "stream": True, "return_token_ids": True}
        choices = [chunk["choices"][0] for chunk in parse_sse(await post_raw(server, body))]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"] and choices[-1]["finish_reason"]
        assert [t for c in choices for t in c["token_ids"]] == mock_generate([100 + i, 200 + i], 8, VOCAB)

    processes = [psutil.Process(server.process.pid), server.core]
    memory = []
    for _ in range(2):
        await asyncio.gather(*(one(i) for i in range(1000)))
        memory.append([process.memory_info().rss for process in processes])
    server.wait_idle()
    assert all(new < old + 30e6 for old, new in zip(*memory, strict=True)), memory


# ── clients that leave ──────────────────────────────────────────────────────────────────────────────────


class Leaver:
    """A client with a plain socket, which can be closed at any moment."""

    def __init__(self, server: Served, **body: Any) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        raw = json.dumps({"temperature": 1, "n": 4, "max_tokens": 8000, "ignore_eos": True} | body).encode()
        self.socket.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)

    def read(self) -> bytes:
        return self.socket.recv(65536)


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Served]:
    with serving("--mock-step-ms", "20", "--max-num-batched-tokens", "32", "--max-num-seqs", "4") as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["at once", "prefilling", "decoding", "queued"])
def test_leaving_frees_everything(slow_server: Served, phase: str, stream: bool) -> None:
    server, occupant = slow_server, None
    match phase:
        case "at once":
            leaver = Leaver(server, prompt=[9], stream=stream)
        case "prefilling":  # 7,000 tokens take 200 steps of 20 ms
            leaver = Leaver(server, prompt=[7 + stream] * 7000, stream=stream)
            server.wait_gauges(num_requests_running=1)
        case "decoding":
            leaver = Leaver(server, prompt=[9], stream=stream)
            if stream:
                assert b"200 OK" in leaver.read()
            server.wait_gauges(num_requests_running=4)
        case "queued":
            occupant = Leaver(server, prompt=[8], stream=True)
            server.wait_gauges(num_requests_running=4)
            leaver = Leaver(server, prompt=[9], stream=stream)
            server.wait_gauges(num_requests_waiting=4)
    leaver.socket.close()
    if occupant is not None:
        server.wait_gauges(num_requests_running=4, num_requests_waiting=0)
        occupant.socket.close()
    server.wait_idle()


def test_model_files_agree() -> None:
    """VOCAB above is the default model's."""
    from mini_engine.model.default_model import prepare

    assert ModelFiles.load(prepare(weights=False)).vocab_size == VOCAB
