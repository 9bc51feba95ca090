"""EngineCoreIO in this process: what a thread's death does, and what start-up promises."""

import queue
import sys

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.engine_core.io import EngineCoreIO
from mini_engine.wire.codec import MsgpackEncoder
from mini_engine.wire.handshake import EngineZmqAddresses
from mini_engine.wire.messages import ENGINE_CORE_DEAD, EngineCoreOutputs, EngineCoreRequestType, UtilityOutput
from tests.engine_core.harness import FrontEnd, make_request

GET_S = 20


@pytest.fixture
def front_end(tmp_path):
    with zmq.Context() as context:
        front_end = FrontEnd(context, lambda name: f"ipc://{tmp_path}/{name}", num_clients=2)
        yield front_end
        front_end.close()


def broken(request):
    raise SystemExit("not an Exception: nothing in the thread may catch it")


def make_io(addresses, preprocess=broken) -> EngineCoreIO:
    return EngineCoreIO(EngineZmqAddresses(**addresses), 0, preprocess, queue.SimpleQueue())


def receive_ready(front_end) -> None:
    for sock in front_end.requests:
        assert sock.recv_multipart() == [front_end.identity, b"ready"]


def test_if_the_input_thread_dies_everybody_is_told(front_end, caplog):
    io = make_io(front_end.addresses)
    io.start(b"ready")
    receive_ready(front_end)
    front_end.add(make_request("r", [1]))
    for client in (0, 1):
        front_end.dead = False
        front_end.until_dead(client)
    assert io.input_queue.get(timeout=GET_S) == (EngineCoreRequestType.EXECUTOR_FAILED, "thread core-input died")
    io.stop_input()
    io.stop_output()
    assert "core-input died" in caplog.text


def test_if_the_output_thread_dies_everybody_is_told(front_end):
    io = make_io(front_end.addresses)
    io.start(b"ready")
    receive_ready(front_end)
    io.output_queue.put((0, EngineCoreOutputs(wave_complete=object())))  # what no encoder can write: a fault of ours
    for client in (0, 1):
        front_end.dead = False
        front_end.until_dead(client)
    assert io.input_queue.get(timeout=GET_S) == (EngineCoreRequestType.EXECUTOR_FAILED, "thread core-output died")
    io.stop_input()
    io.stop_output()


def test_everything_put_before_the_end_is_sent_before_dead(front_end):
    io = make_io(front_end.addresses)
    io.start(b"ready")
    receive_ready(front_end)
    for i in range(1000):
        io.output_queue.put((0, EngineCoreOutputs(wave_complete=i)))
    io.stop_input()
    io.stop_output()
    for i in range(1000):
        assert front_end.receive().wave_complete == i
    assert front_end.receive() is None


@pytest.mark.parametrize("which", ["inputs", "outputs"])
def test_an_address_that_cannot_be_used_fails_the_start(front_end, which):
    io = make_io({**front_end.addresses, which: [front_end.addresses[which][0], "no://such"]})
    with pytest.raises(RuntimeError, match="did not connect"):
        io.start(b"ready")
    io.stop_input()
    io.stop_output()


def test_aborts_are_in_both_queues_the_early_one_first(front_end):
    io = make_io(front_end.addresses, preprocess=lambda request: request.request_id)
    io.start(b"ready")
    receive_ready(front_end)
    front_end.abort("a", "b")
    front_end.send(EngineCoreRequestType.ADD, *MsgpackEncoder().encode(make_request("c", [1])))
    assert io.input_queue.get(timeout=GET_S) == (EngineCoreRequestType.ABORT, ["a", "b"])
    assert io.aborts_queue.get_nowait() == ["a", "b"]
    assert io.input_queue.get(timeout=GET_S) == (EngineCoreRequestType.ADD, "c")
    io.stop_input()
    io.stop_output()
    assert front_end.outputs[1].recv() == ENGINE_CORE_DEAD


WELL_FORMED = st.one_of(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(-(2**63), 2**63), inner, max_size=3),
        max_leaves=5,
    ).map(msgpack.packb),
    st.builds(lambda code, data: msgpack.packb(msgpack.ExtType(code, data)), st.integers(0, 127), st.binary()),
    st.sampled_from([b"\xa2\xff\xfe", b"\x81\x80\x01", b"\x81\x91\x01\x02", b"\xd7\xff" + b"\xff" * 8]),  # text, keys, a time: none is one
)


@pytest.fixture(scope="module")
def io():
    """With two front-ends and no threads: what its input thread would do is done by hand."""
    io = make_io({"inputs": ["", ""], "outputs": ["", ""]}, preprocess=lambda request: request)
    yield io
    io._input_context.term()


@given(st.lists(WELL_FORMED, max_size=24), st.integers(1, 21), WELL_FORMED, st.integers(0, 1))
def test_whoever_can_be_told_is_told_once(io, tail, position, value, client):
    """Whatever well-formed values stand in a message: the id that it begins with, or the call's number, gets one answer."""
    good = MsgpackEncoder().encode(make_request("id", [1]))[0]
    fields = [msgpack.packb(field) for field in msgpack.unpackb(good, strict_map_key=False)]
    fields[position] = value
    for add in (fields, fields[:1] + tail):
        io._receive(client, [EngineCoreRequestType.ADD, b"\xdc" + len(add).to_bytes(2, "big") + b"".join(add)])
        kind, item = io.input_queue.get_nowait()
        assert kind == EngineCoreRequestType.ADD and item.request_id == "id" and item.client_index in (0, 1)
        assert io.input_queue.empty() and io.output_queue.empty()
    call = [msgpack.packb(client), msgpack.packb(2**64 - 1), *tail]
    io._receive(client, [EngineCoreRequestType.UTILITY, b"\xdc" + len(call).to_bytes(2, "big") + b"".join(call)])
    if io.output_queue.empty():
        assert io.input_queue.get_nowait()[1][1].call_id == 2**64 - 1
    else:
        asked, reply = io.output_queue.get_nowait()
        assert asked == client and reply.utility_output.call_id == 2**64 - 1 and reply.utility_output.failure_message
    assert io.input_queue.empty() and io.output_queue.empty()


def test_a_front_end_that_does_not_read_costs_the_others_no_memory(front_end, monkeypatch):
    """Its frames wait in zmq, of any size; whoever reads gets theirs, and nothing is kept of what was sent."""
    monkeypatch.setattr("mini_engine.engine_core.io.OUTPUT_LINGER_MS", 0)  # nobody will take what is left
    io = make_io(front_end.addresses)
    io.start(b"ready")
    receive_ready(front_end)
    front_end.outputs[1].close()
    for reason in ("x" * 200_000, "y"):
        io.output_queue.put((1, EngineCoreOutputs(utility_output=UtilityOutput(0, reason))))
    io.output_queue.put((0, EngineCoreOutputs(utility_output=UtilityOutput(1, "z" * 200_000))))
    assert front_end.receive().utility_output.failure_message == "z" * 200_000
    before = sys.getallocatedblocks()
    for call_id in range(2, 1002):
        io.output_queue.put((0, EngineCoreOutputs(utility_output=UtilityOutput(call_id, "no"))))
        front_end.until(lambda: front_end.utilities.pop(call_id, None) is not None)  # noqa: B023
    assert sys.getallocatedblocks() - before < 1000
    io.stop_input()
    io.stop_output()
