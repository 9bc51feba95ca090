"""What the OpenAI routes accept: one pydantic model per route, and how it becomes SamplingParams.

Every field declared here is used (fields.py, law (a)); a test changes each one and looks for the change behind the route. Types are
strict: "16" is not 16. Ranges of sampling parameters are SamplingParams' own, so HTTP, LLM and the engine refuse the same values.

Stands at form 1 of a request.    vLLM: entrypoints/openai/chat_completion/protocol.py, completion/protocol.py
"""

import gc
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mini_engine.exceptions import VLLMValidationError
from mini_engine.sampling_params import RequestOutputKind, SamplingParams
from mini_engine.server import fields

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=-1, le=2**31 - 1)]  #: what a count may be on the wire; SamplingParams knows the real range
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
T = TypeVar("T")
#: one wrong element is enough: a report on each of a million takes seconds and gigabytes
ListOf = Annotated[list[T], Field(fail_fast=True)]
MAX_LOGPROBS = 20  #: OpenAI's limit, and vLLM's --max-logprobs
MAX_STOP_STRINGS = 64
MAX_ANSWERS = 2048  #: of one request: each costs the event loop its submission, and nobody else has a turn meanwhile


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool = False


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message, as the chat template is to see it; the renderer joins its parts."""

    model_config = ConfigDict(strict=True)
    role: str = Field(min_length=1, max_length=64)
    content: str | ListOf[TextPart] | None = None  #: which roles may leave it out, the renderer knows
    name: str | None = None

    @field_validator("role")
    @classmethod
    def _check_role(cls, role: str) -> str:
        if role in ("tool", "function"):
            raise ValueError("this role is not supported by this engine yet")
        return role


class GenerationRequest(BaseModel):
    """What both routes share."""

    model_config = ConfigDict(strict=True)
    not_built: ClassVar[fields.NotBuilt]

    model: str | None = None
    n: Annotated[int, Field(le=MAX_ANSWERS)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] = {}  #: of numbers, which SamplingParams knows
    seed: Int64 | None = None
    stop: str | Annotated[ListOf[str], Field(max_length=MAX_STOP_STRINGS)] = []
    stop_token_ids: ListOf[TokenId] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count = 0
    skip_special_tokens: bool = True
    allowed_token_ids: ListOf[TokenId] | None = None
    bad_words: ListOf[str] = []
    priority: Int64 = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    def to_sampling_params(self, model_defaults: dict[str, Any]) -> SamplingParams:
        """Request, else the model's generation_config, else SamplingParams' own default. Raises VLLMValidationError for a range.

        A field named as one of SamplingParams' is passed on; the three below have another type there.
        """
        shared = type(self).model_fields.keys() & set(SamplingParams.__struct_fields__)
        asked = {name: value for name in shared if (value := getattr(self, name)) is not None}
        asked["logprobs"] = self.num_logprobs()
        asked["logit_bias"] = self._token_bias()
        asked["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**{"max_tokens": None} | model_defaults | asked)

    def _token_bias(self) -> dict[int, Any] | None:
        bias: dict[int, Any] = {}
        for key, value in self.logit_bias.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise VLLMValidationError(f"logit_bias: keys are token ids, got {key!r:.50}", parameter="logit_bias")
            bias[int(key)] = value
        return bias or None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    not_built: ClassVar[fields.NotBuilt] = fields.NOT_BUILT_CHAT

    messages: Annotated[ListOf[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None  #: max_completion_tokens, its newer name, wins
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_none=True) for message in self.messages]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    not_built: ClassVar[fields.NotBuilt] = fields.NOT_BUILT_COMPLETION

    prompt: str | ListOf[TokenId] | ListOf[str] | ListOf[ListOf[TokenId]]
    max_tokens: Count = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if not self.prompt and not isinstance(self.prompt, str):
            raise ValueError("prompt must not be an empty list")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported by this engine yet: it needs prompt logprobs")
        return self

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> Sequence[str | list[int]]:
        """One or many, always as a list."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast(Sequence[str | list[int]], [self.prompt] if one else self.prompt)


R = TypeVar("R", bound=GenerationRequest)


def parse_request(model: type[R], raw: bytes | bytearray) -> R:
    """JSON bytes → request. Raises VLLMValidationError (400) naming the field for everything that is wrong with them."""
    try:
        gc.disable()  # it would look at millions of new objects again and again: 1.6 s instead of 0.2 for 13 MB
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as e:
        raise VLLMValidationError(f"the body is not valid JSON: {e}") from None
    finally:
        gc.enable()
    if not isinstance(body, dict):
        raise VLLMValidationError("the body must be a JSON object")
    body = fields.apply_field_law(body, model.model_fields, model.not_built)
    if "stream_options" in body:
        body["stream_options"] = _inner(body["stream_options"], StreamOptions, fields.NOT_BUILT_STREAM_OPTIONS, "stream_options")
    if isinstance(messages := body.get("messages"), list):
        body["messages"] = [_inner(m, ChatMessage, fields.NOT_BUILT_MESSAGE, f"messages[{i}]") for i, m in enumerate(messages)]
    try:
        return model.model_validate(body)
    except ValidationError as e:
        raise _first_problem(e) from None


def _inner(value: Any, model: type[BaseModel], not_built: fields.NotBuilt, where: str) -> Any:
    """The field law for an object inside the body. What is no object is left for pydantic to refuse."""
    if not isinstance(value, dict):
        return value
    return fields.apply_field_law(value, model.model_fields, not_built, where=where + ".", without_effect=())


def _first_problem(error: ValidationError) -> VLLMValidationError:
    """pydantic's first finding as one sentence: the field, what is wrong, and the value."""
    problems = error.errors(include_url=False)
    # a field of several types reports once for each: the report that got furthest is of the type that was meant
    problem = max((p for p in problems if p["loc"][:1] == problems[0]["loc"][:1]), key=lambda p: len(p["loc"]))
    # and has the type's name in its path: keep indices and field names only
    location = [part for part in problem["loc"] if isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float"))]
    param = str(location[0]) if location else None
    for part in location[1:]:
        param = f"{param}[{part}]" if isinstance(part, int) else f"{param}.{part}"
    message = problem["msg"].removeprefix("Value error, ")
    if param is None:  # a rule about several fields; its sentence names them, the first word is the one to change
        return VLLMValidationError(message, parameter=message.split(maxsplit=1)[0])
    value = problem["input"]
    shown = "" if problem["type"] == "missing" or isinstance(value, dict) else f", got {_show(value)}"
    return VLLMValidationError(f"{param}: {message}{shown}", parameter=param)


def _show(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "an integer of more than 64 bits"  # Python refuses to print one of more than 4,300 digits
    text = repr(value) if isinstance(value, int | float | str) else f"a {type(value).__name__}"
    return text if len(text) <= 100 else text[:97] + "..."
