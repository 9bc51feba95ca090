"""Chat templates: the text that transformers makes, in a sandbox, and the client's error for whatever fails inside."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.exceptions import VLLMValidationError
from mini_engine.model.default_model import prepare
from mini_engine.render.chat_template import ChatTemplate, normalise_messages
from mini_engine.render.model_files import ModelFiles
from mini_engine.render.renderer import Renderer
from mini_engine.render.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: whitespace control, loop controls, the generation tag, tojson, dates, special tokens, namespace, keyword arguments, missing names
EVERYTHING = """
{{- bos_token if bos_token is defined else 'none' }}{{ eos_token }}
{% set ns = namespace(count=0) %}
{%- if tools %}
    {% for tool in tools %}
{{ tool | tojson }}|{{ tool | tojson(indent=2) }}
    {% endfor %}
{% endif %}
{% for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% set ns.count = ns.count + 1 %}
  {{ loop.index }}: {{ m['content'] | trim }} {{ m.name }}
    {% if m.role == 'assistant' %}
{% generation %}
[{{ m.content }}]{% set inner = 1 %}
{% endgeneration %}
    {% endif %}
{% endfor %}
{{ ns.count }} {{ thinking }} {{ inner }} {{ documents }} {{ strftime_now('%Y') | length }} {{ dict(a=1) }}
{% if add_generation_prompt %}go{% endif %}
"""
STRIPPING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f", "description": "a < b & 'c' 中"}}]
CHATS = [
    [{"role": "user", "content": "What is <b>2 & 2</b>? 中文 🙂"}],
    [
        {"role": "system", "content": " be brief \n"},
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": "ok  "},
    ],
    [{"role": "user", "content": "a"}, {"role": "skip", "content": "b"}, *[{"role": "assistant", "content": f"{i}"} for i in range(5)]],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": None, "tool_calls": TOOLS}],
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return ModelFiles.load(prepare(weights=False))


@pytest.fixture(scope="module")
def oracle(files):
    from transformers import AutoTokenizer  # seconds to import: only when these tests run

    return AutoTokenizer.from_pretrained(files.model_dir)


@pytest.fixture(scope="module")
def renderer(files):
    renderer = Renderer(files, Tokenizer.load(files.model_dir), files.max_model_len)
    yield renderer
    renderer.close()


@pytest.mark.parametrize("chat", CHATS[:3])
@pytest.mark.parametrize("go", [True, False])
def test_default_model_equals_transformers(files, oracle, renderer, chat, go):
    prompt, ids = renderer.render_chat_sync(chat, add_generation_prompt=go)
    assert prompt == oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=go)
    assert ids == oracle.apply_chat_template(chat, add_generation_prompt=go)["input_ids"]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_every_construct_equals_transformers(files, oracle, renderer, chat, tools):
    kwargs = {"thinking": True, "inner": "outer"}
    ours, _ = renderer.render_chat_sync(chat, tools=tools, chat_template=EVERYTHING, chat_template_kwargs=kwargs)
    theirs = oracle.apply_chat_template(chat, tools=tools, chat_template=EVERYTHING, tokenize=False, add_generation_prompt=True, **kwargs)
    assert ours == theirs


@pytest.mark.parametrize("template", [CHATML, STRIPPING])
@pytest.mark.parametrize("final", ["The answer is", "The answer is ", " \n is", "is"])
def test_continuing_equals_transformers(oracle, renderer, template, final):
    chat = [{"role": "user", "content": "The answer is?"}, {"role": "assistant", "content": final}]
    ours, _ = renderer.render_chat_sync(chat, chat_template=template, add_generation_prompt=False, continue_final_message=True)
    theirs = oracle.apply_chat_template(chat, chat_template=template, tokenize=False, continue_final_message=True)
    assert ours == theirs
    assert chat[-1]["content"] == final


@pytest.mark.parametrize(
    "text", ["", " ", "Hello, world", "中文 🙂👨‍👩‍👧 \r\n\t x", "<|im_end|> in the text", "1234567 def f(x):\n    return x"]
)
def test_tokenization_equals_transformers(oracle, renderer, text):
    assert renderer.tokenize_prompt_sync(text) == oracle(text)["input_ids"]
    assert renderer.tokenize_prompt_sync(text, add_special_tokens=False) == oracle(text, add_special_tokens=False)["input_ids"]


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────


def test_text_parts_become_text():
    parts = [{"type": "text", "text": "one"}, "two", {"type": "text", "text": "three"}]
    message = {"role": "user", "content": parts, "name": None}
    assert normalise_messages([message, {"role": "assistant", "content": None, "tool_calls": TOOLS}]) == [
        {"role": "user", "content": "one\ntwo\nthree"},
        {"role": "assistant", "tool_calls": TOOLS},
    ]
    assert message == {"role": "user", "content": parts, "name": None}


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "at least one message"),
        (["hi"], r"messages\[0\] must be an object with a role"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\] must be an object with a role"),
        ([{"role": 5, "content": "b"}], r"messages\[0\] must be an object with a role"),
        ([{"role": "user"}], r"messages\[0\] needs content .*got \{'role': 'user'\}"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": None}], r"messages\[1\] needs content"),
        ([{"role": "assistant", "tool_calls": []}], r"messages\[0\] needs content"),
        ([{"role": "user", "content": None, "tool_calls": TOOLS}], r"messages\[0\] needs content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}], r"content\[1\] is of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] is of type 'text'"),
        ([{"role": "user", "content": [7]}], r"content\[0\] is of type 'int'"),
    ],
)
def test_bad_messages_are_named(messages, error):
    with pytest.raises(VLLMValidationError, match=error) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.parameter == "messages"


# ── what fails inside a template ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{{ messages[0].content + none }}", "chat template: TypeError: "),
        ("{{ 1 / 0 }}", "chat template: ZeroDivisionError: division by zero"),
        ("{{ nothing.at.all }}", "chat template: 'nothing' is undefined"),
        ("{{ messages.append(1) }}", "chat template: .*unsafe"),
        ("{{ messages[0].content.__class__.__mro__ }}", "chat template: .*unsafe"),
        ("{% for i in range(1000000000) %}{% endfor %}", "chat template: OverflowError: "),
        ("{{ raise_exception('no ' ~ '%c'|format(55555)) }}", r"chat template: no \?$"),
    ],
)
def test_errors_inside_are_the_clients(source, error):
    with pytest.raises(VLLMValidationError, match=error):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "source",
    [
        *(
            "{% for %}",
            "{% set x = 1 %}{% break %}",
            "{{ 10 ** 5000 }}",
            "{{ " + "1" * 6000 + " }}",
            "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        ),
        *("{% for i in [1] %}" * depth + "{% endfor %}" * depth for depth in (25, 200)),
    ],
    ids=lambda source: source[:30],
)
def test_a_template_that_cannot_be_compiled_is_told_when_it_is_given(source):
    """Jinja's own errors, and those of the Python that it compiles to."""
    with pytest.raises(VLLMValidationError, match="chat template: ") as caught:
        ChatTemplate(source)
    assert caught.value.parameter == "chat_template"


