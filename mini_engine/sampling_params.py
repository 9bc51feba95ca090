"""SamplingParams: how to choose the next token, and when to stop. Offered to users, and sent on the wire as it is.

On the wire this is a *map* keyed by field name, fields equal to their default left out (WIRE §1.4), so names, not order, are the
format; the private names `_eos_token_id` and `_all_stop_token_ids` are part of it. `__post_init__` runs on every decode as well:
a value out of range raises here, in whichever process reads it, and the reader must turn that into this request's error.

Stands between forms 2 and 5 of a request, and inside the sampler.    vLLM: sampling_params.py::SamplingParams
"""

import enum
import math
from typing import Any

import msgspec

from mini_engine.exceptions import VLLMValidationError, wrong_type

SAMPLING_EPS = 1e-5  #: below this temperature sampling is greedy (vLLM: _SAMPLING_EPS)
MIN_TEMPERATURE = 1e-2  #: smaller non-zero temperatures are raised to this: logits / t overflows float32 (vLLM: _MAX_TEMP)
MAX_N = 16384  #: largest `n` (vLLM: VLLM_MAX_N_SEQUENCES)


class RequestOutputKind(enum.Enum):
    """What each RequestOutput carries: all text so far, the new text only, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sampling parameters of one request; the names, defaults and ranges are vLLM's.

    Fields that only the front-end uses (n, stop, detokenize, output_kind …) cross the wire all the same and are ignored by the
    engine.
    """

    n: int = 1
    presence_penalty: float = 0.0  #: [-2, 2]; > 0 discourages tokens already in the output
    frequency_penalty: float = 0.0  #: [-2, 2]; the same, times how often
    repetition_penalty: float = 1.0  #: > 0; > 1 discourages tokens of prompt and output
    temperature: float = 1.0  #: [0, 2]; 0 is greedy
    top_p: float = 1.0  #: (0, 1]; the token that crosses p is kept
    top_k: int = 0  #: 0 or -1: all
    min_p: float = 0.0  #: [0, 1], relative to the most likely token
    seed: int | None = None
    stop: str | list[str] | None = None  #: a list after construction
    stop_token_ids: list[int] | None = None  #: a list after construction
    ignore_eos: bool = False
    max_tokens: int | None = 16  #: None: up to max_model_len (the front-end fills it in; the engine needs an int)
    min_tokens: int = 0
    logprobs: int | None = None  #: that many most likely tokens, and the sampled one; -1: the whole vocabulary
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    output_text_buffer_length: int = 0  #: derived: characters held back for stop strings
    _eos_token_id: int | None = None  #: set by the front-end unless ignore_eos; the engine knows no other EOS
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)  #: stop_token_ids and EOS: masked below min_tokens
    structured_outputs: dict[str, Any] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    _bad_words_token_ids: list[list[int]] | None = None
    skip_reading_prefix_cache: bool | None = None  #: derived unless set: prompt logprobs need every prompt position computed
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check types, normalise, check ranges. Raises VLLMValidationError naming the parameter and the value."""
        try:
            msgspec.convert(self, _Types, from_attributes=True)
        except msgspec.ValidationError as e:
            name = str(e).rpartition("$.")[2].rstrip("`").split("[")[0].split(".")[0]
            raise wrong_type(name, SamplingParams.__annotations__[name], getattr(self, name)) from None
        if 0 < self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.seed == -1:
            self.seed = None
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or []))
        self.bad_words = list(dict.fromkeys(self.bad_words or []))
        self._check_ranges()
        try:
            msgspec.msgpack.encode(self)
        except (OverflowError, UnicodeEncodeError, TypeError):  # beyond 64 bits, a lone surrogate, an object in extra_args
            for name, value in msgspec.structs.asdict(self).items():
                try:
                    msgspec.msgpack.encode(value)
                except Exception as e:
                    raise VLLMValidationError(f"{name} cannot be sent to an engine: {e}; got {value!r:.80}", parameter=name) from None
        if self.stop and not self.include_stop_str_in_output:
            self.output_text_buffer_length = max(map(len, self.stop)) - 1
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        self._all_stop_token_ids.update(self.stop_token_ids)
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _check_ranges(self) -> None:
        def check(name: str, ok: bool, rule: str) -> None:
            if not ok:
                raise VLLMValidationError(f"{name} must be {rule}, got {getattr(self, name)!r}", parameter=name)

        if not isinstance(self.output_kind, RequestOutputKind):  # msgspec would take its number only
            raise wrong_type("output_kind", RequestOutputKind, self.output_kind)
        check("n", 1 <= self.n <= MAX_N, f"in [1, {MAX_N}]")
        check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]")
        check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]")
        check("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "a finite number above 0")
        check("temperature", 0.0 <= self.temperature <= 2.0, "in [0, 2]")
        check("n", self.n == 1 or not self.is_greedy, "1 with temperature 0 (greedy: all answers would be the same)")
        check("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]")
        check("top_k", self.top_k >= -1, "0 (all) or at least 1")
        check("seed", self.seed is None or -(2**63) <= self.seed <= 2**64 - self.n, "a 64-bit integer, as must be seed + n - 1")
        check("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        check("min_tokens", self.min_tokens >= 0, "at least 0")
        check("min_tokens", self.max_tokens is None or self.min_tokens <= self.max_tokens, f"at most max_tokens = {self.max_tokens}")
        check("logprobs", self.logprobs is None or self.logprobs >= -1, "at least 0, or -1 for the whole vocabulary")
        check("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= -1, "at least 0, or -1")
        check("stop", all(self.stop or []), "non-empty strings")
        check("logit_bias", all(-100.0 <= b <= 100.0 for b in (self.logit_bias or {}).values()), "within [-100, 100] for each token")
        check("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "a non-empty list")
        check("stop", self.detokenize or not self.stop, "empty when detokenize is False: stop strings are found in text")

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken and no random number is drawn."""
        return self.temperature < SAMPLING_EPS

    def clone(self) -> "SamplingParams":
        """A copy that shares no container with this one (vLLM: SamplingParams.clone)."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=SamplingParams)


#: the same fields with nothing behind them: one call into msgspec checks the types of an instance, whoever made it
_Types = msgspec.defstruct(
    "_Types", [(name, Any if kind is RequestOutputKind else kind) for name, kind in SamplingParams.__annotations__.items()]
)
