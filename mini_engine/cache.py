"""Where what is made once is kept: the default model, its conversions, the CPU kernels.

Beside a request's path, imported by both sides.    vLLM: envs.py::VLLM_CACHE_ROOT
"""

import os
from pathlib import Path

from mini_engine.exceptions import VLLMValidationError


def cache_dir() -> Path:
    """`$MINI_ENGINE_CACHE`, or `~/.cache/mini_engine`; it need not exist. Raises VLLMValidationError where there is no home."""
    try:
        return Path(os.environ.get("MINI_ENGINE_CACHE") or Path.home() / ".cache" / "mini_engine")
    except RuntimeError as e:
        raise VLLMValidationError(f"no place for the cache: {e} Set MINI_ENGINE_CACHE to a directory") from e
