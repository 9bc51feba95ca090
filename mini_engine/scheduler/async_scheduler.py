"""AsyncScheduler: a step is scheduled before the tokens of the step in flight are known.

Which token was sampled matters to the worker, which has it, and to whether the request is over; not to what is scheduled next. So
each token in flight counts as a placeholder, and the one rule holds: num_computed_tokens catches up with what there is or will be.

    step        N scheduled      N + 1 scheduled      N accounted for     N + 2 scheduled
    tokens      ■■■■ ▢           ■■■■ ▢ ▢             ■■■■■ ▢             ■■■■■ ▢ ▢          ■ num_tokens   ▢ num_output_placeholders

What cannot be known in time costs one step too many: a request that stops by EOS, a stop token or an abort is in step N + 1 already,
whose token is thrown away. A length limit is known in time.

Promises  a request's tokens are those it would get without overlap. A token in flight is still its request's if that is preempted
          meanwhile, never if it has ended, whoever bears the id by now.
Callers   account for every step, in order; at most one may be in flight at schedule(), so that a preempted request's last token has
          arrived before it is admitted again.
Inside form 6 of a request.    vLLM: v1/core/sched/async_scheduler.py
"""

from collections.abc import Iterable

from mini_engine.config import EngineConfig
from mini_engine.scheduler.request import Request
from mini_engine.scheduler.scheduler import Scheduler
from mini_engine.step import KVCacheConfig, SchedulerOutput


class AsyncScheduler(Scheduler):
    """Scheduler for EngineCore.step_with_batch_queue()."""

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        super().__init__(config, kv_cache_config, max_model_len)
        self._in_flight: dict[int, list[Request]] = {}  #: step → whose tokens it samples

    def schedule(self) -> SchedulerOutput:
        assert len(self._in_flight) < 2, f"steps {list(self._in_flight)} are not accounted for"
        output = super().schedule()
        step_id, requests = output.step_id, self.requests
        for request_id in output.num_scheduled_tokens:
            requests[request_id].last_step_id = step_id
        sampled = self._in_flight[step_id] = [requests[request_id] for request_id in output.sampled_req_ids]
        for request in sampled:
            request.num_output_placeholders += 1
        return output

    def _sampled_requests(self, scheduler_output: SchedulerOutput) -> Iterable[Request | None]:
        self.kv_cache_manager.release(scheduler_output.step_id)
        sampled, requests = self._in_flight.pop(scheduler_output.step_id), self.requests
        for request in sampled:
            request.num_output_placeholders -= 1
        return [request if requests.get(request.request_id) is request else None for request in sampled]
