"""A tiny GGUF file made from a tiny Hugging Face model as llama.cpp's converter makes it: the inverse of what we test."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel

from tests.tiny_model import Family, make_tiny_model

ALPHABET = sorted(ByteLevel.alphabet())
TOKENS = ["<|end|>", "<|im_start|>", "<tool>", *ALPHABET, "he", "ll", "hell", "hello", "Ġhello"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
TYPES = [3, 3, 4] + [1] * (len(TOKENS) - 3)


def permute(w: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp does to the q and k rows of llama models."""
    return w.reshape(num_heads, 2, w.shape[0] // num_heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def make_tiny_gguf(
    path: Path,
    family: Family = "llama",
    *,
    dtype: np.dtype[Any] | type = np.float32,
    quantized: gguf.GGMLQuantizationType | None = None,
    architecture: str | None = None,
    rope_freqs: np.ndarray | None = None,
    **metadata: Any,
) -> dict[str, np.ndarray]:
    """Write `path`; return the Hugging Face tensors it was made from. `metadata` overrides tokenizer.ggml.* strings."""
    heads, kv_heads = 6, 2
    sizes = {"vocab_size": len(TOKENS), "hidden_size": 96, "num_heads": heads, "num_kv_heads": kv_heads}  # whole blocks of 32
    directory = make_tiny_model(path.parent / f"{path.stem}-hf", family, **sizes)
    tensors = load_file(directory / "model.safetensors")
    arch = architecture or family
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(tensors["model.embed_tokens.weight"].shape[1])
    writer.add_feed_forward_length(96)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(metadata.get("model", "gpt2"))
    writer.add_tokenizer_pre(metadata.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(metadata.get("add_bos", False))
    writer.add_chat_template("{{ messages[0].content }}")
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), 2)
    for name, tensor in tensors.items():
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = permute(tensor, heads if "q_proj" in name else kv_heads)
        gguf_name = names.get_name(name, (".weight", ".bias"))
        assert gguf_name is not None, name
        if quantized is not None and tensor.ndim > 1:
            writer.add_tensor(gguf_name, gguf.quants.quantize(tensor, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(gguf_name, tensor.astype(dtype if tensor.ndim > 1 else np.float32))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
