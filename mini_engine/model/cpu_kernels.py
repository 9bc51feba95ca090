"""The C kernels of csrc/ as operators on tensors, and the memory that they like.

Promises  load() never fails: without a compiler, or where the kernels do not build, it says so once and returns None, and torch's
          operators go on, more slowly. A number that a kernel computes does not depend on what else is in the step.
Threads   OpenMP's, through the library that torch has loaded: a second OpenMP would bring a second team of threads to the same cores.
Memory    weights and KV lie in huge pages where Linux gives them: a walk over all weights would look up each page of 4 KB.

Stands at form 6 of a request.    vLLM: _custom_ops.py, csrc/cpu/torch_bindings.cpp
"""

import contextlib
import ctypes
import functools
import logging
import math
import mmap
import subprocess
from ctypes import c_float, c_int, c_long, c_void_p
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.model.build_kernels import build, compiler

logger = logging.getLogger(__name__)

PACK_ROWS = 2048  #: rows of a weight packed at once, whole panels: bounds the memory beside the weight

_SIGNATURES: dict[str, tuple[type, ...]] = {
    "panel_size": (),
    "linear_f32": (c_void_p, c_long, c_long, c_void_p, c_void_p, c_void_p, c_long, c_int, c_int),
    "linear_i8": (c_void_p, c_long, c_long, c_void_p, c_void_p, c_void_p, c_void_p, c_long, c_int, c_void_p, c_int),
    "rms_norm": (c_void_p, c_void_p, c_void_p, c_long, c_long, c_float, c_int),
    "silu_and_mul": (c_void_p, c_void_p, c_long, c_long, c_int),
    "attention": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
}


class CPUKernels:
    """The loaded library, and the operators that need nothing else (CPULinear and cpu_attention.py call the others). All tensors are
    contiguous float32 on CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_long if name == "panel_size" else None
        self.library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.is_contiguous() and x.dtype == torch.float32
        y = torch.empty_like(x)
        self.library.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *x.shape, eps, torch.get_num_threads())
        return y

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * size] → [n, size]: silu(gate) * up"""
        assert gate_up.is_contiguous() and gate_up.dtype == torch.float32
        n, size = len(gate_up), gate_up.shape[1] // 2
        y = gate_up.new_empty(n, size)
        self.library.silu_and_mul(gate_up.data_ptr(), y.data_ptr(), n, size, torch.get_num_threads())
        return y


@functools.cache
def load() -> CPUKernels | None:
    """The library, built if need be. None: this machine cannot, and a warning says why."""
    try:
        for openmp in sorted(Path(torch.__file__).parent.glob("lib/libgomp*")) or [Path("libgomp.so.1")]:
            ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)  # gives our undefined symbols torch's OpenMP
        return CPUKernels(build(compiler()))
    # ValueError: the quotes in CC. RuntimeError: no home, no more threads. AttributeError: a library without our functions
    except (OSError, subprocess.SubprocessError, ValueError, RuntimeError, AttributeError) as e:
        said = (getattr(e, "stderr", None) or b"").decode(errors="replace")[-1000:]
        logger.warning("no C kernels, so torch's operators, which are slower: %s", said or e)
        return None


class HugePages:
    """Zeroed memory in one piece; it becomes memory when first written. Tensors keep it alive."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared, the default, gets none
        with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without them
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.used = 0

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The next piece, on a cache line of its own."""
        count, start = math.prod(shape), self.used
        self.used += -(-count * dtype.itemsize // 64) * 64
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=start).view(shape)


class CPULinear:
    """y = x W^T + b in float32, with W in linear.c's panels."""

    dtype = torch.float32  #: of the packed weight

    def __init__(self, kernels: CPUKernels, pages: HugePages, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in] float32: copied into `pages`, some rows at a time."""
        self.library, self.bias, (self.out, self.size) = kernels.library, bias, weight.shape
        self.panel = self.library.panel_size()
        self.weight = pages.take(-(-self.out // self.panel), *self.panel_shape(), dtype=self.dtype)
        for first in range(0, self.out, PACK_ROWS):
            rows = weight[first : first + PACK_ROWS]
            panels = self.lay_out(F.pad(rows, (0, 0, 0, -len(rows) % self.panel)), first)
            self.weight[first // self.panel :][: len(panels)] = panels

    def panel_shape(self) -> tuple[int, ...]:
        return self.size, self.panel

    def lay_out(self, rows: Tensor, first: int) -> Tensor:
        """Some panels' rows [n * panel, in], from row `first` → [n, *panel_shape()]."""
        return rows.view(-1, self.panel, self.size).transpose(1, 2)

    @staticmethod
    def most_bytes(weight: Tensor) -> int:
        """What it takes of HugePages at most: rows padded to a panel (at most 32), their length to four, the next cache line."""
        return 4 * (weight.shape[0] + 64) * (weight.shape[1] + 4)

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """x [n, in] contiguous → y [n, out], new or added to `add_to`."""
        assert x.is_contiguous() and x.dtype == torch.float32 and x.shape[1] == self.size
        n = len(x)
        y = x.new_empty(n, self.out) if add_to is None else add_to
        self.multiply(n, x, None if self.bias is None else self.bias.data_ptr(), y, add_to is not None)
        return y

    def multiply(self, n: int, x: Tensor, bias: int | None, y: Tensor, accumulate: bool) -> None:
        weight, threads = self.weight.data_ptr(), torch.get_num_threads()
        self.library.linear_f32(x.data_ptr(), n, self.size, weight, bias, y.data_ptr(), self.out, accumulate, threads)
