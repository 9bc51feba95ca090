"""InputProcessor: token ids and SamplingParams in, a checked EngineCoreRequest out.

Promises  What it returns, the engine can serve: limits are the engine's own, from its READY message, and a value out of range is refused
          here, as the caller's error (400). The caller's params are not changed; a copy is completed: max_tokens, EOS and stop ids,
          bad words as tokens.
EOS       The engine knows no EOS of its own. The tokenizer's goes as `_eos_token_id`, further ones of generation_config as stop ids, and
          `ignore_eos` means that neither is sent. `_all_stop_token_ids` is what min_tokens keeps from being sampled, so it always has both.

Form 3 of a request. Cheap and without waiting: runs on the event loop.    vLLM: v1/engine/input_processor.py; WIRE §1.4, §12.2
"""

import time
import uuid
from array import array
from collections.abc import Collection, Sequence

from mini_engine.exceptions import VLLMValidationError
from mini_engine.render.model_files import ModelFiles
from mini_engine.render.tokenizer import Tokenizer
from mini_engine.sampling_params import SamplingParams
from mini_engine.wire.messages import EngineCoreRequest

#: sampling parameters that would change the answer and that nothing here acts on yet: refused, never ignored
UNBUILT_PARAMS = (
    *("structured_outputs", "thinking_token_budget", "repetition_detection", "logprob_token_ids"),
    *("flat_logprobs", "stream_interval", "extra_args"),
)
MAX_BAD_WORDS_CHARS = 16_384  #: together; they are tokenized on the event loop. vLLM takes 1,024 tokens of them


def _refusal(parameter: str, value: object, message: str) -> VLLMValidationError:
    return VLLMValidationError(message, parameter=parameter, value=value)


class InputProcessor:
    """One per front-end. `max_model_len` is the smallest that an engine reported."""

    def __init__(self, model_files: ModelFiles, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = model_files.vocab_size
        self._tokenizer = tokenizer
        self._eos_token_id = model_files.eos_token_ids[0] if model_files.eos_token_ids else None
        self._other_eos_ids = model_files.eos_token_ids[1:]

    def process_inputs(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EngineCoreRequest:
        """The request to send. `request_id` is the caller's; the request has an internal one, unique whatever callers choose.

        Raises VLLMValidationError naming the parameter, with the value and the limit.
        """
        prompt_token_ids = self._check_prompt(prompt_token_ids)
        return EngineCoreRequest(
            request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=prompt_token_ids,
            mm_features=None,
            sampling_params=self._complete(params, len(prompt_token_ids)),
            pooling_params=None,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            lora_request=None,
            cache_salt=cache_salt,
            data_parallel_rank=None,
            priority=priority,
            external_req_id=request_id,
        )

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        try:
            ids = array("q", prompt_token_ids).tolist()  # plain ints, at C speed; numpy's are taken too
        except (TypeError, OverflowError) as e:
            raise _refusal("prompt", None, f"a prompt must be a list of token ids: {e}") from e
        if not ids:
            raise _refusal("prompt", 0, "the prompt must not be empty: it has 0 tokens")
        if len(ids) >= self.max_model_len:
            rule = f"with at least one token of output that is more than the maximum model length of {self.max_model_len} tokens"
            raise _refusal("prompt", len(ids), f"the prompt has {len(ids)} tokens; {rule}. Shorten the prompt")
        self._check_vocabulary("prompt", ids)
        return ids

    def _check_vocabulary(self, parameter: str, ids: Collection[int]) -> None:
        for worst in (min(ids), max(ids)):
            if not 0 <= worst < self.vocab_size:
                rule = f"token id {worst} is not in the vocabulary; ids are in [0, {self.vocab_size - 1}]"
                raise _refusal(parameter, worst, f"{parameter}: {rule}")

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        for name in UNBUILT_PARAMS:
            if value := getattr(params, name):
                raise _refusal(name, value, f"{name} is not supported by this engine yet (got {value!r:.80})")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.vocab_size:
                raise _refusal(name, count, f"{name} must be at most the vocabulary's size, {self.vocab_size}, got {count}")
        for name in ("logit_bias", "allowed_token_ids"):
            if ids := getattr(params, name):
                self._check_vocabulary(name, ids)
        params = params.clone()
        if params.bad_words:
            params._bad_words_token_ids = self._bad_words(params.bad_words)
        room = self.max_model_len - num_prompt_tokens
        if params.max_tokens is None:
            params.max_tokens = room
        if params.min_tokens > (most := min(params.max_tokens, room)):
            why = f"what max_tokens and the maximum model length of {self.max_model_len} leave after a prompt of {num_prompt_tokens}"
            raise _refusal("min_tokens", params.min_tokens, f"min_tokens must be at most {most}, {why}; got {params.min_tokens}")
        assert params.stop_token_ids is not None  # a list after construction
        if not params.ignore_eos:
            params._eos_token_id = self._eos_token_id
            params.stop_token_ids = list(dict.fromkeys([*params.stop_token_ids, *self._other_eos_ids]))
        params._all_stop_token_ids.update(params.stop_token_ids, self._other_eos_ids)
        if self._eos_token_id is not None:
            params._all_stop_token_ids.add(self._eos_token_id)
        # the sampler masks these columns, so they must exist
        params._all_stop_token_ids = {i for i in params._all_stop_token_ids if 0 <= i < self.vocab_size}
        return params

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as tokens: as it stands, and as it follows a space where that is another first token of as many tokens."""
        if (num_chars := sum(map(len, words))) > MAX_BAD_WORDS_CHARS:
            message = f"bad_words may have at most {MAX_BAD_WORDS_CHARS} characters together, got {num_chars} in {len(words)} words"
            raise _refusal("bad_words", num_chars, message)
        sequences: list[list[int]] = []
        for word in words:
            bare = self._tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self._tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not bare:
                raise _refusal("bad_words", word, f"bad_words must be words with at least one token, got {word!r}")
            sequences.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                sequences.append(spaced)
        return sequences
