"""The decoder: Llama, Qwen2 and Qwen3 as one stack of layers, switched by ModelConfig.

Input is one step's tokens, all requests end to end, without padding and without a batch dimension; only attention knows where one
request ends. Output is a hidden state per token; logits are computed for the rows that someone will read, usually one per request:
the output projection is the largest matrix of a small model.

Stands at form 6 of a request.    vLLM: model_executor/models/{llama,qwen2,qwen3}.py
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import Quantization
from mini_engine.model.attention import AttentionBackend, AttentionMetadata
from mini_engine.model.config import ModelConfig
from mini_engine.model.cpu_attention import TAKES, CPUAttentionBackend
from mini_engine.model.cpu_kernels import CPUKernels, CPULinear, HugePages
from mini_engine.model.int8_linear import Int8Linear
from mini_engine.model.layers import Linear, RMSNorm, RotaryEmbedding, silu_and_mul
from mini_engine.model.linear_kernels import Kernel, packed_kernel
from mini_engine.model.sdpa_attention import SDPABackend

logger = logging.getLogger(__name__)


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: CPUKernels | None) -> None:
        self.config, self.kernels = config, kernels
        norm = partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype, device=device, kernels=kernels)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.input_norm = norm(config.hidden_size)
        self.qkv_proj = Linear(config.hidden_size, (q_size, kv_size, kv_size), config.qkv_bias, dtype, device)
        # torch's attention applies it to a strided view; the C kernel norms heads itself, with its weight
        self.qk_norm = norm(config.num_heads + config.num_kv_heads, config.head_dim, kernels=None) if config.qk_norm else None
        self.o_proj = Linear(q_size, (config.hidden_size,), config.o_bias, dtype, device)
        self.post_attention_norm = norm(config.hidden_size)
        self.gate_up_proj = Linear(config.hidden_size, (config.intermediate_size,) * 2, config.mlp_bias, dtype, device)
        self.down_proj = Linear(config.intermediate_size, (config.hidden_size,), config.mlp_bias, dtype, device)

    def slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name → where that weight goes. A norm of heads is one vector, written to every head's row."""
        attn, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        slots = {
            f"{prefix}input_layernorm.weight": self.input_norm.weight,
            f"{prefix}post_attention_layernorm.weight": self.post_attention_norm.weight,
            **self.qkv_proj.slots([f"{attn}{n}_proj" for n in "qkv"]),
            **self.o_proj.slots([f"{attn}o_proj"]),
            **self.gate_up_proj.slots([f"{mlp}gate_proj", f"{mlp}up_proj"]),
            **self.down_proj.slots([f"{mlp}down_proj"]),
        }
        if self.qk_norm is not None:
            slots[f"{attn}q_norm.weight"] = self.qk_norm.weight[: self.config.num_heads]
            slots[f"{attn}k_norm.weight"] = self.qk_norm.weight[self.config.num_heads :]
        return slots

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        """Add this layer's part to `hidden` [num_tokens, hidden_size], in place."""
        qkv = self.qkv_proj(self.input_norm(hidden))
        self.o_proj.add_to(hidden, metadata.attend(qkv, self.qk_norm, cos, sin, kv_cache))
        gate_up = self.gate_up_proj(self.post_attention_norm(hidden))
        self.down_proj.add_to(hidden, silu_and_mul(gate_up) if self.kernels is None else self.kernels.silu_and_mul(gate_up))


class Decoder:
    """The model. Weights are uninitialised until a loader has filled every slot (loader.py)."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", kernels: CPUKernels | None = None
    ) -> None:
        """kernels: for float32 on CPU only. None: torch's operators."""
        assert kernels is None or (torch.device(device).type, dtype) == ("cpu", torch.float32)
        self.config, self.dtype, self.device, self.kernels = config, dtype, torch.device(device), kernels
        self.embed_tokens = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=self.device)
        self.layers = [DecoderLayer(config, dtype, self.device, kernels) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device=self.device, kernels=kernels)
        self.lm_head = Linear(config.hidden_size, (config.vocab_size,), False, dtype, self.device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens
        self.rotary = RotaryEmbedding(config.head_dim, config.rope, self.device)
        self.num_bytes = sum(slot.nbytes for slot in self.slots().values())  #: of all weights

    def slots(self) -> dict[str, Tensor]:
        """Every checkpoint name that must be loaded, and the view it is copied to."""
        slots = {"model.embed_tokens.weight": self.embed_tokens, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            slots |= self.lm_head.slots(["lm_head"])
        for i, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{i}.")
        return slots

    def pack(self, quantization: Quantization = "none") -> None:
        """After loading, once: see Linear.pack. Costs a second copy of one weight at a time, and of a tied embedding for good."""
        in_layers = (linear for layer in self.layers for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj))
        linears = [*in_layers, self.lm_head]
        pack: Callable[[Tensor, Tensor | None], Kernel | None] = packed_kernel
        if self.kernels is not None:
            pages = HugePages(sum(CPULinear.most_bytes(linear.weight) for linear in linears))
            pack = partial(Int8Linear if quantization == "int8" else CPULinear, self.kernels, pages)
        for linear in linears:
            linear.pack(pack)

    def attention_backend(self, block_size: int) -> AttentionBackend:
        """The one for this model, its device and blocks of this size."""
        if self.kernels is not None and CPUAttentionBackend.supports(self.config, block_size):
            return CPUAttentionBackend(self.kernels, self.config, block_size)
        if self.kernels is not None:
            logger.warning("%s, not block size %d and heads of %d: torch's attention, slower", TAKES, block_size, self.config.head_dim)
        return SDPABackend(self.config, block_size, self.dtype, self.device)

    def forward(self, token_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata) -> Tensor:
        """One step. token_ids, positions [num_tokens] int → hidden states [num_tokens, hidden_size], normed.

        Writes the tokens' KV to where `metadata` says; the caches are those of the backend that built it.
        """
        hidden = F.embedding(token_ids, self.embed_tokens)
        cos, sin = self.rotary.cos_sin(positions, self.dtype)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            layer(hidden, cos, sin, kv_cache, metadata)
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] → logits [n, vocab_size], in the model's dtype."""
        return self.lm_head(hidden)
