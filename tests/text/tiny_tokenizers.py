"""Tokenizers small enough to read, one for each way a decoder can look at its neighbours."""

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from mini_engine.render.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog. " * 4,
    "你好,世界。你好!" * 3,
    "🙂🙃🙂 naïve café " * 3,
    "STOP stop ST OP </s> \n\n",
]


@cache
def byte_level() -> Tokenizer:
    """GPT-2's kind: every token is bytes, and the text is the UTF-8 of them all."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>", "<|start|>"], initial_alphabet=alphabet)
    )
    backend.add_tokens(["<tool>", "中文"])  # added, not special; the second is not in the byte alphabet
    return Tokenizer(backend, "<|end|>")


WORDS = ["▁", "▁▁", "▁hello", "hello", "▁wor", "ld", "a", "b", "▁a", ".", "\n", "中", "▁国"]


@cache
def byte_fallback() -> Tokenizer:
    """Llama 2's kind: `▁` is a space, the text's first one goes, and a run of byte tokens is judged as a whole."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    return Tokenizer(backend, "</s>")


@cache
def word_piece() -> Tokenizer:
    """BERT's kind: a space before every token but the first, and before those that start with ##."""
    pieces = ["[UNK]", "[SEP]", "[PAD]", "good", "##ness", "day", ",", "."]
    backend = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["[SEP]", "[PAD]"])
    return Tokenizer(backend, "[SEP]")


def byte_id(byte: int) -> int:
    """The byte_fallback() token of one byte."""
    return 3 + byte
