"""tools/gpu_check.py on CPU and a tiny shape: it passes, it fails when the model is wrong, and it needs few packages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

#: requirements of mini_engine that a machine with torch, transformers, tokenizers, msgspec, pydantic and numpy may lack
BLOCKED = ("zmq", "fastapi", "starlette", "uvicorn", "prometheus_client", "gguf", "setproctitle", "psutil", "rich", "typer")
#: what transformers itself imports of them when it is there
LEFT_TO_TRANSFORMERS = ("rich", "typer", "psutil")


def gpu_check(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The tool in an interpreter where the blocked packages cannot be imported once transformers is loaded."""
    code = f"""
import runpy, sys
for name in {set(BLOCKED) - set(LEFT_TO_TRANSFORMERS)!r}:
    sys.modules[name] = None  # importing it raises ImportError
import torch, transformers
from transformers import Qwen3ForCausalLM
for name in {LEFT_TO_TRANSFORMERS!r}:
    sys.modules[name] = None
torch.set_num_threads(1)
sys.path.insert(0, {str(ROOT)!r})
{before}
sys.argv = ["gpu_check.py", "--tiny", "--device", "cpu", *{arguments!r}]
runpy.run_path({str(ROOT / "tools" / "gpu_check.py")!r}, run_name="__main__")
"""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=55)


def test_passes_with_nothing_but_the_named_packages() -> None:
    run = gpu_check("--dtypes", "float32", "--batches", "1", "8")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["checks"]["float32"]["passed"] and report["checks"]["float32"]["tokens"] == 256
    assert report["tokens_per_s"].keys() == {"1", "8"} and min(report["tokens_per_s"].values()) > 0


@pytest.mark.parametrize(
    "fault",
    [
        "from mini_engine.model.layers import RotaryEmbedding\nRotaryEmbedding.rotate_ = lambda self, x, cos, sin: None",
        "from mini_engine.worker.block_table import BlockTable\nold = BlockTable.slot_mapping\n"
        "BlockTable.slot_mapping = lambda self, rows, positions: old(self, rows, positions // 2)",
    ],
    ids=["no-rotary", "wrong-slots"],
)
def test_fails_when_the_model_is_wrong(fault: str) -> None:
    run = gpu_check("--dtypes", "float32", "--batches", "1", before=fault)
    assert run.returncode == 1, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["checks"]["float32"]["wrong"] > 20
