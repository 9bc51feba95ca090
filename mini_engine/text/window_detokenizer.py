"""The incremental detokenizer's window in Python: to read, and to compare the tokenizers library's DecodeStream with.

Promises  what text/detokenizer.py does, at more cost per token. The engine takes it where an overlay says so:

              # window.py, for `mini-engine serve --overlay text.detokenizer=window.py`
              from mini_engine.text.window_detokenizer import WindowDetokenizer as Detokenizer

Form 9 of a request.    vLLM: v1/engine/detokenizer.py::SlowIncrementalDetokenizer
"""

from mini_engine.text.detokenizer import MAX_PENDING, REPLACEMENT, TextDetokenizer


class WindowDetokenizer(TextDetokenizer):
    """`_context_text` is the text of `_context`: what decoding both must begin with."""

    def _restart(self, context: list[int], pending: list[int]) -> None:
        super()._restart(context, pending)
        self._context_text = self._decode(context)

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        before, text = self._context_text, self._decode(self._context + self._pending)
        if len(text) <= len(before) or text.endswith(REPLACEMENT):
            return self._give_up() if len(self._pending) >= MAX_PENDING else ""
        if not text.startswith(before):
            return self._retracted()
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        return text[len(before) :]
