"""`mini-engine bench overlap`: the step period with and without overlap, on a device whose step takes a stated time.

Claim     with d the device's step and h the host's work per step: without overlap a step takes d + h, with it max(d, h).
Measured  the engine core in this process on the mock device, requests decoding all the time. Between two results there is a period;
          what of it this thread did not spend waiting for a result is h: the engine's own work, `--host-ms` of Python on top of it,
          and what other processes took meanwhile. Means over the steps, the claim's too (each step has its own h).
Plot      a real trace of a few steps: what the host did while the device ran which step.
Stdout    the last line is one JSON object; `over_claim` is period / claim - 1, at most 0.1 on a machine that is not busy.

No request path of its own.    No vLLM counterpart.
"""

import json
import statistics
import sys
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mini_engine.config import EngineConfig, MockConfig
from mini_engine.engine_core.core import EngineCore, StepInFlight
from mini_engine.executor.mock import MockExecutor
from mini_engine.kv_cache.block_hash import get_request_block_hasher
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler.request import Request
from mini_engine.step import ModelRunnerOutput, SchedulerOutput
from mini_engine.wire.messages import EngineCoreOutputs

WARM_UP = 4  #: steps, the prompts' included
PLOTTED = 5  #: steps in the plot
COLUMNS = 110  #: of the printed timeline


@dataclass
class Run:
    """One run of `steps` steps."""

    periods: list[float] = field(default_factory=list)  #: seconds, per step
    hosts: list[float] = field(default_factory=list)  #: h of each
    spans: list[tuple[str, int, float, float]] = field(default_factory=list)  #: (schedule | update | work | device, step, start, end)

    def inside(self) -> float:
        """Share of the steps that were scheduled while the device ran the step before."""
        device = {step: (start, end) for kind, step, start, end in self.spans if kind == "device"}
        scheduled = [(step, start, end) for kind, step, start, end in self.spans if kind == "schedule" and step - 1 in device]
        return statistics.mean(device[step - 1][0] <= start and end <= device[step - 1][1] for step, start, end in scheduled)


class TracedMockExecutor(MockExecutor):
    """The mock device, with a note of when it ran what."""

    spans: list[tuple[str, int, float, float]]

    def _forward(self, scheduler_output: SchedulerOutput, handed_over: float) -> ModelRunnerOutput | None:
        output = super()._forward(scheduler_output, handed_over)
        self.spans.append(("device", scheduler_output.step_id, self._busy_until - self.config.mock.step_ms / 1000, self._busy_until))
        return output


class TimedEngineCore(EngineCore):
    """An engine core that knows how long it has waited for results."""

    waited = 0.0

    def _account(self, step: StepInFlight) -> dict[int, EngineCoreOutputs]:
        start = time.monotonic()
        last: Future[Any] = step.sampled or step.forward
        wait([last])
        self.waited += time.monotonic() - start
        return super()._account(step)


def measure(config: EngineConfig, running: int, steps: int, host_ms: float) -> Run:
    """An engine of its own, `running` requests in each of its steps."""
    run = Run()
    executor = TracedMockExecutor(config)
    executor.spans = run.spans
    engine = TimedEngineCore(config, executor)
    for kind, method in (("schedule", "schedule"), ("update", "update_from_output")):
        setattr(engine.scheduler, method, _traced(run, kind, getattr(engine.scheduler, method)))
    params = SamplingParams(temperature=0.0, max_tokens=steps + WARM_UP + 8)
    for i in range(running):
        engine.scheduler.add_request(Request(f"request-{i}", [i + 1] * 8, params, block_hasher=get_request_block_hasher(config.block_size)))
    last = waited = 0.0
    while len(run.periods) < steps + WARM_UP:
        outputs, _ = engine.step_fn()
        start = time.monotonic()
        if outputs:
            run.periods.append(start - last)
            run.hosts.append(start - last - (engine.waited - waited))
            last, waited = start, engine.waited
        end = time.thread_time() + host_ms / 1000
        while time.thread_time() < end:
            sum(range(500))  # Python that keeps the GIL
        run.spans.append(("work", 0, start, time.monotonic()))
    del run.periods[:WARM_UP], run.hosts[:WARM_UP]
    engine.shutdown()
    return run


def _traced(run: Run, kind: str, call: Any) -> Any:
    def traced(*args: Any) -> Any:
        start = time.monotonic()
        result = call(*args)
        run.spans.append((kind, (args[0] if args else result).step_id, start, time.monotonic()))
        return result

    return traced


