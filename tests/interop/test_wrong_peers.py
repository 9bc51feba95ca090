"""Peers that speak something else, on every socket of a server that is at work: they are refused or ignored, and nobody else notices.

The engine's own sockets are fuzzed in tests/engine_core, the handshake in tests/transport; here everything is a whole process, and
strangers come while answers are under way: raw bytes below ZMTP, wrong frames above it, a second engine with the first one's name.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator

import msgpack
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.executor.mock import mock_generate
from tests.interop import peers
from tests.interop.cases import PROMPT, TEXT
from tests.interop.peers import MOCK, Server, running
from tests.server.serving import CLI

VOCAB = 49152
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)  # ZMTP 3.0, as a client sends it
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
OUTPUTS = msgpack.packb([0, [["r", [1], *[None] * 3, 1, *[None] * 7, 0]], None, 1.0])
ADD = msgpack.packb(["x", [1, 2], None, {"max_tokens": 3}, None, 1.0, None, None, None])


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Server, list[int]]]:
    """Our front-end over our headless engine, and the TCP ports of the front-end's request and output sockets."""
    with peers.ours_headless(*MOCK) as server:
        http = int(server.url.rpartition(":")[2])
        connections = psutil.Process(server.front_end.popen.pid).net_connections("tcp")
        ports = sorted({c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN} - {http})
        assert len(ports) == 2
        works(server)  # so the engine was there before any stranger
        yield server, ports


def works(server: Server) -> None:
    """The healthy side: one answer, to the token."""
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    assert server.post(TEXT, body).json()["choices"][0]["token_ids"] == mock_generate(PROMPT, 6, VOCAB)
    assert server.get("/health").status_code == server.get("/ping").status_code == 200


def raw(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(5)
        try:
            while sock.recv(1 << 16):  # until it has been taken in, and we are shown the door
                pass
        except ConnectionError:
            pass


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # a TLS client hello
        GREETING[:11],
        GREETING + b"\x06" + bytes(8),  # an impossible command
        GREETING + READY + b"\x02" + struct.pack(">Q", 2**62) + b"x" * 100,  # a frame of 4 EiB, it says
        GREETING + READY + b"\x02" + struct.pack(">Q", 2**40) + b"x" * 100,
        GREETING + READY + b"\x00\x05abcde",
    ],
)
def test_bytes_below_zmtp(served: tuple[Server, list[int]], data: bytes) -> None:
    server, ports = served
    for port in ports:
        raw(port, data)
    works(server)


def frames() -> st.SearchStrategy[list[bytes]]:
    cut = st.sampled_from([OUTPUTS, ADD]).flatmap(lambda frame: st.integers(0, len(frame)).map(lambda at: frame[:at]))
    part = st.one_of(
        st.binary(max_size=64), cut, st.sampled_from([b"ENGINE_CORE_DEAD", b"\x00", b"\x03", OUTPUTS]), st.just(b"x" * (1 << 22))
    )
    return st.lists(part, min_size=1, max_size=4)


@pytest.mark.timeout(120)
def test_strangers_with_the_right_protocol_and_the_wrong_words(served: tuple[Server, list[int]]) -> None:
    """Fuzz over both sockets. They connect later than the engine, so whatever they say, ENGINE_CORE_DEAD included, is not its word."""
    server, ports = served
    with zmq.Context() as context:

        @settings(max_examples=60, database=None)
        @given(
            st.lists(frames(), max_size=4),
            st.sampled_from([b"", b"\x00\x00", b"\x01\x00", b"stranger"]),
            st.sampled_from(["PUSH", "DEALER"]),
        )
        def say(messages: list[list[bytes]], identity: bytes, kind: str) -> None:
            for port in ports:
                with context.socket(getattr(zmq, kind)) as sock:
                    sock.linger = 200
                    sock.immediate = True
                    sock.sndtimeo = 50
                    if identity:
                        sock.identity = identity
                    sock.connect(f"tcp://127.0.0.1:{port}")
                    for message in messages:
                        try:
                            sock.send_multipart(message)
                        except zmq.Again:  # the wrong kind of socket for this port: it was not let in
                            break

        say()
        works(server)
    works(server)
    assert "ignored" in server.front_end.output() and "ERROR" not in server.front_end.output()


def test_a_second_engine_with_the_same_name_comes_too_late(served: tuple[Server, list[int]]) -> None:
    """The handshake is over: nobody answers its HELLO. It waits for a front-end, and the first one serves on."""
    server, _ = served
    match = re.search(r"tcp://127.0.0.1:(\d+)", server.front_end.output())
    assert match
    with running(*CLI, "engine", *MOCK, "--data-parallel-rpc-port", match[1]) as double:
        works(server)
        assert double.popen.poll() is None
    works(server)


def test_an_engine_with_another_name_fails_the_start() -> None:
    with peers.our_front_end() as (front_end, rpc_port), peers.our_engine(rpc_port, *MOCK, "--engine-index", "3"):
        assert front_end.popen.wait(20) == 1
        assert "engine 3 said HELLO, but this front-end waits for engine 0" in front_end.output()
        assert "Traceback" not in front_end.output()


@pytest.mark.parametrize("changes", [{"vllm_version": "0.99.0"}, {"max_model_len": "long"}])
def test_an_engine_of_another_release(changes: dict[str, object]) -> None:
    """Its ready frame says so: another version is warned of, another layout ends the start with the path of what is wrong."""
    from tests.transport.fake_engine import READY_RESPONSE, FakeEngine

    with peers.our_front_end() as (front_end, rpc_port), FakeEngine() as engine:
        engine.hello(f"tcp://127.0.0.1:{rpc_port}")
        addresses = engine.receive_init()["addresses"]
        engine.connect(addresses["inputs"][0], addresses["outputs"][0], READY_RESPONSE | changes)
        engine.say({"status": "READY", "local": False, "headless": True})
        if "vllm_version" in changes:
            front_end.wait_for("ready: http")
            assert "EngineCore is of vLLM 0.99.0, this wire of 0.32" in front_end.output()
        else:
            assert front_end.popen.wait(20) == 1
            assert re.search(r"is not one of vLLM 0\.32\.0.*max_model_len", front_end.output())
