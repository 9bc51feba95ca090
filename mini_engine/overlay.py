"""Overlay: a learner's file in place of one of our parts, at six named seams. The only module that reads `config.overlay`.

Every seam names what the file must define; `load()` imports the file under a private module name and returns that object, so two
engines in one process can run different overlays. A missing file or name is the user's error, told with both; the command line and LLM
call `check()` before they start anything.

    seam                  the file defines; in place of
    wire.codec            encode(obj: lists, maps, scalars) → bytes-like; msgspec's encoder of frame 0 in wire/codec.py
    scheduler.schedule    schedule(scheduler: Scheduler) → SchedulerOutput; Scheduler.schedule
    kv_cache.block_pool   class BlockPool, all of its methods; kv_cache/block_pool.py::BlockPool
    text.detokenizer      class Detokenizer(tokenizer: Tokenizer, request: EngineCoreRequest, check_stop: as the next line), with the
                          methods and attributes of text/detokenizer.py::IncrementalDetokenizer
    text.stop             (for requests with `stop`)
                          check_stop_strings(output_text: str, new_char_count: int, stop: list[str], include_in_output: bool)
                          → (stop string, length to cut the text to; -1: all) | None; text/stop.py::check_stop_strings
    server.sse            encode_event(payload: bytes | str, JSON or [DONE]) → bytes of one event; server/sse.py::encode_event

Beside the request's path. No vLLM counterpart.
"""

import logging
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from mini_engine.exceptions import VLLMValidationError

logger = logging.getLogger(__name__)

SEAMS = {  #: seam → what the file must define
    "wire.codec": "encode",
    "scheduler.schedule": "schedule",
    "kv_cache.block_pool": "BlockPool",
    "text.detokenizer": "Detokenizer",
    "text.stop": "check_stop_strings",
    "server.sse": "encode_event",
}


def load(overlay: Mapping[str, str], seam: str, ours: Any) -> Any:
    """The object in force at `seam`: `ours`, or the one the overlay file defines. Raises VLLMValidationError as check()."""
    path = overlay.get(seam)
    if path is None:
        return ours
    theirs = _import(seam, path)
    logger.warning("overlay: %s comes from %s, not from mini_engine", seam, path)
    return theirs


def check(overlay: Mapping[str, str]) -> None:
    """Import every file now: a mistake in one is known before a model is loaded, in the process that the user looks at.

    Raises VLLMValidationError when a file is missing, fails to import, or lacks the name its seam asks for.
    """
    for seam, path in overlay.items():
        _import(seam, path)


def _import(seam: str, path: str) -> Any:
    def wrong(why: str) -> VLLMValidationError:
        return VLLMValidationError(f"overlay {seam}={path}: {why}", parameter="overlay", value=path)

    if not Path(path).is_file():
        raise wrong("no such file")
    loader = SourceFileLoader(f"mini_engine_overlay_{seam.replace('.', '_')}", path)  # whatever the file's suffix is
    module = ModuleType(loader.name)
    module.__file__ = path
    try:
        loader.exec_module(module)
    except Exception as e:
        raise wrong(f"{type(e).__name__}: {e}") from e
    if not hasattr(module, SEAMS[seam]):
        raise wrong(f"the file must define `{SEAMS[seam]}`")
    return getattr(module, SEAMS[seam])
