"""Chat template: messages to prompt text, by the model's own Jinja program, in a sandbox.

Promises  the same text as transformers' apply_chat_template; the caller's messages stay as they are; whatever goes wrong inside a template
          is the client's error (a template refuses roles, orders, missing fields by raising), with the template's own message.
Sandbox   templates are downloaded programs, and those of requests are run too if the server trusts them: no attribute that starts
          with "_", no changing of arguments, no ranges above 100,000. Nothing limits time or memory.

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
_RESERVED = {"messages", "tools", "add_generation_prompt", "chat_template"}


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own escapes `<`, `>`, `&` for HTML; a prompt is not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _refused(e: Exception, parameter: str) -> VLLMValidationError:
    kind = "" if isinstance(e, jinja2.TemplateError) else f"{type(e).__name__}: "
    message = f"chat template: {kind}{e}".encode(errors="replace").decode()  # the template's own words may be no valid Unicode
    return VLLMValidationError(message, parameter=parameter)


def normalise_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies with plain-text content: text parts are joined by line breaks, and keys that are None go (templates print "None").

    Raises VLLMValidationError naming the message, and the part that is not text.
    """
    if not messages:
        raise VLLMValidationError("messages must hold at least one message, got none", parameter="messages")
    normalised = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise VLLMValidationError(f"messages[{i}] must be an object with a role, got {short(message)}", parameter="messages")
        copy = {key: value for key, value in message.items() if value is not None}
        if "content" not in copy and not (message["role"] == "assistant" and copy.get("tool_calls")):
            problem = f"messages[{i}] needs content (only an assistant's with tool_calls may go without), got {short(message)}"
            raise VLLMValidationError(problem, parameter="messages")
        content = copy.get("content", "")
        if isinstance(content, list):
            copy["content"] = "\n".join(_part_text(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content))
        elif not isinstance(content, str):
            raise VLLMValidationError(f"messages[{i}].content must be text or text parts, got {content!r}", parameter="messages")
        normalised.append(copy)
    return normalised


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if kind == "text" else None
    if isinstance(text, str):
        return text
    raise VLLMValidationError(f"{where} is of type {kind!r}: only {{'type': 'text', 'text': …}} is supported", parameter="messages")


class ChatTemplate:
    """One compiled template. render() may be called from several threads at once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: "bos_token" and so on, visible to the template. Raises VLLMValidationError for a syntax error."""
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=lambda format: datetime.now().strftime(format))
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except Exception as e:  # Jinja compiles to Python, which has limits of its own: SyntaxError, RecursionError, ValueError
            raise _refused(e, "chat_template") from e

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `continue_final_message`: it ends inside the last message, for the model to go on there.

        `chat_template_kwargs`: variables of the template's own.
        """
        if continue_final_message and add_generation_prompt:
            raise VLLMValidationError(
                "continue_final_message and add_generation_prompt exclude each other: go on with the last message, or start a new one",
                parameter="continue_final_message",
            )
        variables = {"documents": None, **self._special_tokens, **(chat_template_kwargs or {})}
        if clash := _RESERVED & variables.keys():
            message = f"chat_template_kwargs may not hold {', '.join(map(repr, sorted(clash)))}: a field of the request"
            raise VLLMValidationError(message, parameter="chat_template_kwargs")
        normalised = normalise_messages(messages)
        final = normalised[-1].get("content") if continue_final_message else None
        if continue_final_message:
            if final is None:
                raise VLLMValidationError("continue_final_message: the last message has no content to continue", parameter="messages")
            normalised[-1]["content"] = final + _END_MARK
        variables.update(messages=normalised, tools=tools or None, add_generation_prompt=add_generation_prompt)
        try:
            prompt = self._template.render(variables)
        except Exception as e:  # a template can fail in any way that a program can: with what it was given, it cannot be served
            raise _refused(e, "messages") from e
        return prompt if final is None else _cut_at_mark(prompt, final)


def _cut_at_mark(prompt: str, final: str) -> str:
    at = prompt.rfind(_END_MARK.strip())
    if at == -1 or final.strip() not in prompt:
        raise VLLMValidationError(
            "continue_final_message: the chat template drops or changes the last message, so there is no place to go on from",
            parameter="continue_final_message",
        )
    if prompt.startswith(_END_MARK, at):
        return prompt[:at]
    return prompt[:at].rstrip()  # the template strips contents, and would have stripped this one
