"""The page on sessions does what it says."""

from pathlib import Path

import pytest

from ..docs_examples import run_page  # noqa: TID252 (tests are no package that could be named)


def test_the_page_on_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    run_page("docs/sessions.md")
    printed = capsys.readouterr().out
    assert printed.startswith("1 files are back\n")
    assert "stdout b'1\\n2\\n3\\n'" in printed
    assert "exec.completed" in printed
