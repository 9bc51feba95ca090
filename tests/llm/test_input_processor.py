"""InputProcessor: what it lets through the engine can serve, and what it refuses it refuses with the numbers."""

from typing import Any

import numpy as np
import pytest

from mini_engine.exceptions import VLLMValidationError
from mini_engine.llm.input_processor import MAX_BAD_WORDS_CHARS
from mini_engine.sampling_params import SamplingParams
from tests.llm.parts import EOS, MAX_MODEL_LEN, OTHER_EOS, VOCAB_SIZE, input_processor
from tests.text.tiny_tokenizers import byte_level


def params_of(params: SamplingParams, prompt: Any = (5, 6, 7)) -> SamplingParams:
    sent = input_processor().process_inputs("r", prompt, params).sampling_params
    assert sent is not None
    return sent


def test_ids() -> None:
    first, second = (input_processor().process_inputs("mine", [5], SamplingParams()) for _ in range(2))
    assert first.external_req_id == second.external_req_id == "mine"
    assert first.request_id != second.request_id
    prefix, _, suffix = first.request_id.rpartition("-")
    assert prefix == "mine" and len(suffix) == 8 and int(suffix, 16) >= 0


@pytest.mark.parametrize("prompt", [[3, 4], (3, 4), np.array([3, 4]), np.array([3, 4], np.int32)])
def test_any_sequence_of_ints_becomes_plain_ints(prompt: Any) -> None:
    ids = input_processor().process_inputs("r", prompt, SamplingParams()).prompt_token_ids
    assert ids == [3, 4] and all(type(i) is int for i in ids)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], "must not be empty"),
        ([1] * MAX_MODEL_LEN, f"{MAX_MODEL_LEN} tokens.*maximum model length of {MAX_MODEL_LEN} "),
        ([1] * 1000, f"1000 tokens.*maximum model length of {MAX_MODEL_LEN} "),
        ([1, VOCAB_SIZE], rf"token id {VOCAB_SIZE} .*\[0, {VOCAB_SIZE - 1}\]"),
        ([1, -1], "token id -1 "),
        ([1, 2.5], "list of token ids"),
        ([1, "2"], "list of token ids"),
        ([1 << 70], "list of token ids"),
        ([[1]], "list of token ids"),
    ],
)
def test_wrong_prompts(prompt: Any, match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match) as caught:
        input_processor().process_inputs("r", prompt, SamplingParams())
    assert caught.value.parameter == "prompt"


def test_the_longest_prompt_has_room_for_one_token() -> None:
    assert params_of(SamplingParams(max_tokens=None), [1] * (MAX_MODEL_LEN - 1)).max_tokens == 1


def test_max_tokens_is_filled_in_and_the_callers_params_stay_as_they_were() -> None:
    mine = SamplingParams(max_tokens=None, bad_words=["fox"], stop_token_ids=[9])
    before = mine.clone()
    assert params_of(mine).max_tokens == MAX_MODEL_LEN - 3
    assert mine == before


def test_eos_goes_to_the_engine_unless_ignored() -> None:
    sent = params_of(SamplingParams(stop_token_ids=[9, OTHER_EOS]))
    assert sent._eos_token_id == EOS
    assert sent.stop_token_ids == [9, OTHER_EOS]
    assert sent._all_stop_token_ids == {EOS, OTHER_EOS, 9}
    ignoring = params_of(SamplingParams(stop_token_ids=[9], ignore_eos=True))
    assert ignoring._eos_token_id is None
    assert ignoring.stop_token_ids == [9]
    assert ignoring._all_stop_token_ids == {EOS, OTHER_EOS, 9}  # min_tokens still masks them


def test_a_model_without_eos() -> None:
    sent = input_processor(eos_token_ids=()).process_inputs("r", [5], SamplingParams()).sampling_params
    assert sent is not None and sent._eos_token_id is None and sent._all_stop_token_ids == set()


def test_stop_ids_outside_the_vocabulary_are_never_masked() -> None:
    sent = params_of(SamplingParams(stop_token_ids=[9, VOCAB_SIZE + 5, -3], min_tokens=2))
    assert sent._all_stop_token_ids == {EOS, OTHER_EOS, 9}


def test_bad_words_become_tokens_alone_and_after_a_space() -> None:
    sequences = params_of(SamplingParams(bad_words=["fox", " fox"]))._bad_words_token_ids
    tokenizer = byte_level()
    assert sequences is not None
    assert {tokenizer.decode(sequence).strip() for sequence in sequences} == {"fox"}
    assert tokenizer.encode("fox", add_special_tokens=False) in sequences


@pytest.mark.parametrize("words", [["x" * (MAX_BAD_WORDS_CHARS + 1)], [f"w{i:06}" for i in range(100_000)]])
def test_bad_words_are_counted_before_they_are_tokenized(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    processor = input_processor()
    monkeypatch.setattr(processor, "_tokenizer", None)
    with pytest.raises(VLLMValidationError, match=rf"bad_words.*{MAX_BAD_WORDS_CHARS} .*got {sum(map(len, words))} in {len(words)} words"):
        processor.process_inputs("r", [5], SamplingParams(bad_words=words))


def test_as_many_bad_words_as_vllm_takes() -> None:
    """VLLM_MAX_NUM_BAD_WORDS, of eight tokens each."""
    assert len(params_of(SamplingParams(bad_words=[f"{i:03}-abcd" * 2 for i in range(128)]))._bad_words_token_ids or ()) >= 128


@pytest.mark.parametrize(
    ("params", "parameter", "match"),
    [
        (SamplingParams(logprobs=VOCAB_SIZE + 1), "logprobs", str(VOCAB_SIZE)),
        (SamplingParams(prompt_logprobs=VOCAB_SIZE + 1), "prompt_logprobs", str(VOCAB_SIZE)),
        (SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias", f"token id {VOCAB_SIZE}"),
        (SamplingParams(allowed_token_ids=[3, -2]), "allowed_token_ids", "token id -2"),
        (SamplingParams(min_tokens=62, max_tokens=None), "min_tokens", f"at most 61.*{MAX_MODEL_LEN}.*got 62"),
        (SamplingParams(min_tokens=90, max_tokens=99), "min_tokens", "at most 61"),
        (SamplingParams(structured_outputs={"regex": "a"}), "structured_outputs", "not supported"),
        (SamplingParams(thinking_token_budget=3), "thinking_token_budget", "not supported"),
        (SamplingParams(stream_interval=3), "stream_interval", "not supported"),
    ],
)
def test_wrong_params_name_the_parameter(params: SamplingParams, parameter: str, match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match) as caught:
        params_of(params)
    assert caught.value.parameter == parameter


def test_everything_else_is_carried() -> None:
    request = input_processor().process_inputs("r", [5], SamplingParams(), arrival_time=3.5, priority=2, cache_salt="s")
    assert (request.arrival_time, request.priority, request.cache_salt) == (3.5, 2, "s")
    assert (request.mm_features, request.pooling_params, request.lora_request, request.resumable) == (None, None, None, False)
