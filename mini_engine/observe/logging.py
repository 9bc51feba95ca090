"""Logging of both processes: one format, one tag per process, on stderr; stdout is for results.

    12:34:56.789 [core] INFO scheduler: 4 requests preempted

Promises  setup() may be called again (the last call wins) and touches the `mini_engine` logger only: a program that embeds the engine
          keeps its own logging, and hears ours through the usual propagation when it never calls setup().

Beside the request's path, called by entrypoints/ and engine_core/proc.py.    vLLM: logger.py, logging_utils/
"""

import logging
import sys

ROOT = "mini_engine"


class _Formatter(logging.Formatter):
    def __init__(self, tag: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d [{tag}] %(levelname)s %(short_name)s: %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.short_name = record.name.removeprefix(f"{ROOT}.")
        return super().format(record)


def setup(tag: str, level: int | str = logging.INFO) -> None:
    """Log to stderr with `tag` ("api", "core") in every line. `level`: a name or number of the logging module."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(tag))
    logger = logging.getLogger(ROOT)
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
