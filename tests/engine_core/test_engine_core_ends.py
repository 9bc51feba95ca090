"""Every way in which an EngineCoreProc ends: told to, orphaned, crashed, stuck, refused; running, idle, or not yet started."""

import signal

import msgpack
import pytest

from mini_engine.config import MockConfig
from mini_engine.executor.mock import mock_generate
from mini_engine.wire.messages import FinishReason
from tests.engine_core.harness import VOCAB_SIZE, make_request, mock_config, running_engine


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "parent gone"])
def test_an_orderly_end_aborts_what_runs_then_says_dead(model, tmp_path, how):
    with running_engine(tmp_path / "e", mock_config(model, MockConfig(num_blocks=256, step_ms=20)), num_clients=2) as (front_end, engine):
        front_end.add(make_request("a", [1, 2], 500))
        front_end.add(make_request("b", [1, 2], 500, client_index=1), client=1)
        front_end.until(lambda: front_end.streams.tokens["a"])
        front_end.until(lambda: front_end.streams.tokens["b"], client=1)
        if how == "parent gone":
            engine.parent_gone()
        else:
            engine.popen.send_signal(how)
        for client, request_id in ((0, "a"), (1, "b")):
            front_end.dead = False
            front_end.until_dead(client)
            assert front_end.streams.last[request_id].finish_reason is FinishReason.ABORT
        assert engine.wait() == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, "parent gone"])
def test_an_idle_engine_ends_too(model, tmp_path, how):
    with running_engine(tmp_path / "e", mock_config(model)) as (front_end, engine):
        engine.parent_gone() if how == "parent gone" else engine.popen.send_signal(how)
        front_end.until_dead()
        assert engine.wait() == 0


def test_the_parent_gone_with_its_sockets_ends_the_engine(model, tmp_path):
    with running_engine(tmp_path / "e", mock_config(model)) as (front_end, engine):
        front_end.add(make_request("a", [1, 2], 500))
        front_end.until(lambda: front_end.streams.tokens["a"])
        front_end.close()
        engine.parent_gone()
        assert engine.wait() == 0


def test_a_crash_is_told_by_dead_and_by_the_exit_code(model, tmp_path):
    config = mock_config(model, MockConfig(num_blocks=256, crash_at_step=3))
    with running_engine(tmp_path / "e", config, num_clients=2) as (front_end, engine):
        front_end.add(make_request("a", [1, 2], 50))
        for client in (0, 1):
            front_end.dead = False
            front_end.until_dead(client)
        assert front_end.streams.tokens["a"] == mock_generate([1, 2], 2, VOCAB_SIZE) and "a" not in front_end.streams.last
        assert engine.wait() == 1
        assert "crash at step 3" in engine.log.read_text()


def test_a_hanging_device_does_not_keep_the_process(model, tmp_path):
    config = mock_config(model, MockConfig(num_blocks=256, hang_at_step=2))
    with running_engine(tmp_path / "e", config) as (front_end, engine):
        front_end.add(make_request("a", [1, 2], 50))
        front_end.until(lambda: front_end.streams.tokens["a"])
        front_end.add(make_request("b", [1, 2], 50))
        engine.parent_gone()
        front_end.until_dead()
        assert engine.wait() == 1


def test_a_learners_codec_that_fails_ends_the_engine_loudly(model, tmp_path):
    file = tmp_path / "codec.py"
    file.write_text("def encode(obj):\n    raise KeyError('mine')\n")
    with running_engine(tmp_path / "e", mock_config(model, overlay={"wire.codec": str(file)})) as (front_end, engine):
        front_end.add(make_request("a", [1, 2], 50))
        front_end.until_dead()
        assert engine.wait() == 1
        assert "core-output died" in engine.log.read_text()


@pytest.mark.parametrize(("changes", "word"), [({"max_model_len": 100_000}, "100000"), ({"model": "/no/such/model"}, "/no/such/model")])
def test_what_cannot_start_says_why_without_a_traceback(model, tmp_path, changes, word):
    with running_engine(tmp_path / "e", mock_config(model, **changes), handshake=False) as (front_end, engine):
        front_end.receive_handshake()
        front_end.send_init()
        front_end.until_dead()
        assert engine.wait() == 2
        log = engine.log.read_text()
        assert word in log and "Traceback" not in log


@pytest.mark.parametrize(
    "init",
    [
        b"",
        b"\x80",
        b"\x81\xa1x" + b"\x91" * 100_000,
        msgpack.packb({"addresses": {"inputs": [], "outputs": []}}),
        msgpack.packb({"addresses": {"inputs": ["x"]}}),
    ],
    ids=lambda init: repr(init[:20]),
)
def test_an_unreadable_init_is_fatal(model, tmp_path, init):
    with running_engine(tmp_path / "e", mock_config(model), handshake=False) as (front_end, engine):
        front_end.receive_handshake()
        front_end.send_init(init)
        assert engine.wait() == 1
        assert "INIT" in engine.log.read_text().splitlines()[-1]


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), ("parent gone", 1)])
def test_it_ends_at_once_while_it_starts(model, tmp_path, how, code):
    with running_engine(tmp_path / "e", mock_config(model), handshake=False) as (front_end, engine):
        front_end.receive_handshake()  # it waits for INIT now
        engine.parent_gone() if how == "parent gone" else engine.popen.send_signal(how)
        assert engine.wait() == code
