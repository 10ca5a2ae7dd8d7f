"""What a repository does with archives: the part of `Repository` that exports checkpoints and imports trees."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from .engine import Engine
from .errors import Code, SnapshotError
from .model import Checkpoint, validate_path, validate_thread_id
from .protocols import ProgressCallback
from .registry import load

if TYPE_CHECKING:
    from .capturing import CaptureReport
    from .repository import Repository
    from .transfer_export import ExportReport

__all__ = ["Transfers", "tree_paths"]


class Transfers:
    """See `Repository`."""

    _engine: Engine

    async def export(
        self,
        checkpoint: Checkpoint,
        target: Any,
        *,
        format: str = "tar",  # noqa: A002  # what everybody calls it
        root: str | None = None,
        paths: Sequence[bytes | str] | None = None,
        prefix: bytes | str = "",
        owners: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> "ExportReport":
        """Write the tree of a checkpoint as an archive to `target`, a path or an object with `write`.

        `format` is `tar`, `tar.gz`, `tar.zst`, or a layer of a container image, `oci-layer` (gzip) or `oci-layer-zstd`. The same
        checkpoint gives the same bytes. `root` says which root, when there are several; `paths` limits it to files and folders,
        and the folders above them. `prefix` is the folder that members lie in; a layer without one has no member for the root.
        `owners` keeps owners, setuid and setgid; without it all belongs to 0:0. Secrets that were redacted stay zeros.

        A file at a path is there whole and durable, or as it was before. Every byte is checked before it is written, and gc is
        kept away meanwhile. Raises `SnapshotError`: `INVALID_REQUEST` for what the checkpoint has not, `MISSING_BLOB`,
        `INVALID_BLOB`, `INVALID_PATH`; `RepositoryError`; `OSError` for the target.
        """
        from .transfer_export import ExportRequest, export

        request = ExportRequest(
            checkpoint=checkpoint,
            target=target,
            format=format,
            root=root,
            paths=None if paths is None else tree_paths(paths),
            prefix=os.fsencode(prefix).strip(b"/"),
            owners=owners,
            on_progress=on_progress,
        )
        return await export(self._engine, request)

    async def import_(
        self,
        source: Any,
        *,
        thread_id: str,
        workspace_root: str | None = None,
        max_unpacked_bytes: int | None = None,
        **options: Any,
    ) -> "CaptureReport":
        """Save the tree in `source` as the next checkpoint of a thread: of a folder, or of a tar at a path or in an object with
        `read`, plain or compressed by gzip, bzip2, xz or zstd.

        `options` are those of `capture_with_report`, with the same meaning. `workspace_root` is what the root of a tar is called
        in the checkpoint, `/workspace` by default: absolute links into it are links inside. A tar that is compressed or comes as
        a stream is kept meanwhile where temporary files go, as one file of at most `max_unpacked_bytes`, by default half of what
        is free there. No member is ever unpacked.

        Raises what `capture` raises, and `SnapshotError` `INVALID_ARCHIVE` for what is no tar, cut short or damaged,
        `INVALID_PATH` for members that are absolute, lead up, come twice, or lie below what is no folder, `UNSUPPORTED_ENTRY` for
        devices, links that lead out and sparse files of GNU tar, `LIMIT_EXCEEDED`. No checkpoint is made then.
        """
        validate_thread_id(thread_id)
        repository = cast("Repository", self)
        if "roots" in options:
            raise SnapshotError("An import has one root.", code=Code.INVALID_REQUEST, hint="Import each by itself.")
        if isinstance(source, str | bytes | os.PathLike) and os.path.isdir(source):
            folder = os.path.abspath(os.fsdecode(source))
            return await repository.capture_with_report(folder, thread_id=thread_id, workspace_root=workspace_root, **options)
        opened = load("snapcore.providers.archive_source:opened_archive")
        told = options.get("on_progress")
        workspace = load("snapcore.providers.archive:TarWorkspace").opened
        # the root of an archive is a name and no folder of this host
        options["allow_any_root"] = True
        async with (
            opened(source, max_unpacked_bytes, told) as archive,
            workspace(archive, workspace_root or "/workspace") as tree,
        ):
            return await repository.capture_with_report(tree, thread_id=thread_id, **options)


def tree_paths(paths: Sequence[bytes | str]) -> list[bytes]:
    """Paths relative to a root, as bytes. Raises `SnapshotError` `INVALID_REQUEST`, `INVALID_PATH`."""
    if isinstance(paths, str | bytes):
        raise SnapshotError("paths must be a list of paths.", code=Code.INVALID_REQUEST, hint=f"Write paths=[{paths!r}].")
    found = [os.fsencode(path).rstrip(b"/") for path in paths]
    for path in found:
        validate_path(path)
    return found
