"""A front-end for an EngineCore, ours or vLLM 0.32.0's, with msgpack, pyzmq and the standard library. It knows nothing of mini_engine.

    python examples/small_frontend.py --rpc-port 29550 --port 8001
    mini-engine engine --executor mock --data-parallel-rpc-port 29550          (or: vllm serve MODEL --headless …)
    curl localhost:8001/generate -d '{"prompt_token_ids": [504, 3575, 282], "max_tokens": 5}'

Token ids in, token ids out, one JSON object per line as they come. No tokenizer, no model: those belong to the front-end only, and the
engine cannot tell the difference. What is written here is all that the wire asks for:

    handshake     HELLO ← engine, INIT → engine (where to connect), ready frame ← engine on the request socket, READY ← engine
    ADD           [identity, 00, msgpack array by position]; sampling parameters are a map
    ABORT         [identity, 01, msgpack array of ids]
    outputs       msgpack array; outputs[1] holds arrays: id, new token ids, …, finish reason at index 5, stop reason at 6
    death         the single raw frame ENGINE_CORE_DEAD

Threads: one owns the two ZMQ sockets; each HTTP connection has its own, and speaks to it through queues and a wake-up socket pair.
"""

import argparse
import http.server
import itertools
import json
import queue
import socket
import sys
import threading
import time

import msgpack
import zmq

ENGINE = (0).to_bytes(2, "little")  # the identity of rank 0
ADD, ABORT = b"\x00", b"\x01"
FINISH_REASONS = ["stop", "length", "abort", "error", "repetition"]


class Engine:
    """The client side of one remote engine."""

    def __init__(self, host: str, rpc_port: int) -> None:
        self.context = zmq.Context()
        self.requests, self.outputs = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PULL)
        for sock in (self.requests, self.outputs):
            sock.set_hwm(0)
            sock.bind(f"tcp://{host}:*")
        self.streams: dict[str, queue.SimpleQueue] = {}  # request id → what its HTTP thread reads
        self.commands: queue.SimpleQueue = queue.SimpleQueue()
        self.wake, self.woken = socket.socketpair()
        self.counter = itertools.count()
        self.alive = True
        self.max_model_len = self.shake_hands(f"tcp://{host}:{rpc_port}")
        threading.Thread(target=self.run, daemon=True).start()

    def shake_hands(self, address: str) -> int:
        with self.context.socket(zmq.ROUTER) as sock:
            sock.bind(address)
            print(f"waiting for an engine at {sock.last_endpoint.decode()}", file=sys.stderr, flush=True)
            inputs, outputs = ([s.last_endpoint.decode()] for s in (self.requests, self.outputs))
            for status in ("HELLO", "READY"):
                identity, payload = sock.recv_multipart()
                message = msgpack.unpackb(payload)
                if identity != ENGINE or message["status"] != status or not message["headless"]:
                    raise SystemExit(f"error: expected {status} of a headless engine 0, got {message} from {identity!r}")
                if status == "HELLO":
                    init = {"addresses": {"inputs": inputs, "outputs": outputs}, "parallel_config": {}}
                    sock.send_multipart([identity, msgpack.packb(init)])
        _, ready = self.requests.recv_multipart()
        return msgpack.unpackb(ready)["max_model_len"]

    def run(self) -> None:
        """The only thread that touches the sockets from here on."""
        poller = zmq.Poller()
        poller.register(self.outputs, zmq.POLLIN)
        poller.register(self.woken, zmq.POLLIN)
        while self.alive:
            for ready, _ in poller.poll():
                if ready == self.outputs:
                    self.receive(self.outputs.recv_multipart())
                else:
                    self.woken.recv(4096)
                    while not self.commands.empty():
                        kind, message = self.commands.get()
                        self.requests.send_multipart([ENGINE, kind, msgpack.packb(message)])

    def receive(self, frames: list[bytes]) -> None:
        if frames == [b"ENGINE_CORE_DEAD"]:
            self.alive = False
            for stream in list(self.streams.values()):
                stream.put(([], "error", "the engine died"))
            return
        _, outputs, *_ = msgpack.unpackb(frames[0], strict_map_key=False)
        for output in outputs:
            stream = self.streams.get(output[0])  # None: aborted meanwhile
            if stream is not None:
                finish = None if output[5] is None else FINISH_REASONS[output[5]]
                stream.put((output[1], finish, output[6]))

    def generate(self, prompt_token_ids: list[int], max_tokens: int, temperature: float, stop_token_ids: list[int]):
        """Yields (new token ids, finish reason or None, stop reason) until the finish reason is there. Leave early, and it is aborted."""
        request_id = f"small-{next(self.counter)}"
        params = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop_token_ids": stop_token_ids,
            "_all_stop_token_ids": stop_token_ids,
        }
        #      id, prompt, multimodal, sampling, pooling, arrival, lora, cache salt, rank: the nine that must be there
        add = [request_id, prompt_token_ids, None, params, None, time.time(), None, None, None]
        stream = self.streams[request_id] = queue.SimpleQueue()
        if not self.alive:  # it died between the handler's look and this line: nobody else would end the stream
            stream.put(([], "error", "the engine died"))
        finish = None
        try:
            self.command(ADD, add)
            while finish is None:
                tokens, finish, stop = stream.get()
                yield tokens, finish, stop
        finally:
            del self.streams[request_id]
            if finish is None:
                self.command(ABORT, [request_id])

    def command(self, kind: bytes, message: list) -> None:
        self.commands.put((kind, message))
        self.wake.send(b"\0")


class Handler(http.server.BaseHTTPRequestHandler):
    engine: Engine

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            prompt, max_tokens = body["prompt_token_ids"], body.get("max_tokens", 16)
            temperature, stop = float(body.get("temperature", 0)), body.get("stop_token_ids", [])
            if not prompt or not all(type(token) is int for token in [*prompt, *stop, max_tokens]) or max_tokens < 1 or temperature < 0:
                raise ValueError("token ids must be integers, max_tokens at least 1, temperature at least 0")
            if len(prompt) + max_tokens > self.engine.max_model_len or not self.engine.alive:
                raise ValueError(f"at most {self.engine.max_model_len} tokens" if self.engine.alive else "the engine is dead")
        except (ValueError, KeyError, TypeError) as e:
            self.send_error(400, f"{type(e).__name__}: {e}")
            return
        self.send_response(200)
        self.send_header("content-type", "application/jsonl")
        self.end_headers()
        outputs = self.engine.generate(prompt, max_tokens, temperature, stop)
        try:
            for tokens, finish, stop_reason in outputs:
                line = {"token_ids": tokens, "finish_reason": finish, "stop_reason": stop_reason}
                self.wfile.write(json.dumps(line).encode() + b"\n")
        except OSError:
            print("a client left", file=sys.stderr)
        finally:
            outputs.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--rpc-port", default=29550, help="where the engine says HELLO; *: any")
    arguments = parser.parse_args()
    Handler.engine = Engine(arguments.host, arguments.rpc_port)
    with http.server.ThreadingHTTPServer((arguments.host, arguments.port), Handler) as server:
        print(f"ready: http://{arguments.host}:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
