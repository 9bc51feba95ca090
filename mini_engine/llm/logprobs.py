"""LogprobsProcessor: arrays from the wire become one map per position, token id → Logprob with its text.

Text      A token is decoded by itself. One that ends inside a character (U+FFFD) is decoded again behind up to four tokens before it,
          enough for any UTF-8 character: the token that completes the character gets all of it, the ones before it get "".
Cost      only for requests that ask; texts of whole tokens are remembered, so that a position costs a few look-ups.

Stands at form 9 of a request.    vLLM: v1/engine/logprobs.py::LogprobsProcessor; WIRE §7
"""

from mini_engine.outputs import Logprob, SampleLogprobs
from mini_engine.render.tokenizer import Tokenizer
from mini_engine.sampling_params import SamplingParams
from mini_engine.wire.messages import LogprobsLists, LogprobsTensors

REPLACEMENT = "�"
MAX_CONTEXT = 4  #: tokens; a UTF-8 character has at most four bytes


class TokenTexts:
    """Text of one token behind the tokens before it; special tokens are shown. Shared by all requests of a front-end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.whole: dict[int, str] = {}  #: of tokens that do not end inside a character: the same behind any other

    def get(self, token_id: int, context: list[int]) -> str:
        text = self._tokenizer.token_text(token_id)
        if not text.endswith(REPLACEMENT):
            self.whole[token_id] = text
            return text
        for length in range(1, min(len(context), MAX_CONTEXT) + 1):
            before = context[-length:]
            text = self._decode([*before, token_id])
            if text.endswith(REPLACEMENT):
                continue
            # The tokens of this same character said "" when it was their turn, so their text belongs to this one
            while before and self._tokenizer.token_text(before[-1]).endswith(REPLACEMENT):
                before.pop()
            prefix = self._decode(before)
            common = next((i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), min(len(prefix), len(text)))
            return text[common:]
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class LogprobsProcessor:
    """Logprobs of one request, prompt and sampled. `texts` None: detokenize=False."""

    __slots__ = ("_context", "_num_logprobs", "_num_prompt_logprobs", "_texts", "cumulative_logprob", "logprobs", "prompt_logprobs")

    def __init__(self, texts: TokenTexts | None, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        self._texts = texts
        self._num_logprobs = params.logprobs
        self._num_prompt_logprobs = params.prompt_logprobs
        self._context: list[int] = []  # the last sampled tokens
        self.logprobs: SampleLogprobs | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None if params.prompt_logprobs is None else [None]
        if self.prompt_logprobs is not None:
            self._context = prompt_token_ids[:1]

    def update(self, new: LogprobsLists) -> None:
        """Rows of newly sampled tokens, in order; only those that the request keeps (a stop string may have cut some off)."""
        if self.logprobs is None or self.cumulative_logprob is None:
            return
        ranks = new.sampled_token_ranks.tolist()
        for token_ids, logprobs, rank in zip(new.logprob_token_ids.tolist(), new.logprobs.tolist(), ranks, strict=True):
            self.cumulative_logprob += logprobs[0]
            self.logprobs.append(self._position(token_ids, logprobs, rank, self._num_logprobs))

    def update_prompt(self, new: LogprobsTensors) -> None:
        """Row i scores prompt token i + 1; the first token has nothing before it and stays None."""
        if self.prompt_logprobs is None:
            return
        ranks = new.selected_token_ranks.tolist()
        for token_ids, logprobs, rank in zip(new.logprob_token_ids.tolist(), new.logprobs.tolist(), ranks, strict=True):
            self.prompt_logprobs.append(self._position(token_ids, logprobs, rank, self._num_prompt_logprobs))
        self._context = []  # sampled tokens follow: a character that the prompt left open is not theirs

    def take(self, delta: bool) -> SampleLogprobs | None:
        """All so far, or with `delta` what is new since the last call."""
        logprobs = self.logprobs
        if logprobs is None:
            return None
        if delta:
            self.logprobs = []
            return logprobs
        return list(logprobs)

    def take_prompt(self, delta: bool) -> list[dict[int, Logprob] | None] | None:
        """With `delta` only once: with the first output."""
        prompt_logprobs = self.prompt_logprobs
        if delta:
            self.prompt_logprobs = None
        return prompt_logprobs

    def _position(self, token_ids: list[int], logprobs: list[float], rank: int, num: int | None) -> dict[int, Logprob]:
        """Column 0 is the token itself, with its rank; columns 1 to k are ranks 1 to k. A batch may carry more columns than asked for."""
        assert num is not None
        if 0 <= num < len(token_ids) - 1:
            token_ids = token_ids[: num + 1]
        texts, context = self._texts, self._context
        whole = texts.whole if texts is not None else {}
        position: dict[int, Logprob] = {}
        for i, token_id in enumerate(token_ids):
            if token_id in position:  # the sampled token is one of the most likely too
                continue
            text = whole.get(token_id)
            if text is None and texts is not None:
                text = texts.get(token_id, context)
            position[token_id] = Logprob(logprobs[i], i or rank, text)
        self._context = [*context[1 - MAX_CONTEXT :], token_ids[0]]
        return position
