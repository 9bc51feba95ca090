"""An engine of a few lines with msgpack and pyzmq only, independent of our structs and codec: it says what a test tells it to say."""

from __future__ import annotations

from typing import Any

import msgpack
import zmq

DEADLINE_MS = 10_000

SIZES = "world_size data_parallel_size tensor_parallel_size pipeline_parallel_size decode_context_parallel_size"
READY_RESPONSE: dict[str, Any] = dict.fromkeys(SIZES.split(), 1) | {
    "max_model_len": 512,
    "num_gpu_blocks": 64,
    "block_size": 16,
    "dp_stats_address": None,
    "dtype": "torch.float32",
    "vllm_version": "0.32.0",
    "data_parallel_rank": 0,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "instance_id": "x",
    "supports_lora": False,
    "max_loras": 0,
}


class FakeEngine:
    """Blocking, one thread. Close it, or use it as a context manager."""

    def __init__(self, identity: bytes = b"\x00\x00") -> None:
        self.identity = identity
        self.context: zmq.Context[Any] = zmq.Context()
        self.handshake: Any = None
        self.requests: Any = None
        self.outputs: Any = None

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """As a death would: connections drop, nothing is said."""
        self.context.destroy(linger=0)

    def _dealer(self, address: str) -> Any:
        sock = self.context.socket(zmq.DEALER)
        sock.identity = self.identity
        sock.connect(address)
        return sock

    # handshake
    def hello(self, address: str, **changes: Any) -> None:
        self.handshake = self._dealer(address)
        self.say({"status": "HELLO", "local": False, "headless": True, **changes})

    def say(self, message: Any) -> None:
        self.handshake.send(message if isinstance(message, bytes) else msgpack.packb(message))

    def receive_init(self) -> dict[str, Any]:
        return msgpack.unpackb(_receive(self.handshake)[0])

    # after it
    def connect(self, input_address: str, output_address: str, ready: bytes | dict[str, Any] | None = None) -> None:
        self.outputs = self.context.socket(zmq.PUSH)
        self.outputs.connect(output_address)
        self.requests = self._dealer(input_address)
        payload = READY_RESPONSE if ready is None else ready
        self.requests.send(payload if isinstance(payload, bytes) else msgpack.packb(payload))

    def receive(self) -> tuple[bytes, Any]:
        """(request type, decoded payload) of the next request."""
        kind, *frames = _receive(self.requests)
        return kind, msgpack.unpackb(frames[0], strict_map_key=False)

    def send(self, *frames: Any) -> None:
        self.outputs.send_multipart([frame if isinstance(frame, bytes) else msgpack.packb(frame) for frame in frames])

    def answer(self, call: Any, result: Any = None, failure: str | None = None) -> None:
        """Reply to a UTILITY request."""
        self.send([0, [], None, 1.0, [call[1], failure, None if failure else [None, result]]])


def _receive(sock: Any) -> list[bytes]:
    assert sock.poll(DEADLINE_MS), "nothing came"
    return sock.recv_multipart()
