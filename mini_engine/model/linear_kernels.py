"""Matrix products on CPU with a weight laid out for the kernel that reads it: exact float32, or int8.

A kernel maps x [n, input_size] to x W^T + b. It holds the weight in the library's own layout; the plain one is not needed any more.

float32   oneDNN's blocked layout, through the operators that torch's own compiler uses for frozen weights. Half the time of F.linear
          at 1 to 32 rows, which copies or walks the plain layout at every call; the same at hundreds.
int8      weights: one scale per output channel, once. Activations: at each call, one scale per row, so that a row's numbers never
          depend on its neighbours (torch's dynamic linear takes one scale for all of them), and two int8 terms, the second for what
          the first rounded away: a decoder's activations have outliers, and one term costs five times more quality than the weights
          do. Twice the arithmetic, but a quarter of the bytes, and it is the bytes that decoding waits for.

Both are torch operators without a promise to stay: where one is missing, float32 goes on with F.linear, int8 is refused.

Stands at form 6 of a request.    vLLM: model_executor/layers/utils.py (CPU dispatch), layers/quantization
"""

import functools
import logging
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from mini_engine.exceptions import VLLMValidationError

logger = logging.getLogger(__name__)

Kernel = Callable[[Tensor], Tensor]

PACK_FOR_ROWS = 32  #: number of rows that the packed layout is chosen for; it serves any number
LEVELS = 63  #: an activation term is in [-63, 63]: without VNNI, pairs of 8-bit by 8-bit products would saturate at 16 bits
_INT8_OPERATOR = "linear_with_input_q_dq_qweight_dq_output_fp32"


def float32_kernel(weight: Tensor, bias: Tensor | None) -> Kernel | None:
    """weight [output_size, input_size]. None: nothing here is better than F.linear."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _has_packed_linear():
        return None
    packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_FOR_ROWS), torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


@functools.cache
def _has_packed_linear() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    missing = [name for name in ("_reorder_linear_weight", "_linear_pointwise") if not hasattr(torch.ops.mkldnn, name)]
    if missing:
        logger.warning("torch %s has no mkldnn %s: linear layers take about twice as long", torch.__version__, " and ".join(missing))
    return not missing


def int8_kernel(weight: Tensor, bias: Tensor | None) -> Kernel:
    """weight [output_size, input_size] float32 on CPU. Raises VLLMValidationError where this machine's torch cannot."""
    packed, multiply = _pack_int8(weight), getattr(torch.ops.quantized, _INT8_OPERATOR)

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


def _pack_int8(weight: Tensor) -> object:
    backends = torch.backends.quantized
    if "fbgemm" not in backends.supported_engines or not hasattr(torch.ops.quantized, _INT8_OPERATOR):
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
