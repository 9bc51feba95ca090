"""Overlay: the file's own object is in force, mistakes are told before anything starts, and nothing is shared."""

from pathlib import Path

import pytest

from mini_engine import LLM, overlay
from mini_engine.config import EngineConfig
from mini_engine.exceptions import VLLMValidationError


def test_two_files_at_one_seam_are_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.py", "two.txt")]  # the suffix does not matter
    for number, path in enumerate(paths):
        path.write_text(f"calls = []\ndef encode_event(payload):\n    calls.append(payload)\n    return {number}, len(calls)\n")
    one, two = (overlay.load({"server.sse": str(path)}, "server.sse", None) for path in paths)
    assert [one(b""), one(b""), two(b"")] == [(0, 1), (0, 2), (1, 1)]
    ours = object()
    assert overlay.load({"text.stop": str(paths[0])}, "server.sse", ours) is ours


@pytest.mark.parametrize("seam", overlay.SEAMS)
def test_mistakes_name_seam_and_file(tmp_path: Path, seam: str) -> None:
    path = tmp_path / "part.py"
    for text, said in (
        (None, "no such file"),
        ("x = 1", f"the file must define `{overlay.SEAMS[seam]}`"),
        ("def (", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ):
        if text is not None:
            path.write_text(text)
        with pytest.raises(VLLMValidationError, match=said) as caught:
            overlay.check({seam: str(path)})
        assert str(caught.value).startswith(f"overlay {seam}={path}: ") and caught.value.parameter == "overlay"
    path.write_text(f"{overlay.SEAMS[seam]} = print")
    overlay.check({seam: str(path)})


def test_unknown_seam() -> None:
    with pytest.raises(VLLMValidationError, match=r"wire\.codec.*got 'no\.seam'"):
        EngineConfig(overlay={"no.seam": "x.py"})


def test_offline_too_before_the_model_is_looked_for() -> None:
    with pytest.raises(VLLMValidationError, match=r"/no/file\.py: no such file"):
        LLM("no/such/model", overlay={"text.stop": "/no/file.py"})
