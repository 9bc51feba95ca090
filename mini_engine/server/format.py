"""What the two routes' formatters share: answers under way, usage, and chunks whose constant part is rendered once.

The hot path is one chunk per token and stream: no object is built for it. Each choice has its chunk's head ready as bytes; the new
text is escaped by msgspec (the same escapes as any JSON encoder) and put between head and tail.
Tokens whose text is held back (a stop string may be coming, a character is incomplete) make no empty chunk: their logprobs and ids
wait for the next chunk that has text, or for the last one. The finish reason has a chunk of its own, after all content.

Stands at form 9 of a request.    vLLM: chat_completion_stream_generator, completion_stream_generator
"""

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mini_engine.exceptions import EngineGenerateError
from mini_engine.outputs import CompletionOutput, RequestOutput, SampleLogprobs
from mini_engine.server.protocol import GenerationRequest
from mini_engine.server.service import Service

to_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Choice:
    """One answer under way. `token_ids` and `logprobs`: reported by the engine, not yet sent."""

    index: int  #: in the response, over all prompts
    head: bytes  #: the chunk up to the text
    token_ids: list[int] = field(default_factory=list)
    logprobs: SampleLogprobs = field(default_factory=list)
    prompt_token_ids: list[int] | None = None  #: for this answer's first chunk, if they were asked for
    offset: int = 0  #: completions: characters of the tokens sent


