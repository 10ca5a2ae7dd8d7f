"""Planning a restore: the target's manifest merged with the tree as it is, as a stream of small windows.

Nothing here changes the workspace. Each window says what to stage and which steps the swap will take for it; the end of
the stream adds the removal of folders and the metadata of folders that the swap touches.
"""

from collections.abc import AsyncIterator, Container, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from .contents import FileTask, same_contents
from .engine import Engine
from .errors import Code, SnapshotError, printable
from .model import Entry, FileStat, Kind, Note, is_redacted, path_key
from .pagestates import PagePair, PageStates
from .planned import PlannedChange, differences
from .protocols import (
    PlaceStep,
    RemoveStep,
    SetMetaStep,
    StageFolder,
    StageHardLink,
    StageLink,
    Step,
    Workspace,
)
from .records import RecordReader
from .scope import Scope
from .selection import Selection
from .target import LOAD_PAGES, Target
from .treeslices import slice_scan

__all__ = ["Counts", "RestorePlanner", "Window", "link_target"]

SHOWN_PATHS: Final = 20
SECOND: Final = 1_000_000_000  # in nanoseconds


@dataclass(slots=True)
class Counts:
    """How many entries are added, changed, removed, and left as they are; of the last, how many are files, of how many bytes."""

    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    right_files: int = 0
    right_bytes: int = 0

    def right(self, entry: Entry) -> None:
        """Count a file that is left as it is."""
        self.unchanged += 1
        self.right_files += 1
        self.right_bytes += entry.size


@dataclass(slots=True)
class Window:
    """A part of a restore: what to stage, in this order, and the steps for the swap."""

    structure: list[StageFolder | StageLink] = field(default_factory=list)
    files: list[FileTask] = field(default_factory=list)
    links: list[StageHardLink] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    adds: list[bytes] = field(default_factory=list)
    changes: list[bytes] = field(default_factory=list)
    removes: list[bytes] = field(default_factory=list)
    planned: list[PlannedChange] = field(default_factory=list)


class _LinkGroup:
    """A hard-link group on its way: the names that may stay as they are, or the staged file that all names become."""

    __slots__ = ("entry", "inode", "kept", "staged")

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self.inode: tuple[int, int] | None = None
        self.kept: list[bytes] = []
        self.staged: bytes | None = None


def link_target(entry: Entry, root: bytes) -> bytes:
    """The target to write for a link: one that was absolute into the root follows the root."""
    if not entry.in_root:
        return entry.target
    return root.rstrip(b"/") + b"/" + entry.target if entry.target else root


