"""Capture: a workspace becomes the next checkpoint of its thread, or nothing changes."""

import asyncio
import itertools
import os
import posixpath
import secrets as random_ids
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from blake3 import blake3

from .chunking import MAX_RECORD_BYTES
from .engine import Engine, finish
from .errors import Code, RecordsMissingError, RepositoryError, SnapcoreError, SnapshotError, printable
from .ingest import Ingestor
from .leases import DEFAULT_TTL, WriterHold
from .ledger import Claim, Event
from .model import (
    EMPTY_CONTENT,
    Checkpoint,
    ContentRef,
    Progress,
    RecordType,
    RootState,
    Skipped,
    StatUpdate,
    validate_id,
    validate_text,
    validate_thread_id,
)
from .packwriter import PackWriter, new_pack_id
from .protocols import Commit, Grant, ProgressCallback, Workspace
from .records import RecordReader
from .redaction import Redactor
from .selection import FilePolicy
from .statcache import stat_root
from .ticking import ticking
from .treecapture import Base, TreeCapture, TreeResult
from .treefilter import TreeFilter

__all__ = [
    "DEFAULT_ROOT",
    "CaptureReport",
    "CaptureRequest",
    "RootRequest",
    "capture",
    "commit_checkpoint",
    "guard_root",
    "new_checkpoint_id",
    "whole_content_id",
]

DEFAULT_ROOT: Final = "workspace"
COMMIT_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class RootRequest:
    """One root to capture: its name in the checkpoint, its files, and which of them."""

    name: str
    workspace: Workspace
    policy: FilePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRequest:
    """What to capture and how; see `Repository.capture` for each."""

    thread_id: str
    roots: Sequence[RootRequest]
    redactor: Redactor
    label: str | None = None
    conversation: Any = None
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    run_id: str | None = None
    step: int | None = None
    skip_unchanged: bool = False
    wait: float | None = None
    on_progress: ProgressCallback | None = None
    reread: bool = False
    idempotency_key: str | None = None
    checkpoint_id: str | None = None
    allow_any_root: bool = False
    lease_ttl: float = DEFAULT_TTL
    event: tuple[Claim, Event] | None = None  # entered in the ledger by the commit; it names `checkpoint_id`


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """A capture's result. `created` is false when an existing checkpoint was returned instead of a new one.

    `files_read` and `bytes_read` were read from the workspace, `bytes_stored` written to the blob store in `packs` blobs.
    """

    checkpoint: Checkpoint
    created: bool
    files_read: int = 0
    bytes_read: int = 0
    bytes_stored: int = 0
    packs: int = 0

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What was left out of all roots, each with its reason."""
        return tuple(s for root in self.checkpoint.roots for s in root.skipped)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know: files that were kept although they changed while they were read."""
        return self.checkpoint.warnings


def new_checkpoint_id() -> str:
    """A random 128-bit id, as 32 hex digits."""
    return random_ids.token_hex(16)


def guard_root(path: str) -> None:
    """Refuse `/` and home folders as workspace roots, which hardly ever are meant, and a path that is no text, which could not be
    stored. Raises `SnapshotError` `INVALID_WORKSPACE`."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise SnapshotError(
            f"The path of the workspace is not UTF-8: {printable(path)}.",
            code=Code.INVALID_WORKSPACE,
            hint="Rename the folder, or name a link to it whose own path is UTF-8.",
        ) from None
    plain = posixpath.normpath(path)
    real = os.path.realpath(plain)
    if _is_home(plain) or _is_home(real) or real == os.path.realpath(os.path.expanduser("~")):
        raise SnapshotError(
            f"{printable(path)} is the whole file system or a home folder, not a workspace.",
            code=Code.INVALID_WORKSPACE,
            hint="Name the project's own folder, or pass allow_any_root=True (--allow-any-root) if you mean it.",
        )


def _is_home(path: str) -> bool:
    parts = [p for p in path.split("/") if p]
    return parts in ([], ["root"], ["home"], ["Users"]) or (len(parts) == 2 and parts[0] in ("home", "Users"))


def whole_content_id(roots: Sequence[RootState]) -> bytes:
    """A checkpoint's content id: its root's own when it has one, else BLAKE3 over the roots' names and ids."""
    if len(roots) == 1:
        return roots[0].content_id
    return blake3(msgspec.msgpack.encode([(r.name, r.content_id) for r in roots])).digest()


