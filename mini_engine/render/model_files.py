"""ModelFiles: what the front-end reads of a model directory besides its tokenizer, parsed once.

config.json for the limits, generation_config.json for sampling defaults and end-of-sequence ids, tokenizer_config.json for the special
tokens, and the chat template wherever it lives. The weights and the decoder's shape are the engine's business (model/config.py).

Stands before a request's path.    vLLM: config/model.py::ModelConfig (get_diff_sampling_param, try_get_generation_config)
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from mini_engine.exceptions import VLLMValidationError

#: the special tokens that have a name, and that templates see under it
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: generation_config.json's sampling defaults that are SamplingParams fields too; max_new_tokens is max_tokens there
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLING_DEFAULTS = (*_PENALTIES, "temperature", "top_k", "top_p", "min_p", "max_new_tokens")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerJson(msgspec.Struct):
    """The one part of tokenizer.json that is read here; msgspec skips the rest, megabytes of it, quickly."""

    added_tokens: list[_AddedToken] = []


def read_json(model_dir: Path, name: str, *, required: bool = False, type: Any = dict[str, Any]) -> Any:
    """`model_dir`/`name`; an empty one if it may be missing and is. Raises VLLMValidationError naming the file."""
    path = model_dir / name
    if not path.is_file():
        if required:
            raise VLLMValidationError(f"no {name} in {model_dir}: is it a model directory?")
        return msgspec.convert({}, type)
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except (OSError, msgspec.DecodeError) as e:
        raise VLLMValidationError(f"cannot read {path}: {e}") from e


def special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens that a model has, as text."""
    found = {name: tokenizer_config.get(name) for name in SPECIAL_TOKEN_NAMES}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}  # a dict: AddedToken
    return {name: text for name, text in texts.items() if isinstance(text, str)}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    model_dir: Path
    chat_templates: dict[str, str]  #: by name: "default", and for some models "tool_use"
    special_tokens: dict[str, str]  #: "bos_token" and so on, those that the model has
    vocab_size: int  #: the model's: logits per position, padding included
    max_model_len: int  #: positions the model was trained for
    eos_token_ids: list[int]  #: any of these ends the answer; the tokenizer's own first
    default_sampling_params: dict[str, Any]  #: SamplingParams fields that the model's authors advise

    @classmethod
    def load(cls, model_dir: str | Path) -> Self:
        """Raises VLLMValidationError when config.json is missing, a file is damaged, or a number that must be there is not."""
        model_dir = Path(model_dir)
        config = read_json(model_dir, "config.json", required=True)
        for name in ("vocab_size", "max_position_embeddings"):
            if not isinstance(value := config.get(name), int) or value < 1:
                raise VLLMValidationError(f"{model_dir / 'config.json'}: {name} must be a positive integer, got {value!r}")
        generation_config = read_json(model_dir, "generation_config.json")
        tokenizer_config = read_json(model_dir, "tokenizer_config.json")
        tokens = special_tokens(tokenizer_config)
        added = read_json(model_dir, "tokenizer.json", type=_TokenizerJson).added_tokens
        eos = [token.id for token in added if token.content == tokens.get("eos_token")]
        # Without generation_config.json, config.json's eos stands in for it, as in transformers.
        more = (generation_config or config).get("eos_token_id")
        eos += more if isinstance(more, list) else [more]
        advised = {name: value for name in _SAMPLING_DEFAULTS if (value := generation_config.get(name)) is not None}
        if "max_new_tokens" in advised:
            advised["max_tokens"] = advised.pop("max_new_tokens")
        return cls(
            model_dir=model_dir,
            chat_templates=_chat_templates(model_dir, tokenizer_config),
            special_tokens=tokens,
            vocab_size=config["vocab_size"],
            max_model_len=config["max_position_embeddings"],
            eos_token_ids=[token_id for token_id in dict.fromkeys(eos) if token_id is not None],
            default_sampling_params=advised,
        )


def _chat_templates(model_dir: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """A file of its own wins over tokenizer_config.json, where several may be listed by name."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    found = read_json(model_dir, "chat_template.json").get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    return {entry["name"]: entry["template"] for entry in found or []}
