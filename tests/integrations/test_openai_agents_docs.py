"""The page about the OpenAI Agents SDK runs as it is written, without a network and without a key."""

from pathlib import Path

import pytest

pytest.importorskip("agents")

from ..docs_examples import run_page  # noqa: TID252 (tests are no package that could be named)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    names = run_page("docs/integrations/openai-agents.md")
    assert names["run"].final_output == "Written."
    assert {path.name for path in tmp_path.iterdir()} == {"snapshots"}
