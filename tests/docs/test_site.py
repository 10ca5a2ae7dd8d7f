"""The site's pages about the Python API have every public name, and nothing that is not there."""

import importlib
import re
from typing import Final

import pytest

from ..docs_examples import ROOT  # noqa: TID252  # the tests are no package that could be named

PAGES: Final = [ROOT / "docs" / "api.md", *sorted((ROOT / "docs" / "api").glob("*.md"))]
SHOWN: Final = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)]
WHOLE: Final = (
    "snapcore",
    "snapcore.blocking",
    "snapcore.maintenance",
    "snapcore.protocols",
    "snapcore.runs",
    "snapcore.sandboxes",
    "snapcore.testing",
    *(
        f"snapcore.integrations.{name}"
        for name in (
            "agent_tools",
            "coding_tools",
            "deepagents",
            "langgraph",
            "mcp_server",
            "openai_agents",
            "rebuno",
            "rebuno_git",
        )
    ),
)
MODULES: Final = {"snapcore.blocking"}  # that are public names themselves, and have a page


@pytest.mark.parametrize("module", WHOLE)
def test_every_public_name_is_on_a_page(module: str) -> None:
    names = importlib.import_module(module).__all__
    missing = [name for name in names if not {f"{module}.{name}", f"snapcore.{name}"} & {*SHOWN, *MODULES}]
    assert missing == []


def test_what_is_on_a_page_is_there() -> None:
    for name in SHOWN:
        module, _, attribute = name.rpartition(".")
        assert attribute in importlib.import_module(module).__all__, name
        assert getattr(importlib.import_module(module), attribute) is not None, name


def test_no_name_is_shown_twice() -> None:
    assert sorted(SHOWN) == sorted(set(SHOWN))


def test_no_page_of_the_site_loads_anything_from_elsewhere() -> None:
    """As far as settings say: the fonts are the reader's own, and no plugin or script is one that fetches."""
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "font: false" in settings
    assert not re.search(r"https?://|^\s+- (?:offline|privacy|social)\b", settings, re.MULTILINE)
