"""GGUF → the files of a model directory: config.json, tokenizer.json and its companions, model.safetensors in float32.

Promises  the directory is what transformers, vLLM, vllm-rs and our loader read: Hugging Face names, shapes and row order. Only what the
          file says is written; an architecture or tokenizer that is not known is refused by name, not guessed.
Traps     llama files store q and k rows permuted for interleaved rotary embedding; `_unpermute` undoes it. Qwen files do not.
          A head that shares the embedding's weights is simply absent from the file.
Not here  where the directory lies, locks, atomicity (default_model.py); the byte format (gguf_file.py).

Before the request's path.    vLLM: transformers_utils/gguf_utils.py, model_executor/model_loader/gguf_loader.py
"""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from mini_engine.exceptions import VLLMValidationError
from mini_engine.model.gguf_file import GGUFFile

#: general.architecture → (model_type, architectures entry)
ARCHITECTURES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SKIPPED: Final = {"rope_freqs.weight"}  # it is in config.json, as rope_scaling

_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def _words(digits: str, letters: str = r"[^\r\n\p{L}\p{N}]?\p{L}+") -> list[dict[str, Any]]:
    """Pre-tokenizer of the Llama 3 kind: one regular expression, then bytes to letters."""
    pattern = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTE_LEVEL, "use_regex": False}]


#: tokenizer.ggml.pre → pre-tokenizers in order
PRE_TOKENIZERS: Final = {
    "smollm": [{"type": "Digits", "individual_digits": True}, {**_BYTE_LEVEL, "use_regex": True}],
    "gpt-2": [{**_BYTE_LEVEL, "use_regex": True}],
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
}


def _refuse(gguf: GGUFFile, what: str, got: object, known: Any) -> VLLMValidationError:
    message = f"{gguf.path}: {what} {got!r} is not supported (supported: {', '.join(sorted(known))})"
    return VLLMValidationError(message, parameter="model", value=str(gguf.path))


def _metadata(gguf: GGUFFile, key: str) -> Any:
    try:
        return gguf.metadata[key]
    except KeyError:
        raise VLLMValidationError(f"{gguf.path}: no {key!r} in its metadata: damaged, or no language model") from None


def _exact(value: float) -> float:
    """The decimal that was meant: 9.999999747378752e-06, read from a float32, is 1e-05."""
    return float(str(np.float32(value)))


