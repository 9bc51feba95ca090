"""`--quantization int8`: matrix products on CPU with weights of 8 bits, one scale per output channel. Opt-in, because it is not exact
(tools/quality.py measures it). How activations are quantised: csrc/linear_int8.c.

Stands at form 6 of a request.    vLLM: model_executor/kernels/linear/scaled_mm/cpu.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.exceptions import VLLMValidationError
from mini_engine.model.cpu_kernels import CPUKernels, CPULinear, HugePages

TERMS = 2  #: linear_int8.c's
MAX_INPUTS = 268_000  #: 127 * 63 times so many is still an int32; what is larger on the way there wraps, and wraps back


class Int8Linear(CPULinear):
    """W as int8, in linear_int8.c's panels."""

    dtype = torch.uint8

    def __init__(self, kernels: CPUKernels, pages: HugePages, weight: Tensor, bias: Tensor | None) -> None:
        """As CPULinear. Raises VLLMValidationError for a weight that is too wide."""
        out, size = weight.shape
        if size > MAX_INPUTS:
            message = f"quantization int8 takes layers of at most {MAX_INPUTS} inputs, this model has one of {size}; leave it out"
            raise VLLMValidationError(message, parameter="quantization", value=size)
        self.size4 = size + -size % 4
        self.scales = torch.empty(out + -out % kernels.library.panel_size())
        super().__init__(kernels, pages, weight, bias)

    def panel_shape(self) -> tuple[int, ...]:
        return self.size4 // 4, self.panel, 4

    def lay_out(self, rows: Tensor, first: int) -> Tensor:
        scales = self.scales[first : first + len(rows)]
        torch.amax(rows.abs(), 1, out=scales).clamp_min_(1e-30).div_(127)
        levels = (rows / scales[:, None]).round_().add_(128)
        return F.pad(levels, (0, self.size4 - self.size), value=128).view(-1, self.panel, self.size4 // 4, 4).transpose(1, 2)

    def multiply(self, n: int, x: Tensor, bias: int | None, y: Tensor, accumulate: bool) -> None:
        scratch = torch.empty(n * (TERMS * (self.size4 + 4) + 4), dtype=torch.int8)
        weight = self.weight.data_ptr(), self.scales.data_ptr(), bias
        threads = torch.get_num_threads()
        self.library.linear_i8(x.data_ptr(), n, self.size, *weight, y.data_ptr(), self.out, accumulate, scratch.data_ptr(), threads)
