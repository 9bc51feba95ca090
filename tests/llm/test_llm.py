"""LLM: the offline interface, in process, on the mock device."""

import gc
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.config import MockConfig
from mini_engine.exceptions import EngineDeadError, VLLMValidationError
from mini_engine.executor.mock import mock_generate
from tests.llm.offline import PARAMS, VOCAB_SIZE, tokens
from tests.text.tiny_tokenizers import byte_level


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
        (None, PARAMS, "prompts must be text, .*; got None"),
        (5, PARAMS, "prompts must be .*; got 5"),
        (b"ab", PARAMS, "prompts must be .*; got b'ab'"),
        ({"a", "b"}, PARAMS, "prompts must be "),
        (["a", 5], PARAMS, "a prompt must be a list of token ids"),
        ("a", {"temperature": 0}, r"sampling_params must be one SamplingParams\(…\).*got \{'temperature': 0\}"),
        (["a", "\ud800"], PARAMS, "not valid Unicode"),
        (["a"], [None], r"sampling_params must be .*got \[None\]"),
        ("a", 5, "sampling_params must be .*got 5"),
    ],
)
def test_a_wrong_call_runs_nothing_and_leaves_the_engine_usable(llm: LLM, prompts: Any, params: Any, match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match):
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.reset_prefix_cache()  # no block is held
    assert len(tokens(llm.generate([[5]], PARAMS, use_tqdm=False)[0])) == 6


def test_leaving_the_interpreter_ends_the_devices_thread(model: str) -> None:
    """Not by __del__, which comes too late: a daemon thread inside torch would abort the process by then."""
    code = (
        "import sys, threading\nfrom mini_engine import LLM\n"
        f"keep = LLM({model!r}, executor='mock')\nkeep.cycle = keep\n"
        "real = keep._client.engine_core.executor.shutdown\n"
        "keep._client.engine_core.executor.shutdown = lambda: (real(), print('shut down', sys.is_finalizing()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "shut down False"), done.stderr


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


@pytest.mark.parametrize("messages", [None, 5, "hi", [{"role": "user"}], [{"content": "a"}], [[{"role": "user", "content": None}]]])
def test_wrong_messages_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(VLLMValidationError, match="messages"):
        llm.chat(messages, PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mock": {"foo": 1}}, "foo; there are step_ms, "),
        ({"mock": 5}, "mock must be MockConfig, got 5"),
        ({"mock_step_ms": 1}, 'write mock={"step_ms": …} for mock_step_ms'),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be bool, got 'no'"),
        ({"seed": "x"}, "seed must be int, got 'x'"),
        ({"max_model_len": 1.5}, r"max_model_len must be int \| None, got 1\.5"),
        ({"overlay": {"text.stop": 5}}, r"overlay must be dict\[str, str\], got"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization"),
        ({"mock": {"step_ms": -1}}, "mock.step_ms must be at least 0, got -1"),
        ({"mock": {"step_ms": "1"}}, "mock.step_ms must be float, got '1'"),
        ({"mock": {"crash_at_step": 0}}, "mock.crash_at_step must be at least 1, got 0"),
        ({"mock": {"hang_at_step": 0}}, "mock.hang_at_step must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(model: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match):
        LLM(model, **{"executor": "mock", **options})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("stop", 5), ("stop", [5]), ("temperature", "hot"), ("temperature", None), ("max_tokens", 1.5), ("bad_words", "abc")),
        *(("n", True), ("logit_bias", {"a": 1}), ("ignore_eos", "x"), ("output_kind", 2), ("stop_token_ids", ["a"]), ("seed", 2**64)),
    ],
)
def test_sampling_params_of_a_wrong_type_are_named(name: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=f"{name} must be .*, got {re.escape(repr(value))}") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 2**70) for name in ("max_tokens", "top_k", "logprobs", "prompt_logprobs")),
        *(("stop_token_ids", [2**70]), ("stop_token_ids", [-(2**70)]), ("allowed_token_ids", [2**70]), ("logit_bias", {2**70: 1.0})),
        *(("stop", ["\ud800"]), ("bad_words", ["a\ud800"]), ("extra_args", {"a": object()}), ("seed", 2**64 - 2)),
    ],
)
def test_sampling_params_that_no_message_can_carry_are_named(name: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=f"{name} (cannot be sent|must be a 64-bit)") as caught:
        SamplingParams(**{name: value, "n": 3})  # seed: answer 2 would have seed + 2
    assert caught.value.parameter == name
    str(caught.value).encode()


def test_close_is_idempotent_and_options_are_checked(model: str) -> None:
    llm = LLM(model, executor="mock", mock={"num_blocks": 8})
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="make a new one; it ended by being closed"):
        llm.generate("a", PARAMS)
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
