"""Manifests: paging, indexes, content ids, chunk lists, and what a reader refuses."""

import itertools
import random
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from snapcore import manifest
from snapcore.chunking import record_id
from snapcore.errors import Code, SnapshotError
from snapcore.manifest import (
    IndexEntry,
    Page,
    PageBuilder,
    build_index,
    content_fields,
    content_id,
    decode_chunk_list,
    decode_page,
    encode_chunk_list,
    load_index,
    page_for,
    page_totals,
    validate_entries,
)
from snapcore.model import Entry, Kind, RecordType, Redaction, Totals, path_key

ROOT = Entry(b"", Kind.DIR, 0o755, mtime_ns=9)
FILE = Entry(b"src/a.py", Kind.FILE, 0o644, 5, 1_700_000_000_000_000_000, bytes(32))


def tree(files: int, seed: int = 1) -> list[Entry]:
    """A root with about 20 files a folder, in walk order."""
    rng = random.Random(seed)
    entries = [ROOT]
    folder = b""
    for number in range(files):
        if number % 20 == 0:
            folder = b"d%06d" % (number // 20)
            entries.append(Entry(folder, Kind.DIR, 0o755, mtime_ns=number))
        entries.append(Entry(folder + b"/f%06d" % number, Kind.FILE, 0o644, number, number, rng.randbytes(32)))
    return entries


def pages_of(entries: Iterable[Entry]) -> list[Page]:
    builder = PageBuilder()
    pages = [page for entry in entries if (page := builder.add(entry))]
    last = builder.finish()
    return pages + ([last] if last else [])


def ids(pages: Iterable[Page]) -> list[bytes]:
    return [p.index.page_id for p in pages]


def content(entries: Iterable[Entry]) -> bytes:
    return content_id([p.index for p in pages_of(entries)])


def fetcher(records: dict[bytes, bytes]) -> manifest.Fetch:
    async def fetch(wanted: Sequence[bytes], record_type: int) -> dict[bytes, bytes]:
        assert record_type == RecordType.INDEX
        return {i: records[i] for i in wanted}

    return fetch


def outcome(call: Callable[[], object]) -> object:
    """What the call returns, or the code of its error."""
    try:
        return call()
    except SnapshotError as error:
        return error.code


@contextmanager
def allocating_at_most(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        assert tracemalloc.get_traced_memory()[1] - before <= limit
    finally:
        tracemalloc.stop()


# ---- pages


def test_pages_hold_every_entry_in_order_and_keep_to_the_limits() -> None:
    entries = tree(6_000)
    pages = pages_of(entries)
    assert [e for p in pages for e in decode_page(p.raw)] == entries
    assert all(p.index.entries <= 256 and len(p.raw) < 2 * 64 << 10 for p in pages)
    assert 30 < len(entries) / len(pages) < 130
    for p in pages:
        own = decode_page(p.raw)
        assert p.index.page_id == record_id(RecordType.PAGE, p.raw)
        assert p.index.first_path == own[0].path
        assert p.index.digest == blake3(b"".join(map(content_fields, own))).digest()
        assert p.index.entries == len(own)


def test_page_borders_never_move() -> None:
    """Borders and ids are part of the format: other ones would store every manifest a second time."""
    pages = pages_of(tree(400))
    assert [p.index.entries for p in pages] == [1, 46, 31, 31, 191, 49, 43, 29]
    assert pages[0].index.page_id.hex() == "1616a04cd1149138daf6618d131e012f489558674dc146c9b51baefc68e58bd6"
    top, _ = build_index([p.index for p in pages])
    assert top.hex() == "da6b0c06d3c51605f235f6d442bd8a7ca37d54ff4bfec8460d4b25ff2ecb7ea6"
    assert content(tree(400)).hex() == "ac15201fef3b14acde37b105f5fe7063663068ba47f210817dfc62520819eecf"


def never_ending(count: int, **fields: object) -> list[Entry]:
    """Entries none of whose paths ends a page."""
    names = (b"%09d" % n for n in itertools.count())
    chosen = (n for n in names if zlib.crc32(n) & 63)
    return [msgspec.structs.replace(FILE, path=n, **fields) for n in itertools.islice(chosen, count)]


def test_a_page_ends_at_256_entries_at_the_latest() -> None:
    assert [p.index.entries for p in pages_of(never_ending(600))] == [256, 256, 88]


def test_a_page_ends_at_64_kib_at_the_latest() -> None:
    pages = pages_of(never_ending(100, chunks=bytes(64 * 32)))
    assert [p.index.entries for p in pages[:-1]] == [32, 32, 32]
    assert 64 << 10 <= sum(len(content_fields(e)) for e in decode_page(pages[0].raw)) < 67 << 10


def test_a_border_falls_after_a_path_whose_crc_ends_in_six_zero_bits() -> None:
    last = [decode_page(p.raw)[-1].path for p in pages_of(tree(3_000))]
    assert all(zlib.crc32(path) & 63 == 0 for path in last[:-1])


def test_the_builder_knows_when_it_is_at_a_border() -> None:
    builder = PageBuilder()
    assert builder.at_border
    for entry in tree(300):
        page = builder.add(entry)
        assert builder.at_border == (page is not None)
    builder.finish()
    assert builder.at_border
    assert builder.finish() is None


CHANGES: dict[str, Callable[[list[Entry], int], None]] = {
    "change": lambda e, i: e.__setitem__(i, msgspec.structs.replace(e[i], mtime_ns=-5)),
    "remove": lambda e, i: e.__delitem__(i),
    "insert": lambda e, i: e.insert(i + 1, msgspec.structs.replace(e[i], path=e[i].path + b"-new")),
}


@settings(max_examples=40, deadline=None)
@given(place=st.integers(1, 2_000), kind=st.sampled_from(sorted(CHANGES)))
def test_one_change_touches_the_pages_around_it_and_no_other(place: int, kind: str) -> None:
    before = TREE_2000
    after = list(before)
    CHANGES[kind](after, place)
    old, new = PAGES_2000, ids(pages_of(after))
    assert len(set(new) - set(old)) <= 2
    assert len(set(old) - set(new)) <= 2


TREE_2000 = tree(2_000)
PAGES_2000 = ids(pages_of(TREE_2000))


def test_pages_resume_after_unchanged_ones() -> None:
    """A capture keeps unchanged pages as they are and pages only what lies between them."""
    entries = tree(2_000)
    pages = pages_of(entries)
    start = sum(p.index.entries for p in pages[:5])
    assert ids(pages_of(entries[start:])) == ids(pages[5:])


def test_totals_count_the_bytes_of_a_hard_link_once_and_not_the_root() -> None:
    entries = [
        ROOT,
        Entry(b"a", Kind.FILE, size=10),
        Entry(b"b", Kind.FILE, size=10, hardlink=b"a"),
        Entry(b"c", Kind.DIR),
        Entry(b"d", Kind.LINK, target=b"a"),
    ]
    assert page_totals(entries) == Totals(files=2, folders=1, links=1, bytes=10)


# ---- content ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", b"src/b.py"),
        ("kind", Kind.LINK),
        ("mode", 0o755),
        ("size", 6),
        ("mtime_ns", 1_700_000_000_000_000_001),
        ("chunks", bytes(31) + b"1"),
        ("chunk_list", bytes(32)),
        ("target", b"x"),
        ("in_root", True),
        ("hardlink", b"src/0.py"),
    ],
)
def test_the_content_id_depends_on(field: str, value: object) -> None:
    src = Entry(b"src", Kind.DIR)
    assert content([ROOT, src, msgspec.structs.replace(FILE, **{field: value})]) != content([ROOT, src, FILE])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("uid", 7), ("gid", 7), ("xattrs", {"user.x": b"1"}), ("redactions", (Redaction(0, 1, "TOKEN", "raw"),))),
        *(("redaction_chunks", bytes(64)), ("redaction_list", bytes(32))),
    ],
)
def test_the_content_id_does_not_depend_on(field: str, value: object) -> None:
    assert content([ROOT, msgspec.structs.replace(FILE, **{field: value})]) == content([ROOT, FILE])


