"""EngineCoreProc as a child process over real sockets: handshake, streams, the wire's traps, and what it costs."""

import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgpack
import msgspec
import psutil
import pytest

from mini_engine.config import MockConfig
from mini_engine.engine_core.proc import MAX_MESSAGES_PER_STEP
from mini_engine.executor.mock import mock_generate
from mini_engine.wire.codec import MsgpackEncoder
from mini_engine.wire.messages import EngineCoreRequestType, FinishReason
from tests.engine_core.harness import VOCAB_SIZE, make_request, mock_config, running_engine

ADD, ABORT, UTILITY = EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT, EngineCoreRequestType.UTILITY


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory):
    """One engine for all tests that leave it alive, with two front-ends."""
    with running_engine(tmp_path_factory.mktemp("shared"), mock_config(model), num_clients=2) as (front_end, engine):
        yield front_end, engine


@pytest.fixture(scope="module")
def shared_slow(model, tmp_path_factory):
    """The same at 20 ms a step, for tests that must be quicker than their requests."""
    with running_engine(tmp_path_factory.mktemp("slow"), mock_config(model, MockConfig(num_blocks=256, step_ms=20))) as (front_end, engine):
        yield front_end, engine


@pytest.fixture
def front_end(shared):
    yield from still_alive(*shared)


@pytest.fixture
def slow_front_end(shared_slow):
    yield from still_alive(*shared_slow)


def still_alive(front_end, engine):
    yield front_end
    front_end.add(make_request(request_id := f"alive-{time.monotonic_ns()}", [1, 2], 2))
    front_end.until_finished(request_id)  # whatever the test did, the engine lives
    assert front_end.streams.tokens[request_id] == mock_generate([1, 2], 2, VOCAB_SIZE)
    assert engine.popen.poll() is None


def test_handshake_says_where_the_engine_is_and_what_it_can_do(model, tmp_path):
    for headless, transport in ((False, "ipc"), (True, "tcp")):
        config = mock_config(model, max_num_seqs=7)
        with running_engine(tmp_path / transport, config, transport=transport, headless=headless, engine_index=258) as (front_end, _):
            where = {"local": not headless, "headless": headless}
            assert front_end.hello == {"status": "HELLO"} | where
            assert front_end.ready == {"status": "READY"} | where
            (ready,) = front_end.ready_responses
            assert (ready.max_model_len, ready.block_size, ready.num_gpu_blocks, ready.max_num_seqs) == (512, 16, 256, 7)
            assert ready.data_parallel_rank == 258 and ready.dtype == "float32"
            front_end.add(make_request("r", [1, 2, 3], 5))
            front_end.until_finished("r")
            assert front_end.streams.tokens["r"] == mock_generate([1, 2, 3], 5, VOCAB_SIZE)


def test_ready_costs_little_more_than_its_imports(model, tmp_path):
    program = "import time, mini_engine.engine_core.proc, mini_engine.executor.mock; print(time.process_time())"
    imports = float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    with running_engine(tmp_path / "e", mock_config(model)) as (_, engine):
        times = psutil.Process(engine.popen.pid).cpu_times()
        assert times.user + times.system < 3 * imports


def test_names_that_the_operating_system_shows(shared):
    process = psutil.Process(shared[1].popen.pid)
    assert process.cmdline()[0] == "mini-engine: core"
    names = set()
    for thread in process.threads():
        with suppress(FileNotFoundError, ProcessLookupError):  # one that ends meanwhile: the handshake's context may still be closing
            names.add(Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text().strip())
    assert {"core-loop", "core-input", "core-output"} <= names


def test_many_interleaved_requests_are_the_oracles(front_end):
    rng = random.Random(0)
    prompts = {f"m{i}": [rng.randrange(4) for _ in range(rng.randint(1, 60))] for i in range(100)}
    lengths = {request_id: rng.randint(1, 30) for request_id in prompts}
    for request_id, prompt in prompts.items():
        front_end.add(make_request(request_id, prompt, lengths[request_id]))
    front_end.until_finished(*prompts)
    for request_id, prompt in prompts.items():
        assert front_end.streams.tokens[request_id] == mock_generate(prompt, lengths[request_id], VOCAB_SIZE)
        assert front_end.streams.last[request_id].finish_reason is FinishReason.LENGTH


def test_each_front_end_gets_its_own(front_end):
    front_end.add(make_request("mine", [1], 3, client_index=0), client=0)
    front_end.add(make_request("theirs", [1], 3, client_index=1), client=1)
    front_end.until_finished("theirs", client=1)
    front_end.until_finished("mine", client=0)
    assert front_end.call(5, "get_supported_tasks", client=1).result.value == ["generate"]


