"""The field law: every field is used, or has no effect by definition, or is refused by name. Nothing is accepted and ignored."""

import contextlib
import gc
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from mini_engine.exceptions import VLLMValidationError
from mini_engine.server import fields
from mini_engine.server.protocol import ChatCompletionRequest, CompletionRequest, parse_request
from tests.server.fake import chat_body, client_of, completion_body, make_app, parse_sse

pytestmark = pytest.mark.anyio

ROUTES = {
    "/v1/chat/completions": (ChatCompletionRequest, chat_body),
    "/v1/completions": (CompletionRequest, completion_body),
}
NOT_BUILT = [(path, name) for path, (model, _) in ROUTES.items() for name in model.not_built]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)

#: field → a value other than the default, whose effect must be seen behind the route
CHANGES: dict[str, Any] = {
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.25,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 2.0},
    "seed": 7,
    "stop": "x",
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 1,
    "skip_special_tokens": False,
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "priority": 3,
    "cache_salt": "salt",
    "request_id": "mine",
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "top_logprobs": 2,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"x": 1},
    "echo": True,
    "prompt": "other",
    "messages": [{"role": "user", "content": "other"}],
    "model": "another",
}
PER_ROUTE: dict[tuple[str, str], Any] = {
    ("/v1/chat/completions", "logprobs"): True,
    ("/v1/completions", "logprobs"): 2,
    ("/v1/chat/completions", "add_special_tokens"): True,
    ("/v1/completions", "add_special_tokens"): False,
}
#: what a field needs beside it, in the request with it and the one without
COMPANIONS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "return_tokens_as_token_ids": {"logprobs": 1},
    "continue_final_message": {"add_generation_prompt": False},
}


async def observe(path: str, body: dict[str, Any]) -> str:
    """Everything that can be seen of a request: what the engine and renderer got, and the answer but for ids and clocks."""
    engine, app = make_app(priority_scheduling=True, trust_request_chat_template=True)
    async with client_of(app) as client:
        response = await client.post(path, json=body)
    if response.status_code != 200:
        return response.text
    answers = list(parse_sse(response.content)) if body.get("stream") else [response.json()]
    for answer in answers:
        answer.pop("created")
        if body.get("request_id") is None:
            answer.pop("id")
    requests = [r if body.get("request_id") else {k: v for k, v in r.items() if k != "id"} for r in engine.requests]
    return repr((requests, engine.renderer.calls, answers))


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, (model, _) in ROUTES.items() for name in model.model_fields])
async def test_every_used_field_changes_something(path: str, name: str) -> None:
    value = PER_ROUTE.get((path, name), CHANGES.get(name))
    assert value is not None, f"{name} has no value in CHANGES: add one, and the code that uses it"
    companions = dict(COMPANIONS.get(name, {}))
    if path == "/v1/chat/completions" and "logprobs" in companions:
        companions["logprobs"] = True
    base = ROUTES[path][1](**companions)
    assert await observe(path, base) != await observe(path, base | {name: value})


async def test_a_template_of_the_requests_own_is_refused_unless_the_server_trusts_them() -> None:
    """It is a program, and may run for ever."""
    engine, app = make_app()
    async with client_of(app) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(chat_template="{{ messages }}"))
        assert response.status_code == 400 and not engine.renderer.calls
        error = response.json()["error"]
        assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]


@pytest.mark.parametrize(("path", "name"), NOT_BUILT)
async def test_known_but_not_built_is_400_naming_it(path: str, name: str) -> None:
    model, body = ROUTES[path]
    _, app = make_app()
    async with client_of(app) as client:
        response = await client.post(path, json=body(**{name: {"surely": "not neutral"}}))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == name and name in error["message"] and error["type"] == "invalid_request_error"
        for neutral in (None, *model.not_built[name]):
            assert (await client.post(path, json=body(**{name: neutral}))).status_code == 200, neutral


