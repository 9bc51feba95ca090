"""UniProcExecutor: one thread for everything, futures in order, memory into blocks, and an end that frees."""

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from mini_engine.config import EngineConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.executor.abstract import Executor
from mini_engine.executor.uniproc import UniProcExecutor
from mini_engine.model.decoder import Decoder
from mini_engine.model.sdpa_attention import SDPABackend
from mini_engine.sampling_params import SamplingParams
from mini_engine.step import CachedRequestData, KVCacheConfig, ModelRunnerOutput, NewRequestData, SchedulerOutput
from mini_engine.worker import worker
from tests.tiny_model import edit_config, load_reference, make_tiny_model, reference_greedy

PROMPT = [5, 9, 77, 31]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path)


@pytest.fixture
def executor(model_dir: Path) -> Iterator[UniProcExecutor]:
    executor = UniProcExecutor(EngineConfig(model=str(model_dir), device="cpu", num_threads=1, block_size=4, max_num_seqs=4))
    executor.initialize_from_config(KVCacheConfig(16, 4))
    yield executor
    executor.shutdown()


def first_step(req_id: str = "r") -> SchedulerOutput:
    new = NewRequestData(req_id, PROMPT, len(PROMPT), SamplingParams(temperature=0.0), [3, 5], 0)
    return SchedulerOutput([new], CachedRequestData(), {req_id: 4}, 4, [req_id])


def next_step(num_computed: int, req_id: str = "r") -> SchedulerOutput:
    return SchedulerOutput([], CachedRequestData([req_id], [None], [num_computed]), {req_id: 1}, 1, [req_id])


def test_contract(executor: UniProcExecutor) -> None:
    assert Executor.get_class(executor.config) is UniProcExecutor
    assert (executor.max_model_len, executor.vocab_size, executor.dtype) == (512, 256, "float32")
    spec = executor.get_kv_cache_spec()
    assert (spec.block_size, spec.num_layers, spec.num_kv_heads, spec.head_size, spec.dtype_bytes) == (4, 2, 2, 16, 4)
    assert executor.determine_num_available_blocks(spec) == executor.config.kv_cache_memory_bytes // spec.page_size_bytes
    cache = executor.worker.runner.kv_caches
    assert sum(layer.nbytes for layer in cache) == 16 * spec.page_size_bytes


def test_steps_in_flight_feed_each_other(executor: UniProcExecutor, model_dir: Path) -> None:
    """Both calls of three steps handed over at once: a step's input token is the one before's output, which the caller never sent."""
    futures = []
    for step in (first_step(), next_step(4), next_step(5)):
        futures.append((executor.execute_model(step, non_block=True), executor.sample_tokens(None, non_block=True)))
    tokens = []
    for executed, sampled in futures:
        assert isinstance(executed, Future) and isinstance(sampled, Future)
        assert executed.result(30) is None
        tokens += sampled.result(30).sampled_token_ids[0]
    assert tokens == reference_greedy(load_reference(model_dir), PROMPT, 3)


def test_step_without_work_forgets(executor: UniProcExecutor) -> None:
    executor.execute_model(first_step())
    executor.sample_tokens(None)
    assert executor.execute_model(SchedulerOutput(finished_req_ids=["r", "unknown"])) == ModelRunnerOutput()
    assert executor.worker.runner.batch.num_reqs == 0


