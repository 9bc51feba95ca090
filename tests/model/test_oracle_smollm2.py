"""The real model in the real engine: 60 prompts at once, in so little memory that everything happens to them, equal to transformers."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mini_engine.config import DEFAULT_MODEL, EngineConfig
from mini_engine.engine_core.inproc import InprocClient
from mini_engine.model.default_model import resolve_model
from mini_engine.sampling_params import SamplingParams
from mini_engine.step import SchedulerOutput
from mini_engine.wire.messages import EngineCoreRequest, FinishReason
from tests.oracle import OracleCase, assert_equal, oracle_cases

NUM_BLOCKS = 130  #: 2,064 tokens for 60 requests that need 8,900
STEP_TOKENS = 160  #: the longest prompt takes ten steps


class Witness:
    """Counts what a schedule did to the requests; in the place of Scheduler.schedule."""

    def __init__(self, client: InprocClient) -> None:
        self.chunks = self.preemptions = self.hits = self.mixed_steps = 0
        self._seen: set[str] = set()
        self._schedule = client.engine_core.scheduler.schedule
        client.engine_core.scheduler.schedule = self  # type: ignore[method-assign]

    def __call__(self) -> SchedulerOutput:
        out = self._schedule()
        self.preemptions += len(out.preempted_req_ids)
        self.chunks += len(out.num_scheduled_tokens) - len(out.sampled_req_ids)
        self.mixed_steps += len({n > 1 for n in out.num_scheduled_tokens.values()}) == 2
        for new in out.scheduled_new_reqs:
            self.hits += new.num_computed_tokens > 0 and new.req_id not in self._seen
            self._seen.add(new.req_id)
        return out


def run_all_at_once(cases: Sequence[OracleCase], **config: Any) -> tuple[list[list[int]], Witness]:
    """Each case's tokens, and what the schedule did to them."""
    client = InprocClient(EngineConfig(model=str(resolve_model(DEFAULT_MODEL)), check=True, **config))
    try:
        witness = Witness(client)
        outputs: dict[str, list[int]] = {}
        for i, case in enumerate(cases):
            params = SamplingParams(temperature=0.0, max_tokens=len(case.token_ids), ignore_eos=True)
            outputs[str(i)] = []
            client.add_request(EngineCoreRequest(str(i), case.prompt_token_ids, None, params, None, time.time(), None, None, None))
        reasons: dict[str, FinishReason | None] = {}
        while len(reasons) < len(cases):
            for output in client.get_output().outputs:
                outputs[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    reasons[output.request_id] = output.finish_reason
    finally:
        client.shutdown()
    assert set(reasons.values()) == {FinishReason.LENGTH}
    return list(outputs.values()), witness


@pytest.mark.model
@pytest.mark.timeout(600)
def test_all_at_once_in_little_memory_equals_transformers() -> None:
    cases = oracle_cases()
    outputs, witness = run_all_at_once(cases, num_gpu_blocks_override=NUM_BLOCKS, max_num_batched_tokens=STEP_TOKENS, max_num_seqs=40)
    assert witness.chunks >= 10 and witness.preemptions >= 8 and witness.hits >= 5 and witness.mixed_steps >= 10, vars(witness)
    assert_equal(cases, outputs)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_overlapped_equals_transformers() -> None:
    """With a step in flight while the next is scheduled. Few and short ones: overlap on a CPU is slow (bench/gil.py says why)."""
    cases = [
        replace(case, token_ids=case.token_ids[:16], gaps=case.gaps[:16]) for case in oracle_cases() if len(case.prompt_token_ids) < 20
    ]
    outputs, witness = run_all_at_once(
        cases[:6], async_scheduling="on", block_size=4, num_gpu_blocks_override=22, max_num_batched_tokens=24, max_num_seqs=6
    )
    assert witness.preemptions >= 1, vars(witness)
    assert_equal(cases[:6], outputs)
