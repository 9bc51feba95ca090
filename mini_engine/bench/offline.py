"""`mini-engine bench offline`: tokens per second without a server, ours and the peers' on the same work.

Work      for every pair of --num-prompts and --input-len: so many prompts of random ordinary tokens, all at once, output_len tokens
          each, greedy, EOS ignored, no prefix cache. Once more with one token each: the difference is decoding.
Peers     each in a process of its own (peers.py), with the same directory, prompts, dtype and threads. They take turns, round by round;
          whose turn it is not is stopped (SIGSTOP), its spinning threads too. The least time of all rounds counts.
Bound     what no engine with these weights can beat: the prompt's arithmetic at the speed of a large matrix product, then per step the
          weights and the context read once, or the step's arithmetic if that takes longer. The machine is measured in every round, since
          its memory is others' too; its best counts.
Stdout    the last line is one JSON object; ratios in one run are what it is for, absolute times are the machine's.

No request path of its own.    vLLM: benchmarks/throughput.py
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.table import Table

from mini_engine.bench.peers import ENGINES
from mini_engine.config import EngineConfig
from mini_engine.exceptions import EngineDeadError, VLLMValidationError

EXIT_TIMEOUT_S = 20.0  #: from the end of its input until an engine is killed


@dataclass(frozen=True, slots=True)
class Workload:
    num_prompts: int
    input_len: int
    output_len: int


def run_offline(config: EngineConfig, works: list[Workload], compare: list[str], rounds: int, pythons: dict[str, str | None]) -> int:
    """Measures, prints, returns the exit status. `pythons`: peer → interpreter, where it cannot be ours.

    Raises VLLMValidationError before anything runs, EngineDeadError if an engine fails."""
    for peer in compare:
        if peer not in ENGINES:
            raise VLLMValidationError(f"--compare must be one of {', '.join(list(ENGINES)[1:])}, got {peer!r}", parameter="compare")
        if peer in pythons and not Path(pythons[peer] or "").is_file():
            option = f"--{peer.partition('-')[0]}-python"
            raise VLLMValidationError(f"--compare {peer} needs {option} PATH, an interpreter that has it; got {pythons[peer]!r}")
    if compare and config.executor == "mock":
        raise VLLMValidationError("--compare needs the real model: leave --executor mock out", parameter="compare")

    from mini_engine.model.default_model import describe, resolve_model
    from mini_engine.render.model_files import ModelFiles

    directory, threads = resolve_model(config.model, weights=config.executor != "mock"), config.num_threads or os.cpu_count() or 1
    longest = config.max_model_len or ModelFiles.load(directory).max_model_len
    for work in works:
        if work.input_len + work.output_len > longest:
            raise VLLMValidationError(
                f"--input-len {work.input_len} and --output-len {work.output_len} are {work.input_len + work.output_len} tokens, "
                f"this model takes {longest} at most",
                parameter="input_len",
            )
    config = replace(config, model=str(directory), num_threads=threads, enable_prefix_caching=False)
    setup: dict[str, Any] = {
        "model": str(directory),
        "threads": threads,
        "dtype": "float32" if config.dtype == "auto" else config.dtype,
        "max_len": max(256, *(work.input_len + work.output_len + 1 for work in works)),
        "max_batch": max(work.num_prompts for work in works),
        "engine": config.to_dict(),
        "gguf": str(describe().package_file),
    }
    report: dict[str, Any] = {"model": directory.name, "threads": threads, "dtype": setup["dtype"], "quantization": config.quantization}
    names = [*(["machine"] if config.executor != "mock" else []), "mini_engine", *compare]
    with contextlib.ExitStack() as stack:
        peers = {name: stack.enter_context(_Peer(name, pythons.get(name) or sys.executable, setup)) for name in names}
        machine = peers.pop("machine", None)
        best = {"read_bytes_per_s": 0.0, "flop_per_s": 0.0}
        report["workloads"] = [_measure(peers, machine, best, directory, work, rounds, config.seed) for work in works]
    if machine is not None:
        report["machine"] = best
        print("memory {read_bytes_per_s:.3g} bytes/s, matrix product {flop_per_s:.3g} FLOP/s".format(**best), flush=True)
        for work, result in zip(works, report["workloads"], strict=True):
            limit = bound(directory, setup["dtype"], config.quantization, work, **best)
            share = result["results"]["mini_engine"]["tokens_per_s"] / limit
            result |= {"bound_tokens_per_s": round(limit, 1), "share_of_bound": round(share, 3)}
    _print_table(report)
    print(json.dumps(report), flush=True)
    return 0


def _measure(
    peers: "dict[str, _Peer]", machine: "_Peer | None", best: dict[str, float], directory: Path, work: Workload, rounds: int, seed: int
) -> dict[str, Any]:
    """One workload. `best` is raised in place to what the machine could do so far: other work slows everybody, from minute to minute."""
    prompts = make_prompts(directory, work, seed)
    least = {name: {1: float("inf"), work.output_len: float("inf")} for name in peers}
    for _ in range(rounds):
        if machine is not None:
            measured = machine.run({})
            best |= {name: max(value, measured[name]) for name, value in best.items()}
        for name, peer in peers.items():
            for output_len in (1, work.output_len):
                result = peer.run({"prompts": prompts, "output_len": output_len})
                assert result["output_tokens"] == output_len * work.num_prompts, (name, result)
                least[name][output_len] = min(least[name][output_len], result["seconds"])
    results: dict[str, dict[str, Any]] = {}
    for name, seconds in least.items():
        decode = seconds[work.output_len] - seconds[1]
        measurable = decode > 0.05 * seconds[1]  # less is noise, on the mock device mostly
        results[name] = {
            "seconds": round(seconds[work.output_len], 4),
            "first_token_seconds": round(seconds[1], 4),
            "tokens_per_s": round(work.num_prompts * work.output_len / seconds[work.output_len], 2),
            "decode_tokens_per_s": round(work.num_prompts * (work.output_len - 1) / decode, 2) if measurable else None,
        }
    ours = results["mini_engine"]
    ratio = {name: round(ours["tokens_per_s"] / result["tokens_per_s"], 2) for name, result in results.items() if result is not ours}
    return asdict(work) | {"results": results, "ratio": ratio}


def make_prompts(directory: Path, work: Workload, seed: int) -> list[list[int]]:
    """Random ids, none of them special: the same for every engine and every run with this seed."""
    from mini_engine.render.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(directory)
    ordinary = sorted(tokenizer.visible_ids(skip_special_tokens=True))
    chosen = np.random.default_rng(seed).choice(np.array(ordinary), (work.num_prompts, work.input_len))
    return [[int(token) for token in row] for row in chosen]


def bound(directory: Path, dtype: str, quantization: str, work: Workload, read_bytes_per_s: float, flop_per_s: float) -> float:
    """Tokens/s of an engine that wastes nothing. Attention's arithmetic is left out: the bound is a little too high, never too low.

    With int8 the weights' bytes are a quarter, and all arithmetic is left out: how fast it could be is not known."""
    from mini_engine.model.config import ModelConfig

    c, size = ModelConfig.from_dir(directory), 4 if dtype == "float32" else 2
    weight_size, flop_per_s = (1, math.inf) if quantization == "int8" else (size, flop_per_s)
    attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    layers, head = c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size), c.vocab_size * c.hidden_size
    prompt = 2 * work.num_prompts * (work.input_len * layers + head) / flop_per_s
    mean_context = work.input_len + work.output_len / 2
    context_bytes = work.num_prompts * mean_context * c.num_layers * 2 * c.num_kv_heads * c.head_dim * size
    read = ((layers + head) * weight_size + context_bytes) / read_bytes_per_s
    step = max(read, 2 * work.num_prompts * (layers + head) / flop_per_s)
    first = max(prompt, (layers + head) * weight_size / read_bytes_per_s)
    return work.num_prompts * work.output_len / (first + (work.output_len - 1) * step)


