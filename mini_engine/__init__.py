"""mini_engine: a compact LLM serving engine with the architecture of vLLM V1 (reference: 0.32.0).

`from mini_engine import LLM, SamplingParams` is the offline interface; `mini-engine serve` the online one. Importing the package
costs nothing: LLM (which brings both sides of the engine) is loaded when it is first named.
"""

from typing import TYPE_CHECKING, Any

from mini_engine.outputs import CompletionOutput, RequestOutput
from mini_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mini_engine.entrypoints.llm import LLM

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from mini_engine.entrypoints.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
