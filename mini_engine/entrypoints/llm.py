"""LLM: offline inference in this process. `LLM().generate("…")` is the whole interface; no server, no socket.

Promises  Answers in the order of the prompts, whatever order they finish in. A wrong prompt or parameter is refused before anything of
          the call has run. Ctrl-C, or what another signal's handler raises, leaves the engine empty and usable: it takes effect while
          the device is waited for or after the step, the second Ctrl-C at once. Calls from several threads run one after the other.
          `del llm` frees the model (close() does it by name), as does the end of the interpreter.

Both ends of a request's path in one process, hence in entrypoints/.    vLLM: entrypoints/llm.py::LLM
"""

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from reprlib import repr as short
from types import FrameType
from typing import Any, Self, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mini_engine import overlay
from mini_engine.config import DEFAULT_MODEL, EngineConfig
from mini_engine.engine_core.inproc import InprocClient
from mini_engine.exceptions import EngineDeadError, VLLMValidationError
from mini_engine.llm.input_processor import InputProcessor
from mini_engine.llm.llm_engine import LLMEngine
from mini_engine.llm.output_processor import OutputProcessor
from mini_engine.model.default_model import resolve_model
from mini_engine.outputs import RequestOutput
from mini_engine.render.model_files import ModelFiles
from mini_engine.render.renderer import Renderer
from mini_engine.render.tokenizer import Tokenizer
from mini_engine.sampling_params import RequestOutputKind, SamplingParams

#: text, token ids, or a map with one of `prompt` and `prompt_token_ids`
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Messages: TypeAlias = Sequence[Mapping[str, Any]]


