"""The commands besides `serve`: chat, model, engine, frontend, bench.

Before a request's path.    vLLM: entrypoints/cli/, entrypoints/cli/benchmark/
"""

from typing import Annotated

import typer
from typer import Argument, Option

from mini_engine.config import EngineConfig
from mini_engine.entrypoints.options import Address, RpcPort, takes_engine_options

commands = typer.Typer()
bench = typer.Typer(no_args_is_help=True, help="Measure.")
commands.add_typer(bench, name="bench")


@commands.command(name="frontend", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def supervised_frontend(context: typer.Context) -> int:
    """The API server as a process supervised by `serve`, ours or vLLM's: the arguments of `vllm-rs frontend`."""
    from mini_engine.entrypoints.frontend_child import run_frontend

    return run_frontend(context.args)


@commands.command()
@takes_engine_options
def chat(
    engine: EngineConfig,
    url: Annotated[str | None, Option(help="talk to this server, http://host:port [default: ours on port 8000, if there is one]")] = None,
    api_key: Annotated[str | None, Option(envvar="MINI_ENGINE_API_KEY", help="of that server")] = None,
    system: Annotated[str | None, Option(help="system message")] = None,
    temperature: Annotated[float | None, Option(help="[default: the model's generation_config.json, else 0.2; over a server 0.2]")] = None,
    max_tokens: Annotated[int | None, Option(help="longest answer [default: what fits]")] = None,
    chat_template: Annotated[str | None, Option(help="a Jinja file in place of the model's template")] = None,
) -> int:
    """Talk to the model in the terminal."""
    from mini_engine.entrypoints.chat import Options, run_chat

    return run_chat(engine, Options(url, api_key, system, temperature, max_tokens, chat_template))


@commands.command()
def model(action: Annotated[str, Argument(help="show, prepare, remove")] = "show") -> int:
    """Show, prepare or remove the default model."""
    from mini_engine.entrypoints import model as actions

    if action not in ("show", "prepare", "remove"):
        raise typer.BadParameter(f"the action must be show, prepare or remove, got {action!r}")
    getattr(actions, action)()
    return 0


@commands.command(name="engine")
@takes_engine_options
def headless_engine(
    engine: EngineConfig,
    data_parallel_address: Address = "127.0.0.1",
    data_parallel_rpc_port: RpcPort = 29550,
    engine_index: Annotated[int, Option(min=0, max=65535, help="this engine's rank")] = 0,
) -> int:
    """Run a headless engine for a front-end elsewhere."""
    from mini_engine.entrypoints.engine import run_headless

    return run_headless(engine, data_parallel_address, data_parallel_rpc_port, engine_index)


@bench.command()
@takes_engine_options
def offline(
    engine: EngineConfig,
    num_prompts: Annotated[list[int] | None, Option(min=1, help="prompts at once; may be repeated  [default: 16]")] = None,
    input_len: Annotated[list[int] | None, Option(min=1, help="tokens per prompt; may be repeated  [default: 64]")] = None,
    output_len: Annotated[int, Option(min=2, help="tokens per answer")] = 64,
    rounds: Annotated[int, Option(min=1, help="how often; the least time counts")] = 2,
    compare: Annotated[list[str] | None, Option(help="transformers, vllm, llama-cpp; may be repeated")] = None,
    vllm_python: Annotated[str | None, Option(help="interpreter of an environment with vLLM")] = None,
    llama_python: Annotated[str | None, Option(help="interpreter of an environment with llama-cpp-python")] = None,
) -> int:
    """Tokens per second without a server. The last line of stdout is one JSON object."""
    from mini_engine.bench.offline import Workload, run_offline

    works = [Workload(n, length, output_len) for length in input_len or [64] for n in num_prompts or [16]]
    return run_offline(engine, works, compare or [], rounds, {"vllm": vllm_python, "llama-cpp": llama_python})


@bench.command(name="engine")
@takes_engine_options
def bench_engine(
    engine: EngineConfig,
    rounds: Annotated[int, Option(min=1, help="how often; the least time counts")] = 5,
    compare: Annotated[list[str] | None, Option(help="vllm")] = None,
    vllm_python: Annotated[str | None, Option(help="interpreter of an environment with vLLM")] = None,
) -> int:
    """Microseconds per scheduled token of the engine core's own work. The last line of stdout is one JSON object."""
    from mini_engine.bench.engine import run_engine_bench

    return run_engine_bench(engine, rounds, compare or [], vllm_python)


@bench.command()
@takes_engine_options
def overlap(
    engine: EngineConfig,
    step_ms: Annotated[float, Option(min=0.1, help="time of one step of the mock device")] = 20.0,
    host_ms: Annotated[list[float] | None, Option(help="Python work per step on top of the engine's own; may be repeated")] = None,
    running: Annotated[int, Option(min=1, help="requests in each step")] = 64,
    steps: Annotated[int, Option(min=10)] = 100,
    plot: Annotated[str | None, Option(help="write a PNG of the first steps, or without matplotlib print it")] = None,
) -> int:
    """Step period with and without overlap on the mock device. The last line of stdout is one JSON object."""
    from mini_engine.bench.overlap import run_overlap_bench

    return run_overlap_bench(engine, step_ms, host_ms or [0.0, 5.0, 15.0, 30.0], running, steps, plot)
