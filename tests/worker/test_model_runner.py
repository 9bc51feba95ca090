"""ModelRunner behind the real scheduler: whatever the pool, the chunks, the preemptions and the hits, the tokens are transformers'."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.config import EngineConfig, Quantization
from mini_engine.model import cpu_kernels, sdpa_attention
from mini_engine.model.decoder import Decoder
from mini_engine.model.loader import load_model
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler.request import RequestStatus
from mini_engine.step import CachedRequestData, KVCacheConfig, NewRequestData, SchedulerOutput
from mini_engine.worker import model_runner
from mini_engine.worker.model_runner import ModelRunner
from tests.not_run import not_run
from tests.tiny_model import FAMILIES, Family, reference_greedy
from tests.worker.conftest import Engine, TinyModel

MakeEngine = Callable[..., Engine]


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, n).tolist() for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_crowd_on_a_tiny_pool_equals_transformers(family: Family, make_engine: MakeEngine, tiny_models: dict[Family, TinyModel]) -> None:
    """Chunking, preemption, prefix hits, all in one run; each is counted, so that none is tested in name only."""
    engine = make_engine(family, num_blocks=24, block_size=4, max_num_batched_tokens=24)
    shared = prompts(7, [17])[0]
    cases = {
        f"r{i}": shared[:keep] + tail
        for i, (keep, tail) in enumerate(zip([17, 16, 0, 17, 8, 0], prompts(8, [5, 1, 30, 9, 3, 1]), strict=True))
    }
    for req_id, prompt in cases.items():
        engine.add(req_id, prompt, max_tokens=16)
    engine.add("again", cases["r0"], max_tokens=4)
    engine.run()
    for req_id, prompt in cases.items():
        assert engine.tokens(req_id) == reference_greedy(tiny_models[family].reference, prompt, 16), req_id
    assert engine.tokens("again") == engine.tokens("r0")[:4]
    assert engine.num_preempted > 0
    assert any(n > 1 for n in engine.step_sizes())
    assert any(new.num_computed_tokens > 0 for step in engine.steps for new in step.scheduled_new_reqs), "no prefix hit"
    assert any(set(step.num_scheduled_tokens) - set(step.sampled_req_ids) for step in engine.steps), "no prompt was cut in chunks"
    assert engine.runner.batch.num_reqs == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_crowd_on_the_c_kernels_has_the_bits_of_each_alone(
    quantization: Quantization, depth: int, tiny_models: dict[Family, TinyModel]
) -> None:
    """As it is served, float32 in blocks of 16: tokens and logprobs are not close but equal, through chunks, preemption and prefix hits."""
    if cpu_kernels.load() is None:
        not_run("downloads", "no C compiler here (CC, cc) that builds the kernels; torch's operators are tested")
    model = load_model(tiny_models["qwen3"].directory, quantization=quantization)

    def run(cases: dict[str, list[int]], num_blocks: int, depth: int = 1) -> Engine:
        engine = Engine(model, num_blocks, EngineConfig(max_num_seqs=8, max_num_batched_tokens=48, check=True), depth)
        for req_id, prompt in cases.items():
            engine.add(req_id, prompt, max_tokens=40, logprobs=2, ignore_eos=True)
        engine.run()
        return engine

    def logprobs(engine: Engine, req_id: str) -> list[list[float]]:
        return [row for output in engine.outputs[req_id] if output.new_logprobs for row in output.new_logprobs.logprobs.tolist()]

    shared = prompts(7, [33])[0]
    cases = {
        f"r{i}": shared[:keep] + tail for i, (keep, tail) in enumerate(zip([33, 32, 0, 33, 16], prompts(8, [5, 1, 70, 9, 3]), strict=True))
    }
    crowd = run(cases, num_blocks=13, depth=depth)
    for req_id, prompt in cases.items():
        alone = run({req_id: prompt}, num_blocks=64)
        assert crowd.tokens(req_id) == alone.tokens(req_id) and len(crowd.tokens(req_id)) == 40
        assert logprobs(crowd, req_id) == logprobs(alone, req_id)
    assert crowd.num_preempted > 0
    assert any(new.num_computed_tokens > 0 for step in crowd.steps for new in step.scheduled_new_reqs), "no prefix hit"
    assert any(set(step.num_scheduled_tokens) - set(step.sampled_req_ids) for step in crowd.steps), "no prompt was cut in chunks"


@given(data=st.data())
def test_any_trace_equals_alone(
    data: st.DataObject, make_engine: MakeEngine, reference_tokens: Callable[[list[int], int], list[int]]
) -> None:
    """Random prompts over few distinct tokens (many hits), arrivals, aborts, pools, budgets, overlap; every answer is the request's own."""
    block_size = data.draw(st.sampled_from([1, 3, 4, 16]), label="block_size")
    num_blocks = data.draw(st.integers(2 + 32 // block_size, 2 + 80 // block_size), label="num_blocks")
    engine = make_engine(
        num_blocks=num_blocks,
        block_size=block_size,
        depth=data.draw(st.sampled_from([1, 2]), label="depth"),
        max_num_seqs=data.draw(st.integers(1, 5), label="max_num_seqs"),
        max_num_batched_tokens=data.draw(st.integers(5, 40), label="budget"),
        long_prefill_token_threshold=data.draw(st.sampled_from([0, 3]), label="threshold"),
    )
    expected: dict[str, list[int]] = {}
    aborted = set()
    for i in range(data.draw(st.integers(1, 7), label="requests")):
        prompt = (BASES[data.draw(st.integers(0, 1))] * 3)[: data.draw(st.integers(1, 24))]
        num_tokens = data.draw(st.integers(1, 8))
        engine.add(f"r{i}", prompt, max_tokens=num_tokens, ignore_eos=True)
        expected[f"r{i}"] = reference_tokens(prompt, 8)[:num_tokens]
        for _ in range(data.draw(st.integers(0, 3), label="steps")):
            engine.step()
        if data.draw(st.integers(0, 5)) == 5:
            victim = data.draw(st.sampled_from(sorted(expected)))
            if engine.scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED):
                aborted.add(victim)
    engine.run()
    for req_id, tokens in expected.items():
        got = engine.tokens(req_id)
        assert got == (tokens[: len(got)] if req_id in aborted else tokens), req_id
    engine.scheduler.check()


BASES = prompts(9, [16, 7])


@pytest.fixture(scope="session")
def reference_tokens(tiny_models: dict[Family, TinyModel]) -> Callable[[list[int], int], list[int]]:
    known: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: list[int], n: int) -> list[int]:
        key = (*prompt, n)
        if key not in known:
            known[key] = reference_greedy(tiny_models["llama"].reference, prompt, n)
        return known[key]

    return tokens


