"""Capturing one root: the scan merged with what is known of it, changed files read, the manifest built as a stream."""

import asyncio
import os.path
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from .engine import WORKERS, stop
from .errors import Code, SnapshotError, printable
from .ingest import Ingestor, PendingFile
from .manifest import IndexEntry, Page, PageBuilder, build_index, content_id, decode_page
from .model import (
    Entry,
    FileStat,
    Kind,
    RecordType,
    RootState,
    StatPage,
    StatUpdate,
    Totals,
    path_key,
)
from .packwriter import PackWriter
from .protocols import Workspace
from .records import RecordReader, entry_records
from .selection import FilePolicy
from .statcache import digest_salt, make_stat_page, page_digest, read_stat_page, stat_root
from .treefilter import TreeFilter
from .treeslices import slice_scan

__all__ = ["Base", "TreeCapture", "TreeResult", "known_entry", "plain_entry"]

SEGMENT_BYTES: Final = 4 << 20
SEGMENT_FILES: Final = 1_024
SEGMENT_ENTRIES: Final = 8_192
AWAY_BYTES: Final = 64 << 20  # for a workspace that is not on this host, where every read is a call
AWAY_FILES: Final = 8_192
AWAY_ENTRIES: Final = 32_768
LOOK_PAGES: Final = 64  # manifest pages fetched together
SAVE_PAGES: Final = 64  # manifest pages stored together

OldPages = dict[bytes, dict[bytes, tuple[Entry, int, int]]]
"""Of each page by id: (entry, ctime_ns, inode) by path."""


@dataclass(frozen=True, slots=True)
class Base:
    """What is known of a root beforehand: the pages that its sandbox was last in line with, the digests of their scans, and
    the ids of all structure records that the thread's head refers to. `doubtful` says that records were lost since: what a
    page leads to is then looked up, and the file read again when it is not there."""

    pages: Sequence[IndexEntry] = ()
    digests: dict[bytes, bytes] = field(default_factory=dict)
    head_ids: frozenset[bytes] = frozenset()
    doubtful: bool = False


@dataclass(frozen=True, slots=True)
class TreeResult:
    """A captured root, its new stat cache, and what the user should know."""

    root: RootState
    stats: StatUpdate
    warnings: list[str]


class _Row:
    """A path on its way into the manifest: its entry is known, or comes from `pending` once that was read."""

    __slots__ = ("entry", "group", "pending", "stat")

    def __init__(self, stat: FileStat, entry: Entry | None, pending: PendingFile | None) -> None:
        self.stat = stat
        self.entry = entry
        self.pending = pending
        self.group: _Group | None = None


class _Group:
    """A hard-link group that the scan met. `path` is its first member (empty when that was left out), `scanned` what the scan
    said of it, `read` what was said when it was read, `entry` its entry once that is known; `left` counts names to come."""

    __slots__ = ("entry", "left", "path", "read", "scanned")

    def __init__(self, first: FileStat) -> None:
        self.path = first.path
        self.scanned = first
        self.read = first
        self.entry: Entry | None = None
        self.left = first.nlink - 1


@dataclass(slots=True)
class _Reused:
    """A page of the base that is taken over as it is, and the stats of its entries."""

    page: IndexEntry
    stats: Sequence[FileStat]


@dataclass(slots=True)
class _Slice:
    """The stats that fall into one page of the base (None: there is no base)."""

    page: IndexEntry | None
    stats: Sequence[FileStat]
    unchanged: bool


@dataclass(slots=True)
class _Segment:
    """A run of the tree whose files are read together; larger when they are `away`."""

    away: bool = False
    items: list[_Row | _Reused] = field(default_factory=list)
    pending: list[PendingFile] = field(default_factory=list)
    size: int = 0
    entries: int = 0
    reading: asyncio.Task[None] | None = None

    def add(self, item: _Row | _Reused) -> bool:
        """Take the next item; whether that is enough."""
        self.items.append(item)
        if isinstance(item, _Row) and item.pending is not None:
            self.pending.append(item.pending)
            self.size += item.stat.size
            if self.away:
                return self.size >= AWAY_BYTES or len(self.pending) >= AWAY_FILES
            return self.size >= SEGMENT_BYTES or len(self.pending) >= SEGMENT_FILES
        self.entries += len(item.stats) if isinstance(item, _Reused) else 1
        return self.entries >= (AWAY_ENTRIES if self.away else SEGMENT_ENTRIES)


