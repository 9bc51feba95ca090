"""The field law of DESIGN §2: what happens to every field of a request body, named once.

    (a) used                     declared in protocol.py: validated, then acted on
    (b) without effect           WITHOUT_EFFECT: bookkeeping of OpenAI's own service; accepted and dropped
    (c) known but not built      NOT_BUILT_*: 400 naming it, unless its value changes nothing ("neutral")
    (d) anything else            400 naming it

A null is the same as leaving the field out, everywhere. So no parameter is ever accepted and silently ignored.

Stands at form 1 of a request, before pydantic.    vLLM: accepts unknown fields (OpenAIBaseModel, extra="allow")
"""

from collections.abc import Collection, Mapping
from typing import Any

from mini_engine.exceptions import VLLMValidationError

NotBuilt = Mapping[str, tuple[object, ...]]  #: field → the values, besides null, that ask for nothing

#: (b) they name, bill, store or route a request; by definition no answer depends on them
WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})


def _neutral(names: str, *values: object) -> dict[str, tuple[object, ...]]:
    return dict.fromkeys(names.split(), values)


#: (c)
NOT_BUILT_COMMON = (
    _neutral("truncate_prompt_tokens truncation_side prompt_logprobs session_id return_mm_kwargs repetition_detection")
    | _neutral("structured_outputs kv_transfer_params ec_transfer_params vllm_xargs", {})
    | _neutral("use_beam_search watermarking return_token_offsets", False)
    | _neutral("response_format", {"type": "text"})
    | _neutral("length_penalty", 1.0)
    | _neutral("logprob_token_ids", [])
    | _neutral("spaces_between_special_tokens", True)
    | _neutral("routed_experts_prompt_start", 0)
    | _neutral("mm_payload", "tensors")
    | _neutral("thinking_token_budget", -1)
    | _neutral("stream_interval", 1)
)
NOT_BUILT_CHAT = (
    NOT_BUILT_COMMON
    | _neutral("audio prediction reasoning_effort web_search_options prompt_cache_retention")
    | _neutral("tools functions documents", [])
    | _neutral("tool_choice function_call", "none", "auto")  # with no tools, both mean: answer in text
    | _neutral("parallel_tool_calls", True, False)
    | _neutral("modalities", ["text"])
    | _neutral("verbosity", "medium")
    | _neutral("include_reasoning", True)
    | _neutral("echo return_prompt_text", False)
    | _neutral("media_io_kwargs mm_processor_kwargs", {})
)
NOT_BUILT_COMPLETION = NOT_BUILT_COMMON | _neutral("best_of", 1) | _neutral("suffix", "") | _neutral("prompt_embeds", [])
NOT_BUILT_MESSAGE = (
    _neutral("tool_call_id function_call refusal audio")
    | _neutral("tool_calls annotations", [])
    | _neutral("reasoning reasoning_content", "")
)
NOT_BUILT_STREAM_OPTIONS = _neutral("continuous_usage_stats include_obfuscation", False)


def _same(a: object, b: object) -> bool:
    """Equal as JSON values: 1 and 1.0 are, 1 and true are not."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def apply_field_law(
    body: Mapping[str, Any],
    used: Collection[str],
    not_built: NotBuilt,
    *,
    where: str = "",
    without_effect: Collection[str] = WITHOUT_EFFECT,
) -> dict[str, Any]:
    """The fields of `body` that are used and not null. `where` ("messages[0].") goes before the names in messages.

    Raises VLLMValidationError naming the first field that cannot be honoured.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in used:
            if value is not None:
                kept[name] = value
        elif name in not_built:
            if value is not None and not any(_same(value, neutral) for neutral in not_built[name]):
                neutral = f" (only {' or '.join(map(repr, not_built[name]))} or null)" if not_built[name] else " (only null)"
                raise VLLMValidationError(f"{where}{name} is not supported by this engine yet{neutral}", parameter=where + name)
        elif name not in without_effect:
            raise VLLMValidationError(f"{where}{name[:100]} is not a known field of this request", parameter=where + name[:100])
    return kept
