"""Running `snapcore cron` in this process."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapcore.cli.app import app

from ..cli.conftest import Outcome  # noqa: TID252  # the tests are no package that could be named

__all__ = ["Command", "Outcome", "command"]

Command = Callable[..., Outcome]


def command(monkeypatch: pytest.MonkeyPatch, repo: Path, *, terminal: bool = False) -> Command:
    """A function that runs the command with a repository, and returns what came of it; `typed` is what stdin holds. With
    `terminal`, the standard streams pass for a terminal's."""
    monkeypatch.setenv("SNAPCORE_REPO", str(repo))
    for name in ("SNAPCORE_DATABASE", "SNAPCORE_CONFIG", "SNAPCORE_THREAD"):
        monkeypatch.delenv(name, raising=False)

    def call(*args: str, code: int = 0, typed: str = "") -> Outcome:
        stdout, stderr = io.BytesIO(), io.BytesIO()
        with monkeypatch.context() as patch:
            for name, stream in (("stdout", stdout), ("stderr", stderr)):
                patch.setattr(sys, name, _text(stream, terminal))
            patch.setattr(sys, "stdin", _text(io.BytesIO(typed.encode()), terminal))
            with pytest.raises(SystemExit) as exit_:
                app(args)
            sys.stdout.flush()
            outcome = Outcome(int(exit_.value.code or 0), stdout.getvalue(), stderr.getvalue().decode())
        assert outcome.code == code, outcome
        return outcome

    return call


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def _text(stream: io.BytesIO, terminal: bool) -> Any:
    kind = _Terminal if terminal else io.TextIOWrapper
    return kind(stream, "utf-8", errors="backslashreplace", write_through=True)