class TreeCapture:
    """One root of one capture."""

    def __init__(
        self,
        *,
        workspace: Workspace,
        sandbox_id: str,
        name: str,
        policy: FilePolicy,
        base: Base,
        reader: RecordReader,
        writer: PackWriter,
        ingestor: Ingestor,
        tree: TreeFilter,
        redaction: bytes,
        check: Callable[[], None],
    ) -> None:
        self._workspace = workspace
        self._sandbox_id = sandbox_id
        self._name = name
        self._stat_root = stat_root(workspace)
        self._policy = policy
        self._base = base
        self._reader = reader
        self._writer = writer
        self._ingestor = ingestor
        self._tree = tree
        self._redaction = redaction
        self._check = check
        self._record = policy.record()
        self._salt = digest_salt(self._record)
        self._groups: dict[tuple[int, int], _Group] = {}
        self._pager = PageBuilder()
        self._page_stats: list[FileStat] = []
        self._pages: list[IndexEntry] = []
        self._unsaved: dict[bytes, bytes] = {}
        self._stat_pages: list[StatPage] = []
        self._trusted_before = 0
        self._warnings: list[str] = []
        root = os.fsencode(workspace.root.rstrip("/"))
        self._root_prefix = root + b"/"

    async def run(self) -> TreeResult:
        """Capture the tree. Raises `SnapshotError` for what the policy does not let pass, naming every path."""
        clock = await self._workspace.clock()
        self._trusted_before = clock.now_ns - clock.granularity_ns
        flight: deque[_Segment] = deque()
        try:
            async for segment in self._segments():
                self._check()
                flight.append(segment)
                if segment.pending and not self._tree.refused:
                    segment.reading = asyncio.create_task(self._ingestor.read(self._workspace, segment.pending))
                while len(flight) > WORKERS:
                    await self._consume(flight[0])
                    flight.popleft()
            while flight:
                await self._consume(flight[0])
                flight.popleft()
        finally:
            await stop([s.reading for s in flight if s.reading is not None])
        self._tree.raise_refused()
        return await self._finish()

    # ---- the scan beside the base

    async def _segments(self) -> AsyncIterator[_Segment]:
        away = self._workspace.host_path is None
        segment = _Segment(away)
        async for items in self._items():
            for item in items:
                if segment.add(item):
                    yield segment
                    segment = _Segment(away)
        if segment.items:
            yield segment

    async def _items(self) -> AsyncIterator[list[_Row | _Reused]]:
        group: list[_Slice] = []
        changed = 0
        async for part in self._slices():
            group.append(part)
            changed += not part.unchanged
            if part.page is None or changed >= LOOK_PAGES or len(group) >= 2 * LOOK_PAGES:
                yield await self._compare(group)
                group, changed = [], 0
        if group:
            yield await self._compare(group)

    async def _slices(self) -> AsyncIterator[_Slice]:
        if not self._base.pages:
            async for kept in self._kept():
                yield _Slice(None, kept, unchanged=False)
            return
        async for page, stats in slice_scan(self._kept(), self._base.pages):
            yield self._slice(page, stats)

    async def _kept(self) -> AsyncIterator[Sequence[FileStat]]:
        async for batch in self._workspace.scan(self._tree.selection, cross_mounts=self._policy.cross_mounts):
            yield self._tree.take(batch)

    def _slice(self, page: IndexEntry, stats: Sequence[FileStat]) -> _Slice:
        known = self._base.digests.get(page.page_id) if page.page_id in self._base.head_ids else None
        unchanged = bool(known) and len(stats) == page.entries and page_digest(stats, self._salt) == known
        return _Slice(page, stats, unchanged)

    async def _compare(self, group: Sequence[_Slice]) -> list[_Row | _Reused]:
        old = await self._old_pages([s.page.page_id for s in group if s.page is not None and not s.unchanged and s.stats])
        items: list[_Row | _Reused] = []
        for part in group:
            if part.unchanged and part.page is not None:
                for s in part.stats:
                    if s.nlink > 1 and s.kind == Kind.FILE:
                        self._join_group(s)
                items.append(_Reused(part.page, part.stats))
            else:
                known = old.get(part.page.page_id, {}) if part.page is not None else {}
                items += [self._row(s, known) for s in part.stats]
        return items

    async def _old_pages(self, page_ids: list[bytes]) -> OldPages:
        if not page_ids:
            return {}
        if self._base.doubtful:
            page_ids = list(await self._reader.store.known(page_ids))
        stats = await self._reader.store.stat_pages(self._sandbox_id, self._stat_root, page_ids)
        try:
            raws = await self._reader.fetch([i for i in page_ids if i in stats], RecordType.PAGE)
        except SnapshotError as error:
            # pages of a deleted checkpoint may be gone: its files are read as if nothing were known of them
            if error.code not in (Code.MISSING_BLOB, Code.INVALID_BLOB):
                raise
            return {}
        out: OldPages = {}
        for page_id, raw in raws.items():
            entries = decode_page(raw)
            rows = read_stat_page(stats[page_id])
            if len(rows) == len(entries):
                known = {e.path: (e, c, i) for e, (c, i) in zip(entries, rows, strict=True)}
                if self._base.doubtful:
                    known = {e.path: known[e.path] for e in await self._whole(entries)}
                out[page_id] = known
                if page_id not in self._base.head_ids:
                    await self._refer_to([e for e, _, _ in known.values()])
        return out

    async def _whole(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries whose records are all there."""
        needs: list[tuple[Entry, set[bytes]]] = []
        for e in entries:
            chunks, lists = entry_records(e)
            ids = set(chunks)
            try:
                for listed in (await self._reader.expand(lists, ids)).values() if lists else ():
                    ids.update(listed)
            except SnapshotError as error:
                if error.code not in (Code.MISSING_BLOB, Code.INVALID_BLOB):
                    raise
                continue
            needs.append((e, ids))
        known = await self._reader.store.known(set().union(*(ids for _, ids in needs)))
        return [e for e, ids in needs if ids <= known]

    async def _refer_to(self, entries: Sequence[Entry]) -> None:
        """The head does not refer to these records, so the commit has to check each that is reused."""
        lists: list[bytes] = []
        for e in entries:
            chunks, own_lists = entry_records(e)
            self._writer.refs.update(chunks)
            lists += own_lists
        if lists:
            for ids in (await self._reader.expand(lists, self._writer.refs)).values():
                self._writer.refs.update(ids)

    # ---- rows

    def _row(self, s: FileStat, known: dict[bytes, tuple[Entry, int, int]]) -> _Row:
        if s.kind != Kind.FILE:
            return _Row(s, plain_entry(s, self._root_prefix), None)
        old = known.get(s.path)
        same = (
            old is not None
            and old[0].kind == Kind.FILE
            and old[0].size == s.size
            and old[0].mtime_ns == s.mtime_ns
            and old[1] == s.ctime_ns
            and old[2] == s.inode
        )
        row = _Row(s, None, None)
        if s.nlink > 1:
            row.group = self._join_group(s)
        if old is not None and same:
            row.entry = known_entry(s, old[0])
        elif row.group is None or row.group.path == s.path:
            row.pending = PendingFile(s)
        return row

    def _join_group(self, s: FileStat) -> _Group | None:
        if not s.inode:
            return None
        key = (s.device, s.inode)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(s)
        else:
            group.left -= 1
            if group.left <= 0:
                del self._groups[key]
        return group

    # ---- the manifest

    async def _consume(self, segment: _Segment) -> None:
        if segment.reading is not None:
            await segment.reading
        if self._tree.refused:
            return
        for item in segment.items:
            if isinstance(item, _Reused):
                await self._take_page(item)
                continue
            taken = await self._take_name(item, item.group) if item.group is not None else self._own(item)
            if taken is not None:
                page = self._add(*taken)
                if page is not None:
                    await self._take_new_page(page)

    async def _take_page(self, item: _Reused) -> None:
        if self._pager.at_border:
            self._pages.append(item.page)
            return
        raw = (await self._reader.fetch([item.page.page_id], RecordType.PAGE))[item.page.page_id]
        for stat, entry in zip(item.stats, decode_page(raw), strict=True):
            page = self._add(stat, entry)
            if page is not None:
                await self._take_new_page(page)

    def _own(self, row: _Row) -> tuple[FileStat, Entry] | None:
        """A row's stat and entry, by itself."""
        if row.pending is None:
            return (row.stat, row.entry) if row.entry is not None else None
        entry = self._entry_read(row.pending)
        return (row.pending.stat, entry) if entry is not None else None

    async def _take_name(self, row: _Row, group: _Group) -> tuple[FileStat, Entry] | None:
        """The stat and entry of one name of a hard-link group. What belongs to the inode is the same for all names of a group;
        a name that shows another state than the group's stands for itself, or an inode that came to be used again would get
        foreign content."""
        first = group.path in (b"", row.stat.path)
        known = group.entry
        if not first and known is not None and (_alike(row.stat, group.scanned) or _alike(row.stat, group.read)):
            stat = msgspec.structs.replace(group.read, path=row.stat.path)
            return stat, msgspec.structs.replace(known, path=row.stat.path, hardlink=group.path)
        if row.entry is None and row.pending is None:
            # the group's first member was left out, lies in a page taken over as it is, or is not alike
            row.pending = PendingFile(row.stat)
            await self._ingestor.read(self._workspace, [row.pending])
        own = self._own(row)
        same_inode = own is not None and own[0].inode == row.stat.inode
        if first:
            group.path = row.stat.path if same_inode else b""
            group.scanned = row.stat
        if own is None or not same_inode or not (first or (known is None and _alike(own[0], group.scanned))):
            return own
        group.read, group.entry = own
        return own if first else (own[0], msgspec.structs.replace(own[1], hardlink=group.path))

    def _entry_read(self, pending: PendingFile) -> Entry | None:
        s = pending.stat
        if pending.problem:
            self._tree.unreadable(s.path, pending.problem)
            return None
        if pending.torn and not self._tree.torn(s.path):
            return None
        if pending.torn:
            self._warnings.append(f"{printable(s.path)}: kept changing while it was read; kept as it was read last")
        if pending.grown:
            self._warnings.append(f"{printable(s.path)}: grew while it was read; its first {pending.size} bytes are kept")
        return Entry(
            s.path,
            Kind.FILE,
            s.mode,
            pending.size,
            s.mtime_ns,
            chunks=pending.ids,
            chunk_list=pending.chunk_list,
            uid=s.uid,
            gid=s.gid,
            redactions=pending.redactions,
            redaction_chunks=pending.redaction_ids,
            redaction_list=pending.redaction_list,
        )

    def _add(self, stat: FileStat, entry: Entry) -> Page | None:
        self._page_stats.append(stat)
        return self._pager.add(entry)

    async def _take_new_page(self, page: Page) -> None:
        page_id = page.index.page_id
        self._pages.append(page.index)
        self._stat_pages.append(make_stat_page(page_id, self._page_stats, self._salt, self._trusted_before))
        self._page_stats = []
        if page_id not in self._base.head_ids:
            self._unsaved[page_id] = page.raw
            if len(self._unsaved) >= SAVE_PAGES:
                await self._save_pages()

    async def _save_pages(self) -> None:
        unsaved, self._unsaved = self._unsaved, {}
        await self._writer.add_structure(unsaved, RecordType.PAGE)

    async def _finish(self) -> TreeResult:
        last = self._pager.finish()
        if last is not None:
            await self._take_new_page(last)
        await self._save_pages()
        manifest, records = build_index(self._pages)
        await self._writer.add_structure({i: raw for i, raw in records.items() if i not in self._base.head_ids}, RecordType.INDEX)
        root = RootState(
            name=self._name,
            path=self._workspace.root,
            manifest=manifest,
            content_id=content_id(self._pages),
            policy=self._record,
            totals=Totals(
                files=sum(p.files for p in self._pages),
                folders=sum(p.folders for p in self._pages),
                links=sum(p.links for p in self._pages),
                bytes=sum(p.bytes for p in self._pages),
            ),
            skipped=tuple(sorted(self._tree.skipped, key=lambda s: path_key(s.path))),
        )
        kept = {p.page_id for p in self._pages}
        stats = StatUpdate(
            sandbox_id=self._sandbox_id,
            root=self._stat_root,
            manifest=manifest,
            saved=tuple(self._stat_pages),
            dropped=tuple(p.page_id for p in self._base.pages if p.page_id not in kept),
            replace=not self._base.pages,
            redaction=self._redaction,
        )
        return TreeResult(root, stats, self._warnings)


def plain_entry(s: FileStat, root_prefix: bytes) -> Entry:
    """The entry of a folder or a link. A target that is absolute into the root, whose path with a slash is `root_prefix`, is kept
    relative to it."""
    if s.kind == Kind.DIR:
        return Entry(s.path, s.kind, s.mode, 0, s.mtime_ns, uid=s.uid, gid=s.gid)
    target, in_root = s.target, False
    if target.startswith(root_prefix) or target + b"/" == root_prefix:
        target, in_root = target[len(root_prefix) :], True
    return Entry(s.path, s.kind, s.mode, 0, s.mtime_ns, target=target, in_root=in_root, uid=s.uid, gid=s.gid)


def known_entry(s: FileStat, old: Entry) -> Entry:
    """The entry of a file whose content is known from the base."""
    return msgspec.structs.replace(old, mode=s.mode, mtime_ns=s.mtime_ns, hardlink=b"", uid=s.uid, gid=s.gid)


def _alike(a: FileStat, b: FileStat) -> bool:
    """Whether two stats are of one inode in one state."""
    return (a.device, a.inode, a.size, a.mtime_ns, a.ctime_ns) == (b.device, b.inode, b.size, b.mtime_ns, b.ctime_ns) and (
        (a.mode, a.uid, a.gid) == (b.mode, b.uid, b.gid)
    )
