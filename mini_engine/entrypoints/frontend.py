"""The front-end over its engines, put together: what `serve` and `chat` have in common.

    prepare()    the model's files: anything wrong with them, or with what was asked of them, is known before an engine is started
    launch()     engines: our own child, or headless ones elsewhere. Blocks; Ctrl-C leaves nothing running
    connect()    on the event loop: client → ready frames, whose limits become ours → AsyncLLM

Before a request's path.    vLLM: v1/engine/async_llm.py::AsyncLLM.from_engine_args, v1/engine/core_client.py
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from mini_engine import overlay
from mini_engine.config import EngineConfig, ServerConfig
from mini_engine.exceptions import VLLMValidationError
from mini_engine.llm.async_llm import AsyncLLM
from mini_engine.llm.input_processor import InputProcessor
from mini_engine.llm.output_processor import OutputProcessor
from mini_engine.model.default_model import resolve_model
from mini_engine.observe.metrics import PrometheusStatLogger
from mini_engine.render.model_files import ModelFiles
from mini_engine.render.renderer import Renderer
from mini_engine.render.tokenizer import Tokenizer
from mini_engine.server.sse import EncodeEvent, encode_event
from mini_engine.transport.client import AsyncMPClient
from mini_engine.transport.launch import EngineHandles, launch_engines, wait_for_remote_engines
from mini_engine.transport.listeners import Listeners, bind_listeners


@dataclass(frozen=True, slots=True)
class RemoteEngines:
    """`--data-parallel-size-local 0`: where a headless engine has to say HELLO."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Prepared:
    engine_config: EngineConfig  #: `model` is a directory now
    server_config: ServerConfig
    model_name: str
    files: ModelFiles
    renderer: Renderer  #: its max_model_len is the model's until connect()
    encode_event: EncodeEvent  #: the seam server.sse


@dataclass(frozen=True, slots=True)
class Launched:
    listeners: Listeners
    identities: list[bytes]
    handles: EngineHandles | None  #: None: remote engines, which are not ours to stop

    def shutdown(self, timeout: float = 5.0) -> None:
        if self.handles is not None:
            self.handles.shutdown(timeout)
        self.listeners.close()


@dataclass(frozen=True, slots=True)
class FrontEnd:
    engine: AsyncLLM
    max_model_len: int
    metrics: PrometheusStatLogger

    async def shutdown(self, timeout: float = 5.0) -> None:
        """Stops the engines too. Idempotent."""
        await self.engine.shutdown(timeout)
        self.engine.renderer.close()


def prepare(engine_config: EngineConfig, server_config: ServerConfig, *, weights: bool) -> Prepared:
    """Raises VLLMValidationError: no such model, a damaged file, no such template or one that is none, a length the model has not."""
    directory = resolve_model(engine_config.model, weights=weights)
    template = server_config.chat_template
    try:
        chat_template = None if template is None else Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise VLLMValidationError(f"--chat-template {template}: {e}", parameter="chat_template", value=template) from e
    files = ModelFiles.load(directory)
    if (asked := engine_config.max_model_len) is not None and asked > files.max_model_len:
        message = f"max_model_len {asked} is more than {files.max_model_len}, the model's own: ask for at most that"
        raise VLLMValidationError(message, parameter="max_model_len", value=asked)
    tokenizer, num_workers = Tokenizer.load(directory), server_config.renderer_num_workers
    return Prepared(
        engine_config=dataclasses.replace(engine_config, model=str(directory)),
        server_config=server_config,
        model_name=server_config.model_name(engine_config.model),
        files=files,
        renderer=Renderer(files, tokenizer, files.max_model_len, num_workers, chat_template),
        encode_event=overlay.load(engine_config.overlay, "server.sse", encode_event),
    )


def launch(prepared: Prepared, remote: RemoteEngines | None = None) -> Launched:
    """Returns when the engines are ready. Raises EngineDeadError with the reason, VLLMValidationError if that is the configuration."""
    timeout = prepared.server_config.engine_ready_timeout_s
    listeners = bind_listeners(local=remote is None, host=remote.address if remote else None)
    try:
        if remote is None:
            handles = launch_engines(listeners, prepared.engine_config, ready_timeout_s=timeout)
            return Launched(listeners, handles.identities, handles)
        identities = wait_for_remote_engines(listeners, address=remote.address, port=remote.port, ready_timeout_s=timeout)
        return Launched(listeners, identities, None)
    except BaseException:
        listeners.close()
        raise


async def connect(prepared: Prepared, launched: Launched, client_index: int = 0) -> FrontEnd:
    """Owns `launched` from here on, if it fails too. `client_index`: which of the front-ends this is. Raises EngineDeadError."""
    config, server_config = prepared.engine_config, prepared.server_config
    client = AsyncMPClient(launched.listeners, launched.identities, client_index, engines=launched.handles, overlay=config.overlay)
    try:
        responses = [r for r in await client.wait_ready(server_config.engine_ready_timeout_s) if r is not None]
        max_model_len = min((r.max_model_len for r in responses), default=config.max_model_len or prepared.files.max_model_len)
        renderer, tokenizer = prepared.renderer, prepared.renderer.tokenizer
        renderer.max_model_len = max_model_len
        metrics = PrometheusStatLogger(prepared.model_name, max_model_len)
        for index, response in enumerate(responses):
            metrics.log_engine_initialized({"block_size": response.block_size, "num_gpu_blocks": response.num_gpu_blocks}, index)
        engine = AsyncLLM(
            client,
            renderer,
            InputProcessor(prepared.files, tokenizer, max_model_len),
            OutputProcessor(tokenizer, overlay=config.overlay),
            stat_logger=metrics,
            output_chunk_size=server_config.output_chunk_size,
            log_requests=server_config.enable_log_requests,
        )
    except BaseException:
        client.shutdown()
        raise
    return FrontEnd(engine, max_model_len, metrics)
