"""When a request is over, and whether the queues are in order: no state of their own.

Inside forms 6 and 8 of a request.    vLLM: v1/core/sched/utils.py
"""

from collections.abc import Mapping, Sequence

from mini_engine.scheduler.request import Request, RequestStatus


def check_stop(request: Request) -> bool:
    """Whether the newest token ends the request; sets its status and stop_reason if so.

    The order is vLLM's, and visible: a token that is EOS and also a stop token reports no stop_reason, and the last token that
    max_tokens allows still says "stop" when it is one. min_tokens is no question here: below it the sampler cannot draw EOS or a
    stop token at all, and a length limit holds anyway. (In vLLM it is asked after these, and guards repetition detection only.)
    """
    token_id = request.all_token_ids[-1]
    if token_id == request.eos_token_id:
        request.status = RequestStatus.FINISHED_STOPPED
    elif token_id in request.stop_token_ids:
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = token_id
    elif request.num_tokens >= request.max_num_tokens:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    else:
        return False
    return True


def check_queues(requests: Mapping[str, Request], running: Sequence[Request], waiting: Sequence[Request]) -> None:
    """AssertionError unless every live request is in exactly one queue, in a status that fits it, with its counters in order."""
    assert len(running) + len(waiting) == len(requests), "a request is in no queue, or in two"
    for request in running:
        assert requests[request.request_id] is request and request.status is RequestStatus.RUNNING, request
    for request in waiting:
        assert requests[request.request_id] is request, request
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) and request.num_computed_tokens == 0, request
    for request in requests.values():
        assert request.num_prompt_tokens <= request.num_tokens == len(request.all_token_ids) < request.max_num_tokens, request
        num_known = request.num_tokens + request.num_output_placeholders
        assert 0 <= request.num_cached_tokens <= request.num_computed_tokens <= num_known <= request.max_num_tokens, request
