"""The trace of `bench engine`, and vLLM's own scheduler on it: `PYTHON scheduler_peer.py` under an interpreter that has vLLM.

One line of JSON in (row), one out (microseconds), until stdin ends; so the two engines can take turns in one run. mini_engine is not
imported: ours imports measure() from here.

No request path.    vLLM: benchmarks/ has no counterpart
"""

import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

VOCAB_SIZE = 32_000


class Engine(Protocol):
    """One scheduler with its KV cache manager, full of work. Nothing has been scheduled yet."""

    schedule: Callable[[], Any]
    update: Callable[..., Any]

    def sampled(self, output: Any) -> tuple[int, Any]:
        """A step's tokens scheduled, and a result for it: a token for each request that is past its prompt."""

    def codec(self, messages: list[Any]) -> tuple[float, float]:
        """Seconds of CPU to encode these messages, and to decode them."""


def measure(engine: Engine, row: dict[str, Any]) -> dict[str, float]:
    """Microseconds of CPU per scheduled token. row: steps; warm_up, not measured; depth, 2 for overlap; codec.

    Steps are scheduled `depth` ahead of their results. Only schedule() and update() are on the clock, and the codec on its own.
    """
    clock, in_flight = time.process_time, deque[tuple[Any, Any]]()
    messages: list[Any] = []
    spent = {"schedule": 0.0, "update": 0.0}
    tokens = 0
    gc.collect()
    gc.freeze()  # as both engine processes do
    for step in range(row["warm_up"] + row["steps"]):
        start = clock()
        output = engine.schedule()
        scheduled = clock() - start
        count, result = engine.sampled(output)
        in_flight.append((output, result))
        updated, message = 0.0, None
        if len(in_flight) == row["depth"]:
            oldest = in_flight.popleft()
            start = clock()
            message = engine.update(*oldest)
            updated = clock() - start
        if step >= row["warm_up"]:
            tokens += count
            spent["schedule"] += scheduled
            spent["update"] += updated
            messages += message.values() if message and row["codec"] else ()
    gc.unfreeze()
    times = {name: seconds / tokens * 1e6 for name, seconds in spent.items()}
    times["total"] = times["schedule"] + times["update"]
    if row["codec"]:
        encoded, decoded = engine.codec(messages)
        times |= {"encode": encoded / tokens * 1e6, "decode": decoded / tokens * 1e6}
    return times


class VllmEngine:
    """vLLM's Scheduler, or its AsyncScheduler."""

    def __init__(self, row: dict[str, Any]) -> None:
        import torch
        from vllm import SamplingParams  # type: ignore[import-not-found]
        from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
        from vllm.utils.hashing import sha256  # type: ignore[import-not-found]
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # type: ignore[import-not-found]
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # type: ignore[import-not-found]
        from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # type: ignore[import-not-found]
        from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found]
        from vllm.v1.request import Request  # type: ignore[import-not-found]
        from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found]

        config = EngineArgs(
            model=row["model"],
            dtype="float32",
            max_model_len=row["max_model_len"],
            max_num_seqs=row["running"],
            max_num_batched_tokens=row["budget"],
            block_size=row["block_size"],
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = row["num_blocks"]
        spec = FullAttentionSpec(block_size=row["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv_cache_config = KVCacheConfig(row["num_blocks"], [], [KVCacheGroupSpec(["layer"], spec)])
        scheduler_class = AsyncScheduler if row["depth"] > 1 else Scheduler
        self.scheduler = scheduler_class(config, kv_cache_config, StructuredOutputManager(config), row["block_size"], log_stats=True)
        self.schedule, self.update, self._output_class = self.scheduler.schedule, self.scheduler.update_from_output, ModelRunnerOutput
        init_none_hash(sha256)
        hasher = get_request_block_hasher(row["block_size"], sha256)
        self._to_compute: dict[str, int] = {}
        for request_id, prompt in requests(row):
            params = SamplingParams(temperature=0.0, max_tokens=row["max_tokens"], ignore_eos=True)
            self.scheduler.add_request(Request(request_id, prompt, params, None, block_hasher=hasher))
            self._to_compute[request_id] = len(prompt)

    def sampled(self, output: Any) -> tuple[int, Any]:
        tokens = []
        for request_id, count in output.num_scheduled_tokens.items():
            self._to_compute[request_id] -= count
            tokens.append([7] if self._to_compute[request_id] <= 0 else [])
        request_ids = list(output.num_scheduled_tokens)
        index = {request_id: i for i, request_id in enumerate(request_ids)}
        return output.total_num_scheduled_tokens, self._output_class(request_ids, index, tokens)

    def codec(self, messages: list[Any]) -> tuple[float, float]:
        from vllm.v1.engine import EngineCoreOutputs  # type: ignore[import-not-found]
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder  # type: ignore[import-not-found]

        return time_codec(MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), messages)


def requests(row: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """(id, prompt), all different: no hits, as much hashing as there can be."""
    return [(f"request-{i:05}", [(i * 7919 + j) % VOCAB_SIZE for j in range(row["prompt_len"])]) for i in range(row["running"])]


def time_codec(encoder: Any, decoder: Any, messages: list[Any]) -> tuple[float, float]:
    """Seconds of CPU: encode_into one buffer, as an output thread does, and decode."""
    buffer = bytearray()
    start = time.process_time()
    for message in messages:
        encoder.encode_into(message, buffer)
    encoded = time.process_time() - start
    frames = [[bytes(frame) for frame in encoder.encode(message)] for message in messages]
    start = time.process_time()
    for frame in frames:
        decoder.decode(frame)
    return encoded, time.process_time() - start


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is talk
    for line in sys.stdin:
        row = json.loads(line)
        print(json.dumps(measure(VllmEngine(row), row)), file=out, flush=True)


if __name__ == "__main__":
    main()
