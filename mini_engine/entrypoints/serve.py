"""`mini-engine serve`: this process is the API server (uvicorn and AsyncLLM on one event loop); the EngineCore is its child.

Start     the HTTP port is bound first, so a busy one fails before a model is loaded; nothing answers on it until all is ready.
          `ready: http://…` on stdout is the only line there, and is true when it is printed. Ctrl-C while starting leaves nothing running.
Stop      SIGTERM, Ctrl-C: accept no more, let open requests end for shutdown_timeout_s, end the others with a terminal error, stop the
          engine, exit 0. A second Ctrl-C: at once, exit 130.
Death     of the engine: every stream gets its error, /health says 503 for DEAD_LINGER_S so that probes see it, then exit 1.

Around a request's path.    vLLM: entrypoints/launchers/, entrypoints/openai/api_server.py::run_server, entrypoints/cli/serve.py
"""

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import Iterator

import setproctitle
import uvicorn
import uvloop

from mini_engine.config import EngineConfig, ServerConfig
from mini_engine.entrypoints.frontend import FrontEnd, Launched, Prepared, RemoteEngines, connect, launch, prepare
from mini_engine.exceptions import VLLMValidationError
from mini_engine.observe import logging as observe_logging
from mini_engine.observe.stat_line import LoggingStatLogger
from mini_engine.server.app import build_app
from mini_engine.server.service import Service

logger = logging.getLogger(__name__)

DEAD_LINGER_S = 5.0  #: how long a server without engine still answers 503
LAST_WORD_S = 2.0  #: for terminal errors to reach their clients; who does not read by then, or has not sent all, is cut off
CUT_OFF_S = 1.0  #: for requests to see that their connections are gone
BACKLOG = 2048


def run_server(engine_config: EngineConfig, server_config: ServerConfig, remote: RemoteEngines | None = None) -> int:
    """Serve until told to stop; the exit status. Raises VLLMValidationError (a user's mistake) or EngineDeadError before it is ready."""
    setproctitle.setproctitle("mini-engine: api")
    observe_logging.setup("api")
    raise_open_files_limit()
    with bind_http(server_config.host, server_config.port) as sock, sigterm_interrupts():
        prepared = prepare(engine_config, server_config, weights=remote is None and engine_config.executor != "mock")
        launched = launch(prepared, remote)
        try:
            return uvloop.run(serve_on(prepared, launched, sock))
        finally:
            launched.shutdown()


