"""Shape of the answers: a golden transcript, stream = whole, and what OpenAI's own client makes of both."""

import asyncio
import json
from collections.abc import AsyncGenerator
from itertools import groupby
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.outputs import CompletionOutput, RequestOutput
from mini_engine.server.chat import ChatFormatter
from mini_engine.server.protocol import ChatCompletionRequest, parse_request
from mini_engine.server.respond import ANSWERS_AT_ONCE, _in_parts
from mini_engine.server.service import Service
from tests.server.fake import (
    MODEL,
    TEXT,
    TOKENS,
    FakeEngine,
    chat_body,
    client_of,
    completion_body,
    logprobs_of,
    make_app,
    parse_sse,
)

pytestmark = pytest.mark.anyio

GOLDEN = """\
data: {"id":"chatcmpl-mine","object":"chat.completion.chunk","created":0,"model":"fake-model","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-mine","object":"chat.completion.chunk","created":0,"model":"fake-model","choices":[{"index":0,"delta":{"content":"Hé"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-mine","object":"chat.completion.chunk","created":0,"model":"fake-model","choices":[{"index":0,"delta":{"content":"l\\"\\n"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-mine","object":"chat.completion.chunk","created":0,"model":"fake-model","choices":[{"index":0,"delta":{"content":"lo "},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-mine","object":"chat.completion.chunk","created":0,"model":"fake-model","choices":[{"index":0,"delta":{"content":"😀\u2028"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-mine","object":"chat.completion.chunk","created":0,"model":"fake-model","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":null}

data: {"id":"chatcmpl-mine","object":"chat.completion.chunk","created":0,"model":"fake-model","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":10,"total_tokens":12,"prompt_tokens_details":{"cached_tokens":0}}}

data: [DONE]

"""  # noqa: E501


async def post(path: str, body: dict[str, Any], engine: FakeEngine | None = None) -> bytes:
    _, app = make_app(engine)
    async with client_of(app) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream" if body.get("stream") else "application/json")
    return response.content


async def test_golden_stream() -> None:
    raw = (await post("/v1/chat/completions", chat_body(stream=True, request_id="mine", stream_options={"include_usage": True}))).decode()
    created = json.loads(raw.split("\n\n", 1)[0].removeprefix("data: "))["created"]
    assert raw.replace(f'"created":{created}', '"created":0') == GOLDEN


async def test_every_chunk_is_openais_shape() -> None:
    """Role first, finish_reason null until its own last chunk, no empty content, usage only when asked for."""
    chunks = list(parse_sse(await post("/v1/chat/completions", chat_body(stream=True, n=3, temperature=1))))
    for index, own in groupby(sorted((c["choices"][0] for c in chunks), key=lambda c: c["index"]), key=lambda c: c["index"]):
        first, *middle, last = own
        assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
        assert all(c["delta"].keys() == {"content"} and c["delta"]["content"] and c["finish_reason"] is None for c in middle)
        assert last["delta"] == {} and last["finish_reason"] == "stop"
        assert "".join(c["delta"]["content"] for c in middle) == TEXT, index
    assert all(c["id"] == chunks[0]["id"] and c["object"] == "chat.completion.chunk" and "usage" not in c for c in chunks)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("k", [None, 0, 2])
@pytest.mark.parametrize("ids", [False, True])
async def test_chat_stream_equals_whole(n: int, k: int | None, ids: bool) -> None:
    asked = chat_body(n=n, return_token_ids=ids) | ({} if k is None else {"logprobs": True, "top_logprobs": k})
    whole = json.loads(await post("/v1/chat/completions", asked))
    chunks = list(parse_sse(await post("/v1/chat/completions", asked | {"stream": True, "stream_options": {"include_usage": True}})))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 2,
        "completion_tokens": 10 * n,
        "total_tokens": 2 + 10 * n,
        "prompt_tokens_details": None,
    }
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"] == TEXT
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        if k is None:
            assert choice["logprobs"] is None and all(c["logprobs"] is None for c in own)
        else:
            content = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"] and len(content) == len(TOKENS)
            for entry, token in zip(content, TOKENS, strict=True):
                assert entry["token"] == chr(token) and bytes(entry["bytes"]).decode() == chr(token)
                tops = [top["logprob"] for top in entry["top_logprobs"]]
                assert len(tops) == k and tops == sorted(tops, reverse=True)
        if ids:
            assert [t for c in own for t in c.get("token_ids", [])] == choice["token_ids"] == TOKENS
            assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"] == [104, 105]


@pytest.mark.parametrize("k", [None, 0, 2])
@pytest.mark.parametrize("prompt", ["ab", ["ab", "c", "def"], [97, 98], [[97], [98, 99]]])
async def test_completion_stream_equals_whole(prompt: Any, k: int | None) -> None:
    asked = completion_body(prompt=prompt, n=2, logprobs=k, add_special_tokens=False, return_token_ids=True)
    whole = json.loads(await post("/v1/completions", asked))
    chunks = list(parse_sse(await post("/v1/completions", asked | {"stream": True, "stream_options": {"include_usage": True}})))
    prompts = 1 if prompt in ("ab", [97, 98]) else len(prompt)
    assert [c["index"] for c in whole["choices"]] == list(range(2 * prompts))
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == sum(map(len, prompt)) if prompts > 1 else 2
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"] == TEXT
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"] and all("prompt_token_ids" not in c for c in own[1:])
        assert [t for c in own for t in c["token_ids"]] == choice["token_ids"] == TOKENS
        if k is not None:
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [x for c in own if c["logprobs"] for x in c["logprobs"][name]] == choice["logprobs"][name]
            assert choice["logprobs"]["text_offset"] == list(range(len(TOKENS)))


