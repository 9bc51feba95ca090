"""The GGUF reader against damage, the converter against llama.cpp's own direction of it, for each family."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mini_engine.exceptions import VLLMValidationError
from mini_engine.model.gguf_convert import model_config, write_config_files, write_weights
from mini_engine.model.gguf_file import GGUFFile
from mini_engine.model.loader import load_model
from tests.model.paged import dense_logits
from tests.model.tiny_gguf import make_tiny_gguf
from tests.tiny_model import FAMILIES, LLAMA3_ROPE, Family


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    make_tiny_gguf(path)
    return path


def convert(path: Path) -> Path:
    directory = path.parent / f"{path.stem}-converted"
    directory.mkdir()
    with GGUFFile(path) as gguf:
        write_config_files(gguf, directory)
        write_weights(gguf, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_there_and_back_gives_the_same_model(tmp_path: Path, family: Family, dtype: type) -> None:
    original = make_tiny_gguf(tmp_path / "m.gguf", family, dtype=dtype)
    directory = convert(tmp_path / "m.gguf")
    converted = load_file(directory / "model.safetensors")
    assert converted.keys() == original.keys()
    for name, tensor in original.items():
        want = tensor.astype(dtype).astype(np.float32) if tensor.ndim > 1 else tensor
        np.testing.assert_array_equal(converted[name], want, err_msg=name)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "m-hf")
    ours = transformers.AutoConfig.from_pretrained(directory)
    for key in (
        "hidden_size",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "max_position_embeddings",
        "vocab_size",
    ):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert type(ours) is type(theirs)
    transformers.AutoModelForCausalLM.from_pretrained(directory)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantized", [None, GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
def test_logits_equal_transformers_reading_of_the_file(tmp_path: Path, family: Family, quantized: GGMLQuantizationType | None) -> None:
    """From the .gguf to logits, through the cache; transformers undoes llama's permutation in its own way."""
    make_tiny_gguf(tmp_path / "m.gguf", family, quantized=quantized)
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    config.head_dim = 16  # which it does not read from a qwen3 file
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.load_state_dict(load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=theirs)["tensors"])
    tokens = list(range(3, 60))
    with torch.inference_mode():
        ours = dense_logits(load_model(convert(tmp_path / "m.gguf")), tokens)
        torch.testing.assert_close(ours, theirs.eval()(torch.tensor([tokens])).logits[0], rtol=0, atol=1e-4)


def test_llama3_rope_is_recognised_from_its_divisors(tmp_path: Path) -> None:
    rope = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(head_dim=16, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    divisors = (10000.0 ** (-torch.arange(8) / 8) / scaled).numpy()
    assert divisors.max() > 1.5
    make_tiny_gguf(tmp_path / "m.gguf", rope_freqs=divisors)
    with GGUFFile(tmp_path / "m.gguf") as gguf:
        got = model_config(gguf)["rope_scaling"]
    assert got == {key: value for key, value in rope.items() if key != "rope_theta"}
    make_tiny_gguf(tmp_path / "odd.gguf", rope_freqs=divisors + 0.5)
    with GGUFFile(tmp_path / "odd.gguf") as gguf, pytest.raises(VLLMValidationError, match="rope scaling"):
        model_config(gguf)


@pytest.mark.parametrize(("pre", "add_bos", "expected"), [
    ("smollm", False, ["hello", "Ġ", "1", "2", "<|end|>", "<tool>"]),
    ("qwen2", False, ["hello", "Ġ", "1", "2", "<|end|>", "<tool>"]),
    ("llama-bpe", True, ["<|im_start|>", "hello", "Ġ", "1", "2", "<|end|>", "<tool>"]),
])  # fmt: skip
def test_tokenizer(tmp_path: Path, pre: str, add_bos: bool, expected: list[str]) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", pre=pre, add_bos=add_bos)
    with GGUFFile(tmp_path / "m.gguf") as gguf:
        write_config_files(gguf, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoding = tokenizer.encode("hello 12<|end|><tool>")
    assert encoding.tokens == expected
    assert tokenizer.decode(encoding.ids) == "hello 12<tool>"  # a control token is skipped, a user-defined one is text
    text = "naïve ½ 你好 👩‍👩‍👧 \t\r\n  x"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 0}
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


@pytest.mark.parametrize(("options", "message"), [
    ({"architecture": "gemma3"}, r"architecture 'gemma3' is not supported \(supported: llama, qwen2, qwen3\)"),
    ({"pre": "tekken"}, r"pre-tokenizer 'tekken' is not supported \(supported: gpt-2, llama-bpe, qwen2, smollm\)"),
    ({"model": "llama"}, r"tokenizer 'llama' is not supported \(supported: gpt2"),
])  # fmt: skip
def test_what_is_not_supported_is_named_with_what_is(tmp_path: Path, options: dict[str, str], message: str) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", **options)  # type: ignore[arg-type]
    with GGUFFile(tmp_path / "m.gguf") as gguf, pytest.raises(VLLMValidationError, match=message):
        write_config_files(gguf, tmp_path)


def header_end(path: Path) -> int:
    with GGUFFile(path) as gguf:
        return min(t.offset for t in gguf.tensors.values())


def test_a_file_cut_anywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    data, cut_file = tiny.read_bytes(), tmp_path / "cut.gguf"
    end = header_end(tiny)
    for cut in [*range(64), *range(64, end, 97), end, end + 1, len(data) - 64]:
        cut_file.write_bytes(data[:cut])
        with pytest.raises(VLLMValidationError, match=r"cut\.gguf"), GGUFFile(cut_file):
            pass


@given(data=st.data())
def test_damage_in_the_header_is_an_error_of_ours_or_harmless(tiny: Path, data: st.DataObject) -> None:
    content, end = bytearray(tiny.read_bytes()), header_end(tiny)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    damaged = tiny.parent / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        with GGUFFile(damaged) as gguf:
            for name in list(gguf.tensors)[:3]:
                gguf.dequantize(name)
    except VLLMValidationError:
        pass


def test_weights_that_are_not_finite_are_refused(tiny: Path, tmp_path: Path) -> None:
    content = bytearray(tiny.read_bytes())
    with GGUFFile(tiny) as gguf:
        offset = gguf.tensors["blk.0.attn_q.weight"].offset
    content[offset : offset + 4] = np.float32(np.nan).tobytes()
    (tmp_path / "nan.gguf").write_bytes(content)
    with GGUFFile(tmp_path / "nan.gguf") as gguf, pytest.raises(VLLMValidationError, match=r"blk\.0\.attn_q\.weight .*not finite"):
        gguf.dequantize("blk.0.attn_q.weight")
