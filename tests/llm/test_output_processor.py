"""OutputProcessor and collectors: stream ≡ whole for any grouping and any merging, one terminal output each, nothing left behind."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.exceptions import EngineDeadError
from mini_engine.llm.collector import RequestOutputCollector
from mini_engine.llm.output_processor import OutputProcessor, OutputProcessorStats
from mini_engine.llm.parallel_sampling import ParentRequest
from mini_engine.observe.stats import IterationStats
from mini_engine.outputs import RequestOutput
from mini_engine.sampling_params import RequestOutputKind, SamplingParams
from mini_engine.wire.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
    LogprobsLists,
    LogprobsTensors,
    PrefillStats,
    Tensor,
)
from tests.llm.parts import VOCAB_SIZE, make_request, output_processor, outputs_of
from tests.text.tiny_tokenizers import byte_level

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
EMPTY = OutputProcessorStats(0, 0, 0)


@dataclass
class Answer:
    """What a reader has after its last output, whichever kind it asked for."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[int]] = field(default_factory=list)
    prompt_logprobs: int = 0
    cumulative_logprob: float | None = None
    finish: tuple[str | None, int | str | None] = (None, None)


class Reader:
    """Collects a request's outputs as a client would, and checks that none follows the terminal one."""

    def __init__(self, kind: RequestOutputKind, n: int = 1) -> None:
        self.kind = kind
        self.collector = RequestOutputCollector(kind)
        self.answers = [Answer() for _ in range(n)]
        self.finals = 0

    def read(self) -> None:
        output = self.collector.get_nowait()
        if output is not None:
            self.take(output)

    def take(self, output: RequestOutput) -> None:
        assert not self.finals, "an output after the terminal one"
        self.finals += output.finished
        for completion in output.outputs:
            answer = self.answers[completion.index]
            if self.kind is not DELTA:
                answer.text, answer.token_ids, answer.logprobs = "", [], []
            answer.text += completion.text
            answer.token_ids += completion.token_ids
            answer.logprobs += [list(position) for position in completion.logprobs or []]
            answer.cumulative_logprob = completion.cumulative_logprob
            answer.finish = completion.finish_reason, completion.stop_reason
            if output.prompt_logprobs is not None:
                answer.prompt_logprobs = len(output.prompt_logprobs)


def start(processor: OutputProcessor, params: SamplingParams, reader: Reader, prompt: tuple[int, ...] = (5, 6, 7)) -> list[str]:
    """Register a request as AsyncLLM does; the ids that the engine knows."""
    sent = processor.add_request(make_request(params, prompt), None, reader.collector)
    return [request.request_id for request in sent]


def with_logprobs(output: EngineCoreOutput) -> EngineCoreOutput:
    ids = np.array([[t, (t + 1) % VOCAB_SIZE] for t in output.new_token_ids], np.int32).reshape(-1, 2)
    output.new_logprobs = LogprobsLists(ids, -ids.astype(np.float32), np.ones(len(ids), np.int64))
    return output


def prompt_logprobs() -> LogprobsTensors:
    ids = np.array([[6, 8], [7, 9]], np.int32)
    return LogprobsTensors(ids.view(Tensor), -ids.astype(np.float32).view(Tensor), np.array([1, 1], np.int32).view(Tensor))


TOKENS = st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=30)
STOPS = st.lists(st.sampled_from(["a", "the", "st", "op", "你", "ox j", "�", "zzzz"]), max_size=3, unique=True)


def grouped(tokens: list[int], cuts: list[bool]) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for token, cut in zip(tokens, cuts, strict=False):
        groups[-1].append(token)
        if cut:
            groups.append([])
    return [group for group in groups if group]


