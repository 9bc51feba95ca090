"""The error table covers every exception of the package, and each error reaches the client in the right way."""

import inspect
import json

import pytest

from mini_engine import exceptions
from mini_engine.exceptions import EngineDeadError, EngineGenerateError, MiniEngineError
from mini_engine.server import errors
from tests.server.fake import chat_body, client_of, completion_body, make_app, parse_sse

pytestmark = pytest.mark.anyio

OURS = [
    cls
    for module in (exceptions, errors)
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, MiniEngineError) and cls.__module__ == module.__name__
]


@pytest.mark.parametrize("cls", OURS)
def test_every_exception_has_a_row(cls: type[MiniEngineError]) -> None:
    assert cls in errors.ERROR_TABLE, f"{cls.__name__} needs a row in server/errors.py::ERROR_TABLE"
    kind, body = errors.error_body(cls("why"))
    assert kind is errors.ERROR_TABLE[cls]
    assert json.loads(body) == {"error": {"message": "why", "type": kind.type, "param": None, "code": kind.code}}


def test_a_subclass_takes_its_parents_row_and_a_bug_is_500(caplog: pytest.LogCaptureFixture) -> None:
    class Special(EngineGenerateError):
        pass

    assert errors.error_kind(Special()) is errors.ERROR_TABLE[EngineGenerateError]
    kind, body = errors.error_body(ZeroDivisionError("a secret"))
    assert kind.status == 500 and b"secret" not in body and "a secret" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", ["step 7 went wrong", EngineDeadError("gone"), RuntimeError("bug")])
async def test_error_before_the_first_byte_has_a_status(stream: bool, failure: Exception | str) -> None:
    engine, app = make_app()
    engine.fail_at = {0: failure}
    async with client_of(app) as client:
        for path, body in (("/v1/chat/completions", chat_body()), ("/v1/completions", completion_body(prompt=["a", "b"]))):
            response = await client.post(path, json=body | {"stream": stream})
            assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
            if not isinstance(failure, RuntimeError):
                assert str(failure) in response.json()["error"]["message"]
    assert not engine.open


@pytest.mark.parametrize("failure", ["step 7 went wrong", EngineDeadError("gone")])
async def test_error_after_the_first_byte_is_one_event_then_done(failure: Exception | str) -> None:
    engine, app = make_app()
    engine.fail_at = {2: failure}
    async with client_of(app) as client:
        for path, body in (("/v1/chat/completions", chat_body()), ("/v1/completions", completion_body())):
            response = await client.post(path, json=body | {"stream": True})
            *chunks, last = parse_sse(response.content)
            assert response.status_code == 200 and all("choices" in chunk for chunk in chunks)
            assert last.keys() == {"error"} and last["error"]["message"] == str(failure)
    assert not engine.open


async def test_refusal_by_the_engine_side_is_400() -> None:
    _, app = make_app()
    async with client_of(app) as client:
        for stream in (False, True):
            response = await client.post(
                "/v1/completions", json=completion_body(prompt="x" * 1001, stream=stream, add_special_tokens=False)
            )
            assert response.status_code == 400
            assert "1001" in response.json()["error"]["message"] and "1000" in response.json()["error"]["message"]


async def test_dead_engine() -> None:
    engine, app = make_app()
    async with client_of(app) as client:
        assert (await client.get("/health")).status_code == 200
        engine.errored, engine.dead_error = True, EngineDeadError("killed by signal 9")
        for path in ("/health", "/ping"):
            response = await client.get(path)
            assert response.status_code == 503 and "signal 9" in response.json()["error"]["message"]
        response = await client.post("/v1/chat/completions", json=chat_body(stream=True))
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"


async def test_stuck_engine() -> None:
    engine, app = make_app()
    async with client_of(app) as client:
        for method in ("GET", "POST"):
            assert (await client.request(method, "/ping")).json()["status"] == "ok"
        engine.stuck = True
        response = await client.post("/ping", params={"timeout_s": 0.5})
        assert response.status_code == 503 and "not answered for 0.5 s" in response.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/ping?timeout_s=x", 400)]
)
async def test_the_routers_own_errors_have_the_shape(method: str, path: str, status: int) -> None:
    _, app = make_app()
    async with client_of(app) as client:
        response = await client.request(method, path)
    assert response.status_code == status and response.json()["error"].keys() == {"message", "type", "param", "code"}
    if status != 400:
        assert f"{method} {path} " in response.json()["error"]["message"] and "/docs" in response.json()["error"]["message"]
