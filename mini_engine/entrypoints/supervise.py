"""`mini-engine serve --frontend python|rust`: the front-end in processes of its own. This process only starts, hands down and watches.

Order     bind the HTTP socket and, per front-end, two ZMQ listeners → start the front-ends, which load while the engine does → launch the
          engine and shake hands, telling it all listeners (INIT's list, index = client_index) → `ready:` once /health answers 200.
Watching  a front-end ends: the others and the engine are stopped, and its exit status is ours. The engine ends: the front-ends are
          stopped, exit 1; Python ones first get the time to answer 503, as inline. SIGTERM or Ctrl-C: front-ends first, with
          the time their open requests have, then the engine, exit 0. A second one: at once.
Not here  requests: no byte of one passes through this process.

Before a request's path.    vLLM: v1/utils.py::APIServerProcessManager, ::RustFrontendProcessManager; WIRE §11
"""

import contextlib
import ctypes
import http.client
import importlib.util
import json
import logging
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import setproctitle
import zmq

from mini_engine.cache import cache_dir
from mini_engine.config import EngineConfig, ServerConfig
from mini_engine.entrypoints.frontend import Prepared, RemoteEngines, prepare
from mini_engine.entrypoints.frontend_child import API_KEY_VARIABLE, FLAGS
from mini_engine.entrypoints.serve import DEAD_LINGER_S, LAST_WORD_S, allow_restart, bind_http, print_ready, sigterm_interrupts
from mini_engine.exceptions import EngineDeadError, VLLMValidationError
from mini_engine.observe import logging as observe_logging
from mini_engine.transport.launch import EngineHandles, launch_engines, wait_for_remote_engines
from mini_engine.transport.listeners import Listeners, bind_listeners
from mini_engine.transport.liveness import describe_exit

logger = logging.getLogger(__name__)

FrontEndKind = Literal["inline", "python", "rust"]
RUST_SEAMS = ("wire.codec", "text.detokenizer", "text.stop", "server.sse")  #: parts that vllm-rs has of its own
KILL_AFTER_S = 5.0  #: beyond the time that open requests have
PROBE_S = 0.05
SIGNAL_SLICE_S = 1.0

_Event = tuple[str, int | None, str]  #: (front-end or engine, exit status of a front-end, what to say)


@dataclass(frozen=True, slots=True)
class FrontEndOptions:
    """How to run the front-end. Raises VLLMValidationError for a combination that makes no sense."""

    kind: FrontEndKind = "inline"
    count: int = 1  #: --api-server-count
    vllm_rs: str | None = None  #: path of the binary
    grpc_port: int | None = None

    @classmethod
    def choose(cls, kind: str | None, count: int, vllm_rs: str | None, grpc_port: int | None) -> "FrontEndOptions":
        """Nothing said: rust if VLLM_USE_RUST_FRONTEND=1, else inline for one API server and python for more."""
        if kind is None:
            kind = "rust" if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0") else "python" if count > 1 else "inline"
        if kind not in ("inline", "python", "rust"):
            raise VLLMValidationError(f"--frontend must be inline, python or rust, got {kind!r}", parameter="frontend", value=kind)
        if kind == "inline" and count > 1:
            raise VLLMValidationError(f"{count} API servers need processes of their own: --frontend python", parameter="api_server_count")
        if kind == "rust" and count > 1:
            logger.warning("--api-server-count %d is ignored: the Rust front-end is one process with many threads", count)
            count = 1
        if kind != "rust" and grpc_port is not None:
            raise VLLMValidationError("--grpc-port needs --frontend rust", parameter="grpc_port", value=grpc_port)
        return cls(kind, count, vllm_rs, grpc_port)  # type: ignore[arg-type]


def find_vllm_rs(path: str | None) -> str:
    """--vllm-rs, else PATH, an installed vLLM, what `make interop` fetched. Raises VLLMValidationError that says how to get it."""
    spec = importlib.util.find_spec("vllm")
    folders = [*(spec.submodule_search_locations or ())] if spec else []
    candidates = [path] if path else [shutil.which("vllm-rs"), *(f"{f}/vllm-rs" for f in folders), str(cache_dir() / "bin/vllm-rs")]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    where = f"no executable file {path}" if path else "no vllm-rs on PATH, in an installed vLLM, or in our cache"
    raise VLLMValidationError(
        f"{where}. It comes with vLLM; get it with `make interop`, or name it with --vllm-rs PATH", parameter="vllm_rs"
    )


