"""EngineCoreIO in this process: what a thread's death does, and what start-up promises."""

import queue

import pytest
import zmq

from mini_engine.engine_core.io import EngineCoreIO
from mini_engine.wire.codec import MsgpackEncoder
from mini_engine.wire.handshake import EngineZmqAddresses
from mini_engine.wire.messages import ENGINE_CORE_DEAD, EngineCoreOutputs, EngineCoreRequestType
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
