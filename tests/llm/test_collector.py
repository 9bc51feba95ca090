"""RequestOutputCollector: coalescing loses nothing, in whatever order producer and reader run, and death is told last."""

import asyncio
from collections.abc import Iterator

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.exceptions import EngineDeadError
from mini_engine.llm.collector import RequestOutputCollector
from mini_engine.outputs import CompletionOutput, Logprob, RequestOutput
from mini_engine.sampling_params import RequestOutputKind

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


def output(text: str, token_ids: list[int], index: int = 0, finish: str | None = None, finished: bool | None = None) -> RequestOutput:
    logprobs = [{t: Logprob(-float(t))} for t in token_ids]
    completion = CompletionOutput(index, text, list(token_ids), 0.0, logprobs, finish)
    return RequestOutput("r", None, [1], [completion], finish is not None if finished is None else finished)


@given(
    tokens=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 99)), min_size=1, max_size=20),
    reads=st.lists(st.booleans(), min_size=20, max_size=20),
    kind=st.sampled_from([DELTA, CUMULATIVE]),
)
def test_whatever_is_merged_the_reader_gets_everything(tokens: list[tuple[int, int]], reads: list[bool], kind: RequestOutputKind) -> None:
    """n = 3 answers; after each put the reader reads or lags. Per index: all tokens, in order, and the last finish reason."""
    collector = RequestOutputCollector(kind)
    last = {index: i for i, (index, _) in enumerate(tokens)}
    so_far: dict[int, list[int]] = {0: [], 1: [], 2: []}
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    texts = {0: "", 1: "", 2: ""}
    finishes: dict[int, str | None] = {}
    finals = 0

    def read() -> None:
        nonlocal finals
        item = collector.get_nowait()
        if item is None:
            return
        finals += item.finished
        for completion in item.outputs:
            assert len(completion.logprobs or []) == len(completion.token_ids)
            got[completion.index] = (got[completion.index] if kind is DELTA else []) + completion.token_ids
            texts[completion.index] = (texts[completion.index] if kind is DELTA else "") + completion.text
            finishes[completion.index] = completion.finish_reason

    for i, (index, token) in enumerate(tokens):
        so_far[index].append(token)
        ids = [token] if kind is DELTA else list(so_far[index])
        text = "".join(map(chr, ids))
        collector.put(output(text, ids, index, "stop" if last[index] == i else None, finished=i == len(tokens) - 1))
        if reads[i]:
            read()
    read()
    assert got == so_far
    assert texts == {index: "".join(map(chr, ids)) for index, ids in so_far.items()}
    assert set(finishes.values()) == {"stop"} and finals == 1
    assert collector.get_nowait() is None


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_merging_costs_what_is_new(kind: RequestOutputKind) -> None:
    """However many answers are unread: the whole list is looked at once, not once per merge (16,384 aborts froze a server for 47 s)."""

    class Counted(list[CompletionOutput]):
        looks = 0

        def __iter__(self) -> Iterator[CompletionOutput]:
            Counted.looks += 1
            return super().__iter__()

    unread = output("a", [0], 0)
    unread.outputs = Counted(unread.outputs)
    for i in range(1, 1000):
        unread.add(output("a", [i], i), kind)
    for i in reversed(range(1000)):
        unread.add(output("b", [i], i), kind)
    assert Counted.looks == 1
    assert [c.token_ids for c in unread.outputs] == [[i] * (2 if kind is DELTA else 1) for i in range(1000)]
    assert [len(c.logprobs or []) for c in unread.outputs] == [2 if kind is DELTA else 1] * 1000


def test_an_exception_waits_behind_unread_output() -> None:
    collector = RequestOutputCollector(DELTA)
    collector.put(output("a", [1]))
    collector.put(EngineDeadError("gone"))
    collector.put(EngineDeadError("again"))
    collector.put(output("b", [2]))
    read = collector.get_nowait()
    assert read is not None and read.outputs[0].text == "a"
    with pytest.raises(EngineDeadError, match="gone"):
        collector.get_nowait()


def test_an_exception_after_an_unread_final_output_is_dropped() -> None:
    collector = RequestOutputCollector(DELTA)
    collector.put(output("a", [1], finish="stop"))
    collector.put(EngineDeadError("gone"))
    read = collector.get_nowait()
    assert read is not None and read.finished
    assert collector.get_nowait() is None


@pytest.mark.anyio
async def test_get_waits_for_put() -> None:
    collector = RequestOutputCollector(DELTA)
    for item in (output("a", [1]), EngineDeadError("gone")):
        waiter = asyncio.create_task(collector.get())
        await asyncio.sleep(0)
        await anyio.wait_all_tasks_blocked()
        assert not waiter.done()
        collector.put(item)
        if isinstance(item, Exception):
            with pytest.raises(EngineDeadError):
                await waiter
        else:
            assert await waiter is item


@pytest.mark.anyio
async def test_a_cancelled_get_loses_no_output() -> None:
    collector = RequestOutputCollector(DELTA)
    waiter = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    await anyio.wait_all_tasks_blocked()
    item = output("a", [1])
    collector.put(item)
    waiter.cancel()  # woken and cancelled in the same turn, on purpose
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert collector.get_nowait() is item
