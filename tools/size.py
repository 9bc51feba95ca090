"""`make size`: code lines of the package, per chapter and in all, against the budgets of DESIGN R5. Exit 1 over a hard budget.

A code line, of Python or C, holds at least one token that is not a comment and not part of a docstring. Chapters own files by the longest
matching prefix below (DESIGN §5). The default path is what a request to `mini-engine serve` runs through with no option given, on a CPU
with a C compiler.

No vLLM counterpart.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGE = Path(__file__).resolve().parent.parent / "mini_engine"

DEFAULT_PATH_BUDGET = 6_000  #: hard
TOTAL_BUDGET = 12_000  #: hard
CHAPTER_BUDGET = 900  #: a warning
FILE_WARNING = 350  #: lines of one file, all of them
FILE_LIMIT = 450  #: hard; tests/test_rules.py holds it

#: path prefix under mini_engine/ → chapter; everything else at the top level is plain data and belongs to 01
CHAPTERS = {
    "": "01 one-request",
    "wire/": "02 wire-protocol",
    "transport/": "03 sockets-and-lifetimes",
    "engine_core/": "04 busy-loop",
    "scheduler/": "05 scheduler",
    "scheduler/async_scheduler.py": "09 overlap",
    "step.py": "05 scheduler",
    "kv_cache/": "06 kv-cache",
    "executor/": "07 forward",
    "worker/": "07 forward",
    "model/": "07 forward",
    "sampling/": "08 sampling",
    "llm/": "10 async-llm",
    "text/": "11 incremental-detokenization",
    "render/": "12 rendering",
    "server/": "13 http-and-sse",
    "bench/": "15 python-overhead",
}
#: what no request of the default path runs through: `mini-engine serve`, the default model, a chat request without options
NOT_DEFAULT = (
    "bench/",  # measures
    "entrypoints/commands.py",  # other commands, and the offline interface
    "entrypoints/chat.py",
    "entrypoints/engine.py",
    "entrypoints/llm.py",
    "entrypoints/model.py",
    "entrypoints/frontend_child.py",  # --frontend python|rust
    "entrypoints/supervise.py",
    "engine_core/inproc.py",
    "llm/llm_engine.py",
    "executor/mock.py",  # --executor mock
    "overlay.py",  # --overlay
    "cache.py",  # once, before the first start; then looked up
    "model/default_model.py",
    "model/gguf_",
    "model/build_kernels.py",
    "model/sdpa_attention.py",  # torch's attention and products: CUDA, --dtype, a machine without a compiler
    "model/linear_kernels.py",
    "model/int8_linear.py",  # --quantization int8
    "model/csrc/linear_int8.c",
    "scheduler/async_scheduler.py",  # CUDA, --async-scheduling on
    "render/convert_tokenizer.py",
    "server/completions.py",  # other routes, and calls to the engine that are no request
    "server/misc.py",
    "engine_core/utility.py",
    "llm/logprobs.py",  # only for a request that asks
    "llm/parallel_sampling.py",
    "sampling/logits_processors.py",
    "sampling/logprobs.py",
    "sampling/penalties.py",
    "sampling/topk_topp.py",
    "server/logprobs.py",
    "text/stop.py",
    "text/window_detokenizer.py",  # --overlay
)


def chapter_of(relative: str) -> str:
    """The chapter that owns mini_engine/<relative>."""
    return CHAPTERS[max((prefix for prefix in CHAPTERS if relative.startswith(prefix)), key=len)]


def c_code_lines(source: str) -> int:
    """Lines with more than a // comment; the project's C has no other kind."""
    return sum(bool(line.partition("//")[0].strip()) for line in source.splitlines())


def code_lines(source: str) -> int:
    """Lines of Python with code: no blanks, no comments, no docstrings."""
    lines: set[int] = set()
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def source_files(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*") if path.suffix in (".py", ".c", ".h"))


def measure(package: Path) -> tuple[Counter[str], Counter[str], int]:
    """Code lines and files per chapter, and the code lines of the default path."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    default = 0
    for path in source_files(package):
        relative = path.relative_to(package).as_posix()
        count = (code_lines if path.suffix == ".py" else c_code_lines)(path.read_text(encoding="utf-8"))
        lines[chapter_of(relative)] += count
        files[chapter_of(relative)] += 1
        default += 0 if relative.startswith(NOT_DEFAULT) else count
    return lines, files, default


def main() -> int:
    lines, files, default = measure(PACKAGE)
    table = Table(box=None, pad_edge=False)
    for column, justify in (("chapter", "left"), ("files", "right"), ("code lines", "right"), ("budget", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for chapter in sorted(lines):
        note = "" if lines[chapter] < CHAPTER_BUDGET else "over (a warning)"
        table.add_row(chapter, f"{files[chapter]}", f"{lines[chapter]:,}", f"{CHAPTER_BUDGET:,}", note)
    over = False
    for name, count, budget in (("default path", default, DEFAULT_PATH_BUDGET), ("all", lines.total(), TOTAL_BUDGET)):
        over |= count >= budget
        table.add_row(name, "", f"{count:,}", f"{budget:,}", "OVER BUDGET" if count >= budget else "")
    console = Console(width=100)
    console.print(table)
    for path in source_files(PACKAGE):
        if (length := len(path.read_text(encoding="utf-8").splitlines())) > FILE_WARNING:
            console.print(f"warning: {path.relative_to(PACKAGE.parent)} has {length} lines (warning {FILE_WARNING}, limit {FILE_LIMIT})")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