@contextmanager
def _signals_put_off(waiting: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """A signal's Python handler runs at once while waiting() only, else in the next call of what is yielded, or at the end; for the
    second Ctrl-C anywhere. So Ctrl-C, or a handler that raises, say for a timeout, cannot end the engine in the middle of a step.
    """
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    pending: dict[int, FrameType | None] = {}
    ending = False

    def on_signal(signum: int, frame: FrameType | None) -> None:
        insists = signum == signal.SIGINT and signum in pending
        pending[signum] = frame
        if not ending and (insists or waiting()):
            run_handlers()

    def run_handlers() -> None:
        while pending:
            signum, frame = pending.popitem()
            handlers[signum](signum, frame)

    try:
        for signum in signal.valid_signals() if threading.current_thread() is threading.main_thread() else ():
            if callable(handler := signal.getsignal(signum)):
                handlers[signum] = handler
                signal.signal(signum, on_signal)
        yield run_handlers
    finally:
        ending, errors = True, list[BaseException]()
        while handlers or pending:  # all of them, whatever a handler raises that is back already
            try:
                while handlers:
                    number = next(iter(handlers))
                    if signal.getsignal(number) is on_signal:  # else a handler has set another
                        signal.signal(number, handlers[number])
                    del handlers[number]
                while pending:
                    signal.raise_signal(pending.popitem()[0])
            except BaseException as e:
                errors.append(e)
        if errors:
            raise errors[0]


class LLM:
    """A model, loaded. Keyword arguments are EngineConfig's fields; `mock` may be a map, `async_scheduling` a bool."""

    def __init__(self, model: str = DEFAULT_MODEL, *, chat_template: str | None = None, **engine_args: Any) -> None:
        """Raises VLLMValidationError for a model that is not there or an option that is wrong."""
        if isinstance(flag := engine_args.get("async_scheduling"), bool):
            engine_args["async_scheduling"] = "on" if flag else "off"
        config = EngineConfig.from_dict({"model": os.fspath(model) if isinstance(model, os.PathLike) else model, **engine_args})
        overlay.check(config.overlay)
        config.model = str(resolve_model(model, weights=config.executor != "mock"))
        self._files = ModelFiles.load(config.model)
        tokenizer = Tokenizer.load(config.model)
        self._client = InprocClient(config)
        max_model_len = self._client.ready_response.max_model_len
        try:
            self._renderer = Renderer(self._files, tokenizer, max_model_len, chat_template=chat_template)
        except BaseException:  # a template with a syntax error
            self._client.shutdown()
            raise
        # At exit too, and not by __del__: that comes when a thread inside torch would abort the process.
        self._free = weakref.finalize(self, _free, self._renderer, self._client)
        input_processor = InputProcessor(self._files, tokenizer, max_model_len)
        self.llm_engine = LLMEngine(self._client, input_processor, OutputProcessor(tokenizer, overlay=config.overlay))
        self._next_request_id = 0
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._working_thread: int | None = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order. A list of ints is one prompt; any other list is a list of prompts.

        `sampling_params`: one for all, one for each, or None: get_default_sampling_params(). `use_tqdm`: a progress bar on stderr.
        """
        if isinstance(prompts, bytes | bytearray) or not (hasattr(prompts, "__getitem__") and hasattr(prompts, "__len__")):
            forms = "text, token ids, a map with prompt or prompt_token_ids, or a list of these"
            raise VLLMValidationError(f"prompts must be {forms}; got {short(prompts)}", parameter="prompts")
        single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed: Any = [prompts] if single else prompts
        return self._run([self._token_ids(prompt) for prompt in listed], sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. `template_args` are Renderer.render_chat's (add_generation_prompt, chat_template, …)."""
        if not isinstance(messages, list | tuple):
            raise VLLMValidationError(f"messages must be a list of messages, or of such lists; got {short(messages)}", parameter="messages")
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        rendered = [self._renderer.render_chat_sync(conversation, **template_args) for conversation in conversations]
        return self._run(rendered, sampling_params, use_tqdm, None)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors advise (generation_config.json), or SamplingParams()."""
        return SamplingParams(**self._files.default_sampling_params)

    def get_tokenizer(self) -> Tokenizer:
        return self._renderer.tokenizer

    def reset_prefix_cache(self) -> bool:
        with self._lock:
            return bool(self._client.call_utility("reset_prefix_cache"))

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _token_ids(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """(text, token ids) of one prompt."""
        if isinstance(prompt, Mapping):
            if unknown := prompt.keys() - {"prompt", "prompt_token_ids"}:
                raise VLLMValidationError(f"unknown key(s) in a prompt: {', '.join(sorted(unknown))}", parameter="prompts")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is None and not isinstance(text, str):
                raise VLLMValidationError(f"a prompt needs prompt_token_ids or prompt, got {prompt!r:.80}", parameter="prompts")
        else:
            text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        return text, self._renderer.tokenize_prompt_sync(text or "") if ids is None else ids

    def _run(
        self,
        prompts: Sequence[tuple[str | None, Sequence[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if not isinstance(all_params, list | tuple) or not all(isinstance(own, SamplingParams) for own in all_params):
            hint = "one SamplingParams(…), or a list with one for each prompt"
            raise VLLMValidationError(f"sampling_params must be {hint}; got {short(params)}", parameter="sampling_params")
        if priority is not None and not (isinstance(priority, list | tuple) and all(isinstance(p, int) for p in priority)):
            raise VLLMValidationError(f"priority must be a list with an int for each prompt; got {short(priority)}", parameter="priority")
        for name, given in (("sampling_params", all_params), ("priority", priority)):
            if given is not None and len(given) != len(prompts):
                raise VLLMValidationError(f"{len(prompts)} prompts need as many {name}, got {len(given)}", parameter=name)
        if os.getpid() != self._pid:
            raise EngineDeadError(f"this LLM, with its device's thread, lives in process {self._pid}: a forked child must make its own")
        if self._working_thread == threading.get_ident():
            raise EngineDeadError("this LLM is at work in this very thread, in a call that a signal has interrupted; use another LLM there")
        outputs: dict[str, RequestOutput] = {}
        with _signals_put_off(lambda: self._client.engine_core.waiting) as check_signals, self._lock:
            self._working_thread = threading.get_ident()
            ids = [str(self._next_request_id + i) for i in range(len(prompts))]
            self._next_request_id += len(prompts)
            try:
                for i, (text, token_ids) in enumerate(prompts):
                    check_signals()
                    own = all_params[i].clone()
                    own.output_kind = RequestOutputKind.FINAL_ONLY
                    self.llm_engine.add_request(ids[i], token_ids, own, prompt=text, priority=priority[i] if priority else 0)
                with self._progress(use_tqdm) as progress:
                    bar, num_tokens = progress.add_task("generate", total=len(prompts), tokens=0), 0
                    while self.llm_engine.has_unfinished_requests():
                        check_signals()
                        for output in self.llm_engine.step():
                            outputs[output.request_id] = output
                            num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                            progress.update(bar, advance=1, tokens=num_tokens)
            except BaseException:
                self.llm_engine.abort_requests(ids)
                raise
            finally:
                self._working_thread = None
        return [outputs[request_id] for request_id in ids]

    @staticmethod
    def _progress(enabled: bool) -> Progress:
        tokens = TextColumn("{task.fields[tokens]} tokens")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), tokens)
        return Progress(*columns, console=Console(stderr=True), disable=not enabled)


def _free(renderer: Renderer, client: InprocClient) -> None:
    renderer.close()
    client.shutdown()
