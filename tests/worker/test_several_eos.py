"""Tokenizer, config.json and generation_config.json each name ends of a text: a chat with the real engine stops on every one of them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_engine.entrypoints.llm import LLM
from mini_engine.sampling_params import SamplingParams
from tests.text.tiny_tokenizers import byte_level
from tests.tiny_model import make_tiny_model

OF_TOKENIZER, *OF_GENERATION_CONFIG = 0, 7, 9
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    tokenizer = byte_level()
    directory = make_tiny_model(tmp_path_factory.mktemp("eos"), vocab_size=tokenizer.vocab_size, eos_token_id=OF_GENERATION_CONFIG)
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (Path(directory) / "tokenizer_config.json").write_text(json.dumps(config))
    with LLM(directory, device="cpu", num_threads=1, kv_cache_memory_bytes=1 << 22) as llm:
        yield llm


def chat(llm: LLM, **params: object) -> tuple[list[int], str | None, object]:
    """(token ids, finish reason, stop reason) of a greedy answer."""
    (output,) = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=6, **params), use_tqdm=False)  # type: ignore[arg-type]
    answer = output.outputs[0]
    return list(answer.token_ids), answer.finish_reason, answer.stop_reason


@pytest.mark.parametrize("eos", [OF_TOKENIZER, *OF_GENERATION_CONFIG])
def test_each_ends_the_answer(llm: LLM, eos: int) -> None:
    tokens, finish_reason, stop_reason = chat(llm, logit_bias={eos: 100.0})
    assert (tokens, finish_reason) == ([eos], "stop")
    assert stop_reason == (None if eos == OF_TOKENIZER else eos)  # as vLLM tells them apart
    assert chat(llm, logit_bias={eos: 100.0}, ignore_eos=True)[:2] == ([eos] * 6, "length")


def test_min_tokens_holds_all_of_them_back_and_stop_ids_too(llm: LLM) -> None:
    ends = [OF_TOKENIZER, *OF_GENERATION_CONFIG, 11]
    tokens, finish_reason, _ = chat(llm, logit_bias=dict.fromkeys(ends, 100.0), stop_token_ids=[11], min_tokens=4)
    assert len(tokens) == 5 and finish_reason == "stop"
    assert not set(tokens[:4]) & set(ends) and tokens[4] in ends
