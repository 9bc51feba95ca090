"""`mini-engine bench engine`: what the engine core's own work costs per scheduled token, ours and vLLM's on the same trace.

Work      schedule() + update_from_output(), the KV cache manager inside both, and in a second row the codec on the messages that come
          out. No device: each request past its prompt is given a token. Nothing else is on the clock.
Rows      1, 64 and 256 requests decoding, all in every step; and 64 prompts of 512 tokens, budget 2,048 a step.
Compared  `--compare vllm` runs scheduler_peer.py in a process of its own, with the stock scheduler of the same kind, and takes turns
          with it; each number is the least of all rounds: what the work costs when nothing disturbs it.
Stdout    the last line is one JSON object; ratios in one run are what it is for, absolute times are the machine's.

No request path of its own.    vLLM: no counterpart
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mini_engine.bench.scheduler_peer import measure, requests, time_codec
from mini_engine.config import EngineConfig
from mini_engine.exceptions import EngineDeadError, VLLMValidationError
from mini_engine.kv_cache.block_hash import get_request_block_hasher
from mini_engine.model.default_model import resolve_model
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler.async_scheduler import AsyncScheduler
from mini_engine.scheduler.request import Request
from mini_engine.scheduler.scheduler import Scheduler
from mini_engine.step import KVCacheConfig, ModelRunnerOutput, SchedulerOutput
from mini_engine.wire.codec import MsgpackDecoder, MsgpackEncoder
from mini_engine.wire.messages import EngineCoreOutputs

DECODE = {"prompt_len": 32, "max_tokens": 3000, "budget": 8192, "warm_up": 4, "codec": True}
ROWS: dict[str, dict[str, Any]] = {
    "decode, 1 running": DECODE | {"running": 1, "steps": 2000},
    "decode, 64 running": DECODE | {"running": 64, "steps": 160},
    "decode, 256 running": DECODE | {"running": 256, "steps": 96},
    "prefill, 64 prompts": {"running": 64, "prompt_len": 512, "max_tokens": 64, "budget": 2048, "warm_up": 0, "steps": 16, "codec": False},
}


class OurEngine:
    """Ours, as scheduler_peer.Engine."""

    def __init__(self, row: dict[str, Any], config: EngineConfig) -> None:
        config = replace(config, max_num_seqs=row["running"], max_num_batched_tokens=row["budget"])
        scheduler_class = AsyncScheduler if row["depth"] > 1 else Scheduler
        scheduler = scheduler_class(config, KVCacheConfig(row["num_blocks"], row["block_size"]), row["max_model_len"])
        self.schedule, self.update = scheduler.schedule, scheduler.update_from_output
        hasher = get_request_block_hasher(row["block_size"])
        params = SamplingParams(temperature=0.0, max_tokens=row["max_tokens"], ignore_eos=True)
        for request_id, prompt in requests(row):
            scheduler.add_request(Request(request_id, prompt, params, block_hasher=hasher))

    def sampled(self, output: SchedulerOutput) -> tuple[int, ModelRunnerOutput]:
        result = ModelRunnerOutput(output.sampled_req_ids, [[7] for _ in output.sampled_req_ids])
        return output.total_num_scheduled_tokens, result

    def codec(self, messages: list[EngineCoreOutputs]) -> tuple[float, float]:
        return time_codec(MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), messages)


def run_engine_bench(config: EngineConfig, rounds: int, compare: list[str], vllm_python: str | None) -> int:
    """Measures, prints, returns the exit status. Raises VLLMValidationError before anything runs, EngineDeadError if the peer fails."""
    if unknown := set(compare) - {"vllm"}:
        raise VLLMValidationError(f"--compare must be vllm, got {unknown.pop()!r}", parameter="compare")
    if compare and (vllm_python is None or not Path(vllm_python).is_file()):
        raise VLLMValidationError(
            f"--compare vllm needs --vllm-python PATH, the interpreter of an environment with vLLM; got {vllm_python!r}",
            parameter="vllm_python",
        )
    shared = {
        "model": str(resolve_model(config.model, weights=False)) if compare else config.model,
        "block_size": config.block_size,
        "num_blocks": 60_000 * 16 // config.block_size,
        "max_model_len": 8192,
        "depth": 1 if config.async_scheduling == "off" else 2,
    }
    best: dict[str, dict[str, dict[str, float]]] = {name: {} for name in ROWS}
    with Progress(console=Console(stderr=True)) as progress, _peer(vllm_python if compare else None) as ask_vllm:
        bar = progress.add_task("bench engine", total=rounds * len(ROWS))
        for _ in range(rounds):
            for name, row in ROWS.items():
                full = row | shared
                results = {"mini_engine": measure(OurEngine(full, config), full)}
                if compare:
                    results["vllm"] = ask_vllm(full)
                for engine, times in results.items():
                    known = best[name].setdefault(engine, times)
                    best[name][engine] = {part: min(value, known[part]) for part, value in times.items()}
                progress.advance(bar)
    ratios: dict[str, dict[str, float]] = {}
    for name, engines in best.items():
        theirs = engines.get("vllm", {})
        ratios[name] = {part: round(engines["mini_engine"][part] / theirs[part], 3) for part in theirs}
    _print_table(best, ratios)
    print(
        json.dumps({"unit": "us per scheduled token", "depth": shared["depth"], "rounds": rounds, "us": best, "ratio": ratios}), flush=True
    )
    return 0


@contextmanager
def _peer(python: str | None) -> Iterator[Any]:
    """A function from a row to vLLM's times. The process starts with it and ends with it; no python: no process."""
    if python is None:
        yield None
        return
    command = [python, str(Path(__file__).with_name("scheduler_peer.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(row: dict[str, Any]) -> dict[str, float]:
            stdin.write(json.dumps(row) + "\n")
            stdin.flush()
            if not (line := stdout.readline()):
                raise EngineDeadError(f"vLLM's part ended (exit code {process.wait()}); run it alone to see why: {' '.join(command)}")
            times: dict[str, float] = json.loads(line)
            return times

        try:
            yield ask
        finally:
            stdin.close()


def _print_table(rows: dict[str, dict[str, dict[str, float]]], ratios: dict[str, dict[str, float]]) -> None:
    table = Table(title="µs per scheduled token", title_justify="left", box=None, pad_edge=False)
    for column in ("", "part", "mini_engine", "vllm", "ratio"):
        table.add_column(column, justify="left" if column in ("", "part") else "right")
    for name, engines in rows.items():
        for part, ours in engines["mini_engine"].items():
            theirs = [f"{engines['vllm'][part]:.3f}", f"{ratios[name][part]:.2f}"] if "vllm" in engines else []
            table.add_row(name if part == "schedule" else "", part, f"{ours:.3f}", *theirs)
    Console(file=sys.stdout, width=80).print(table)
