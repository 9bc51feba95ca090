"""`mini-engine`: `serve`, and what all commands share; the others are in commands.py. Each command imports what it needs when it runs, so
that --help takes a tenth of a second.

A user's mistake is one line, `error: …`, on stderr and exit 2; an engine that cannot start or has died, exit 1, and
so is a stdout that takes nothing. Results go to stdout.

Before a request's path.    vLLM: entrypoints/cli/main.py
"""

import os
import sys
import threading
from dataclasses import fields
from typing import Annotated, Any

import typer
from typer import Option

import mini_engine
from mini_engine.config import EngineConfig, ServerConfig
from mini_engine.entrypoints.commands import commands
from mini_engine.entrypoints.options import Address, RpcPort, takes_engine_options
from mini_engine.exceptions import EngineDeadError, VLLMValidationError

_SERVER = ServerConfig()
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"mini_engine {mini_engine.__version__}")
        raise typer.Exit


@app.callback()
def options_before_a_command(
    version: Annotated[bool, Option("--version", is_eager=True, callback=_show_version, help="print the version and exit")] = False,
) -> None:
    """mini_engine: a compact LLM serving engine."""


@app.command()
@takes_engine_options
def serve(
    engine: EngineConfig,
    host: Annotated[str, Option(help="address to listen on")] = _SERVER.host,
    port: Annotated[int, Option(min=0, max=65535, help="0: any free port, printed when ready")] = _SERVER.port,
    api_key: Annotated[str | None, Option(envvar="MINI_ENGINE_API_KEY", help="guards /v1 and /inference")] = None,
    served_model_name: Annotated[str | None, Option(help="the model's name in requests and answers")] = None,
    chat_template: Annotated[str | None, Option(help="a Jinja file in place of the model's template")] = None,
    trust_request_chat_template: Annotated[bool, Option("--trust-request-chat-template", help="run chat templates of requests")] = False,
    renderer_num_workers: Annotated[int, Option(min=1, help="threads that render and tokenize")] = _SERVER.renderer_num_workers,
    shutdown_timeout: Annotated[
        float, Option(min=0, max=86_400, help="seconds that open requests may take after SIGTERM")
    ] = _SERVER.shutdown_timeout_s,
    root_path: Annotated[str, Option(help="path prefix, behind a proxy")] = _SERVER.root_path,
    disable_log_stats: Annotated[bool, Option("--disable-log-stats", help="no line with throughput and load every 10 s of work")] = False,
    disable_uvicorn_access_log: Annotated[bool, Option("--disable-uvicorn-access-log", help="no line per HTTP request")] = False,
    enable_log_requests: Annotated[bool, Option("--enable-log-requests", help="a line per generation, with its parameters")] = False,
    data_parallel_size_local: Annotated[int, Option(min=0, max=1, help="0: no engine here, wait for a headless one")] = 1,
    data_parallel_address: Address = "127.0.0.1",
    data_parallel_rpc_port: RpcPort = 29550,
    frontend: Annotated[
        str | None, Option(help="inline: in this process; python, rust: in its own [default: inline, rust if VLLM_USE_RUST_FRONTEND=1]")
    ] = None,
    api_server_count: Annotated[int, Option(min=1, help="front-end processes over one engine")] = 1,
    vllm_rs: Annotated[str | None, Option(metavar="PATH", help="vLLM's Rust front-end [default: PATH, then the cache]")] = None,
    grpc_port: Annotated[int | None, Option(min=0, max=65535, help="with rust: vLLM's gRPC services on this port")] = None,
) -> int:
    """Serve the OpenAI API."""
    given = dict(locals())
    from mini_engine.entrypoints.frontend import RemoteEngines
    from mini_engine.entrypoints.serve import bind_http, run_server
    from mini_engine.entrypoints.supervise import FrontEndOptions, run_supervised

    if given["api_key"] is None and "MINI_ENGINE_API_KEY" in os.environ:
        given["api_key"] = ""  # the parser drops an empty variable, and a key that was meant must not be no key
    options = FrontEndOptions.choose(frontend, api_server_count, vllm_rs, grpc_port)
    same_names = {f.name: given[f.name] for f in fields(ServerConfig) if f.name in given}
    server = ServerConfig(**same_names, shutdown_timeout_s=shutdown_timeout)
    remote = RemoteEngines(data_parallel_address, data_parallel_rpc_port) if data_parallel_size_local == 0 else None
    if remote is not None:
        bind_http(remote.address, remote.port).close()  # what would be wrong with it is said now, before the model's files are read
    return run_server(engine, server, remote) if options.kind == "inline" else run_supervised(engine, server, remote, options)


app.add_typer(commands)  # after serve: the order of --help


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits with its status."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by who called us: the next file or socket would get its number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r"))
    status = _run(arguments)
    if any(thread.name.startswith("render") for thread in threading.enumerate()):  # a chat template that does not end
        os._exit(status)  # _run has flushed stdout
    sys.exit(status)


def _run(arguments: list[str] | None) -> Any:
    try:
        status = app(arguments, standalone_mode=False)
        sys.stdout.flush()
        return status
    except (VLLMValidationError, EngineDeadError, OSError) as e:
        status, message = 2 if isinstance(e, VLLMValidationError) else 1, str(e)
        sys.stdout = sys.stderr  # perhaps it is stdout that is full: nothing is left to be written there at exit
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except Exception as e:
        if not hasattr(e, "format_message"):  # the parser's own errors have it, in every version of Typer and click
            raise
        status, message = 2, e.format_message()
    print(message if message.startswith("Usage:") else f"error: {message}", file=sys.stderr)  # a missing command gets the help
    return status


if __name__ == "__main__":
    main()
