"""`mini-engine bench offline`: tokens per second without a server, ours and the peers' on the same work.

Work      num_prompts prompts of input_len random ordinary tokens, all at once, output_len tokens each, greedy, EOS ignored.
Bound     what no engine can beat on this machine: every decode step reads every weight once, so steps/s <= memory bandwidth / weight
          bytes. Measured by a large copy, printed before the measured numbers.
Peers     each in a process of its own, one after the other, with the same directory, prompts, dtype and threads (bench/peers.py).
Stdout    the last line is one JSON object; ratios in one run are what it is for, absolute times are the machine's.

No request path of its own.    vLLM: benchmarks/throughput.py
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mini_engine.config import EngineConfig
from mini_engine.exceptions import EngineDeadError, VLLMValidationError

PEERS = ("transformers", "vllm")
_COPY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Workload:
    num_prompts: int
    input_len: int
    output_len: int


def run_offline(config: EngineConfig, work: Workload, compare: list[str], vllm_python: str | None) -> int:
    """Measures, prints, returns the exit status. Raises VLLMValidationError before anything runs, EngineDeadError if a peer fails."""
    for peer in compare:
        if peer not in PEERS:
            raise VLLMValidationError(f"--compare must be one of {', '.join(PEERS)}, got {peer!r}", parameter="compare")
    if "vllm" in compare and (vllm_python is None or not Path(vllm_python).is_file()):
        raise VLLMValidationError(
            f"--compare vllm needs --vllm-python PATH, the interpreter of an environment with vLLM; got {vllm_python!r}",
            parameter="vllm_python",
        )
    if compare and config.executor == "mock":
        raise VLLMValidationError("--compare needs the real model: leave --executor mock out", parameter="compare")

    from mini_engine.model.default_model import resolve_model

    threads = config.num_threads or os.cpu_count() or 1
    directory = resolve_model(config.model, weights=config.executor != "mock")
    config = replace(config, model=str(directory), num_threads=threads)
    prompts = make_prompts(directory, work, config.seed)
    report: dict[str, Any] = {"model": directory.name, "threads": threads, **asdict(work)}
    if config.executor != "mock":
        report["bound_tokens_per_s"] = decode_bound(directory, work.num_prompts)
        print(f"bound: {report['bound_tokens_per_s']:,.0f} tokens/s (memory bandwidth / weight bytes, batch {work.num_prompts})")
    results = {"mini_engine": measure_ours(config, prompts, work.output_len)}
    _print("mini_engine", results["mini_engine"])
    spec = {"model": str(directory), "prompts": prompts, "output_len": work.output_len, "threads": threads, "dtype": "float32"}
    for peer in compare:
        python = vllm_python if peer == "vllm" else sys.executable
        results[peer] = measure_peer(str(python), peer, spec)
        _print(peer, results[peer])
    ours = results["mini_engine"]["tokens_per_s"]
    report["results"] = results
    report["ratio"] = {peer: round(ours / results[peer]["tokens_per_s"], 3) for peer in compare}
    print(json.dumps(report), flush=True)
    return 0


def make_prompts(directory: Path, work: Workload, seed: int) -> list[list[int]]:
    """Random ids, none of them special: the same for every engine and every run with this seed."""
    from mini_engine.render.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(directory)
    ordinary = sorted(tokenizer.visible_ids(skip_special_tokens=True))
    chosen = np.random.default_rng(seed).choice(np.array(ordinary), (work.num_prompts, work.input_len))
    return [[int(token) for token in row] for row in chosen]


def decode_bound(directory: Path, batch: int) -> float:
    """Tokens/s if a step did nothing but read the weights (as float32 in memory) once, for all `batch` requests."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.empty(_COPY_BYTES, np.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    bandwidth = 2 * _COPY_BYTES / min(times)  # a copy reads and writes
    weight_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return batch * bandwidth / weight_bytes


def measure_ours(config: EngineConfig, prompts: list[list[int]], output_len: int) -> dict[str, float]:
    """In this process, through LLM.generate; the first, short run warms up."""
    from mini_engine import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    with LLM(**config.to_dict()) as llm:
        llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"seconds": round(seconds, 3), "output_tokens": tokens, "tokens_per_s": round(tokens / seconds, 2)}


def measure_peer(python: str, peer: str, spec: dict[str, Any]) -> dict[str, float]:
    """bench/peers.py under `python`; its talk passes through to stderr; of its stdout only the line of JSON counts (vLLM logs there)."""
    print(f"{peer}: starting …", file=sys.stderr, flush=True)
    script = Path(__file__).with_name("peers.py")
    run = subprocess.run([python, str(script), peer], input=json.dumps(spec), stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith('{"seconds"')]
    if run.returncode or not lines:
        print(run.stdout, file=sys.stderr)
        raise EngineDeadError(f"{peer} did not finish (exit code {run.returncode}); its output is above")
    result: dict[str, float] = json.loads(lines[-1])
    return result


def _print(name: str, result: dict[str, float]) -> None:
    print(
        f"{name:<14} {result['tokens_per_s']:>10,.1f} tokens/s   {result['output_tokens']} tokens in {result['seconds']:.2f} s", flush=True
    )
