"""Logprobs in OpenAI's two shapes: one list of objects for chat, parallel lists for completions.

OpenAI's `top_logprobs` are the k most likely tokens, most likely first; the sampled token is among them only if it is that likely.
The engine's map has the sampled token first and k others (outputs.py), so the rank decides.

Stands at form 9 of a request.    vLLM: _create_chat_logprobs, _create_completion_logprobs
"""

from typing import Any

from mini_engine.outputs import Logprob

LOWEST = -9999.0  #: JSON has no -inf (vLLM sends the same)


def _token(token_id: int, logprob: Logprob, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else logprob.decoded_token or ""


def _top(position: dict[int, Logprob], k: int) -> list[tuple[int, Logprob]]:
    likely = [(token_id, lp) for token_id, lp in position.items() if lp.rank is not None and lp.rank <= k]
    return sorted(likely, key=lambda item: item[1].rank or 0)


def chat_logprobs(token_ids: list[int], logprobs: list[dict[int, Logprob]], k: int, as_ids: bool) -> list[dict[str, Any]]:
    """`logprobs.content`: one object per token of `token_ids`."""

    def entry(token_id: int, lp: Logprob) -> dict[str, Any]:
        token = _token(token_id, lp, as_ids)
        return {"token": token, "logprob": max(lp.logprob, LOWEST), "bytes": list(token.encode())}

    return [
        entry(token_id, position[token_id]) | {"top_logprobs": [entry(*item) for item in _top(position, k)]}
        for token_id, position in zip(token_ids, logprobs, strict=True)
    ]


def completion_logprobs(
    token_ids: list[int], logprobs: list[dict[int, Logprob]], k: int, as_ids: bool, offset: int
) -> dict[str, list[Any]]:
    """The four parallel lists. `offset` is where the first token starts, in characters of this choice's tokens."""
    tokens, token_logprobs, tops, offsets = [], [], [], []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        sampled = position[token_id]
        tokens.append(_token(token_id, sampled, as_ids))
        token_logprobs.append(max(sampled.logprob, LOWEST))
        # the sampled token is always in this map, as in OpenAI's: "up to logprobs + 1 elements"
        top = dict(_top(position, k)) | {token_id: sampled}
        tops.append({_token(i, lp, as_ids): max(lp.logprob, LOWEST) for i, lp in top.items()})
        offsets.append(offset)
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": token_logprobs, "top_logprobs": tops, "text_offset": offsets}
