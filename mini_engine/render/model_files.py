"""ModelFiles: what the front-end reads of a model directory besides its tokenizer, parsed once.

config.json for the limits, generation_config.json for sampling defaults and end-of-sequence ids, tokenizer_config.json for the special
tokens, and the chat template wherever it lives. The weights and the decoder's shape are the engine's business (model/config.py).

Stands before a request's path.    vLLM: config/model.py::ModelConfig (get_diff_sampling_param, try_get_generation_config)
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from mini_engine.exceptions import VLLMValidationError

#: the special tokens that have a name, and that templates see under it
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: generation_config.json's sampling defaults, and vLLM's names for them
_SAMPLING_DEFAULTS = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerJson(msgspec.Struct):
    """The one part of tokenizer.json that is read here; msgspec skips the rest, megabytes of it, quickly."""

    added_tokens: list[_AddedToken] = []


def read_json(model_dir: Path, name: str, *, required: bool) -> dict[str, Any]:
    """The object in `model_dir`/`name`; {} if it may be missing and is. Raises VLLMValidationError naming the file."""
    path = model_dir / name
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise VLLMValidationError(f"no {name} in {model_dir}: is it a model directory?", parameter="model", value=str(model_dir)) from None
    except (OSError, ValueError) as e:
        raise VLLMValidationError(f"cannot read {path}: {e}", parameter="model", value=str(model_dir)) from e
    if not isinstance(data, dict):
        raise VLLMValidationError(f"{path} holds a {type(data).__name__}, not an object", parameter="model", value=str(model_dir))
    return data


def special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens that a model has, as text."""
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = tokenizer_config.get(name)
        if isinstance(token, dict):  # how AddedToken is saved
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


@dataclass(frozen=True, slots=True)
class ModelFiles:
    model_dir: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]  #: {} when the model has none
    tokenizer_config: dict[str, Any]  #: {} when the model has none
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
        generation_config = read_json(model_dir, "generation_config.json", required=False)
        tokenizer_config = read_json(model_dir, "tokenizer_config.json", required=False)
        tokens = special_tokens(tokenizer_config)
        eos = _added_token_id(model_dir, tokens.get("eos_token"))
        # Without generation_config.json, config.json's eos stands in for it, as in transformers.
        more = (generation_config or config).get("eos_token_id")
        eos_token_ids = [token_id for token_id in (eos, *(more if isinstance(more, list) else [more])) if token_id is not None]
        return cls(
            model_dir=model_dir,
            config=config,
            generation_config=generation_config,
            tokenizer_config=tokenizer_config,
            chat_templates=_chat_templates(model_dir, tokenizer_config),
            special_tokens=tokens,
            vocab_size=_positive_int(model_dir, config, "vocab_size"),
            max_model_len=_positive_int(model_dir, config, "max_position_embeddings"),
            eos_token_ids=list(dict.fromkeys(eos_token_ids)),
            default_sampling_params={
                ours: generation_config[theirs] for theirs, ours in _SAMPLING_DEFAULTS.items() if generation_config.get(theirs) is not None
            },
        )

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")


def _positive_int(model_dir: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise VLLMValidationError(
            f"{model_dir / 'config.json'}: {name} must be a positive integer, got {value!r}", parameter="model", value=str(model_dir)
        )
    return value


def _added_token_id(model_dir: Path, content: str | None) -> int | None:
    path = model_dir / "tokenizer.json"
    if content is None or not path.is_file():
        return None
    try:
        added = msgspec.json.decode(path.read_bytes(), type=_TokenizerJson).added_tokens
    except msgspec.DecodeError as e:
        raise VLLMValidationError(f"cannot read {path}: {e}", parameter="model", value=str(model_dir)) from e
    return next((token.id for token in added if token.content == content), None)


def _chat_templates(model_dir: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """A file of its own wins over tokenizer_config.json, where several may be listed by name."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    found = read_json(model_dir, "chat_template.json", required=False).get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    return {entry["name"]: entry["template"] for entry in found or []}