class _FrontEnds:
    """The child processes, from first to last."""

    def __init__(self, events: "queue.SimpleQueue[_Event]", patience_s: float) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._events = events
        self.patience_s = patience_s  #: between SIGTERM and SIGKILL

    def start(self, command: list[str], fds: Sequence[int], environment: dict[str, str]) -> None:
        # blocked meanwhile: what a signal's handler raises while Python forks, Python drops
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            process = subprocess.Popen(
                command,
                pass_fds=fds,
                env=environment,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for this process, which passes it on in order
                preexec_fn=partial(_before_exec, mask),  # safe: no thread of ours runs yet that could hold a lock
            )
            self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def watch(self) -> None:
        def wait(index: int, process: subprocess.Popen[bytes]) -> None:
            status = process.wait()
            self._events.put(("front-end", status, f"front-end process {index} ended with {describe_exit(status)}"))

        for index, process in enumerate(self.processes):
            # daemon: see ProcessMonitor
            threading.Thread(target=wait, args=(index, process), name=f"front-end-watch-{index}", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Whether all have ended by themselves."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def stop(self) -> None:
        """SIGTERM, the time that open requests have, SIGKILL."""
        for process in self.processes:
            process.terminate()
        try:
            if not self.wait(self.patience_s):
                logger.warning("front-end processes did not stop within %g s: killed", self.patience_s)
        finally:
            for process in self.processes:
                process.kill()
                process.wait()


def _before_exec(mask: set[int]) -> None:
    """In the child: SIGTERM when this process is gone, however it went (Linux; engines have a pipe for that), and our signal mask."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_supervised(engine_config: EngineConfig, server_config: ServerConfig, remote: RemoteEngines | None, options: FrontEndOptions) -> int:
    """Serve until told to stop; the exit status. Raises VLLMValidationError or EngineDeadError before it is ready."""
    setproctitle.setproctitle("mini-engine: supervisor")
    observe_logging.setup("supervisor")
    binary = find_vllm_rs(options.vllm_rs) if options.kind == "rust" else None
    if binary and (foreign := sorted(set(engine_config.overlay) & set(RUST_SEAMS))):
        raise VLLMValidationError(f"--overlay {', '.join(foreign)}: vllm-rs has its own part there; use --frontend python or inline")
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(bind_http(server_config.host, server_config.port))
        grpc = None if options.grpc_port is None else stack.enter_context(bind_http(server_config.host, options.grpc_port))
        stack.enter_context(sigterm_interrupts())
        prepared = prepare(engine_config, server_config, weights=remote is None and engine_config.executor != "mock")
        listeners = [bind_listeners(local=remote is None, host=remote.address if remote else None) for _ in range(options.count)]
        for each in listeners:
            stack.callback(each.close)
        front_ends = _FrontEnds(events, server_config.shutdown_timeout_s + LAST_WORD_S + KILL_AFTER_S)
        handles: EngineHandles | None = None
        try:
            for index, each in enumerate(listeners):
                command, environment = _command(prepared, sock, grpc, each, binary, index if options.count > 1 else None)
                fds = [sock.fileno(), each.input_fd, each.output_fd] + ([grpc.fileno()] if grpc else [])
                front_ends.start(command, fds, environment)
                each.hand_over()
            handles = _shake_hands(prepared, listeners, remote, front_ends)
            for each_socket in (sock, grpc) if grpc else (sock,):  # the front-ends listen from now on, and vllm-rs does not do it
                allow_restart(each_socket)
            front_ends.watch()
            if handles is not None:
                handles.watch(lambda message: events.put(("engine", None, message)))
            event = _until_serving(sock, events, server_config.engine_ready_timeout_s)
            if event is None:
                print_ready(sock, prepared.model_name)
                with contextlib.suppress(SystemExit, KeyboardInterrupt):  # asked to stop
                    event = _wait(events)
            return _end(event, front_ends, options.kind)
        finally:
            with contextlib.suppress(SystemExit):  # a second SIGTERM adds nothing; a second Ctrl-C is exit 130
                front_ends.stop()
            if handles is not None:
                _stop_engine(handles, listeners)


def _wait(events: "queue.SimpleQueue[_Event]") -> _Event:
    """The next event. In slices: a signal that comes just before a wait begins is heard only when that wait ends."""
    while True:
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=SIGNAL_SLICE_S)


def _stop_engine(handles: EngineHandles, listeners: Sequence[Listeners]) -> None:
    """The front-ends are gone. Its last words are for nobody now, but it would wait seconds to get rid of them: take them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sinks = [context.socket(zmq.PULL) for _ in listeners]
        for sink, each in zip(sinks, listeners, strict=True):
            sink.bind(each.output_address)
        handles.shutdown()
    finally:
        context.destroy(linger=0)


def _command(
    prepared: Prepared, sock: socket.socket, grpc: socket.socket | None, listeners: Listeners, binary: str | None, index: int | None
) -> tuple[list[str], dict[str, str]]:
    """Argv and environment of a front-end process: the very argv that vLLM gives its Rust front-end."""
    config, environment = prepared.server_config, dict(os.environ)
    options: dict[str, Any] = {
        "model_tag": prepared.engine_config.model,
        "served_model_name": [prepared.model_name],
        "shutdown_timeout": math.ceil(config.shutdown_timeout_s),
        "engine_ready_timeout_secs": math.ceil(config.engine_ready_timeout_s),
    }
    options |= {name: True for name in FLAGS if getattr(config, name)}
    if config.chat_template is not None:
        options["chat_template"] = str(Path(config.chat_template).absolute())
    if config.root_path:
        options["root_path"] = config.root_path
    if binary is None:
        options["shutdown_timeout"] = config.shutdown_timeout_s
        options["renderer_num_workers"] = config.renderer_num_workers
        options["scheduling_policy"] = prepared.engine_config.scheduling_policy
        options["overlay"] = prepared.engine_config.overlay
        if config.api_key is not None:
            environment[API_KEY_VARIABLE] = config.api_key
    elif config.api_key is not None:
        options["api_key"] = [config.api_key]  # visible in `ps`, as under vLLM: the binary takes it in no other way
    command = [binary] if binary else [sys.executable, "-m", "mini_engine.entrypoints.cli"]
    command += ["frontend", "--listen-fd", str(sock.fileno())]
    command += ["--input-listener-fd", str(listeners.input_fd), "--output-listener-fd", str(listeners.output_fd)]
    command += ["--engine-start-index", "0", "--engine-count", "1", "--data-parallel-size", "1"]
    command += ["--grpc-listen-fd", str(grpc.fileno())] if grpc else []
    command += [] if index is None else ["--client-index", str(index)]
    return [*command, "--args-json", json.dumps(options, sort_keys=True)], environment


def _shake_hands(
    prepared: Prepared, listeners: Sequence[Listeners], remote: RemoteEngines | None, front_ends: _FrontEnds
) -> EngineHandles | None:
    first, *others = listeners
    timeout, processes = prepared.server_config.engine_ready_timeout_s, front_ends.processes
    if remote is None:
        return launch_engines(first, prepared.engine_config, ready_timeout_s=timeout, more_listeners=others, front_ends=processes)
    where = {"address": remote.address, "port": remote.port}
    wait_for_remote_engines(first, **where, ready_timeout_s=timeout, more_listeners=others, front_ends=processes)  # type: ignore[arg-type]
    return None


def _until_serving(sock: socket.socket, events: "queue.SimpleQueue[_Event]", timeout_s: float) -> _Event | None:
    """None when /health answers 200; the event, if something ends before. The socket does not listen until a front-end is ready."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(host, port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return None
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=PROBE_S)
    raise EngineDeadError(f"the front-end does not answer /health within {timeout_s:g} s; see its log above")


def _end(event: _Event | None, front_ends: _FrontEnds, kind: FrontEndKind) -> int:
    """Exit status for what happened; None is a request to stop."""
    match event:
        case None:
            return 0
        case ("front-end", int(status), message):
            logger.error("%s: stopping", message)
            return max(status, 0) if status >= 0 else 1
        case (_, _, message):
            logger.error("%s: stopping", message)
            if kind == "python":  # they have noticed, and answer 503 for a while; vllm-rs would go on for ever
                front_ends.wait(DEAD_LINGER_S + LAST_WORD_S)  # but for one that waits for the engine's ready frame
            front_ends.patience_s = 1.0  # no open request can end well any more
    return 1
