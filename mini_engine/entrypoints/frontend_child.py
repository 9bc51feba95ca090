"""`mini-engine frontend`: the API server as a supervised process. It binds nothing and starts nothing: all sockets are inherited.

    --listen-fd            HTTP, bound but not listening: listen() is our word that we are ready
    --input-listener-fd    becomes the ROUTER, --output-listener-fd the PULL (ZMQ_USE_FD); engines may have connected already
    --args-json            options by vLLM's names; what this front-end has no use for is named in the log and ignored

The parent has done the handshake, or is doing it; here only the ready frames are waited for. The arguments are those of `vllm-rs frontend`,
so this command serves under stock vLLM too: VLLM_USE_RUST_FRONTEND=1 VLLM_RUST_FRONTEND_PATH=…/bin/mini-engine vllm serve MODEL.

Before a request's path.    vLLM: v1/utils.py::RustFrontendProcessManager gives these arguments; WIRE §11, §13
"""

import argparse
import json
import logging
import os
import socket
from typing import Any

import setproctitle
import uvloop

from mini_engine.config import EngineConfig, ServerConfig
from mini_engine.entrypoints.frontend import Launched, prepare
from mini_engine.entrypoints.serve import raise_open_files_limit, serve_on, sigterm_interrupts
from mini_engine.exceptions import VLLMValidationError
from mini_engine.observe import logging as observe_logging
from mini_engine.transport.listeners import inherit_listeners
from mini_engine.wire.handshake import engine_identity

logger = logging.getLogger(__name__)

#: vllm-rs has them too
FLAGS = ("disable_log_stats", "disable_uvicorn_access_log", "enable_log_requests", "trust_request_chat_template")
API_KEY_VARIABLE = "MINI_ENGINE_API_KEY"  #: how our own parent hands the key down: a command line is there for all to read

_ENGINE, _SERVER = EngineConfig(), ServerConfig()
#: names in --args-json that ServerConfig has too
SAME_NAMES = ("root_path", "chat_template", "renderer_num_workers", *FLAGS)
#: the others that mean something here, and the value when they are missing or null
_OPTIONS: dict[str, Any] = {
    "model_tag": None,
    "served_model_name": None,
    "api_key": None,
    "shutdown_timeout": 0,
    "engine_ready_timeout_secs": _SERVER.engine_ready_timeout_s,
    "scheduling_policy": _ENGINE.scheduling_policy,
    "overlay": {},
}


def parse_args_json(text: str) -> tuple[EngineConfig, ServerConfig]:
    """Raises VLLMValidationError naming the option that is wrong."""
    try:
        given = json.loads(text)
    except ValueError as e:
        raise VLLMValidationError(f"--args-json is not JSON: {e}", parameter="args_json") from e
    if not isinstance(given, dict) or not isinstance(given.get("model_tag"), str):
        raise VLLMValidationError(f"--args-json must be an object with a model_tag, got {text[:200]!r}", parameter="args_json")
    if ignored := sorted(given.keys() - {*_OPTIONS, *SAME_NAMES}):
        logger.info("options without effect on this front-end: %s", ", ".join(ignored))
    options = _OPTIONS | {name: value for name, value in given.items() if value is not None}
    names, keys = (_listed(options[name]) for name in ("served_model_name", "api_key"))
    if len(keys) > 1:
        raise VLLMValidationError(f"this front-end takes one API key, got {len(keys)}", parameter="api_key")
    server = ServerConfig(
        **{name: options[name] for name in SAME_NAMES if name in options},
        served_model_name=names[0] if names else None,
        api_key=keys[0] if keys else os.environ.get(API_KEY_VARIABLE) or None,
        engine_ready_timeout_s=options["engine_ready_timeout_secs"],
        shutdown_timeout_s=options["shutdown_timeout"],
    )
    return EngineConfig(options["model_tag"], scheduling_policy=options["scheduling_policy"], overlay=options["overlay"]), server


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _arguments() -> argparse.ArgumentParser:
    """The arguments of `vllm-rs frontend`, and one of ours."""
    parser = argparse.ArgumentParser(prog="mini-engine frontend", allow_abbrev=False)
    for name in ("listen-fd", "input-listener-fd", "output-listener-fd"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--engine-start-index", type=int, default=0)
    parser.add_argument("--engine-count", type=int, default=1)
    parser.add_argument("--data-parallel-size", help="without effect: engine-count says enough")
    parser.add_argument("--coordinator-address", help="without effect: requests go to the engines in turn")
    parser.add_argument("--grpc-listen-fd", help="refused: there is no gRPC service here")
    parser.add_argument("--args-json", required=True)
    parser.add_argument("--client-index", type=int, help="which of several front-ends this is")
    return parser


def run_frontend(argv: list[str]) -> int:
    """Serve until told to stop; the exit status, as run_server's. Raises VLLMValidationError or EngineDeadError before it is ready."""
    given = _arguments().parse_args(argv)
    if given.grpc_listen_fd is not None:
        raise VLLMValidationError("this front-end has no gRPC service: leave out --grpc-port, or use vllm-rs", parameter="grpc_port")
    setproctitle.setproctitle("mini-engine: api")
    observe_logging.setup("api" if given.client_index is None else f"api {given.client_index}")
    raise_open_files_limit()
    with sigterm_interrupts():
        engine_config, server_config = parse_args_json(given.args_json)
        try:
            os.set_inheritable(given.listen_fd, False)
            sock = socket.socket(fileno=given.listen_fd)
            listeners = inherit_listeners(given.input_listener_fd, given.output_listener_fd)
        except OSError as e:
            raise VLLMValidationError(f"{' '.join(argv[:6])}: these descriptors are not the parent's sockets: {e}") from e
        ranks = range(given.engine_start_index, given.engine_start_index + given.engine_count)
        launched = Launched(listeners, [engine_identity(rank) for rank in ranks], None)
        with sock:
            try:
                prepared = prepare(engine_config, server_config, weights=False)
                return uvloop.run(serve_on(prepared, launched, sock, client_index=given.client_index, announce=False))
            finally:
                launched.shutdown()
