"""Logging of every process: one format, one tag per process, on stderr; stdout is for results.

    12:34:56.789 [core] INFO scheduler: 4 requests preempted
    12:34:56.801 [api] INFO uvicorn.access: 127.0.0.1:41234 - "POST /v1/chat/completions HTTP/1.1" 200

Promises  setup() may be called again (the last call wins) and touches the `mini_engine` logger and uvicorn's two only: a program that
          embeds the engine keeps its own logging, and hears ours through the usual propagation when it never calls setup().

Beside the request's path, called by entrypoints/ and engine_core/proc.py.    vLLM: logger.py, logging_utils/
"""

import logging
import sys

ROOT = "mini_engine"
#: the loggers of uvicorn that have something to say, and from which level on; access: a line per HTTP request
UVICORN = {"uvicorn.error": logging.WARNING, "uvicorn.access": logging.INFO}


class _Formatter(logging.Formatter):
    def __init__(self, tag: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d [{tag}] %(levelname)s %(short_name)s: %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.short_name = record.name.removeprefix(f"{ROOT}.")
        return super().format(record)


def setup(tag: str, level: int | str = logging.INFO) -> None:
    """Log to stderr with `tag` ("api", "core") in every line. `level`, of our own: a name or number of the logging module."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(tag))
    for name, least in {ROOT: level, **UVICORN}.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(least)
        logger.propagate = False
