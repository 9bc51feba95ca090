"""A check has three outcomes: passed, failed, not run. This is the only way to the third; conftest.py fails every other skip."""

import tomllib
from pathlib import Path
from typing import NoReturn

import pytest

PREFIX = "not run: "
MAY_BE_NOT_RUN: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def not_run(name: str, reason: str) -> NoReturn:
    """End this test as not run. `name` is a key of not_run.toml; `reason` is what is missing here, today, for the summary."""
    assert name in MAY_BE_NOT_RUN, f"{name!r} is not in tests/not_run.toml: a check that needs it must fail, not be left out"
    pytest.skip(f"{PREFIX}{name}: {reason}")
