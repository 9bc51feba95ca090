"""A front-end made of three sockets, and an EngineCoreProc as a real child process: what the engine's tests stand on.

Everything waits for a message, a process or a condition, with a deadline; nothing sleeps.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from mini_engine.config import EngineConfig, MockConfig
from mini_engine.sampling_params import SamplingParams
from mini_engine.wire.codec import MsgpackDecoder, MsgpackEncoder
from mini_engine.wire.handshake import EngineCoreReadyResponse, engine_identity
from mini_engine.wire.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
    UtilityRequest,
)

VOCAB_SIZE = 1000
DEADLINE_S = 20.0


def write_model(directory: Path, vocab_size: int = VOCAB_SIZE, max_position_embeddings: int = 512) -> Path:
    """All of a model that the mock device reads."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"vocab_size": vocab_size, "max_position_embeddings": max_position_embeddings}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def mock_config(directory: Path, mock: MockConfig | None = None, **changes) -> EngineConfig:
    return EngineConfig(
        **({"model": str(directory), "executor": "mock", "check": True, "mock": mock or MockConfig(num_blocks=256)} | changes)
    )


def make_request(request_id: str, prompt: list[int], max_tokens: int = 4, client_index: int = 0, **params) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id,
        prompt,
        None,
        SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
        None,
        time.time(),
        None,
        None,
        None,
        client_index=client_index,
    )


class Streams:
    """What arrived, put together per request; fails on a second last output, or on anything after it."""

    def __init__(self) -> None:
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.last: dict[str, EngineCoreOutput] = {}
        self.first: dict[str, EngineCoreOutput] = {}
        self.stats = []

    def add(self, outputs: EngineCoreOutputs) -> None:
        if outputs.scheduler_stats is not None:
            self.stats.append(outputs.scheduler_stats)
        for output in outputs.outputs:
            assert output.request_id not in self.last, f"{output} after {self.last[output.request_id]}"
            self.first.setdefault(output.request_id, output)
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.last[output.request_id] = output