def test_every_front_end_hears_that_the_engine_is_idle(tmp_path, model):
    """Its load goes to one front-end at a time; the others' gauges would say for ever what they last heard."""
    with running_engine(tmp_path / "e", mock_config(model), num_clients=2) as (front_end, _):
        for client in (0, 1):
            front_end.add(make_request(f"only {client}", [1, 2, 3], 8, client_index=client), client=client)
            front_end.until_finished(f"only {client}", client=client)
            stats = front_end.receive(1 - client).scheduler_stats
            assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (0, 0, 0.0)


def test_large_logprobs_travel_in_frames_of_their_own(front_end):
    front_end.add(make_request("lp", [1, 2], 3, logprobs=-1))
    front_end.until_finished("lp")
    first = front_end.streams.first["lp"].new_logprobs
    assert first.logprobs.shape == (1, VOCAB_SIZE + 1) and first.logprob_token_ids[0, 0] == front_end.streams.tokens["lp"][0]


def test_an_abort_is_silent_and_frees_everything(slow_front_end):
    front_end = slow_front_end
    front_end.add(make_request("gone", [1, 2], 500))
    front_end.until(lambda: front_end.streams.tokens["gone"])
    front_end.abort("gone", "unknown")
    front_end.until(lambda: (front_end.streams.stats[-1].num_running_reqs, front_end.streams.stats[-1].kv_cache_usage) == (0, 0.0))
    assert "gone" not in front_end.streams.last


def test_an_abort_right_behind_its_add_leaks_nothing(slow_front_end):
    front_end = slow_front_end
    for i in range(50):
        front_end.add(make_request(f"q{i}", [1, 2], 500))
        front_end.abort(f"q{i}")
    assert front_end.call(9, "reset_prefix_cache").result.value is True  # in order behind them: nobody holds a block
    assert not [request_id for request_id in front_end.streams.last if request_id.startswith("q")]


# ── traps ───────────────────────────────────────────────────────────────────────────────────────────────


def bad_add(request_id: str, **fields) -> bytes:
    add = msgpack.unpackb(MsgpackEncoder().encode(make_request(request_id, [1]))[0], strict_map_key=False)
    for position, value in fields.items():
        add[int(position[1:])] = value
    return msgpack.packb(add)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"_3": {"temperature": -1.0}}, "temperature must be in [0, 2], got -1.0"),
        ({"_3": {"temperature": float("nan")}}, "temperature"),
        ({"_3": {"max_tokens": None}}, "max_tokens"),
        ({"_3": {"max_tokens": "many"}}, "$[3].max_tokens"),
        ({"_3": None}, "sampling_params"),
        ({"_1": "text"}, "$[1]"),
        ({"_1": None}, "prompt_token_ids"),
        ({"_1": [1] * 600}, "600"),
        ({"_5": "now"}, "$[5]"),
        ({"_15": True}, "resumable"),
        ({"_11": 7}, "client_index"),
        ({"_11": -1}, "client_index"),
        ({"_11": "me"}, "$[11]"),
        ({"_9": ["float32", [4], 1]}, "prompt_embeds"),
    ],
)
def test_a_bad_add_is_that_requests_error(front_end, fields, reason):
    request_id = f"bad-{fields}"
    front_end.send(ADD, bad_add(request_id, **fields))
    front_end.until_finished(request_id)
    last = front_end.streams.last[request_id]
    assert last.finish_reason is FinishReason.ERROR and reason in last.stop_reason


def test_a_short_add_is_answered_where_it_came_from(front_end):
    front_end.send(ADD, msgpack.packb(["short", [1]]), client=1)
    front_end.until_finished("short", client=1)
    assert "at least length 9" in front_end.streams.last["short"].stop_reason


def test_two_adds_with_one_id_make_one_stream(slow_front_end):
    front_end = slow_front_end
    front_end.add(make_request("twice", [1, 2], 150))
    front_end.add(make_request("twice", [3], 150))
    front_end.send(ADD, bad_add("twice", _3={"temperature": 9.0}))
    front_end.until_finished("twice")
    assert front_end.streams.tokens["twice"] == mock_generate([1, 2], 150, VOCAB_SIZE)


def test_utility_calls_always_get_an_answer(front_end):
    call_id = 2**64 - 1
    assert front_end.call(call_id, "reset_mm_cache").result == msgspec.convert(
        [None, None], type(front_end.call(1, "reset_mm_cache").result)
    )
    for method, args in (("nonexistent", ()), ("profile", (True,)), ("__init__", ()), ("reset_prefix_cache", (1, 2, 3))):
        reply = front_end.call(call_id, method, *args)
        assert reply.result is None and reply.failure_message.startswith(f"Call to {method} method failed")
    front_end.send(UTILITY, msgpack.packb([0, 77]))
    front_end.until(lambda: 77 in front_end.utilities)
    assert "malformed" in front_end.utilities.pop(77).failure_message
    front_end.send(UTILITY, msgpack.packb([99, 78, "get_supported_tasks", []]))  # no such client: the one who asked
    front_end.until(lambda: 78 in front_end.utilities)


