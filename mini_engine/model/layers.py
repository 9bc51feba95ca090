"""The arithmetic between attentions: linear layers, RMS norm, rotary embedding.

Plain tensors, no nn.Module: a decode step at batch 1 is some hundreds of small calls, and what surrounds each call is paid every time.
A weight's layout is Linear's own business; loaders write through the views it hands out, so a fused weight is filled part by part.

Stands at form 6 of a request (tokens as tensors).    vLLM: model_executor/layers/{linear,layernorm,rotary_embedding}
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.model.config import RopeConfig
from mini_engine.model.cpu_kernels import CPUKernels, CPULinear
from mini_engine.model.linear_kernels import Kernel


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

    def pack(self, pack: Callable[[Tensor, Tensor | None], Kernel | None]) -> None:
        """After loading: give the weight to a kernel, in the layout that it reads. The plain one is freed; no more slots() after that."""
        self.kernel = pack(self.weight, self.bias)
        if self.kernel is not None:
            self.weight = self.weight.new_empty(0)

    def __call__(self, x: Tensor) -> Tensor:  # x [n, input_size] → [n, sum(output_sizes)]
        return F.linear(x, self.weight, self.bias) if self.kernel is None else self.kernel(x)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        """hidden += self(x): the residual stream, without a tensor in between where the kernel can."""
        if isinstance(self.kernel, CPULinear):
            self.kernel(x, hidden)
        else:
            hidden += self(x)


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; `shape` may have leading dimensions (one weight per head)."""

    __slots__ = ("eps", "kernels", "weight")

    def __init__(self, *shape: int, eps: float, dtype: torch.dtype, device: torch.device, kernels: CPUKernels | None = None) -> None:
        self.weight = torch.empty(shape, dtype=dtype, device=device)
        self.eps, self.kernels = eps, kernels

    def __call__(self, x: Tensor) -> Tensor:
        if self.kernels is not None:
            return self.kernels.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, x.shape[-1:], None, self.eps).mul_(self.weight)


class RotaryEmbedding:
    """The angles by which attention rotates each head's pairs (i, i + head_dim / 2): position * frequency_i, so it sees only distances."""

    def __init__(self, head_dim: int, rope: RopeConfig, device: torch.device) -> None:
        self.inv_freq = inverse_frequencies(head_dim, rope).to(device)  # [head_dim / 2] float32

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For one step, shared by all layers: cos and the signed sin, each [n, 1, head_dim], from positions [n].

        Angles are float32 whatever the model's dtype: at position 100,000 a bfloat16 angle would be off by whole turns.
        """
        angles = positions.float().unsqueeze(1) * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), 1).unsqueeze(1).to(dtype), torch.cat((-sin, sin), 1).unsqueeze(1).to(dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[n, 2 * size] → [n, size]: silu(gate) * up, in place on gate."""
    gate, up = gate_up.chunk(2, 1)
    return F.silu(gate, inplace=True).mul_(up)


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
