"""tools/gpu_check.py on CPU and a tiny shape: it passes, it fails when the model is wrong, and it needs few packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

#: what the tool and all of mini_engine that it runs may import; transformers brings safetensors along
NAMED = ("torch", "transformers", "tokenizers", "msgspec", "pydantic", "numpy", "safetensors", "mini_engine")


def gpu_check(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The tool in an interpreter where its own files and mini_engine's can import nothing but the standard library and NAMED."""
    code = f"""
import builtins, runpy, sys
real_import = builtins.__import__
def named_only(name, globals=None, locals=None, fromlist=(), level=0):
    importer, top = (globals or {{}}).get("__name__", ""), name.split(".")[0]
    if importer.split(".")[0] in ("mini_engine", "__main__") and level == 0 and top not in {{*sys.stdlib_module_names, *{NAMED!r}}}:
        raise ImportError(f"{{importer}} imports {{name}}")
    return real_import(name, globals, locals, fromlist, level)
builtins.__import__ = named_only
import torch
torch.set_num_threads(1)
sys.path.insert(0, {str(ROOT)!r})
{before}
sys.argv = ["gpu_check.py", "--tiny", "--device", "cpu", *{arguments!r}]
runpy.run_path({str(ROOT / "tools" / "gpu_check.py")!r}, run_name="__main__")
"""
    environment = os.environ | {"CC": "none"}  # torch's operators, as on a GPU
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=55)


@pytest.mark.parametrize(
    "before",
    ["", "from mini_engine.executor.abstract import Executor\nExecutor.max_concurrent_batches = 2"],
    ids=["as-on-cpu", "overlapped-as-on-cuda"],
)
def test_passes_with_nothing_but_the_named_packages(before: str) -> None:
    run = gpu_check("--dtypes", "float32", "--batches", "1", "8", before=before)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)  # one line, nothing else
    assert report["checks"]["float32"]["passed"] and report["checks"]["float32"]["tokens"] == 256
    assert report["tokens_per_s"].keys() == {"1", "8"} and min(report["tokens_per_s"].values()) > 0


@pytest.mark.parametrize(
    "fault",
    [
        "from mini_engine.model import sdpa_attention\nsdpa_attention.rotate_ = lambda x, cos, sin: None",
        "from mini_engine.model.sdpa_attention import SDPABackend\nold = SDPABackend.build\n"
        "SDPABackend.build = lambda self, rows, lens, contexts, positions, table: old(self, rows, lens, contexts, positions // 2, table)",
    ],
    ids=["no-rotary", "wrong-slots"],
)
def test_fails_when_the_model_is_wrong(fault: str) -> None:
    run = gpu_check("--dtypes", "float32", "--batches", "1", before=fault)
    assert run.returncode == 1, run.stderr
    assert json.loads(run.stdout)["checks"]["float32"]["wrong"] > 20