@pytest.mark.parametrize("path", ROUTES)
async def test_fields_without_effect_have_none(path: str) -> None:
    body = ROUTES[path][1]()
    plain = await observe(path, body)
    for name in fields.WITHOUT_EFFECT:
        assert await observe(path, body | {name: "something"}) == plain


@pytest.mark.parametrize(
    ("path", "name"), [(p, n) for p, (m, _) in ROUTES.items() for n in m.model_fields if n not in ("messages", "prompt")]
)
async def test_null_is_the_same_as_absent(path: str, name: str) -> None:
    base = ROUTES[path][1]()
    base.pop(name, None)
    assert await observe(path, base) == await observe(path, base | {name: None})


@given(path=st.sampled_from(list(ROUTES)), name=st.text(min_size=1, max_size=20), value=JSON)
def test_unknown_field_is_refused_by_name(path: str, name: str, value: Any) -> None:
    model, body = ROUTES[path]
    if name in model.model_fields or name in model.not_built or name in fields.WITHOUT_EFFECT:
        return
    with pytest.raises(VLLMValidationError) as caught:
        parse_request(model, json.dumps(body(**{name: value})).encode())
    assert caught.value.parameter == name and name in str(caught.value)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": [{"role": "user", "content": "x", "color": 1}]}, "messages[0].color"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "size": 1}]}]}, "messages[0].content[0].size"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"stream": True, "stream_options": {"speed": 9}}, "stream_options.speed"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": None}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 0}, "n"),
        ({"use_beam_search": 0}, "use_beam_search"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"stop": ["a", 10**400]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"priority": 1}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "two\nlines"}, "request_id"),
    ],
)
async def test_wrong_values_name_the_field(more: dict[str, Any], param: str) -> None:
    _, app = make_app()
    async with client_of(app) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(**more))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and param.split(".")[-1].split("[")[0] in error["message"]


async def test_openai_clients_round_trip_of_a_message_is_accepted() -> None:
    """message.model_dump() of an answer, sent back as history: nulls and empty lists ask for nothing."""
    history = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    engine, app = make_app()
    async with client_of(app) as client:
        body = chat_body(messages=[history, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert engine.renderer.calls[0]["messages"] == [{"role": "assistant", "content": "x"}, {"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"nul", b"\xff\xfe", b'{"a":NaN}', b'"\\ud800"', b"[" * 200_000, b'{"prompt":1e999}'])
async def test_what_is_not_a_json_object_is_400(raw: bytes) -> None:
    _, app = make_app()
    async with client_of(app) as client:
        for path in ROUTES:
            response = await client.post(path, content=raw)
            assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


NAMES = sorted({name for model, _ in ROUTES.values() for name in (*model.model_fields, *model.not_built)} | fields.WITHOUT_EFFECT)


@given(path=st.sampled_from(list(ROUTES)), more=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), JSON, max_size=4))
def test_any_json_is_a_request_or_a_400(path: str, more: dict[str, Any]) -> None:
    """Up to the engine, with any value in any field: nothing else is ever raised."""
    model, body = ROUTES[path]
    with contextlib.suppress(VLLMValidationError):
        request = parse_request(model, json.dumps(body() | more).encode())
        request.to_sampling_params({})
        if isinstance(request, ChatCompletionRequest):
            request.template_messages()
        else:
            assert isinstance(request, CompletionRequest)
            assert len(request.prompts()) >= 1


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatCompletionRequest, {"messages": [1] * 1000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (CompletionRequest, {"prompt": [[]] * 999 + [[None]]}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 1000}),
    ],
)
def test_a_body_full_of_mistakes_costs_no_more_than_one(model: type[BaseModel], body: dict[str, Any]) -> None:
    """A report on each of a million of them would stop the event loop for seconds."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 5  # one for each type that the field may have


@pytest.mark.parametrize("raw", [b'{"prompt": "a"}', b"{", b"[]", b"", b"[" * 100_000, b'{"prompt": 1}'])
def test_the_garbage_collector_is_on_again(raw: bytes) -> None:
    with contextlib.suppress(VLLMValidationError):
        parse_request(CompletionRequest, raw)
    assert gc.isenabled()
