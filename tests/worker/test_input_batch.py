"""InputBatch and BlockTable against a plain dict: whatever comes and goes, a row says what its request is."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mini_engine.sampling_params import SamplingParams
from mini_engine.step import NewRequestData
from mini_engine.worker.input_batch import InputBatch

MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE = 5, 40, 4


class InputBatchMachine(RuleBasedStateMachine):
    """The model: request id → (prompt, output, block ids, number of computed tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = InputBatch(MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE, seed=0)
        self.model: dict[str, tuple[list[int], list[int], list[int], int]] = {}
        self.next_id = 0

    @precondition(lambda self: len(self.model) < MAX_NUM_REQS)
    @rule(prompt=st.lists(st.integers(0, 999), min_size=1, max_size=20), output=st.lists(st.integers(0, 999), max_size=5))
    def add(self, prompt: list[int], output: list[int]) -> None:
        req_id, self.next_id = f"r{self.next_id}", self.next_id + 1
        blocks = list(range(1, 2 + (len(prompt) + len(output)) // BLOCK_SIZE))
        self.batch.add_request(NewRequestData(req_id, prompt + output, len(prompt), SamplingParams(), blocks, len(prompt) // 2))
        self.model[req_id] = (prompt, list(output), list(blocks), len(prompt) // 2)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        req_id = data.draw(st.sampled_from(sorted(self.model)))
        self.batch.remove_request(req_id)
        del self.model[req_id]

    @rule()
    def remove_unknown(self) -> None:
        version = self.batch.version
        self.batch.remove_request("never seen")
        assert self.batch.version == version

    @rule(data=st.data(), token=st.integers(0, 999))
    def sample(self, data: st.DataObject, token: int) -> None:
        room = [r for r, (prompt, output, *_) in sorted(self.model.items()) if len(prompt) + len(output) < MAX_MODEL_LEN]
        chosen = data.draw(st.lists(st.sampled_from(room), unique=True)) if room else []
        self.batch.append_tokens(np.array([self.batch.row_of[r] for r in chosen], np.int64), [token + i for i in range(len(chosen))])
        for i, req_id in enumerate(chosen):
            _, output, blocks, _ = self.model[req_id]
            output.append(token + i)
            if len(self.model[req_id][0]) + len(output) > len(blocks) * BLOCK_SIZE:
                self.batch.block_table.append_row(self.batch.row_of[req_id], [77])
                blocks.append(77)

    @invariant()
    def rows_say_what_the_model_says(self) -> None:
        batch = self.batch
        assert sorted(batch.req_ids) == sorted(self.model)
        assert {req_id: row for row, req_id in enumerate(batch.req_ids)} == batch.row_of
        for row, req_id in enumerate(batch.req_ids):
            prompt, output, blocks, num_computed = self.model[req_id]
            assert batch.token_ids[row, : batch.num_tokens[row]].tolist() == prompt + output
            assert batch.num_computed_tokens[row] == num_computed
            assert batch.block_table.table[row].tolist() == blocks + [0] * (MAX_MODEL_LEN // BLOCK_SIZE - len(blocks))
            sampling_row = batch.sampling_rows[row]
            assert (sampling_row.prompt_token_ids, sampling_row.output_token_ids) == (prompt, output)
            assert sampling_row.position == len(output)
        assert not batch.block_table.table[len(self.model) :].any(), "a free row still names blocks"


TestInputBatch = InputBatchMachine.TestCase
TestInputBatch.settings = settings(max_examples=30, stateful_step_count=30)


def test_rows_take_memory_only_when_written() -> None:
    """128 requests of 131,072 tokens are 64 MiB of address space; numpy's zeros are the kernel's untouched pages."""
    batch = InputBatch(128, 131_072, 16, seed=0)
    batch.add_request(NewRequestData("r", [1, 2, 3], 3, SamplingParams(), [1], 0))
    assert batch.token_ids.nbytes == 128 * 131_072 * 4


def test_seed_keys() -> None:
    """A request's own seed is its key whoever it is; without one, the engine's seed and the id decide, the same after a preemption."""

    def key(engine_seed: int, req_id: str, seed: int | None) -> int:
        batch = InputBatch(1, 8, 4, engine_seed)
        batch.add_request(NewRequestData(req_id, [1], 1, SamplingParams(seed=seed), [1], 0))
        return batch.sampling_rows[0].seed_key

    assert key(0, "a", 5) == key(1, "b", 5)
    assert key(0, "a", None) == key(0, "a", None)
    assert len({key(0, "a", None), key(0, "b", None), key(1, "a", None)}) == 3
