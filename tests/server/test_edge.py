"""Around the routes: key, request id, size of the body, the small routes, the description of the API."""

import pytest

from mini_engine import __version__
from mini_engine.observe.metrics import PrometheusStatLogger
from tests.server.fake import MODEL, chat_body, client_of, make_app

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