@given(
    answers=st.lists(TOKENS, min_size=1, max_size=3),
    stop=STOPS,
    include=st.booleans(),
    finish=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
    want_logprobs=st.booleans(),
    data=st.data(),
)
def test_stream_equals_whole(
    answers: list[list[int]], stop: list[str], include: bool, finish: FinishReason, want_logprobs: bool, data: st.DataObject
) -> None:
    """The same tokens, one by one and read at the end, or grouped, interleaved and read anyhow: the same answer."""

    def run(kind: RequestOutputKind, groups: list[list[list[int]]], order: list[int], reads: list[bool]) -> list[Answer]:
        processor = output_processor()
        params = SamplingParams(
            n=len(groups),
            stop=stop,
            include_stop_str_in_output=include,
            output_kind=kind,
            logprobs=1 if want_logprobs else None,
            prompt_logprobs=1 if want_logprobs else None,
        )
        reader = Reader(kind, len(groups))
        ids = start(processor, params, reader)
        queues = [list(map(with_logprobs, outputs_of(i, g, finish))) for i, g in zip(ids, groups, strict=True)]
        for queue in queues:
            queue[0].new_prompt_logprobs_tensors = prompt_logprobs()
        aborted: list[str] = []
        step = 0
        for index in order:
            if not queues[index]:
                continue
            returned, to_abort = processor.process_outputs([queues[index].pop(0)], 1.0, IterationStats())
            assert not returned
            aborted += to_abort
            if reads[step % len(reads)]:
                reader.read()
            step += 1
        reader.read()
        assert reader.finals == 1
        assert processor.statistics() == EMPTY
        stopped_early = {i for i, a in zip(ids, reader.answers, strict=True) if isinstance(a.finish[1], str)}
        assert set(aborted) <= stopped_early and len(aborted) == len(set(aborted))
        return reader.answers

    singles = [[[token] for token in tokens] for tokens in answers]
    whole = run(FINAL_ONLY, singles, [i for i, g in enumerate(singles) for _ in g], [False])
    groups = [grouped(tokens, data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))) for tokens in answers]
    order = data.draw(st.permutations([i for i, g in enumerate(groups) for _ in g]))
    reads = data.draw(st.lists(st.booleans(), min_size=1, max_size=8))
    assert run(DELTA, groups, order, reads) == whole
    assert run(CUMULATIVE, groups, order, reads) == whole
    for answer in whole:
        assert len(answer.logprobs) == (len(answer.token_ids) if want_logprobs else 0)
        assert answer.prompt_logprobs == (3 if want_logprobs else 0)
        assert answer.finish[0] == ("stop" if isinstance(answer.finish[1], str) else str(finish))


def test_a_stop_string_ends_here_and_is_aborted_there_once() -> None:
    processor, reader = output_processor(), Reader(DELTA)
    (request_id,) = start(processor, SamplingParams(stop="jumps", output_kind=DELTA), reader)
    ids = byte_level().encode("the fox jumps over", add_special_tokens=False)
    _, aborted = processor.process_outputs([EngineCoreOutput(request_id, ids)], 1.0, IterationStats())
    assert aborted == [request_id]
    late, aborted = processor.process_outputs(outputs_of(request_id, [[5], [6]]), 1.0, IterationStats())  # already under way
    assert (late, aborted) == ([], [])
    reader.read()
    assert reader.answers[0].finish == ("stop", "jumps")
    assert reader.answers[0].text == "the fox "
    assert processor.statistics() == EMPTY


def test_tokens_behind_a_stop_string_are_no_part_of_the_answer() -> None:
    """Several tokens in one step (speculation): text, ids and logprobs end with the token that completed the stop string."""
    processor, reader = output_processor(), Reader(DELTA)
    (request_id,) = start(processor, SamplingParams(stop="b", include_stop_str_in_output=True, logprobs=1, output_kind=DELTA), reader)
    ids = [byte_level().encode(c, add_special_tokens=False)[0] for c in "abcd"]
    assert processor.process_outputs([with_logprobs(EngineCoreOutput(request_id, list(ids)))], 1.0, IterationStats())[1] == [request_id]
    reader.read()
    (answer,) = reader.answers
    assert (answer.text, answer.token_ids, [position[0] for position in answer.logprobs]) == ("ab", ids[:2], ids[:2])


def test_answers_finished_out_of_order_come_in_order() -> None:
    processor, reader = output_processor(), Reader(FINAL_ONLY, 3)
    ids = start(processor, SamplingParams(n=3, output_kind=FINAL_ONLY), reader)
    processor.process_outputs([outputs_of(ids[i], [[10 + i]])[0] for i in (2, 0, 1)], 1.0, IterationStats())
    read = reader.collector.get_nowait()
    assert read is not None
    assert [(c.index, c.token_ids) for c in read.outputs] == [(0, [10]), (1, [11]), (2, [12])]