def test_everything_runs_on_one_thread(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, warm-up, forward, sampling: never on the caller's thread, never on two."""
    seen = set()

    def spy(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def called(*args: object, **kwargs: object) -> object:
            seen.add((name, threading.current_thread().name))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    spy(worker, "load_model")
    spy(torch, "set_num_threads")
    for name in ("forward", "compute_logits"):
        spy(Decoder, name)
    for name in ("new_kv_caches", "build"):
        spy(SDPABackend, name)  # block_size 4 is its
    executor = UniProcExecutor(EngineConfig(model=str(model_dir), num_threads=1, block_size=4))
    spy(executor.worker.runner.sampler, "forward")
    executor.determine_num_available_blocks(executor.get_kv_cache_spec())
    executor.initialize_from_config(KVCacheConfig(16, 4))
    executor.execute_model(first_step())
    executor.sample_tokens(None)
    executor.shutdown()
    assert {name for name, _ in seen} == {"load_model", "set_num_threads", "forward", "compute_logits", "new_kv_caches", "build"}
    assert {thread for _, thread in seen} == {"core-worker"}


def test_a_cache_larger_than_the_machine_is_refused(executor: UniProcExecutor) -> None:
    """An allocation of that size may well succeed, and the process be killed later."""
    with pytest.raises(VLLMValidationError, match=r"more than this machine's memory.*kv_cache_memory_bytes or num_gpu_blocks_override"):
        executor.initialize_from_config(KVCacheConfig(1 << 40, 16))


def test_a_failing_step_raises_at_the_caller(executor: UniProcExecutor) -> None:
    with pytest.raises(AssertionError, match="execute_model was not called"):
        executor.sample_tokens(None)
    future = executor.execute_model(next_step(4, "nobody"), non_block=True)
    assert isinstance(future, Future)
    with pytest.raises(KeyError):
        future.result(30)


def test_failed_start_leaves_no_thread(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    edit_config(tmp_path, architectures=["MambaForCausalLM"])
    with pytest.raises(VLLMValidationError, match="MambaForCausalLM is not supported"):
        UniProcExecutor(EngineConfig(model=str(tmp_path)))
    assert "core-worker" not in {thread.name for thread in threading.enumerate()}


def test_shutdown_frees_and_is_idempotent(executor: UniProcExecutor) -> None:
    weights = weakref.ref(executor.worker.model)
    executor.shutdown()
    executor.shutdown()
    gc.collect()
    assert weights() is None
    assert "core-worker" not in {thread.name for thread in threading.enumerate()}


def test_device_and_dtype() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert worker.choose_dtype("auto", "bfloat16", cpu) is torch.float32
    assert worker.choose_dtype("auto", "bfloat16", cuda) is torch.bfloat16
    assert worker.choose_dtype("auto", None, cuda) is torch.float32
    assert worker.choose_dtype("float16", "bfloat16", cpu) is torch.float16
    for odd in ("fp16", "nn", "int8"):  # what a config.json may say
        with pytest.raises(VLLMValidationError, match=f"torch_dtype is '{odd}'.*--dtype"):
            worker.choose_dtype("auto", odd, cuda)
    with pytest.raises(VLLMValidationError, match="device must be auto, cpu or cuda, got 'tpu'"):
        EngineConfig(device="tpu")
    if not torch.cuda.is_available():
        assert worker.choose_device("auto") == cpu
        with pytest.raises(VLLMValidationError, match="sees no GPU"):
            worker.choose_device("cuda:0")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_serves(model_dir: Path, dtype: str) -> None:
    executor = UniProcExecutor(EngineConfig(model=str(model_dir), device="cpu", dtype=dtype, num_threads=1, block_size=4))  # type: ignore[arg-type]
    executor.initialize_from_config(KVCacheConfig(16, 4))
    executor.execute_model(first_step())
    output = executor.sample_tokens(None)
    executor.shutdown()
    assert isinstance(output, ModelRunnerOutput) and executor.dtype == dtype
    assert len(output.sampled_token_ids[0]) == 1


def test_start_up_says_what_it_chose(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mini_engine"):
        UniProcExecutor(EngineConfig(model=str(model_dir), num_threads=1)).shutdown()
    assert "of float32 weights on cpu" in caplog.text and "1 threads" in caplog.text


def test_openmp_threads_wait_a_little_and_then_sleep() -> None:
    """libgomp says at load what it was told. Spinning on, two threads beside one busy process can make a step many times slower."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    for given, expected in (({}, "3000"), ({"OMP_WAIT_POLICY": "passive"}, "0"), ({"GOMP_SPINCOUNT": "70"}, "70")):
        run = subprocess.run(
            [sys.executable, "-c", "import mini_engine.executor.uniproc"],
            env=environment | given | {"OMP_DISPLAY_ENV": "verbose"},
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        )
        assert f"GOMP_SPINCOUNT = '{expected}'" in run.stderr