def test_an_entry_holds_where_its_redactions_are_only_when_they_are_elsewhere() -> None:
    """Pages of older versions, which did not know of it, are the same pages."""
    far = msgspec.structs.replace(FILE, redaction_chunks=bytes(64), redaction_list=bytes(range(32)))
    _, page = pages_of([ROOT, FILE, msgspec.structs.replace(far, path=b"z")])
    assert [len(fields) for fields in msgspec.msgpack.decode(page.raw)] == [14, 16]
    assert decode_page(page.raw) == [FILE, msgspec.structs.replace(far, path=b"z")]


@pytest.mark.parametrize("fields", [{"redaction_chunks": bytes(33)}, {"redaction_list": bytes(64)}])
def test_an_impossible_place_of_redactions_is_refused(fields: dict[str, bytes]) -> None:
    _, page = pages_of([ROOT, msgspec.structs.replace(FILE, **fields)])
    with pytest.raises(SnapshotError):
        decode_page(page.raw)


def test_times_of_folders_are_no_part_of_the_content_id_but_those_of_links_are() -> None:
    link = Entry(b"z", Kind.LINK, 0o777, target=b"a", mtime_ns=1)
    assert content([msgspec.structs.replace(ROOT, mtime_ns=4), link]) == content([ROOT, link])
    assert content([ROOT, msgspec.structs.replace(link, mtime_ns=2)]) != content([ROOT, link])


