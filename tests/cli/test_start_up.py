"""What a start may load. A module that is not needed costs each run of the command its time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from snapcore.cli.version import version_line

from .conftest import Run

# Loaded where they are used, and by none of the commands below.
RARE: Final = frozenset(
    {
        *("alembic", "apscheduler", "boto3", "botocore", "docker", "e2b", "mcp", "pathspec", "prometheus_client", "psycopg"),
        *("pydantic", "pygments", "requests", "rich", "structlog", "tomllib", "tomli", "urllib3", "zoneinfo"),
        *("http", "html", "multiprocessing", "pdb", "sqlite3", "tarfile", "unittest", "xml"),
    }
)
DATABASE: Final = frozenset({"sqlalchemy"})
ENGINE: Final = frozenset({"blake3", "msgspec", "pyfastcdc", "zstandard", "ahocorasick_rs"})
FACE: Final = frozenset({"asyncio", "email", "importlib.metadata", "typer", "difflib", "inspect", "shellingham", "subprocess"})

# Writes what is loaded when the process ends, which `os._exit` does without asking anybody.
PROGRAM: Final = """
import json, os, sys
leave = os._exit
def told(code):
    with open(os.environ["LOADED"], "w") as file:
        json.dump([code, sorted(sys.modules)], file)
    leave(code)
os._exit = told
import snapcore.cli.main as m
del sys.modules["json"]
m.run()
"""


def loaded(tmp_path: Path, *args: str) -> set[str]:
    """The modules that a command has loaded by its end."""
    path = tmp_path / "loaded"
    subprocess.run(
        [sys.executable, "-c", PROGRAM, *args],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "LOADED": str(path)},
        check=True,
    )
    code, names = json.loads(path.read_text())
    assert code == 0
    return set(names)


def packages(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert version_line() == f"snapcore {version('snapcore')}"


def test_what_is_loaded_later_is_there_for_all_who_imported_it() -> None:
    program = """
import importlib, sys
from snapcore.cli.later import load_when_used
load_when_used(importlib, "metadata")
from importlib import metadata
import importlib.metadata
assert "email" not in sys.modules
assert metadata.version("snapcore") == importlib.metadata.version("snapcore")
assert metadata.PackageNotFoundError is importlib.metadata.PackageNotFoundError
assert importlib.metadata is sys.modules["importlib.metadata"] is not metadata
load_when_used(importlib, "metadata")
assert importlib.metadata.__file__
import importlib.metadata._adapters
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_version_needs_hardly_anything(tmp_path: Path) -> None:
    names = loaded(tmp_path, "--version")
    assert packages(names) & (RARE | DATABASE | ENGINE | FACE) == set()
    assert {name for name in names if name.startswith("snapcore.")} == {
        "snapcore.cli",
        "snapcore.cli.main",
        "snapcore.cli.version",
    }


@pytest.mark.parametrize("args", [("capture", "--help"), ("--help",), ("help", "list"), ("completion", "bash")])
def test_a_page_needs_no_engine(tmp_path: Path, args: tuple[str, ...]) -> None:
    names = loaded(tmp_path, *args)
    assert packages(names) & (RARE | DATABASE | ENGINE) <= {"msgspec"}
    assert "snapcore.repository" not in names


def test_a_capture_without_changes_loads_what_it_needs(made: Run, tree: Path, tmp_path: Path) -> None:
    names = loaded(tmp_path, "capture", str(tree), "--thread", "t", "--skip-unchanged")
    assert packages(names) & RARE == {"sqlite3"}
    own = {name.removeprefix("snapcore.") for name in names if name.startswith("snapcore.")}
    assert not own & {"cli.help", "cli.hints", "cli.completion", "restoring", "verification", "collecting", "repairing", "browse"}
    assert not any(name.startswith(("cron", "integrations", "testing")) for name in own)


def test_nothing_is_drawn_with_rich_before_there_is_something_to_draw(made: Run, tmp_path: Path) -> None:
    assert not packages(loaded(tmp_path, "verify", "--read-data", "--progress", "plain")) & {"rich", "pygments"}