class RestorePlanner:
    """Plans the restore of one root. `counts`, `met` (paths of the scope that there are), `kept` (paths left alone) and `stay`
    (the folders above them) are complete when the stream has ended."""

    def __init__(
        self,
        *,
        engine: Engine,
        reader: RecordReader,
        workspace: Workspace,
        target: Target,
        selection: Selection,
        sandbox_id: str,
        scope: Scope,
        owners: bool,
        restrict: bool,
        cross_mounts: bool,
        reinject: bool = False,
        tells: bool = False,
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._workspace = workspace
        self._target = target
        self._selection = selection
        self._scope = scope
        self._owners = owners
        self._restrict = restrict
        self._cross_mounts = cross_mounts
        self._reinject = reinject
        self._tells = tells  # whether windows say what would be done and why
        self._root = workspace.root.rstrip("/").encode("utf-8", "surrogateescape") or b"/"
        self._states = PageStates(engine, workspace, sandbox_id, target.root.policy)
        self._skipped = frozenset(s.path for s in target.root.skipped)
        self._kept_below: bytes | None = None
        self._kept_by_policy = False
        self._hiding: dict[bytes, None] = {}
        self._unreadable: list[bytes] = []
        self._left_out: bytes | None = None
        self._new_folder: tuple[bytes, bytes] | None = None
        self._staged = 0
        self._inodes: dict[tuple[int, int], bytes] = {}
        self._groups: dict[bytes, _LinkGroup] = {}
        self._removed_folders: list[bytes] = []
        self._conflicts: set[bytes] = set()
        self.stay: set[bytes] = set()
        self._touched: set[bytes] = {b""}
        self._outside: dict[bytes, int] = {}  # folders outside the scope that lead to it, and their present mtimes
        self._window = Window()
        self.counts = Counts()
        self.met: set[bytes] = set()
        self.kept: list[bytes] = []
        self.replaces = False

    async def windows(self, *, missing: bool = False) -> AsyncIterator[Window]:
        """The plan, part by part. Raises `SnapshotError` `RESTORE_BLOCKED` at the end when a folder that holds files to be kept
        stands where a file or link must go, when what is kept hides entries of the checkpoint, or when something cannot be read
        that the capture did not list as left out. `missing` plans for a root that is not there yet."""
        group = []
        await self._states.load()
        top = self._target.folders[b""]
        scan = self._workspace.scan(self._selection, cross_mounts=self._cross_mounts)
        if missing:
            scan = _new_root(top, self._mode(top))
        async for page, stats in slice_scan(scan, self._target.pages):
            group.append((page.page_id, stats))
            if len(group) >= LOAD_PAGES:
                yield await self._plan(group)
                group = []
        yield await self._plan(group)
        yield self._end()

    async def _plan(self, group: Sequence[tuple[bytes, list[FileStat]]]) -> Window:
        self._window = Window()
        entries = await self._target.entries([i for i, _ in group])
        pages = [PagePair(i, entries[i], stats) for i, stats in group]
        unequal = [p for p in pages if not self._states.unchanged(p.page_id, len(p.entries), p.stats)]
        same, doubtful = await self._states.tell(unequal)
        changed = {p.page_id for p in unequal}
        same.update(e.path for p in pages if p.page_id not in changed for e in p.entries)
        if doubtful:
            equal = await same_contents(self._engine, self._reader, self._workspace, doubtful)
            same.update(e.path for (_, e), as_wanted in zip(doubtful, equal, strict=True) if as_wanted)
        if self._reinject:  # what is there may be the zeros of an earlier restore, which counts as equal otherwise
            same.difference_update([e.path for p in pages for e in p.entries if is_redacted(e)])
        for page in pages:
            self._merge(page.entries, page.stats, same)
        return self._window

    # ---- the merge

    def _merge(self, entries: Sequence[Entry], stats: Sequence[FileStat], same: Container[bytes]) -> None:
        """Both lists are in walk order."""
        if not stats:
            self.met.update(e.path for e in entries if e.path in self._scope.paths)
            for new in filter(self._wanted, entries):
                self._add(new)
            return
        current = {s.path: s for s in stats}
        wanted = {e.path for e in entries}
        by_path = {e.path: e for e in entries}
        for path in by_path if current.keys() == wanted else sorted(wanted | current.keys(), key=path_key):
            entry, stat = by_path.get(path), current.get(path)
            if path in self._scope.paths:
                self.met.add(path)
            if stat is not None and stat.kind == Kind.DIR and not self._scope.holds(path) and self._scope.leads_to(path):
                self._outside[path] = stat.mtime_ns
            if stat is not None and self._keeps(stat):
                self._keep(path)
                if entry is not None:
                    self._hide(entry)
            elif entry is None and stat is not None:
                self._remove(stat)
            elif entry is not None and self._wanted(entry):
                if stat is None:
                    self._add(entry)
                else:
                    self._bring_in_line(entry, stat, path in same)

    def _keeps(self, stat: FileStat) -> bool:
        path = stat.path
        if self._kept_below is not None and path.startswith(self._kept_below):
            return True
        keeps = stat.note in (Note.EXCLUDED, Note.MOUNT, Note.UNREADABLE) or path in self._skipped
        if stat.note == Note.UNREADABLE and path not in self._skipped and self._concerns(path):
            self._unreadable.append(path)
        if keeps and path:
            self._kept_below = path + b"/"
            self._kept_by_policy = self._restrict and stat.note == Note.EXCLUDED
        return keeps and bool(path)

    def _concerns(self, path: bytes) -> bool:
        return self._scope.holds(path) or self._scope.leads_to(path)

    def _keep(self, path: bytes) -> None:
        self.kept.append(path)
        self._stay_above(path)

    def _hide(self, entry: Entry) -> None:
        """An entry of the checkpoint at or below what is kept: nothing to do only where the policy given now says so."""
        path = entry.path
        if self._kept_below is None or self._kept_by_policy or not self._scope.holds(path) or self._leaves_out(entry):
            return
        self._hiding[self._kept_below[:-1]] = None

    def _leaves_out(self, entry: Entry) -> bool:
        """Whether the policy given for this restore, if any, excludes the entry or a folder above it."""
        path = entry.path
        if not self._restrict:
            return False
        if self._left_out is not None and path.startswith(self._left_out):
            return True
        if path and self._selection.excludes(path, entry.kind):
            self._left_out = path + b"/"
            return True
        return False

    def _stay_above(self, path: bytes) -> None:
        folder = path
        while folder:
            folder = folder.rpartition(b"/")[0]
            if folder in self.stay:
                return
            self.stay.add(folder)

    def _wanted(self, entry: Entry) -> bool:
        path = entry.path
        if self._kept_below is not None and path.startswith(self._kept_below):
            self._hide(entry)
            return False
        below = self._left_out is not None and path.startswith(self._left_out)
        if self._leaves_out(entry):
            if not below:
                self._keep(path)
            return False
        return self._scope.holds(path) or (entry.kind == Kind.DIR and self._scope.leads_to(path))

    def _remove(self, stat: FileStat) -> None:
        path = stat.path
        if not self._scope.holds(path):
            self._stay_above(path)
            return
        if stat.kind == Kind.DIR:
            self._removed_folders.append(path)
            return
        self._window.steps.append(RemoveStep(path, folder=False))
        self._window.removes.append(path)
        self._tell("remove", path, stat.kind, stat.size)
        self.counts.removed += 1
        self.replaces = True
        self._touch_parent(path)

    def _add(self, entry: Entry) -> None:
        self.counts.added += 1
        self._window.adds.append(entry.path)
        self._tell("add", entry.path, entry.kind, entry.size)
        self._stage(entry)

    def _change(self, entry: Entry, stat: FileStat, *, same: bool) -> None:
        """Bring what is there in line; `same`: its content is as wanted."""
        self.counts.changed += 1
        self.replaces = True
        self._window.changes.append(entry.path)
        if self._tells:
            why = differences(
                entry,
                stat,
                content=same,
                mode=stat.mode == self._mode(entry),
                time=self._same_time(entry, stat),
                owner=self._same_owner(entry, stat),
            )
            self._tell("change", entry.path, entry.kind, entry.size, stat, why)

    def _tell(
        self,
        action: Literal["remove", "add", "change"],
        path: bytes,
        kind: int,
        size: int = 0,
        before: FileStat | None = None,
        why: tuple[str, ...] = (),
    ) -> None:
        if self._tells:
            was = before.size if before is not None and before.kind == Kind.FILE else 0
            size = size if kind == Kind.FILE else 0
            self._window.planned.append(PlannedChange(self._target.root.name, path, action, kind, size, was, why))

    def _bring_in_line(self, entry: Entry, stat: FileStat, same: bool) -> None:
        if entry.kind != stat.kind:
            self._replace_kind(entry, stat)
        elif entry.kind == Kind.DIR:
            self._match_folder(entry, stat)
        elif entry.kind == Kind.LINK:
            leads = stat.target == link_target(entry, self._root)
            if leads and stat.mtime_ns == entry.mtime_ns and self._same_owner(entry, stat):
                self.counts.unchanged += 1
            else:
                self._change(entry, stat, same=leads)
                self._stage(entry)
        else:
            self._match_file(entry, stat, same)

    def _replace_kind(self, entry: Entry, stat: FileStat) -> None:
        path = entry.path
        if stat.kind == Kind.DIR:
            self._removed_folders.append(path)
            self._conflicts.add(path)
        elif entry.kind == Kind.DIR:
            self._window.steps.append(RemoveStep(path, folder=False))
        self._change(entry, stat, same=False)
        self._stage(entry)

    def _match_folder(self, entry: Entry, stat: FileStat) -> None:
        if not self._scope.holds(entry.path):
            return
        same = stat.mode == self._mode(entry) and self._same_time(entry, stat) and self._same_owner(entry, stat)
        if same:
            self.counts.unchanged += 1
        else:
            self._touched.add(entry.path)
            if stat.mode != self._mode(entry) or not self._same_owner(entry, stat):
                self._change(entry, stat, same=True)
            else:
                self.counts.unchanged += 1

    def _match_file(self, entry: Entry, stat: FileStat, same: bool) -> None:
        first = entry.hardlink or (entry.path if entry.path in self._target.groups else b"")
        same_meta = stat.mode == self._mode(entry) and self._same_time(entry, stat) and self._same_owner(entry, stat)
        if first:
            self._match_hard_link(entry, stat, first, content=same, meta=same_meta)
            return
        alone = stat.nlink <= 1 or self._claim_inode(stat, entry.path)
        if same and alone and (same_meta or stat.nlink <= 1):
            if same_meta:
                self.counts.right(entry)
                return
            owner = (entry.uid, entry.gid) if self._owners else None
            self._change(entry, stat, same=True)
            self._window.steps.append(SetMetaStep(entry.path, self._mode(entry), entry.mtime_ns, owner))
            return
        self._change(entry, stat, same=same)
        self._stage(entry)

    def _match_hard_link(self, entry: Entry, stat: FileStat, first: bytes, *, content: bool, meta: bool) -> None:
        group = self._groups.setdefault(first, _LinkGroup())
        inode = (stat.device, stat.inode)
        fits = content and meta and group.staged is None
        if fits and group.inode is None:
            fits = self._claim_inode(stat, first)
            group.inode = inode if fits else None
        elif fits:
            fits = group.inode == inode
        if fits:
            group.entry = entry
            group.kept.append(entry.path)
            self.counts.right(entry)
        else:
            self._change(entry, stat, same=content)
            self._stage(entry)

    def _claim_inode(self, stat: FileStat, path: bytes) -> bool:
        return self._inodes.setdefault((stat.device, stat.inode), path) == path

    def _same_time(self, entry: Entry, stat: FileStat) -> bool:
        """Whether the modification time is the entry's, as far as the workspace can set it: some tools set whole seconds."""
        if stat.mtime_ns == entry.mtime_ns:
            return True
        return not self._workspace.capabilities.mtimes and stat.mtime_ns // SECOND == entry.mtime_ns // SECOND

    def _same_owner(self, entry: Entry, stat: FileStat) -> bool:
        return not self._owners or (entry.uid, entry.gid) == (stat.uid, stat.gid)

    def _mode(self, entry: Entry) -> int:
        return entry.mode if self._owners else entry.mode & 0o1777

    # ---- staging

    def _stage(self, entry: Entry) -> None:
        window = self._window
        if entry.kind == Kind.DIR:
            staged = self._place(entry.path)
            window.structure.append(StageFolder(staged))
            if self._new_folder is None or not entry.path.startswith(self._new_folder[0]):
                self._new_folder = (entry.path + b"/", staged + b"/")
            self._touched.add(entry.path)
        elif entry.kind == Kind.LINK:
            owner = (entry.uid, entry.gid) if self._owners else None
            window.structure.append(StageLink(self._place(entry.path), link_target(entry, self._root), entry.mtime_ns, owner))
        else:
            self._stage_file(entry)

    def _stage_file(self, entry: Entry) -> None:
        first = entry.hardlink or (entry.path if entry.path in self._target.groups else b"")
        group = self._groups.setdefault(first, _LinkGroup()) if first else None
        staged = self._place(entry.path)
        if group is not None and group.staged is not None:
            self._window.links.append(StageHardLink(staged, group.staged))
            return
        self._window.files.append(FileTask(staged, entry))
        if group is not None:
            group.staged = staged
            for path in group.kept:  # names that looked right, but lead to another file than this one
                self._window.links.append(StageHardLink(self._place(path), staged))
                self.counts.unchanged -= 1
                self._window.changes.append(path)
                self._tell("change", path, entry.kind, entry.size, why=("hard link",))
                self.counts.changed += 1
            group.kept.clear()

    def _place(self, path: bytes) -> bytes:
        """Where in the stage the entry for `path` goes; new folders are staged with all they hold and placed as a whole."""
        if self._new_folder is not None and path.startswith(self._new_folder[0]):
            return self._new_folder[1] + path[len(self._new_folder[0]) :]
        staged = b"%d" % self._staged
        self._staged += 1
        self._window.steps.append(PlaceStep(staged, path))
        self._touch_parent(path)
        return staged

    def _touch_parent(self, path: bytes) -> None:
        self._touched.add(path.rpartition(b"/")[0])

    # ---- the end

    def _end(self) -> Window:
        window = self._window = Window()
        self._refuse_hidden()
        blocked = sorted(self._conflicts & self.stay)
        if blocked:
            raise SnapshotError(
                "Folders that hold files to be kept (excluded, skipped, mounted) stand where the checkpoint has something else: "
                f"{_shown(blocked)}.",
                code=Code.RESTORE_BLOCKED,
                paths=blocked,
                hint="Move those files away, or restore with a policy that includes them.",
            )
        for path in self._removed_folders:
            if path not in self.stay:
                window.steps.append(RemoveStep(path, folder=True))
                self._touch_parent(path)
                if path not in self._conflicts:
                    window.removes.append(path)
                    self._tell("remove", path, Kind.DIR)
                    self.counts.removed += 1
                self.replaces = True
        for path in sorted(self._touched, key=path_key):
            entry = self._target.folders.get(path)
            if path in self._outside:
                window.steps.append(SetMetaStep(path, None, self._outside[path]))
            elif entry is not None:
                owner = (entry.uid, entry.gid) if self._owners else None
                window.steps.append(SetMetaStep(path, self._mode(entry), entry.mtime_ns, owner))
        return window

    def _refuse_hidden(self) -> None:
        """Refuse what would leave a part of the checkpoint out without a word."""
        if self._unreadable:
            raise SnapshotError(
                f"What the workspace holds cannot be compared with the checkpoint; unreadable: {_shown(self._unreadable)}.",
                code=Code.RESTORE_BLOCKED,
                paths=self._unreadable,
                hint="Make these paths readable, or move them away.",
            )
        if self._hiding:
            raise SnapshotError(
                "Paths that a restore leaves alone (excluded or mounted now) stand where the checkpoint has entries: "
                f"{_shown(list(self._hiding))}.",
                code=Code.RESTORE_BLOCKED,
                paths=list(self._hiding),
                hint="Move or unmount them, or restore with a policy that says what to do with them.",
            )


def _shown(paths: Sequence[bytes]) -> str:
    more = f" and {len(paths) - SHOWN_PATHS} more" if len(paths) > SHOWN_PATHS else ""
    return ", ".join(printable(p) or "the root itself" for p in paths[:SHOWN_PATHS]) + more


async def _new_root(entry: Entry, mode: int) -> AsyncIterator[Sequence[FileStat]]:
    yield [FileStat(b"", Kind.DIR, mode, mtime_ns=entry.mtime_ns, uid=entry.uid, gid=entry.gid)]