def test_every_field_of_an_entry_is_known_to_count_or_not() -> None:
    assert Entry.__struct_fields__ == (
        *("path", "kind", "mode", "size", "mtime_ns", "chunks", "chunk_list", "target", "in_root", "hardlink"),
        *("uid", "gid", "xattrs", "redactions", "redaction_chunks", "redaction_list"),
    )


def test_fields_cannot_pass_for_one_another() -> None:
    a, b = (Entry(b"f", Kind.FILE, chunks=bytes(32)), Entry(b"f", Kind.FILE, chunk_list=bytes(32)))
    assert content_fields(a) != content_fields(b)
    assert content([ROOT, Entry(b"ab", Kind.FILE)]) != content([ROOT, Entry(b"a", Kind.FILE), Entry(b"b", Kind.FILE)])


def test_equal_trees_have_equal_content_ids_whatever_differs_beside() -> None:
    """Long lists of what does not count must not move a page border."""
    plain = tree(1_500)
    noisy = [
        msgspec.structs.replace(
            e,
            uid=number,
            xattrs={"user.note": b"x" * 900},
            mtime_ns=number if e.kind == Kind.DIR else e.mtime_ns,
            redactions=tuple(Redaction(n, 1, "TOKEN", "raw") for n in range(number % 40)),
        )
        for number, e in enumerate(plain)
    ]
    assert content(noisy) == content(plain)
    assert [p.index.entries for p in pages_of(noisy)] == [p.index.entries for p in pages_of(plain)]


# ---- indexes


