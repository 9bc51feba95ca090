"""Around the routes: key, request id, size of the body, the small routes, the description of the API."""

from functools import cache
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from mini_engine import __version__
from mini_engine.observe.metrics import PrometheusStatLogger
from tests.server.fake import MODEL, AsgiClient, chat_body, client_of, completion_body, make_app

pytestmark = pytest.mark.anyio


async def test_the_key_guards_v1_only() -> None:
    _, app = make_app(api_key="secret")
    async with client_of(app) as client:
        for path in ("/health", "/ping", "/version", "/metrics", "/load"):
            assert (await client.get(path)).status_code == 200, path
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            for path in ("/v1/models", "/inference/v1/generate"):
                response = await client.get(path, headers=headers)
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200


@cache
def app_under(root_path: str, api_key: str | None) -> FastAPI:
    return make_app(api_key=api_key, root_path=root_path)[1]


ROOTS = st.sampled_from(["", "/", "/v", "/v1", "/v1/", "/p", "/p/", "p", "/v1/models", "//", "/inference"])


@given(
    ROOTS, ROOTS | st.text("/v1p", max_size=4), st.sampled_from(["/v1/models", "v1/models", "1/models", "/models", f"/v1/models/{MODEL}"])
)
async def test_the_key_guards_whatever_the_router_finds(root_path: str, prefix: str, rest: str) -> None:
    """Under any root path, at any path: what is refused without a key, and only that, is what lies below the guarded prefixes."""
    answers = []
    for api_key in (None, "secret"):
        client = AsgiClient(app_under(root_path, api_key), prefix + rest, {}, method="GET")
        await client.task
        answers.append((client.messages[0]["status"], client.body))
    (status, body), guarded = answers
    assert guarded[0] == 401 if status == 200 else guarded in ((401, guarded[1]), (status, body))


@given(
    st.integers(1, 12), st.integers(1, 40), st.integers(1, 3000), st.integers(1, 300), st.sampled_from(["completions", "chat/completions"])
)
async def test_a_body_cannot_be_multiplied(num_prompts: int, n: int, num_stop_chars: int, num_prompt_chars: int, route: str) -> None:
    """Each answer is a message to the engine: all of them carry no more than a body may, and one answer is always allowed."""
    limit = 8000
    engine, app = make_app(max_body_bytes=limit)
    content = "p" * num_prompt_chars
    asked: dict[str, Any] = {"n": n, "temperature": 1, "stop": ["s" * num_stop_chars]}
    body = completion_body(prompt=[content] * num_prompts) if route == "completions" else chat_body()
    async with client_of(app) as client:
        response = await client.post(f"/v1/{route}", json=body | asked)
    params = sum(r["params"].n * len(msgspec.msgpack.encode(r["params"])) for r in engine.requests)
    prompts = sum(r["params"].n * len(r["prompt"]) for r in engine.requests)
    size, answers = len(response.request.content), (num_prompts if route == "completions" else 1) * n
    if response.status_code == 200:
        assert params <= limit and prompts <= limit
    elif size > limit:
        assert response.status_code == 413
    else:
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "n" and not engine.requests and answers > 1
        assert f"a body of {size} bytes for {answers} answers" in error["message"] and f"at most {limit}" in error["message"]
        assert size * n > limit or (num_stop_chars + 300) * answers > limit  # not for nothing


async def test_request_id_goes_through() -> None:
    engine, app = make_app()
    async with client_of(app) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(), headers={"x-request-id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1" and response.json()["id"] == "chatcmpl-abc-1" == engine.requests[0]["id"]
        response = await client.post("/v1/chat/completions", json=chat_body(), headers={"x-request-id": "two words"})
        assert len(response.headers["x-request-id"]) == 32 and response.json()["id"].endswith(response.headers["x-request-id"])


async def test_body_limit() -> None:
    _, app = make_app(max_body_bytes=1000)
    async with client_of(app) as client:

        async def chunks():
            for _ in range(11):
                yield b" " * 100

        for content in (b" " * 1001, chunks()):
            response = await client.post("/v1/chat/completions", content=content)
            assert response.status_code == 413 and "1000 bytes" in response.json()["error"]["message"]
            assert response.headers["connection"] == "close"
        assert (await client.post("/v1/chat/completions", json=chat_body())).status_code == 200


async def test_small_routes() -> None:
    metrics = PrometheusStatLogger(MODEL, 1000)
    _, app = make_app(metrics=metrics)
    async with client_of(app) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["id"] == MODEL and card["max_model_len"] == 1000
        assert (await client.get(f"/v1/models/{MODEL}")).json() == card
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/version")).json() == {"version": __version__}
        assert (await client.head("/health")).status_code == 200
        assert (await client.get("/load")).json() == {"server_load": 0}
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain") and 'model_name="fake-model"' in response.text
        schema = (await client.get("/openapi.json")).json()
        body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["$ref"].rpartition("/")[2] in schema["components"]["schemas"]


async def test_two_apps_share_nothing() -> None:
    (first, app), (second, other) = make_app(), make_app()
    async with client_of(app) as client:
        await client.post("/v1/chat/completions", json=chat_body())
    assert len(first.requests) == 1 and not second.requests and app.state.service is not other.state.service
