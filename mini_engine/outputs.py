"""RequestOutput and CompletionOutput: what `LLM.generate`, `AsyncLLM.generate` and the HTTP routes receive.

Form 9 of a request, after detokenization.    vLLM: outputs.py
"""

from dataclasses import dataclass, field

from mini_engine.sampling_params import RequestOutputKind


@dataclass(slots=True)
class Logprob:
    """One candidate of one position."""

    logprob: float
    rank: int | None = None  #: 1 is the most likely token of the vocabulary
    decoded_token: str | None = None


#: one map per position, token id → Logprob; the sampled (or prompt) token comes first, then the most likely ones in order
SampleLogprobs = list[dict[int, Logprob]]


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers. With DELTA, text, token_ids and logprobs hold only what is new since the last output."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None  #: "stop" | "length" | "abort" | "error", None while running
    stop_reason: int | str | None = None  #: the stop string or stop token id; None for EOS

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """Everything new about one request. `finished` is True exactly once, in its last output."""

    request_id: str  #: the id the caller gave
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0  #: prompt tokens whose KV came from the prefix cache
    error: str | None = None  #: why, when finish_reason is "error" and the engine said so
    _places: dict[int, int] | None = field(default=None, init=False, repr=False, compare=False)  # index → place in outputs, once merged

    def add(self, newer: "RequestOutput", kind: RequestOutputKind) -> None:
        """Merge `newer` into this unread output: coalescing for a slow reader, nothing is lost (WIRE §4).

        DELTA: text, token ids and logprobs are appended per index. CUMULATIVE and FINAL_ONLY: the newer completion of an index
        holds everything the older one did and replaces it. An unseen index (n > 1) is appended. Costs what is new, whatever n is.
        """
        self.finished |= newer.finished
        self.error = newer.error or self.error
        if self.prompt_logprobs is None:  # with DELTA and n > 1 each child brings them once; this may be the first that does
            self.prompt_logprobs = newer.prompt_logprobs
        if self._places is None:
            self._places = {old.index: place for place, old in enumerate(self.outputs)}
        for new in newer.outputs:
            place = self._places.setdefault(new.index, len(self.outputs))
            if place == len(self.outputs):
                self.outputs.append(new)
            elif kind is not RequestOutputKind.DELTA:
                self.outputs[place] = new
            else:
                old = self.outputs[place]
                old.text += new.text
                old.token_ids.extend(new.token_ids)
                if old.logprobs is not None:  # else none were asked for
                    old.logprobs.extend(new.logprobs or ())
                old.cumulative_logprob = new.cumulative_logprob
                old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