async def test_an_index_of_many_levels_leads_to_all_pages() -> None:
    leaves = [
        IndexEntry(b"%09d" % n, record_id(RecordType.PAGE, b"%d" % n), blake3(b"%d" % n).digest(), 64, 60, 3, 1, 1000)
        for n in range(200_000 // 64 * 16)  # pages of 3.2 million entries
    ]
    top, records = build_index(leaves)
    pages, index_ids = await load_index(top, fetcher(records))
    assert pages == leaves
    assert set(index_ids) == set(records)
    assert index_ids[0] == top
    assert msgspec.msgpack.decode(records[top])[0] >= 3
    assert all(record_id(RecordType.INDEX, raw) == i for i, raw in records.items())
    assert all(len(msgspec.msgpack.decode(raw)[1]) <= 256 for raw in records.values())


async def test_upper_levels_sum_up_the_lower_ones() -> None:
    leaves = [p.index for p in pages_of(tree(30_000))]
    top, records = build_index(leaves)
    level, groups = msgspec.msgpack.decode(records[top])
    assert level == 2
    for first, page_id, digest, *totals in groups:
        level, own = msgspec.msgpack.decode(records[page_id], type=tuple[int, list[IndexEntry]])
        assert level == 1
        assert first == own[0].first_path
        assert digest == blake3(b"".join(e.digest for e in own)).digest()
        assert totals == [sum(getattr(e, n) for e in own) for n in ("entries", "files", "folders", "links", "bytes")]


async def test_one_changed_page_changes_one_index_record_a_level() -> None:
    entries = tree(30_000)
    _, before = build_index([p.index for p in pages_of(entries)])
    entries[15_000] = msgspec.structs.replace(entries[15_000], size=1)
    _, after = build_index([p.index for p in pages_of(entries)])
    assert len(after.keys() - before.keys()) == 2


async def test_a_tree_of_one_page_has_an_index_of_one_record() -> None:
    pages = pages_of([ROOT])
    top, records = build_index([pages[0].index])
    assert await load_index(top, fetcher(records)) == ([pages[0].index], [top])


def test_an_index_level_that_would_not_shrink_is_cut_by_number() -> None:
    ends = [name for number in range(60_000) if zlib.crc32(b"1" + (name := b"%06d" % number)) & 63 == 0]
    leaves = [IndexEntry(name, blake3(name).digest(), bytes(32), 1, 1, 0, 0, 0) for name in ends[:600]]
    _, records = build_index(leaves)
    assert sorted(len(msgspec.msgpack.decode(raw)[1]) for raw in records.values()) == [3, 88, 256, 256]


def index_record(level: int, *entries: IndexEntry) -> tuple[bytes, bytes]:
    raw = msgspec.msgpack.encode([level, list(entries)])
    return record_id(RecordType.INDEX, raw), raw


def leaf(name: bytes, page_id: bytes | None = None) -> IndexEntry:
    return IndexEntry(name, blake3(name).digest() if page_id is None else page_id, bytes(32), 1, 1, 0, 0, 0)


async def refusal(top: bytes, records: dict[bytes, bytes]) -> Code:
    with pytest.raises(SnapshotError) as error:
        await load_index(top, fetcher(records))
    return error.value.code


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [leaf(b"b"), leaf(b"a")],
        [leaf(b"a"), leaf(b"a")],
        [leaf(b"a.b"), leaf(b"a/b")],
        [leaf(b"a", bytes(31))],
        [msgspec.structs.replace(leaf(b"a"), digest=b"")],
    ],
)
async def test_an_index_that_is_out_of_order_or_impossible_is_refused(entries: list[IndexEntry]) -> None:
    top, raw = index_record(1, *entries)
    assert await refusal(top, {top: raw}) == Code.INVALID_BLOB


async def test_an_index_that_repeats_itself_is_refused_before_it_grows() -> None:
    """Eight records of 256 times the same one below them would list 2^64 pages."""
    below, raw = index_record(1, *(leaf(b"%03d" % n) for n in range(256)))
    records = {below: raw}
    for level in range(2, 9):
        below, raw = index_record(level, *(leaf(b"%03d" % n, below) for n in range(256)))
        records[below] = raw
    with allocating_at_most(8 << 20):
        assert await refusal(below, records) == Code.INVALID_BLOB