def test_seeded_sampling_alone_and_in_a_crowd(make_engine: MakeEngine) -> None:
    """A request's randomness is its own: neighbours, chunks and preemption change nothing, and a second request differs."""
    cases = prompts(11, [9, 14, 3, 21])
    params = {"temperature": 1.5, "max_tokens": 20, "ignore_eos": True}
    alone = []
    for i, prompt in enumerate(cases):
        engine = make_engine()
        engine.add("x", prompt, seed=i, **params)
        engine.run()
        alone.append(engine.tokens("x"))
    crowd = make_engine(num_blocks=20, max_num_batched_tokens=16)
    for i, prompt in enumerate(cases):
        crowd.add(f"r{i}", prompt, seed=i, **params)
        crowd.add(f"greedy{i}", prompt, max_tokens=5 + i)
    crowd.add("other", cases[0], seed=99, **params)
    crowd.run()
    assert crowd.num_preempted > 0
    assert [crowd.tokens(f"r{i}") for i in range(4)] == alone
    assert crowd.tokens("other") != alone[0]


def test_penalties_survive_preemption(make_engine: MakeEngine) -> None:
    """What looks back at the output looks at all of it, also after the worker forgot the request."""
    cases = prompts(12, [9, 14, 3])
    params = {"repetition_penalty": 1.8, "frequency_penalty": 0.7, "max_tokens": 24, "ignore_eos": True}
    alone = []
    for prompt in cases:
        engine = make_engine()
        engine.add("x", prompt, **params)
        engine.run()
        alone.append(engine.tokens("x"))
    crowd = make_engine(num_blocks=20)
    for i, prompt in enumerate(cases):
        crowd.add(f"r{i}", prompt, **params)
    crowd.run()
    assert crowd.num_preempted > 0
    assert [crowd.tokens(f"r{i}") for i in range(3)] == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(
    family: Family, make_engine: MakeEngine, tiny_models: dict[Family, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sampled tokens and of a prompt that was computed in chunks, in a crowd, with all of it in the prefix cache already."""
    monkeypatch.setattr(model_runner, "PROMPT_LOGPROBS_TILE", 4)
    engine = make_engine(family, max_num_batched_tokens=11)
    prompt, other = prompts(13, [30, 12])
    engine.add("before", prompt, max_tokens=1)
    engine.run()
    engine.add("other", other, max_tokens=12)
    engine.add("hit", prompt, max_tokens=1)
    engine.add("r", prompt, max_tokens=6, logprobs=3, prompt_logprobs=2, temperature=1.0, seed=0, ignore_eos=True)
    engine.run()
    tokens = engine.tokens("r")
    with torch.inference_mode():
        logits = tiny_models[family].reference(torch.tensor([prompt + tokens])).logits[0]
    reference = logits.double().log_softmax(-1)
    computed = {new.req_id: new.num_computed_tokens for step in engine.steps for new in step.scheduled_new_reqs}
    assert computed == {"before": 0, "other": 0, "hit": 28, "r": 0}

    def ranks(positions: Tensor, token_ids: list[int]) -> list[int]:
        return (positions >= positions.gather(1, torch.tensor(token_ids)[:, None])).sum(1).tolist()

    (with_prompt,) = [o for o in engine.outputs["r"] if o.new_prompt_logprobs_tensors is not None]
    assert with_prompt is engine.outputs["r"][0]
    prompt_logprobs = with_prompt.new_prompt_logprobs_tensors
    assert prompt_logprobs is not None and prompt_logprobs.logprobs.shape == (29, 3)
    assert prompt_logprobs.logprob_token_ids[:, 0].tolist() == prompt[1:]
    expected = reference[:29].gather(1, torch.tensor(np.asarray(prompt_logprobs.logprob_token_ids)).long())
    np.testing.assert_allclose(prompt_logprobs.logprobs, expected, atol=1e-4)
    assert prompt_logprobs.selected_token_ranks.tolist() == ranks(reference[:29], prompt[1:])
    assert prompt_logprobs.logprob_token_ids[:, 1:].tolist() == reference[:29].topk(2).indices.tolist()

    for i, output in enumerate(engine.outputs["r"]):
        assert output.new_logprobs is not None
        ids = output.new_logprobs.logprob_token_ids[0]
        assert ids[0] == tokens[i]
        assert output.new_logprobs.sampled_token_ranks.tolist() == ranks(reference[29 + i : 30 + i], [tokens[i]])
        assert ids[1:].tolist() == reference[29 + i].topk(3).indices.tolist()
        np.testing.assert_allclose(output.new_logprobs.logprobs[0], reference[29 + i][ids], atol=1e-4)


def test_prompt_logprobs_of_one_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("r", [5], max_tokens=2, prompt_logprobs=0)
    engine.run()
    tensors = [o.new_prompt_logprobs_tensors for o in engine.outputs["r"]]
    assert tensors[0] is not None and tensors[0].logprobs.shape == (0, 1) and tensors[1] is None


def test_prompt_logprobs_are_delivered_once(make_engine: MakeEngine) -> None:
    """A request preempted after its first token computes its prompt again, but has said all about it."""
    engine = make_engine(num_blocks=14, enable_prefix_caching=False)
    for i, prompt in enumerate(prompts(14, [12, 10])):
        engine.add(f"r{i}", prompt, max_tokens=20, ignore_eos=True, prompt_logprobs=1)
    engine.run()
    resumed = [new for step in engine.steps for new in step.scheduled_new_reqs if len(new.prefill_token_ids) > new.num_prompt_tokens]
    assert resumed
    for outputs in engine.outputs.values():
        assert [o.new_prompt_logprobs_tensors is not None for o in outputs] == [True] + [False] * 19
    assert not engine.runner._prompt_logprobs


@pytest.mark.parametrize("num_reqs", range(1, 18))
def test_every_batch_size(num_reqs: int, make_engine: MakeEngine, reference_tokens: Callable[[list[int], int], list[int]]) -> None:
    """No size is a hole: whatever a later fast path does for some sizes, the others are computed as well."""
    engine = make_engine(max_num_seqs=17, num_blocks=200)
    cases = [BASES[0][: 1 + i % 5] for i in range(num_reqs)]
    for i, prompt in enumerate(cases):
        engine.add(f"r{i}", prompt, max_tokens=3)
    engine.run()
    assert [engine.tokens(f"r{i}") for i in range(num_reqs)] == [reference_tokens(p, 8)[:3] for p in cases]


def test_prompt_of_whole_blocks_that_is_all_cached(
    make_engine: MakeEngine, reference_tokens: Callable[[list[int], int], list[int]]
) -> None:
    engine = make_engine(block_size=4)
    for i in range(3):
        engine.add(f"r{i}", BASES[0], max_tokens=4)
        engine.run()
        assert engine.tokens(f"r{i}") == reference_tokens(BASES[0], 8)[:4]
    assert [new.num_computed_tokens for step in engine.steps for new in step.scheduled_new_reqs] == [0, 12, 12]


def test_sampling_metadata_is_kept_while_the_batch_stays(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", BASES[0], max_tokens=9)
    engine.add("b", BASES[1], max_tokens=4)
    kept = []
    while engine.scheduler.has_requests():
        engine.step()
        kept.append(id(engine.runner._metadata[1]) if engine.runner._metadata else None)
    assert kept[0] == kept[3] != kept[4] == kept[8]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_is_left_on_the_cpu(family: Family, tiny_models: dict[Family, TinyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: on torch's meta device every operator checks that its tensors are all on one device, as on CUDA. Prefill, chunks,
    decode, penalties, processors, random rows; not what looks at values (filters, logprobs)."""
    for limits in (sdpa_attention.GATHER_BYTES, sdpa_attention.WASTE_BYTES):
        monkeypatch.setitem(limits, "meta", limits["cuda"])
    model = Decoder(tiny_models[family].model.config, torch.bfloat16, "meta")
    model.pack()
    runner = ModelRunner(model, max_num_reqs=3)
    runner.initialize_kv_cache(KVCacheConfig(16, 4))
    params = SamplingParams(temperature=0.7, repetition_penalty=1.2, logit_bias={3: 1.0}, allowed_token_ids=[3, 4], min_tokens=1)
    all_params = [params, params, SamplingParams(temperature=0.0)]
    new = [NewRequestData(f"r{i}", [5, 6, 7, 8, 9, 10], 6, p, [1 + 2 * i, 2 + 2 * i], 0) for i, p in enumerate(all_params)]
    chunks = CachedRequestData([], [], []), CachedRequestData(["r0", "r1", "r2"], [None] * 3, [3, 5, 4])
    for new_requests, cached, sizes in ((new, chunks[0], [3, 5, 4]), ([], chunks[1], [2, 1, 1])):
        scheduled = {f"r{i}": n for i, n in enumerate(sizes)}
        runner.execute_model(SchedulerOutput(new_requests, cached, scheduled, sum(sizes), ["r1", "r2"]))
        pending, runner.pending = runner.pending, None
        assert pending is not None and pending.logits is not None
        output = runner.sampler.forward(pending.logits, runner._sampling_metadata(pending.rows))
        assert output.sampled_token_ids.device.type == "meta"
