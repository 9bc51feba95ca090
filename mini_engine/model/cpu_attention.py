"""Paged attention on CPU by csrc/attention.c, in float32: nothing is gathered, each query reads its request's blocks where they lie.

A step is described by where its tokens stand in which request; the kernel finds the slots in the block table itself.

Stands at form 6 of a request.    vLLM: v1/attention/backends/cpu_attn.py
"""

import ctypes
from ctypes import c_float, c_int, c_long, c_void_p

import numpy as np
import torch
from torch import Tensor

from mini_engine.model.config import ModelConfig
from mini_engine.model.cpu_kernels import CPUKernels, HugePages
from mini_engine.model.layers import RMSNorm

GROUP = 16  #: vectors.h's
MAX_HEAD_DIM = 256  #: attention.c's
TAKES = f"the C attention takes blocks of a multiple of {GROUP} tokens and heads of a multiple of {GROUP} numbers up to {MAX_HEAD_DIM}"


class _Step(ctypes.Structure):
    """attention.c's Step."""

    _fields_ = [
        *((name, c_long) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size", "table_width")),
        *((name, c_void_p) for name in ("rows", "positions", "block_table", "cos", "sin")),
        ("eps", c_float),
        ("threads", c_int),
    ]


class CPUAttentionBackend:
    """attention.AttentionBackend on the C kernels."""

    def __init__(self, kernels: CPUKernels, config: ModelConfig, block_size: int) -> None:
        self.library, self.config, self.block_size = kernels.library, config, block_size

    @staticmethod
    def supports(config: ModelConfig, block_size: int) -> bool:
        return block_size % GROUP == 0 and config.head_dim % GROUP == 0 and config.head_dim <= MAX_HEAD_DIM

    def new_kv_caches(self, num_blocks: int) -> list[Tensor]:
        """One per layer, [num_slots / GROUP, num_kv_heads, 2 * GROUP * head_dim]: see attention.c."""
        c = self.config
        shape = (num_blocks * self.block_size // GROUP, c.num_kv_heads, 2 * GROUP * c.head_dim)
        return [HugePages(4 * shape[0] * shape[1] * shape[2]).take(*shape) for _ in range(c.num_layers)]

    def build(
        self, rows: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, positions: np.ndarray, block_table: np.ndarray
    ) -> "CPUAttentionMetadata":
        """See attention.AttentionBackend."""
        assert block_table.dtype == np.int32 and block_table.flags.c_contiguous
        return CPUAttentionMetadata(self, np.repeat(rows, query_lens), positions, block_table)


class CPUAttentionMetadata:
    def __init__(self, backend: CPUAttentionBackend, rows: np.ndarray, positions: np.ndarray, block_table: np.ndarray) -> None:
        self.library, config = backend.library, backend.config
        self.arrays = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(positions, np.int64), block_table  # alive as long as we
        self.step = _Step(
            len(rows), config.num_heads, config.num_kv_heads, config.head_dim, backend.block_size, block_table.shape[1],
            *(array.ctypes.data for array in self.arrays), None, None, config.rms_norm_eps, torch.get_num_threads(),
        )  # fmt: skip

    def attend(self, qkv: Tensor, qk_norm: RMSNorm | None, cos: Tensor, sin: Tensor, kv_cache: Tensor) -> Tensor:
        """See attention.AttentionMetadata."""
        step = self.step
        assert qkv.is_contiguous() and qkv.dtype == torch.float32
        step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
        out = qkv.new_empty(len(qkv), step.num_heads * step.head_dim)
        norm = None if qk_norm is None else qk_norm.weight.data_ptr()
        self.library.attention(ctypes.byref(step), qkv.data_ptr(), norm, kv_cache.data_ptr(), out.data_ptr())
        return out