@pytest.mark.parametrize("levels", [(1, 1), (3, 1), (0, 1), (2, 2, 1), (2, 3, 1), (-1, 1)])
async def test_levels_must_go_down_one_by_one(levels: tuple[int, ...]) -> None:
    below, raw = index_record(1, leaf(b"a"))
    records = {below: raw}
    for level in reversed(levels[:-1]):
        below, raw = index_record(level, leaf(b"a", below))
        records[below] = raw
    if levels[0] == 1:
        top, raw = index_record(2, leaf(b"a"), leaf(b"b", below))  # levels side by side
        records |= {top: raw, leaf(b"a").page_id: index_record(3, leaf(b"a", below))[1]}
        below = top
    assert await refusal(below, records) == Code.INVALID_BLOB


async def test_an_index_of_too_many_levels_is_refused() -> None:
    below, raw = index_record(1, leaf(b"a"))
    records = {below: raw}
    for level in range(2, 100):
        below, raw = index_record(level, leaf(b"a", below))
        records[below] = raw
    assert await refusal(below, records) == Code.INVALID_BLOB


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x92\x01\x91\x98\xc6\xff\xff\xff\xff",
        b"\x93\x01\x90" + b"\x91" * 100_000 + b"\x90",
        msgspec.msgpack.encode({"level": 1}),
    ],
)
async def test_an_index_record_that_claims_too_much_is_refused_without_room_for_it(raw: bytes) -> None:
    with allocating_at_most(1 << 20):
        assert await refusal(bytes(32), {bytes(32): raw}) == Code.INVALID_BLOB


async def test_an_index_record_cut_short_or_flipped_anywhere_never_fails_otherwise() -> None:
    leaves = [p.index for p in pages_of(tree(200))]
    top, records = build_index(leaves)
    raw = records[top]
    for length in range(len(raw)):
        assert await refusal(top, {top: raw[:length]}) == Code.INVALID_BLOB
    found: set[object] = set()
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            pages, _ = await load_index(top, lambda ids, kind, d=bytes(damaged): fetcher({top: d})(ids, kind))  # type: ignore[misc]
            found.add(all(isinstance(p, IndexEntry) for p in pages))
        except SnapshotError as error:
            found.add(error.code)
        except KeyError:
            found.add("lower level")  # a flipped level byte: its records would not be found
    assert found <= {True, Code.INVALID_BLOB, "lower level"}


@settings(max_examples=60, deadline=None)
@given(st.sets(st.binary(min_size=1, max_size=6).filter(lambda b: b"\0" not in b), max_size=40), st.binary(max_size=6))
def test_page_for_finds_the_last_page_that_begins_at_or_before_a_path(names: set[bytes], path: bytes) -> None:
    pages = [leaf(name) for name in sorted(names, key=path_key)]
    before = [n for n, p in enumerate(pages) if path_key(p.first_path) <= path_key(path)]
    assert page_for(pages, path) == (before[-1] if before else None)


def test_page_for_leads_to_the_page_that_holds_each_entry() -> None:
    pages = pages_of(tree(1_000))
    index = [p.index for p in pages]
    for number, page in enumerate(pages):
        assert {page_for(index, e.path) for e in decode_page(page.raw)} == {number}


# ---- pages from outside

SAMPLE = [
    ROOT,
    Entry(
        b"a", Kind.FILE, 0o644, 3, -1_500_000_001, bytes(64), xattrs={"user.x": b"1"}, redactions=(Redaction(0, 1, "T", "raw"),)
    ),
    Entry(b"b", Kind.FILE, 0o4755, 1 << 40, 1, chunk_list=bytes(32)),
    Entry(b"c", Kind.LINK, 0o777, target=b"a\xff", in_root=True),
    Entry(b"d", Kind.FILE, 0o644, 3, hardlink=b"a", uid=1000, gid=100),
]


def test_a_page_of_an_older_or_newer_writer_is_readable() -> None:
    assert decode_page(msgspec.msgpack.encode([[b"a", Kind.FILE]])) == [Entry(b"a", Kind.FILE)]
    newer = [*msgspec.to_builtins(SAMPLE[1], builtin_types=(bytes,)), "a field to come", {"x": [1]}]
    assert decode_page(msgspec.msgpack.encode([newer])) == [SAMPLE[1]]


