"""The arithmetic between attentions: linear layers, RMS norm, rotary embedding.

Plain tensors, no nn.Module: a decode step at batch 1 is some hundreds of small calls, and what surrounds each call is paid every time.
A weight's layout is Linear's own business; loaders write through the views it hands out, so a fused weight is filled part by part.

Stands at form 6 of a request (tokens as tensors).    vLLM: model_executor/layers/{linear,layernorm,rotary_embedding}
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import Quantization
from mini_engine.model.config import RopeConfig
from mini_engine.model.int8_kernel import int8_kernel
from mini_engine.model.linear_kernels import Kernel, packed_kernel


class Linear:
    """y = x W^T + b, with the outputs of several checkpoint weights side by side (q, k, v; gate, up)."""

    __slots__ = ("bias", "kernel", "output_sizes", "weight")

    def __init__(self, input_size: int, output_sizes: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.output_sizes = tuple(output_sizes)
        self.weight = torch.empty(sum(output_sizes), input_size, dtype=dtype, device=device)
        self.bias = torch.empty(sum(output_sizes), dtype=dtype, device=device) if bias else None
        self.kernel: Kernel | None = None  #: None: F.linear. Else it has the weight, and `weight` is empty

    def slots(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Where the checkpoint's `NAME.weight` and `NAME.bias` go: views of the fused tensors, one name per output part."""
        parts = {f"{n}.weight": part for n, part in zip(names, self.weight.split(self.output_sizes), strict=True)}
        if self.bias is not None:
            parts |= {f"{n}.bias": part for n, part in zip(names, self.bias.split(self.output_sizes), strict=True)}
        return parts

    def pack(self, quantization: Quantization = "none") -> None:
        """After loading: lay the weight out as the fastest kernel reads it. The plain one is freed; slots() must not be used again."""
        self.kernel = int8_kernel(self.weight, self.bias) if quantization == "int8" else packed_kernel(self.weight, self.bias)
        if self.kernel is not None:
            self.weight = self.weight.new_empty(0)

    def __call__(self, x: Tensor) -> Tensor:  # x [n, input_size] → [n, sum(output_sizes)]
        return F.linear(x, self.weight, self.bias) if self.kernel is None else self.kernel(x)


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; `shape` may have leading dimensions (one weight per head)."""

    __slots__ = ("eps", "eps_tensor", "weight")

    def __init__(self, *shape: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(shape, dtype=dtype, device=device)
        self.eps, self.eps_tensor = eps, torch.tensor(eps, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, x.shape[-1:], None, self.eps).mul_(self.weight)
        # on CPU that is five operators with two passes more over x; the square root and its square cost n numbers, not n * hidden_size
        norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=self.eps_tensor.dtype)
        scale = torch.addcmul(self.eps_tensor, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(x, scale).to(x.dtype).mul_(self.weight)


class RotaryEmbedding:
    """Rotates each head's pairs (i, i + head_dim / 2) by position * frequency_i: attention then sees only distances."""

    def __init__(self, head_dim: int, rope: RopeConfig, device: torch.device) -> None:
        self.inv_freq = inverse_frequencies(head_dim, rope).to(device)  # [head_dim / 2] float32
        self.half = head_dim // 2

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For one step, shared by all layers: cos and the signed sin, each [n, 1, head_dim], from positions [n].

        Angles are float32 whatever the model's dtype: at position 100,000 a bfloat16 angle would be off by whole turns.
        """
        angles = positions.float().unsqueeze(1) * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), 1).unsqueeze(1).to(dtype), torch.cat((-sin, sin), 1).unsqueeze(1).to(dtype)

    def rotate_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """In place on x [n, heads, head_dim]. (x1, x2) → (x1 cos - x2 sin, x2 cos + x1 sin): the roll swaps x1 and x2."""
        swapped = torch.roll(x, self.half, -1)
        x.mul_(cos).addcmul_(swapped, sin)


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    """theta^(-2i / head_dim) for i < head_dim / 2; with Llama 3's scaling long wavelengths are stretched by `factor`.

    Between the two wavelength limits the stretch fades in linearly (in frequency). Float32 and in transformers' order of operations,
    so that both give the same bits.
    """
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if not rope.scaled:
        return inv_freq
    wavelength = 2 * math.pi / inv_freq
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(between, blended, scaled)
