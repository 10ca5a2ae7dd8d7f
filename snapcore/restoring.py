"""Restore: a checkpoint becomes the state of a workspace, exactly, or the workspace stays as it was."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

from .capturing import guard_root
from .contents import ContentStager, same_contents
from .engine import Engine, finish, stop
from .errors import Code, RepositoryError, SnapcoreError, SnapshotError, printable
from .model import Checkpoint, Entry, FileStat, Kind, Note, Progress, RootState, StatPage, StatUpdate
from .planned import PlannedChange
from .protocols import Pin, ProgressCallback, Stage, SwapReport, Workspace
from .records import RecordReader
from .redaction import Redactor
from .restoreplan import Counts, RestorePlanner, Window, link_target
from .scope import Scope
from .selection import FilePolicy
from .statcache import digest_salt, make_stat_page, stat_root
from .target import LOAD_PAGES, Target, load_target
from .ticking import ticking
from .treeslices import slice_scan

__all__ = ["Receipt", "RestorePlan", "RestoreRequest", "pinned", "restore"]

PIN_SECONDS: Final = 3600.0
SHOWN_PATHS: Final = 20
TreePath = bytes  # a path relative to its root


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore would do: paths to remove, to add and to change (relative to their root), bytes to write. `paths` has all of
    them with what is done and why, those of a root together."""

    removes: tuple[bytes, ...]
    adds: tuple[bytes, ...]
    changes: tuple[bytes, ...]
    bytes: int
    paths: tuple[PlannedChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a restore did, after its result was checked.

    `files`, `folders`, `links` and `bytes` are what the checkpoint holds. `added`, `changed`, `removed` and `unchanged` count
    entries. `kept` are paths that are not in the checkpoint and were left alone. `differences` are (path, reason) of what
    the target could not hold. `redacted` are files whose secrets stayed zeroed. `plan` is set for a dry run.
    """

    checkpoint_id: str
    content_id: bytes
    files: int
    folders: int
    links: int
    bytes: int
    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    bytes_written: int = 0
    kept: tuple[TreePath, ...] = ()
    differences: tuple[tuple[TreePath, str], ...] = ()
    redacted: tuple[TreePath, ...] = ()
    dry_run: bool = False
    plan: RestorePlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What to restore and how; see `Repository.restore` for each. `roots` gives the workspace of each root by name."""

    checkpoint: Checkpoint
    roots: Mapping[str, Workspace]
    redactor: Redactor
    policy: FilePolicy | None = None
    paths: Sequence[bytes] | None = None
    dry_run: bool = False
    verify: Literal["stat", "content"] = "stat"
    owners: bool = False
    reinject: bool = False
    allow_empty: bool = False
    allow_any_root: bool = False
    on_progress: ProgressCallback | None = None


async def restore(engine: Engine, request: RestoreRequest) -> Receipt:
    """Restore every root. Until all is staged and verified a failure leaves the workspace exactly as it was."""
    try:
        return await _Restore(engine, request).run()
    except SnapcoreError as error:
        request.redactor.scrub_error(error)
        raise


@dataclass(slots=True)
class _Root:
    """One root on its way."""

    state: RootState
    workspace: Workspace
    policy: FilePolicy
    target: Target
    planner: RestorePlanner
    stage: Stage | None = None
    stager: ContentStager | None = None
    window: Window = field(default_factory=Window)
    report: SwapReport = field(default_factory=SwapReport)
    differences: list[tuple[bytes, str]] = field(default_factory=list)


class _Restore:
    def __init__(self, engine: Engine, request: RestoreRequest) -> None:
        self._engine = engine
        self._request = request
        self._reader = RecordReader(engine)
        self._scope = Scope(request.paths)
        self._roots: list[_Root] = []

    async def run(self) -> Receipt:
        r = self._request
        if not r.allow_any_root:
            for workspace in r.roots.values():
                guard_root(workspace.root)
        reports = ticking(r.on_progress, self._progress)
        async with pinned(self._engine, r.checkpoint), reports, AsyncExitStack() as stages:
            roots = [await self._prepare(state) for state in r.checkpoint.roots if state.name in r.roots]
            # in the order of every capture and restore, so that two of them never wait for each other
            roots.sort(key=lambda root: root.workspace.root)
            self._roots = roots
            if r.dry_run:
                return await self._dry_run(roots)
            for root in roots:
                root.stage = await finish(root.workspace.open_stage(), undo=_abort)
                stages.push_async_callback(_abort, root.stage)
                root.stager = ContentStager(
                    self._engine, self._reader, root.stage, owners=r.owners, reinject=r.redactor if r.reinject else None
                )
                await self._stage(root, root.stage, root.stager)
            self._check_scope(roots)
            for root in roots:
                if root.stage is not None:
                    await root.stage.seal(durable=root.planner.replaces)
            await finish(self._swap(roots))
            for root in roots:
                await self._settle(root)
        return self._receipt(roots)

    # ---- planning and staging

    async def _prepare(self, state: RootState) -> _Root:
        r = self._request
        policy = r.policy or FilePolicy.from_record(state.policy)
        target = await load_target(self._reader, state)
        workspace = r.roots[state.name]
        planner = RestorePlanner(
            engine=self._engine,
            reader=self._reader,
            workspace=workspace,
            target=target,
            selection=policy.compile(),
            sandbox_id=self._sandbox_id,
            scope=self._scope,
            owners=r.owners,
            restrict=r.policy is not None,
            cross_mounts=policy.cross_mounts,
            reinject=r.reinject,
            tells=r.dry_run,
        )
        return _Root(state, workspace, policy, target, planner)

    @property
    def _sandbox_id(self) -> str:
        roots = self._request.roots
        return next(roots[state.name].sandbox_id for state in self._request.checkpoint.roots if state.name in roots)

    def _check_scope(self, roots: Sequence[_Root]) -> None:
        """A path that neither the checkpoint nor the workspace has is a slip of the pen."""
        unknown = sorted(self._scope.paths.difference(*(root.planner.met for root in roots)))
        if unknown:
            raise SnapshotError(
                f"Neither the checkpoint nor the workspace has {printable(unknown[0])}.",
                code=Code.INVALID_REQUEST,
                paths=unknown,
                hint="'snapcore ls' shows what the checkpoint has.",
            )

    async def _stage(self, root: _Root, stage: Stage, stager: ContentStager) -> None:
        async for window in root.planner.windows():
            if window.structure:
                await stage.write(window.structure)
            if window.files:
                await stager.write(window.files)
            if window.links:
                await stage.write(window.links)
            if window.steps:
                await stage.log(window.steps)
        self._guard_empty(root)

    def _guard_empty(self, root: _Root) -> None:
        totals = root.state.totals
        empty = not (totals.files or totals.folders or totals.links)
        if empty and root.planner.counts.removed and not self._request.allow_empty:
            raise SnapshotError(
                f"The checkpoint is empty: {root.planner.counts.removed} entries of {printable(root.workspace.root)} would go.",
                code=Code.EMPTY_RESTORE,
                hint="Pass allow_empty=True (--allow-empty) if that is meant.",
            )

    async def _dry_run(self, roots: Sequence[_Root]) -> Receipt:
        removes: list[bytes] = []
        adds: list[bytes] = []
        changes: list[bytes] = []
        planned: list[PlannedChange] = []
        size = 0
        for root in roots:
            async for window in _plan_only(root):
                removes += window.removes
                adds += window.adds
                changes += window.changes
                planned += window.planned
                size += sum(t.entry.size for t in window.files)
            self._guard_empty(root)
        self._check_scope(roots)
        plan = RestorePlan(tuple(removes), tuple(adds), tuple(changes), size, tuple(planned))
        return self._receipt(roots, plan)

    # ---- after the swap

    async def _swap(self, roots: Sequence[_Root]) -> None:
        """What is sealed is swapped, also when another root's swap is cut short."""
        failed: SnapcoreError | None = None
        for root in roots:
            try:
                if root.stage is not None:
                    root.report = await root.stage.swap()
            except SnapcoreError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    async def _settle(self, root: _Root) -> None:
        """Check the result, and remember what was seen, so that the next capture is incremental."""
        clock = await root.workspace.clock()
        # changes made from now on must show in the times that are remembered below
        await asyncio.sleep(clock.granularity_ns / 1e9)
        clock = await root.workspace.clock()
        trusted_before = clock.now_ns - clock.granularity_ns
        undone = dict(root.report.undone)
        wrong: list[tuple[bytes, str]] = []
        pages: list[StatPage] = []
        salt = digest_salt(root.state.policy)
        selection = root.policy.compile()
        group: list[tuple[bytes, list[FileStat]]] = []

        async def check() -> None:
            entries = await root.target.entries([i for i, _ in group])
            for page_id, stats in group:
                plain = [s for s in stats if not s.note and s.kind <= Kind.LINK]
                # a link may lead out by itself, without those that it was captured with
                there = [s for s in stats if s.note in (Note.NONE, Note.OUTSIDE) and s.kind <= Kind.LINK]
                problems = self._compare(root, entries[page_id], there, undone)
                root.differences += [(p, why) for p, why, grave in problems if not grave]
                wrong.extend((p, why) for p, why, grave in problems if grave)
                sure = not problems and undone.keys().isdisjoint(e.path for e in entries[page_id])
                if sure and len(plain) == len(entries[page_id]):
                    pages.append(make_stat_page(page_id, plain, salt, trusted_before))
            # of a step that was not done, no time and size can tell what is there now
            doubtful = None if self._request.verify == "content" else undone
            wrong.extend(await self._read_back(root, [(entries[i], s) for i, s in group], doubtful))
            group.clear()

        async for page, stats in slice_scan(
            root.workspace.scan(selection, cross_mounts=root.policy.cross_mounts), root.target.pages
        ):
            group.append((page.page_id, stats))
            if len(group) >= LOAD_PAGES:
                await check()
        await check()
        told = {p for p, _ in root.differences} | {p for p, _ in wrong}
        root.differences += [(p, why) for p, why in root.report.undone if p not in told]
        if self._scope.whole:
            await self._remember(root, pages)
        if wrong:
            shown = ", ".join(f"{printable(p)} ({why})" for p, why in wrong[:SHOWN_PATHS])
            raise SnapshotError(
                f"The restored workspace is not as the checkpoint: {shown}.",
                code=Code.VERIFY_FAILED,
                paths=[p for p, _ in wrong],
                hint="Something else changes these files, or the sandbox's tools cannot reach them. Mend it, then restore.",
            )

    def _compare(
        self, root: _Root, entries: Sequence[Entry], stats: Sequence[FileStat], undone: Mapping[bytes, str]
    ) -> list[tuple[bytes, str, bool]]:
        """(path, reason, grave) of each entry that is not as it should be; what the target cannot hold is not grave. A path that
        was to be removed and is still there is grave."""
        current = {s.path: s for s in stats}
        able = root.workspace.capabilities
        excludes = root.policy.compile().excludes if self._request.policy is not None else None
        prefix = root.workspace.root.rstrip("/").encode("utf-8", "surrogateescape") or b"/"
        out = []
        for e in entries:
            s = current.pop(e.path, None)
            if not self._scope.holds(e.path) or (excludes is not None and excludes(e.path, e.kind)):
                continue
            why = undone.get(e.path)
            if s is None:
                if not _below(e.path, root.planner.kept):
                    out.append((e.path, why or "missing", able.symlinks or e.kind != Kind.LINK))
            elif s.kind != e.kind:
                out.append((e.path, why or f"is a {Kind.NAMES[s.kind]}", True))
            elif e.kind == Kind.LINK:
                if s.target != link_target(e, prefix):
                    out.append((e.path, why or "another target", True))
                elif s.mtime_ns != e.mtime_ns:
                    out.append((e.path, why or "another modification time", False))
            else:
                mode = e.mode if self._request.owners else e.mode & 0o1777
                if e.kind == Kind.FILE and s.size != e.size:
                    out.append((e.path, why or f"{s.size} bytes instead of {e.size}", True))
                elif e.kind == Kind.FILE and s.mtime_ns != e.mtime_ns:
                    out.append((e.path, why or "another modification time", able.mtimes and why is None))
                if s.mode != mode:
                    out.append((e.path, f"mode {s.mode:o} instead of {mode:o}", False))
                elif mode != e.mode:
                    out.append((e.path, f"mode {mode:o} instead of {e.mode:o}: setuid and setgid need owners=True", False))
        left = (path for path in current if path in undone or self._is_left_over(root, path))
        out += [(path, undone.get(path, "not in the checkpoint"), True) for path in left]
        return out

    def _is_left_over(self, root: _Root, path: bytes) -> bool:
        planner = root.planner
        return self._scope.holds(path) and path not in planner.stay and not _below(path, planner.kept)

    async def _read_back(
        self,
        root: _Root,
        pages: Sequence[tuple[Sequence[Entry], Sequence[FileStat]]],
        only: Collection[TreePath] | None,
    ) -> list[tuple[bytes, str]]:
        """Of the files, or of `only` some: those that do not hold what they should."""
        if only is not None and not only:
            return []
        pairs = []
        for entries, stats in pages:
            current = {s.path: s for s in stats if s.kind == Kind.FILE and not s.note}
            for e in entries:
                s = current.get(e.path)
                wanted = (only is None or e.path in only) and self._scope.holds(e.path)
                if wanted and e.kind == Kind.FILE and s is not None and s.size == e.size:
                    pairs.append((s, e))
        same = await same_contents(self._engine, self._reader, root.workspace, pairs) if pairs else []
        return [(e.path, "other bytes") for (_, e), equal in zip(pairs, same, strict=True) if not equal]

    async def _remember(self, root: _Root, pages: Sequence[StatPage]) -> None:
        if not self._sandbox_id:
            return
        update = StatUpdate(
            sandbox_id=self._sandbox_id,
            root=stat_root(root.workspace),
            manifest=root.state.manifest,
            saved=tuple(pages),
            replace=True,
            redaction=self._request.checkpoint.redaction,
        )
        try:
            await self._engine.checkpoints.save_stats([update])
        except RepositoryError as error:
            if error.code != Code.READ_ONLY:
                raise

    def _receipt(self, roots: Sequence[_Root], plan: RestorePlan | None = None) -> Receipt:
        checkpoint = self._request.checkpoint
        totals = checkpoint.totals
        counts = [root.planner.counts for root in roots] or [Counts()]
        return Receipt(
            checkpoint_id=checkpoint.id,
            content_id=checkpoint.content_id,
            files=totals.files,
            folders=totals.folders,
            links=totals.links,
            bytes=totals.bytes,
            added=sum(c.added for c in counts),
            changed=sum(c.changed for c in counts),
            removed=sum(c.removed for c in counts),
            unchanged=sum(c.unchanged for c in counts),
            bytes_written=sum(root.stager.bytes_written for root in roots if root.stager is not None),
            kept=tuple(p for root in roots for p in root.planner.kept),
            differences=tuple(d for root in roots for d in root.differences),
            redacted=tuple(sorted(p for root in roots if root.stager is not None for p in root.stager.still_redacted)),
            dry_run=plan is not None,
            plan=plan,
        )

    def _progress(self) -> Progress:
        stagers = [root.stager for root in self._roots if root.stager is not None]
        counts = [root.planner.counts for root in self._roots]
        files = sum(stager.files_written for stager in stagers) + sum(count.right_files for count in counts)
        size = sum(stager.bytes_written for stager in stagers) + sum(count.right_bytes for count in counts)
        if self._request.paths is not None or len(self._roots) < len(self._request.checkpoint.roots):
            return Progress("restore", files, size)
        totals = self._request.checkpoint.totals
        return Progress("restore", files, size, totals.files, totals.bytes)


async def _plan_only(root: _Root) -> AsyncIterator[Window]:
    try:
        async with root.workspace.hold():
            async for window in root.planner.windows():
                yield window
    except SnapshotError as error:
        if error.code != Code.MISSING_WORKSPACE:
            raise
        async for window in root.planner.windows(missing=True):
            yield window


def _below(path: bytes, kept: Sequence[bytes]) -> bool:
    return any(path == k or path.startswith(k + b"/") for k in kept)


async def _abort(stage: Stage) -> None:
    await finish(stage.abort())


@asynccontextmanager
async def pinned(engine: Engine, checkpoint: Checkpoint) -> AsyncIterator[None]:
    """Hold the checkpoint's records against gc. Who may only read the database has no hold: a gc then waits for its grace alone,
    and what it has freed meanwhile ends the restore before the swap."""
    roots = [root.manifest for root in checkpoint.roots]
    try:
        pin: Pin | None = await finish(
            engine.checkpoints.pin(roots, (checkpoint.thread_id, checkpoint.id), ttl=PIN_SECONDS),
            undo=engine.checkpoints.unpin,
        )
    except RepositoryError as error:
        if error.code != Code.READ_ONLY:
            raise
        pin = None
    if pin is None:
        yield
        return

    async def renew(held: Pin) -> None:
        pause = PIN_SECONDS / 3
        while True:
            await asyncio.sleep(pause)
            try:
                await engine.checkpoints.renew_pin(held, ttl=PIN_SECONDS)
                pause = PIN_SECONDS / 3
            except RepositoryError:
                pause = PIN_SECONDS / 24  # out of reach for the moment: there is time for more attempts

    renewing = asyncio.create_task(renew(pin))
    try:
        yield
    finally:
        try:
            await stop([renewing])
        finally:
            await finish(engine.checkpoints.unpin(pin))
