"""ModelConfig: the shape of a Llama-like decoder, read from a model directory's config.json.

Three families differ in three switches only: Llama (optional biases, llama3 rope scaling), Qwen2 (bias on q, k, v), Qwen3 (a norm on
each head of q and k). What would need other arithmetic (sliding windows, other rope scalings, other activations) is refused by name
here, before any weight is read: a model that loads is a model that computes what its authors meant.

Stands before a request's path; no torch.    vLLM: config/model.py, model_executor/models/registry.py
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mini_engine.exceptions import VLLMValidationError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency, and Llama 3's stretching of the low ones (scaled is False without it)."""

    theta: float = 10000.0
    scaled: bool = False
    factor: float = 1.0  #: low frequencies are divided by this
    low_freq_factor: float = 1.0  #: wavelengths above original_max_position / low_freq_factor are stretched whole
    high_freq_factor: float = 4.0  #: wavelengths below original_max_position / high_freq_factor are left alone
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All that the decoder and the KV cache need to know. Sizes are in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  #: divides num_heads
    head_dim: int  #: even; num_heads * head_dim need not be hidden_size
    max_model_len: int  #: max_position_embeddings
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool  #: the output projection is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str | None  #: the checkpoint's, as config.json says it

    @classmethod
    def from_dir(cls, model_dir: str | Path) -> Self:
        """Read `model_dir`/config.json. Raises VLLMValidationError when it is missing, malformed or not supported."""
        path = Path(model_dir) / "config.json"
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise VLLMValidationError(f"{path}: no such file; a model directory holds config.json and *.safetensors") from None
        except VLLMValidationError as e:
            raise VLLMValidationError(f"{path}: {e}") from None
        except KeyError as e:
            raise VLLMValidationError(f"{path}: key {e} is missing") from None
        except (OSError, ValueError) as e:
            raise VLLMValidationError(f"{path}: not readable as JSON: {e}") from e
        except (TypeError, AttributeError, ZeroDivisionError) as e:
            raise VLLMValidationError(f"{path}: its values make no sense ({type(e).__name__}: {e})") from e

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The same from a parsed config.json. Raises KeyError for a missing size."""
        architectures = data.get("architectures") or ["(none given)"]
        architecture = next((a for a in architectures if a in SUPPORTED_ARCHITECTURES), None)
        if architecture is None:
            raise VLLMValidationError(
                f"architecture {', '.join(architectures)} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        if (act := data.get("hidden_act", "silu")) != "silu":
            raise VLLMValidationError(f"hidden_act {act!r} is not supported, only 'silu'")
        if data.get("use_sliding_window"):
            raise VLLMValidationError("use_sliding_window is not supported: attention here always sees the whole context")
        if quantization := data.get("quantization_config"):
            raise VLLMValidationError(f"quantization_config {quantization!r:.80} is not supported, only float32 and 16-bit weights")
        num_heads = data["num_attention_heads"]
        num_kv_heads = data.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise VLLMValidationError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
        qwen2 = architecture == "Qwen2ForCausalLM"
        attention_bias = bool(data.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=data["vocab_size"],
            hidden_size=data["hidden_size"],
            intermediate_size=data["intermediate_size"],
            num_layers=data["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=data.get("head_dim") or data["hidden_size"] // num_heads,
            max_model_len=data["max_position_embeddings"],
            rms_norm_eps=data["rms_norm_eps"],
            rope=_rope(data),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias and not qwen2,
            mlp_bias=bool(data.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            dtype=data.get("dtype") or data.get("torch_dtype"),
        )


def _rope(data: dict[str, Any]) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; older files have `rope_theta` beside an optional `rope_scaling`."""
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or data.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if (part := rope.get("partial_rotary_factor") or data.get("partial_rotary_factor") or 1.0) != 1.0:
        raise VLLMValidationError(f"partial_rotary_factor {part} is not supported: heads are rotated whole")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        raise VLLMValidationError(f"rope scaling {kind!r} is not supported; supported are 'default' and 'llama3'")
    return RopeConfig(
        theta=theta,
        scaled=True,
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position=rope["original_max_position_embeddings"],
    )
