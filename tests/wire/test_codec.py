"""Arrays on the wire, and the array structs' contract: shorter, longer, wrong, cut, at each width change."""

import contextlib
import math

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mini_engine.sampling_params import SamplingParams
from mini_engine.wire.codec import MsgpackDecoder, MsgpackEncoder
from mini_engine.wire.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    LogprobsTensors,
    Tensor,
)
from tests.wire.test_golden import ADD, OUTPUTS, request, unpack

DTYPES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


class Arrays(msgspec.Struct, array_like=True):
    array: np.ndarray | None = None
    tensor: Tensor | None = None


def encode(obj: object) -> list[bytes]:
    """Frames as they arrive: bytes of their own."""
    return [bytes(frame) for frame in MsgpackEncoder().encode(obj)]


def decode(frames, type=Arrays):
    return MsgpackDecoder(type).decode(frames)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ── arrays ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("nbytes", "num_frames"), [(0, 1), (255, 1), (256, 2), (257, 2)])
def test_256_bytes_is_where_a_frame_of_its_own_begins(nbytes, num_frames):
    for value in (Arrays(array=np.zeros(nbytes, np.uint8)), Arrays(tensor=np.zeros(nbytes, np.uint8).view(Tensor))):
        frames = encode(value)
        assert len(frames) == num_frames
        name, shape, data = next(x for x in unpack(frames[0]) if x is not None)
        assert name == ("|u1" if value.array is not None else "uint8")
        assert shape == [nbytes]
        assert data == (1 if num_frames == 2 else msgpack.ExtType(3, bytes(nbytes)))


def test_a_scalar_array_is_inline_and_its_shape_empty():
    assert unpack(encode(Arrays(np.array(7, "<i4")))[0])[0] == ["<i4", [], msgpack.ExtType(3, b"\7\0\0\0")]
    assert decode(encode(Arrays(np.array(7, "<i4")))).array == 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_field_type_decides_how_the_dtype_is_written(dtype):
    array = np.ones(3, dtype)
    payload = unpack(encode(Arrays(array, array.view(Tensor)))[0])
    assert payload[0][0] == array.dtype.str
    assert payload[1][0] == dtype
    back = decode(encode(Arrays(array, array.view(Tensor))))
    assert same(back.array, array) and type(back.array) is np.ndarray
    assert same(back.tensor, array) and type(back.tensor) is Tensor


@given(hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)))
def test_any_array_round_trips(array):
    back = decode(encode(Arrays(array, array.view(Tensor))))
    assert same(back.array, array) and same(back.tensor, array)


def test_layout_and_byte_order_do_not_matter():
    array = np.arange(400, dtype=np.int32).reshape(20, 20)
    big = array.astype(">i4")
    for sent in (array[::2, 1::3], array.T, big):
        back = decode(encode(Arrays(sent, sent.view(Tensor))))
        assert np.array_equal(back.array, sent) and np.array_equal(back.tensor, sent)
    assert unpack(encode(Arrays(big, big.view(Tensor)))[0])[0][0] == ">i4"
    assert unpack(encode(Arrays(big, big.view(Tensor)))[0])[1][0] == "int32"  # a tensor's memory is little-endian, always


def test_decoding_copies_nothing_and_the_result_is_read_only():
    frames = encode(Arrays(np.arange(100), np.arange(3).view(Tensor)))
    back = decode(frames)
    assert np.shares_memory(back.array, np.frombuffer(frames[1], np.uint8))
    assert np.shares_memory(back.tensor, np.frombuffer(frames[0], np.uint8))
    assert not back.array.flags.writeable and not back.tensor.flags.writeable


@pytest.mark.parametrize("value", [np.array([object()]), np.array(["a"]), np.float32(1), np.datetime64("now"), object(), {1: object()}])
def test_what_has_no_wire_form_is_a_type_error(value):
    encoder = MsgpackEncoder()
    with pytest.raises(TypeError):
        encoder.encode(value)
    assert encoder.encode([1]) == [b"\x91\x01"]  # and the encoder goes on


BAD_ARRAYS = {
    "frame 0 is not an array's": ["<i4", [64], 0],
    "frame index beyond the last": ["<i4", [64], 2],
    "negative frame index": ["<i4", [64], -1],
    "huge frame index": ["<i4", [64], 2**63],
    "bool as index": ["<i4", [64], True],
    "negative dimension": ["<i4", [-1], 1],
    "huge dimension": ["<i4", [2**40], 1],
    "overflowing dimensions": ["<i4", [2**33, 2**33, 0], 1],
    "product overflows to fit": ["<i4", [2**62, 256], 1],
    "too short": ["<i4", [63], 1],
    "too many dimensions": ["<i4", [1] * 65 + [64], 1],
    "float dimension": ["<i4", [64.0], 1],
    "shape is a number": ["<i4", 64, 1],
    "object dtype": ["|O", [32], 1],
    "record dtype": ["<i4,<i4", [32], 1],
    "torch's name in an ndarray": ["int32", [64], 1],
    "no dtype": [None, [64], 1],
    "two elements": ["<i4", [64]],
    "four elements": ["<i4", [64], 1, 1],
    "raw bytes": ["<i4", [1], b"1234"],
    "other Ext code": ["<i4", [1], msgpack.ExtType(1, b"1234")],
    "pickle": msgpack.ExtType(2, b"1234"),
    "a map": {"sender_id": 1, "message_id": 2, "tensor_id": 3},
    "a string": "<i4",
}


