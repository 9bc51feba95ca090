"""Logging: one line format on stderr, the process tag in it, stdout and the embedding program's own logging left alone."""

import logging
import re
from collections.abc import Iterator

import pytest

from mini_engine.observe.logging import ROOT, UVICORN, setup


@pytest.fixture(autouse=True)
def restore_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (ROOT, *UVICORN)]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, was in zip(loggers, before, strict=True):
        logger.handlers, logger.level, logger.propagate = was


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


def test_uvicorn_speaks_in_the_same_format(capsys: pytest.CaptureFixture[str]) -> None:
    setup("api", logging.WARNING)  # the level is our own loggers'
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", "/health", "1.1", 200)
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    access, warning = capsys.readouterr().err.splitlines()
    assert access.endswith('[api] INFO uvicorn.access: 127.0.0.1:1 - "GET /health HTTP/1.1" 200')
    assert warning.endswith("[api] WARNING uvicorn.error: Invalid HTTP request received.")
