"""The examples of the pages about LangGraph and deepagents, run as they stand."""

from pathlib import Path
from typing import Any

import pytest
from langchain_core.tools import tool

from ..docs_examples import run_page  # noqa: TID252 (tests are no package that could be named)
from .deepagents_scripted import execute, scripted, write


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


def test_the_page_about_langgraph(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @tool
    async def write_chapter(text: str) -> str:
        """Write a chapter."""
        (folder / "chapter.txt").write_text(text)
        return "written"

    one, two = (("write_chapter", {"text": text}) for text in ("one", "two"))
    names: dict[str, Any] = run_page(
        "docs/integrations/langgraph.md", model=scripted([one], [two], "done", "done otherwise"), tools=[write_chapter]
    )
    assert names["result"]["messages"][-1].content == "done otherwise"
    assert names["restored"].checkpoint.totals.files == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == ["chapter 2", "False"]


def test_the_page_about_deepagents(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = scripted([write("/chapter.txt", "text")], [execute("rm chapter.txt")], "done")
    run_page("docs/integrations/deepagents.md", model=model)
    assert capsys.readouterr().out.splitlines() == ["1", "3", "None", "[2, 4, 3]"]
    assert (folder / "three.txt").read_text() == "3"
