"""Building the C kernels: once, with this machine's compiler, before the first start.

Promises  a library is for one source, compiler and processor, and is kept in the user's cache under a name made of the three; two
          processes that build it at once both get a whole one.

Stands before a request's path.    vLLM: CMakeLists.txt, cmake/cpu_extension.cmake (there at installation)
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mini_engine.model.default_model import cache_dir

logger = logging.getLogger(__name__)

CSRC = Path(__file__).parent / "csrc"
FLAGS = [
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fwrapv"),
    "-ffp-contract=fast",  # a * b + c is one operation, rounded once …
    *(["--param=avoid-fma-max-bits=0"] if platform.machine() == "x86_64" else []),  # … in every loop: the same bits for any number of rows
    "-Wno-psabi",  # all that takes vectors is inlined
]
BUILD_TIMEOUT_S = 120.0


def compiler() -> list[str]:
    """The command in CC, or cc. Raises ValueError."""
    return shlex.split(os.environ.get("CC") or "cc")


def build(command: list[str]) -> ctypes.CDLL:
    """The library, compiled with `command` unless it is there and loads. Raises OSError or SubprocessError."""
    macros = _run(*command, *FLAGS, "-E", "-dM", "-x", "c", os.devnull)  # they name the compiler's version and the processor's instructions
    sources = sorted(CSRC.glob("*.c"))
    key = hashlib.sha256(b"".join([repr((command, FLAGS)).encode(), macros, *(path.read_bytes() for path in sorted(CSRC.glob("*.[ch]")))]))
    path = cache_dir() / f"kernels-{key.hexdigest()[:16]}.so"
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(path))
    logger.info("building the CPU kernels with %s: once, some seconds", shlex.join(command))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch, ThreadPoolExecutor() as pool:
        objects = [f"{scratch}/{source.stem}.o" for source in sources]
        list(pool.map(lambda source, to: _run(*command, *FLAGS, "-x", "c", "-c", str(source), "-o", to), sources, objects))
        _run(*command, "-shared", *objects, "-lm", "-o", f"{scratch}/kernels.so")  # without -fopenmp: cpu_kernels.load() brings it
        library = ctypes.CDLL(f"{scratch}/kernels.so")
        os.replace(f"{scratch}/kernels.so", path)
    return library


def _run(*command: str) -> bytes:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=BUILD_TIMEOUT_S).stdout
