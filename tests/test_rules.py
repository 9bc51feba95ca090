"""The project's rules, R1 to R6 of CONTRIBUTING.md, where import-linter (which CI runs beside this) does not reach."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.not_run import MAY_BE_NOT_RUN
from tools.size import CHAPTERS, FILE_LIMIT, c_code_lines, chapter_of, code_lines, source_files

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mini_engine"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [path.relative_to(PACKAGE).as_posix() for path in FILES]

FRONT_END = {"server", "parsers", "render", "llm", "text", "transport", "gateway"}
ENGINE = {"engine_core", "scheduler", "kv_cache", "executor", "worker", "model", "sampling", "grammar", "speculation"}
BOTH_SIDES = {"entrypoints"}
AROUND = {"wire", "observe", "bench"}
HEAVY = {"torch", "transformers", "xgrammar"}


def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def imported_names(path: Path) -> set[str]:
    """Every module that `path` imports anywhere, under TYPE_CHECKING and inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def modules_after(code: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that ran `code`."""
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert run.returncode == 0, run.stderr
    return {name.partition(".")[0] for name in run.stdout.split()}


# ── R1: the wire is the only bridge ─────────────────────────────────────────────────────────────────────


def test_front_end_loads_no_torch() -> None:
    """Not even through a library, which import-linter cannot see: every front-end module imported in one fresh interpreter."""
    modules = [f"mini_engine.{name.removesuffix('.py').replace('/', '.')}" for name in NAMES if name.split("/")[0] in FRONT_END]
    assert modules
    assert not HEAVY & modules_after("\n".join(f"import {module.removesuffix('.__init__')}" for module in modules))


def test_mock_engine_loads_no_torch() -> None:
    """The engine process with the mock device: what it imports up to a ready EngineCoreProc class and executor class."""
    code = (
        "import mini_engine.engine_core.proc\n"
        "from mini_engine.config import EngineConfig\n"
        "from mini_engine.executor.abstract import Executor\n"
        "Executor.get_class(EngineConfig(executor='mock'))"
    )
    assert not HEAVY & modules_after(code)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_sides_do_not_name_each_other(path: Path) -> None:
    """Not in annotations either: import-linter leaves TYPE_CHECKING imports out."""
    folder = path.relative_to(PACKAGE).parts[0]
    if folder in FRONT_END:
        forbidden = {f"mini_engine.{name}" for name in ENGINE | BOTH_SIDES} | HEAVY
    elif folder in ENGINE:
        forbidden = {f"mini_engine.{name}" for name in FRONT_END | BOTH_SIDES}
    else:
        return
    found = {name for name in imported_names(path) if any(name == bad or name.startswith(f"{bad}.") for bad in forbidden)}
    assert not found, f"{path.relative_to(ROOT)} imports {', '.join(sorted(found))}"


def test_folders_are_the_designs_and_linted() -> None:
    """A new folder must be one of the reserved names, and a line of the import contracts."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= FRONT_END | ENGINE | BOTH_SIDES | AROUND
    contracts = tomllib.loads(source(ROOT / "pyproject.toml"))["tool"]["importlinter"]["contracts"]
    front, engine = contracts[0], contracts[1]
    assert {name.removeprefix("mini_engine.") for name in front["source_modules"]} == folders & FRONT_END
    assert {name.removeprefix("mini_engine.") for name in engine["source_modules"]} == folders & ENGINE
    assert {f"mini_engine.{name}" for name in folders & ENGINE} | HEAVY <= set(front["forbidden_modules"])
    assert {f"mini_engine.{name}" for name in folders & FRONT_END} <= set(engine["forbidden_modules"])


# ── R5: one file, one reason; the whole is compact ──────────────────────────────────────────────────────


@pytest.mark.parametrize("path", source_files(PACKAGE), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_file_size(path: Path) -> None:
    lines = len(source(path).splitlines())
    assert lines <= FILE_LIMIT, f"{path.relative_to(ROOT)} has {lines} lines, the limit is {FILE_LIMIT}: split it by reason"


def test_code_lines_counts_code_only() -> None:
    text = '"""Doc.\n\nMore."""\n\nx = 1  # why\n# alone\n\n\ndef f(\n    a,\n):\n    """Doc."""\n    return """two\nlines"""\n'
    assert code_lines(text) == 6  # x; def f(, a, ):; return over two lines
    assert c_code_lines("// Doc.\n\nint x;  // why\n    // alone\nint f(void) {\n}\n") == 3


def test_chapters_own_every_file_by_longest_prefix() -> None:
    assert chapter_of("config.py").startswith("01")
    assert chapter_of("step.py") == chapter_of("scheduler/scheduler.py")
    assert all(prefix == "" or (PACKAGE / prefix).exists() for prefix in CHAPTERS), "a chapter of tools/size.py owns what is not there"


# ── R6 and house rules ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [path for path in FILES if source(path).strip()], ids=str)
def test_module_docstring(path: Path) -> None:
    """A sentence first; then, unless the file only re-exports, the vLLM counterpart, or that there is none."""
    docstring = ast.get_docstring(ast.parse(source(path)))
    assert docstring, "no module docstring"
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    assert re.search(r"[.:]( |$)", paragraph), f"does not start with a sentence: {paragraph!r}"
    if path.name not in ("__init__.py", "__main__.py"):
        assert "vLLM" in docstring, "does not say which part of vLLM it mirrors (or: No vLLM counterpart)"


def test_c_files_are_held_to_the_same() -> None:
    """Opened by a comment that names vLLM's counterpart; // comments only; lines no longer than Python's. More: test_cpu_kernels.py."""
    for path in (p for p in source_files(PACKAGE) if p.suffix != ".py"):
        head = source(path).partition("\n\n")[0]
        assert all(line.startswith("//") for line in head.splitlines()) and "vLLM:" in head, path.name
        assert "/*" not in source(path) and max(map(len, source(path).splitlines())) <= 140, path.name


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_global_state(path: Path) -> None:
    """No `global` statement, and no module-level container that looks made to be filled."""
    tree = ast.parse(source(path))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        empty = isinstance(value, ast.Dict | ast.List) and not ast.unparse(value).strip("[]{}")
        assert not empty, f"line {node.lineno}: a module-level {ast.unparse(node)!r} is state shared by two engines"


def test_no_machine_paths_or_registries() -> None:
    """Nothing that only holds on one machine, in what a fresh clone runs."""
    for name in ("Makefile", ".ci/run", "pyproject.toml", "constraints.txt"):
        text = source(ROOT / name)
        assert not re.search(r"https?://|(?<![\w.$])/(root|home|work|tmp|opt)/", text), name


def test_not_run_names() -> None:
    assert set(MAY_BE_NOT_RUN) == {"gpu", "stock-vllm", "downloads"}