@given(st.text(st.characters(exclude_categories=()), min_size=1, max_size=20))
def test_any_str_is_tokenized_or_refused(renderer, text):
    try:
        text.encode()
    except UnicodeEncodeError:
        for refused in (
            lambda: renderer.tokenize_prompt_sync(text),
            lambda: renderer.render_chat_sync([{"role": "user", "content": text}]),
        ):
            with pytest.raises(VLLMValidationError, match=r"not valid Unicode: .*surrogates not allowed") as caught:
                refused()
            str(caught.value).encode()
    else:
        assert renderer.tokenize_prompt_sync(text) is not None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"continue_final_message": True}, "exclude each other"),
        ({"chat_template_kwargs": {"messages": []}}, "may not hold 'messages'"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "may not hold 'chat_template'"),
        (
            {"continue_final_message": True, "add_generation_prompt": False, "messages": [{"role": "assistant", "tool_calls": TOOLS}]},
            "no content to continue",
        ),
        ({"continue_final_message": True, "add_generation_prompt": False, "source": "{{ messages[0].role }}"}, "drops or changes"),
    ],
)
def test_options_that_do_not_go_together(options, error):
    source = options.pop("source", CHATML)
    messages = options.pop("messages", [{"role": "user", "content": "hi"}])
    with pytest.raises(VLLMValidationError, match=error):
        ChatTemplate(source).render(messages, **options)


def test_a_template_for_tools_is_used_with_tools_only(files):
    several = SimpleNamespace(special_tokens={}, chat_templates={"default": "plain", "tool_use": "tools"})
    renderer = Renderer(several, Tokenizer.load(files.model_dir), 100)
    chat = [{"role": "user", "content": "hi"}]
    assert renderer.render_chat_sync(chat)[0] == renderer.render_chat_sync(chat, tools=[])[0] == "plain"
    assert renderer.render_chat_sync(chat, tools=TOOLS)[0] == "tools"
    renderer.close()


def test_no_template_says_what_to_do(files):
    bare = SimpleNamespace(special_tokens={}, chat_templates={})
    renderer = Renderer(bare, Tokenizer.load(files.model_dir), 100)
    with pytest.raises(VLLMValidationError, match="--chat-template"):
        renderer.render_chat_sync([{"role": "user", "content": "hi"}])
    renderer.close()
