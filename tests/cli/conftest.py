"""Running the command: in this process where many calls are made, as a process of its own where that matters."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from snapcore.cli.app import app


@dataclass(frozen=True)
class Outcome:
    """What a command did: its exit code, and what it wrote."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    @property
    def error(self) -> Any:
        return json.loads(self.stderr)


class Run(Protocol):
    """Runs a command in this process, with `SNAPCORE_REPO` set to the test's repository. `code` is the exit code that it has to
    have, None for any; `terminal`: stdout is one."""

    def __call__(self, *args: str, code: int | None = 0, terminal: bool = False) -> Outcome: ...


class Terminal(io.BytesIO):
    """Bytes that say of themselves that they are a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a repository that is not there yet, as the environment names it."""
    path = tmp_path / "repo"
    monkeypatch.setenv("SNAPCORE_REPO", str(path))
    for name in ("DATABASE", "THREAD", "PROGRESS", "CONFIG"):
        monkeypatch.delenv(f"SNAPCORE_{name}", raising=False)
    return path


@pytest.fixture
def run(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*args: str, code: int | None = 0, terminal: bool = False) -> Outcome:
        stdout, stderr = Terminal() if terminal else io.BytesIO(), io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(stdout, "utf-8", errors="backslashreplace", write_through=True))
            patch.setattr(sys, "stderr", io.TextIOWrapper(stderr, "utf-8", errors="backslashreplace", write_through=True))
            with pytest.raises(SystemExit) as exit_:
                app(args)
            sys.stdout.flush()
            outcome = Outcome(int(exit_.value.code or 0), stdout.getvalue(), stderr.getvalue().decode())
        assert code is None or outcome.code == code, outcome
        return outcome

    return call


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small workspace: two files, a folder, a link."""
    root = tmp_path / "tree"
    (root / "src").mkdir(parents=True)
    (root / "src" / "main.py").write_bytes(b"print('hello')\n")
    (root / "notes.txt").write_bytes(b"first\n")
    (root / "link").symlink_to("src/main.py")
    return root


@pytest.fixture
def made(run: Run, tree: Path) -> Run:
    """A repository with two checkpoints, `one` and `two`, of the thread `t`: the second changes, adds and removes a file."""
    run("init")
    run("capture", str(tree), "--thread", "t", "--id", "one", "--label", "first")
    (tree / "notes.txt").write_bytes(b"second, longer\n")
    (tree / "added.txt").write_bytes(b"added\n")
    (tree / "src" / "main.py").unlink()
    run("capture", str(tree), "--thread", "t", "--id", "two")
    return run


def spawn(*args: str, env: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """The command as a process of its own, with more in its environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "snapcore.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )
