"""A folder of this host as a sandbox."""

import os
import urllib.parse
from typing import TYPE_CHECKING

from snapcore.errors import Code, SnapshotError

from .direct import DirectWorkspace

if TYPE_CHECKING:
    from _typeshed import StrPath

__all__ = ["LocalSandbox", "connect"]


class LocalSandbox:
    """A sandbox handle for a local folder, which need not exist yet: a restore creates it."""

    def __init__(self, path: "StrPath") -> None:
        try:
            self._root = os.path.abspath(os.fspath(path))
        except FileNotFoundError as error:
            raise SnapshotError(
                "The current folder is gone.", code=Code.MISSING_WORKSPACE, hint="Change to one that exists."
            ) from error
        self._id = DirectWorkspace(self._root).sandbox_id

    @property
    def sandbox_id(self) -> str:
        """`file://` with the host's name and the resolved path."""
        return self._id

    @property
    def workspace_root(self) -> str:
        """The folder's absolute path."""
        return self._root

    def workspace(self, root: str | None = None) -> DirectWorkspace:
        """The bulk view of `root`; a relative one is taken from the sandbox's folder."""
        return DirectWorkspace(os.path.join(self._root, root) if root else self._root)

    async def close(self) -> None:
        """Nothing is held open."""


async def connect(address: str) -> LocalSandbox:
    """The sandbox at a path (`./dir`, `/dir`, `~/dir`) or a `file:` URL (percent-escapes are decoded; a host is ignored)."""
    if address.startswith("file:"):
        parts = urllib.parse.urlsplit(address, allow_fragments=False)
        address = os.fsdecode(urllib.parse.unquote_to_bytes(parts.path))
    return LocalSandbox(os.path.expanduser(address))
