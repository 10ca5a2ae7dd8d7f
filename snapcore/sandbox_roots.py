"""From what a user names (an address, a handle, a workspace) to the workspaces of a checkpoint's roots."""

import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from .capturing import DEFAULT_ROOT, RootRequest
from .errors import Code, SnapshotError, printable
from .model import Checkpoint
from .protocols import Workspace
from .registry import connect, load, split_scheme
from .selection import FilePolicy

__all__ = ["Roots", "as_workspace", "is_address", "opened_sandbox", "restore_roots", "root_requests"]

DEFAULT_WORKSPACE: Final = "/workspace"

Roots = Mapping[str, str | tuple[str, FilePolicy]]


def is_address(text: str) -> bool:
    """Whether `text`, which names either a checkpoint or a sandbox, names a sandbox.

    It does when it is `.`, `..` or `~`, has a `/` before any `:`, or begins with a scheme and `://`, or with `exec:`. Whatever
    else it is names a checkpoint: `latest`, `label:L`, an id (which holds neither `/` nor `:`), each with `:PATH` or without.
    """
    if text.startswith("label:"):
        return False
    return text in (".", "..", "~") or "/" in text.partition(":")[0] or text.startswith("exec:") or split_scheme(text)[1] != text


@contextlib.asynccontextmanager
async def opened_sandbox(sandbox: Any) -> AsyncIterator[Any]:
    """The sandbox at an address, closed in the end; a handle is its owner's to close."""
    if not isinstance(sandbox, str | os.PathLike):
        yield sandbox
        return
    handle = await connect(os.fspath(sandbox))
    try:
        yield handle
    finally:
        if hasattr(handle, "close"):
            closing = handle.close()
            if inspect.isawaitable(closing):
                await closing


def as_workspace(sandbox: Any, root: str | None = None) -> Workspace:
    """The bulk view of a sandbox: of a handle with a `workspace` of its own, a handle with the six file operations of
    `FileHandle`, or a workspace itself."""
    if all(hasattr(sandbox, name) for name in ("scan", "read", "open_stage", "recover")):
        workspace: Workspace = sandbox
        if root is not None and root != workspace.root:
            raise SnapshotError("A workspace has its root already.", code=Code.INVALID_REQUEST, hint="Pass its sandbox instead.")
        return workspace
    if hasattr(sandbox, "workspace"):
        bulk: Workspace = sandbox.workspace(root)
        return bulk
    if all(hasattr(sandbox, name) for name in ("lstat", "list", "read", "write", "mkdir", "remove")):
        wrapped: Workspace = load("snapcore.providers.perfile:PerFileWorkspace")(
            sandbox, root or getattr(sandbox, "workspace_root", DEFAULT_WORKSPACE)
        )
        return wrapped
    raise SnapshotError(
        f"{type(sandbox).__name__} is no sandbox.",
        code=Code.INVALID_REQUEST,
        hint="Pass an address, a handle with a workspace() method, or one with lstat, list, read, write, mkdir and remove.",
    )


def root_requests(sandbox: Any, policy: FilePolicy, workspace_root: str | None, roots: Roots | None) -> list[RootRequest]:
    """The roots to capture of a sandbox: one, at `workspace_root`, or those that `roots` names. Raises `SnapshotError`
    `INVALID_REQUEST` for both at once and for what is no sandbox."""
    if roots is None:
        return [RootRequest(DEFAULT_ROOT, as_workspace(sandbox, workspace_root), policy)]
    if workspace_root is not None:
        raise SnapshotError("Give either workspace_root or roots.", code=Code.INVALID_REQUEST)
    out = []
    for name, spec in roots.items():
        path, own = spec if isinstance(spec, tuple) else (spec, policy)
        out.append(RootRequest(name, as_workspace(sandbox, path), own))
    return out


def restore_roots(
    sandbox: Any, checkpoint: Checkpoint, workspace_root: str | None, roots: Mapping[str, str] | None
) -> dict[str, Workspace]:
    """The workspace of each root of a checkpoint that is wanted, by name: of the only one at `workspace_root`, or of those that
    `roots` says the places of. Raises `SnapshotError` `INVALID_REQUEST` for several roots without places and for unknown ones."""
    if len(checkpoint.roots) == 1 and roots is None:
        return {checkpoint.roots[0].name: as_workspace(sandbox, workspace_root)}
    if roots is None:
        # where a root was is data of the checkpoint: what it says must never choose the folder that is overwritten
        recorded = ", ".join(f"{printable(r.name)} (was {printable(r.path)})" for r in checkpoint.roots)
        raise SnapshotError(
            f"The checkpoint has several roots: {recorded}.",
            code=Code.INVALID_REQUEST,
            hint="Say where each goes: roots={name: path}.",
        )
    if workspace_root is not None:
        raise SnapshotError("Give either workspace_root or roots.", code=Code.INVALID_REQUEST)
    if not roots:
        raise SnapshotError("There has to be at least one root.", code=Code.INVALID_REQUEST)
    unknown = sorted(set(roots) - {r.name for r in checkpoint.roots})
    if unknown:
        raise SnapshotError(f"The checkpoint has no root {printable(unknown[0])}.", code=Code.INVALID_REQUEST)
    return {name: as_workspace(sandbox, path) for name, path in roots.items()}
