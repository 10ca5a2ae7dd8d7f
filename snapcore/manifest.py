"""Manifests: the sorted entries of one root, cut into pages, under a paged index. Pure; docs/format.md is the reference.

A page is a msgpack array of entries. It ends after an entry whose path's CRC-32 has `PAGE_BITS` low zero bits, at the
latest at `MAX_PAGE_ENTRIES` entries or `MAX_PAGE_BYTES` of content fields, so one changed file changes one page. Borders
depend only on the fields that the content id covers: equal trees have equal pages but for folder times, owners and xattrs.
"""

import itertools
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import msgspec
from blake3 import blake3

from .chunking import record_id
from .errors import Code, SnapshotError
from .model import DIGEST_BYTES, Entry, Kind, RecordType, Totals, path_key, validate_path

__all__ = [
    "CONTENT_IDS_IN_ENTRY",
    "REDACTIONS_IN_ENTRY",
    "IndexEntry",
    "IndexPage",
    "Page",
    "PageBuilder",
    "build_index",
    "content_fields",
    "content_id",
    "decode_chunk_list",
    "decode_entries",
    "decode_index",
    "decode_page",
    "encode_chunk_list",
    "load_index",
    "page_for",
    "page_totals",
    "validate_entries",
]

PAGE_BITS: Final = 6
MAX_PAGE_ENTRIES: Final = 256
MAX_PAGE_BYTES: Final = 64 << 10
CONTENT_IDS_IN_ENTRY: Final = 64
REDACTIONS_IN_ENTRY: Final = 64  # so that no page comes near the largest record
IDS_IN_CHUNK_LIST: Final = 65_536
MAX_INDEX_LEVELS: Final = 8

_MASK: Final = (1 << PAGE_BITS) - 1
_PLAIN_FIELDS: Final = Entry.__struct_fields__.index("redaction_chunks")
_encoder: Final = msgspec.msgpack.Encoder()
_entries_decoder: Final = msgspec.msgpack.Decoder(list[Entry])

Fetch = Callable[[Sequence[bytes], int], Awaitable[dict[bytes, bytes]]]
"""Raw contents of records by id, given ids and their type."""


class IndexEntry(msgspec.Struct, frozen=True, array_like=True):
    """One page in an index: its first path, id, content digest, and what it holds. In upper levels, the same of an index page."""

    first_path: bytes
    page_id: bytes
    digest: bytes
    entries: int
    files: int
    folders: int
    links: int
    bytes: int


class IndexPage(msgspec.Struct, frozen=True, array_like=True):
    """An index record: in level 1 its entries are pages, above index records of the level below."""

    level: int
    entries: list[IndexEntry]


_index_decoder: Final = msgspec.msgpack.Decoder(IndexPage)


class Page(msgspec.Struct, frozen=True):
    """A finished page: its place in the index and its raw bytes."""

    index: IndexEntry
    raw: bytes


def content_fields(entry: Entry) -> bytes:
    """What the content id covers of an entry. Folder times, owners, xattrs and redaction notes stay out."""
    return _encoder.encode(
        (
            entry.path,
            entry.kind,
            entry.mode,
            entry.size,
            entry.chunks,
            entry.chunk_list,
            entry.target,
            entry.in_root,
            entry.hardlink,
            0 if entry.kind == Kind.DIR else entry.mtime_ns,
        )
    )


