"""Tokenizer: text to ids and back, by the tokenizers library alone, with what the rest of the front-end asks about a vocabulary.

Promises  encode() goes through `encode_batch_fast`, the one call that lets other threads run on a long text; an id that the tokenizer
          does not have decodes to nothing instead of raising.
Not here  transformers: importing it costs seconds and pulls in torch. A model without tokenizer.json is converted in a process of its
          own (convert_tokenizer.py).

Stands between forms 2 and 3 of a request, and beside form 9.    vLLM: tokenizers/hf.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import tokenizers

from mini_engine.exceptions import VLLMValidationError
from mini_engine.render.convert_tokenizer import tokenizer_file
from mini_engine.render.model_files import read_json, special_tokens


class Tokenizer:
    """One model's tokenizer. Every method may be called from any thread."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_token: str | None = None) -> None:
        backend.no_truncation()  # a tokenizer.json may carry its training run's; a cut prompt would be answered as if whole
        backend.no_padding()
        self.backend = backend
        self.eos_token_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)
        added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_token_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = len(vocab)
        self.longest_token_chars: int = max(map(len, vocab), default=1)  #: the most characters one token can decode to (an upper bound)
        self._ids: frozenset[int] = frozenset(vocab.values())
        self._ordinary_ids = self._ids - self.special_token_ids
        self._token_text: dict[int, str] = {}

    @classmethod
    def load(cls, model_dir: str | Path) -> Self:
        """Read `model_dir`/tokenizer.json, or make one. Raises VLLMValidationError saying what is missing or damaged."""
        path = tokenizer_file(Path(model_dir))
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises plain Exception
            raise VLLMValidationError(f"{path}: not a tokenizer that the tokenizers library reads: {e}", parameter="model") from e
        return cls(backend, special_tokens(read_json(Path(model_dir), "tokenizer_config.json")).get("eos_token"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises VLLMValidationError for a str that is no Unicode text: with a lone surrogate, what Python makes of wrong bytes."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise VLLMValidationError(f"the text is not valid Unicode: {e}", parameter="prompt") from None
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode([i for i in ids if i in self._ids], skip_special_tokens=skip_special_tokens)

    def visible_ids(self, skip_special_tokens: bool) -> frozenset[int]:
        """Every id that decode() takes notice of; all others add no text wherever they stand."""
        return self._ordinary_ids if skip_special_tokens else self._ids

    def token_text(self, token_id: int) -> str:
        """One token decoded alone, special or not. Half a character is U+FFFD; an id out of range is ""."""
        text = self._token_text.get(token_id)
        if text is None:
            text = self._token_text[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text
