"""ParentRequest: n > 1 answers to one prompt are n requests for one answer each; this puts them together again.

Child i has the id `{i}_{parent id}`, n = 1, and the seed seed + i when one was given: so the answers differ, and each is repeatable.
The engine sees only children. The reader sees one request: with DELTA and CUMULATIVE the children's outputs one by one, each with its
index; with FINAL_ONLY a single output when the last child has finished.

Stands at forms 3 and 9 of a request.    vLLM: v1/engine/parallel_sampling.py::ParentRequest; WIRE §4
"""

from copy import copy

import msgspec

from mini_engine.outputs import CompletionOutput
from mini_engine.sampling_params import RequestOutputKind, SamplingParams
from mini_engine.wire.messages import EngineCoreRequest


class ParentRequest:
    """One user's request, and which of its children are still running."""

    __slots__ = ("_completions", "_final_only", "child_requests", "error", "max_num_generation_tokens", "n", "request_id")

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self.request_id = request_id  #: internal id
        self.n = params.n
        self.child_requests = {f"{index}_{request_id}" for index in range(params.n)}  #: ids that have not finished
        self.max_num_generation_tokens = 0  #: of the longest finished child
        self.error: str | None = None  #: of the first child that failed
        self._final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._completions: list[CompletionOutput] = []  # finished ones, kept until all are

    def children(self, request: EngineCoreRequest) -> list[EngineCoreRequest]:
        """The n requests to send. They share prompt and parameters, but for the seed: nobody changes either."""
        params = request.sampling_params
        assert params is not None
        own = copy(params)  # not replace(): that checks and copies every list again
        own.n = 1
        children = []
        for index in range(self.n):
            if params.seed is not None:
                own = copy(own)
                own.seed = params.seed + index
            children.append(msgspec.structs.replace(request, request_id=f"{index}_{self.request_id}", sampling_params=own))
        return children

    def take(self, child_id: str, completion: CompletionOutput) -> tuple[list[CompletionOutput], bool]:
        """What the reader gets for a child's completion, and whether the whole request has finished with it."""
        if completion.finished():
            self.child_requests.discard(child_id)
        finished = not self.child_requests
        if not self._final_only:
            return [completion], finished
        self._completions.append(completion)
        return sorted(self._completions, key=lambda c: c.index) if finished else [], finished
