"""The mock device on its own: futures in order, two steps in flight, and tokens that depend on the block table."""

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.config import MockConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.executor.abstract import Executor
from mini_engine.executor.mock import MockExecutor, mock_generate, mock_token
from mini_engine.sampling_params import SamplingParams
from mini_engine.step import CachedRequestData, KVCacheConfig, ModelRunnerOutput, NewRequestData, SchedulerOutput
from tests.engine_core.harness import VOCAB_SIZE, mock_config


@pytest.fixture
def executor(model):
    executor = MockExecutor(mock_config(model, block_size=4))
    executor.initialize_from_config(KVCacheConfig(16, 4))
    yield executor
    executor.shutdown()


def new_step(prompt, block_ids, computed=0, **params) -> SchedulerOutput:
    new = NewRequestData("r", list(prompt), len(prompt), SamplingParams(**params), block_ids, computed)
    n = len(prompt) - computed
    return SchedulerOutput([new], num_scheduled_tokens={"r": n}, total_num_scheduled_tokens=n, sampled_req_ids=["r"])


def next_step(computed: int, new_block_ids=None) -> SchedulerOutput:
    cached = CachedRequestData(["r"], [new_block_ids], [computed])
    return SchedulerOutput([], cached, {"r": 1}, 1, ["r"])


def token(output: ModelRunnerOutput) -> int:
    assert output.req_ids == ["r"]
    return output.sampled_token_ids[0][0]


def test_prefill_then_decode_is_the_oracle(executor):
    right = mock_generate([5, 6, 7, 8, 9], 2, VOCAB_SIZE)
    assert executor.execute_model(new_step([5, 6, 7, 8, 9], [3, 9])) is None
    assert token(executor.sample_tokens(None)) == right[0]
    assert executor.execute_model(next_step(5)) is None
    assert token(executor.sample_tokens(None)) == right[1]


def test_two_steps_in_flight_run_in_order_and_the_token_stays_on_the_device(executor):
    right = mock_generate([5, 6, 7], 3, VOCAB_SIZE)
    futures = [executor.execute_model(new_step([5, 6, 7], [3]), non_block=True), executor.sample_tokens(None, non_block=True)]
    futures += [executor.execute_model(next_step(3), non_block=True), executor.sample_tokens(None, non_block=True)]
    assert [token(futures[1].result(5)), token(futures[3].result(5))] == right[:2]


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30), st.data())
def test_chunks_do_not_matter(model, prompt, data):
    executor = MockExecutor(mock_config(model, block_size=4))
    executor.initialize_from_config(KVCacheConfig(16, 4))
    blocks = data.draw(st.permutations(range(1, 16)))[:9]
    start, new = 0, True
    while start < len(prompt):
        n = data.draw(st.integers(1, len(prompt) - start))
        step = new_step(prompt, list(blocks)) if new else next_step(start)
        step.num_scheduled_tokens = {"r": n}
        step.sampled_req_ids = ["r"] if start + n == len(prompt) else []
        executor.execute_model(step)
        output = executor.sample_tokens(None)
        start, new = start + n, False
    assert token(output) == mock_generate(prompt, 1, VOCAB_SIZE)[0]
    executor.shutdown()


def test_a_wrong_block_gives_a_wrong_token(executor):
    executor.execute_model(new_step([5, 6, 7, 8, 9], [3, 9]))
    executor.sample_tokens(None)
    right = mock_generate([5, 6, 7, 8, 9], 1, VOCAB_SIZE)[0]
    for blocks, is_right in (([3, 9], True), ([3, 10], True), ([4, 9], False), ([0, 9], False)):  # block 1 of the hit is written anew
        executor.execute_model(new_step([5, 6, 7, 8, 9], blocks, computed=4))
        assert (token(executor.sample_tokens(None)) == right) is is_right


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (3, 3), (-1, VOCAB_SIZE), (VOCAB_SIZE + 1, VOCAB_SIZE), (2**62, VOCAB_SIZE)])
def test_more_logprobs_than_there_are_tokens_are_all_of_them(executor, asked, given):
    executor.execute_model(new_step([5, 6, 7], [3], logprobs=asked))
    assert executor.sample_tokens(None).logprobs.logprobs.shape == (1, given + 1)


def test_an_empty_step_needs_no_sampling_and_is_not_counted(model):
    executor = MockExecutor(mock_config(model, MockConfig(num_blocks=16, crash_at_step=2)))
    executor.initialize_from_config(KVCacheConfig(16, 16))
    assert executor.execute_model(SchedulerOutput()) == ModelRunnerOutput()
    executor.execute_model(new_step([1], [1]))
    executor.sample_tokens(None)
    assert executor.execute_model(SchedulerOutput(finished_req_ids=["r"])) == ModelRunnerOutput()
    with pytest.raises(RuntimeError, match="step 2"):
        executor.execute_model(new_step([1], [1]))
    executor.shutdown()


def test_a_step_takes_its_time_without_the_callers(model):
    executor = MockExecutor(mock_config(model, MockConfig(num_blocks=16, step_ms=700)))
    executor.initialize_from_config(KVCacheConfig(16, 16))
    start = time.monotonic()
    future = executor.execute_model(new_step([1], [1]), non_block=True)
    assert time.monotonic() - start < 0.7
    assert future.result(5) is None
    assert time.monotonic() - start >= 0.7
    executor.shutdown()


@given(st.integers(0, 2**63 - 1), st.integers(4, 200_000))
def test_special_tokens_are_never_sampled(prefix_hash, vocab_size):
    low, high = min(256, vocab_size // 4), vocab_size - max(1, vocab_size // 64)
    assert 0 < low <= mock_token(prefix_hash, vocab_size) < high < vocab_size


def test_tokens_spread_evenly():
    tokens = np.array(mock_generate([1], 20_000, VOCAB_SIZE))
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)[250 : VOCAB_SIZE - 15]
    assert counts.min() > 0 and counts.max() < 60  # 27 expected; a Poisson variable above 60 would be one in 10**8


@pytest.mark.parametrize("content", [None, "{}", "[]", "not json", '{"vocab_size": 3, "max_position_embeddings": 9}'])
def test_a_directory_without_a_usable_config_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(VLLMValidationError):
        MockExecutor(mock_config(tmp_path))


def test_the_mock_needs_no_torch(model):
    code = (
        "import sys; from mini_engine.config import EngineConfig; from mini_engine.engine_core.inproc import InprocClient; "
        f"InprocClient(EngineConfig(model={str(model)!r}, executor='mock')).shutdown(); "
        "print([m for m in ('torch', 'transformers', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_class_is_chosen_by_name(model):
    assert Executor.get_class(mock_config(model)) is MockExecutor