class _Peer:
    """peers.py under some interpreter. Runs while it starts and during run(), is stopped in between. A context manager."""

    def __init__(self, name: str, python: str, setup: dict[str, Any]) -> None:
        """Waits until it is ready. Raises EngineDeadError."""
        print(f"{name}: starting …", file=sys.stderr, flush=True)
        command = [python, str(Path(__file__).with_name("peers.py")), name]
        # a group of its own, to stop its children with it; in our session: when we die, the kernel ends a stopped orphan
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
        self.name, self._talk = name, [""]
        try:
            self.ready = self._ask(setup)
        except BaseException:
            self.__exit__()
            raise

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """{"seconds", "output_tokens"} of one job."""
        os.killpg(self.process.pid, signal.SIGCONT)
        return self._ask(job)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead: the loop below says so
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(('{"ready"', '{"seconds"')):
                os.killpg(self.process.pid, signal.SIGSTOP)
                answer: dict[str, Any] = json.loads(line)
                return answer
            self._talk = [*self._talk[-40:], line]
        print("".join(self._talk), file=sys.stderr)
        raise EngineDeadError(f"{self.name} ended with exit code {self.process.wait()}; its last output is above")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=EXIT_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # whatever of the group is left


def _print_table(report: dict[str, Any]) -> None:
    table = Table(
        "prompts", "input", "engine", "tokens/s", "decoding", "ours / its", title=f"output {report['workloads'][0]['output_len']}"
    )
    for work in report["workloads"]:
        for name, result in work["results"].items():
            ratio = f"{work['ratio'][name]:.2f}" if name in work["ratio"] else ""
            decode = result["decode_tokens_per_s"]
            speeds = (f"{result['tokens_per_s']:,.1f}", "n/a" if decode is None else f"{decode:,.1f}")
            table.add_row(str(work["num_prompts"]), str(work["input_len"]), name, *speeds, ratio)
        if "bound_tokens_per_s" in work:
            bound = (f"{work['bound_tokens_per_s']:,.1f}", "", f"{work['share_of_bound']:.2f}")
            table.add_row(str(work["num_prompts"]), str(work["input_len"]), "bound", *bound, end_section=True)
    Console().print(table)
