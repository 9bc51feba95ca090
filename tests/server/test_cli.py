"""The command line: mistakes are one line and exit 2, results are on stdout, and it starts fast."""

import json
from pathlib import Path

import pytest

from mini_engine import __version__
from mini_engine.config import EngineConfig, ServerConfig
from mini_engine.entrypoints import chat
from mini_engine.entrypoints.cli import main
from tests.server.serving import Served, run_cli, serving
from tests.test_rules import modules_after


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve a --model b", "once"),
        ("serve --executor abacus", "'abacus'"),
        ("serve --port 70000", "--port"),
        ("serve --max-num-seqs many", "--max-num-seqs"),
        ("serve --max-num-seqs 0", "max_num_seqs must be at least 1, got 0"),
        ("serve --overlay nonsense", "nonsense"),
        ("serve --overlay no.seam=x", "no.seam"),
        ("serve --colour", "--colour"),
        ("chat --url http://127.0.0.1:9", "127.0.0.1:9"),
        ("chat --executor mock --max-tokens 0", "max_tokens must be"),
        ("chat --url http://127.0.0.1:9 --temperature 9", "temperature must be"),
        ("bench offline --executor mock --input-len 999999", "--input-len 999999"),
        ("serve no/such/name/at/all --executor mock --port 0", "mini-engine model prepare"),
        ("model burn", "'burn'"),
        ("bench offline --executor mock --compare abacus", "'abacus'"),
        ("bench offline --compare vllm", "--vllm-python"),
        ("frob", "frob"),
    ],
)
def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("no/such", "no/such"),
        ("--host 256.1.1.1", "256.1.1.1"),
        ("--executor mock --chat-template /no/file", "/no/file"),
        ("--executor mock --overlay server.sse=/no/file.py", "/no/file.py"),
    ],
)
def test_a_server_that_cannot_serve_says_why_in_one_line(arguments: str, said: str) -> None:
    run = run_cli("serve", "--port", "0", *arguments.split())
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1 and said in run.stderr


def test_an_engine_that_cannot_start_is_exit_1(tmp_path: Path) -> None:
    overlay = tmp_path / "pool.py"
    overlay.write_text("class BlockPool:\n    def __init__(self, *args, **kwargs):\n        raise RuntimeError('no pool today')\n")
    run = run_cli("serve", "--executor", "mock", "--port", "0", "--overlay", f"kv_cache.block_pool={overlay}")
    assert run.returncode == 1 and run.stdout == ""
    assert "no pool today" in run.stderr and run.stderr.splitlines()[-1].startswith("error: EngineCore 0 ended during start-up")


def test_help_needs_no_engine() -> None:
    loaded = modules_after("import mini_engine.entrypoints.cli")
    assert not loaded & {"torch", "transformers", "fastapi", "uvicorn", "zmq", "tokenizers", "jinja2", "httpx"}
    for arguments in (["--help"], ["serve", "--help"], ["bench", "offline", "--help"]):
        assert run_cli(*arguments).returncode == 0


def test_overlay_of_the_last_step(tmp_path: Path) -> None:
    overlay = tmp_path / "sse.py"
    overlay.write_text("def encode_event(payload):\n    return b'event: mine\\ndata: ' + payload + b'\\n\\n'\n")
    with serving("--overlay", f"server.sse={overlay}") as server:
        raw = server.post("/v1/completions", prompt=[9], max_tokens=3, stream=True).content
        assert all(event.startswith(b"event: mine\ndata: ") for event in raw[:-2].split(b"\n\n"))
        assert "overlay: server.sse" in server.errors()


def test_chat_over_a_server_and_over_its_own_engine(server: Served) -> None:
    question = "What is the capital of France?\nAnd of Spain?\n"
    for arguments in (["--url", server.url], ["--executor", "mock"]):
        run = run_cli("chat", *arguments, "--max-tokens", "6", stdin=question)
        assert run.returncode == 0, run.stderr
        assert len(run.stdout.splitlines()) == 2 and run.stderr.count("[6 tokens, ") == 2 and "tokens/s" in run.stderr
    answers = {run_cli("chat", "--url", server.url, "--max-tokens", "6", "--system", s, stdin="hi\n").stdout for s in ("a", "b")}
    assert len(answers) == 2


def test_chat_uses_a_server_that_runs(server: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One of this version on the default port, unless the options ask for an engine that it may not be."""
    here = ServerConfig(port=int(server.url.rpartition(":")[2]))
    monkeypatch.setattr(chat, "ServerConfig", lambda: here)
    options = chat.Options(None, None, None, None, None, None)
    assert chat._running_server(EngineConfig(), options) == server.url and server.url in capsys.readouterr().err
    assert chat._running_server(EngineConfig(seed=7), options) is None
    monkeypatch.setattr("mini_engine.__version__", "another")
    assert chat._running_server(EngineConfig(), options) is None


def test_chat_with_a_server_that_has_a_key_or_fails() -> None:
    with serving("--api-key", "k", "--mock-crash-at-step", "4") as guarded:
        run = run_cli("chat", "--url", guarded.url, stdin="hi\n")
        assert run.returncode == 2 and "needs --api-key" in run.stderr and run.stderr.count("\n") == 1
        run = run_cli("chat", "--url", guarded.url, "--api-key", "k", stdin="hi\n")
        assert "\nerror: EngineCore" in run.stderr and run.stdout.endswith("\n"), run


def test_version() -> None:
    run = run_cli("--version")
    assert (run.returncode, run.stdout) == (0, f"mini_engine {__version__}\n")


def test_bench_offline_ends_with_json() -> None:
    run = run_cli("bench", "offline", "--executor", "mock", "--num-prompts", "3", "--output-len", "5", "--input-len", "4")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    (work,) = report["workloads"]
    assert (work["num_prompts"], work["input_len"], work["output_len"]) == (3, 4, 5)
    ours = work["results"]["mini_engine"]
    assert ours["tokens_per_s"] > 0 and (ours["decode_tokens_per_s"] is None or ours["decode_tokens_per_s"] < 1e8)


def test_model_shows_the_default_model() -> None:
    run = run_cli("model")
    assert run.returncode == 0 and "SmolLM2-135M-Instruct" in run.stdout and run.stderr == ""