@pytest.mark.parametrize("payload", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_a_bad_array_is_a_decode_error(payload):
    frames = [msgpack.packb([payload]), bytes(256)]
    with pytest.raises(msgspec.DecodeError):
        decode(frames)


@pytest.mark.parametrize(
    ("name", "message"), [("<i4", "got '<i4'"), ("bfloat16", r"'bfloat16' \(numpy cannot hold it\) - at `\$\[1\]`"), ("Tensor", "got")]
)
def test_a_tensor_of_unknown_dtype_is_refused_by_name(name, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        decode([msgpack.packb([None, [name, [2], msgpack.ExtType(3, b"1234")]])])


# ── struct contract ─────────────────────────────────────────────────────────────────────────────────────


def test_a_shorter_array_takes_defaults_a_longer_one_loses_its_tail():
    full = unpack(ADD)
    for n in range(9, 22):
        assert decode([msgpack.packb(full[:n])], EngineCoreRequest) == request()
    assert decode([msgpack.packb([*full, "future", {"x": 1}])], EngineCoreRequest) == request()
    for n in range(9):
        with pytest.raises(msgspec.ValidationError, match="at least length 9"):
            decode([msgpack.packb(full[:n])], EngineCoreRequest)
    minimal = decode([msgpack.packb([0, [["r", [1]]]])], EngineCoreOutputs)  # the least that a stock front-end accepts
    assert minimal.outputs == [EngineCoreOutput("r", [1])]
    assert (
        decode([msgpack.packb([0, [["r", [1], None, None, None, 1]]])], EngineCoreOutputs).outputs[0].finish_reason is FinishReason.LENGTH
    )


@pytest.mark.parametrize(
    ("position", "value", "path"),
    [
        (0, 7, r"\$\[0\]"),
        (0, None, r"\$\[0\]"),
        (1, [1, "2"], r"\$\[1\]\[1\]"),
        (1, [1, 2.0], r"\$\[1\]\[1\]"),
        (1, [True], r"\$\[1\]\[0\]"),
        (3, [], r"\$\[3\]"),
        (3, {"temperature": "hot"}, r"\$\[3\]\.temperature"),
        (3, {"temperature": -1.0}, r"temperature must be in \[0, 2\], got -1.0 - at `\$\[3\]`"),
        (3, {"output_kind": 7}, r"\$\[3\]\.output_kind"),
        (5, None, r"\$\[5\]"),
        (13, 1.5, r"\$\[13\]"),
        (15, 0, r"\$\[15\]"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(position, value, path):
    add = unpack(ADD)
    add[position] = value
    with pytest.raises(msgspec.ValidationError, match=path):
        decode([msgpack.packb(add)], EngineCoreRequest)


def test_positions_nobody_uses_take_anything():
    add = unpack(ADD)
    for position in (2, 4, 6, 9, 10, 18, 21):
        add[position] = {"any": ["thing", 1]}
    assert decode([msgpack.packb(add)], EngineCoreRequest).kv_hints == {"any": ["thing", 1]}


def test_params_are_a_map_missing_and_nil_differ_unknown_is_ignored():
    def params(**fields) -> SamplingParams:
        add = unpack(ADD)
        add[3] = fields
        return decode([msgpack.packb(add)], EngineCoreRequest).sampling_params

    assert params().max_tokens == 16
    assert params(max_tokens=None).max_tokens is None
    assert params(watermarking=True, routed_experts_prompt_start=0, brand_new={"a": 1}) == params()
    stock_greedy = params(temperature=0.0, top_p=1.0, top_k=0, max_tokens=7, stop_token_ids=[], _eos_token_id=2, _all_stop_token_ids=[2])
    assert (stock_greedy._eos_token_id, stock_greedy._all_stop_token_ids, stock_greedy.is_greedy) == (2, {2}, True)


@pytest.mark.parametrize(("frame", "type"), [(ADD, EngineCoreRequest), (OUTPUTS, EngineCoreOutputs)])
def test_every_cut_is_a_decode_error(frame, type):
    for cut in range(len(frame)):
        with pytest.raises(msgspec.DecodeError):
            decode([frame[:cut]], type)
    with pytest.raises(msgspec.DecodeError):
        decode([frame + b"\0"], type)
    with pytest.raises(msgspec.DecodeError):
        decode([], type)


WIDTHS = sorted({v + d for bits in (5, 7, 8, 15, 16, 31, 32, 63) for v in (1 << bits, -(1 << bits)) for d in (-1, 0, 1)} | {0, 2**64 - 1})


def test_ints_at_each_change_of_width():
    for value in WIDTHS:
        if not -(2**63) <= value < 2**64:
            continue
        frames = encode([value])
        assert frames == [msgpack.packb([value])]
        assert decode(frames, None) == [value]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536])
def test_lengths_at_each_change_of_width(length):
    for value in ([1] * length, "x" * length, bytes(length)):
        assert encode(value) == [msgpack.packb(value)]
        assert decode(encode(value), None) == value
    tokens = request(prompt_token_ids=[5] * length)
    assert decode(encode(tokens), EngineCoreRequest) == tokens


# ── random messages ─────────────────────────────────────────────────────────────────────────────────────

texts = st.text(max_size=20)
ids = st.lists(st.integers(0, 2**31), max_size=30)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(0, 99),
    seed=st.none() | st.integers(0, 2**63),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    stop_token_ids=ids,
    max_tokens=st.none() | st.integers(1, 10**6),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
)
requests = st.builds(
    request,
    request_id=texts,
    prompt_token_ids=st.none() | ids,
    sampling_params=st.none() | params,
    arrival_time=st.floats(allow_nan=False),
    cache_salt=st.none() | texts,
    client_index=st.integers(0, 9),
    priority=st.integers(-(2**63), 2**63 - 1),
    trace_headers=st.none() | st.dictionaries(texts, texts, max_size=2),
)


@st.composite
def logprobs(draw, cls=LogprobsLists, array=np.ndarray):
    n, k = draw(st.integers(0, 9)), draw(st.integers(0, 20))
    rows = hnp.arrays(np.float32, (n, k + 1), elements=st.floats(-100, 0, width=32))
    columns = [draw(hnp.arrays(np.int32, (n, k + 1))), draw(rows), draw(hnp.arrays(np.int64, n))]
    return cls(*(column.view(array) for column in columns))


outputs = st.builds(
    EngineCoreOutput,
    request_id=texts,
    new_token_ids=ids,
    new_logprobs=st.none() | logprobs(),
    new_prompt_logprobs_tensors=st.none() | logprobs(LogprobsTensors, Tensor),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | texts | st.integers(0, 2**31),
)


@given(requests)
def test_any_request_round_trips(message):
    assert decode(encode(message), EngineCoreRequest) == message


@given(st.lists(outputs, max_size=3))
def test_any_outputs_round_trip_and_are_stable(batch):
    frames = encode(EngineCoreOutputs(outputs=batch, timestamp=1.5))
    back = decode(frames, EngineCoreOutputs)
    assert encode(back) == frames
    for sent, got in zip(batch, back.outputs, strict=True):
        assert (sent.request_id, sent.new_token_ids, sent.finish_reason, sent.stop_reason) == (
            got.request_id,
            got.new_token_ids,
            got.finish_reason,
            got.stop_reason,
        )
        for a, b in zip(sent.new_logprobs or (), got.new_logprobs or (), strict=True):
            assert a is b or same(a, b)


def mutated(draw, frames: list[bytes]) -> list[bytes]:
    """Flip, cut, drop, repeat or swap: what a broken or hostile peer might send."""
    frames = list(frames)
    for _ in range(draw(st.integers(1, 4))):
        i = draw(st.integers(0, len(frames) - 1))
        frame = bytearray(frames[i])
        if frame:
            at = draw(st.integers(0, len(frame) - 1))
            match draw(st.integers(0, 3)):
                case 0:
                    frame[at] = draw(st.integers(0, 255))
                case 1:
                    del frame[at : at + draw(st.integers(1, 8))]
                case 2:
                    frame[at:at] = draw(st.binary(min_size=1, max_size=8))
                case 3:
                    frame[at:at] = draw(st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc9\x7f\xff\xff\xff\x03"]))
        frames[i] = bytes(frame)
        if draw(st.booleans()):
            frames = frames[: draw(st.integers(0, len(frames)))] or [b""]
    return frames


def only_msgspec_errors(frames: list[bytes]) -> None:
    for type in (EngineCoreRequest, EngineCoreOutputs, None):
        with contextlib.suppress(msgspec.DecodeError):
            MsgpackDecoder(type).decode(frames)


@given(st.data(), st.builds(lambda batch: EngineCoreOutputs(outputs=batch, timestamp=1.5), st.lists(outputs, max_size=2)) | requests)
def test_mutated_frames_raise_only_msgspec_errors(data, message):
    only_msgspec_errors(mutated(data.draw, encode(message)))


@given(st.lists(st.binary(max_size=64), max_size=3))
def test_random_bytes_raise_only_msgspec_errors(frames):
    only_msgspec_errors(frames)


def test_depth_is_a_decode_error_too():
    only_msgspec_errors([b"\x91" * 1_000_000])
    with pytest.raises(msgspec.DecodeError, match="RecursionError"):
        decode([b"\x91" * 1_000_000], None)


def test_special_floats_cross():
    back = decode(encode(Arrays(np.array([math.nan, math.inf, -0.0]))))
    assert math.isnan(back.array[0]) and back.array[1] == math.inf and math.copysign(1, back.array[2]) == -1
