"""What is wrong with the trees and contents that checkpoints lead to: each record is looked at once, however many share it.

A manifest is in order when its pages are, each by itself, and each follows on the one before. What a page needs of the one
before it is little: its first path must sort after the last path there, below a folder that is still open there, and these
are the folders above that last path. So a page is read once, and a tree of a thousand pages that shares all but three with
the next is compared by its ends alone.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Final, NamedTuple

from .engine import Engine
from .errors import Code, SnapshotError
from .idset import IdSet
from .manifest import IndexEntry, IndexPage, decode_index, decode_page, validate_entries
from .model import Checkpoint, Entry, Kind, RecordType, path_key, split_ids
from .records import RecordReader, entry_records

__all__ = ["NOTHING", "Found", "Judge", "TreeCheck"]

RECORDS_AT_ONCE: Final = 64
LISTS_AT_ONCE: Final = 16
MAX_LEVEL: Final = 8

Found = tuple[str, str]  # a problem's kind and subject
Problems = frozenset[Found]
Judge = Callable[[Collection[bytes]], Awaitable[dict[bytes, Found]]]
"""Which of some records cannot be relied on where they are, and why."""
NOTHING: Final[Problems] = frozenset()


class _Span(NamedTuple):
    """The run of entries below a page (level 0) or an index record: its ends, and whether the last entry is a folder."""

    level: int
    first: bytes
    last: bytes
    ends_in_folder: bool
    entries: int


class _Look(NamedTuple):
    """A page that was read: its span, None when it is not in order by itself, and the records that it leads to."""

    span: _Span | None
    chunks: list[bytes]
    lists: list[bytes]


class TreeCheck:
    """Problems by checkpoint. What was found for one is kept for all that share it: a new one looks at everything anew."""

    def __init__(self, engine: Engine, judge: Judge) -> None:
        self._engine = engine
        self._reader = RecordReader(engine)
        self._judge = judge
        self._judged = IdSet()
        self._walked = IdSet()  # chunk lists
        self._spans: dict[bytes, _Span] = {}
        self._bad: dict[bytes, Problems] = {}  # of every record that something is wrong with or below

    async def look(self, checkpoints: Sequence[Checkpoint]) -> list[Problems]:
        """What is wrong with each of the checkpoints."""
        own: list[list[bytes]] = []
        chunks: list[bytes] = []
        lists: list[bytes] = []
        for c in checkpoints:
            refs = (c.conversation, *c.artifacts.values())
            chunks.append(c.record_id)
            mine = [c.record_id, *(root.manifest for root in c.roots)]
            for ref in refs:
                ids = split_ids(ref.chunks)
                chunks += ids
                lists += [ref.chunk_list] if ref.chunk_list else []
                mine += [*ids, *([ref.chunk_list] if ref.chunk_list else [])]
            own.append(mine)
        await self._records(chunks)
        await self._lists(lists)
        manifests = [root.manifest for c in checkpoints for root in c.roots]
        await self._indexes(manifests, MAX_LEVEL)
        for manifest in manifests:
            span = self._spans.get(manifest)
            if span is not None and span.first and manifest not in self._bad:
                self._blame(manifest, {("manifest-damaged", manifest.hex())})
        return [self._of(mine) for mine in own]

    def _of(self, ids: Collection[bytes]) -> Problems:
        if not self._bad:
            return NOTHING
        return NOTHING.union(*(self._bad[i] for i in ids if i in self._bad))

    def _blame(self, record: bytes, problems: Collection[Found]) -> None:
        self._bad[record] = self._bad.get(record, NOTHING) | frozenset(problems)

    # ---- trees, from below

    async def _indexes(self, ids: Sequence[bytes], highest: int) -> None:
        for some in _batches([i for i in dict.fromkeys(ids) if not self._is_done(i)], RECORDS_AT_ONCE):
            raws = await self._fetch(some, RecordType.INDEX)
            nodes = await self._engine.run(_decode_indexes, raws)
            lower: dict[int, list[bytes]] = {}
            for record, node in nodes.items():
                if node is None or not 1 <= node.level <= highest:
                    self._blame(record, {("manifest-damaged", record.hex())})
                else:
                    lower.setdefault(node.level, []).extend(entry.page_id for entry in node.entries)
            for level, below in sorted(lower.items()):
                await (self._indexes(below, level - 1) if level > 1 else self._pages(below))
            for record, node in nodes.items():
                if node is not None and record not in self._bad:
                    self._close(record, node)

    def _close(self, record: bytes, node: IndexPage) -> None:
        """Judge an index record by what is below it."""
        problems = self._of([entry.page_id for entry in node.entries])
        below = [(entry, self._spans.get(entry.page_id)) for entry in node.entries]
        spans = [span for _, span in below if span is not None]
        if not problems and not _in_order(below, node.level):
            problems = frozenset({("manifest-damaged", record.hex())})
        if problems:
            self._blame(record, problems)
        if spans:
            last = spans[-1]
            entries = sum(span.entries for span in spans)
            self._spans[record] = _Span(node.level, spans[0].first, last.last, last.ends_in_folder, entries)

    async def _pages(self, ids: Sequence[bytes]) -> None:
        for some in _batches([i for i in dict.fromkeys(ids) if not self._is_done(i)], RECORDS_AT_ONCE):
            looks = await self._engine.run(_look_at_pages, await self._fetch(some, RecordType.PAGE))
            await self._records([i for look in looks.values() for i in look.chunks])
            await self._lists([i for look in looks.values() for i in look.lists])
            for page_id, look in looks.items():
                if look.span is not None:
                    self._spans[page_id] = look.span
                problems = self._of([*look.chunks, *look.lists])
                if look.span is None:
                    problems |= {("manifest-damaged", page_id.hex())}
                if problems:
                    self._blame(page_id, problems)

    def _is_done(self, record: bytes) -> bool:
        return record in self._spans or record in self._bad

    # ---- contents

    async def _records(self, ids: Collection[bytes]) -> None:
        """Judge records by where they are."""
        fresh = self._judged.add_new(ids)
        if fresh:
            for record, problem in (await self._judge(fresh)).items():
                self._blame(record, {problem})

    async def _lists(self, ids: Collection[bytes]) -> None:
        for some in _batches(self._walked.add_new(ids), LISTS_AT_ONCE):
            await self._records(some)
            try:
                await self._expand([i for i in some if i not in self._bad])
            except SnapshotError:
                for one in some:  # one by one, so that the others are looked at all the same
                    if one not in self._bad:
                        await self._expand_one(one)

    async def _expand_one(self, record: bytes) -> None:
        try:
            await self._expand([record])
        except SnapshotError as error:
            self._blame(record, {_named(error, record)})

    async def _expand(self, lists: Sequence[bytes]) -> None:
        met: set[bytes] = set()
        try:
            expanded = await self._reader.expand(lists, met) if lists else {}
        finally:
            await self._records(met)
        for record, chunks in expanded.items():
            await self._records(chunks)
            if problems := self._of(chunks) | (self._of(met) if len(lists) == 1 else NOTHING):
                self._blame(record, problems)

    # ---- reading

    async def _fetch(self, ids: Sequence[bytes], record_type: int) -> dict[bytes, bytes]:
        """Those of the records that can be read; what is wrong with each of the others is kept."""
        await self._records(ids)
        there = [i for i in ids if i not in self._bad]
        try:
            return await self._reader.fetch(there, record_type)
        except SnapshotError:
            raws: dict[bytes, bytes] = {}
            for one in there:
                try:
                    raws |= await self._reader.fetch([one], record_type)
                except SnapshotError as error:
                    self._blame(one, {_named(error, one)})
            return raws


def _named(error: SnapshotError, record: bytes) -> Found:
    kind = {Code.MISSING_BLOB: "record-missing", Code.INVALID_BLOB: "record-damaged"}.get(error.code, "manifest-damaged")
    return kind, record.hex()


def _decode_indexes(raws: dict[bytes, bytes]) -> dict[bytes, IndexPage | None]:
    out: dict[bytes, IndexPage | None] = {}
    for record, raw in raws.items():
        try:
            out[record] = decode_index(raw)
        except SnapshotError:
            out[record] = None
    return out


def _look_at_pages(raws: dict[bytes, bytes]) -> dict[bytes, _Look]:
    out: dict[bytes, _Look] = {}
    for page_id, raw in raws.items():
        chunks: dict[bytes, None] = {}
        lists: dict[bytes, None] = {}
        span: _Span | None = None
        try:
            entries = decode_page(raw)
            for e in entries:
                own_chunks, own_lists = entry_records(e)
                chunks.update(dict.fromkeys(own_chunks))
                lists.update(dict.fromkeys(own_lists))
            span = _span(entries)
        except SnapshotError:
            pass  # a page that is not in order: its span stays unknown
        out[page_id] = _Look(span, list(chunks), list(lists))
    return out


def _span(entries: Sequence[Entry]) -> _Span:
    """The span of a page whose entries are in order, given that the folders above its first are there. Raises `SnapshotError`."""
    first = entries[0].path
    if first:
        above = list(_above(first))
        validate_entries(entries, Entry(above[-1], Kind.DIR), above)
    else:
        validate_entries(entries, None, [])
    return _Span(0, first, entries[-1].path, entries[-1].kind == Kind.DIR, len(entries))


def _above(path: bytes) -> Iterator[bytes]:
    """The folders above a path, the root first."""
    yield b""
    at = path.find(b"/")
    while at >= 0:
        yield path[:at]
        at = path.find(b"/", at + 1)


def _in_order(below: Sequence[tuple[IndexEntry, _Span | None]], level: int) -> bool:
    """Whether what an index record lists is of the level below, is what it says, and follows one on the other."""
    before: _Span | None = None
    for entry, span in below:
        if span is None or span.level != level - 1 or (entry.first_path, entry.entries) != (span.first, span.entries):
            return False
        if before is not None and not _follows(before, span.first):
            return False
        before = span
    return True


def _follows(before: _Span, path: bytes) -> bool:
    if path_key(path) <= path_key(before.last):
        return False
    parent = path.rpartition(b"/")[0]
    return parent in _above(before.last) or (before.ends_in_folder and parent == before.last)


def _batches(ids: Sequence[bytes], size: int) -> Iterator[list[bytes]]:
    for start in range(0, len(ids), size):
        yield list(ids[start : start + size])
