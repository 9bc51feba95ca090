"""Mutants: known faults put back into the engine one at a time; the test that names each must fail.

    python tools/mutants.py                 all of tests/mutants.toml
    python tools/mutants.py ID…             these
    python tools/mutants.py --changed       those whose file differs from `git merge-base HEAD main`'s, or is not committed yet

A mutant is `id, symbol (file.py::Class.method, or file:: for all of it), find, replace, test, says`; `find` occurs exactly once in the
symbol's source. It is killed when the test, run by pytest on a copy of the project with that one replacement, *fails*, or with
C ends by a signal: a collection error is not a kill. Last line of stdout: `N killed, M survived, K broken`; exit 1 unless all were killed.
tests/test_mutants.py runs those of functions in process, the others in `make soak`.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = ROOT / "tests" / "mutants.toml"
TIMEOUT_S = 120  #: a mutant that makes the test hang is killed too
BUILD_TIMEOUT_S = 900  #: with C kernels to build: no sign of anything


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault."""

    id: str
    symbol: str  #: path::Qualified.name, or path:: for the whole file
    find: str
    replace: str
    test: str  #: pytest id
    says: str  #: what goes wrong, in one sentence

    @property
    def file(self) -> str:
        return self.symbol.partition("::")[0]

    @property
    def is_function(self) -> bool:
        """Whether its code object can be swapped (tests/test_mutants.py)."""
        return self.file.endswith(".py") and not self.symbol.endswith("::")

    def mutate(self, source: str) -> str:
        """The file's text with the fault in it. ValueError when `find` is not there exactly once."""
        start, end = symbol_span(source, self.symbol.partition("::")[2])
        if (count := source.count(self.find, start, end)) != 1:
            raise ValueError(f"{self.id}: found {count} times in {self.symbol}: {self.find!r}")
        at = source.index(self.find, start, end)
        return source[:at] + self.replace + source[at + len(self.find) :]


def symbol_span(source: str, name: str) -> tuple[int, int]:
    """Character offsets of a function or class in a file; of everything for an empty name."""
    if not name:
        return 0, len(source)
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == part)
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    lines = source.splitlines(keepends=True)
    return sum(map(len, lines[: node.lineno - 1])), sum(map(len, lines[: node.end_lineno]))


def load_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """All of them, in the file's order."""
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]


def run_mutant(mutant: Mutant) -> str:
    """ "killed", "survived", or what is broken."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in ("mini_engine", "tests", "tools"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / mutant.file
        target.write_text(mutant.mutate(target.read_text(encoding="utf-8")), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            mutant.test,
        ]  # -m: the copy comes first on sys.path
        timeout = TIMEOUT_S if mutant.is_function else BUILD_TIMEOUT_S
        own_cache = {} if mutant.is_function else {"MINI_ENGINE_CACHE": str(copy / "cache")}  # C kernels with a fault are thrown away
        try:
            run = subprocess.run(
                command, cwd=copy, env=os.environ | own_cache, capture_output=True, text=True, check=False, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return "killed" if mutant.is_function else f"broken: not done after {timeout} s"
    if "not run: " in run.stdout:
        return f"broken: {run.stdout[-500:]}"
    if run.returncode < 0 and not mutant.is_function:  # by a signal: a kernel that writes where it must not
        return "killed"
    return {0: "survived", 1: "killed"}.get(
        run.returncode, f"broken: pytest exit {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-500:]}"
    )


def changed_files() -> set[str]:
    """Files that differ from the main branch, committed or not."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    base = git("merge-base", "HEAD", "main") or "HEAD"
    return {*git("diff", "--name-only", base).splitlines(), *git("ls-files", "--others", "--exclude-standard").splitlines()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--changed", action="store_true", help="only mutants of changed files")
    args = parser.parse_args()
    mutants = load_mutants()
    if unknown := set(args.ids) - {mutant.id for mutant in mutants}:
        parser.error(f"no mutant {', '.join(sorted(unknown))}: see {MUTANTS.relative_to(ROOT)}")
    if args.ids:
        mutants = [mutant for mutant in mutants if mutant.id in args.ids]
    if args.changed:
        changed = changed_files()
        mutants = [mutant for mutant in mutants if mutant.file in changed]
    counts = {"killed": 0, "survived": 0, "broken": 0}
    for mutant in mutants:
        outcome = run_mutant(mutant)
        counts[outcome.partition(":")[0]] += 1
        print(f"{outcome:8}  {mutant.id:32}  {mutant.test}", flush=True)
    print(", ".join(f"{n} {name}" for name, n in counts.items()))
    return int(counts["killed"] != len(mutants))


if __name__ == "__main__":
    sys.exit(main())
