"""The committed oracle tokens (tools/oracle.py makes them), and the rule by which an engine's tokens equal them (DESIGN §3)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mini_engine.model.default_model import describe

NEAR_TIE = 1e-4  #: below this gap of the two largest logits, rounding may choose
SHARE_OF_NEAR_TIES = 1e-3  #: of all tokens, at most

FILE = Path(__file__).parent / "data" / "oracle" / "smollm2.json"


@dataclass(frozen=True, slots=True)
class OracleCase:
    prompt_token_ids: list[int]
    token_ids: list[int]  #: transformers' greedy choice, EOS ignored
    gaps: list[float]  #: per token: its logit minus the next best one's


def oracle_cases() -> list[OracleCase]:
    """All 60. Fails when they belong to other weights than the ones installed."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    source = describe().package_file
    assert source is None or (source.name, source.stat().st_size) == (data["source"], data["source_bytes"]), (
        f"{FILE.name} was made from {data['source']} ({data['source_bytes']} bytes), not from {source}: {data['rebuild']}"
    )
    return [OracleCase(**case) for case in data["cases"]]


def assert_equal(cases: Sequence[OracleCase], outputs: Sequence[Sequence[int]]) -> None:
    """Every output is the oracle's, up to the first near tie that went the other way: what follows that cannot be compared."""
    wrong, near, compared = [], [], 0
    for number, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        assert len(output) == len(case.token_ids), f"case {number}: {len(output)} tokens, want {len(case.token_ids)}"
        differs = next((i for i, (a, b) in enumerate(zip(output, case.token_ids, strict=True)) if a != b), None)
        compared += len(output) if differs is None else differs + 1
        if differs is not None:
            found = f"case {number}, token {differs}: {output[differs]}, want {case.token_ids[differs]} (gap {case.gaps[differs]})"
            (near if case.gaps[differs] < NEAR_TIE else wrong).append(found)
    if near:
        print("near ties that went the other way:", *near, sep="\n  ")
    assert not wrong, "\n".join(wrong)
    assert len(near) <= SHARE_OF_NEAR_TIES * compared, f"{len(near)} near ties among {compared} tokens"