def model_config(gguf: GGUFFile) -> dict[str, Any]:
    """config.json. Raises VLLMValidationError for an architecture that is not in ARCHITECTURES."""
    arch = _metadata(gguf, "general.architecture")
    if arch not in ARCHITECTURES:
        raise _refuse(gguf, "architecture", arch, ARCHITECTURES)
    model_type, class_name = ARCHITECTURES[arch]

    def get(key: str) -> Any:
        return _metadata(gguf, f"{arch}.{key}")

    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in gguf.tensors:
            raise VLLMValidationError(f"{gguf.path}: no tensor {name}: damaged, or no language model")
    num_heads = get("attention.head_count")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.metadata.get(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": gguf.tensors["blk.0.attn_q.weight"].shape[0] // num_heads,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": _exact(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": _exact(gguf.metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": "float32",
        **_special_ids(gguf),
    }
    if arch == "llama":
        config["mlp_bias"] = False
    if "rope_freqs.weight" in gguf.tensors:
        config["rope_scaling"] = _llama3_rope_scaling(gguf, config)
    elif (scaling := gguf.metadata.get(f"{arch}.rope.scaling.type", "none")) != "none":
        raise _refuse(gguf, "rope scaling", scaling, ["none", "llama3"])
    return config


def _llama3_rope_scaling(gguf: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """The file holds one divisor per frequency; find the Llama 3 rule that made them, and check that it does."""
    divisors = gguf.dequantize("rope_freqs.weight")
    scaling = {
        "factor": round(float(divisors.max()), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    half = config["head_dim"] // 2
    wavelength = 2 * np.pi * config["rope_theta"] ** (np.arange(half) / half)
    smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise _refuse(gguf, "rope scaling", "of an unknown kind", ["none", "llama3"])
    return {"rope_type": "llama3", **scaling}


def _special_ids(gguf: GGUFFile) -> dict[str, Any]:
    """bos / eos / pad token ids; eos is a list when the file names an end of turn as well."""
    ids = {key: gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in (("bos", "bos"), ("pad", "padding"))}
    eos = [gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(i for i in eos if i is not None))
    found = {"bos_token_id": ids["bos"], "eos_token_id": eos[0] if len(eos) == 1 else eos or None, "pad_token_id": ids["pad"]}
    return {key: value for key, value in found.items() if value is not None}


def tokenizer_files(gguf: GGUFFile) -> dict[str, Any]:
    """tokenizer.json and tokenizer_config.json, from the vocabulary, merges and token types in the metadata."""
    if (kind := _metadata(gguf, "tokenizer.ggml.model")) != "gpt2":
        raise _refuse(gguf, "tokenizer", kind, ["gpt2 (byte-level BPE)"])
    pre = _metadata(gguf, "tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise _refuse(gguf, "pre-tokenizer", pre, PRE_TOKENIZERS)
    tokens = _metadata(gguf, "tokenizer.ggml.tokens")
    types = _metadata(gguf, "tokenizer.ggml.token_type")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, **plain, "special": kind == _CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    bos = gguf.metadata.get("tokenizer.ggml.bos_token_id")
    add_bos = gguf.metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": _prepend(tokens[bos], bos) if bos is not None and add_bos else None,
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": _metadata(gguf, "tokenizer.ggml.merges"),
        },
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.metadata.get(f"{gguf.metadata.get('general.architecture')}.context_length"),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(t["id"]): {key: value for key, value in t.items() if key != "id"} for t in added},
    }
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (token_id := gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = tokens[token_id]
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _prepend(token: str, token_id: int) -> dict[str, Any]:
    """Post-processor that puts one token before every text (add_special_tokens)."""
    special, first, second = (
        {"SpecialToken": {"id": token, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"id": "B", "type_id": 1},
    )
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, {"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": second}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def write_config_files(gguf: GGUFFile, directory: Path) -> None:
    """Everything but the weights, into an existing directory."""
    files = {"config.json": model_config(gguf), "generation_config.json": _special_ids(gguf), **tokenizer_files(gguf)}
    for name, content in files.items():
        indent = None if name == "tokenizer.json" else 2
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
    if template := gguf.metadata.get("tokenizer.chat_template"):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (0, d/2, 1, d/2 + 1, …), rotary pairs side by side, back to (0, 1, …, d - 1)."""
    return array.reshape(num_heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _hf_name(gguf: GGUFFile, name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        raise VLLMValidationError(f"{gguf.path}: tensor {name!r} has no place in a {gguf.metadata.get('general.architecture')} model")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def safetensors_bytes(gguf: GGUFFile) -> int:
    """Size of the float32 weights, for the disk-space check."""
    return sum(4 * int(np.prod(t.shape)) for t in gguf.tensors.values())


def write_weights(gguf: GGUFFile, path: Path, on_bytes: Callable[[int], None] = lambda n: None) -> None:
    """model.safetensors, float32, one tensor in memory at a time. `on_bytes` hears how many bytes each tensor added.

    The format: u64 header length, JSON of name → dtype, shape, [begin, end), data. Written here because the safetensors package
    wants all tensors at once, twice the memory of the model."""
    config = model_config(gguf)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if config["model_type"] == "llama" else {}
    names = [name for name in gguf.tensors if name not in _SKIPPED]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + 4 * int(np.prod(gguf.tensors[name].shape))
        header[_hf_name(gguf, name)] = {"dtype": "F32", "shape": gguf.tensors[name].shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in names:
            array = gguf.dequantize(name)
            if (num_heads := heads.get(name.split(".")[-2])) is not None:
                array = np.ascontiguousarray(_unpermute(array, num_heads))
            f.write(array.data)
            on_bytes(array.nbytes)
