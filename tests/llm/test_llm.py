"""LLM: the offline interface, in process, on the mock device."""

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.config import MockConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.executor.mock import mock_generate
from tests.text.tiny_tokenizers import byte_level

VOCAB_SIZE = 400
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
PARAMS = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "max_position_embeddings": 128, "eos_token_id": 0}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.6, "max_new_tokens": 3}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    byte_level().backend.save(str(directory / "tokenizer.json"))
    return str(directory)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, executor="mock", num_gpu_blocks_override=12) as llm:
        yield llm


def tokens(output: Any) -> list[int]:
    return output.outputs[0].token_ids


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = byte_level().encode("the fox")
    expected = mock_generate(ids, 6, VOCAB_SIZE)
    for prompts in ("the fox", ["the fox"], ids, [ids], {"prompt_token_ids": ids}, [{"prompt": "the fox"}]):
        (output,) = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert tokens(output) == expected
        assert output.outputs[0].text == byte_level().decode(expected)
        assert (output.finished, output.outputs[0].finish_reason, output.prompt_token_ids) == (True, "length", ids)
    assert llm.generate([], PARAMS, use_tqdm=False) == []


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[5 + i] * (1 + i % 5) for i in range(50)]  # more than fit at once
    params = [SamplingParams(temperature=0.0, max_tokens=20 - i % 19) for i in range(50)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [tokens(o) for o in outputs] == [mock_generate(p, 20 - i % 19, VOCAB_SIZE) for i, p in enumerate(prompts)]


def test_chat_renders_the_models_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(conversation, PARAMS, use_tqdm=False)
    assert one.prompt == "user: hello\nassistant:"
    assert tokens(one) == mock_generate(byte_level().encode("user: hello\nassistant:"), 6, VOCAB_SIZE)
    assert [tokens(o) for o in llm.chat([conversation, conversation], PARAMS, use_tqdm=False)] == [tokens(one)] * 2


def test_several_answers_and_stop_strings(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6]], SamplingParams(n=3, max_tokens=4), use_tqdm=False)
    assert [(c.index, len(c.token_ids)) for c in output.outputs] == [(0, 4), (1, 4), (2, 4)]
    text = byte_level().decode(mock_generate([5, 6], 30, VOCAB_SIZE))
    stop = text[6:8]
    (output,) = llm.generate([[5, 6]], SamplingParams(temperature=0.0, max_tokens=30, stop=stop), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (text[: text.index(stop)], stop)


def test_default_sampling_is_the_models(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.max_tokens) == (0.6, 3)
    assert len(tokens(llm.generate("a", use_tqdm=False)[0])) == 3


def test_the_progress_bar_talks_on_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], PARAMS)
    captured = capsys.readouterr()
    assert captured.out == "" and "2/2" in captured.err and "12 tokens" in captured.err


@pytest.mark.parametrize(
    ("prompts", "params", "match"),
    [
        (["a", []], PARAMS, "must not be empty"),
        ([[5], [5] * 128], PARAMS, r"128 tokens.*128 "),
        ([[5], [VOCAB_SIZE]], PARAMS, f"token id {VOCAB_SIZE}"),
        ([{"prompt_ids": [5]}], PARAMS, "prompt_ids"),
        ([{}], PARAMS, "a prompt needs"),
        (["a", "b"], [PARAMS], "2 prompts need as many sampling_params, got 1"),
        (["a"], SamplingParams(structured_outputs={"regex": "a"}), "structured_outputs"),
    ],
)
def test_a_wrong_call_runs_nothing_and_leaves_the_engine_usable(llm: LLM, prompts: Any, params: Any, match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match):
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.reset_prefix_cache()  # no block is held
    assert len(tokens(llm.generate([[5]], PARAMS, use_tqdm=False)[0])) == 6


def test_an_interrupt_leaves_the_engine_empty_and_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.llm_engine.step, iter(range(100))

    def interrupted() -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], PARAMS, use_tqdm=False)
    monkeypatch.undo()
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.reset_prefix_cache()
    assert len(tokens(llm.generate([[5]], PARAMS, use_tqdm=False)[0])) == 6


def test_del_frees_it_without_the_garbage_collector(model: str) -> None:
    before = set(threading.enumerate())
    gc.disable()
    try:
        llm = LLM(model, executor="mock", async_scheduling=False, mock=MockConfig(num_blocks=8))
        llm.generate("a", PARAMS, use_tqdm=False)
        watched = weakref.ref(llm.llm_engine.client)
        del llm
        assert watched() is None
    finally:
        gc.enable()
    assert set(threading.enumerate()) <= before


def test_close_is_idempotent_and_options_are_checked(model: str) -> None:
    llm = LLM(model, executor="mock", mock={"num_blocks": 8})
    llm.close()
    llm.close()
    with pytest.raises(VLLMValidationError, match="max_num_sequences"):
        LLM(model, executor="mock", max_num_sequences=3)
    with pytest.raises(VLLMValidationError, match="executor must be one of"):
        LLM(model, executor="tpu")


def test_two_in_one_process(model: str) -> None:
    with LLM(model, executor="mock") as a, LLM(model, executor="mock", block_size=4) as b:
        assert tokens(a.generate([[5]], PARAMS, use_tqdm=False)[0]) == tokens(b.generate([[5]], PARAMS, use_tqdm=False)[0])


def test_a_missing_model_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(VLLMValidationError):
        LLM(str(tmp_path / "nothing"), executor="mock")
