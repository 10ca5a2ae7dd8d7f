"""For tests of sessions: commands whose runs are counted outside of the sandbox, and what a sandbox holds."""

from pathlib import Path
from typing import Any

from snapcore.ledger import Event
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository
from snapcore.session import Session

__all__ = ["Counter", "contents", "local", "whole_ledger"]


class Counter:
    """A file beside the sandboxes with a line for each run of a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, name: str, then: str = "true") -> str:
        """A command that notes its name there, then does something."""
        return f"echo {name} >> {self.path}; {then}"

    @property
    def runs(self) -> list[str]:
        """The names, in order."""
        return self.path.read_text().split() if self.path.exists() else []


def contents(session: Session) -> dict[str, bytes]:
    """The files of a local sandbox, by their path in it."""
    root = Path(session.handle.workspace_root)
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


async def whole_ledger(repo: Repository, thread_id: str) -> list[Event]:
    """All events of a thread."""
    return await repo.events(thread_id, limit=100_000)


def local(base: Path, **hooks: Any) -> LocalProvider:
    """A provider of local sandboxes below a folder."""
    return LocalProvider(base / "sandboxes", **hooks)
