"""The shadow-KV fuzz: random traces, in which no request ever reads KV that is not its own prefix, and every request gets its own tokens.

`make test` runs 300 traces, `make soak` thousands of other ones. A failing seed is its own reproduction:
run_trace(seed, depth).
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.scheduler.traces import run_trace

NUM_TRACES = 300
MUST_HAPPEN = {  # in NUM_TRACES; about half of what was seen, so that a change of the generator that loses something is noticed
    "chunk": 1500,
    "hit": 200,
    "whole prompt cached": 60,
    "hit on a block written in the same step": 12,
    "eviction": 1200,
    "preemption": 100,
    "preempted after being scheduled": 4,
    "several preempted in a step": 2,
    "resumed": 60,
    "resumed with a hit": 35,
    "refused": 150,
    "outgrew the engine": 150,
    "ended by length": 400,
    "ended by stop": 25,
    "ended by stop token": 45,
    "aborted WAITING": 100,
    "aborted RUNNING": 100,
    "aborted PREEMPTED": 8,
    "aborted in flight": 100,
}


MUST_HAPPEN_OVERLAPPED = {  # besides, as often as in MUST_HAPPEN or nearly
    "block held for a step in flight": 600,
    "token of a request that is over": 200,
    "token of a preempted request": 75,
    "ended in the queue": 5,
    "sat out for lack of blocks": 20,
    "id used again": 120,
    "preemption": 100,
    "resumed with a hit": 35,
    "preempted after being scheduled": 3,
    "whole prompt cached": 60,
    "hit on a block written in the same step": 12,
    "ended by stop": 25,
    "ended by stop token": 45,
    "aborted PREEMPTED": 8,
    "aborted in flight": 100,
}


def run_traces(first: int, last: int, depth: int = 1) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            seen += run_trace(seed, depth).seen
        except BaseException as e:
            e.add_note(f"seed {seed}")
            raise
    return seen


@pytest.mark.parametrize(("depth", "must_happen"), [(1, MUST_HAPPEN), (2, MUST_HAPPEN_OVERLAPPED)])
def test_shadow_kv(depth: int, must_happen: dict[str, int]) -> None:
    """Depth 2, a step in flight while the next is scheduled, gives the same answers: both are the requests' alone."""
    seen = run_traces(0, NUM_TRACES, depth)
    missing = {name: (seen[name], least) for name, least in must_happen.items() if seen[name] < least}
    assert not missing, f"the traces no longer exercise (seen, least): {missing}"


@pytest.mark.soak
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("first", range(10_000, 60_000, 5_000))
def test_shadow_kv_soak(first: int, depth: int) -> None:
    run_traces(first, first + 5_000, depth)


def test_same_trace_same_schedule() -> None:
    """Nothing depends on the hash seed or on addresses: two fresh interpreters schedule the same traces step for step alike."""
    code = "from tests.scheduler.traces import run_trace; print([run_trace(seed).log for seed in range(40)])"
    root = Path(__file__).parents[2]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in ("1", "2")
    ]
    first, second = (run.communicate(timeout=50)[0] for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(first) > 10_000 and first == second