def test_a_page_cut_short_anywhere_is_refused() -> None:
    raw = msgspec.msgpack.encode(SAMPLE)
    assert decode_page(raw) == SAMPLE
    for length in range(len(raw)):
        assert outcome(lambda end=length: decode_page(raw[:end])) == Code.INVALID_BLOB  # type: ignore[misc]
    assert outcome(lambda: decode_page(raw + b"\0")) == Code.INVALID_BLOB


def test_a_page_flipped_anywhere_gives_possible_entries_or_a_typed_error() -> None:
    """The record's id finds every flip before the page is decoded; this is about decoding alone."""
    raw = msgspec.msgpack.encode(SAMPLE)
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        found = outcome(lambda d=bytes(damaged): decode_page(d))  # type: ignore[misc]
        if isinstance(found, list):
            assert all(e.kind <= Kind.LINK and e.mode <= 0o7777 and len(e.chunks) % 32 == 0 for e in found)
        else:
            assert found == Code.INVALID_BLOB


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x90",
        b"\xdd\xff\xff\xff\xff",
        b"\x91\x92\xc6\xff\xff\xff\xff",
        b"\x91\x9e\xc4\x01a\x00" + b"\x00" * 3 + b"\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000 + b"\x90",
        b"\x91\x9f" + msgspec.msgpack.encode(SAMPLE[1])[1:] + b"\x91" * 100_000 + b"\x90",
        msgspec.msgpack.encode({"path": 1}),
    ],
)
def test_a_page_that_claims_too_much_is_refused_without_room_for_it(raw: bytes) -> None:
    with allocating_at_most(1 << 20):
        assert outcome(lambda: decode_page(raw)) == Code.INVALID_BLOB


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": Kind.FIFO},
        {"kind": -1},
        {"mode": -1},
        {"mode": 0o10000},
        {"size": -1},
        {"chunks": bytes(33)},
        {"chunk_list": bytes(31)},
    ],
)
def test_a_page_with_an_impossible_entry_is_refused(changes: dict[str, object]) -> None:
    raw = msgspec.msgpack.encode([ROOT, msgspec.structs.replace(FILE, **changes)])
    assert outcome(lambda: decode_page(raw)) == Code.INVALID_BLOB


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_a_decoder_fail_otherwise(raw: bytes) -> None:
    for call in (lambda: decode_page(raw), lambda: decode_chunk_list(raw), lambda: manifest.decode_index(raw)):
        found = outcome(call)
        assert isinstance(found, list | tuple | manifest.IndexPage) or found == Code.INVALID_BLOB


# ---- what a restore refuses


def validate(*entries: Entry) -> object:
    return outcome(lambda: validate_entries(entries, None, []))


def file(path: bytes, **fields: object) -> Entry:
    return msgspec.structs.replace(Entry(path, Kind.FILE), **fields)


def folder(path: bytes) -> Entry:
    return Entry(path, Kind.DIR)


def test_a_valid_manifest_is_accepted_whole_or_page_by_page() -> None:
    entries = [
        ROOT,
        folder(b"a"),
        folder(b"a/b"),
        file(b"a/b/c"),
        file(b"a/d"),
        file(b"a.b"),
        Entry(b"l", Kind.LINK, target=b"../anywhere"),
        Entry(b"m", Kind.LINK, target=b"", in_root=True),
        Entry(b"n", Kind.LINK, target=b"/a/.//b/", in_root=True),
        file(b"...", hardlink=b"a/d"),
    ]
    entries.sort(key=lambda e: path_key(e.path))
    assert validate(*entries) == entries[-1]
    previous: Entry | None = None
    folders: list[bytes] = []
    for entry in entries:
        previous = validate_entries([entry], previous, folders)
    assert previous == entries[-1]
    assert validate_entries([], previous, folders) == previous


