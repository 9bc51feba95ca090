"""Stream ≡ whole, for both ways of decoding: any ids, any grouping, any prompt, stop strings, half characters."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mini_engine.model.default_model import prepare
from mini_engine.render.tokenizer import Tokenizer
from mini_engine.sampling_params import SamplingParams
from mini_engine.text.detokenizer import (
    MAX_PENDING,
    DecodeStreamDetokenizer,
    DetokenizerFactory,
    IncrementalDetokenizer,
    TextDetokenizer,
)
from mini_engine.text.window_detokenizer import WindowDetokenizer
from mini_engine.wire.messages import EngineCoreRequest
from tests.text.tiny_tokenizers import WORDS, byte_fallback, byte_id, byte_level, word_piece

BOTH = (DecodeStreamDetokenizer, WindowDetokenizer)
FFFD = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="session")
def real_tokenizer() -> Tokenizer:
    return Tokenizer.load(prepare(weights=False))


@pytest.fixture(scope="session")
def real_bytes(real_tokenizer) -> list[int]:
    """Tokens of one byte each; most are no character by themselves."""
    return [i for piece, i in real_tokenizer.backend.get_vocab().items() if len(piece) == 1]


def request_of(prompt=(), **params) -> EngineCoreRequest:
    return EngineCoreRequest("r", list(prompt), None, SamplingParams(**params), None, 0.0, None, None, None)


def grouped(ids: list[int], cuts: list[int]) -> list[list[int]]:
    return [ids[a:b] for a, b in pairwise([0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)])]


def stream(detokenizer: IncrementalDetokenizer, groups: list[list[int]], read_every: int = 1) -> list[str]:
    """The deltas; with read_every > 1 a slow reader merges some."""
    deltas = []
    for i, group in enumerate(groups):
        if detokenizer.update(group, False) is not None:
            break
        if i % read_every == 0:
            deltas.append(detokenizer.get_next_output_text(False, True))
    return [*deltas, detokenizer.get_next_output_text(True, True)]


CUTS = st.lists(st.integers(0, 99), max_size=12)
BYTES_OF = byte_level().backend.get_vocab()  # single characters of the byte alphabet are single bytes
HIGH_BYTES = [
    i for piece, i in BYTES_OF.items() if len(piece) == 1 and len(byte_level().decode([i])) == 1 and byte_level().decode([i]) == FFFD
]
ANY_ID = st.integers(0, byte_level().vocab_size + 3) | st.sampled_from([2**31, 2**32, 2**40, -1])
BYTE_IDS = st.lists(ANY_ID | st.sampled_from(HIGH_BYTES), max_size=40) | st.lists(st.sampled_from(HIGH_BYTES), max_size=40)
RICH_TEXT = st.text(st.sampled_from("aé中国世🙂👨‍👩‍👧 \n") | st.characters(codec="utf-8"), max_size=20)
TEXT_IDS = RICH_TEXT.map(lambda text: byte_level().encode(text))


# ── byte level: equal to decode(all), for any ids ───────────────────────────────────────────────────────


@given(BYTE_IDS | TEXT_IDS, BYTE_IDS | TEXT_IDS, CUTS, st.booleans(), st.integers(1, 3))
@example([], [*byte_level().encode("中")[:-1]], [], True, 1)
def test_byte_level_stream_equals_whole(prompt, ids, cuts, skip, read_every):
    whole = byte_level().decode(ids, skip_special_tokens=skip)
    for kind in BOTH:
        detokenizer = kind(byte_level(), request_of(prompt, skip_special_tokens=skip))
        assert "".join(stream(detokenizer, grouped(ids, cuts), read_every)) == whole
        assert detokenizer.output_text == whole
        assert detokenizer.output_token_ids == ids


@given(st.data())
def test_real_tokenizer_stream_equals_whole(real_tokenizer, real_bytes, data):
    size = real_tokenizer.vocab_size
    ids = data.draw(st.lists(st.integers(0, size + 5) | st.sampled_from(real_bytes), max_size=60) | RICH_TEXT.map(real_tokenizer.encode))
    prompt = data.draw(st.lists(st.integers(0, size - 1), max_size=8) | RICH_TEXT.map(real_tokenizer.encode))
    skip, groups = data.draw(st.booleans()), grouped(ids, data.draw(CUTS))
    for kind in BOTH:
        deltas = stream(kind(real_tokenizer, request_of(prompt, skip_special_tokens=skip)), groups)
        assert "".join(deltas) == real_tokenizer.decode(ids, skip_special_tokens=skip)


@given(BYTE_IDS, BYTE_IDS, CUTS)
def test_both_ways_emit_the_same_at_the_same_time(prompt, ids, cuts):
    fast, window = (stream(kind(byte_level(), request_of(prompt)), grouped(ids, cuts)) for kind in BOTH)
    assert fast == window


@given(BYTE_IDS, CUTS)
def test_cumulative_texts_grow_to_the_whole(ids, cuts):
    detokenizer = DecodeStreamDetokenizer(byte_level(), request_of())
    texts = [""]
    for group in grouped(ids, cuts):
        detokenizer.update(group, False)
        texts.append(detokenizer.get_next_output_text(False, False))
    texts.append(detokenizer.get_next_output_text(True, False))
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == byte_level().decode(ids)


@pytest.mark.parametrize("kind", BOTH)
class TestHalfCharacters:
    ids = byte_level().encode("𝄞")  # not in the corpus: four bytes, four tokens

    def test_nothing_before_the_character_is_complete(self, kind):
        assert len(self.ids) == 4
        assert stream(kind(byte_level(), request_of()), [[i] for i in self.ids]) == ["", "", "", "𝄞", ""]

    def test_end_inside_a_character_shows_it_at_the_finish_only(self, kind):
        assert stream(kind(byte_level(), request_of()), [[i] for i in self.ids[:3]]) == ["", "", "", FFFD]

    def test_prompt_that_ends_inside_a_character_is_not_replayed(self, kind):
        prompt = byte_level().encode("the quick brown fox") + self.ids[:2]
        after = byte_level().encode(" jumps")
        assert "".join(stream(kind(byte_level(), request_of(prompt)), [[i] for i in after])) == " jumps"

    def test_finish_is_final(self, kind):
        detokenizer = kind(byte_level(), request_of())
        detokenizer.update(self.ids[:1], False)
        assert [detokenizer.get_next_output_text(True, True) for _ in range(2)] == [FFFD, ""]

    def test_hidden_special_token_inside_a_character(self, kind):
        ids = [*self.ids[:2], byte_level().eos_token_id, *self.ids[2:]]
        assert "".join(stream(kind(byte_level(), request_of()), [ids])) == "𝄞"


@pytest.mark.parametrize("skip", [True, False])
def test_cost_per_token_is_bounded_for_garbage_and_silence(skip):
    """No decode ever sees more than context and pending: not for bytes that never make a character, nor for tokens without text."""
    longest = 0

    class Counting:
        def decode(self, ids, skip_special_tokens):
            nonlocal longest
            longest = max(longest, len(ids))
            return byte_level().backend.decode(ids, skip_special_tokens=skip_special_tokens)

    tokenizer = SimpleNamespace(backend=Counting(), visible_ids=byte_level().visible_ids, added_tokens=byte_level().added_tokens)
    detokenizer = WindowDetokenizer(tokenizer, request_of(skip_special_tokens=skip))
    garbage = HIGH_BYTES[:1] * 500 + [0] * 500 + [10**6] * 500
    assert "".join(stream(detokenizer, [[i] for i in garbage])) == byte_level().decode(garbage, skip_special_tokens=skip)
    assert longest <= 2 * MAX_PENDING


# ── byte fallback: context decides spaces, and a decoder that takes back what it said ───────────────────

FALLBACK_TEXT = st.text("ab. \n中国é🙂", max_size=20).map(lambda text: byte_fallback().encode(text.replace(" ", "▁")))
FALLBACK_IDS = st.lists(st.integers(0, byte_fallback().vocab_size - 1) | st.integers(byte_id(0xE0), byte_id(0xFF)), max_size=30)


@given(FALLBACK_TEXT, FALLBACK_TEXT, CUTS, st.booleans())
def test_byte_fallback_text_equals_decoding_behind_the_prompt(prompt, ids, cuts, skip):
    tokenizer = byte_fallback()
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    assert whole.startswith(before)
    for kind in BOTH:
        assert "".join(stream(kind(tokenizer, request_of(prompt, skip_special_tokens=skip)), grouped(ids, cuts))) == whole[len(before) :]


@pytest.mark.parametrize("kind", BOTH)
def test_leading_space_is_lost_only_without_a_prompt(kind):
    vocab = byte_fallback().backend.get_vocab()
    ids = [vocab["▁hello"], vocab["▁wor"], vocab["ld"]]
    prompts = {(): "hello world", (vocab["a"],): " hello world", (vocab["a"], *[1] * 20): " hello world", (vocab["▁"],): " hello world"}
    for prompt, text in prompts.items():
        assert "".join(stream(kind(byte_fallback(), request_of(prompt)), [[i] for i in ids])) == text


@given(FALLBACK_IDS, FALLBACK_IDS, CUTS)
def test_byte_fallback_any_ids_agree_and_lose_no_text(prompt, ids, cuts):
    fast, window = (stream(kind(byte_fallback(), request_of(prompt)), grouped(ids, cuts)) for kind in BOTH)
    assert fast == window
    assert "".join(fast) == "".join(stream(DecodeStreamDetokenizer(byte_fallback(), request_of(prompt)), [ids]))
    words = {byte_fallback().backend.token_to_id(word): word.replace("▁", " ") for word in WORDS}
    told = "".join(words.get(i, "") for i in ids)
    candidates = (told, told.removeprefix(" "))  # the whole text's first space may go
    assert any(is_subsequence(candidate, "".join(fast)) for candidate in candidates)


def is_subsequence(part: str, text: str) -> bool:
    rest = iter(text)
    return all(c in rest for c in part)


@pytest.mark.parametrize("kind", BOTH)
def test_a_decoder_that_takes_text_back_loses_nothing(kind):
    vocab = byte_fallback().backend.get_vocab()
    ids = [vocab["a"], *(byte_id(b) for b in "中".encode()), byte_id(0xE4), vocab["b"]]
    assert stream(kind(byte_fallback(), request_of()), [[i] for i in ids]) == ["a", "", "", "中", "", FFFD + "b", ""]


# ── special tokens ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "good day"),
        ({"skip_special_tokens": False}, "good [SEP] [PAD] [SEP] day"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "good [SEP][PAD][SEP] day"),
    ],
)
def test_special_tokens(kind, params, text):
    ids = [word_piece().backend.token_to_id(piece) for piece in ("good", "[SEP]", "[PAD]", "[SEP]", "day")]
    for cuts in ([], [1, 2, 3, 4]):
        assert "".join(stream(kind(word_piece(), request_of(**params)), grouped(ids, cuts))) == text


@pytest.mark.parametrize("kind", BOTH)
def test_text_of_the_terminating_token_is_left_out_but_not_its_id(kind):
    ids = byte_level().encode("fox")
    for include, text in ((False, "fox"), (True, "fox<|end|>")):
        detokenizer = kind(byte_level(), request_of(skip_special_tokens=False, include_stop_str_in_output=include))
        assert detokenizer.update([*ids, 0], True) is None
        assert detokenizer.get_next_output_text(True, True) == text
        assert detokenizer.output_token_ids == [*ids, 0]


# ── stop strings ────────────────────────────────────────────────────────────────────────────────────────


def stop_oracle(ids, stop, include, min_tokens):
    """One token at a time, decoding everything anew: final text, ids kept, stop string."""
    text = ""
    for n in range(1, len(ids) + 1):
        before, text = text, byte_level().decode(ids[:n]).rstrip(FFFD)
        if n <= min_tokens:
            continue
        for end in range(len(before) + 1, len(text) + 1):
            for s in stop:
                if text[:end].endswith(s):
                    return text[: end if include else end - len(s)], ids[:n], s
    return text, ids, None


STOP_TEXT = st.text("aSTOP中🙂", max_size=24)
STOPS = st.lists(st.text("aSTOP中🙂", min_size=1, max_size=5), min_size=1, max_size=3)


@given(STOP_TEXT, STOPS, CUTS, st.booleans(), st.integers(0, 6))
def test_stop_strings_do_not_depend_on_grouping_and_never_leak(text, stop, cuts, include, min_tokens):
    ids = byte_level().encode(text)
    expected = stop_oracle(ids, stop, include, min_tokens)
    for kind in BOTH:
        params = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": min_tokens, "max_tokens": 99}
        detokenizer = kind(byte_level(), request_of(**params))
        sent, matched = "", None
        for group in grouped(ids, cuts):
            matched = detokenizer.update(group, False)
            if matched is not None:
                break
            sent += detokenizer.get_next_output_text(False, True)
            assert expected[0].startswith(sent)  # no leak
            assert sent == detokenizer.get_next_output_text(False, False)
            if not include:  # exactly what may still become a stop string is missing
                held = detokenizer.output_text[len(sent) :]
                tails = [detokenizer.output_text[i:] for i in range(len(detokenizer.output_text) + 1)]
                assert held == next(t for t in tails if any(len(s) > len(t) and s.startswith(t) for s in stop))
        sent += detokenizer.get_next_output_text(True, True)
        assert (sent, detokenizer.output_token_ids, matched) == expected
        assert detokenizer.get_next_output_text(True, False) == detokenizer.output_text == sent


def test_half_character_after_a_stop_string_is_not_shown():
    ids = byte_level().encode("STOP") + TestHalfCharacters.ids[:1]
    detokenizer = DecodeStreamDetokenizer(byte_level(), request_of(stop="OP"))
    assert detokenizer.update(ids, False) == "OP"
    assert detokenizer.get_next_output_text(True, False) == "ST"
    assert detokenizer.output_token_ids == ids[:-1]


def test_stop_string_wins_over_the_terminating_token_behind_it():
    ids = byte_level().encode("aSTOP")
    detokenizer = DecodeStreamDetokenizer(byte_level(), request_of(stop=["STOP"]))
    assert detokenizer.update([*ids, 0], True) == "STOP"
    assert (detokenizer.output_text, detokenizer.output_token_ids) == ("a", ids)


# ── choosing ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("tokenizer", "params"), [(None, {}), (byte_level(), {"detokenize": False})])
def test_ids_only(tokenizer, params):
    detokenizer = DetokenizerFactory(tokenizer)(request_of(**params))
    assert detokenizer.update([5, 6], False) is None
    assert detokenizer.update([7], True) is None
    assert (detokenizer.output_token_ids, detokenizer.num_output_tokens()) == ([5, 6, 7], 3)
    assert detokenizer.get_next_output_text(True, True) == detokenizer.output_text == ""


def test_default_is_the_fast_way():
    assert type(DetokenizerFactory(byte_level())(request_of())) is DecodeStreamDetokenizer


def test_overlay_seams(tmp_path, caplog):
    window, stop = tmp_path / "window.py", tmp_path / "stop.py"
    window.write_text("from mini_engine.text.window_detokenizer import WindowDetokenizer as Detokenizer\n")
    stop.write_text("def check_stop_strings(output_text, new_char_count, stop, include_in_output):\n    return 'mine', 1\n")
    factory = DetokenizerFactory(byte_level(), {"text.detokenizer": str(window), "text.stop": str(stop)})
    detokenizer = factory(request_of(stop=["zzz"]))
    assert type(detokenizer).__mro__[1] is TextDetokenizer and "window.py" in caplog.text
    assert detokenizer.update(byte_level().encode("fox"), False) == "mine"
    assert detokenizer.output_text == "f"
