"""What the README and the pages name is there; tests/docs runs their blocks."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_make_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in ("demo", "test", "lint", "docs", "bench", "clean"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
