"""Block tables of the requests in the batch: which blocks hold a row's KV. Attention finds a token's slot in them.

Promises  entry i of a row holds the KV of tokens [i * block_size, (i + 1) * block_size); entries past the row's own are 0, the null
          block, so a table cut at any width names no block of another request.

Stands at form 6 of a request; numpy only.    vLLM: v1/worker/block_table.py
"""

from collections.abc import Sequence

import numpy as np


class BlockTable:
    """One row per request, as wide as the longest request that fits."""

    def __init__(self, max_num_reqs: int, max_blocks_per_req: int) -> None:
        self.table = np.zeros((max_num_reqs, max_blocks_per_req), np.int32)
        self.num_blocks = np.zeros(max_num_reqs, np.int32)  #: used entries of each row

    def append_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Append to the row's table."""
        start = int(self.num_blocks[row])
        self.table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def clear_row(self, row: int) -> None:
        self.table[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = 0

    def move_row(self, source: int, target: int) -> None:
        """`target` (cleared) becomes what `source` was; `source` is cleared."""
        self.append_row(target, self.table[source, : self.num_blocks[source]])  # type: ignore[arg-type]  # numpy's rows are sequences
        self.clear_row(source)