async def test_echo_puts_the_prompt_before_each_answer() -> None:
    for prompt in (["ab", "c"], [[97, 98], [99]]):
        body = completion_body(prompt=prompt, echo=True, add_special_tokens=False)
        assert [c["text"] for c in json.loads(await post("/v1/completions", body))["choices"]] == ["ab" + TEXT, "c" + TEXT]
        chunks = [c["choices"][0] for c in parse_sse(await post("/v1/completions", body | {"stream": True}))]
        for index, start in enumerate(("ab", "c")):
            assert "".join(c["text"] for c in chunks if c["index"] == index) == start + TEXT


@given(data=st.data(), detailed=st.booleans())
@settings(max_examples=60)
def test_any_splitting_and_merging_gives_the_same_answer(data: Any, detailed: bool) -> None:
    """Back-pressure merges outputs, steps split them: text, logprobs and ids of all chunks together never change."""
    body = chat_body(stream=True, logprobs=detailed, return_token_ids=detailed, top_logprobs=2 if detailed else 0)
    request = parse_request(ChatCompletionRequest, json.dumps(body).encode())
    service = Service(FakeEngine(), None, MODEL, 100)  # type: ignore[arg-type]
    formatter = ChatFormatter(request, service, "x")
    position, raw = 0, b""
    while position < len(TOKENS):
        step = TOKENS[position : position + data.draw(st.integers(1, 4))]
        position += len(step)
        logprobs = logprobs_of(step, 2) if detailed else None
        reason = "length" if position == len(TOKENS) else None
        completion = CompletionOutput(0, "".join(map(chr, step)), step, None, logprobs, reason)
        raw += formatter.events(RequestOutput("chatcmpl-x", None, [1], [completion], reason is not None))
    choices = [chunk["choices"][0] for chunk in parse_sse(raw + b"data: [DONE]\n\n")]
    assert "".join(c["delta"].get("content", "") for c in choices) == "".join(map(chr, TOKENS))
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    if detailed:
        assert [t for c in choices for t in c.get("token_ids", [])] == TOKENS
        assert [entry["token"] for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]] == list(map(chr, TOKENS))


async def test_openai_client_reads_both() -> None:
    _, app = make_app()
    async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=client_of(app), max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=1)
        assert answer.choices[0].message.content == TEXT and answer.usage and answer.usage.completion_tokens == 10
        assert answer.choices[0].logprobs and len(answer.choices[0].logprobs.content or []) == 10
        text, usage = "", None
        stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage
        assert text == TEXT and usage == answer.usage
        completion = await client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
        assert [model.id async for model in await client.models.list()] == [MODEL]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=messages, extra_body={"colour": 1})
        assert caught.value.param == "colour"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=messages)


async def test_overlay_encodes_every_event() -> None:
    payloads: list[bytes | str] = []

    def encode_event(payload: bytes | str) -> bytes:
        payloads.append(payload)
        return b"data: " + (payload if isinstance(payload, bytes) else payload.encode()) + b"\n\n"

    _, app = make_app(encode_event=encode_event)
    async with client_of(app) as client:
        raw = (await client.post("/v1/chat/completions", json=chat_body(stream=True))).content
    assert len(payloads) == raw.count(b"\n\n") == 7 and payloads[-1] == b"[DONE]"


async def test_an_echo_that_is_too_long_is_refused_undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding takes seconds, on the event loop."""
    engine, app = make_app()
    decoded: list[int] = []
    monkeypatch.setattr(engine.renderer.tokenizer, "decode", lambda ids: decoded.append(len(ids)) or "text")
    async with client_of(app) as client:
        response = await client.post("/v1/completions", json=completion_body(prompt=[[7] * 999, [7] * 100_000], echo=True))
    assert response.status_code == 400 and "100000 tokens" in response.text and decoded == [999]


async def test_many_answers_leave_the_loop_its_turns() -> None:
    """Rendering them is work for seconds when each has logprobs; others have their turns meanwhile, and nothing is lost or moved."""

    async def outputs() -> AsyncGenerator[RequestOutput, None]:
        yield RequestOutput("r", None, [1], [CompletionOutput(i, "x", [1]) for i in range(3 * ANSWERS_AT_ONCE + 1)], True)
        yield RequestOutput("r", None, [1], [], True)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turns, counting = 0, asyncio.create_task(count())
    parts = [[c.index for c in part.outputs] async for part in _in_parts(outputs())]
    counting.cancel()
    assert [index for part in parts for index in part] == list(range(3 * ANSWERS_AT_ONCE + 1))
    assert [len(part) for part in parts] == [ANSWERS_AT_ONCE] * 3 + [1, 0] and turns >= 3
