"""The real model in the real engine: 60 prompts at once, in so little memory that everything happens to them, equal to transformers."""

import time

import pytest

from mini_engine.config import DEFAULT_MODEL, EngineConfig
from mini_engine.engine_core.inproc import InprocClient
from mini_engine.model.default_model import resolve_model
from mini_engine.sampling_params import SamplingParams
from mini_engine.step import SchedulerOutput
from mini_engine.wire.messages import EngineCoreRequest, FinishReason
from tests.oracle import assert_equal, oracle_cases

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


@pytest.mark.model
@pytest.mark.timeout(600)
def test_all_at_once_in_little_memory_equals_transformers() -> None:
    cases = oracle_cases()
    config = EngineConfig(
        model=str(resolve_model(DEFAULT_MODEL)),
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=40,
        check=True,
    )
    client = InprocClient(config)
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
    assert witness.chunks >= 10 and witness.preemptions >= 8 and witness.hits >= 5 and witness.mixed_steps >= 10, vars(witness)
    assert_equal(cases, list(outputs.values()))
