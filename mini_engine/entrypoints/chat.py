"""`mini-engine chat`: talk to the model in the terminal, with tokens per second after each answer.

With --url to a running server, over HTTP like any client. Without, and without an option for an engine, to a server of ours on the
default port if one of this version is healthy there. Else over an engine of its own: AsyncLLM and an EngineCore child.
Answers go to stdout, everything else to stderr, so `echo QUESTION | mini-engine chat` prints the answer alone. Ctrl-C ends an answer;
Ctrl-C or Ctrl-D at the prompt ends the chat.

A whole request path, seen from its ends.    vLLM: entrypoints/cli/openai.py::ChatCommand
"""

import asyncio
import contextlib
import json
import logging
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import httpx
import uvloop

import mini_engine
from mini_engine.config import EngineConfig, ServerConfig
from mini_engine.exceptions import EngineDeadError, EngineGenerateError, VLLMValidationError
from mini_engine.observe import logging as observe_logging
from mini_engine.sampling_params import RequestOutputKind, SamplingParams

Message = dict[str, str]

TEMPERATURE = 0.2  #: where the model names none: at 1.0, the API's default, a small model talks nonsense
PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    url: str | None
    api_key: str | None
    system: str | None
    temperature: float | None
    max_tokens: int | None
    chat_template: str | None

    def sampling(self, model_defaults: dict[str, Any]) -> dict[str, Any]:
        asked = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {"temperature": TEMPERATURE} | model_defaults | {name: value for name, value in asked.items() if value is not None}

    def sampling_params(self, model_defaults: dict[str, Any]) -> SamplingParams:
        """Raises VLLMValidationError for a value out of range."""
        return SamplingParams(**{"max_tokens": None, "output_kind": RequestOutputKind.DELTA} | self.sampling(model_defaults))


@dataclass(slots=True)
class Usage:
    tokens: int = 0  #: of the answer


class Source(Protocol):
    """Where answers come from."""

    def answer(self, messages: list[Message], usage: Usage) -> AsyncGenerator[str, None]:
        """Text as it comes; `usage` is complete when it ends."""

    async def close(self) -> None: ...


