"""Incremental detokenizer: token ids in, as they come; out, the text that no later token can change.

Two things make this more than `decode(token)`: a character may span tokens (the half decodes to U+FFFD), and decoders look at neighbours
(a leading space goes, or not). So every step decodes a short *context* of tokens whose text is already out, and after it the *pending*
tokens whose text is not: what the second adds is new. Text is pending while it ends in U+FFFD, which may yet become a character.

Promises  the pieces, joined, are the same however the tokens were grouped, and equal to decoding all output tokens behind the prompt
          (except where a decoder takes back what it said before: then nothing is retracted and nothing is lost).
          A token costs the same at any length, garbage included: at most MAX_PENDING tokens are pending.
Context   at first, the shortest clean end of the prompt; a prompt that ends inside a character gives none, and never leaks out.
Not here  which text is a stop string (stop.py); logprobs (llm/).

Form 9 of a request, on the event loop, once per output: the front-end's hot loop.    vLLM: v1/engine/detokenizer.py
"""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from tokenizers.decoders import DecodeStream

from mini_engine import overlay as overlays
from mini_engine.render.tokenizer import Tokenizer
from mini_engine.text.stop import StopChecker, check_stop_strings, held_back
from mini_engine.wire.messages import EngineCoreRequest

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 8  #: tokens; a character has at most 4 bytes, so more than 4 pending tokens are not one character
CONTEXT_SIZES = (4, 5, 6, 3, 2, 1)  #: prompt tokens, in the order tried; few, yet enough to stand for the whole prompt


class IncrementalDetokenizer:
    """One request's text so far. This class is `detokenize=False`: it keeps the ids and has no text."""

    def __init__(self) -> None:
        self.output_token_ids: list[int] = []  #: all of them, those without text too; cut after the token that completes a stop string
        self.output_text = ""  #: all settled text, the held back part included; cut at a stop string

    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Take the tokens of one output. Returns the stop string that they completed, if any: the request is then over.

        `stop_terminated`: the engine says that the last token is the EOS or a stop token; its id stays, its text is left out unless
        include_stop_str_in_output.
        """
        self.output_token_ids.extend(new_token_ids)
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text to show now: with `delta` what is new since the last call, else all. `finished`: nothing more will come, so
        what was held back, and a half character as U+FFFD, is shown too."""
        return ""


