"""ModelFiles and Tokenizer: what is read of a model directory, and what is said when it is not there."""

import json
import subprocess
from pathlib import Path

import pytest

from mini_engine.exceptions import VLLMValidationError
from mini_engine.model.default_model import prepare
from mini_engine.render.model_files import ModelFiles
from mini_engine.render.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import byte_fallback, byte_level, word_piece


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 400, "max_position_embeddings": 64, "eos_token_id": 1}')
    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory, name, data):
    (directory / name).write_text(json.dumps(data))


def test_default_model():
    files = ModelFiles.load(prepare(weights=False))
    assert (files.vocab_size, files.max_model_len) == (49152, 8192)
    assert Tokenizer.load(files.model_dir).eos_token_id == files.eos_token_ids[0] == 2
    assert "<|im_start|>" in files.chat_templates["default"]
    assert files.special_tokens["eos_token"] == "<|im_end|>"


def test_eos_ids_are_the_tokenizers_and_the_generation_configs(model_dir):
    write(model_dir, "tokenizer_config.json", {"eos_token": {"content": "<|end|>"}})
    assert ModelFiles.load(model_dir).eos_token_ids == [0, 1]
    write(model_dir, "generation_config.json", {"eos_token_id": [7, 0, 9]})
    assert ModelFiles.load(model_dir).eos_token_ids == [0, 7, 9]
    write(model_dir, "generation_config.json", {"temperature": 0.5, "max_new_tokens": 8, "top_k": None, "do_sample": True})
    files = ModelFiles.load(model_dir)
    assert files.eos_token_ids == [0]
    assert files.default_sampling_params == {"temperature": 0.5, "max_tokens": 8}


def test_chat_template_places(model_dir):
    assert ModelFiles.load(model_dir).chat_templates == {}
    write(
        model_dir, "tokenizer_config.json", {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}
    )
    assert ModelFiles.load(model_dir).chat_templates == {"default": "A", "tool_use": "B"}
    write(model_dir, "chat_template.json", {"chat_template": "C"})
    assert ModelFiles.load(model_dir).chat_templates == {"default": "C"}
    (model_dir / "chat_template.jinja").write_text("D")
    assert ModelFiles.load(model_dir).chat_templates == {"default": "D"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "no config.json in"),
        ("config.json", "{", "cannot read"),
        ("config.json", "[]", "cannot read .*config.json: Expected `object`"),
        ("config.json", '{"vocab_size": 4}', "max_position_embeddings must be a positive integer, got None"),
        ("generation_config.json", "nope", "generation_config.json"),
    ],
)
def test_bad_files_are_named(model_dir, name, content, message):
    (model_dir / name).unlink(missing_ok=True)
    if content is not None:
        (model_dir / name).write_text(content)
    with pytest.raises(VLLMValidationError, match=message):
        ModelFiles.load(model_dir)


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback(), word_piece()])
def test_vocabulary_facts(tokenizer):
    ids = list(tokenizer.backend.get_vocab().values())
    assert tokenizer.vocab_size == len(ids)
    assert max(len(tokenizer.token_text(i)) for i in ids) <= tokenizer.longest_token_chars
    assert tokenizer.visible_ids(False) - tokenizer.visible_ids(True) == tokenizer.special_token_ids
    for beyond in (-1, max(ids) + 1, 2**32, 2**70):
        assert tokenizer.token_text(beyond) == tokenizer.decode([beyond]) == ""
        assert beyond not in tokenizer.visible_ids(False)


def test_truncation_and_padding_of_the_training_run_are_off(model_dir):
    byte_level().backend.save(str(model_dir / "tokenizer.json"))
    data = json.loads((model_dir / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    write(model_dir, "tokenizer.json", data)
    text = "the quick brown fox"
    assert Tokenizer.load(model_dir).encode(text) == byte_level().encode(text)
    assert len(byte_level().encode(text)) == 4


def test_damaged_tokenizer_is_named(model_dir):
    (model_dir / "tokenizer.json").write_text("{}")
    with pytest.raises(VLLMValidationError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(model_dir)


# ── without tokenizer.json ──────────────────────────────────────────────────────────────────────────────


def test_no_tokenizer_at_all_says_what_is_missing(model_dir):
    (model_dir / "tokenizer.json").unlink()
    write(model_dir, "tokenizer_config.json", {})
    with pytest.raises(VLLMValidationError, match=r"no tokenizer in .*neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer.load(model_dir)


def test_converted_once_by_transformers_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "old-style"
    model.mkdir()
    saved = json.loads(byte_level().backend.to_str())["model"]
    write(model, "vocab.json", saved["vocab"])
    (model / "merges.txt").write_text("\n".join(" ".join(pair) for pair in saved["merges"]))
    write(model, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<|end|>", "eos_token": "<|end|>"})
    write(model, "config.json", {"model_type": "gpt2"})
    text = "the quick brown fox 你好 🙂"
    assert Tokenizer.load(model).encode(text) == byte_level().encode(text)

    def no_second_time(*args, **kwargs):
        raise AssertionError("converted twice")

    monkeypatch.setattr(subprocess, "run", no_second_time)
    tokenizer = Tokenizer.load(model)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == byte_level().eos_token_id
    assert not list((tmp_path / "cache" / "tokenizers").glob("tmp*"))


def test_no_place_for_a_conversion_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "tokenizer.model"))  # a file
    with pytest.raises(VLLMValidationError, match=r"cannot keep a tokenizer in .*set MINI_ENGINE_CACHE to another place"):
        Tokenizer.load(tmp_path)
    monkeypatch.delenv("MINI_ENGINE_CACHE")
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-at-all").expanduser())
    with pytest.raises(VLLMValidationError, match="Set MINI_ENGINE_CACHE"):
        Tokenizer.load(tmp_path)


def test_failed_conversion_gives_the_reason_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mini_engine.render.convert_tokenizer._PROGRAM", "raise SystemExit('no such tokenizer class')")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(VLLMValidationError, match="could not make one: no such tokenizer class"):
        Tokenizer.load(tmp_path)
    assert not list((tmp_path / "cache" / "tokenizers").iterdir())