class ServerSource:
    """A server, ours or any that speaks OpenAI's chat completions."""

    def __init__(self, options: Options) -> None:
        assert options.url is not None
        headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        base_url = options.url.rstrip("/").removesuffix("/v1")
        try:
            self.client = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=httpx.Timeout(10, read=None))
        except (httpx.InvalidURL, ValueError) as e:
            raise VLLMValidationError(f"--url {options.url}: {e}", parameter="url") from e
        self.body = {"stream": True, "stream_options": {"include_usage": True}} | options.sampling({})

    async def connect(self) -> str:
        """The name of the server's first model."""
        try:
            response = await self.client.get("/v1/models")
            if response.status_code == 401:
                raise VLLMValidationError(f"the server at {self.client.base_url} needs --api-key, the right one", parameter="api_key")
            response.raise_for_status()
            self.body["model"] = response.json()["data"][0]["id"]
        except VLLMValidationError:
            raise
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as e:
            raise VLLMValidationError(
                f"no OpenAI server at {self.client.base_url}: {e!r}; --url is like http://127.0.0.1:8000", parameter="url"
            ) from e
        return str(self.body["model"])

    async def answer(self, messages: list[Message], usage: Usage) -> AsyncGenerator[str, None]:
        try:
            async with self.client.stream("POST", "/v1/chat/completions", json=self.body | {"messages": messages}) as response:
                if response.status_code != 200:
                    raise EngineGenerateError(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
                pending = b""  # lines by hand: httpx's iterator would also split at line separators inside the text
                async for data in response.aiter_bytes():
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: ") and line != b"data: [DONE]":
                            chunk = json.loads(line.removeprefix(b"data: "))
                            if "error" in chunk:
                                raise EngineGenerateError(chunk["error"]["message"])
                            usage.tokens = (chunk.get("usage") or {}).get("completion_tokens", usage.tokens)
                            for choice in chunk["choices"]:
                                if text := choice["delta"].get("content"):
                                    yield text
        except httpx.HTTPError as e:
            raise EngineDeadError(f"the server is gone: {e!r}") from e

    async def close(self) -> None:
        await self.client.aclose()


class EngineSource:
    """An engine of our own."""

    def __init__(self, front_end: Any, defaults: dict[str, Any], options: Options) -> None:
        self.front_end = front_end
        self.params = options.sampling_params(defaults)

    async def answer(self, messages: list[Message], usage: Usage) -> AsyncGenerator[str, None]:
        engine = self.front_end.engine
        _, prompt_token_ids = await engine.renderer.render_chat(messages)
        async with aclosing(engine.generate(prompt_token_ids, self.params, uuid.uuid4().hex)) as outputs:
            async for output in outputs:
                (completion,) = output.outputs
                usage.tokens += len(completion.token_ids)
                if completion.finish_reason == "error":
                    raise EngineGenerateError(output.error or "the engine failed; see its log above")
                yield completion.text

    async def close(self) -> None:
        await self.front_end.shutdown()


def run_chat(engine_config: EngineConfig, options: Options) -> int:
    """The exit status. Raises VLLMValidationError or EngineDeadError, for the command line to tell."""
    observe_logging.setup("chat", logging.WARNING)
    options.sampling_params({})  # what is wrong with them is said before an engine is started
    url = options.url or _running_server(engine_config, options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        source, name = _open(runner, engine_config, replace(options, url=url))
        try:
            _say(f"{name}. Ctrl-C ends an answer, Ctrl-D the chat.")
            messages: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
            for question in _questions():
                asked = [*messages, {"role": "user", "content": question}]
                try:
                    text = runner.run(_print_answer(source, asked))
                except KeyboardInterrupt:
                    _say("[stopped]")
                except (VLLMValidationError, EngineGenerateError, UnicodeError) as e:
                    _say(f"error: {e}")
                else:
                    messages = [*asked, {"role": "assistant", "content": text}]
        finally:
            runner.run(source.close())
    return 0


def _running_server(engine_config: EngineConfig, options: Options) -> str | None:
    """The server on the default port, when nothing was asked for that it might not have, and it is of this version and healthy."""
    if replace(engine_config, check=False) != EngineConfig() or options.chat_template is not None:
        return None
    default = ServerConfig()
    url = f"http://{default.host}:{default.port}"
    try:
        with httpx.Client(base_url=url, timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
            if client.get("/version").json() != {"version": mini_engine.__version__} or client.get("/health").status_code != 200:
                return None
    except (httpx.HTTPError, ValueError):
        return None
    _say(f"using the server at {url}; an engine option, say --seed 7, gives the chat an engine of its own")
    return url


def _open(runner: asyncio.Runner, engine_config: EngineConfig, options: Options) -> tuple[Source, str]:
    if options.url is not None:
        server = ServerSource(options)
        return server, runner.run(server.connect())
    from mini_engine.entrypoints.frontend import connect, launch, prepare

    _say("starting an engine …")
    prepared = prepare(engine_config, ServerConfig(chat_template=options.chat_template), weights=engine_config.executor != "mock")
    launched = launch(prepared)
    try:
        front_end = runner.run(connect(prepared, launched))
        return EngineSource(front_end, prepared.files.default_sampling_params, options), prepared.model_name
    except BaseException:
        launched.shutdown()
        raise


def _questions() -> Iterator[str]:
    terminal = sys.stdin.isatty()
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # bytes that are no text: that question's error
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        if terminal:
            import readline  # noqa: F401  importing it gives input() a history and line editing
        while True:
            if question := input("\n> " if terminal else "").strip():
                yield question
    if terminal:
        _say("")


async def _print_answer(source: Source, messages: list[Message]) -> str:
    usage, text = Usage(), ""
    start = time.monotonic()
    first: float | None = None
    try:
        async with aclosing(source.answer(messages, usage)) as deltas:
            async for delta in deltas:
                first = first or time.monotonic()
                text += delta
                print(delta, end="", flush=True)
    except BaseException:
        if text:
            print(flush=True)  # what is said about it starts on a line of its own
        raise
    print()
    end = time.monotonic()
    waited = (first or end) - start
    # the first token's time is the prompt's; the rate is of those that follow
    rate = f"{(usage.tokens - 1) / (end - start - waited):.1f} tokens/s, " if usage.tokens > 1 and end - start > waited else ""
    _say(f"[{usage.tokens} tokens, {rate}first after {waited:.2f} s]")
    return text


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
