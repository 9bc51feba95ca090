"""`mini-engine engine`: a headless EngineCore in this process, for a front-end somewhere else: ours, vLLM's or vllm-rs.

It connects out to the front-end's handshake address, and serves until it is told to stop.

Before a request's path.    vLLM: entrypoints/cli/serve.py::run_headless
"""

import dataclasses
import json
import socket

from mini_engine.config import EngineConfig
from mini_engine.engine_core import proc
from mini_engine.exceptions import VLLMValidationError
from mini_engine.model.default_model import resolve_model


def run_headless(config: EngineConfig, address: str, port: int, engine_index: int) -> int:
    """The exit status. Raises VLLMValidationError for a model that is not there, or an address that cannot be one."""
    try:
        socket.getaddrinfo(address, port)  # ZMQ would try for ever
    except (OSError, UnicodeError) as e:
        message = f"--data-parallel-address {address!r}: {getattr(e, 'strerror', None) or e}"
        raise VLLMValidationError(message, parameter="data_parallel_address", value=address) from e
    directory = resolve_model(config.model, weights=config.executor != "mock")
    config_json = json.dumps(dataclasses.replace(config, model=str(directory)).to_dict())
    handshake = ("--handshake-address", f"tcp://{address}:{port}", "--engine-index", str(engine_index))
    return proc.main(["--config", config_json, *handshake, "--headless"])
