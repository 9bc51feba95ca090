"""`--quantization int8`: matrix products on CPU with weights of 8 bits, one scale per output channel. Opt-in, because it is not exact
(tools/quality.py measures it). How activations are quantised: csrc/linear_int8.c.

Stands at form 6 of a request.    vLLM: model_executor/layers/quantization
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.model.cpu_kernels import CpuLinear, HugePages

TERMS = 2  #: linear_int8.c's


class Int8Linear(CpuLinear):
    """W as int8, in linear_int8.c's panels."""

    def pack(self, pages: HugePages, weight: Tensor) -> None:
        self.size4 = self.size + -self.size % 4
        self.scales = weight.abs().amax(1).clamp_min_(1e-30).div_(127)
        levels = F.pad((weight / self.scales[:, None]).round_().add_(128), (0, self.size4 - self.size), value=128)
        self.weight = pages.take(len(weight) // self.panel, self.size4 // 4, self.panel, 4, dtype=torch.uint8)
        self.weight.copy_(levels.view(-1, self.panel, self.size4 // 4, 4).transpose(1, 2))

    def multiply(self, x: Tensor, bias: int | None, y: Tensor, accumulate: bool) -> None:
        scratch = torch.empty(len(x) * (TERMS * self.size4 + 8), dtype=torch.int8)
        weight = self.weight.data_ptr(), self.scales.data_ptr(), bias
        tail = self.out, accumulate, scratch.data_ptr(), torch.get_num_threads()
        self.library.linear_i8(x.data_ptr(), len(x), self.size, *weight, y.data_ptr(), *tail)
