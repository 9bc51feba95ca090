"""InputBatch: what the worker remembers of each request between steps, as rows of a few arrays.

Promises  rows [0, num_reqs) are in use, without a gap: a removed row is filled from the last one. A row changes only when its request
          gains a token or blocks, so a step sends and copies only what is new.
Memory    the arrays are as wide as the longest request that fits, but their pages become memory only when first written.

Stands at form 6 of a request; numpy only.    vLLM: v1/worker/gpu_input_batch.py::InputBatch
"""

import numpy as np

from mini_engine.sampling.row import SamplingRow, request_seed
from mini_engine.step import NewRequestData
from mini_engine.worker.block_table import BlockTable


class InputBatch:
    """At most max_num_reqs requests of at most max_model_len tokens."""

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int, seed: int) -> None:
        self.max_num_reqs, self.max_model_len, self.seed = max_num_reqs, max_model_len, seed
        self.req_ids: list[str] = []  #: by row
        self.row_of: dict[str, int] = {}
        self.sampling_rows: list[SamplingRow] = []  #: by row: parameters, and the tokens once more, as lists that grow
        self.token_ids = np.zeros((max_num_reqs, max_model_len), np.int32)  #: [row, position]: prompt, then output
        self.num_tokens = np.zeros(max_num_reqs, np.int64)  #: known tokens of each row
        self.num_computed_tokens = np.zeros(max_num_reqs, np.int64)  #: as of the start of the step
        self.block_table = BlockTable(max_num_reqs, -(-max_model_len // block_size))
        self.version = 0  #: changes whenever a row's request does

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    def add_request(self, new: NewRequestData) -> None:
        """Take the next free row. The id must not be in the batch."""
        assert new.req_id not in self.row_of, new.req_id
        row, num_tokens = len(self.req_ids), len(new.prefill_token_ids)
        prompt, output = new.prefill_token_ids[: new.num_prompt_tokens], new.prefill_token_ids[new.num_prompt_tokens :]
        seed = request_seed(new.sampling_params, self.seed, new.req_id)
        self.req_ids.append(new.req_id)
        self.row_of[new.req_id] = row
        self.sampling_rows.append(SamplingRow(new.sampling_params, seed, len(output), prompt, output))
        self.token_ids[row, :num_tokens] = new.prefill_token_ids
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.block_table.append_row(row, new.block_ids)
        self.version += 1

    def remove_request(self, req_id: str) -> None:
        """Forget a request; one that never came here (aborted while waiting) is no error."""
        row = self.row_of.pop(req_id, None)
        if row is None:
            return
        self.block_table.clear_row(row)
        last = len(self.req_ids) - 1
        moved, moved_sampling_row = self.req_ids.pop(), self.sampling_rows.pop()
        if row != last:
            self.req_ids[row], self.sampling_rows[row], self.row_of[moved] = moved, moved_sampling_row, row
            num_tokens = self.num_tokens[last]
            self.token_ids[row, :num_tokens] = self.token_ids[last, :num_tokens]
            self.num_tokens[row] = num_tokens
            self.num_computed_tokens[row] = self.num_computed_tokens[last]
            self.block_table.move_row(last, row)
        self.version += 1

    def append_tokens(self, rows: np.ndarray, token_ids: list[int]) -> None:
        """One sampled token for each of `rows` [n]: it is input of the next step."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
        for row, token_id in zip(rows.tolist(), token_ids, strict=True):
            sampling_row = self.sampling_rows[row]
            sampling_row.output_token_ids.append(token_id)
            sampling_row.position += 1
