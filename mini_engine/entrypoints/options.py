"""The engine's command-line options, written once: `serve`, `chat`, `bench` and `engine` take them all.

Names, meanings and defaults are EngineConfig's (config.py), which also checks the values.

Before a request's path.    vLLM: engine/arg_utils.py
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

from typer import Argument, BadParameter, Option

from mini_engine import overlay as overlays
from mini_engine.config import EngineConfig

_DEFAULTS = EngineConfig()
_OVERLAY_HELP = f"your file in place of a part: {', '.join(overlays.SEAMS)}; what it defines: mini_engine/overlay.py. May be repeated"


Address = Annotated[str, Option(help="where headless engines shake hands with their front-end")]
RpcPort = Annotated[int, Option(min=0, max=65535, help="port of that address")]


def engine_options(
    model_tag: Annotated[str | None, Argument(metavar="MODEL", help="directory, hub id, or nothing for the default model")] = None,
    model: Annotated[str | None, Option(help="the same as MODEL")] = None,
    executor: Annotated[str, Option(help="uniproc: the real model; mock: a device without weights")] = _DEFAULTS.executor,
    dtype: Annotated[str, Option(help="auto, float32, bfloat16, float16")] = _DEFAULTS.dtype,
    quantization: Annotated[str, Option(help="none; int8: faster on CPU, a little less exact")] = _DEFAULTS.quantization,
    device: Annotated[str, Option(help="auto, cpu, cuda")] = _DEFAULTS.device,
    max_model_len: Annotated[int | None, Option(help="longest prompt plus answer, in tokens [default: the model's]")] = None,
    max_num_seqs: Annotated[int, Option(help="requests in one step")] = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[int, Option(help="tokens in one step")] = _DEFAULTS.max_num_batched_tokens,
    block_size: Annotated[int, Option(help="tokens per KV block; on CPU a multiple of 16 is faster")] = _DEFAULTS.block_size,
    num_gpu_blocks_override: Annotated[int | None, Option(help="use exactly this many KV blocks")] = None,
    kv_cache_memory_bytes: Annotated[int, Option(help="KV memory on CPU")] = _DEFAULTS.kv_cache_memory_bytes,
    gpu_memory_utilization: Annotated[float, Option(help="share of a GPU's memory to use")] = _DEFAULTS.gpu_memory_utilization,
    enable_prefix_caching: Annotated[bool, Option(help="reuse the KV of equal prompt beginnings")] = True,
    scheduling_policy: Annotated[str, Option(help="fcfs, priority")] = _DEFAULTS.scheduling_policy,
    async_scheduling: Annotated[str, Option(help="overlap of steps: auto (not on CPU), on, off")] = _DEFAULTS.async_scheduling,
    long_prefill_token_threshold: Annotated[int, Option(help="longest chunk of a prompt while others run; 0: no limit")] = 0,
    seed: Annotated[int, Option(help="for requests without a seed")] = _DEFAULTS.seed,
    num_threads: Annotated[int | None, Option(help="torch threads [default: one per core]")] = None,
    mock_step_ms: Annotated[float, Option(help="mock: milliseconds per step")] = 0.0,
    mock_crash_at_step: Annotated[int | None, Option(help="mock: this step raises")] = None,
    mock_hang_at_step: Annotated[int | None, Option(help="mock: this step never returns")] = None,
    overlay: Annotated[list[str] | None, Option(metavar="SEAM=FILE", help=_OVERLAY_HELP)] = None,
) -> EngineConfig:
    """The options, as Typer sees them, to an EngineConfig that is checked, its overlay too. MINI_ENGINE_CHECK=1 is read here only."""
    given = dict(locals())
    if model_tag is not None and model is not None:
        raise BadParameter("give the model once: as MODEL or with --model")
    pairs = [item.partition("=") for item in overlay or []]
    if wrong := [name for name, equals, file in pairs if not (name and equals and file)]:
        raise BadParameter(f"--overlay must be SEAM=FILE, got {wrong[0]!r}")
    same_names = {f.name: given[f.name] for f in fields(EngineConfig) if f.name in given}
    config = EngineConfig.from_dict(
        same_names
        | {
            "model": model_tag or model or _DEFAULTS.model,
            "mock": {"step_ms": mock_step_ms, "crash_at_step": mock_crash_at_step, "hang_at_step": mock_hang_at_step},
            "overlay": {name: file for name, _, file in pairs},
            "check": os.environ.get("MINI_ENGINE_CHECK", "") not in ("", "0"),
        }
    )
    overlays.check(config.overlay)
    return config


def takes_engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command(engine: EngineConfig, …)` as a Typer command that has the engine's options beside its own."""
    options = inspect.signature(engine_options).parameters
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "engine"]

    def run(**values: Any) -> Any:
        engine = engine_options(**{name: values.pop(name) for name in options})
        return command(engine, **values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([*options.values(), *own])  # type: ignore[attr-defined]
    return run
