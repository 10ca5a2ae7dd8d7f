"""What a repository shows: the part of `Repository` that lists, reads and compares what checkpoints hold."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .engine import Engine
from .errors import Code, SnapshotError, printable
from .model import Checkpoint, Entry
from .protocols import ProgressCallback
from .redaction import Redactor
from .redaction_hooks import RedactionHook, RedactionPattern
from .sandbox_roots import opened_sandbox, restore_roots
from .selection import FilePolicy
from .transfer import tree_paths

if TYPE_CHECKING:
    from .browse import Diff
    from .patchtext import FilePatch

__all__ = ["Inspections"]

Secrets = Mapping[str, str | bytes] | Sequence[str | bytes] | None


class Inspections:
    """See `Repository`."""

    _engine: Engine

    def ls(
        self, checkpoint: Checkpoint, path: bytes = b"", *, recursive: bool = True, root: str | None = None
    ) -> AsyncIterator[Entry]:
        """Entries at and below a path, in walk order."""
        from . import browse

        return browse.list_entries(self._engine, checkpoint, path, recursive=recursive, root=root)

    def tree(self, checkpoint: Checkpoint, path: bytes = b"", *, root: str | None = None) -> AsyncIterator[tuple[Entry, bool]]:
        """As `ls`; and of each entry whether it is the last of its folder, as whoever draws a tree has to know."""
        from . import treelisting

        return treelisting.list_tree(self._engine, checkpoint, path, root=root)

    def open_file(self, checkpoint: Checkpoint, path: bytes, *, root: str | None = None) -> AsyncIterator[bytes]:
        """A file's bytes, in pieces of some MiB."""
        from . import browse

        return browse.open_file(self._engine, checkpoint, path, root=root)

    async def read_file(self, checkpoint: Checkpoint, path: bytes, *, root: str | None = None) -> bytes:
        """A file's bytes at once."""
        return b"".join([piece async for piece in self.open_file(checkpoint, path, root=root)])

    async def read_artifact(self, checkpoint: Checkpoint, name: str) -> bytes:
        """The bytes of an artifact."""
        from . import browse

        return await browse.read_artifact(self._engine, checkpoint, name)

    async def read_conversation(self, checkpoint: Checkpoint) -> list[Any]:
        """The conversation saved with a checkpoint."""
        from . import browse

        return await browse.read_conversation(self._engine, checkpoint)

    # ---- differences

    async def previous(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """The checkpoint before this one in its thread, None when it is the thread's first.

        Raises `SnapshotError` `MISSING_CHECKPOINT` when all before it were deleted.
        """
        older = [
            c for c in await self._engine.checkpoints.checkpoints(checkpoint.thread_id) if c.created_at < checkpoint.created_at
        ]
        if not older and checkpoint.parent_id is not None:
            raise SnapshotError(
                f"What was before checkpoint {printable(checkpoint.id)} was deleted.",
                code=Code.MISSING_CHECKPOINT,
                hint="Name both checkpoints to compare.",
            )
        return older[-1] if older else None

    async def diff(self, a: Checkpoint | None, b: Checkpoint, *, paths: Sequence[bytes | str] | None = None) -> "Diff":
        """How the trees of `b` differ from those of `a`; None is an empty one. `paths` limits it to files and folders.

        Raises `SnapshotError` `INVALID_REQUEST` for one of the paths that neither has.
        """
        from . import browse

        return await browse.diff(self._engine, a, b, None if paths is None else tree_paths(paths))

    async def compare(
        self,
        checkpoint: Checkpoint,
        sandbox: Any,
        *,
        policy: FilePolicy | None = None,
        workspace_root: str | None = None,
        roots: Mapping[str, str] | None = None,
        paths: Sequence[bytes | str] | None = None,
        secrets: Secrets = None,
        hooks: Sequence[RedactionHook] = (),
        patterns: Sequence[RedactionPattern] = (),
        allow_short_secrets: bool = False,
        reread: bool = False,
        allow_any_root: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> "Diff":
        """How a sandbox, as it is now, differs from a checkpoint: what a capture would find, without making one.

        Nothing is stored, changed or locked, so that read-only credentials are enough, and a capture or restore may run beside
        it. Only files that may have changed are read; `reread` trusts no file time. A file whose recorded secrets are in it
        again is the same. What cannot be compared (unreadable, of a kind that a checkpoint cannot hold, left out by the capture)
        is in `skipped`, and never an error; so is what has one of the `secrets` in its name.

        `policy` replaces the one saved with the checkpoint, on both sides. `workspace_root`, `roots`, `paths` and
        `allow_any_root` are as in `restore`. Memory grows with what differs, not with the tree.

        Raises `SnapshotError` (`MISSING_WORKSPACE`, `INVALID_WORKSPACE`, `POLICY_REQUIRED`, `INVALID_REQUEST` for what neither
        side has, `MISSING_BLOB`, `INVALID_BLOB`), `RepositoryError`, and `ProviderError`: `WORKSPACE_BUSY` when a restore into
        the sandbox is running or was cut short, which is left to the next capture or restore.
        """
        from .capturing import guard_root
        from .comparing import CompareRequest, compare

        redactor = Redactor.build(secrets, hooks=hooks, patterns=patterns, allow_short=allow_short_secrets)
        async with opened_sandbox(sandbox) as handle:
            places = restore_roots(handle, checkpoint, workspace_root, roots)
            if not allow_any_root:
                for workspace in places.values():
                    guard_root(workspace.root)
            request = CompareRequest(
                checkpoint=checkpoint,
                roots=places,
                redactor=redactor,
                policy=policy,
                paths=None if paths is None else tree_paths(paths),
                reread=reread,
                on_progress=on_progress,
            )
            return await compare(self._engine, request)

    async def patches(
        self,
        found: "Diff",
        before: Checkpoint | None,
        after: Any,
        *,
        workspace_root: str | None = None,
        roots: Mapping[str, str] | None = None,
        secrets: Secrets = None,
        hooks: Sequence[RedactionHook] = (),
        patterns: Sequence[RedactionPattern] = (),
        allow_short_secrets: bool = False,
        context: int = 3,
    ) -> "AsyncIterator[FilePatch]":
        """Each difference of `found` as text: a unified diff in git's format, which `git apply` and `patch -p1` take.

        `found` is what `diff(before, after)` returned, or `compare(before, after)` for a sandbox; the other options are then
        those of that call. `context` is how many lines are shown around each change. What was redacted stays zeros, and a live
        file is redacted as a capture would do it; where a recorded secret is not found again, and not all that was redacted then
        is given as `secrets`, `hooks` and `patterns`, its text is not shown.

        Raises what `open_file` and `compare` raise; `SnapshotError` `INVALID_REQUEST` for a sandbox and no checkpoint before it.
        """
        from .patches import LiveSide, PatchRequest, StoredSide, make_patches

        redactor = Redactor.build(secrets, hooks=hooks, patterns=patterns, allow_short=allow_short_secrets)
        old = StoredSide(self._engine, before)
        if isinstance(after, Checkpoint):
            async for patch in make_patches(self._engine, PatchRequest(found, old, StoredSide(self._engine, after), context)):
                yield patch
            return
        if before is None:
            raise SnapshotError("A sandbox is compared with a checkpoint.", code=Code.INVALID_REQUEST, hint="Pass one as before.")
        async with opened_sandbox(after) as handle:
            places = restore_roots(handle, before, workspace_root, roots)
            live = LiveSide(self._engine, before, places, redactor)
            async for patch in make_patches(self._engine, PatchRequest(found, old, live, context)):
                yield patch
