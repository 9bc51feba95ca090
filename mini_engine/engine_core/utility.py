"""Utility calls: the methods of EngineCore that a front-end may call by name, and how each call gets exactly one answer.

Promises  only methods marked @utility can be called; whatever the name, the arguments or the result, the caller gets a result or a
          failure_message. It must: a front-end waits for the reply without a limit, and an answer that cannot be encoded would
          otherwise be found out by the output thread, too late (WIRE T2, T4).
vLLM: v1/engine/core.py::EngineCoreProc._invoke_utility_method, which calls any attribute by name (WIRE T18)
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from mini_engine.wire.codec import MsgpackEncoder
from mini_engine.wire.messages import UtilityOutput, UtilityResult

logger = logging.getLogger(__name__)

_Method = TypeVar("_Method", bound=Callable[..., Any])


def utility(method: _Method) -> _Method:
    """Put a method on the allow-list. It runs on the core-loop thread, between two steps; its result must have a wire form."""
    method._is_utility = True  # type: ignore[attr-defined]
    return method


def utility_names(engine: object) -> list[str]:
    return [name for name in dir(type(engine)) if hasattr(getattr(type(engine), name), "_is_utility")]


def invoke_utility(engine: object, call_id: int, method: str, args: list[Any]) -> UtilityOutput:
    """Call a utility; never raises. `args` are builtins, as decoded."""
    try:
        if method not in utility_names(engine):
            raise AttributeError(f"not a utility of this engine; it has {', '.join(utility_names(engine))}")
        output = UtilityOutput(call_id, None, UtilityResult(None, getattr(engine, method)(*args)))
        MsgpackEncoder().encode(output)
        return output
    except Exception as e:
        logger.warning("utility %.80s%.80r failed: %s: %s", method, tuple(args), type(e).__name__, e)
        return UtilityOutput(call_id, f"Call to {method:.80} method failed: {e}")