def bind_http(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; allow_restart() comes just before listen().

    Raises VLLMValidationError when the port is taken or the host is not ours.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            try:
                sock.bind(address)  # without SO_REUSEADDR: two servers that both are still starting must not share a port
            except OSError as e:
                if e.errno != errno.EADDRINUSE:
                    raise
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only old connections in TIME_WAIT? then it works now
                sock.bind(address)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # as the others, until it listens
        except BaseException:
            sock.close()
            raise
    except (OSError, OverflowError) as e:
        hint = " (choose another port, or 0 for any free one)" if getattr(e, "errno", None) == errno.EADDRINUSE else ""
        raise VLLMValidationError(f"cannot listen on {host}:{port}: {getattr(e, 'strerror', None) or e}{hint}", parameter="port") from e
    return sock


def allow_restart(sock: socket.socket) -> None:
    """Connections inherit SO_REUSEADDR, and only those that have it let the next server bind while they are in TIME_WAIT."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


class _Signals:
    """SIGINT and SIGTERM while the loop runs: the first asks to stop, a later SIGINT insists."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.now = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def _interrupt(self) -> None:
        (self.now if self.stop.is_set() else self.stop).set()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would raise the signal again at the end, and exit 0 is promised."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_on(
    prepared: Prepared, launched: Launched, sock: socket.socket, *, client_index: int | None = None, announce: bool = True
) -> int:
    """Until told to stop, or the engine dies; the exit status.

    `client_index`: which of several API servers; None: the only one. `announce`: the ready line on stdout."""
    front_end = await connect(prepared, launched, client_index or 0)  # a signal meanwhile ends it, by an exception
    signals = _Signals()
    config = prepared.server_config
    try:
        service = Service(
            engine=front_end.engine,
            config=config,
            model_name=prepared.model_name,
            max_model_len=front_end.max_model_len,
            default_sampling_params=prepared.files.default_sampling_params,
            priority_scheduling=prepared.engine_config.scheduling_policy == "priority",
            metrics=front_end.metrics,
            encode_event=prepared.encode_event,
        )
        server = _Server(
            uvicorn.Config(
                build_app(service),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,  # observe/logging.py has done it
                access_log=not config.disable_uvicorn_access_log,
                backlog=BACKLOG,
                server_header=False,
                timeout_graceful_shutdown=None,  # the deadlines are ours, below
            )
        )
        allow_restart(sock)
        serving = asyncio.create_task(server.serve([sock]), name="uvicorn")
        stat_logger = None if config.disable_log_stats else LoggingStatLogger(front_end.metrics.engines, client_index is None)
        watching = asyncio.create_task(_until_dead(front_end, stat_logger), name="engine-watch")
        stopping = asyncio.create_task(signals.stop.wait(), name="signals")
        try:
            while not server.started and not serving.done():  # noqa: ASYNC110  uvicorn has a flag, no event
                await asyncio.sleep(0.01)
            if announce and not serving.done():
                print_ready(sock, prepared.model_name)
            await asyncio.wait((serving, watching, stopping), return_when=asyncio.FIRST_COMPLETED)
            status = 0
            if front_end.engine.errored:
                logger.error("%s: answering 503 for %g s, then exit", front_end.engine.dead_error, DEAD_LINGER_S)
                await asyncio.wait((serving, stopping), timeout=DEAD_LINGER_S, return_when=asyncio.FIRST_COMPLETED)
                status = 1
            await _stop(server, serving, service, signals, 0 if status else config.shutdown_timeout_s)
            serving.result()
            return 130 if signals.now.is_set() else status
        finally:
            for task in (serving, watching, stopping):
                task.cancel()
            await asyncio.wait((serving, watching, stopping))
    finally:
        await front_end.shutdown(0.5 if signals.now.is_set() else 5.0)


def print_ready(sock: socket.socket, model_name: str) -> None:
    host, port = sock.getsockname()[:2]
    print(f"ready: http://{f'[{host}]' if ':' in host else host}:{port}  model {model_name}", flush=True)


async def _until_dead(front_end: FrontEnd, stat_logger: LoggingStatLogger | None) -> None:
    while not front_end.engine.errored:  # streams hear of it at once; this is for the exit, five seconds later
        await asyncio.sleep(0.1)
        if stat_logger is not None:
            stat_logger.log_if_due()


async def _stop(server: _Server, serving: asyncio.Task[None], service: Service, signals: _Signals, patience_s: float) -> None:
    """Returns when uvicorn has ended."""
    server.should_exit = True
    if open_requests := service.statistics().in_flight:
        logger.info("stopping: %d open request(s) may end within %g s", open_requests, patience_s)
    insist = asyncio.create_task(signals.now.wait(), name="insist")
    try:
        await asyncio.wait((serving, insist), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        service.stop_generations()
        await asyncio.wait((serving, insist), timeout=LAST_WORD_S, return_when=asyncio.FIRST_COMPLETED)
        for connection in [*server.server_state.connections]:
            connection.transport.abort()  # not left to the loop's end, which cancels with a traceback each
        await asyncio.wait((serving,), timeout=CUT_OFF_S)
        server.force_exit = True  # it looks every 0.1 s
        await asyncio.wait((serving,))
    finally:
        insist.cancel()


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """While starting, SIGTERM ends what Ctrl-C ends, by an exception too. Afterwards the loop has its own handlers."""

    def interrupt(*_: object) -> None:
        raise SystemExit(0)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def raise_open_files_limit() -> None:
    """A connection is a descriptor, and the usual soft limit of 1,024 is less than what one server can hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