def test_a_stop_string_in_the_engines_last_output_needs_no_abort() -> None:
    processor, reader = output_processor(), Reader(DELTA)
    (request_id,) = start(processor, SamplingParams(stop="fox"), reader)
    ids = byte_level().encode("the fox", add_special_tokens=False)
    assert processor.process_outputs(outputs_of(request_id, [ids]), 1.0, IterationStats())[1] == []
    reader.read()
    assert reader.answers[0].finish == ("stop", "fox")


def test_an_engine_error_is_told_with_its_reason() -> None:
    processor, reader = output_processor(), Reader(FINAL_ONLY)
    (request_id,) = start(processor, SamplingParams(), reader)
    output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason="no room")
    processor.process_outputs([output], 1.0, IterationStats())
    read = reader.collector.get_nowait()
    assert read is not None and read.finished
    assert (read.error, read.outputs[0].finish_reason, read.outputs[0].stop_reason) == ("no room", "error", None)


def test_the_error_of_one_of_n_answers_is_not_lost() -> None:
    processor, reader = output_processor(), Reader(FINAL_ONLY, 2)
    ids = start(processor, SamplingParams(n=2, output_kind=FINAL_ONLY), reader)
    failed = EngineCoreOutput(ids[0], [], finish_reason=FinishReason.ERROR, stop_reason="no room")
    processor.process_outputs([failed, *outputs_of(ids[1], [[5]])], 1.0, IterationStats())
    read = reader.collector.get_nowait()
    assert read is not None and read.error == "no room"
    assert [completion.finish_reason for completion in read.outputs] == ["error", "length"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
@pytest.mark.parametrize("internal", [True, False])
def test_abort_gives_a_last_output_with_what_there_was(n: int, kind: RequestOutputKind, internal: bool) -> None:
    processor, reader = output_processor(), Reader(kind, n)
    ids = start(processor, SamplingParams(n=n, output_kind=kind), reader)
    processor.process_outputs([EngineCoreOutput(ids[0], [9, 10])], 1.0, IterationStats())
    top = ids[0] if n == 1 else ids[0].removeprefix("0_")
    stats = IterationStats()
    outputs, to_abort = processor.abort_requests([top if internal else "r", "unknown"], stats, internal=internal)
    assert to_abort == ids
    assert processor.abort_requests(["r"], IterationStats(), internal=False) == ([], [])
    assert bool(outputs) is internal
    for output in outputs:  # the reader is gone: its mailbox gets nothing more
        reader.take(output)
    if not internal:
        reader.read()
    assert reader.finals == 1
    assert {answer.finish for answer in reader.answers} == {("abort", None)}
    assert reader.answers[0].token_ids == ([] if internal and kind is DELTA else [9, 10])
    assert processor.statistics() == EMPTY
    assert (len(stats.finished_requests), stats.n_params_iter) == (n, [n])


@pytest.mark.parametrize("seed", [None, 7])
def test_children_share_what_can_be_large(seed: int | None) -> None:
    """n times the client's 5 MB stop string, or its 49,152 biases, would be the end of the machine."""
    params = SamplingParams(n=3, seed=seed, stop=["x" * 1000], logit_bias={5: 1.0}, stop_token_ids=[7], bad_words=["no"])
    request = make_request(params)
    children = ParentRequest("p", params).children(request)
    for i, child in enumerate(children):
        own, first = child.sampling_params, children[0].sampling_params
        assert own is not None and first is not None and request.sampling_params is not None
        assert child.prompt_token_ids is request.prompt_token_ids
        for name in ("stop", "logit_bias", "stop_token_ids", "bad_words", "_bad_words_token_ids", "_all_stop_token_ids"):
            assert getattr(own, name) is getattr(request.sampling_params, name), name
        assert (own.n, own.seed) == (1, None if seed is None else seed + i)
    assert request.sampling_params is not None and (request.sampling_params.n, request.sampling_params.seed) == (3, seed)


def test_one_external_id_used_twice_means_both() -> None:
    processor, readers = output_processor(), [Reader(DELTA), Reader(DELTA)]
    ids = [start(processor, SamplingParams(), reader)[0] for reader in readers]
    assert processor.statistics().num_external_ids == 1
    assert processor.abort_requests(["r"], IterationStats(), internal=False)[1] == sorted(ids)


def test_a_fault_in_one_request_is_its_error_and_no_one_elses(caplog: pytest.LogCaptureFixture) -> None:
    processor, readers = output_processor(), [Reader(DELTA) for _ in range(3)]
    ids = [start(processor, SamplingParams(), reader)[0] for reader in readers]

    class Broken:
        def __getattr__(self, name: str) -> None:
            raise RuntimeError("a learner's detokenizer")

    processor.request_states[ids[1]].detokenizer = Broken()  # type: ignore[assignment]
    _, aborted = processor.process_outputs([EngineCoreOutput(i, [9]) for i in ids], 1.0, IterationStats())
    assert aborted == [ids[1]]
    read = readers[1].collector.get_nowait()
    assert read is not None and read.finished and read.error == "RuntimeError: a learner's detokenizer"
    for i in (0, 2):
        readers[i].read()
        assert readers[i].answers[0].token_ids == [9]
    processor.request_states[ids[2]].detokenizer = Broken()  # type: ignore[assignment]
    processor.abort_requests([ids[2], ids[0]], IterationStats(), internal=True)
    assert processor.statistics() == EMPTY
    assert "a learner's detokenizer" in caplog.text


def test_death_reaches_every_reader_once() -> None:
    processor, readers = output_processor(), [Reader(DELTA), Reader(FINAL_ONLY, 2)]
    (first,) = start(processor, SamplingParams(), readers[0])
    start(processor, SamplingParams(n=2), readers[1])
    processor.process_outputs([EngineCoreOutput(first, [9])], 1.0, IterationStats())
    processor.propagate_error(EngineDeadError("gone"))
    readers[0].read()  # what was unread comes first
    assert readers[0].answers[0].token_ids == [9]
    for reader in readers:
        with pytest.raises(EngineDeadError, match="gone"):
            reader.read()
    assert processor.statistics() == EMPTY


def test_outputs_are_snapshots() -> None:
    processor = output_processor()
    request = make_request(SamplingParams(output_kind=CUMULATIVE))
    processor.add_request(request, "text")
    kept = [processor.process_outputs([o], 1.0, IterationStats())[0][0] for o in outputs_of(request.request_id, [[9], [10], [11]])]
    assert [output.outputs[0].token_ids for output in kept] == [[9], [9, 10], [9, 10, 11]]
    assert {(o.request_id, o.prompt, tuple(o.prompt_token_ids)) for o in kept} == {("r", "text", (5, 6, 7))}


def test_children_have_their_own_ids_and_seeds() -> None:
    request = make_request(SamplingParams(n=3, seed=7))
    parent = ParentRequest("p", SamplingParams(n=3, seed=7))
    children = parent.children(request)
    assert [child.request_id for child in children] == ["0_p", "1_p", "2_p"]
    assert [(c.sampling_params.n, c.sampling_params.seed) for c in children if c.sampling_params] == [(1, 7), (1, 8), (1, 9)]
    unseeded = ParentRequest("p", SamplingParams(n=2)).children(make_request(SamplingParams(n=2)))
    assert unseeded[0].sampling_params is unseeded[1].sampling_params


def test_statistics_for_prometheus() -> None:
    processor = output_processor()
    request = make_request(SamplingParams(max_tokens=9))
    request.arrival_time -= 10
    processor.add_request(request, None)
    first, second, third = outputs_of(request.request_id, [[9], [10], [11]])
    first.events = [EngineCoreEvent(EngineCoreEventType.QUEUED, 100.0), EngineCoreEvent(EngineCoreEventType.SCHEDULED, 101.0)]
    first.prefill_stats = PrefillStats(num_prompt_tokens=3, num_computed_tokens=1, num_cached_tokens=2)
    stats = [IterationStats() for _ in range(3)]
    outputs = [processor.process_outputs([output], 103.0 + 2 * i, stats[i])[0][0] for i, output in enumerate((first, second, third))]
    assert [output.num_cached_tokens for output in outputs] == [2, 2, 2]
    assert 10 <= stats[0].time_to_first_tokens_iter[0] < 20
    assert stats[1].inter_token_latencies == Counter({2.0: 1})
    (finished,) = stats[2].finished_requests
    assert (finished.num_prompt_tokens, finished.num_generation_tokens, finished.max_tokens_param) == (3, 3, 9)
    assert (finished.queued_time, finished.prefill_time, finished.decode_time, finished.inference_time) == (1.0, 2.0, 4.0, 6.0)
    assert 10 <= finished.e2e_latency < 20
    assert (stats[2].n_params_iter, stats[2].max_num_generation_tokens_iter) == ([1], [3])
