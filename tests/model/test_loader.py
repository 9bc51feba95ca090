"""Reading a model directory: what loads is complete, what does not says which file, which tensor, and what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_engine.exceptions import VLLMValidationError
from mini_engine.model.config import ModelConfig
from mini_engine.model.loader import load_model
from tests.model.paged import dense_logits
from tests.tiny_model import LLAMA3_ROPE, edit_config, make_tiny_model


def test_sharded_equals_single(tmp_path: Path) -> None:
    single = load_model(make_tiny_model(tmp_path / "single"))
    sharded_dir = make_tiny_model(tmp_path / "sharded", shard_bytes=40_000)
    assert len(list(sharded_dir.glob("*.safetensors"))) > 3
    sharded = load_model(sharded_dir)
    prompt = list(range(3, 60))
    with torch.inference_mode():
        assert torch.equal(dense_logits(single, prompt), dense_logits(sharded, prompt))
    assert single.num_bytes == sharded.num_bytes


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(VLLMValidationError, match=r"no model\.safetensors"):
        load_model(tmp_path)
    make_tiny_model(tmp_path, shard_bytes=40_000)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(VLLMValidationError, match=shard.name):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(VLLMValidationError, match=r"config\.json: no such file"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 100, -1])  # empty, inside the length, inside the header, last byte gone
def test_truncated_file_is_an_error(tmp_path: Path, size: int) -> None:
    file = make_tiny_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(VLLMValidationError, match=r"model\.safetensors: corrupt or truncated"):
        load_model(tmp_path)


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path) / "model.safetensors"
    weights = load_file(file)
    norm = weights.pop("model.layers.1.input_layernorm.weight")
    save_file(weights, file)
    with pytest.raises(VLLMValidationError, match=r"1 weight\(s\) missing, first model\.layers\.1\.input_layernorm\.weight"):
        load_model(tmp_path)
    save_file({**weights, "model.layers.1.input_layernorm.weight": norm[1:].clone()}, file)
    with pytest.raises(VLLMValidationError, match=r"input_layernorm\.weight has shape \[47\].* \[48\]"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.input_layernorm.weight", "v_head.weight"])
def test_weights_without_a_place_are_named(tmp_path: Path, name: str) -> None:
    """A bias or a layer that config.json does not know of would be left out of every answer."""
    file = make_tiny_model(tmp_path) / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(96)}, file)
    with pytest.raises(VLLMValidationError, match=rf"1 tensor\(s\) without a place in .* first {name}"):
        load_model(tmp_path)


def test_a_shard_with_less_than_the_index_says(tmp_path: Path) -> None:
    shard = sorted(make_tiny_model(tmp_path, shard_bytes=40_000).glob("*.safetensors"))[1]
    weights = load_file(shard)
    name = sorted(weights)[0]
    del weights[name]
    save_file(weights, shard)
    with pytest.raises(VLLMValidationError, match=rf"1 weight\(s\) missing, first {name}"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(VLLMValidationError, match=r"model\.safetensors\.index\.json: not a safetensors index"):
        load_model(tmp_path)


def test_rotary_tables_and_a_tied_head_are_ignored(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path, tie_word_embeddings=True) / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": torch.ones(3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file)
    assert load_model(tmp_path).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is not supported; supported are LlamaForCausalLM, Qwen2"),
        ({"architectures": None}, r"\(none given\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        *(
            ({"rope_parameters": {"rope_type": kind, "factor": 4.0}}, f"rope scaling '{kind}' is")
            for kind in ("linear", "dynamic", "longrope")
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "'low_freq_factor' is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .*fp8.* is not supported"),
        ({"num_attention_heads": "6"}, "make no sense"),
        ({"num_key_value_heads": 4}, "6 is not a multiple of num_key_value_heads 4"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    make_tiny_model(tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises(VLLMValidationError, match=message):
        ModelConfig.from_dir(tmp_path)


def test_malformed_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(VLLMValidationError, match=r"config\.json: not readable as JSON"):
        ModelConfig.from_dir(tmp_path)


def test_old_and_new_spelling_of_rope(tmp_path: Path) -> None:
    """transformers 5 writes rope_parameters; most checkpoints on the hub have rope_theta and rope_scaling."""
    make_tiny_model(tmp_path, rope_parameters=LLAMA3_ROPE)
    new = ModelConfig.from_dir(tmp_path).rope
    assert new.scaled and new.original_max_position == 64
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    edit_config(tmp_path, rope_parameters=None, rope_scaling=scaling, rope_theta=10000.0)
    assert ModelConfig.from_dir(tmp_path).rope == new
    edit_config(tmp_path, rope_scaling=None, rope_theta=500000.0)
    assert ModelConfig.from_dir(tmp_path).rope.theta == 500000.0
