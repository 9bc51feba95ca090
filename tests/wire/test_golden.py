"""The bytes themselves: vectors recorded from vLLM 0.32.0 (WIRE §1.3, §1.6, §2.3), and `msgpack`, an implementation that is not ours."""

import msgpack
import msgspec
import numpy as np
import pytest

from mini_engine.sampling_params import RequestOutputKind, SamplingParams
from mini_engine.wire.codec import MsgpackDecoder, MsgpackEncoder
from mini_engine.wire.handshake import EngineCoreReadyResponse, EngineHandshakeMetadata, HandshakeStatus, engine_identity
from mini_engine.wire.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    PrefillStats,
    SchedulerStats,
    UtilityOutput,
    UtilityResult,
)

ADD = bytes.fromhex(
    "dc0016a172920102c0de0004a473746f7090ae73746f705f746f6b656e5f69647390a96261645f776f72647390b9736b69705f72656164696e675f7072656669"
    "785f6361636865c2c0cb3ff0000000000000c0c0c0c0c0000000c0c2c0c0c0c2c0c0"
)
OUTPUTS = bytes.fromhex("990091dc0012a1729105c0c0c0c0c0c0c0c0c0c0c000c0c0c0c0c0cb4000000000000000c0c0c0c0c0")
HELLO = bytes.fromhex("83") + b"\xa6status\xa5HELLO\xa5local\xc2\xa8headless\xc3"


def request(**changes) -> EngineCoreRequest:
    add = EngineCoreRequest("r", [1, 2], None, SamplingParams(), None, 1.0, None, None, None)
    return msgspec.structs.replace(add, **changes)


def unpack(frame) -> object:
    return msgpack.unpackb(frame, strict_map_key=False)


def test_add_is_the_recorded_bytes():
    assert MsgpackEncoder().encode(request()) == [ADD]
    assert MsgpackDecoder(EngineCoreRequest).decode([ADD]) == request()


def test_outputs_are_the_recorded_bytes():
    message = EngineCoreOutputs(outputs=[EngineCoreOutput("r", [5])], timestamp=2.0)
    assert MsgpackEncoder().encode(message) == [OUTPUTS]
    assert MsgpackDecoder(EngineCoreOutputs).decode([OUTPUTS]) == message


def test_handshake_is_the_recorded_bytes():
    assert msgspec.msgpack.encode(HandshakeStatus("HELLO", local=False, headless=True)) == HELLO
    assert msgspec.msgpack.decode(HELLO, type=HandshakeStatus) == HandshakeStatus("HELLO", local=False, headless=True)
    assert [engine_identity(i) for i in (0, 1, 255, 256, 65535)] == [b"\0\0", b"\1\0", b"\xff\0", b"\0\1", b"\xff\xff"]
    init = msgpack.packb({"addresses": {"inputs": ["tcp://a"], "outputs": ["tcp://b"]}, "parallel_config": {}})
    assert msgspec.msgpack.decode(init, type=EngineHandshakeMetadata).addresses.inputs == ["tcp://a"]
    assert ENGINE_CORE_DEAD == b"ENGINE_CORE_DEAD" and len(ENGINE_CORE_DEAD) == 16


def test_the_ready_frame_is_a_map_of_25_names():
    ready = EngineCoreReadyResponse(
        max_model_len=8192,
        num_gpu_blocks=100,
        block_size=16,
        dtype="float32",
        vllm_version="0.32.0",
        data_parallel_rank=0,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        instance_id="id",
    )
    assert len(unpack(msgspec.msgpack.encode(ready))) == 25


