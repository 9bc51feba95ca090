"""conftest.py's promises, on small suites run by a pytest of their own."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.server.serving import wait_ended

ROOT = Path(__file__).resolve().parent.parent
HEADER = "import subprocess, sys, threading\nimport pytest\nfrom tests.not_run import not_run\n\n"

WAYS_OUT = {
    "skip_mark": "@pytest.mark.skip(reason='later')\ndef test_x(): pass\n",
    "skip_call": "def test_x(): pytest.skip('no such device')\n",
    "importorskip": "pytest.importorskip('no_such_package')\n",
    "xfail": "@pytest.mark.xfail\ndef test_x(): assert False\n",
    "xpass": "@pytest.mark.xfail\ndef test_x(): pass\n",
    "xfail_call": "def test_x(): pytest.xfail('known')\n",
    "undeclared": "def test_x(): not_run('slow', 'a name that not_run.toml lacks')\n",
}


def run_suite(folder: Path, **bodies: str) -> subprocess.CompletedProcess[str]:
    for name, body in bodies.items():
        (folder / f"test_{name}.py").write_text(HEADER + body)
    options = ["-q", "-ra", "-p", "tests.conftest", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=50)


def test_a_declared_check_is_not_run_and_says_why(tmp_path: Path) -> None:
    run = run_suite(tmp_path, gpu='def test_ok(): pass\ndef test_gpu(): not_run("gpu", "no CUDA device")\n')
    assert run.returncode == 0, run.stdout
    assert "not run: gpu: no CUDA device (1 test)" in run.stdout


def test_every_other_way_out_is_a_failure(tmp_path: Path) -> None:
    run = run_suite(tmp_path, **WAYS_OUT)
    assert run.returncode == 1, run.stdout
    for name in WAYS_OUT:
        assert any(line.startswith(("FAILED", "ERROR")) and f"test_{name}.py" in line for line in run.stdout.splitlines()), (
            name,
            run.stdout,
        )


LEAKS = """
ORPHAN = [sys.executable, "-c", "import time; time.sleep(600)"]
PARENT = f"import subprocess; print(subprocess.Popen({ORPHAN!r}, start_new_session=True, stdout=subprocess.DEVNULL).pid)"

def test_leaks():
    threading.Thread(target=threading.Event().wait, name="core-loop", daemon=True).start()
    with open("pid", "w") as file:
        file.write(subprocess.check_output([sys.executable, "-c", PARENT], text=True))
"""


def test_what_is_left_running_fails_the_run_and_is_ended(tmp_path: Path) -> None:
    """An orphan too: its parent is gone, only the environment tells whose it was."""
    run = run_suite(tmp_path, leaks=LEAKS)
    assert run.returncode == 1, run.stdout
    pid = int((tmp_path / "pid").read_text())
    assert f"left running by a test: processes {{{pid}:" in run.stdout
    assert "threads ['core-loop']" in run.stdout
    wait_ended([process for process in psutil.process_iter() if process.pid == pid])
