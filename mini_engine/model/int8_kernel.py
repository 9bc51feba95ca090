"""`--quantization int8`: matrix products on CPU with weights of 8 bits. Opt-in, because it is not exact (tools/quality.py measures it).

Weights       one scale per output channel, once.
Activations   at each call, one scale per row, so that a row's numbers never depend on its neighbours (torch's dynamic linear takes one
              scale for all of them), and two int8 terms, the second for what the first rounded away: a decoder's activations have
              outliers, and one term costs five times more quality than the weights do. Twice the arithmetic, but a quarter of the
              bytes, and it is the bytes that decoding waits for.

The operators are fbgemm's, in torch without a promise to stay: where they are missing, int8 is refused. Their successors
(torch.ops.onednn.qlinear_prepack, qlinear_pointwise) are as fast with AVX-512 VNNI and several times slower with AVX2.

Stands at form 6 of a request.    vLLM: model_executor/layers/quantization
"""

import warnings

import torch
from torch import Tensor

from mini_engine.exceptions import VLLMValidationError
from mini_engine.model.linear_kernels import Kernel

LEVELS = 63  #: an activation term is in [-63, 63]: without VNNI, pairs of 8-bit by 8-bit products would saturate at 16 bits
_OPERATOR = "linear_with_input_q_dq_qweight_dq_output_fp32"


def int8_kernel(weight: Tensor, bias: Tensor | None) -> Kernel:
    """weight [output_size, input_size] float32 on CPU. Raises VLLMValidationError where this machine's torch cannot."""
    packed, multiply = _pack(weight), getattr(torch.ops.quantized, _OPERATOR)

    def kernel(x: Tensor) -> Tensor:
        n = x.shape[0]
        scale = x.abs().amax(-1, keepdim=True).clamp_min_(1e-30).div_(LEVELS)  # a row of zeros stays one
        rest = x / scale
        first = rest.round()
        rest.sub_(first).mul_(2 * LEVELS)  # what rounding took away, at most half a level, on the same scale of levels
        y = multiply(torch.cat((first, rest)), 1.0, LEVELS + 1, packed)
        y = y[:n].add_(y[n:], alpha=0.5 / LEVELS).mul_(scale)
        return y if bias is None else y.add_(bias)

    return kernel


def _pack(weight: Tensor) -> object:
    backends = torch.backends.quantized
    if "fbgemm" not in backends.supported_engines or not hasattr(torch.ops.quantized, _OPERATOR):
        raise VLLMValidationError(
            f"quantization int8 needs torch's fbgemm operators, which torch {torch.__version__} has not on this machine; leave it out",
            parameter="quantization",
        )
    scales = weight.abs().amax(1).double().clamp_min_(1e-30) / 127
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    engine, backends.engine = backends.engine, "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*quantized tensor creation functions.*")  # deprecated, with nothing in their place here
            return torch.ops.quantized.linear_prepack(torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), None)
    finally:
        backends.engine = engine