class PageBuilder:
    """Cuts a sorted run of entries into pages."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._content: list[bytes] = []
        self._size = 0

    @property
    def at_border(self) -> bool:
        """Whether the next entry begins a page, so that an unchanged page may follow as it is."""
        return not self._entries

    def add(self, entry: Entry) -> Page | None:
        """Take the next entry; the page that it completes, if it does."""
        fields = content_fields(entry)
        entries = self._entries
        entries.append(entry)
        self._content.append(fields)
        self._size += len(fields)
        ends = zlib.crc32(entry.path) & _MASK == 0
        return self.finish() if ends or self._size >= MAX_PAGE_BYTES or len(entries) >= MAX_PAGE_ENTRIES else None

    def finish(self) -> Page | None:
        """The page begun, if any."""
        entries = self._entries
        if not entries:
            return None
        raw = _encoder.encode([_written(e) for e in entries])
        totals = page_totals(entries)
        index = IndexEntry(
            entries[0].path,
            record_id(RecordType.PAGE, raw),
            blake3(b"".join(self._content)).digest(),
            len(entries),
            totals.files,
            totals.folders,
            totals.links,
            totals.bytes,
        )
        self._entries, self._content, self._size = [], [], 0
        return Page(index, raw)


def _written(entry: Entry) -> Entry | tuple[object, ...]:
    """An entry as pages hold it: without the last fields when these are empty, which they nearly always are."""
    if entry.redaction_chunks or entry.redaction_list:
        return entry
    return msgspec.structs.astuple(entry)[:_PLAIN_FIELDS]


def page_totals(entries: Iterable[Entry]) -> Totals:
    """What entries hold: the root itself counts as no folder, a hard link counts its bytes once."""
    files = folders = links = size = 0
    for e in entries:
        if e.kind == Kind.FILE:
            files += 1
            if not e.hardlink:
                size += e.size
        elif e.kind == Kind.DIR:
            folders += bool(e.path)
        else:
            links += 1
    return Totals(files, folders, links, size)


def content_id(pages: Iterable[IndexEntry]) -> bytes:
    """The content id of a root: BLAKE3 over the content digests of its pages in order."""
    return blake3(b"".join(p.digest for p in pages)).digest()


def build_index(pages: Sequence[IndexEntry]) -> tuple[bytes, dict[bytes, bytes]]:
    """The top index record's id, and every index record by id as raw bytes. There is at least one page: the root's."""
    records: dict[bytes, bytes] = {}
    level, entries = 1, list(pages)
    while True:
        groups = _index_groups(entries, level)
        upper = []
        for group in groups:
            raw = _encoder.encode(IndexPage(level, group))
            rid = record_id(RecordType.INDEX, raw)
            records[rid] = raw
            upper.append(
                IndexEntry(
                    group[0].first_path,
                    rid,
                    blake3(b"".join(e.digest for e in group)).digest(),
                    sum(e.entries for e in group),
                    sum(e.files for e in group),
                    sum(e.folders for e in group),
                    sum(e.links for e in group),
                    sum(e.bytes for e in group),
                )
            )
        if len(upper) == 1:
            return upper[0].page_id, records
        level, entries = level + 1, upper


def _index_groups(entries: list[IndexEntry], level: int) -> list[list[IndexEntry]]:
    groups: list[list[IndexEntry]] = [[]]
    for entry in entries:
        groups[-1].append(entry)
        # other bits of the CRC than those that ended the pages, or every page would end its group too
        ends = zlib.crc32(b"%d" % level + entry.first_path) & _MASK == 0
        if ends or len(groups[-1]) >= MAX_PAGE_ENTRIES:
            groups.append([])
    if len(groups) > 1 and len(groups) >= len(entries):  # every entry ended a group: a level that does not shrink
        return [entries[i : i + MAX_PAGE_ENTRIES] for i in range(0, len(entries), MAX_PAGE_ENTRIES)]
    return [g for g in groups if g]


async def load_index(root_id: bytes, fetch: Fetch) -> tuple[list[IndexEntry], list[bytes]]:
    """All leaf pages of a root in order, and the ids of all index records. Raises `SnapshotError` `INVALID_BLOB`."""
    ids = [root_id]
    level_ids = [root_id]
    expected: int | None = None
    while True:
        raws = await fetch(level_ids, RecordType.INDEX)
        pages = [decode_index(raws[i]) for i in level_ids]
        level = pages[0].level if expected is None else expected
        if not 1 <= level <= MAX_INDEX_LEVELS or any(p.level != level for p in pages):
            raise _broken("the levels of its index are not in order")
        entries = [e for p in pages for e in p.entries]
        keys = [path_key(e.first_path) for e in entries]
        if any(a >= b for a, b in itertools.pairwise(keys)):
            raise _broken("its index is not in order")
        if level == 1:
            return entries, ids
        level_ids = [e.page_id for e in entries]
        if len(set(level_ids)) != len(level_ids):  # else a few small records could list billions of pages
            raise _broken("its index lists a page twice")
        ids += level_ids
        expected = level - 1


def _broken(what: str) -> SnapshotError:
    return SnapshotError(
        f"A manifest is damaged: {what}.",
        code=Code.INVALID_BLOB,
        hint="Run 'snapcore verify' to see which checkpoints it hurts.",
    )


def decode_index(raw: bytes) -> IndexPage:
    """An index record. Raises `SnapshotError` `INVALID_BLOB`."""
    try:
        page = _index_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _broken("an index page cannot be read") from error
    if not page.entries or any(len(e.page_id) != DIGEST_BYTES or len(e.digest) != DIGEST_BYTES for e in page.entries):
        raise _broken("an index page lists an impossible page")
    return page


def decode_page(raw: bytes) -> list[Entry]:
    """The entries of a page, each valid by itself. Raises `SnapshotError` `INVALID_BLOB`."""
    entries = decode_entries(raw)
    if not entries:
        raise _broken("a page is empty")
    for e in entries:
        plain = e.kind in (Kind.FILE, Kind.DIR, Kind.LINK) and 0 <= e.mode <= 0o7777 and e.size >= 0
        whole = not (len(e.chunks) % DIGEST_BYTES or len(e.redaction_chunks) % DIGEST_BYTES)
        lists = len(e.chunk_list) in (0, DIGEST_BYTES) and len(e.redaction_list) in (0, DIGEST_BYTES)
        if not (plain and whole and lists):
            raise _broken("a page holds an impossible entry")
    return entries


def decode_entries(raw: bytes) -> list[Entry]:
    """The entries of a page that `decode_page` has accepted before: its values are not looked at again."""
    try:
        return _entries_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _broken("a page cannot be read") from error


def validate_entries(entries: Iterable[Entry], previous: Entry | None, folders: list[bytes]) -> Entry | None:
    """Check a run of entries before a restore trusts it; carries on from `previous` with the `folders` open so far.

    Refuses absolute paths, `..`, NUL, entries out of order or twice, and entries below what is no folder of this
    manifest. Returns the last entry. Raises `SnapshotError` `INVALID_PATH`.
    """
    key = path_key(previous.path) if previous is not None else b""
    for e in entries:
        validate_path(e.path)
        before, key = key, path_key(e.path)
        if previous is None:
            if e.path or e.kind != Kind.DIR:
                raise SnapshotError("A manifest does not begin with its root folder.", code=Code.INVALID_PATH)
        else:
            if key <= before:
                raise SnapshotError("A manifest lists a path twice or out of order.", code=Code.INVALID_PATH, paths=[e.path])
            parent = e.path.rpartition(b"/")[0]
            while folders and folders[-1] != parent:
                folders.pop()
            if not folders:
                raise SnapshotError("A manifest lists a path below what is no folder.", code=Code.INVALID_PATH, paths=[e.path])
        if e.hardlink:
            validate_path(e.hardlink)
        if e.kind == Kind.LINK and (b"\0" in e.target or not (_stays_inside(e.target) if e.in_root else e.target)):
            raise SnapshotError("A manifest has a link without a valid target.", code=Code.INVALID_PATH, paths=[e.path])
        if e.kind == Kind.DIR:
            folders.append(e.path)
        previous = e
    return previous


def _stays_inside(target: bytes) -> bool:
    """Whether a target below the root, kept as it was written, does not go up at once. `..` further on may well lead to a
    place inside, by way of another link."""
    return next((part for part in target.split(b"/") if part not in (b"", b".")), b"") != b".."


def page_for(pages: Sequence[IndexEntry], path: bytes) -> int | None:
    """Which page would hold `path`: its place in `pages`, None when it lies before the first."""
    key = path_key(path)
    low, high = 0, len(pages)
    while low < high:
        middle = (low + high) // 2
        if path_key(pages[middle].first_path) <= key:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low else None


def encode_chunk_list(ids: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """The id of the record that lists `ids` (32 bytes each, concatenated), and all its records by id as raw bytes.

    A record is a level byte and ids: of chunks at level 0, of chunk lists of the level below otherwise.
    """
    records: dict[bytes, bytes] = {}
    level, step = 0, IDS_IN_CHUNK_LIST * DIGEST_BYTES
    while True:
        upper = []
        for i in range(0, len(ids), step):
            raw = bytes([level]) + ids[i : i + step]
            rid = record_id(RecordType.CHUNK_LIST, raw)
            records[rid] = raw
            upper.append(rid)
        if len(upper) == 1:
            return upper[0], records
        level, ids = level + 1, b"".join(upper)


def decode_chunk_list(raw: bytes) -> tuple[int, list[bytes]]:
    """(level, ids) of a chunk-list record. Raises `SnapshotError` `INVALID_BLOB`."""
    if len(raw) < 1 + DIGEST_BYTES or (len(raw) - 1) % DIGEST_BYTES or raw[0] > 3:
        raise _broken("a chunk list has an impossible shape")
    return raw[0], [raw[i : i + DIGEST_BYTES] for i in range(1, len(raw), DIGEST_BYTES)]
