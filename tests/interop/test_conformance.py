"""The conformance suite: every case of cases.py, every pair of peers.py, no unexplained difference from our own pair on the same engine.

On the mock device, where the text does not matter, and on SmolLM2, where it does. `make interop` runs all of it; the parts that need
stock vLLM's Python are marked `interop`. With MINI_ENGINE_INTEROP_RESULTS each pair appends its line of the matrix there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from tests.interop import peers
from tests.interop.accepted import ACCEPTED, Accepted
from tests.interop.cases import Base, Case, cases, show
from tests.interop.normalise import Answer, differences
from tests.interop.peers import MOCK, REAL, Server

ONE_THREAD = (*REAL, "--num-threads", "1")
#: of the model's cases, what runs by default: SmolLM2's own stops, logprobs, stop strings and cut characters
SHORT = ("chat", "chat, logprobs", "chat, stop string", "chat, to the end", "text, characters over several tokens")


@dataclass(frozen=True, slots=True)
class Reference:
    table: list[Case]
    answers: dict[str, Answer]

    @classmethod
    def ask(cls, server: Server, names: tuple[str, ...] = ()) -> Reference:
        table = [case for case in cases(Base.ask(server)) if not names or case.name.removesuffix(", streamed") in names]
        return cls(table, {case.name: case.ask(server) for case in table})


@pytest.fixture(scope="module")
def mock() -> Iterator[Reference]:
    with peers.serve("inline", *MOCK) as server:
        yield Reference.ask(server)


def compare(pair: str, engine: str, running: AbstractContextManager[Server], reference: Reference) -> None:
    unexplained: list[str] = []
    used: set[Accepted] = set()
    accepted: set[str] = set()  #: names of cases
    failed: set[str] = set()
    with running as server:
        for case in reference.table:
            for path, ours, theirs in differences(reference.answers[case.name], case.ask(server)):
                rows = [row for row in ACCEPTED if row.covers(pair, case.name, path)]
                used.update(rows)
                if rows:
                    accepted.add(case.name)
                else:
                    failed.add(case.name)
                    unexplained.append(f"{case.name}: {path}: ours {ours!r:.300}, here {theirs!r:.300}; asked {show(case)}")
        server.wait_idle()
    if results := os.environ.get("MINI_ENGINE_INTEROP_RESULTS"):
        line = {
            "pair": pair,
            "engine": engine,
            "cases": len(reference.table),
            "accepted": len(accepted - failed),
            "unexplained": len(failed),
        }
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    assert not unexplained, "\n".join(unexplained)
    names = [case.name for case in reference.table]
    stale = [row for row in ACCEPTED if row.pair == pair and row not in used and any(row.covers(pair, name, row.path) for name in names)]
    assert not stale, f"accepted, but not there any more: {stale}"


def test_the_table_is_worth_asking(mock: Reference) -> None:
    """Stop strings stop, streams end, bad requests are refused: else equal answers would prove nothing."""
    assert len(mock.answers) == len(mock.table) > 70
    for name, answer in mock.answers.items():
        if name.startswith("bad"):
            assert 400 <= answer["status"] < 500 and answer["has_message"], name
            continue
        assert answer["status"] == 200 and all(choice["text"] and choice["finish_reason"] for choice in answer["choices"].values()), name
        if "stop string" in name and "never" not in name:
            assert answer["choices"][0]["finish_reason"] == "stop" and answer["choices"][0]["stop_reason"], name
        if "streamed" in name:
            assert answer["done"] and not answer["errors"], name


def test_whole_and_streamed_say_the_same(mock: Reference) -> None:
    for name, answer in mock.answers.items():
        if (streamed := mock.answers.get(f"{name}, streamed")) and not name.startswith("bad"):
            assert streamed["choices"] == answer["choices"], name
            assert {k: v for k, v in streamed["usage"].items() if k != "beside_choices"} == answer["usage"], name


@pytest.mark.parametrize(("pair", "kind"), [("python/ours", "python"), ("vllm-rs/ours", "rust")])
def test_supervised_front_ends_over_our_engine(mock: Reference, pair: str, kind: str) -> None:
    compare(pair, "mock", peers.serve(kind, *MOCK), mock)


@pytest.mark.model
@pytest.mark.timeout(180)
def test_vllm_rs_over_our_engine_with_the_model() -> None:
    """One engine, both front-ends beside each other would be two engines' memory: one after the other."""
    with peers.serve("inline", *ONE_THREAD) as server:
        reference = Reference.ask(server, SHORT)
    assert reference.answers["chat, to the end"]["choices"][0]["finish_reason"] == "stop"
    compare("vllm-rs/ours", "SmolLM2", peers.serve("rust", *ONE_THREAD), reference)


@pytest.mark.interop
@pytest.mark.timeout(180)
def test_stock_python_over_our_engine(mock: Reference) -> None:
    compare("vllm/ours", "mock", peers.stock_front_end([peers.stock_vllm()], *MOCK), mock)


@pytest.fixture(scope="module")
def smollm2() -> Reference:
    peers.stock_vllm()  # nothing to compare with otherwise
    with peers.serve("inline", *ONE_THREAD) as server:
        return Reference.ask(server)


@pytest.mark.interop
@pytest.mark.model
@pytest.mark.timeout(600)
def test_stock_python_over_our_engine_with_the_model(smollm2: Reference) -> None:
    compare("vllm/ours", "SmolLM2", peers.stock_front_end([peers.stock_vllm()], *ONE_THREAD), smollm2)


@pytest.mark.interop
@pytest.mark.model
@pytest.mark.timeout(600)
def test_our_front_end_over_a_stock_engine(smollm2: Reference) -> None:
    compare("ours/vllm", "SmolLM2", peers.over_stock_engine(), smollm2)


@pytest.mark.interop
@pytest.mark.model
@pytest.mark.timeout(600)
def test_our_front_end_as_the_child_of_stock_vllm(smollm2: Reference) -> None:
    compare("ours@vllm", "SmolLM2", peers.under_stock_supervisor(), smollm2)
