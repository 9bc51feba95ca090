"""Logging: one line format on stderr, the process tag in it, stdout and the embedding program's own logging left alone."""

import logging
import re

import pytest

from mini_engine.observe.logging import ROOT, setup


@pytest.fixture(autouse=True)
def restore_logger() -> object:
    logger = logging.getLogger(ROOT)
    before = (logger.handlers, logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before


def test_a_line_carries_tag_level_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    root_handlers = list(logging.getLogger().handlers)
    setup("api")
    setup("core")  # the last call wins, and one line stays one line
    logging.getLogger("mini_engine.scheduler.scheduler").info("%d preempted", 4)
    logging.getLogger("mini_engine.x").debug("not at this level")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} \[core\] INFO scheduler\.scheduler: 4 preempted\n", err)
    assert logging.getLogger().handlers == root_handlers


def test_level_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    setup("api", "DEBUG")
    logging.getLogger("mini_engine.x").debug("seen")
    assert "DEBUG x: seen" in capsys.readouterr().err