def test_an_independent_reader_sees_positions_and_names():
    params = SamplingParams(temperature=0.0, max_tokens=7, logit_bias={3: -1.5}, output_kind=RequestOutputKind.DELTA, stop_token_ids=[9])
    (frame,) = MsgpackEncoder().encode(
        request(sampling_params=params, cache_salt="s", client_index=2, priority=-4, trace_headers={"a": "b"})
    )
    add = unpack(frame)
    assert len(add) == 22
    assert (add[0], add[1], add[7], add[11], add[13], add[14]) == ("r", [1, 2], "s", 2, -4, {"a": "b"})
    assert add[3]["logit_bias"] == {3: -1.5} and add[3]["output_kind"] == 1 and add[3]["_all_stop_token_ids"] == [9]
    assert "n" not in add[3]  # a default is left out: params are a map

    output = EngineCoreOutput(
        "r",
        [7],
        finish_reason=FinishReason.LENGTH,
        stop_reason="why",
        events=[EngineCoreEvent(EngineCoreEventType.QUEUED, 1.5)],
        prefill_stats=PrefillStats(num_prompt_tokens=3),
    )
    message = EngineCoreOutputs(3, [output], SchedulerStats(num_running_reqs=1), 2.0, finished_requests={"r"})
    (frame,) = MsgpackEncoder().encode(message)
    outputs = unpack(frame)
    assert len(outputs) == 9 and len(outputs[1][0]) == 18 and len(outputs[2]) == 18
    assert outputs[1][0][5:8] == [1, "why", [{"type": 1, "timestamp": 1.5}]]
    assert outputs[1][0][11]["num_prompt_tokens"] == 3 and outputs[1][0][13] == 0
    assert outputs[5] == ["r"]


def test_a_utility_reply_wraps_its_value():
    call_id = 2**64 - 1
    reply = EngineCoreOutputs(utility_output=UtilityOutput(call_id, None, UtilityResult(None, ["generate"])), timestamp=1.0)
    assert unpack(MsgpackEncoder().encode(reply)[0])[4] == [call_id, None, [None, ["generate"]]]
    void = EngineCoreOutputs(utility_output=UtilityOutput(1, None, UtilityResult()), timestamp=1.0)
    assert unpack(MsgpackEncoder().encode(void)[0])[4] == [1, None, [None, None]]


@pytest.mark.parametrize("value", [b"pickled", ["builtins", "int"]])
def test_a_utility_result_with_type_info_is_refused(value):
    frame = msgpack.packb([0, [], None, 1.0, [1, None, [value, 5]]])
    with pytest.raises(msgspec.ValidationError, match="Expected `null`"):
        MsgpackDecoder(EngineCoreOutputs).decode([frame])


def test_zero_timestamp_means_now():
    assert MsgpackDecoder(EngineCoreOutputs).decode([msgpack.packb([0, [], None, 0.0])]).timestamp > 0


def test_encode_into_reuses_the_buffer():
    encoder, buffer = MsgpackEncoder(), bytearray(b"x" * 500)
    message = EngineCoreOutputs(outputs=[EngineCoreOutput("r", [5])], timestamp=2.0)
    frames = encoder.encode_into(message, buffer)
    assert frames[0] is buffer and buffer == OUTPUTS
    logprobs = LogprobsLists(np.zeros((10, 20), np.int32), np.zeros((10, 20), np.float32), np.zeros(10, np.int64))
    frames = encoder.encode_into(EngineCoreOutputs(outputs=[EngineCoreOutput("r", [5], logprobs)], timestamp=2.0), buffer)
    assert [memoryview(f).nbytes for f in frames[1:]] == [800, 800]
    assert unpack(frames[0])[1][0][2][:2] == [["<i4", [10, 20], 1], ["<f4", [10, 20], 2]]


def test_an_overlay_writes_frame_0_and_gets_plain_values(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import msgpack\n\ndef encode(obj):\n    assert type(obj) is list\n    return msgpack.packb(obj)\n")
    encoder = MsgpackEncoder({"wire.codec": str(file)})
    assert encoder.encode(request()) == [ADD.replace(b"\xde\0\4", b"\x84")]  # msgpack writes the small map's header in one byte
    logprobs = LogprobsLists(np.ones((1, 2), np.int32), np.ones((1, 2), np.float32), np.ones(1, np.int64))
    message = EngineCoreOutputs(outputs=[EngineCoreOutput("r", [5], logprobs)], timestamp=2.0)
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(encoder.encode(message))
    assert decoded.outputs[0].new_logprobs.logprobs.tolist() == [[1.0, 1.0]]
