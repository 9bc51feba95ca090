"""LogprobsProcessor: one map per position, the sampled token first, and texts that join to the answer even in the middle of a character."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.llm.logprobs import LogprobsProcessor, TokenTexts
from mini_engine.sampling_params import SamplingParams
from mini_engine.wire.messages import LogprobsLists, LogprobsTensors, Tensor
from tests.text.tiny_tokenizers import byte_fallback, byte_id, byte_level

TEXT = "naïve 🙂 你好 fox 🙃"


def lists(token_ids: list[list[int]], ranks: list[int] | None = None) -> LogprobsLists:
    ids = np.array(token_ids, np.int32)
    return LogprobsLists(ids, -ids.astype(np.float32), np.array(ranks or [1] * len(token_ids)))


def processor(logprobs: int | None = None, prompt_logprobs: int | None = None, detokenize: bool = True) -> LogprobsProcessor:
    params = SamplingParams(logprobs=logprobs, prompt_logprobs=prompt_logprobs, detokenize=detokenize)
    return LogprobsProcessor(TokenTexts(byte_level()) if detokenize else None, params, [5, 6, 7])


def test_columns_ranks_and_the_sampled_token_first() -> None:
    p = processor(logprobs=2)
    p.update(lists([[9, 5, 6, 7]], ranks=[4]))  # the batch has a column more than this request asked for
    (position,) = p.take(delta=False) or []
    assert [(t, v.rank, v.logprob) for t, v in position.items()] == [(9, 4, -9.0), (5, 1, -5.0), (6, 2, -6.0)]
    assert p.cumulative_logprob == -9.0


def test_a_sampled_token_among_the_top_is_there_once() -> None:
    p = processor(logprobs=2)
    p.update(lists([[5, 5, 6]]))
    assert [list(position) for position in p.take(delta=False) or []] == [[5, 6]]


@pytest.mark.parametrize(("logprobs", "count"), [(0, 1), (-1, 4)])
def test_only_the_sampled_one_or_all(logprobs: int, count: int) -> None:
    p = processor(logprobs=logprobs)
    p.update(lists([[9, 5, 6, 7]]))
    (position,) = p.take(delta=False) or []
    assert len(position) == count


def test_delta_gives_each_position_once_and_cumulative_a_snapshot() -> None:
    p = processor(logprobs=0)
    p.update(lists([[5], [6]]))
    assert [list(position) for position in p.take(delta=True) or []] == [[5], [6]]
    assert p.take(delta=True) == []
    p.update(lists([[7]]))
    snapshot = p.take(delta=False)
    p.update(lists([[8]]))
    assert [list(position) for position in snapshot or []] == [[7]]


def test_prompt_logprobs_start_with_none_and_come_once() -> None:
    ids = np.array([[6, 8], [7, 9]], np.int32)
    p = processor(prompt_logprobs=1)
    p.update_prompt(LogprobsTensors(ids.view(Tensor), -ids.astype(np.float32).view(Tensor), np.array([3, 1], np.int32).view(Tensor)))
    first = p.take_prompt(delta=True)
    assert first is not None and first[0] is None
    assert [list(position or ()) for position in first[1:]] == [[6, 8], [7, 9]]
    assert first[1] is not None and first[1][6].rank == 3
    assert p.take_prompt(delta=True) is None
    assert p.take(delta=True) is None  # none asked for


def test_without_detokenization_there_are_no_texts() -> None:
    p = processor(logprobs=0, detokenize=False)
    p.update(lists([[5]]))
    assert (p.take(delta=False) or [{}])[0][5].decoded_token is None


@given(st.text(alphabet=TEXT, max_size=12))
def test_texts_join_to_the_answer(text: str) -> None:
    """Byte by byte, where almost every character spans tokens: the texts of the sampled tokens, joined, are the text."""
    tokenizer = byte_level()
    ids = [i for character in text for i in tokenizer.encode(character, add_special_tokens=False)]
    p = processor(logprobs=0)
    for i in ids:
        p.update(lists([[i]]))
    decoded = [next(iter(position.values())).decoded_token for position in p.take(delta=False) or []]
    assert "".join(d or "" for d in decoded) == text


def test_a_token_that_completes_a_character_gets_all_of_it() -> None:
    tokenizer = byte_fallback()
    all_texts = TokenTexts(tokenizer)
    context = tokenizer.encode("a")
    texts = []
    for byte in "🙂".encode():
        texts.append(all_texts.get(byte_id(byte), context))
        context.append(byte_id(byte))
    assert texts == ["", "", "", "🙂"]
