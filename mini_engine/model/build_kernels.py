"""Building the C kernels: at the first start, with this machine's compiler; later starts look the library up.

Promises  a library is for one source, compiler and processor; its name in the user's cache says which, and what bytes it must have, so a
          damaged file is built anew. Two processes that build at once both get a whole one. A cache that takes nothing costs a build at
          each start, and is said.

Stands before a request's path.    vLLM: CMakeLists.txt, cmake/cpu_extension.cmake (there at installation)
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mini_engine.cache import cache_dir

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
    return shlex.split(os.environ.get("CC") or "") or ["cc"]


def build(command: list[str]) -> ctypes.CDLL:
    """The library, compiled with `command` unless it is there. Raises OSError or SubprocessError."""
    macros = _run(*command, *FLAGS, "-E", "-dM", "-x", "c", os.devnull)  # they name the compiler's version and the processor's instructions
    parts = [repr((command, FLAGS)).encode(), macros, *(path.read_bytes() for path in sorted(CSRC.glob("*.[ch]")))]
    name = f"kernels-{_digest(b''.join(parts))}"
    for path in cache_dir().glob(f"{name}-*.so"):
        with contextlib.suppress(OSError):  # a directory, or not ours to read
            if path.stem == f"{name}-{_digest(path.read_bytes())}":
                return ctypes.CDLL(str(path))
    logger.info("building the CPU kernels with %s: once, some seconds", shlex.join(command))
    for old in Path(tempfile.gettempdir()).glob("mini_engine-build-*"):  # of a start that was killed
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > 2 * BUILD_TIMEOUT_S:
                shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix="mini_engine-build-") as scratch, ThreadPoolExecutor() as pool:
        sources, built = sorted(CSRC.glob("*.c")), Path(scratch, "kernels.so")
        objects = [f"{scratch}/{source.stem}.o" for source in sources]
        list(pool.map(lambda source, to: _run(*command, *FLAGS, "-x", "c", "-c", str(source), "-o", to), sources, objects))
        _run(*command, "-shared", *objects, "-lm", "-o", str(built))  # without -fopenmp: cpu_kernels.load() brings it
        library = ctypes.CDLL(str(built))
        _keep(built.read_bytes(), name)
    return library


def _keep(content: bytes, name: str) -> None:
    path = cache_dir() / f"{name}-{_digest(content)}.so"
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            part.unlink()
        message = "the C kernels cannot be kept in %s (%s), so each start builds them; set MINI_ENGINE_CACHE to another place"
        logger.warning(message, path.parent, e)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _run(*command: str) -> bytes:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=BUILD_TIMEOUT_S).stdout
    except FileNotFoundError as e:
        raise OSError(f"there is no {command[0]!r}; install gcc, or name one with CC") from e
