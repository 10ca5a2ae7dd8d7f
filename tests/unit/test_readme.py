"""The examples of the README run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from snapcore.testing.trees import compare_trees, make_tree

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def block(language: str) -> str:
    """All blocks of a language, one after the other."""
    found = re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert found
    return "".join(found)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    make_tree(tmp_path / "workspace", files=20)
    return tmp_path / "workspace"


def test_the_python_example(workspace: Path) -> None:
    code = block("python")
    assert len(code.strip().splitlines()) <= 15
    done = subprocess.run([sys.executable, "-c", code], cwd=workspace.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['after-install', None]\n"
    assert compare_trees(workspace, workspace.parent / "elsewhere") == []


def test_the_shell_example(workspace: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block("console")],
        cwd=workspace.parent,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert compare_trees(workspace, workspace.parent / "elsewhere") == []
    listing = subprocess.run(
        ["snapcore", "threads", "--repo", "repo"], cwd=workspace.parent, env=environment, capture_output=True, check=True
    )
    assert b"thread-2" in listing.stdout


def test_make_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in ("demo", "test", "lint", "bench", "clean"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