class ChunkFormatter:
    """RequestOutput → bytes, for one request. Raises EngineGenerateError when the engine reports that the request failed.

    Subclasses say what a choice looks like.
    """

    object_name: str  #: of a whole answer
    chunk_object_name: str
    id_prefix: str
    text_key: bytes  #: from the choice's index to its text
    text_end: bytes  #: from the text to the choice's other fields

    def __init__(self, request: GenerationRequest, service: Service, request_id: str) -> None:
        self.request = request
        self.encode_event = service.encode_event
        self.base: dict[str, Any] = {"id": f"{self.id_prefix}-{request_id}", "object": self.chunk_object_name}
        self.base |= {"created": int(time.time()), "model": service.model_name}
        #: `{"id": …, "object": …, "choices":[` of every chunk
        self.chunk_head = to_json(self.base)[:-1] + b',"choices":['
        self.chunk_end = b'],"usage":null}' if request.include_usage else b"]}"  # OpenAI: null in all but the last
        self.plain_tail = self.text_end + b',"logprobs":null,"finish_reason":null}' + self.chunk_end
        self.detailed = request.num_logprobs() is not None or request.return_token_ids
        self.choices: dict[int, Choice] = {}
        self.whole_choices: dict[int, msgspec.Raw] = {}
        self.prompts: dict[str, tuple[int, int]] = {}  #: sub-request id → prompt tokens, cached tokens
        self.completion_tokens = 0

    # ── what subclasses define ────────────────────────────────────────────────────────────────────────

    def response_index(self, output: RequestOutput, completion: CompletionOutput) -> int:
        return completion.index

    def opening(self, choice: Choice, output: RequestOutput) -> list[bytes]:
        """Chunks before the first text of a choice."""
        return []

    def choice_logprobs(self, choice: Choice) -> Any:
        raise NotImplementedError

    def whole_choice(self, choice: Choice, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        raise NotImplementedError

    # ── streaming ─────────────────────────────────────────────────────────────────────────────────────

    def events(self, output: RequestOutput) -> bytes:
        """The events for one DELTA output: none, one or several, ready to send."""
        chunks: list[bytes] = []
        if output.request_id not in self.prompts:
            self.begin(output, chunks)
        for completion in output.outputs:
            if completion.finish_reason is not None:
                raise_if_failed(output, completion)
            choice = self.choices[self.response_index(output, completion)]
            self.completion_tokens += len(completion.token_ids)
            if self.detailed:
                choice.token_ids += completion.token_ids
                choice.logprobs += completion.logprobs or []
            if completion.text:
                tail = self.detailed_tail(choice, b"null", b"") if self.detailed else self.plain_tail
                chunks.append(b"".join((choice.head, to_json(completion.text), tail)))
            if completion.finish_reason is not None:
                chunks.append(self.finish_chunk(choice, completion))
        return b"".join(map(self.encode_event, chunks))

    def begin(self, output: RequestOutput, chunks: list[bytes]) -> None:
        """First output of one prompt: its answers exist from here on, whichever of them speaks first."""
        self.prompts[output.request_id] = len(output.prompt_token_ids), output.num_cached_tokens
        for i in range(self.request.n):
            index = self.response_index(output, CompletionOutput(i, "", []))
            choice = Choice(index, self.chunk_head + b'{"index":%d,' % index + self.text_key)
            if self.request.return_token_ids:
                choice.prompt_token_ids = output.prompt_token_ids
            self.choices[index] = choice
            chunks += self.opening(choice, output)

    def detailed_tail(self, choice: Choice, finish_reason: bytes, more: bytes) -> bytes:
        """A chunk from the end of its text on, with what has been waiting in `choice`."""
        logprobs = to_json(self.choice_logprobs(choice)) if choice.logprobs else b"null"
        ids = self.prompt_ids(choice)
        if self.request.return_token_ids:
            ids += b',"token_ids":' + to_json(choice.token_ids)
        choice.token_ids, choice.logprobs = [], []
        return b"".join((self.text_end, b',"logprobs":', logprobs, b',"finish_reason":', finish_reason, more, ids, b"}", self.chunk_end))

    def prompt_ids(self, choice: Choice) -> bytes:
        """Once: a field for the choice's first chunk."""
        if choice.prompt_token_ids is None:
            return b""
        ids, choice.prompt_token_ids = choice.prompt_token_ids, None
        return b',"prompt_token_ids":' + to_json(ids)

    def empty_text(self, choice: Choice) -> bytes:
        return choice.head + b'""'

    def finish_chunk(self, choice: Choice, completion: CompletionOutput) -> bytes:
        more = b',"stop_reason":' + to_json(completion.stop_reason)
        return self.empty_text(choice) + self.detailed_tail(choice, to_json(completion.finish_reason), more)

    def last_events(self) -> bytes:
        """What comes after the last output and before [DONE]."""
        if not self.request.include_usage:
            return b""
        return self.encode_event(self.chunk_head + b'],"usage":' + to_json(self.usage()) + b"}")

    # ── not streaming ─────────────────────────────────────────────────────────────────────────────────

    def add_whole(self, output: RequestOutput) -> None:
        """Take in a FINAL_ONLY output, or a part of one."""
        self.prompts[output.request_id] = len(output.prompt_token_ids), output.num_cached_tokens
        for completion in output.outputs:
            raise_if_failed(output, completion)
            self.completion_tokens += len(completion.token_ids)
            choice = Choice(self.response_index(output, completion), b"", completion.token_ids, completion.logprobs or [])
            body = self.whole_choice(choice, output, completion)
            body["logprobs"] = self.choice_logprobs(choice) if self.request.num_logprobs() is not None else None
            body |= {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
            if self.request.return_token_ids:
                body |= {"token_ids": completion.token_ids, "prompt_token_ids": output.prompt_token_ids}
            self.whole_choices[choice.index] = msgspec.Raw(to_json({"index": choice.index} | body))

    def whole(self) -> bytes:
        """The JSON answer of all that was taken in."""
        ordered = [self.whole_choices[i] for i in sorted(self.whole_choices)]
        return to_json(self.base | {"object": self.object_name, "choices": ordered, "usage": self.usage()})

    def usage(self) -> dict[str, Any]:
        """Prompts count once each, however many answers they have."""
        prompt, cached = (sum(counts[i] for counts in self.prompts.values()) for i in (0, 1))
        answer, details = self.completion_tokens, {"cached_tokens": cached}
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer, "prompt_tokens_details": details}


def raise_if_failed(output: RequestOutput, completion: CompletionOutput) -> None:
    if completion.finish_reason == "error":
        raise EngineGenerateError(output.error or "the engine could not finish this request; its log has the cause")
