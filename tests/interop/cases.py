"""The conformance table: requests that every pair answers, and what each is there for.

`cases(base)` depends on what the engine says to a plain request, so that stop strings and stop tokens really occur: the mock device says
other things than the model. No case depends on a random draw (temperature 0, or top_k 1), nor on what was asked before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.interop import normalise
from tests.interop.peers import NAME, Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = [504, 3575, 282, 4649, 314]  #: "The capital of France is"
EMOJI = "🙂🙃😀🙂🙃😀🙂🙃😀🙂🙃"  #: three or four tokens each, so that the model's own are cut in the middle of a character


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    path: str
    body: dict[str, Any] | bytes

    @property
    def streams(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("stream"))

    def ask(self, server: Server) -> normalise.Answer:
        response: httpx.Response = server.post(self.path, self.body)
        return (normalise.streamed if self.streams else normalise.whole)(response.status_code, response.content)


@dataclass(slots=True)
class Base:
    """Plain answers of twelve tokens, from the reference."""

    chat: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    @classmethod
    def ask(cls, server: Server) -> Base:
        chat, text = (
            server.post(path, body).json()["choices"][0] for path, body in ((CHAT, _chat()), (TEXT, _text(return_token_ids=True)))
        )
        return cls(chat["message"]["content"], text["text"], text["token_ids"])


def _chat(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": MESSAGES, "max_tokens": 12, "temperature": 0} | more


def _text(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | more


def good(base: Base) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each is asked twice: whole, and streamed."""
    stop = base.text[3:7]
    return {
        "chat": (CHAT, _chat()),
        "chat, system and several turns": (
            CHAT,
            _chat(messages=[{"role": "system", "content": "Be brief."}, *MESSAGES, {"role": "assistant", "content": "Paris."}, *MESSAGES]),
        ),
        "chat, content in parts": (CHAT, _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])),
        "chat, not ASCII": (CHAT, _chat(messages=[{"role": "user", "content": "Grüße, 世界 🙂"}])),
        "chat, one token": (CHAT, _chat(max_tokens=1)),
        "chat, max_completion_tokens": (CHAT, _chat(max_completion_tokens=3)),
        "chat, stop string": (CHAT, _chat(stop=[base.chat[3:6]])),
        "chat, n": (CHAT, _chat(n=2, temperature=1, top_k=1)),
        "chat, logprobs": (CHAT, _chat(max_tokens=4, logprobs=True, top_logprobs=2)),
        "chat, logprobs of the chosen only": (CHAT, _chat(max_tokens=4, logprobs=True)),
        "chat, to the end": (CHAT, _chat(max_tokens=40)),  # the model stops by itself; the mock device never does
        "chat, unknown role": (CHAT, _chat(messages=[{"role": "sage", "content": "hm"}, *MESSAGES])),
        "text": (TEXT, _text()),
        "text, a string": (TEXT, _text(prompt="The capital of France is")),
        "text, several prompts": (TEXT, _text(prompt=["One two", "Three"], max_tokens=4)),
        "text, several prompts of ids": (TEXT, _text(prompt=[PROMPT, PROMPT[:2]], max_tokens=4)),
        "text, stop string": (TEXT, _text(stop=[stop])),
        "text, stop string kept": (TEXT, _text(stop=[stop], include_stop_str_in_output=True)),
        "text, stop string never": (TEXT, _text(stop=["never said"])),
        "text, stop token": (TEXT, _text(stop_token_ids=[base.token_ids[4]])),
        "text, min_tokens over a stop token": (TEXT, _text(stop_token_ids=[base.token_ids[4]], min_tokens=6)),
        "text, n": (TEXT, _text(n=3, temperature=1, top_k=1, max_tokens=4)),
        "text, logprobs": (TEXT, _text(max_tokens=4, logprobs=2)),
        "text, token ids": (TEXT, _text(max_tokens=4, return_token_ids=True)),
        "text, echo": (TEXT, _text(prompt="Once upon", max_tokens=3, echo=True)),
        "text, characters over several tokens": (TEXT, _text(prompt=EMOJI, max_tokens=24)),
        "text, special tokens shown": (TEXT, _text(skip_special_tokens=False, max_tokens=4)),
        "text, seed": (TEXT, _text(seed=7, temperature=1, top_k=1, max_tokens=4)),
        "text, neutral penalties": (TEXT, _text(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, top_p=1.0, min_p=0.0)),
    }


def bad() -> dict[str, tuple[str, dict[str, Any] | bytes]]:
    return {
        "bad: not JSON": (CHAT, b'{"messages": ['),
        "bad: no messages": (CHAT, {"model": NAME}),
        "bad: empty messages": (CHAT, _chat(messages=[])),
        "bad: no prompt": (TEXT, {"model": NAME}),
        "bad: wrong type": (CHAT, _chat(max_tokens="many")),
        "bad: unknown model": (CHAT, _chat(model="nobody")),
        "bad: max_tokens 0": (CHAT, _chat(max_tokens=0)),
        "bad: negative max_tokens": (TEXT, _text(max_tokens=-1)),
        "bad: temperature": (TEXT, _text(temperature=-1)),
        "bad: top_p": (TEXT, _text(top_p=2)),
        "bad: top_k": (TEXT, _text(top_k=-5)),
        "bad: n": (CHAT, _chat(n=0)),
        "bad: too many logprobs": (CHAT, _chat(logprobs=True, top_logprobs=1000)),
        "bad: prompt too long": (TEXT, _text(prompt=[9] * 9000)),
        "bad: token out of the vocabulary": (TEXT, _text(prompt=[10_000_000])),
        "bad: unknown field": (CHAT, _chat(colour="red")),
        "bad: stream_options without stream": (CHAT, _chat(stream_options={"include_usage": True})),
    }


def cases(base: Base) -> list[Case]:
    table = []
    for name, (path, body) in good(base).items():
        table.append(Case(name, path, body))
        table.append(Case(f"{name}, streamed", path, body | {"stream": True, "stream_options": {"include_usage": True}}))
    table.append(Case("chat, streamed without usage", CHAT, _chat(stream=True)))
    table += [Case(name, path, body) for name, (path, body) in bad().items()]
    table += [
        Case(f"{name}, streamed", path, body | {"stream": True})
        for name, (path, body) in bad().items()
        if name in ("bad: temperature", "bad: unknown model") and isinstance(body, dict)
    ]
    return table


def show(case: Case) -> str:
    return json.dumps(case.body, ensure_ascii=False)[:200] if isinstance(case.body, dict) else repr(case.body)
