"""Errors that cross layers: what a caller can do about each decides the class.

    MiniEngineError
    ├── VLLMValidationError (also ValueError)   the request is wrong: 400, names the parameter and shows the value
    ├── EngineGenerateError                     this request failed in the engine, the others go on: 500
    └── EngineDeadError                         the EngineCore process is gone: every waiter gets it, /health is 503

Stands beside the request's path, imported by anyone.    vLLM: exceptions.py, v1/engine/exceptions.py
"""

from reprlib import repr as short
from typing import Any, Literal, get_args, get_origin


class MiniEngineError(Exception):
    """Root of every error that this package raises on purpose."""


class VLLMValidationError(MiniEngineError, ValueError):
    """A request or an option that cannot be served as asked.

    A ValueError, so that msgspec and pydantic report it with the path of the field that was being decoded.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


def wrong_type(parameter: str, kind: Any, value: object) -> VLLMValidationError:
    """`value` is not of the annotated type `kind`."""
    allowed = f"one of {', '.join(map(str, get_args(kind)))}" if get_origin(kind) is Literal else getattr(kind, "__name__", str(kind))
    if get_origin(kind) not in (None, Literal):  # list[int] has a __name__ too, "list"
        allowed = str(kind)
    return VLLMValidationError(f"{parameter} must be {allowed}, got {short(value)}", parameter=parameter, value=value)


class EngineGenerateError(MiniEngineError):
    """One request failed inside the engine (finish_reason "error"); the engine goes on."""


class EngineDeadError(MiniEngineError):
    """The EngineCore process is gone or unusable. Nothing that was in flight will be answered."""

    def __init__(self, message: str = "EngineCore died") -> None:
        super().__init__(message)
