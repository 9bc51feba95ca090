"""A tiny random model directory in Hugging Face's format, written by transformers: the oracle and we read the same files.

Promises  the same arguments give the same files; every weight is random (no zero biases, no all-one norms: a forgotten one shows);
          greedy output is not a constant; no tokenizer is written.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Family = Literal["llama", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")

_CLASSES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

#: Llama 3's rope scaling, with a context short enough that tiny prompts reach every branch of it
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_tiny_model(
    directory: str | Path,
    family: Family = "llama",
    seed: int = 0,
    vocab_size: int = 256,
    *,
    num_layers: int = 2,
    hidden_size: int = 48,
    intermediate_size: int = 96,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = False,
    eos_token_id: int | list[int] = 2,
    shard_bytes: int | None = None,
    **config: Any,
) -> Path:
    """Write config.json, generation_config.json and model.safetensors (several and an index with shard_bytes); return the directory.

    num_heads * head_dim != hidden_size on purpose: code that takes one for the other fails. (Qwen2 has no head_dim of its own:
    there hidden_size is raised to the product.) `config` goes to the family's config class, e.g. rope_parameters=LLAMA3_ROPE.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if family == "qwen2":
        hidden_size = num_heads * head_dim
    else:
        config["head_dim"] = head_dim
    config_class, model_class = _CLASSES[family]
    hf_config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=eos_token_id,
        pad_token_id=None,
        dtype="float32",
        **config,
    )
    model = model_class(hf_config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * (1.0 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5))
    model.save_pretrained(directory, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    GenerationConfig(bos_token_id=1, eos_token_id=eos_token_id, do_sample=False).save_pretrained(directory)
    return directory


def load_reference(directory: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same model in transformers, with eager attention: the oracle."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def reference_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' greedy continuation of `prompt`, EOS ignored."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def edit_config(directory: str | Path, **changes: Any) -> None:
    """Overwrite keys of config.json; None removes one."""
    path = Path(directory) / "config.json"
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
