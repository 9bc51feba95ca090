"""Chat template: messages to prompt text, by the model's own Jinja program, in a sandbox.

Promises  the same text as transformers' apply_chat_template; the caller's messages stay as they are; whatever goes wrong inside a template
          is the client's error (a template refuses roles, orders, missing fields by raising), with the template's own message.
Sandbox   templates are downloaded programs, and some requests bring their own: no attribute that starts with "_", no changing of
          arguments, no ranges above 100,000.

Change of form 2, on a thread of the render pool.    vLLM: renderers/hf.py (safe_apply_chat_template), renderers/chat_utils.py
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from reprlib import repr as short
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mini_engine.exceptions import VLLMValidationError

Message = Mapping[str, Any]  #: role, content (text, or a list of text parts), and what else the template reads

#: Put behind the final message to find where it ends in the prompt. The space at its end tells whether the template strips contents.
_END_MARK = "<<END-OF-FINAL-MESSAGE>> "
_RESERVED = ("messages", "tools", "add_generation_prompt")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes `<`, `>`, `&` for HTML; a prompt is not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def normalise_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies with plain-text content: text parts are joined by line breaks, and keys that are None go (templates print "None").

    Raises VLLMValidationError naming the message, and the part that is not text.
    """
    if not messages:
        raise VLLMValidationError("messages must hold at least one message, got none", parameter="messages", value=[])
    normalised = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise VLLMValidationError(
                f"messages[{i}] must be an object with a role, got {short(message)}", parameter="messages", value=message
            )
        copy = {key: value for key, value in message.items() if value is not None}
        content = copy.get("content", "")
        if isinstance(content, list):
            copy["content"] = "\n".join(_part_text(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content))
        elif not isinstance(content, str):
            raise VLLMValidationError(
                f"messages[{i}].content must be text or text parts, got {content!r}", parameter="messages", value=content
            )
        normalised.append(copy)
    return normalised


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if kind == "text" else None
    if isinstance(text, str):
        return text
    raise VLLMValidationError(
        f"{where} is of type {kind!r}: only {{'type': 'text', 'text': …}} parts are supported", parameter="messages", value=part
    )


class ChatTemplate:
    """One compiled template. render() may be called from several threads at once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: "bos_token" and so on, visible to the template. Raises VLLMValidationError for a syntax error."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as e:
            raise VLLMValidationError(f"chat template: {e}", parameter="chat_template") from e

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `continue_final_message`: it ends inside the last message, for the model to go on there."""
        if continue_final_message and add_generation_prompt:
            raise VLLMValidationError(
                "continue_final_message and add_generation_prompt exclude each other: go on with the last message, or start a new one",
                parameter="continue_final_message",
                value=True,
            )
        for name in _RESERVED:
            if kwargs and name in kwargs:
                raise VLLMValidationError(
                    f"chat_template_kwargs may not hold {name!r}: it is a field of the request",
                    parameter="chat_template_kwargs",
                    value=name,
                )
        normalised = normalise_messages(messages)
        if not continue_final_message:
            return self._run(normalised, add_generation_prompt, tools, kwargs)
        final = normalised[-1].get("content")
        if final is None:
            raise VLLMValidationError("continue_final_message: the last message has no content to continue", parameter="messages")
        normalised[-1]["content"] = final + _END_MARK
        return _cut_at_mark(self._run(normalised, False, tools, kwargs), final)

    def _run(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> str:
        variables = {"documents": None, **self._special_tokens, **(kwargs or {})}
        variables.update(messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(variables)
        except Exception as e:  # a template can fail in any way that a program can: with what it was given, it cannot be served
            kind = "" if isinstance(e, jinja2.TemplateError) else f"{type(e).__name__}: "
            raise VLLMValidationError(f"chat template: {kind}{e}", parameter="messages") from e


def _cut_at_mark(prompt: str, final: str) -> str:
    at = prompt.rfind(_END_MARK.strip())
    if at == -1 or final.strip() not in prompt:
        raise VLLMValidationError(
            "continue_final_message: the chat template drops or changes the last message, so there is no place to go on from",
            parameter="continue_final_message",
            value=True,
        )
    if prompt.startswith(_END_MARK, at):
        return prompt[:at]
    return prompt[:at].rstrip()  # the template strips contents, and would have stripped this one
