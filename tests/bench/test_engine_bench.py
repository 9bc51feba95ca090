"""The engine benches run and say what they promise to say. What they measure is the machine's business, so no number is compared."""

import json
from pathlib import Path

import pytest

from mini_engine.bench import engine, gil
from mini_engine.bench.engine import OurEngine, run_engine_bench
from mini_engine.bench.overlap import measure, run_overlap_bench
from mini_engine.bench.scheduler_peer import requests
from mini_engine.config import EngineConfig, MockConfig
from mini_engine.exceptions import VLLMValidationError
from tests.engine_core.harness import write_model

ROW = {"running": 3, "prompt_len": 8, "max_tokens": 50, "budget": 64, "warm_up": 1, "steps": 4, "codec": True}


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(("mode", "depth"), [("off", 1), ("auto", 2)])
def test_bench_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, depth: int) -> None:
    monkeypatch.setattr(engine, "ROWS", {"decode": ROW, "prefill": ROW | {"codec": False, "prompt_len": 40, "warm_up": 0}})
    assert run_engine_bench(EngineConfig(async_scheduling=mode), 2, [], None) == 0  # type: ignore[arg-type]
    report = last_line(capsys)
    assert report["depth"] == depth and report["unit"] == "us per scheduled token"
    assert list(report["us"]["decode"]["mini_engine"]) == ["schedule", "update", "total", "encode", "decode"]
    assert list(report["us"]["prefill"]["mini_engine"]) == ["schedule", "update", "total"]


@pytest.mark.parametrize(("compare", "python"), [(["sglang"], None), (["vllm"], None), (["vllm"], "/no/such/python")])
def test_bench_engine_refuses_what_it_cannot_compare(compare: list[str], python: str | None) -> None:
    with pytest.raises(VLLMValidationError, match="--compare"):
        run_engine_bench(EngineConfig(), 1, compare, python)


def test_every_row_is_a_steady_state() -> None:
    """All its requests fit, and none ends before the row does: each decode step is `running` tokens."""
    shared = {"block_size": 16, "num_blocks": 60_000, "max_model_len": 8192, "depth": 1}
    for name, row in engine.ROWS.items():
        full = row | shared | {"steps": 3}
        ours = OurEngine(full, EngineConfig())
        counts = []
        for _ in range(row["warm_up"] + 3):
            output = ours.schedule()
            count, result = ours.sampled(output)
            ours.update(output, result)
            counts.append(count)
        assert counts[-3:] == [row["running"] if name.startswith("decode") else row["budget"]] * 3, name
        assert len({tuple(prompt) for _, prompt in requests(full)}) == row["running"]
        assert row["warm_up"] + row["steps"] < row["max_tokens"]


def test_bench_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model=str(write_model(tmp_path)), max_num_seqs=4)
    assert run_overlap_bench(config, 2.0, [0.0, 0.5], running=2, steps=10, plot=None) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert [(run["overlap"], run["extra_host_ms"]) for run in report["runs"]] == [("off", 0.0), ("on", 0.0), ("off", 0.5), ("on", 0.5)]
    assert all(run["period_ms"] > 0 and run["claim_ms"] > 0 for run in report["runs"])
    assert out.count("  device |") == out.count("    host |") == 2


def test_trace_tells_overlap_from_none(tmp_path: Path) -> None:
    """Without overlap no step is scheduled while the device runs the one before; with it, that is what happens."""
    config = EngineConfig(
        model=str(write_model(tmp_path)), executor="mock", mock=MockConfig(step_ms=30), max_num_seqs=4, num_gpu_blocks_override=64
    )
    for mode in ("off", "on"):
        config.async_scheduling = mode  # type: ignore[assignment]
        run = measure(config, running=2, steps=6, host_ms=0.0)
        assert len(run.periods) == len(run.hosts) == 6
        assert (run.inside() > 0) == (mode == "on")


def test_gil_experiment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gil, "NUM_OPS", 3)
    gil.main()
    report = last_line(capsys)
    assert report["alone_ms"] > 0 and report["beside_ms"] > 0 and report["ratio"] > 0
