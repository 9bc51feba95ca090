"""The contract of paged attention: each request reads its own blocks and nothing else, whatever else is in the step.

Two backends: on CPU in float32 the C kernel (cpu_attention.py); torch's (sdpa_attention.py) for CUDA, for other dtypes, for blocks or
heads that the C kernel does not take, and for machines without a compiler. Block 0 is the null block: it belongs to no request, and
tables are filled up with it.

Stands at form 6 of a request.    vLLM: v1/attention/backend.py::{AttentionBackend, AttentionMetadataBuilder, AttentionImpl}
"""

from typing import Protocol

import numpy as np
from torch import Tensor

from mini_engine.model.layers import RMSNorm


class AttentionMetadata(Protocol):
    """One step's reads and writes, built once and used by every layer."""

    def attend(self, qkv: Tensor, qk_norm: RMSNorm | None, cos: Tensor, sin: Tensor, kv_cache: Tensor) -> Tensor:
        """Norm (if any) and rotate q and k, write K and V, attend: qkv [num_tokens, (num_heads + 2 num_kv_heads) * head_dim], overwritten.

        Returns [num_tokens, num_heads * head_dim]. All of the step is written before any of it is read: a request that hits the prefix
        another one computes in the same step reads finished KV."""


class AttentionBackend(Protocol):
    """How KV lies in memory, and who reads it."""

    def new_kv_caches(self, num_blocks: int) -> list[Tensor]:
        """Zeroed, one per layer. On CPU the pages become memory when first written."""

    def build(
        self, rows: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, positions: np.ndarray, block_table: np.ndarray
    ) -> AttentionMetadata:
        """rows [num_reqs]: their rows of block_table [num_rows, width]; query_lens: new tokens, all requests with one first, longest
        context first; seq_lens: contexts, the new tokens included; positions [num_tokens] in the requests.

        Raises nothing; the lengths and the table are the runner's to get right."""