class FrontEnd:
    """Binds handshake ROUTER, and per client a request ROUTER and an output PULL; serves one engine."""

    def __init__(self, context: zmq.Context, address: Callable[[str], str], num_clients: int = 1, engine_index: int = 0) -> None:
        def bind(kind: int, name: str) -> zmq.Socket:
            sock = context.socket(kind)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVHWM, 0)
            sock.setsockopt(zmq.SNDHWM, 0)
            sock.bind(address(name))
            return sock

        def endpoint(sock: zmq.Socket) -> str:
            return sock.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()

        self.identity = engine_identity(engine_index)
        self.handshake = bind(zmq.ROUTER, "h")
        self.requests = [bind(zmq.ROUTER, f"r{i}") for i in range(num_clients)]
        self.outputs = [bind(zmq.PULL, f"o{i}") for i in range(num_clients)]
        self.handshake_address = endpoint(self.handshake)
        self.addresses = {"inputs": [endpoint(s) for s in self.requests], "outputs": [endpoint(s) for s in self.outputs]}
        self.streams = Streams()
        self.utilities: dict[int, UtilityOutput] = {}
        self.dead = False
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    def close(self) -> None:
        for sock in (self.handshake, *self.requests, *self.outputs):
            sock.close()

    # ── handshake ───────────────────────────────────────────────────────────────────────────────────────

    def receive_handshake(self) -> dict:
        assert self.handshake.poll(DEADLINE_S * 1000), "no handshake message"
        identity, payload = self.handshake.recv_multipart()
        assert identity == self.identity
        return msgspec.msgpack.decode(payload)

    def send_init(self, payload: bytes | None = None) -> None:
        init = {"addresses": self.addresses, "parallel_config": {}}
        self.handshake.send_multipart([self.identity, msgspec.msgpack.encode(init) if payload is None else payload])

    def start(self) -> list[EngineCoreReadyResponse]:
        """The whole handshake; the ready frames."""
        self.hello = self.receive_handshake()
        self.send_init()
        ready = []
        for sock in self.requests:
            assert sock.poll(DEADLINE_S * 1000), "no ready frame"
            identity, payload = sock.recv_multipart()
            assert identity == self.identity
            ready.append(msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse))
        self.ready = self.receive_handshake()
        return ready

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────

    def send(self, *frames: bytes, client: int = 0) -> None:
        self.requests[client].send_multipart([self.identity, *frames])

    def add(self, request: EngineCoreRequest, client: int = 0) -> None:
        self.send(EngineCoreRequestType.ADD, *MsgpackEncoder().encode(request), client=client)

    def abort(self, *request_ids: str) -> None:
        self.send(EngineCoreRequestType.ABORT, msgspec.msgpack.encode(list(request_ids)))

    def call(self, call_id: int, method: str, *args, client: int = 0) -> UtilityOutput:
        self.send(
            EngineCoreRequestType.UTILITY, *MsgpackEncoder().encode(UtilityRequest(client, call_id, method, list(args))), client=client
        )
        self.until(lambda: call_id in self.utilities, client)
        return self.utilities.pop(call_id)

    # ── outputs ─────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, client: int = 0, timeout_s: float = DEADLINE_S) -> EngineCoreOutputs | None:
        """One message; None for ENGINE_CORE_DEAD."""
        assert not self.dead, "a frame is expected after ENGINE_CORE_DEAD"
        assert self.outputs[client].poll(timeout_s * 1000), "no output"
        frames = self.outputs[client].recv_multipart()
        if frames == [ENGINE_CORE_DEAD]:
            self.dead = True
            return None
        outputs = self._decoder.decode(frames)
        self.streams.add(outputs)
        if outputs.utility_output is not None:
            self.utilities[outputs.utility_output.call_id] = outputs.utility_output
        return outputs

    def until(self, condition: Callable[[], bool], client: int = 0) -> None:
        """Receive until it holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the condition never held"
            assert self.receive(client) is not None or condition(), "ENGINE_CORE_DEAD came first"

    def until_finished(self, *request_ids: str, client: int = 0) -> None:
        self.until(lambda: all(r in self.streams.last for r in request_ids), client)

    def until_dead(self, client: int = 0) -> None:
        while not self.dead:
            self.receive(client)


class EngineProcess:
    """The child. Its standard error is kept for the assertion messages."""

    def __init__(self, front_end: FrontEnd, config: EngineConfig, log: Path, *, headless: bool = False, engine_index: int = 0) -> None:
        self.log = log
        read_fd, self.parent_fd = os.pipe()
        command = [sys.executable, "-m", "mini_engine.engine_core.proc", "--config", json.dumps(config.to_dict())]
        command += ["--handshake-address", front_end.handshake_address, "--engine-index", str(engine_index), "--parent-fd", str(read_fd)]
        with log.open("wb") as stderr:
            self.popen = subprocess.Popen(command + ["--headless"] * headless, pass_fds=[read_fd], stderr=stderr)
        os.close(read_fd)

    def wait(self) -> int:
        try:
            return self.popen.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the engine did not end; its log:\n{self.log.read_text()}") from None

    def parent_gone(self) -> None:
        os.close(self.parent_fd)
        self.parent_fd = -1

    def close(self) -> None:
        if self.parent_fd >= 0:
            self.parent_gone()
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


@contextmanager
def running_engine(
    directory: Path,
    config: EngineConfig,
    *,
    transport: str = "ipc",
    num_clients: int = 1,
    engine_index: int = 0,
    headless: bool = False,
    handshake: bool = True,
) -> Iterator[tuple[FrontEnd, EngineProcess]]:
    """A front-end, and an engine that has said READY to it. Killed at the end if it still runs."""
    directory.mkdir(exist_ok=True)

    def address(name: str) -> str:
        return f"ipc://{directory}/{name}" if transport == "ipc" else "tcp://127.0.0.1:*"

    with zmq.Context() as context:
        front_end = FrontEnd(context, address, num_clients, engine_index)
        engine = EngineProcess(front_end, config, directory / "stderr", headless=headless, engine_index=engine_index)
        try:
            if handshake:
                front_end.ready_responses = front_end.start()
            yield front_end, engine
        finally:
            engine.close()
            front_end.close()