@pytest.mark.parametrize(
    "entries",
    [
        [file(b"a")],
        [folder(b"a")],
        [file(b"")],
        [Entry(b"", Kind.LINK, target=b"/")],
        [ROOT, ROOT],
        [ROOT, file(b"/etc/passwd")],
        [ROOT, file(b"..")],
        [ROOT, file(b"../a")],
        [ROOT, folder(b"a"), file(b"a/../../b")],
        [ROOT, folder(b"a"), folder(b"a/.."), file(b"a/../b")],
        [ROOT, file(b".")],
        [ROOT, folder(b"a"), file(b"a/")],
        [ROOT, folder(b"a"), file(b"a//b")],
        [ROOT, file(b"a\0b")],
        [ROOT, file(b"a"), file(b"a")],
        [ROOT, folder(b"a"), file(b"a")],
        [ROOT, file(b"b"), file(b"a")],
        [ROOT, folder(b"a"), file(b"a.b"), file(b"a/c")],
        [ROOT, file(b"a"), file(b"a/b")],
        [ROOT, Entry(b"a", Kind.LINK, target=b"/etc"), file(b"a/b")],
        [ROOT, file(b"a/b")],
        [ROOT, folder(b"a"), file(b"b"), file(b"c/d")],
        [ROOT, folder(b"a"), folder(b"a/b"), folder(b"c"), file(b"c/b/d")],
        [ROOT, file(b"a", hardlink=b"/etc/passwd")],
        [ROOT, file(b"a", hardlink=b"../b")],
        [ROOT, Entry(b"a", Kind.LINK)],
        [ROOT, Entry(b"a", Kind.LINK, target=b"b\0c")],
        [ROOT, Entry(b"a", Kind.LINK, target=b"../../etc", in_root=True)],
        [ROOT, Entry(b"a", Kind.LINK, target=b".//../etc", in_root=True)],
        [ROOT, Entry(b"a", Kind.LINK, target=b"b\0", in_root=True)],
    ],
)
def test_a_manifest_that_could_lead_astray_is_refused(entries: list[Entry]) -> None:
    assert validate(*entries) == Code.INVALID_PATH
    previous: Entry | None = None
    folders: list[bytes] = []

    def page_by_page() -> None:
        nonlocal previous
        for entry in entries:
            previous = validate_entries([entry], previous, folders)

    assert outcome(page_by_page) == Code.INVALID_PATH


# ---- chunk lists


def expand(top: bytes, records: dict[bytes, bytes]) -> bytes:
    level, found = decode_chunk_list(records[top])
    return b"".join(found) if level == 0 else b"".join(expand(i, records) for i in found)


@pytest.mark.parametrize(("count", "levels"), [(1, 1), (4, 1), (5, 2), (16, 2), (17, 3), (60, 3)])
def test_chunk_lists_of_any_length_come_back(count: int, levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "IDS_IN_CHUNK_LIST", 4)
    chunks = b"".join(blake3(b"%d" % n).digest() for n in range(count))
    top, records = encode_chunk_list(chunks)
    assert expand(top, records) == chunks
    assert records[top][0] == levels - 1
    assert all(record_id(RecordType.CHUNK_LIST, raw) == i for i, raw in records.items())
    assert all(len(raw) <= 1 + 4 * 32 for raw in records.values())


def test_a_chunk_list_of_a_large_file_is_one_record_that_fits() -> None:
    top, records = encode_chunk_list(bytes(32 * 65_536))
    assert list(records) == [top]
    assert records[top] == b"\0" + bytes(32 * 65_536)
    top, records = encode_chunk_list(bytes(32 * 65_537))
    assert records[top][0] == 1


@pytest.mark.parametrize(
    "raw", [b"", b"\0", b"\0" + bytes(31), b"\0" + bytes(33), b"\4" + bytes(32), b"\xff" + bytes(32), bytes(32)]
)
def test_a_chunk_list_of_an_impossible_shape_is_refused(raw: bytes) -> None:
    assert outcome(lambda: decode_chunk_list(raw)) == Code.INVALID_BLOB
