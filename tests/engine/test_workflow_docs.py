"""The page on workflows and automatic checkpoints, run as it stands."""

from pathlib import Path

import pytest

from ..docs_examples import run_page  # noqa: TID252  # the tests are no package that could be named


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    names = run_page("docs/workflows.md")
    assert names["second"].reason == "2 of 4 steps are done and unchanged"
    assert (tmp_path / "data").is_dir()
