"""The Makefile's targets, as far as they go without installing anything."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}  # `make test` runs us
    return subprocess.run(["make", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=50)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout with nothing set up, in a path with a space."""
    folder = tmp_path / "a clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.parametrize("target", ["serve", "chat", "model", "test", "soak", "interop", "check", "size", "oracle"])
def test_every_target_sets_up_first_and_passes_arguments(copy: Path, target: str) -> None:
    run = make(copy, "-n", target, "ARGS=--one two")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert any("-m venv" in line for line in lines[:-1])
    assert target in lines[-1] or target == "test"
    if target not in ("check", "size"):
        assert lines[-1].endswith("--one two")


def test_a_set_up_that_is_new_enough_is_left_alone(copy: Path) -> None:
    (copy / ".venv").mkdir()
    (copy / ".venv" / "installed").touch()
    assert len(make(copy, "-n", "size").stdout.splitlines()) == 1
    os.utime(copy / "constraints.txt", (2**31, 2**31))
    assert len(make(copy, "-n", "size").stdout.splitlines()) > 1


def test_an_old_python_is_refused_by_name(copy: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    run = make(copy, "size", f"PYTHON={old}")
    assert run.returncode != 0
    assert f"Python 3.11 or newer is needed, PYTHON={old} is not" in run.stderr
    assert not (copy / ".venv").exists()


def test_no_python_at_all_is_said(copy: Path) -> None:
    run = make(copy, "size", "PYTHON=")
    assert run.returncode != 0
    assert "Python 3.11 or newer is needed and none was found" in run.stderr
