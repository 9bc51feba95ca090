"""The command line: mistakes are one line and exit 2, results are on stdout, and it starts fast."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from mini_engine import __version__, overlay
from mini_engine.config import EngineConfig, ServerConfig
from mini_engine.entrypoints import chat
from mini_engine.entrypoints.cli import main
from tests.server.serving import CLI, Served, run_cli, serving
from tests.test_rules import modules_after


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve a --model b", "once"),
        ("serve --executor abacus", "'abacus'"),
        ("serve --port 70000", "--port"),
        ("serve --max-num-seqs many", "--max-num-seqs"),
        ("serve --max-num-seqs 0", "max_num_seqs must be at least 1, got 0"),
        ("serve --max-model-len 1", "max_model_len must be at least 2, got 1"),
        ("serve --executor mock --api-key=", "api_key must not be empty"),
        ("engine --executor mock --data-parallel-address 300.1.1.1", "300.1.1.1"),
        (f"engine --executor mock --data-parallel-address {'x' * 64}.y", "xxx.y"),
        ("serve --block-size -16", "block_size must be at least 1, got -16"),
        ("serve --kv-cache-memory-bytes 0", "kv_cache_memory_bytes must be at least 1, got 0"),
        ("serve --device tpu", "device must be auto, cpu or cuda, got 'tpu'"),
        ("serve --shutdown-timeout inf", "--shutdown-timeout"),
        ("engine --overlay text.stop=/no/file.py", "/no/file.py: no such file"),
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
        ("--max-model-len 8193", "max_model_len 8193 is more than 8192, the model's own"),
        ("--executor mock --frontend python --max-model-len 8193", "max_model_len 8193 is more than 8192, the model's own"),
        ("--executor mock --chat-template TMP/template", "chat template: "),
        ("--executor mock --data-parallel-size-local 0 --data-parallel-address 300.1.1.1", "300.1.1.1"),
        ("--overlay server.sse=/no/file.py", "/no/file.py: no such file"),
        ("--overlay kv_cache.block_pool=TMP/empty", "the file must define `BlockPool`"),
        ("--overlay scheduler.schedule=TMP/imports", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("--executor mock --frontend python --overlay text.stop=TMP/template", "SyntaxError"),
    ],
)
def test_a_server_that_cannot_serve_says_why_in_one_line(tmp_path: Path, arguments: str, said: str) -> None:
    """And before it starts anything: not a line of an engine's log."""
    for name, text in (("template", "{% if"), ("empty", ""), ("imports", "import no_such_module")):
        (tmp_path / name).write_text(text)
    run = run_cli("serve", "--port", "0", *arguments.replace("TMP", str(tmp_path)).split())
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1 and said in run.stderr


def test_an_empty_key_in_the_environment_is_no_open_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_ENGINE_API_KEY", "")
    run = run_cli("serve", "--executor", "mock", "--port", "0")
    assert run.returncode == 2 and "api_key must not be empty" in run.stderr


def test_an_engine_that_cannot_start_is_exit_1(tmp_path: Path) -> None:
    overlay = tmp_path / "pool.py"
    overlay.write_text("class BlockPool:\n    def __init__(self, *args, **kwargs):\n        raise RuntimeError('no pool today')\n")
    run = run_cli("serve", "--executor", "mock", "--port", "0", "--overlay", f"kv_cache.block_pool={overlay}")
    assert run.returncode == 1 and run.stdout == ""
    assert "no pool today" in run.stderr and run.stderr.splitlines()[-1].startswith("error: EngineCore 0 ended during start-up")


@pytest.mark.parametrize("frontend", ["inline", "python"])
def test_an_option_that_only_the_engine_can_refuse_is_exit_2(frontend: str) -> None:
    run = run_cli(
        "serve", "--executor", "mock", "--port", "0", "--num-gpu-blocks-override=2", "--max-model-len=100", "--frontend", frontend
    )
    assert run.returncode == 2 and run.stdout == "" and "Traceback" not in run.stderr
    assert "max_model_len 100 is more than 16" in run.stderr and run.stderr.splitlines()[-1].startswith("error: EngineCore 0 ended")


@pytest.mark.parametrize("closed", ["<&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str) -> None:
    """No socket or file of ours gets their numbers: uvloop would abort, and a library's complaint would go into a socket."""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *CLI, "chat", "--executor", "mock", "--max-tokens", "5"]
    run = subprocess.run(command, input="hello\n", capture_output=True, text=True, check=False, timeout=30)
    assert run.returncode == 0 and "Traceback" not in run.stderr
    assert bool(run.stdout) == (closed == "2>&-")


@pytest.mark.parametrize(
    "arguments", ["model show", "--version", "serve --executor mock --port 0", "serve --executor mock --port 0 --frontend python"]
)
def test_nowhere_to_write_is_one_line(arguments: str) -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run([*CLI, *arguments.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=30)
    errors = [line for line in run.stderr.splitlines() if "] INFO " not in line]
    assert run.returncode == 1 and errors == ["error: [Errno 28] No space left on device"]


def test_help_needs_no_engine() -> None:
    loaded = modules_after("import mini_engine.entrypoints.cli")
    assert not loaded & {"torch", "transformers", "fastapi", "uvicorn", "zmq", "tokenizers", "jinja2", "httpx"}
    for arguments in (["--help"], ["serve", "--help"], ["bench", "offline", "--help"]):
        assert run_cli(*arguments).returncode == 0


def test_help_is_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and "…" not in text and max(map(len, text.splitlines())) <= 80
    for whole in ("--max-num-batched-tokens", "--disable-uvicorn-access-log", *overlay.SEAMS, "[default: the model's]"):
        assert whole in text


def test_no_command_is_help_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["bench"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        out, err = capsys.readouterr()
        assert caught.value.code == 2 and (out + err).startswith("Usage: ") and "error" not in out + err


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


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_chat_goes_on_after_bytes_that_are_no_text(server: Served, errors: str) -> None:
    environment = os.environ | {"NO_PROXY": "*", "PYTHONIOENCODING": f"utf-8:{errors}"}
    for arguments in (["--url", server.url], ["--executor", "mock"]):
        command = [*CLI, "chat", *arguments, "--max-tokens", "6"]
        run = subprocess.run(command, input=b"hi\xff\nhi\n", capture_output=True, check=False, timeout=50, env=environment)
        assert run.returncode == 0 and run.stderr.count(b"error: ") == 1 and run.stderr.count(b"[6 tokens, ") == 1, run.stderr
        assert b"surrogates" in run.stderr and b"Traceback" not in run.stderr
    run_system = run_cli("chat", "--executor", "mock", "--system", "\udcff", stdin="hi\n")
    assert run_system.returncode == 0 and "error: the text is not valid Unicode" in run_system.stderr, run_system


def test_chat_uses_a_server_that_runs(server: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One of this version on the default port, unless the options ask for an engine that it may not be."""
    here = ServerConfig(port=int(server.url.rpartition(":")[2]))
    monkeypatch.setattr(chat, "PROBE_TIMEOUT_S", 20.0)
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
