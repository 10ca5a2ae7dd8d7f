"""Where a repository must not lie: inside a workspace, where captures would store it and restores would remove it; nor a
workspace inside a repository."""

import os
import re
import urllib.parse
from collections.abc import Iterable
from typing import Final

from .errors import Code, SnapshotError, printable
from .protocols import BlobStore, CheckpointStore, Workspace

__all__ = ["refuse_own_files"]

_SQLITE: Final = re.compile(r"^sqlite(\+\w+)?:///([^?]+)")


def refuse_own_files(blobs: BlobStore, checkpoints: CheckpointStore, workspaces: Iterable[Workspace]) -> None:
    """Raise `SnapshotError` `INVALID_WORKSPACE` when a folder of blobs or a SQLite file of this host lies in a workspace, or a
    workspace in that folder."""
    own = [os.path.realpath(path) for path in (_blob_folder(blobs.url), _database_file(checkpoints.url)) if path is not None]
    for workspace in workspaces:
        if workspace.host_path is None:
            continue
        root = os.path.realpath(workspace.host_path)
        for path in own:
            if _lies_in(path, root) or _lies_in(root, path):
                raise SnapshotError(
                    f"The repository's own files ({printable(path)}) and the workspace {printable(workspace.root)} overlap.",
                    code=Code.INVALID_WORKSPACE,
                    hint="Keep the repository elsewhere: a restore would remove its files or put old ones in their place.",
                )


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _blob_folder(url: str) -> str | None:
    return url.removeprefix("file://") if url.startswith("file://") else None


def _database_file(url: str) -> str | None:
    match = _SQLITE.match(url)
    if match is None or match[2] == ":memory:":
        return None
    return urllib.parse.unquote(match[2])
