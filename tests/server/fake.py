"""A fake AsyncLLM (one token is one character), an app over it, and a strict reader of event streams."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
from fastapi import FastAPI

from mini_engine.config import ServerConfig
from mini_engine.exceptions import EngineDeadError, VLLMValidationError
from mini_engine.outputs import CompletionOutput, Logprob, RequestOutput
from mini_engine.render.chat_template import normalise_messages
from mini_engine.sampling_params import RequestOutputKind, SamplingParams
from mini_engine.server.app import build_app
from mini_engine.server.service import Service

MODEL = "fake-model"
#: (tokens, text) per step: text lags the tokens while a stop string may be coming, and catches up
STEPS = [("Hé", "Hé"), ('l"\n', 'l"\n'), ("lo", ""), (" ", "lo "), ("😀\u2028", "😀\u2028")]
TEXT = "".join(text for _, text in STEPS)
TOKENS = [ord(c) for tokens, _ in STEPS for c in tokens]


def logprobs_of(tokens: list[int], k: int) -> list[dict[int, Logprob]]:
    """Odd tokens were sampled against the odds (rank k + 5), even ones are the most likely."""
    positions = []
    for token in tokens:
        rank = k + 5 if token % 2 else 1
        others = [r for r in range(1, k + 1) if r != rank]
        sampled = {token: Logprob(-9.0 if token % 2 else -0.5, rank, chr(token))}
        positions.append(sampled | {100_000 + r: Logprob(-float(r), r, f"<{r}>") for r in others})
    return positions


class FakeTokenizer:
    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class FakeRenderer:
    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.calls: list[dict[str, Any]] = []
        self.gate: asyncio.Event | None = None

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> tuple[str, list[int]]:
        messages = normalise_messages(messages)
        self.calls.append({"messages": messages, **options})
        if self.gate is not None:
            await self.gate.wait()
        text = "|".join(m["content"] for m in messages)
        return text, [ord(c) for c in text] or [0]

    async def tokenize_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.calls.append({"text": text, "add_special_tokens": add_special_tokens})
        return [1] * add_special_tokens + [ord(c) for c in text]


class FakeEngine:
    """Yields STEPS for every answer. `gates[i]` is awaited before step i; `fail_at` maps a step to what happens instead."""

    def __init__(self) -> None:
        self.renderer = FakeRenderer()
        self.errored = False
        self.dead_error: EngineDeadError | None = None
        self.requests: list[dict[str, Any]] = []
        self.open: set[str] = set()
        self.aborted: list[str] = []
        self.steps = STEPS
        self.gates: dict[int, asyncio.Event] = {}
        self.fail_at: dict[int, Exception | str] = {}
        self.stuck = False
        self.started = asyncio.Event()

    async def ping(self, timeout: float) -> None:
        if self.dead_error is not None:
            raise self.dead_error
        if self.stuck:
            raise TimeoutError

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(
            {"ids": prompt_token_ids, "params": params, "id": request_id, "prompt": prompt, "priority": priority, "salt": cache_salt}
        )
        if len(prompt_token_ids) > 1000:
            raise VLLMValidationError(f"the prompt has {len(prompt_token_ids)} tokens, the limit is 1000", parameter="prompt")
        self.open.add(request_id)
        self.started.set()
        finished = False
        try:
            whole = [CompletionOutput(i, "", [], logprobs=[]) for i in range(params.n)]
            for step, (tokens, text) in enumerate(self.steps):
                if step in self.gates:
                    await self.gates[step].wait()
                failure = self.fail_at.get(step)
                if isinstance(failure, Exception):
                    raise failure
                ids = [ord(c) for c in tokens]
                last = step == len(self.steps) - 1
                reason = "error" if failure else ("stop" if last else None)
                for completion in whole:
                    logprobs = logprobs_of(ids, params.logprobs) if params.logprobs is not None else None
                    delta = CompletionOutput(completion.index, text, ids, None, logprobs, reason)
                    completion.text += text
                    completion.token_ids += ids
                    completion.logprobs = (completion.logprobs or []) + logprobs if logprobs else completion.logprobs
                    completion.finish_reason = reason
                    if params.output_kind is RequestOutputKind.DELTA:
                        done = reason is not None and completion.index == params.n - 1
                        yield RequestOutput(request_id, prompt, prompt_token_ids, [delta], done, num_cached_tokens=0, error=failure)
                if failure:
                    break
            if params.output_kind is RequestOutputKind.FINAL_ONLY:
                yield RequestOutput(request_id, prompt, prompt_token_ids, whole, True, num_cached_tokens=0, error=failure)
            finished = True
        finally:
            self.open.discard(request_id)
            if not finished:
                self.aborted.append(request_id)


def make_app(engine: FakeEngine | None = None, **options: Any) -> tuple[FakeEngine, FastAPI]:
    engine = engine or FakeEngine()
    config = ServerConfig(**{k: options.pop(k) for k in list(options) if k in ServerConfig.__slots__})
    app = build_app(Service(engine, config, MODEL, 1000, **options))  # type: ignore[arg-type]
    return engine, app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://test", timeout=20)


def chat_body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}


def completion_body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **more}


def parse_sse(raw: bytes) -> Iterator[Any]:
    """Each event's JSON; asserts that the bytes are exactly `data: <one line>` and an empty line, [DONE] last and once."""
    assert raw.endswith(b"\n\n")
    events = raw[:-2].split(b"\n\n")
    assert events[-1] == b"data: [DONE]"
    for event in events[:-1]:
        assert event.startswith(b"data: {")
        assert b"\n" not in event and b"\r" not in event
        yield json.loads(event.removeprefix(b"data: "))


class AsgiClient:
    """Drives the app message by message, so that a test decides when the client leaves."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any], complete: bool = True, method: str = "POST") -> None:
        self.messages: list[dict[str, Any]] = []
        self.sent = asyncio.Event()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": not complete})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        self.sent.set()

    def complete(self) -> None:
        self._inbox.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)


@asynccontextmanager
async def asgi_client(app: FastAPI, path: str, body: dict[str, Any], complete: bool = True) -> Any:
    client = AsgiClient(app, path, body, complete)
    try:
        yield client
    finally:
        client.task.cancel()
        with suppress(asyncio.CancelledError):
            await client.task
