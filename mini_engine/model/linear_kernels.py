"""Matrix products on CPU by torch's oneDNN, where the C kernels (cpu_kernels.py) are not: bfloat16 on processors that have it, or no
compiler. The weight is laid out for the kernel that reads it.

A kernel maps x [n, input_size] to x W^T + b. It holds the weight in the library's own layout; the plain one is not needed any more.

The layout is oneDNN's, blocked, through the operators that torch's own compiler uses for frozen weights. Half the time of F.linear at
1 to 32 rows, which copies or walks the plain layout at every call; the same at hundreds. They are torch operators without a promise to
stay: where one is missing, F.linear goes on.

Stands at form 6 of a request.    vLLM: model_executor/layers/utils.py (CPU dispatch)
"""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Kernel = Callable[[Tensor], Tensor]

PACK_FOR_ROWS = 32  #: number of rows that the packed layout is chosen for; it serves any number


def packed_kernel(weight: Tensor, bias: Tensor | None) -> Kernel | None:
    """weight [output_size, input_size]. None: nothing here is better than F.linear."""
    if weight.device.type != "cpu" or not _has_packed_linear():
        return None
    if weight.dtype != torch.float32 and not (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
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
