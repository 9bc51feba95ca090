"""OutputProcessor: engine outputs in, request outputs out. Detokenizes, finds stop strings, attaches logprobs, counts.

Law       Every registered request gets exactly one terminal output (finished=True), whatever happens: finish, stop string, abort, error.
          Only the death of the engine is told as an exception instead.
Order     per output: count, detokenize and look for stop strings, cut what lies behind one, logprobs, hand over, forget the finished.
Faults    an exception while one request's output is handled is that request's error; the others go on.
Cost      this loop runs for every token: no container is made here that the reader does not get.
Unknown   ids are ignored: the engine may still send tokens for a request that was aborted here.

Form 9 of a request. Knows no socket and no task.    vLLM: v1/engine/output_processor.py::OutputProcessor
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mini_engine.exceptions import EngineDeadError
from mini_engine.llm.collector import RequestOutputCollector
from mini_engine.llm.logprobs import LogprobsProcessor, TokenTexts
from mini_engine.llm.parallel_sampling import ParentRequest
from mini_engine.observe.stats import IterationStats, RequestStateStats
from mini_engine.outputs import CompletionOutput, RequestOutput
from mini_engine.render.tokenizer import Tokenizer
from mini_engine.sampling_params import RequestOutputKind
from mini_engine.text.detokenizer import DetokenizerFactory, IncrementalDetokenizer
from mini_engine.wire.messages import EngineCoreOutput, EngineCoreRequest, FinishReason

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RequestState:
    """One request to the engine (one child, when n > 1)."""

    request_id: str  #: internal
    external_req_id: str  #: the caller's
    parent: ParentRequest | None
    index: int  #: which of the n answers
    queue: RequestOutputCollector | None  #: None: LLMEngine, which takes the outputs from process_outputs()
    prompt: str | None
    prompt_token_ids: list[int]
    max_tokens_param: int | None
    delta: bool
    final_only: bool
    detokenizer: IncrementalDetokenizer
    logprobs: LogprobsProcessor | None  #: None: none were asked for
    stats: RequestStateStats

    def make_request_output(
        self, new_token_ids: list[int], finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> RequestOutput | None:
        """What the reader gets now. None: nothing, because only the whole answer was asked for and it is not there yet."""
        finished = finish_reason is not None
        if self.final_only and not finished:
            return None
        delta, detokenizer, logprobs = self.delta, self.detokenizer, self.logprobs
        completion = CompletionOutput(
            self.index,
            detokenizer.get_next_output_text(finished, delta),
            # an output is a snapshot: it must not grow under a reader who kept it
            new_token_ids if delta else list(detokenizer.output_token_ids),
            None if logprobs is None else logprobs.cumulative_logprob,
            None if logprobs is None else logprobs.take(delta),
            None if finish_reason is None else str(finish_reason),
            None if finish_reason is FinishReason.ERROR else stop_reason,
        )
        error = str(stop_reason) if finish_reason is FinishReason.ERROR and stop_reason is not None else None
        return self.deliver(completion, finished, error)

    def deliver(self, completion: CompletionOutput, finished: bool, error: str | None) -> RequestOutput | None:
        completions = [completion]
        if self.parent is not None:
            self.parent.error = error = self.parent.error or error
            completions, finished = self.parent.take(self.request_id, completion)
            if not completions:
                return None
        return RequestOutput(
            self.external_req_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            finished,
            None if self.logprobs is None else self.logprobs.take_prompt(self.delta),
            self.stats.num_cached_tokens,
            error,
        )


@dataclass(frozen=True, slots=True)
class OutputProcessorStats:
    """OutputProcessor.statistics(): all zero when nothing is in flight."""

    num_requests: int  #: requests the engine may still answer, each child of an n > 1 counted
    num_parents: int
    num_external_ids: int


class OutputProcessor:
    """The registry of live requests. Every method runs to its end without giving way: event loop thread (or LLMEngine's) only."""

    def __init__(self, tokenizer: Tokenizer, *, overlay: Mapping[str, str] = {}) -> None:
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        self.external_req_ids: dict[str, set[str]] = {}  #: the caller's id → ids of live requests
        self._texts = TokenTexts(tokenizer)
        self._new_detokenizer = DetokenizerFactory(tokenizer, overlay)

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, queue: RequestOutputCollector | None = None
    ) -> list[EngineCoreRequest]:
        """Register it, or with n > 1 its n children. Returns what to send now, not sooner: an output may be back at once."""
        params = request.sampling_params
        assert params is not None and request.prompt_token_ids is not None and request.external_req_id is not None
        parent, children = None, [request]
        if params.n > 1:
            parent = ParentRequest(request.request_id, params)
            children = parent.children(request)
        for index, child in enumerate(children):
            logprobs = None
            if params.logprobs is not None or params.prompt_logprobs is not None:
                logprobs = LogprobsProcessor(self._texts if params.detokenize else None, params, request.prompt_token_ids)
            self.request_states[child.request_id] = RequestState(
                request_id=child.request_id,
                external_req_id=request.external_req_id,
                parent=parent,
                index=index,
                queue=queue,
                prompt=prompt,
                prompt_token_ids=request.prompt_token_ids,
                max_tokens_param=params.max_tokens,
                delta=params.output_kind is RequestOutputKind.DELTA,
                final_only=params.output_kind is RequestOutputKind.FINAL_ONLY,
                detokenizer=self._new_detokenizer(child),
                logprobs=logprobs,
                stats=RequestStateStats(arrival_time=request.arrival_time),
            )
            if parent is not None:  # now that it has a child: a fault above leaves nothing behind
                self.parent_requests[parent.request_id] = parent
            self.external_req_ids.setdefault(request.external_req_id, set()).add(child.request_id)
        return children

    def process_outputs(
        self, outputs: Sequence[EngineCoreOutput], engine_core_timestamp: float, iteration_stats: IterationStats
    ) -> tuple[list[RequestOutput], list[str]]:
        """Handle outputs of one message: into their queues, or returned when a request has none.

        Second result: ids that ended here, by a stop string or a fault, and that the engine still runs; the caller aborts them.
        """
        request_outputs: list[RequestOutput] = []
        reqs_to_abort: list[str] = []
        for output in outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            try:
                request_output, finish_reason = self._process_output(state, output, engine_core_timestamp, iteration_stats)
            except Exception as e:
                finish_reason = FinishReason.ERROR
                request_output = self._failed(state, e)
            if request_output is not None:
                if state.queue is not None:
                    state.queue.put(request_output)
                else:
                    request_outputs.append(request_output)
            if finish_reason is not None:
                self._finish(state, finish_reason, iteration_stats)
                if output.finish_reason is None:
                    reqs_to_abort.append(state.request_id)
        return request_outputs, reqs_to_abort

    def _process_output(
        self, state: RequestState, output: EngineCoreOutput, timestamp: float, iteration_stats: IterationStats
    ) -> tuple[RequestOutput | None, FinishReason | None]:
        new_token_ids, finish_reason, stop_reason = output.new_token_ids, output.finish_reason, output.stop_reason
        new_logprobs = output.new_logprobs
        iteration_stats.update_from_output(output, timestamp, state.stats)
        detokenizer = state.detokenizer
        stop_string = detokenizer.update(new_token_ids, finish_reason is FinishReason.STOP)
        if stop_string is not None:
            finish_reason, stop_reason = FinishReason.STOP, stop_string
            # of several tokens in one step, those behind the stop string were never part of the answer
            kept = len(new_token_ids) - (state.stats.num_generation_tokens - detokenizer.num_output_tokens())
            new_token_ids = new_token_ids[:kept]
            new_logprobs = new_logprobs.slice(0, kept) if new_logprobs is not None else None
        if state.logprobs is not None:
            if output.new_prompt_logprobs_tensors is not None:
                state.logprobs.update_prompt(output.new_prompt_logprobs_tensors)
            if new_logprobs is not None:
                state.logprobs.update(new_logprobs)
        return state.make_request_output(new_token_ids, finish_reason, stop_reason), finish_reason

    def _failed(self, state: RequestState, e: Exception) -> RequestOutput | None:
        """The terminal output of a request whose own parts raised and cannot be asked any more. Called in the except clause."""
        logger.exception("request %s failed in the front-end", state.request_id)
        completion = CompletionOutput(state.index, "", [], finish_reason=str(FinishReason.ERROR))
        return state.deliver(completion, True, f"{type(e).__name__}: {e}")

    def abort_requests(
        self, request_ids: Iterable[str], iteration_stats: IterationStats, *, internal: bool
    ) -> tuple[list[RequestOutput], list[str]]:
        """End requests here, each with a terminal output whose finish_reason is "abort"; unknown ids are ignored.

        `internal`: ids of ours, a parent's included, which stands for its children, and whose reader is gone: nothing is queued
        for it. Otherwise the caller's ids, each of which stands for every request that carries it. Results as process_outputs:
        outputs without a queue, ids to abort in the engine.
        """
        ids: list[str] = []
        for given in request_ids:
            if not internal:
                ids += sorted(self.external_req_ids.get(given, ()))
            elif (parent := self.parent_requests.get(given)) is not None:
                ids += sorted(parent.child_requests & self.request_states.keys())
            elif given in self.request_states:
                ids.append(given)
        for request_id in ids if internal else ():
            self.request_states[request_id].queue = None
        outputs = [EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT) for request_id in ids]
        return self.process_outputs(outputs, 0.0, iteration_stats)[0], ids

    def propagate_error(self, error: EngineDeadError) -> None:
        """The engine is gone: every reader gets `error`, and nothing is in flight any more."""
        for state in self.request_states.values():
            if state.queue is not None:
                state.queue.put(EngineDeadError(str(error)))  # one each: an exception collects the traceback of every raise
        self.request_states.clear()
        self.parent_requests.clear()
        self.external_req_ids.clear()

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def statistics(self) -> OutputProcessorStats:
        return OutputProcessorStats(len(self.request_states), len(self.parent_requests), len(self.external_req_ids))

    def _finish(self, state: RequestState, finish_reason: FinishReason, iteration_stats: IterationStats) -> None:
        """Forget a request that has had its terminal output."""
        del self.request_states[state.request_id]
        siblings = self.external_req_ids[state.external_req_id]
        siblings.remove(state.request_id)
        if not siblings:
            del self.external_req_ids[state.external_req_id]
        iteration_stats.update_from_finished_request(finish_reason, len(state.prompt_token_ids), state.max_tokens_param, state.stats)
        parent, num_tokens, n = state.parent, state.stats.num_generation_tokens, 1
        if parent is not None:
            parent.max_num_generation_tokens = num_tokens = max(parent.max_num_generation_tokens, num_tokens)
            n = parent.n
            if parent.child_requests:
                return
            del self.parent_requests[parent.request_id]
        iteration_stats.n_params_iter.append(n)
        iteration_stats.max_num_generation_tokens_iter.append(num_tokens)