async def capture(engine: Engine, request: CaptureRequest) -> CaptureReport:
    """Capture under the thread's writer lease. If anything fails, the head has not moved and no part is visible."""
    try:
        return await _Capture(engine, request).run()
    except SnapcoreError as error:
        request.redactor.scrub_error(error)
        raise


async def commit_checkpoint(
    engine: Engine, hold: WriterHold, checkpoint: Checkpoint, commit: Commit, source: tuple[str, str] | None = None
) -> Checkpoint:
    """Append and release the lease. An answer lost on the way is asked for again: the append is idempotent."""
    for attempt in range(COMMIT_ATTEMPTS):
        try:
            done = await finish(engine.checkpoints.append(hold.lease, checkpoint, commit, source=source))
        except RepositoryError as error:
            if not error.retryable or attempt + 1 == COMMIT_ATTEMPTS:
                raise
            await asyncio.sleep(0.1 * 2**attempt)
        else:
            hold.released = True
            return done
    raise AssertionError("unreachable")


class _Capture:
    def __init__(self, engine: Engine, request: CaptureRequest) -> None:
        self._engine = engine
        self._request = request
        self._reader = RecordReader(engine)
        self._sandbox_id = request.roots[0].workspace.sandbox_id if request.roots else ""
        self._fingerprint = b""
        self._writer: PackWriter
        self._ingestor: Ingestor
        self._label: str | None = None
        self._trees: list[TreeFilter] = []  # of this attempt

    async def run(self) -> CaptureReport:
        r = self._request
        self._validate()
        if r.idempotency_key is not None:
            found = await self._engine.checkpoints.by_idempotency_key(r.thread_id, r.idempotency_key)
            if found is not None:
                return CaptureReport(found, created=False)
        self._fingerprint = await self._engine.run(r.redactor.fingerprint, bytes.fromhex(self._engine.config.salt))
        pack_id = new_pack_id()
        hold = WriterHold(
            self._engine,
            r.thread_id,
            ttl=r.lease_ttl,
            wait=r.wait,
            pack_id=pack_id,
            sandbox_id=self._sandbox_id or None,
            roots=[stat_root(root.workspace) for root in r.roots] if self._sandbox_id else (),
        )
        async with hold:
            lookups = hold.grant.has_records
            self._writer = PackWriter(self._engine, hold.lease, pack_id, lookups=lookups)
            self._ingestor = Ingestor(self._engine, self._writer, r.redactor)
            try:
                async with ticking(r.on_progress, self._progress):
                    return await self._attempts(hold)
            finally:
                await self._writer.abandon()

    def _progress(self) -> Progress:
        if not self._ingestor.bytes_read:
            return Progress("scan", sum(tree.files for tree in self._trees))
        return Progress("capture", self._ingestor.files_read, self._ingestor.bytes_read)

    def _validate(self) -> None:
        r = self._request
        validate_thread_id(r.thread_id)
        if r.checkpoint_id is not None:
            validate_id(r.checkpoint_id)
        self._validate_words()
        if not r.roots:
            raise SnapshotError("A capture needs at least one root.", code=Code.INVALID_REQUEST)
        names = [root.name for root in r.roots]
        if len(set(names)) != len(names):
            raise SnapshotError("Each root needs a name of its own.", code=Code.INVALID_REQUEST)
        paths = sorted(root.workspace.root.rstrip("/") + "/" for root in r.roots)
        if any(b.startswith(a) for a, b in itertools.pairwise(paths)):
            raise SnapshotError("One root lies inside another: each file must belong to one.", code=Code.INVALID_REQUEST)
        self._refuse_secrets()
        if not r.allow_any_root:
            for root in r.roots:
                guard_root(root.workspace.root)

    def _validate_words(self) -> None:
        """What the commit would refuse, before anything is read."""
        r = self._request
        optional = {"A label": r.label, "A run id": r.run_id, "An idempotency key": r.idempotency_key}
        for what, value in optional.items():
            if value is not None:
                validate_text(value, what, code=Code.INVALID_ENTRY)
        if r.label is not None:
            self._label = r.redactor.scrub_text(r.label)
            validate_text(self._label, "A label", code=Code.INVALID_ENTRY)
        if r.step is not None and not (type(r.step) is int and 0 <= r.step < 2**63):
            raise SnapshotError("A step must be a whole number that is not negative.", code=Code.INVALID_ENTRY)
        for name, data in r.artifacts.items():
            validate_text(name, "The name of an artifact", code=Code.INVALID_ENTRY)
            if r.redactor.scrub_text(name) != name:
                raise SnapshotError("A secret is part of an artifact's name.", code=Code.SECRET_IN_NAME)
            if not isinstance(data, bytes | bytearray | memoryview):
                raise SnapshotError(f"The artifact {printable(name)} is not bytes.", code=Code.INVALID_REQUEST)
        for root in r.roots:
            validate_text(root.name, "The name of a root", code=Code.INVALID_REQUEST)

    def _refuse_secrets(self) -> None:
        """Ids, roots and patterns are stored as they are, so that none may hold a secret."""
        r = self._request
        # an id may be a URL, and tells where a root that is named through a link really lies
        sandboxes = {root.workspace.sandbox_id for root in r.roots}
        sandboxes |= {unquote(sandbox_id, errors="surrogateescape") for sandbox_id in sandboxes}
        texts = {
            "the thread id": [r.thread_id],
            "the checkpoint id": [r.checkpoint_id or ""],
            "the run id": [r.run_id or ""],
            "the idempotency key": [r.idempotency_key or ""],
            "the sandbox's id, or of the path that a root leads to": sorted(sandboxes),
            "a root's name or path": [text for root in r.roots for text in (root.name, root.workspace.root)],
            "a pattern": [text for root in r.roots for text in (*root.policy.record().include, *root.policy.record().exclude)],
        }
        for what, values in texts.items():
            found = r.redactor.names_with_secrets([(v.encode("utf-8", "surrogateescape"), b"") for v in values])
            for name in found.values():
                raise SnapshotError(f"The secret {name} is part of {what}.", code=Code.SECRET_IN_NAME, hint="Choose another.")

    async def _attempts(self, hold: WriterHold) -> CaptureReport:
        for attempt in range(COMMIT_ATTEMPTS):
            roots, updates, warnings = await self._capture_roots(hold, afresh=attempt > 0)
            hold.check()
            checkpoint = await self._describe(hold.grant, roots, warnings)
            head = hold.grant.head
            skips = self._request.skip_unchanged and not hold.grant.damaged
            if skips and head is not None and _same_content(head, checkpoint):
                return await self._unchanged(hold, head, updates)
            record = msgspec.msgpack.encode(checkpoint)
            if len(record) > MAX_RECORD_BYTES:
                raise _too_large(checkpoint)
            checkpoint = msgspec.structs.replace(
                checkpoint, record_id=await self._writer.add_record(record, RecordType.CHECKPOINT)
            )
            commit = msgspec.structs.replace(await self._writer.finish(updates), event=self._request.event)
            try:
                done = await commit_checkpoint(self._engine, hold, checkpoint, commit)
            except RecordsMissingError:
                if attempt + 1 == COMMIT_ATTEMPTS:
                    raise
                await self._writer.reopen(commit)
            else:
                return CaptureReport(
                    done,
                    created=done.id == checkpoint.id,
                    files_read=self._ingestor.files_read,
                    bytes_read=self._ingestor.bytes_read,
                    bytes_stored=self._writer.bytes_stored,
                    packs=self._writer.packs_put,
                )
        raise AssertionError("unreachable")

    async def _capture_roots(self, hold: WriterHold, *, afresh: bool) -> tuple[list[RootState], list[StatUpdate], list[str]]:
        results: list[TreeResult] = []
        self._trees = []
        async with AsyncExitStack() as holds:
            # all before the first is read, and in the order of every capture: a restore of several roots is seen whole
            for root in sorted(self._request.roots, key=lambda root: root.workspace.root):
                await holds.enter_async_context(root.workspace.hold())
            for root in self._request.roots:
                base = await self._base(hold.grant, root, afresh=afresh)
                tree = TreeFilter(root.policy, root.policy.compile(), self._request.redactor)
                self._trees.append(tree)
                results.append(
                    await TreeCapture(
                        workspace=root.workspace,
                        sandbox_id=self._sandbox_id,
                        name=root.name,
                        policy=root.policy,
                        base=base,
                        reader=self._reader,
                        writer=self._writer,
                        ingestor=self._ingestor,
                        tree=tree,
                        redaction=self._fingerprint,
                        check=hold.check,
                    ).run()
                )
        stats = [r.stats for r in results] if self._sandbox_id else []  # without an id nobody could ever use them
        return [r.root for r in results], stats, [w for r in results for w in r.warnings]

    async def _base(self, grant: Grant, request: RootRequest, *, afresh: bool) -> Base:
        if afresh:
            return Base()
        key = stat_root(request.workspace)
        manifest = grant.bases.get(key)
        same_secrets = grant.base_redactions.get(key, b"") == self._fingerprint
        head_roots = grant.head.roots if grant.head is not None else ()
        head_root = next((root for root in head_roots if root.name == request.name), None)
        use_base = manifest is not None and same_secrets and not self._request.reread
        try:
            head_pages, head_index = await self._reader.index(head_root.manifest) if head_root is not None else ([], [])
            head_ids = frozenset([p.page_id for p in head_pages] + head_index)
            if grant.damaged:
                head_ids = frozenset()  # some of it may be gone: all is looked up, and what is missing stored again
            if not use_base or manifest is None:
                return Base(head_ids=head_ids)
            same = head_root is not None and head_root.manifest == manifest
            pages = head_pages if same else (await self._reader.index(manifest))[0]
        except SnapshotError as error:
            # the index of a deleted or damaged checkpoint: nothing is known then, and everything is read
            if error.code not in (Code.MISSING_BLOB, Code.INVALID_BLOB):
                raise
            return Base()
        if grant.damaged:
            return Base(pages, doubtful=True)
        digests = await self._engine.checkpoints.stat_digests(self._sandbox_id, key)
        return Base(pages, digests, head_ids)

    async def _describe(self, grant: Grant, roots: list[RootState], warnings: list[str]) -> Checkpoint:
        r = self._request
        parent = grant.head
        return Checkpoint(
            id=r.checkpoint_id or new_checkpoint_id(),
            thread_id=r.thread_id,
            parent_id=parent.id if parent is not None else None,
            created_at=max(grant.lease.acquired_at, parent.created_at + 1 if parent is not None else 0),
            reason="automatic" if self._label is None else "named",
            label=self._label,
            run_id=r.run_id,
            step=r.step,
            roots=tuple(roots),
            content_id=whole_content_id(roots),
            conversation=await self._conversation(),
            artifacts=await self._artifacts(),
            warnings=tuple(r.redactor.scrub_text(w) for w in warnings),
            redaction=self._fingerprint,
            idempotency_key=r.idempotency_key,
            deleted=grant.deleted,
        )

    async def _conversation(self) -> ContentRef:
        if self._request.conversation is None:
            return EMPTY_CONTENT
        try:
            data = msgspec.json.encode(self._request.redactor.redact_json(self._request.conversation))
        except (TypeError, ValueError, RecursionError) as error:
            raise SnapshotError(
                f"The conversation cannot be written as JSON ({type(error).__name__}).", code=Code.INVALID_REQUEST
            ) from None
        return await self._ingestor.store(data)

    async def _artifacts(self) -> dict[str, ContentRef]:
        out = {}
        for name, data in sorted(self._request.artifacts.items()):
            redactor = self._request.redactor
            ((clean, redactions),) = await self._engine.run(redactor.redact_many, [(name.encode(), data)])
            ref = await self._ingestor.store(clean)
            out[name] = msgspec.structs.replace(ref, redactions=redactions)
        return out

    async def _unchanged(self, hold: WriterHold, head: Checkpoint, updates: list[StatUpdate]) -> CaptureReport:
        manifests = {root.manifest for root in head.roots}
        if updates:
            await self._engine.checkpoints.save_stats([u for u in updates if u.manifest in manifests])
        return CaptureReport(head, created=False, files_read=self._ingestor.files_read, bytes_read=self._ingestor.bytes_read)


def _too_large(checkpoint: Checkpoint) -> SnapshotError:
    skipped = sum(len(root.skipped) for root in checkpoint.roots)
    return SnapshotError(
        f"The checkpoint's own record would be larger than {MAX_RECORD_BYTES} bytes: it lists {skipped} skipped paths,"
        f" {len(checkpoint.warnings)} warnings, and what was redacted in {len(checkpoint.artifacts)} artifacts.",
        code=Code.LIMIT_EXCEEDED,
        hint="Exclude the skipped paths by patterns: what is excluded is not listed.",
    )


def _same_content(head: Checkpoint, new: Checkpoint) -> bool:
    # what was left out counts too: a restore of the head must not remove what only the new record knows to be skipped
    left_out = [[(r.name, r.policy, r.skipped) for r in c.roots] for c in (head, new)]
    return (
        head.content_id == new.content_id
        and left_out[0] == left_out[1]
        and head.redaction == new.redaction
        and head.conversation == new.conversation
        and head.artifacts == new.artifacts
    )
