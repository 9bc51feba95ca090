"""A tokenizer.json for a model that comes without one: made once by transformers, in a process of its own, and kept in the cache.

The front-end may not import transformers (seconds, and torch with it), and needs it only for this. The cache key covers the tokenizer
files' names, sizes and times, so a changed model is converted again; the file appears under its name only when complete.

Runs at start, before any request.    vLLM: tokenizers/hf.py (AutoTokenizer does the same on every start)
"""

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mini_engine.cache import cache_dir
from mini_engine.exceptions import VLLMValidationError

logger = logging.getLogger(__name__)

CONVERT_TIMEOUT_S = 300.0
SOURCES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tokenizer_config.json")
_PROGRAM = "import sys; from transformers import AutoTokenizer; AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"


def tokenizer_file(model_dir: Path) -> Path:
    """`model_dir`/tokenizer.json, or the cached conversion of the model's other tokenizer files.

    Raises VLLMValidationError when there is nothing to convert or transformers cannot.
    """
    ours = model_dir / "tokenizer.json"
    if ours.is_file():
        return ours
    sources = [path for name in SOURCES if (path := model_dir / name).is_file()]
    if all(path.name == "tokenizer_config.json" for path in sources):
        raise VLLMValidationError(
            f"no tokenizer in {model_dir}: neither tokenizer.json nor tokenizer.model, vocab.json or vocab.txt. "
            "Copy the model's tokenizer files there",
            parameter="model",
            value=str(model_dir),
        )
    key = hashlib.sha256(repr([(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in sources]).encode()).hexdigest()[:16]
    cached = cache_dir() / "tokenizers" / f"{model_dir.name}-{key}.json"
    if not cached.is_file():
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            _convert(model_dir, cached)
        except OSError as e:
            message = f"cannot keep a tokenizer in {cached.parent}: {e.strerror or e}; set MINI_ENGINE_CACHE to another place"
            raise VLLMValidationError(message) from e
    return cached


def _convert(model_dir: Path, target: Path) -> None:
    logger.info("%s has no tokenizer.json: converting its tokenizer once with transformers", model_dir)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-c", _PROGRAM, str(model_dir), scratch]
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, check=False)
            problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            problem = f"no result after {CONVERT_TIMEOUT_S:.0f} s"
        made = Path(scratch) / "tokenizer.json"
        if not made.is_file():
            raise VLLMValidationError(
                f"{model_dir} has no tokenizer.json and transformers could not make one: {problem}. Make it where that tokenizer loads: "
                "AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL), with a tokenizers-backed class",
                parameter="model",
                value=str(model_dir),
            )
        made.replace(target)
