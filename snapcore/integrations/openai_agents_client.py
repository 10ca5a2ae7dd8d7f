"""Workspace archives of sandbox sessions as checkpoints of a repository: one thread a session, by the snapshot's id."""

import contextlib
import io
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final, cast

from snapcore.errors import Code, SnapcoreError, SnapshotError, printable
from snapcore.history import missing
from snapcore.model import Checkpoint
from snapcore.opening import open_repository
from snapcore.providers.archive import Archive, TarWorkspace, spooled
from snapcore.redaction import Redactor
from snapcore.redaction_hooks import RedactionHook, RedactionPattern
from snapcore.repository import Repository, Secrets
from snapcore.sandboxes import check_path
from snapcore.selection import FilePolicy

from .openai_agents_export import export_tar

__all__ = ["PAYLOAD", "SnapshotClient"]

PAYLOAD: Final = "openai-agents-payload"
"""The artifact that holds an archive which is no tar: a provider's reference to a snapshot of its own."""
MAX_PAYLOAD: Final = 64 << 20
WAIT_SECONDS: Final = 150.0  # longer than a lease whose holder was lost
SHOWN_PATHS: Final = 20

_log: Final = logging.getLogger("snapcore.integrations.openai_agents")


class SnapshotClient:
    """What `RemoteSnapshot` of the OpenAI Agents SDK calls, and what goes beyond it: a history of checkpoints for each session.

    `repository` is an open repository, which stays its owner's, or an address that is opened for each call (with `database`).
    `secrets`, `hooks` and `patterns` are redacted before anything is stored; with `reinject` the present values of `secrets`
    are put back into what is downloaded. `policy` says which files are kept; by default all of them, and what a checkpoint
    cannot hold (a link that leaves the workspace, a FIFO) is left out and listed in its record. `workspace_root` is the path of
    the workspace in the sandbox: absolute links into it are kept then, as relative ones. `skip_unchanged` adds no checkpoint
    when names, kinds, modes, contents, and times of files are those of the last one. `wait` is how many seconds to wait for
    another writer of the same session.
    """

    def __init__(
        self,
        repository: Repository | str | os.PathLike[str],
        *,
        database: str | None = None,
        policy: FilePolicy | None = None,
        secrets: Secrets = None,
        hooks: Sequence[RedactionHook] = (),
        patterns: Sequence[RedactionPattern] = (),
        allow_short_secrets: bool = False,
        reinject: bool = False,
        workspace_root: str | None = None,
        skip_unchanged: bool = False,
        wait: float | None = WAIT_SECONDS,
    ) -> None:
        self._repository = repository
        self._database = database
        self._policy = policy or FilePolicy(defaults=False, on_unsupported="skip")
        self._redaction: dict[str, Any] = {
            "secrets": secrets,
            "hooks": hooks,
            "patterns": patterns,
            "allow_short_secrets": allow_short_secrets,
        }
        self._redactor = Redactor.build(secrets, hooks=hooks, patterns=patterns, allow_short=allow_short_secrets)
        if reinject and not self._redactor.names:
            raise SnapshotError("reinject needs secrets to put back.", code=Code.INVALID_REQUEST, hint="Pass secrets=.")
        root = None if workspace_root is None else check_path(workspace_root)
        if root == "/":
            raise SnapshotError("The workspace of a sandbox is a folder below /.", code=Code.INVALID_REQUEST)
        self._reinject = reinject
        self._workspace_root = root
        self._skip_unchanged = skip_unchanged
        self._wait = wait

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # an address may not be shown before a store has accepted it

    # ---- as RemoteSnapshot calls it

    async def upload(self, snapshot_id: str, data: io.IOBase) -> None:
        """Save an archive as the next checkpoint of the session; `save` returns it."""
        await self.save(snapshot_id, data)

    async def download(self, snapshot_id: str) -> io.IOBase:
        """The newest checkpoint of the session as a stream at its beginning, seekable, whose owner closes it.

        A tar passes the SDK's own rules; a provider's reference is what was uploaded, bit for bit. Every byte was checked before
        this returns. Raises `SnapshotError` `MISSING_CHECKPOINT` for a session without one, `MISSING_BLOB` or `INVALID_BLOB`
        for what is stored no more as it was, `RepositoryError` for the stores.
        """
        with self._scrubbed():
            async with self._opened(create=False) as repository:
                checkpoint = await repository.get(snapshot_id)
                if checkpoint is None:
                    raise missing(snapshot_id, None)
                if PAYLOAD in checkpoint.artifacts:
                    return io.BytesIO(await repository.read_artifact(checkpoint, PAYLOAD))
                return await self._download_tar(repository, checkpoint)

    async def exists(self, snapshot_id: str) -> bool:
        """Whether the session has a checkpoint. A repository that is there and out of reach is an error, and not False."""
        with self._scrubbed():
            try:
                async with self._opened(create=False) as repository:
                    return await repository.get(snapshot_id) is not None
            except SnapcoreError as error:
                if error.code != Code.NO_REPOSITORY:
                    raise
                return False

    # ---- beyond it

    async def save(self, snapshot_id: str, data: io.IOBase, *, label: str | None = None) -> Checkpoint:
        """Save an archive as the next checkpoint of the session, or fail and leave the session's history as it was.

        The stream is read to its end, not rewound and not closed. Raises `SnapshotError`: `INVALID_ARCHIVE` for a tar that is cut
        short or damaged, `INVALID_PATH` for one that is of no folder, `UNSUPPORTED_ENTRY`, `SECRET_IN_NAME`, `LIMIT_EXCEEDED`;
        `CheckpointWriterConflictError` when another writer holds the session for longer than `wait`; `RepositoryError`.
        """
        with self._scrubbed():
            async with spooled(data) as archive, self._opened(create=True) as repository:
                if archive.is_tar():
                    async with TarWorkspace.opened(archive, self._workspace_root) as workspace:
                        return await self._capture(repository, snapshot_id, workspace, label, {})
                payload = self._payload(archive)
                async with TarWorkspace.empty(archive) as workspace:
                    return await self._capture(repository, snapshot_id, workspace, label, {PAYLOAD: payload})

    async def history(self, snapshot_id: str) -> list[Checkpoint]:
        """The checkpoints of a session, oldest first."""
        with self._scrubbed():
            async with self._opened(create=False) as repository:
                return await repository.list(snapshot_id)

    async def rewind(self, session: Any, checkpoint: str) -> Checkpoint:
        """Make an older checkpoint of a session the newest, which its next start restores: an id, a unique prefix of one, or
        `label:L`. What came after it stays in the history.

        `session` is a `SandboxSession`, its state, or the snapshot's id. With the first two, the state also forgets what the live
        workspace was like, so that a sandbox that still runs is restored too.
        """
        state = getattr(session, "state", session)
        snapshot_id = session if isinstance(session, str) else cast("str", state.snapshot.id)
        with self._scrubbed():
            async with self._opened(create=False) as repository:
                found = await repository.resolve(checkpoint, snapshot_id)
                done = await repository.rewind(snapshot_id, found.id)
        if not isinstance(session, str):
            state.snapshot_fingerprint = None
            state.snapshot_fingerprint_version = None
        return done

    async def fork(self, snapshot_id: str, to_snapshot_id: str, checkpoint: str | None = None) -> Checkpoint:
        """Start the history of another session from a checkpoint of this one, by default its newest."""
        with self._scrubbed():
            async with self._opened(create=False) as repository:
                found = None if checkpoint is None else (await repository.resolve(checkpoint, snapshot_id)).id
                return await repository.fork(snapshot_id, found, to_thread_id=to_snapshot_id)

    # ---- helpers

    @contextlib.asynccontextmanager
    async def _opened(self, *, create: bool) -> AsyncIterator[Repository]:
        if isinstance(self._repository, Repository):
            yield self._repository
        else:
            async with open_repository(self._repository, database=self._database, create=create) as repository:
                yield repository

    @contextlib.contextmanager
    def _scrubbed(self) -> Iterator[None]:
        try:
            yield
        except SnapcoreError as error:
            self._redactor.scrub_error(error)
            raise

    async def _capture(
        self, repository: Repository, snapshot_id: str, workspace: TarWorkspace, label: str | None, artifacts: dict[str, bytes]
    ) -> Checkpoint:
        report = await repository.capture_with_report(
            workspace,
            thread_id=snapshot_id,
            label=label,
            policy=self._policy,
            artifacts=artifacts,
            skip_unchanged=self._skip_unchanged,
            wait=self._wait,
            allow_any_root=True,  # the path is one of the sandbox, and nothing is read there
            **self._redaction,
        )
        self._tell("The checkpoint of a sandbox session leaves out", [(s.path, s.reason) for s in report.skipped])
        return report.checkpoint

    async def _download_tar(self, repository: Repository, checkpoint: Checkpoint) -> io.IOBase:
        engine = repository._engine
        export = await export_tar(engine, checkpoint, reinject=self._redactor if self._reinject else None)
        self._tell("The OpenAI Agents SDK would refuse, so its archive leaves out", export.left_out)
        self._tell("Still redacted in the archive", [(path, "no present value") for path in export.still_redacted])
        return cast("io.IOBase", export.file)

    def _tell(self, what: str, paths: Sequence[tuple[bytes, str]]) -> None:
        if paths:
            shown = ", ".join(f"{printable(path)} ({why})" for path, why in paths[:SHOWN_PATHS])
            more = f", and {len(paths) - SHOWN_PATHS} more" if len(paths) > SHOWN_PATHS else ""
            _log.warning("%s: %s%s.", what, self._redactor.scrub_text(shown), more)

    def _payload(self, archive: Archive) -> bytes:
        """A reference that only its provider understands. It is kept as it is, so it must hold no secret."""
        if archive.size > MAX_PAYLOAD:
            raise SnapshotError(
                f"The workspace archive is no tar and has {archive.size} bytes; a provider's reference may have {MAX_PAYLOAD}.",
                code=Code.LIMIT_EXCEEDED,
            )
        payload = archive.read_at(0, archive.size)
        ((_, redactions),) = self._redactor.redact_many([(PAYLOAD.encode(), payload)])
        if redactions:
            raise SnapshotError(
                f"The provider's snapshot reference holds the secret {redactions[0].name}, and would be of no use without it.",
                code=Code.UNSUPPORTED_ENTRY,
                hint="Have the provider persist the workspace as a tar.",
            )
        return payload