class TextDetokenizer(IncrementalDetokenizer):
    """What all ways of decoding share. They differ in `_step`; `_context` and `_pending` mean the same in all."""

    def __init__(self, tokenizer: Tokenizer, request: EngineCoreRequest, check_stop: StopChecker = check_stop_strings) -> None:
        super().__init__()
        params = request.sampling_params
        assert params is not None
        self._backend = tokenizer.backend
        self._skip_special_tokens = params.skip_special_tokens
        self._visible = tokenizer.visible_ids(params.skip_special_tokens)
        glue = not (params.skip_special_tokens or params.spaces_between_special_tokens)
        self._glued: Mapping[int, str] = tokenizer.added_tokens if glue else {}  # of two in a row, the second is shown raw
        self._last_glued = False
        self._stop = list(params.stop or [])
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._check_stop = check_stop
        self._num_sent = 0  # characters of output_text that deltas have shown
        self._context: list[int] = []  # its text is out, and does not end in U+FFFD
        self._pending: list[int] = []  # its text is not
        self._restart(self._clean_prompt_end(request.prompt_token_ids or []), [])

    # ── what a way of decoding provides ───────────────────────────────────────────────────────────────────

    @abstractmethod
    def _step(self, token_id: int) -> str:
        """Append to `_pending`. If its text is settled, make it the new `_context` and return the text; else return ""."""

    def _restart(self, context: list[int], pending: list[int]) -> None:
        """Go on from here. No start of `pending` has settled text."""
        self._context, self._pending = context, pending

    # ── tokens to text ────────────────────────────────────────────────────────────────────────────────────

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _clean_prompt_end(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last few tokens with text, if that does not end inside a character; else none.

        A stream that starts from an unfinished character repeats the prompt when the character ends (vLLM #48853). More than one size
        is tried because byte-fallback decoders judge a whole run of byte tokens, which a cut may leave without its start.
        """
        visible = (token_id for token_id in reversed(prompt_token_ids) if token_id in self._visible)
        end = list(islice(visible, max(CONTEXT_SIZES)))[::-1]
        for size in CONTEXT_SIZES:
            if not self._decode(end[-size:]).endswith(REPLACEMENT):
                return end[-size:]
        return []

    def _decode_next(self, token_id: int) -> str:
        if token_id not in self._visible:  # a hidden special token, or an id the tokenizer does not have: no text, for any decoder
            return ""
        text = self._step(token_id)
        if self._glued:
            raw = self._glued.get(token_id)
            if raw is not None and self._last_glued:
                text = raw
            self._last_glued = raw is not None
        return text

    def _after_context(self, ids: list[int]) -> str:
        """The text that `ids` add to the context; their own where the decoder would change the context's."""
        before, text = self._decode(self._context), self._decode(self._context + ids)
        return text[len(before) :] if text.startswith(before) else self._decode(ids)

    def _retracted(self) -> str:
        """The decoder took back text that is out ("Invalid prefix encountered", vLLM #17448): decode what is pending on its own."""
        text = self._decode(self._pending)
        self._restart(self._context if text.endswith(REPLACEMENT) else self._pending, [])
        return text

    def _give_up(self) -> str:
        """Too much is pending to be one character: settle it, but for the tokens of a last character that may still be completed.

        Those are the fewest whose removal splits the text cleanly: cutting a started character in two makes one U+FFFD more.
        """
        text = self._after_context(self._pending)
        for size in range(1, 4):
            head, tail = self._pending[:-size], self._pending[-size:]
            started = self._decode(tail)
            if started.endswith(REPLACEMENT) and self._after_context(head) + started == text:
                self._restart(self._context, tail)
                return text[: -len(started)]
        self._restart(self._context, [])
        return text

    # ── the interface ─────────────────────────────────────────────────────────────────────────────────────

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        if not new_token_ids:
            return None
        num_before = len(self.output_token_ids)
        self.output_token_ids.extend(new_token_ids)
        shown = new_token_ids[:-1] if stop_terminated and not self._include_stop else new_token_ids
        text, self.output_text = self.output_text, ""  # with one reference CPython extends a string in place: linear, not quadratic
        ends = [len(text)]  # ends[i]: characters after i of the new tokens
        for token_id in shown:
            text += self._decode_next(token_id)
            ends.append(len(text))
        self.output_text = text
        return self._apply_stop_strings(num_before, ends) if self._stop else None

    def _apply_stop_strings(self, num_before: int, ends: list[int]) -> str | None:
        """Cut text and ids at the first stop string that ends in a token after the first min_tokens."""
        if len(self.output_token_ids) <= self._min_tokens:
            return None
        searched = ends[max(self._min_tokens - num_before, 0)]
        match = self._check_stop(self.output_text, len(self.output_text) - searched, self._stop, self._include_stop)
        if match is None:
            return None
        stop_string, cut = match
        if cut == -1:
            cut = len(self.output_text)
        end = cut if self._include_stop else cut + len(stop_string)
        del self.output_token_ids[num_before + bisect_left(ends, end, lo=1) :]  # tokens after the one that completed it
        self.output_text = self.output_text[:cut]
        self._pending = []  # came after the stop string
        return stop_string

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        if finished and self._pending:  # no library stream ever shows this
            self.output_text += self._after_context(self._pending)
            self._pending = []
        end = len(self.output_text)
        if not finished and self._stop and not self._include_stop:
            end -= held_back(self.output_text, self._stop)
        if not delta:
            return self.output_text[:end]
        start, self._num_sent = self._num_sent, end
        return self.output_text[start:end]


class DecodeStreamDetokenizer(TextDetokenizer):
    """The fast way: the tokenizers library keeps the window, in Rust. vLLM: FastIncrementalDetokenizer."""

    def _restart(self, context: list[int], pending: list[int]) -> None:
        super()._restart(context, pending)
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)
        for token_id in pending:
            self._stream.step(self._backend, token_id)

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception as e:
            if not str(e).startswith("Invalid prefix encountered"):
                raise
            return self._retracted()
        if text is None:
            return self._give_up() if len(self._pending) >= MAX_PENDING else ""
        self._context, self._pending = self._pending, []
        return text


class DetokenizerFactory:
    """Makes the detokenizers of one front-end (vLLM: from_new_request). The overlay's parts are loaded here, once.

    Seam text.detokenizer: a class called as `Detokenizer(tokenizer, request, check_stop)`, with IncrementalDetokenizer's methods and
    attributes. Seam text.stop: a function like check_stop_strings, which is what `check_stop` is then.
    """

    def __init__(self, tokenizer: Tokenizer | None, overlay: Mapping[str, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._class: Any = overlays.load(overlay or {}, "text.detokenizer", DecodeStreamDetokenizer)
        self._check_stop: StopChecker = overlays.load(overlay or {}, "text.stop", check_stop_strings)

    def __call__(self, request: EngineCoreRequest) -> IncrementalDetokenizer:
        params = request.sampling_params
        if self._tokenizer is None or params is None or not params.detokenize:
            return IncrementalDetokenizer()
        return self._class(self._tokenizer, request, self._check_stop)
