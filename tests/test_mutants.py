"""Every known fault, put back, is found by the test that names it (tools/mutants.py does the same in fresh processes).

In process: the mutated function is compiled, and its code object swapped into the real one, so that whoever imported it has the fault.
What is no Python function (C, a constant) is built in a fresh process, by `make soak`.
"""

import importlib
import types
from pathlib import Path

import pytest

from tools.mutants import ROOT, Mutant, load_mutants, run_mutant

MUTANTS = load_mutants()
IN_PROCESS = [mutant for mutant in MUTANTS if mutant.is_function]


def resolve(module: object, name: str) -> object:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def mutated_code(mutant: Mutant) -> types.CodeType:
    """The code object of the mutant's function."""
    path = ROOT / mutant.file
    code = compile(mutant.mutate(path.read_text(encoding="utf-8")), str(path), "exec")
    for part in mutant.symbol.partition("::")[2].split("."):
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == part)
    return code


def test_ids_are_unique() -> None:
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.soak
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if not mutant.is_function], ids=lambda mutant: mutant.id)
def test_mutant_dies_in_a_fresh_process(mutant: Mutant) -> None:
    assert run_mutant(mutant) == "killed"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_fault_can_be_put_back(mutant: Mutant) -> None:
    """What it replaces is there, once; the test that it names is there."""
    assert mutant.mutate((ROOT / mutant.file).read_text(encoding="utf-8"))
    path, _, name = mutant.test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("mutant", IN_PROCESS, ids=lambda mutant: mutant.id)
def test_mutant_dies(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
    function = resolve(module, mutant.symbol.partition("::")[2])
    path, _, name = mutant.test.partition("::")
    test = getattr(importlib.import_module(Path(path).with_suffix("").as_posix().replace("/", ".")), name)
    test()  # passes as things are
    monkeypatch.setattr(function, "__code__", mutated_code(mutant))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test()
