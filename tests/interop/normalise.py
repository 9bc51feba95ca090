"""One form for an answer, whoever gave it and whether it was streamed; and the differences between two answers in that form.

Taken away, for every front-end alike
    ids, `created`, `system_fingerprint`          of the moment, or of the server
    how tokens are cut into chunks                a front-end may merge what arrives together; order and sum are compared
    a field that is null, or left out             the same to a client (vllm-rs leaves them out of chunks, Python writes null)
    the wording and `type` of an error            the status and that there is a message are compared
    `prompt_tokens_details`                       vLLM's own front-ends report it only with --enable-prompt-tokens-details
    the order of equally probable tokens          by token
Anything else that is not null and that we do not know by name is kept, under `other`, so that it shows as a difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

TOLERANCE = 2e-3  #: of a logprob: two implementations of one model in float32

_DROPPED = {"id", "created", "system_fingerprint", "object", "prompt_tokens_details", "completion_tokens_details"}
_KNOWN = {"choices", "model", "usage", "error"}
_CHOICE_KNOWN = {"index", "text", "message", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids"}

Answer = dict[str, Any]


def whole(status: int, raw: bytes) -> Answer:
    """A body that was not streamed."""
    try:
        body = json.loads(raw)
    except ValueError:
        return {"status": status, "body": raw[:200].decode(errors="replace")}
    if status != 200:
        return {"status": status, "has_message": bool(isinstance(body.get("error"), dict) and body["error"].get("message"))}
    answer: Answer = {"status": status, "object": body["object"], "usage": _usage(body.get("usage")), "choices": {}} | _other(body, _KNOWN)
    for choice in body["choices"]:
        _add(answer["choices"], choice)
    return answer


def streamed(status: int, raw: bytes) -> Answer:
    """Server-sent events, put together. A stream that could not begin is a whole answer."""
    if status != 200:
        return whole(status, raw)
    events = [event.removeprefix("data: ") for event in raw.decode().split("\n\n") if event]
    answer: Answer = {"status": status, "choices": {}, "done": events[-1:] == ["[DONE]"], "errors": 0}
    for event in events[:-1]:
        chunk = json.loads(event)
        if "error" in chunk:
            answer["errors"] += 1
            continue
        answer |= {"object": chunk["object"]} | _other(chunk, _KNOWN)
        if chunk.get("usage"):
            answer["usage"] = _usage(chunk["usage"]) | {"beside_choices": bool(chunk["choices"])}
        for choice in chunk["choices"]:
            finished = answer["choices"].get(choice["index"], {}).get("finish_reason")
            assert finished is None, f"a chunk after the end of its choice: {event}"
            _add(answer["choices"], choice)
    return answer


def _usage(usage: dict[str, Any] | None) -> Answer:
    return {} if usage is None else {name: value for name, value in usage.items() if name not in _DROPPED}


def _other(body: dict[str, Any], known: set[str]) -> Answer:
    other = {name: value for name, value in body.items() if name not in known | _DROPPED and value not in (None, [], {}, "")}
    return {"other": other} if other else {}


def _add(choices: dict[int, Answer], choice: dict[str, Any]) -> None:
    """Append a choice, or a chunk of one."""
    into = choices.setdefault(choice["index"], {"text": "", "role": None, "finish_reason": None, "stop_reason": None, "logprobs": []})
    message = choice.get("message") or choice.get("delta") or {}
    into["text"] += choice.get("text") or message.get("content") or ""
    into["role"] = message.get("role") or into["role"]
    for name in ("finish_reason", "stop_reason"):
        into[name] = choice.get(name) if choice.get(name) is not None else into[name]
    if choice.get("logprobs"):
        into["logprobs"] += _logprobs(choice["logprobs"])
    for name in ("token_ids", "prompt_token_ids"):
        if choice.get(name) is not None:
            into[name] = into.get(name, []) + choice[name]
    for name, value in (_other(message, {"role", "content"}) | _other(choice, _CHOICE_KNOWN)).items():
        into.setdefault(name, {}).update(value)


def _logprobs(logprobs: dict[str, Any]) -> list[Answer]:
    if "tokens" in logprobs:  # completions
        columns = (logprobs[name] for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"))
        return [
            {"token": token, "logprob": logprob, "offset": offset, "top": _ranked((top or {}).items())}
            for token, logprob, offset, top in zip(*columns, strict=True)
        ]
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "bytes": entry["bytes"],
            "top": _ranked((top["token"], top["logprob"]) for top in entry["top_logprobs"]),
        }
        for entry in logprobs["content"]
    ]


def _ranked(pairs: Any) -> list[tuple[str, float]]:
    return sorted(pairs, key=lambda pair: (-round(pair[1], 3), pair[0]))


def differences(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, in one, in the other); a missing key is None."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys(), key=str):
            yield from differences(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, f"{path}[{index}]")
    elif isinstance(one, float) and isinstance(other, float) and abs(one - other) <= TOLERANCE:
        return
    elif one != other:
        yield path, one, other