def test_a_flood_of_calls_does_not_stop_the_streams(model, tmp_path):
    with running_engine(tmp_path / "e", mock_config(model)) as (front_end, _):
        front_end.add(make_request("stream", [1, 2], 400))
        front_end.until(lambda: front_end.streams.tokens["stream"])
        call = msgpack.packb([0, 5, "nonexistent", []])
        for _ in range(8000):
            front_end.send(UTILITY, call)
        in_a_row = longest = 0
        while "stream" not in front_end.streams.last:
            in_a_row = 0 if front_end.receive().outputs else in_a_row + 1
            longest = max(longest, in_a_row)
        assert longest <= 3 * MAX_MESSAGES_PER_STEP
        assert front_end.streams.tokens["stream"] == mock_generate([1, 2], 400, VOCAB_SIZE)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x00"],
        [b"\x00", b""],
        [b"\x00", b"\xc1"],
        [b"\x00", b"\x91" * 100_000],
        [b"\x00", msgpack.packb([7, [1]])],
        [b"\x01"],
        [b"\x01", msgpack.packb("id")],
        [b"\x01", msgpack.packb([1, None])],
        [b"\x02", msgpack.packb([1, None])],
        [b"\x03"],
        [b"\x03", msgpack.packb([0, True, "is_sleeping", []])],
        [b"\x03", msgpack.packb({"a": 1})],
        [b"\x04", msgpack.packb("boom")],
        [b"\x05", msgpack.packb("stop")],
        [b"\xff", b"x"],
        [b"READY"],
        [b"\x00\x00", msgpack.packb(["r", [1]])],
    ],
    ids=repr,
)
def test_garbage_is_ignored(front_end, frames):
    front_end.send(*[frame[:50] if len(frame) > 1000 else frame for frame in frames])
    front_end.send(*frames)


def test_fuzz(front_end):
    """Mutated messages of every kind, between good ones: the good ones are all answered (by the fixture's request, too)."""
    rng = random.Random(1)
    good = [bad_add("fuzz"), msgpack.packb(["fuzz"]), msgpack.packb([0, 5, "is_sleeping", []])]
    for _ in range(3000):
        frame = bytearray(rng.choice(good))
        for _ in range(rng.randint(0, 3)):
            at = rng.randrange(len(frame))
            frame[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        front_end.requests[rng.randrange(2)].send_multipart(
            [front_end.identity, bytes([rng.randrange(6)]), bytes(frame)][: rng.randint(2, 3)]
        )
    for client in (0, 1):
        front_end.streams.last.clear()  # the fuzz reuses ids, finished ones too
        front_end.send(UTILITY, msgpack.packb([client, 1000 + client, "is_sleeping", []]), client=client)
        while 1000 + client not in front_end.utilities:
            front_end.streams.last.clear()
            assert front_end.receive(client) is not None


def test_idle_costs_nothing(model, tmp_path):
    with running_engine(tmp_path / "e", mock_config(model)) as (front_end, engine):
        front_end.add(make_request("a", [1, 2], 3))
        front_end.until_finished("a")
        for call_id in (1, 2):  # the second's answer comes behind whatever the engine said before it was idle
            front_end.call(call_id, "is_sleeping")
        process = psutil.Process(engine.popen.pid)
        before = process.cpu_times()
        assert not front_end.outputs[0].poll(300)  # nothing comes, for 0.3 s
        after = process.cpu_times()
        assert (after.user + after.system) - (before.user + before.system) < 0.025  # counted in hundredths


def test_two_engines_side_by_side(model, tmp_path):
    configs = [mock_config(model, MockConfig(num_blocks=256, vocab_size=v)) for v in (100, 200)]
    with running_engine(tmp_path / "a", configs[0]) as (a, _), running_engine(tmp_path / "b", configs[1]) as (b, _):
        for front_end in (a, b):
            for i in range(10):
                front_end.add(make_request(f"{i}", [i], 20))
        for front_end, vocab_size in ((a, 100), (b, 200)):
            front_end.until_finished(*map(str, range(10)))
            for i in range(10):
                assert front_end.streams.tokens[f"{i}"] == mock_generate([i], 20, vocab_size)


def test_large_messages_reuse_buffers_and_stay_whole(model, tmp_path):
    """One buffer serves all messages, whatever their size, while earlier ones still wait to be sent."""
    config = mock_config(model, MockConfig(num_blocks=8000), max_num_seqs=1500, check=False)
    with running_engine(tmp_path / "e", config, transport="tcp") as (front_end, engine):
        ids = [f"{i}-{'x' * 60}" for i in range(1500)]
        for i, request_id in enumerate(ids):
            front_end.add(make_request(request_id, [i % 9], 40))
        front_end.until_finished(*ids)
        for i, request_id in enumerate(ids):
            assert front_end.streams.tokens[request_id] == mock_generate([i % 9], 40, VOCAB_SIZE)
        assert engine.popen.poll() is None
