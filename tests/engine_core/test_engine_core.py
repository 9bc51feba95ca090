"""EngineCore driven step by step in this process, on the mock device: no socket, no process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.config import MockConfig
from mini_engine.engine_core.core import EngineCore, Refusal
from mini_engine.engine_core.inproc import InprocClient
from mini_engine.engine_core.utility import invoke_utility, utility
from mini_engine.exceptions import EngineGenerateError, VLLMValidationError
from mini_engine.executor.mock import MockExecutor, mock_generate
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler.request import Request
from mini_engine.wire.messages import EngineCoreEventType, FinishReason
from tests.engine_core.harness import VOCAB_SIZE, Streams, make_request, mock_config


@pytest.fixture(params=["off", "on"])
def make_client(model, request):
    clients = []

    def make(mock: MockConfig | None = None, **changes) -> InprocClient:
        clients.append(InprocClient(mock_config(model, mock, **{"async_scheduling": request.param, **changes})))
        return clients[-1]

    yield make
    for client in clients:
        client.shutdown()


def drain(client: InprocClient, streams: Streams | None = None) -> Streams:
    streams = streams or Streams()
    while client._refused or client.engine_core.has_work():
        streams.add(client.get_output())
    assert client.engine_core.scheduler.kv_cache_manager.usage == 0
    return streams


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────


def test_one_request_gives_the_oracles_tokens_and_says_everything_once(make_client):
    client = make_client()
    client.add_request(make_request("r", [1, 2, 3], 5))
    streams = drain(client)
    assert streams.tokens["r"] == mock_generate([1, 2, 3], 5, VOCAB_SIZE)
    assert streams.last["r"].finish_reason is FinishReason.LENGTH
    first = streams.first["r"]
    assert [e.type for e in first.events] == [EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]
    assert first.prefill_stats.num_prompt_tokens == 3
    assert streams.last["r"].events is None and streams.last["r"].prefill_stats is None
    assert streams.stats[0].num_running_reqs == 1 and streams.stats[-1].num_running_reqs == 0


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=12),
    num_blocks=st.integers(16, 40),
    budget=st.integers(4, 64),
    data=st.data(),
)
def test_whatever_the_interleaving_tokens_are_the_oracles(model, prompts, num_blocks, budget, data):
    """Small alphabet: shared prefixes. Small pool: preemption. Small budget: chunks. Aborts in between. check=True looks at every step."""
    client = InprocClient(
        mock_config(
            model,
            block_size=4,
            num_gpu_blocks_override=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            async_scheduling=data.draw(st.sampled_from(["off", "on"])),
        )
    )
    try:
        streams, aborted = Streams(), set()
        lengths = [data.draw(st.integers(1, 15)) for _ in prompts]
        for i, prompt in enumerate(prompts):
            client.add_request(make_request(str(i), prompt, lengths[i]))
            for _ in range(data.draw(st.integers(0, 3))):
                streams.add(client.get_output())
            if data.draw(st.integers(0, 5)) == 0:
                victim = str(data.draw(st.integers(0, i)))
                if victim not in streams.last:
                    aborted.add(victim)
                client.abort_requests([victim])
        drain(client, streams)
        for i, prompt in enumerate(prompts):
            right = mock_generate(prompt, lengths[i], VOCAB_SIZE)
            if str(i) in aborted:
                assert streams.tokens[str(i)] == right[: len(streams.tokens[str(i)])]
                assert str(i) not in streams.last
            else:
                assert streams.tokens[str(i)] == right
    finally:
        client.shutdown()


def test_what_is_refused_for_its_size_costs_no_hashing_and_does_not_fill_the_log(make_client, caplog):
    client = make_client()
    request = make_request("x" * 1_000_000, [1] * 100_000)
    assert client.engine_core.preprocess(request).block_hashes == []
    client.add_request(request)
    last = drain(client).last[request.request_id]
    assert last.finish_reason is FinishReason.ERROR and "the prompt has 100000 tokens" in last.stop_reason
    longest = make_request("longest", [1] * (client.ready_response.max_model_len - 1))
    assert len(client.engine_core.preprocess(longest).block_hashes) == len(longest.prompt_token_ids) // 16
    assert "refused" in caplog.text and len(caplog.text) < 1000


def test_a_repeated_prompt_hits_the_cache_and_gives_the_same(make_client):
    client = make_client()
    prompt = list(range(64))
    for request_id in ("a", "b"):
        client.add_request(make_request(request_id, prompt, 3))
        streams = drain(client)
        assert streams.tokens[request_id] == mock_generate(prompt, 3, VOCAB_SIZE)
    assert streams.first["b"].prefill_stats.num_cached_tokens == 48  # the last token is computed again, so its block is too


def test_a_stop_token_ends_a_request_and_is_the_reason(make_client):
    client = make_client()
    tokens = mock_generate([1, 2, 3], 9, VOCAB_SIZE)
    stop = tokens[4]
    client.add_request(make_request("stop", [1, 2, 3], 9, stop_token_ids=[stop]))
    client.add_request(make_request("eos", [1, 2, 3], 9, _eos_token_id=stop))
    streams = drain(client)
    for request_id, reason in (("stop", stop), ("eos", None)):
        assert streams.tokens[request_id] == tokens[: tokens.index(stop) + 1]
        assert (streams.last[request_id].finish_reason, streams.last[request_id].stop_reason) == (FinishReason.STOP, reason)


def test_logprobs_have_a_row_per_token_and_the_sampled_one_first(make_client):
    client = make_client()
    client.add_request(make_request("two", [1, 2], 3, logprobs=2))
    client.add_request(make_request("none", [1, 2], 3))
    client.add_request(make_request("all", [5], 1, logprobs=-1))
    streams = Streams()
    while client.engine_core.has_work():
        outputs = client.get_output()
        streams.add(outputs)
        for output in outputs.outputs:
            assert (output.new_logprobs is None) == (output.request_id == "none")
            if output.new_logprobs is not None:
                ids, logprobs, ranks, _ = output.new_logprobs
                assert ids.shape == logprobs.shape and ids.shape[1] >= (3 if output.request_id == "two" else VOCAB_SIZE + 1)
                assert ids[0, 0] == output.new_token_ids[0] == ids[0, 1] and ranks.tolist() == [1]
                assert (logprobs[0, 2:] < logprobs[0, 1:-1]).all()


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_token_ids": None}, "prompt_token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1] * 512}, "512"),
        ({"prompt_token_ids": [1, VOCAB_SIZE, 2]}, f"{VOCAB_SIZE} is not in the vocabulary"),
        ({"prompt_token_ids": [1, -1]}, "-1 is not in the vocabulary"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": SamplingParams(max_tokens=None)}, "max_tokens"),
        ({"resumable": True}, "resumable"),
        ({"lora_request": ["name", 1, "path"]}, "lora_request"),
        ({"prompt_embeds": ["float32", [1], 1]}, "prompt_embeds"),
    ],
)
def test_what_cannot_be_served_is_one_error_output_and_nobody_elses(make_client, change, reason):
    client = make_client()
    client.add_request(make_request("good", [1, 2], 3))
    bad = make_request("bad", [1], 3)
    for name, value in change.items():
        setattr(bad, name, value)
    client.add_request(bad)
    streams = drain(client)
    assert streams.last["bad"].finish_reason is FinishReason.ERROR and reason in streams.last["bad"].stop_reason
    assert streams.tokens["bad"] == []
    assert streams.tokens["good"] == mock_generate([1, 2], 3, VOCAB_SIZE)


def test_a_fault_of_ours_while_preparing_a_request_is_that_requests_error(make_client, monkeypatch):
    client = make_client()
    monkeypatch.setattr(Request, "from_engine_core_request", lambda request, block_hasher: 1 / 0)
    client.add_request(make_request("r", [1]))
    assert "ZeroDivisionError" in drain(client).last["r"].stop_reason


def test_a_live_id_again_from_the_same_client_leaves_the_first_stream_whole(make_client):
    client = make_client()
    client.add_request(make_request("r", [1, 2], 3))
    streams = Streams()
    streams.add(client.get_output())
    for prompt in ([7], []):  # a good one, and one that would have been refused
        client.add_request(make_request("r", prompt, 3))
    drain(client, streams)
    assert streams.tokens["r"] == mock_generate([1, 2], 3, VOCAB_SIZE)
    client.add_request(make_request("r", [7], 3))  # no longer live: the id is free again
    assert drain(client).tokens["r"] == mock_generate([7], 3, VOCAB_SIZE)


def test_a_live_id_again_from_another_client_is_that_clients_error(model):
    engine = EngineCore(mock_config(model))
    assert engine.admit(engine.preprocess(make_request("r", [1, 2], 2))) is None
    refused = engine.admit(engine.preprocess(make_request("r", [1, 2], 2, client_index=1)))
    assert refused.outputs[0].finish_reason is FinishReason.ERROR
    assert engine.admit(Refusal("r", 0, "malformed")) is None  # from the owner, it would end the first
    assert list(engine.step()[0]) == [0]
    engine.shutdown()


# ── aborts ──────────────────────────────────────────────────────────────────────────────────────────────


def test_an_abort_during_the_forward_drops_the_steps_token(model):
    engine = EngineCore(mock_config(model))
    engine.admit(engine.preprocess(make_request("a", [1, 2], 9)))
    engine.admit(engine.preprocess(make_request("b", [1, 2], 9)))
    engine.aborts_queue.put(["a", "unknown"])  # as the input thread does while the loop is in the forward
    outputs, _ = engine.step()
    assert [o.request_id for o in outputs[0].outputs] == ["b"]
    engine.shutdown()


def test_an_early_abort_never_hits_a_later_request_with_the_same_id(model):
    """ABORT, then ADD of the same id, in any place relative to the steps: the twin in the other queue is used up in time."""
    engine = EngineCore(mock_config(model))

    def add() -> None:
        assert engine.admit(engine.preprocess(make_request("a", [1, 2], 9))) is None

    add()
    engine.aborts_queue.put(["a"])
    engine.abort_requests_in_order(["a"])  # the loop sees it in the input queue first …
    add()
    assert engine.step()[0][0].outputs
    engine.aborts_queue.put(["a"])
    engine.step()  # … or during a step first
    assert "a" not in engine.scheduler.requests
    engine.abort_requests_in_order(["a"])
    add()
    for _ in range(3):
        assert engine.step()[0][0].outputs
    engine.shutdown()


# ── configuration ───────────────────────────────────────────────────────────────────────────────────────


def test_max_model_len_is_cut_to_what_the_cache_holds(make_client, caplog):
    caplog.set_level("INFO")
    ready = make_client(MockConfig(num_blocks=11)).ready_response
    assert (ready.max_model_len, ready.num_gpu_blocks, ready.kv_cache_size_tokens) == (160, 11, 160)
    assert ready.kv_cache_max_concurrency == 1.0
    assert sum("KV cache: 11 blocks of 16 tokens = 160 tokens" in r.getMessage() for r in caplog.records) == 1
    assert make_client().ready_response.max_model_len == 512
    assert make_client(max_model_len=100).ready_response.max_model_len == 100


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"max_model_len": 161, "num_gpu_blocks_override": 11}, ("161", "160")),
        ({"max_model_len": 513}, ("513", "512")),
    ],
)
def test_a_max_model_len_that_does_not_fit_is_refused_with_both_numbers(model, changes, numbers):
    with pytest.raises(VLLMValidationError) as e:
        EngineCore(mock_config(model, **changes))
    assert all(number in str(e.value) for number in numbers)


def test_no_room_for_a_cache_is_refused(model):
    with pytest.raises(VLLMValidationError, match="no room"):
        EngineCore(mock_config(model, MockConfig(num_blocks=1)))


# ── utilities ───────────────────────────────────────────────────────────────────────────────────────────


def test_utilities_answer(make_client):
    client = make_client()
    assert client.call_utility("get_supported_tasks") == ["generate"]
    assert client.call_utility("reset_mm_cache") is None
    assert client.call_utility("reset_prefix_cache", False, False) is True
    client.add_request(make_request("r", [1, 2], 3))
    client.get_output()
    assert client.call_utility("reset_prefix_cache") is False
    assert client.call_utility("is_sleeping") is False


@pytest.mark.parametrize("method", ["profile", "shutdown", "step", "__class__", "executor", "no such", "", "sleep"])
def test_what_is_not_a_utility_fails_and_is_not_called(make_client, method):
    client = make_client()
    with pytest.raises(EngineGenerateError, match="not a utility"):
        client.call_utility(method)
    with pytest.raises(EngineGenerateError, match="Call to reset_prefix_cache method failed"):
        client.call_utility("reset_prefix_cache", 1, 2, 3, 4)
    client.add_request(make_request("r", [1], 1))
    assert drain(client).last["r"]


def test_a_result_without_wire_form_is_a_failure():
    class Engine:
        results = iter([object(), {1: {2: threading.Lock()}}, 2**70, msgspec.UNSET, 5])

        @utility
        def next(self):
            return next(self.results)

    engine = Engine()
    for _ in range(4):
        output = invoke_utility(engine, 7, "next", [])
        assert output.call_id == 7 and output.result is None and "Call to next method failed" in output.failure_message
    assert invoke_utility(engine, 7, "next", []).result.value == 5


# ── device trouble ──────────────────────────────────────────────────────────────────────────────────────


def test_a_crashing_device_raises_out_of_step(make_client):
    client = make_client(MockConfig(num_blocks=64, crash_at_step=3))
    client.add_request(make_request("r", [1], 9))
    streams = Streams()
    with pytest.raises(RuntimeError, match="crash at step 3"):
        drain(client, streams)
    assert streams.tokens["r"] == mock_generate([1], 2, VOCAB_SIZE)


def test_a_hanging_device_hangs_until_shutdown(model):
    engine = EngineCore(mock_config(model, MockConfig(num_blocks=64, hang_at_step=1)))
    engine.admit(engine.preprocess(make_request("r", [1], 9)))
    with ThreadPoolExecutor(1) as loop:
        step = loop.submit(engine.step)
        with pytest.raises(TimeoutError):
            step.result(timeout=0.05)
        engine.shutdown()
        with pytest.raises(RuntimeError, match="hung at step 1"):
            step.result(timeout=10)


def test_two_engines_side_by_side_share_nothing(make_client):
    clients = [make_client(MockConfig(num_blocks=64, vocab_size=v)) for v in (100, 200)]
    for client in clients:
        client.add_request(make_request("r", [1, 2], 5))
    streams = [Streams(), Streams()]
    while any(client.engine_core.has_work() for client in clients):
        for client, stream in zip(clients, streams, strict=True):
            stream.add(client.get_output())
    for stream, vocab_size in zip(streams, (100, 200), strict=True):
        assert stream.tokens["r"] == mock_generate([1, 2], 5, vocab_size)


def test_a_given_executor_is_used(model):
    config = mock_config(model)
    executor = MockExecutor(config)
    client = InprocClient(config, executor)
    assert client.engine_core.executor is executor
    client.shutdown()
