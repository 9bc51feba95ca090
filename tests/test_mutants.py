"""Every known fault, put back, is found by the test that names it (tools/mutants.py does the same in fresh processes).

In process: the mutated function is compiled, and its code object swapped into the real one, so that whoever imported it has the fault.
"""

import importlib
import types
from pathlib import Path

import pytest

from tools.mutants import ROOT, Mutant, load_mutants

MUTANTS = load_mutants()


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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_mutant_dies(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
    function = resolve(module, mutant.symbol.partition("::")[2])
    path, _, name = mutant.test.partition("::")
    test = getattr(importlib.import_module(Path(path).with_suffix("").as_posix().replace("/", ".")), name)
    test()  # passes as things are
    monkeypatch.setattr(function, "__code__", mutated_code(mutant))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test()
