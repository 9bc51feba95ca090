"""The decoder: Llama, Qwen2 and Qwen3 as one stack of layers, switched by ModelConfig.

Input is one step's tokens, all requests end to end, without padding and without a batch dimension; only attention knows where one
request ends. Output is a hidden state per token; logits are computed for the rows that someone will read, usually one per request:
the output projection is the largest matrix of a small model.

Stands at form 6 of a request.    vLLM: model_executor/models/{llama,qwen2,qwen3}.py
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import Quantization
from mini_engine.model.attention import AttentionMetadata, new_kv_cache, paged_attention
from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import Linear, RMSNorm, RotaryEmbedding
from mini_engine.model.linear_kernels import MIN_ROWS


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        norm = partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype, device=device)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.input_norm = norm(config.hidden_size)
        self.qkv_proj = Linear(config.hidden_size, (q_size, kv_size, kv_size), config.qkv_bias, dtype, device)
        self.qk_norm = norm(config.num_heads + config.num_kv_heads, config.head_dim)
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
        if self.config.qk_norm:
            slots[f"{attn}q_norm.weight"] = self.qk_norm.weight[: self.config.num_heads]
            slots[f"{attn}k_norm.weight"] = self.qk_norm.weight[self.config.num_heads :]
        return slots

    def __call__(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, rotary: RotaryEmbedding, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> None:
        """Add this layer's part to `hidden` [num_rows, hidden_size], in place. Rows past the step's tokens are padding."""
        config, num_rows = self.config, hidden.shape[0]
        num_qk_heads = config.num_heads + config.num_kv_heads
        qkv = self.qkv_proj(self.input_norm(hidden)).view(num_rows, -1, config.head_dim)
        qk = qkv[:, :num_qk_heads]
        if config.qk_norm:
            qk.copy_(self.qk_norm(qk))
        rotary.rotate_(qk, cos, sin)
        kv = qkv[:, config.num_heads :].view(num_rows, 2, config.num_kv_heads, config.head_dim)
        hidden += self.o_proj(paged_attention(qkv[:, : config.num_heads], kv, kv_cache, metadata))
        gate, up = self.gate_up_proj(self.post_attention_norm(hidden)).chunk(2, 1)
        hidden += self.down_proj(F.silu(gate, inplace=True).mul_(up))


class Decoder:
    """The model. Weights are uninitialised until a loader has filled every slot (loader.py)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.embed_tokens = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=self.device)
        self.layers = [DecoderLayer(config, dtype, self.device) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device=self.device)
        self.lm_head = Linear(config.hidden_size, (config.vocab_size,), False, dtype, self.device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens
        self.rotary = RotaryEmbedding(config.head_dim, config.rope, self.device)
        self.min_rows = 1  #: a step of fewer tokens is padded to so many
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
        for layer in self.layers:
            for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj):
                linear.pack(quantization)
        self.lm_head.pack(quantization)
        if quantization == "none" and self.lm_head.kernel is not None:
            self.min_rows = MIN_ROWS

    def new_kv_caches(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """Zeroed caches, one per layer."""
        c = self.config
        return new_kv_cache(c.num_layers, num_blocks, block_size, c.num_kv_heads, c.head_dim, self.dtype, self.device)

    def forward(self, token_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata) -> Tensor:
        """One step. token_ids, positions [num_tokens] int → hidden states [num_tokens, hidden_size], normed.

        Writes the tokens' KV to the slots of `metadata`.
        """
        num_tokens = len(token_ids)
        if num_padding := max(self.min_rows - num_tokens, 0):
            token_ids, positions = F.pad(token_ids, (0, num_padding)), F.pad(positions, (0, num_padding))
        hidden = F.embedding(token_ids, self.embed_tokens)
        cos, sin = self.rotary.cos_sin(positions, self.dtype)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            layer(hidden, cos, sin, self.rotary, kv_cache, metadata)
        return self.norm(hidden)[:num_tokens]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] → logits [n, vocab_size], in the model's dtype."""
        num_padding = max(self.min_rows - len(hidden), 0)
        return self.lm_head(F.pad(hidden, (0, 0, 0, num_padding)))[: len(hidden)] if num_padding else self.lm_head(hidden)
