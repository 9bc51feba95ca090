"""Overlay: a learner's file in place of one of our parts, at six named seams. The only module that reads `config.overlay`.

Every seam names what the file must define; `load()` imports the file under a private module name and returns that object, so two
engines in one process can run different overlays. A missing file or name is the user's error, told with both.

    seam                  the file defines; in place of
    wire.codec            encode(obj: lists, maps, scalars) → bytes-like; msgspec's encoder of frame 0 in wire/codec.py
    scheduler.schedule    schedule(scheduler: Scheduler) → SchedulerOutput; Scheduler.schedule
    kv_cache.block_pool   class BlockPool, all of its methods; kv_cache/block_pool.py::BlockPool
    text.detokenizer      class Detokenizer(tokenizer: Tokenizer, request: EngineCoreRequest, check_stop: as the next line), with the
                          methods and attributes of text/detokenizer.py::IncrementalDetokenizer
    text.stop             check_stop_strings(output_text: str, new_char_count: int, stop: list[str], include_in_output: bool)
                          → (stop string, length to cut the text to; -1: all) | None; text/stop.py::check_stop_strings
    server.sse            encode_event(payload: bytes | str, JSON or [DONE]) → bytes of one event; server/sse.py::encode_event

Beside the request's path. No vLLM counterpart.
"""

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_engine.exceptions import VLLMValidationError

logger = logging.getLogger(__name__)

_SEAM_OBJECTS = {
    "wire.codec": "encode",
    "scheduler.schedule": "schedule",
    "kv_cache.block_pool": "BlockPool",
    "text.detokenizer": "Detokenizer",
    "text.stop": "check_stop_strings",
    "server.sse": "encode_event",
}


def load(overlay: Mapping[str, str], seam: str, ours: Any) -> Any:
    """The object in force at `seam`: `ours`, or the one the overlay file defines.

    Raises VLLMValidationError when the file is missing, fails to import, or lacks the name the seam asks for.
    """
    path = overlay.get(seam)
    if path is None:
        return ours
    name = _SEAM_OBJECTS[seam]
    file = Path(path)
    if not file.is_file():
        raise VLLMValidationError(f"overlay {seam}={path}: no such file", parameter="overlay", value=path)
    spec = importlib.util.spec_from_file_location(f"mini_engine_overlay_{seam.replace('.', '_')}", file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise VLLMValidationError(f"overlay {seam}={path}: {type(e).__name__}: {e}", parameter="overlay", value=path) from e
    try:
        theirs = getattr(module, name)
    except AttributeError:
        raise VLLMValidationError(f"overlay {seam}={path}: the file must define `{name}`", parameter="overlay", value=path) from None
    logger.warning("overlay: %s comes from %s, not from mini_engine", seam, path)
    return theirs
