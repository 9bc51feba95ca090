"""Renderer: chat template and tokenizer behind a small thread pool, so that a long prompt does not stop the event loop.

Promises  the loop only ever waits; a text that cannot fit, however it is split into tokens, is refused before it is tokenized.
Pool      renderer_num_workers threads (default 1) named `render`. Both the template and the tokenizer run there. `encode_batch_fast`
          leaves the GIL to others while it works; `encode` held it for 1.9 s on a prompt of 340,000 tokens.
Order     close() last: it drops what has not started, and does not wait for what runs: a template that a request brought may loop for
          ever. Python waits for such a thread when it exits; entrypoints/cli.py does not.

Changes of form 2 and 3 of a request.    vLLM: renderers/base.py::BaseRenderer
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mini_engine.exceptions import VLLMValidationError
from mini_engine.render.chat_template import ChatTemplate, Message
from mini_engine.render.model_files import ModelFiles
from mini_engine.render.tokenizer import Tokenizer


class Renderer:
    """Prompts for one model. The `_sync` methods are the same without a pool, on the caller's thread: for LLM."""

    def __init__(
        self, model_files: ModelFiles, tokenizer: Tokenizer, max_model_len: int, num_workers: int = 1, chat_template: str | None = None
    ) -> None:
        """`chat_template`: a source in place of the model's. Raises VLLMValidationError if a template has a syntax error."""
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._special_tokens = model_files.special_tokens
        sources = model_files.chat_templates if chat_template is None else {"default": chat_template}
        self._templates = {name: ChatTemplate(source, self._special_tokens) for name, source in sources.items()}
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="render")

    async def render_chat(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[int]]:
        """render_chat_sync, on the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(self.render_chat_sync, messages, **options))

    async def tokenize_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """tokenize_prompt_sync, on the pool."""
        self._check_length(text)  # here too: a refusal need not queue behind somebody's long prompt
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.tokenize_prompt_sync, text, add_special_tokens)

    def render_chat_sync(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> tuple[str, list[int]]:
        """Prompt text and token ids of a chat. Special tokens are not added: the template writes them. `options`: ChatTemplate.render's.

        Raises VLLMValidationError: no template, a message that cannot be rendered, too long.
        """
        template = self._template(bool(tools)) if chat_template is None else ChatTemplate(chat_template, self._special_tokens)
        prompt = template.render(messages, tools=tools, **options)
        return prompt, self.tokenize_prompt_sync(prompt, add_special_tokens)

    def tokenize_prompt_sync(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises VLLMValidationError if it cannot fit. Whether the ids fit is the input processor's question."""
        self._check_length(text)
        return self.tokenizer.encode(text, add_special_tokens)

    def close(self) -> None:
        """Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _template(self, with_tools: bool) -> ChatTemplate:
        template = (with_tools and self._templates.get("tool_use")) or self._templates.get("default")
        if not template:
            raise VLLMValidationError(
                "the model has no chat template: give one with --chat-template FILE, or use /v1/completions", parameter="messages"
            )
        return template

    def _check_length(self, text: str) -> None:
        most = self.max_model_len * self.tokenizer.longest_token_chars
        if len(text) > most:
            raise VLLMValidationError(
                f"the prompt has {len(text)} characters; {self.max_model_len} tokens (max_model_len) of at most "
                f"{self.tokenizer.longest_token_chars} characters hold {most}. Shorten it",
                parameter="prompt",
            )
