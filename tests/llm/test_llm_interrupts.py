"""LLM between signals, threads and processes: whatever interrupts a call, the engine is empty and usable, or says why it is gone."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.entrypoints.llm import _signals_put_off
from mini_engine.exceptions import EngineDeadError
from mini_engine.executor.mock import mock_generate
from tests.llm.offline import PARAMS, VOCAB_SIZE, tokens


def test_an_interrupt_leaves_the_engine_empty_and_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.llm_engine.step, iter(range(100))

    def interrupted() -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], PARAMS, use_tqdm=False)
    monkeypatch.undo()
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.reset_prefix_cache()
    assert len(tokens(llm.generate([[5]], PARAMS, use_tqdm=False)[0])) == 6


def test_every_signal_that_was_put_off_is_handled_whatever_they_raise() -> None:
    ran: list[int] = []

    def handler(signum: int, _: Any) -> None:
        ran.append(signum)
        raise LookupError(signum)

    def send_both() -> None:
        for signum in both:
            signal.raise_signal(signum)

    both = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(signum, handler) for signum in both]
    try:
        with pytest.raises(LookupError), _signals_put_off(lambda: False):
            send_both()
        assert sorted(ran) == sorted(both)
        assert [signal.getsignal(signum) for signum in both] == [handler] * 2
    finally:
        for signum, previous in zip(both, before, strict=True):
            signal.signal(signum, previous)


def test_generate_from_a_handler_that_interrupts_it_is_refused(model: str) -> None:
    """It would wait for itself."""
    refusals: list[EngineDeadError] = []

    def again(*_: Any) -> None:
        with pytest.raises(EngineDeadError, match="this very thread") as refused:
            llm.generate("and you?", use_tqdm=False)
        refusals.append(refused.value)

    before = signal.signal(signal.SIGUSR1, again)
    try:
        with LLM(model, executor="mock", mock={"step_ms": 20}) as llm:
            real = llm._client.engine_core.executor.execute_model

            def interrupted(*args: Any, **kwargs: Any) -> Any:
                if not refusals:
                    signal.raise_signal(signal.SIGUSR1)
                return real(*args, **kwargs)

            llm._client.engine_core.executor.execute_model = interrupted  # type: ignore[method-assign]
            (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 3 and refusals
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_interrupt_while_the_device_is_waited_for_leaves_it_usable(model: str, async_scheduling: bool) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with LLM(model, executor="mock", mock={"step_ms": 60}, async_scheduling=async_scheduling, check=True) as llm:
            for _ in range(3):  # all but the first find a step in flight
                with pytest.raises(KeyboardInterrupt):  # noqa: PT012  the alarm may ring as soon as it is set
                    signal.setitimer(signal.ITIMER_REAL, 0.15)
                    llm.generate([[5] * 20, [6]], SamplingParams(max_tokens=100), use_tqdm=False)
                assert not llm.llm_engine.has_unfinished_requests()
            assert tokens(llm.generate([[5] * 20], PARAMS, use_tqdm=False)[0]) == mock_generate([5] * 20, 6, VOCAB_SIZE)
            assert llm.reset_prefix_cache()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("where", ["schedule", "update_from_output"])
def test_ctrl_c_in_the_middle_of_the_bookkeeping_is_put_off(
    model: str, async_scheduling: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(model, executor="mock", async_scheduling=async_scheduling, check=True) as llm:
        scheduler, calls = llm._client.engine_core.scheduler, iter(range(100))
        real = getattr(scheduler, where)

        def interrupted(*args: Any) -> Any:
            if next(calls) == 3:
                signal.raise_signal(signal.SIGINT)
            return real(*args)

        monkeypatch.setattr(scheduler, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5], [6]], SamplingParams(max_tokens=50), use_tqdm=False)
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert tokens(llm.generate([[5]], PARAMS, use_tqdm=False)[0]) == mock_generate([5], 6, VOCAB_SIZE)
        assert llm.reset_prefix_cache()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("where", ["schedule", "update_from_output", "waiting"])
@pytest.mark.parametrize("again", [False, True])
def test_what_another_signals_handler_raises_is_an_interrupt_too(
    model: str, async_scheduling: bool, where: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timeout by signal.alarm, say, and an exception of any type."""

    def expire(*_: Any) -> None:
        raise LookupError("time is over")

    before = signal.signal(signal.SIGALRM, expire)
    try:
        mock = {"step_ms": 50 if where == "waiting" else 1}
        with LLM(model, executor="mock", mock=mock, async_scheduling=async_scheduling, check=True) as llm:
            core, calls = llm._client.engine_core, iter(range(100))
            target: Any = core.executor if where == "waiting" else core.scheduler
            name = "execute_model" if where == "waiting" else where
            real = getattr(target, name)

            def interrupted(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == 3:
                    if where == "waiting":
                        threading.Thread(target=lambda: (threading.Event().wait(0.002), signal.raise_signal(signal.SIGALRM))).start()
                    else:
                        for _ in range(1 + again):
                            signal.raise_signal(signal.SIGALRM)
                return real(*args, **kwargs)

            monkeypatch.setattr(target, name, interrupted)
            with pytest.raises(LookupError, match="time is over"):
                llm.generate([[5], [6]], SamplingParams(max_tokens=100), use_tqdm=False)
            monkeypatch.undo()
            assert signal.getsignal(signal.SIGALRM) is expire
            assert not llm.llm_engine.has_unfinished_requests()
            assert tokens(llm.generate([[5]], PARAMS, use_tqdm=False)[0]) == mock_generate([5], 6, VOCAB_SIZE)
            assert llm.reset_prefix_cache()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_threads_take_turns(model: str, async_scheduling: bool) -> None:
    with (
        LLM(model, executor="mock", mock={"step_ms": 1}, async_scheduling=async_scheduling, check=True) as llm,
        ThreadPoolExecutor(4) as pool,
    ):
        outputs = list(pool.map(lambda i: llm.generate([[5 + i]] * 3, PARAMS, use_tqdm=False), range(12)))
        assert [[tokens(o) for o in three] for three in outputs] == [[mock_generate([5 + i], 6, VOCAB_SIZE)] * 3 for i in range(12)]
        assert llm.reset_prefix_cache()


def test_a_forked_child_is_told_to_make_its_own(llm: LLM) -> None:
    read_fd, write_fd = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            llm.generate([[5]], PARAMS, use_tqdm=False)
        except BaseException as e:
            os.write(write_fd, f"{type(e).__name__}: {e}".encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        assert (
            pipe.read()
            == f"EngineDeadError: this LLM, with its device's thread, lives in process {os.getpid()}: a forked child must make its own"
        )
    assert os.waitpid(pid, 0) == (pid, 0)
    assert len(tokens(llm.generate([[5]], PARAMS, use_tqdm=False)[0])) == 6


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_second_ctrl_c_gets_out_of_anything(model: str, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also out of the bookkeeping: then the engine says that it is gone, and by what."""
    with LLM(model, executor="mock", async_scheduling=async_scheduling) as llm:

        def interrupted(*_: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(llm._client.engine_core.scheduler, "update_from_output", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5], [6]], PARAMS, use_tqdm=False)
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            llm.generate([[5]], PARAMS, use_tqdm=False)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_after_a_crash_every_call_says_why(model: str, async_scheduling: bool) -> None:
    with LLM(model, executor="mock", mock={"crash_at_step": 3}, async_scheduling=async_scheduling) as llm:
        with pytest.raises(RuntimeError, match="told to crash at step 3"):
            llm.generate([[5], [6]], PARAMS, use_tqdm=False)
        for call in (lambda: llm.generate([[5]], PARAMS, use_tqdm=False), llm.reset_prefix_cache):
            with pytest.raises(EngineDeadError, match="RuntimeError: mock device: told to crash at step 3"):
                call()
        assert not llm.llm_engine.has_unfinished_requests()