def run_overlap_bench(config: EngineConfig, step_ms: float, host_ms: list[float], running: int, steps: int, plot: str | None) -> int:
    """Measures, prints, returns the exit status. `config`: the model, block size and limits; the device is the mock."""
    blocks = running * ((steps + WARM_UP + 32) // config.block_size + 2) + 1
    mock = MockConfig(step_ms=step_ms)
    config = replace(config, executor="mock", mock=mock, max_num_seqs=running, num_gpu_blocks_override=blocks, overlay={})
    config.max_num_batched_tokens = max(config.max_num_batched_tokens, running * 8)
    runs: dict[tuple[float, str], Run] = {}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("bench overlap", total=2 * len(host_ms))
        for extra in host_ms:
            for mode in ("off", "on"):
                runs[extra, mode] = measure(replace(config, async_scheduling=mode), running, steps, extra)
                progress.advance(bar)
    table = Table(title=f"{running} requests, device step d = {step_ms:g} ms", title_justify="left", box=None, pad_edge=False)
    for column in ("overlap", "h, ms", "claim", "claim, ms", "period, ms", "over claim"):
        table.add_column(column, justify="right" if "ms" in column or "over c" in column else "left")
    rows = []
    for (extra, mode), run in runs.items():
        d, name = step_ms / 1000, "d + h" if mode == "off" else "max(d, h)"
        claims = [d + h if mode == "off" else max(d, h) for h in run.hosts]
        host, claim, period = (statistics.mean(values) * 1000 for values in (run.hosts, claims, run.periods))
        row = {"host_ms": host, "claim_ms": claim, "period_ms": period, "over_claim": period / claim - 1, "inside": run.inside()}
        rows.append({"overlap": mode, "extra_host_ms": extra} | {key: round(value, 4) for key, value in row.items()})
        table.add_row(mode, f"{host:.2f}", name, f"{claim:.2f}", f"{period:.2f}", f"{period / claim - 1:+.1%}")
    Console(file=sys.stdout, width=100).print(table)
    shown = max((extra for extra in host_ms if extra < step_ms), default=host_ms[0])
    _draw({mode: runs[shown, mode] for mode in ("off", "on")}, plot)
    print(json.dumps({"step_ms": step_ms, "running": running, "steps": steps, "runs": rows}), flush=True)
    return 0


def _draw(runs: dict[str, Run], plot: str | None) -> None:
    """The same stretch of both runs: printed, and as a PNG where matplotlib is installed and a file was named."""
    windows = {}
    for mode, run in runs.items():
        device = [(start, end) for kind, _, start, end in run.spans if kind == "device"][WARM_UP : WARM_UP + PLOTTED]
        windows[mode] = device[0][0], device[0][0] + (device[-1][1] - device[0][0]) * 1.02
    length = max(end - start for start, end in windows.values())
    for mode, run in runs.items():
        lanes = {"host": [" "] * COLUMNS, "device": [" "] * COLUMNS}
        for kind, step, start, end in run.spans:
            first, last = (int((t - windows[mode][0]) / length * COLUMNS) for t in (start, end))
            lane = lanes["device" if kind == "device" else "host"]
            label = {"schedule": "S", "update": "U", "work": "·", "device": f"{step}"}[kind]
            for column in range(max(first, 0), min(last + (kind != "device"), COLUMNS)):
                if kind in ("device", "schedule", "update") or lane[column] == " ":
                    lane[column] = label[-1] if kind != "device" or column == first else "="
        print(f"overlap {mode}", *(f"{name:>8} |{''.join(lane)}|" for name, lane in lanes.items()), sep="\n")
    print("S schedule, U update, · other host work; a digit is where that device step begins")
    if plot is None:
        return
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        print(f"{plot} not written: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    colors = {"device": "#9bb7d4", "work": "#dddddd", "schedule": "#d1495b", "update": "#edae49"}
    for mode, axes in zip(runs, figure.subplots(2, 1, sharex=True), strict=True):
        origin = windows[mode][0]
        for kind, step, start, end in runs[mode].spans:
            if origin - length / 20 < start < origin + length:
                y = 0 if kind == "device" else 1
                edge = "white" if kind == "device" else colors[kind]
                axes.barh(y, (end - start) * 1000, left=(start - origin) * 1000, height=0.7, color=colors[kind], edgecolor=edge)
                if kind in ("device", "schedule"):
                    where = ((start + end) / 2 - origin) * 1000, y + 0.45 * (kind == "schedule")
                    axes.text(*where, f"step {step}" if kind == "device" else f"{step}", ha="center", va="center", fontsize=8)
        axes.set(
            yticks=[0, 1], yticklabels=["device", "host"], ylim=(-0.5, 1.65), title=f"overlap {mode}", xlim=(-length * 20, length * 1000)
        )
    axes.set_xlabel("ms;  red, numbered: schedule; yellow: update; grey: other host work")
    figure.savefig(plot, dpi=150)
    print(f"plot: {plot}", file=sys.stderr)
