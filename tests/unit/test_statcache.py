"""The stat cache: when a page counts as seen, and what damage to a row costs."""

import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapcore.model import FileStat, Kind, PolicyRecord, StatPage
from snapcore.statcache import UNTRUSTED, digest_salt, make_stat_page, page_digest, read_stat_page

PAGE_ID = bytes(32)
SALT = digest_salt(PolicyRecord())
STATS = [
    FileStat(b"", Kind.DIR, 0o755, ctime_ns=10, inode=1, mtime_ns=10),
    FileStat(b"a", Kind.FILE, 0o644, 5, mtime_ns=20, ctime_ns=30, inode=2),
    FileStat(b"b", Kind.FILE, 0o644, 5, mtime_ns=-7, ctime_ns=1_700_000_000_000_000_000, inode=(1 << 64) - 1),
    FileStat(b"c", Kind.LINK, mtime_ns=99, ctime_ns=99, inode=4, target=b"a"),
]
LATER = 1 << 62


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


def row(data: bytes) -> StatPage:
    return StatPage(PAGE_ID, b"", data)


def test_a_page_of_settled_files_has_a_digest_and_their_times() -> None:
    page = make_stat_page(PAGE_ID, STATS, SALT, LATER)
    assert page.page_id == PAGE_ID
    assert page.digest == page_digest(STATS, SALT)
    assert read_stat_page(page) == [(s.ctime_ns, s.inode) for s in STATS]


@pytest.mark.parametrize("fresh", [{"mtime_ns": 50}, {"ctime_ns": 50}, {"mtime_ns": 51, "ctime_ns": 51}])
def test_a_file_changed_too_lately_is_not_trusted_and_its_page_has_no_digest(fresh: dict[str, int]) -> None:
    stats = [msgspec.structs.replace(STATS[1], mtime_ns=49, ctime_ns=49), msgspec.structs.replace(STATS[1], **fresh)]
    page = make_stat_page(PAGE_ID, stats, SALT, 50)
    assert page.digest == b""
    assert read_stat_page(page) == [(49, 2), (UNTRUSTED, 2)]


def test_folders_and_links_are_trusted_however_new_they_are() -> None:
    """Their stat says all there is to know of them; nothing of theirs is read."""
    page = make_stat_page(PAGE_ID, [STATS[0], STATS[3]], SALT, 5)
    assert page.digest
    assert read_stat_page(page) == [(10, 1), (99, 4)]


@pytest.mark.parametrize("field", FileStat.__struct_fields__)
def test_a_digest_depends_on_every_field_of_a_stat(field: str) -> None:
    old = getattr(STATS[1], field)
    new = old + (b"x" if isinstance(old, bytes) else "x" if isinstance(old, str) else 1)
    changed = [STATS[0], msgspec.structs.replace(STATS[1], **{field: new}), *STATS[2:]]
    assert page_digest(changed, SALT) != page_digest(STATS, SALT)


def test_a_digest_depends_on_the_order_and_on_the_policy() -> None:
    assert page_digest(STATS[::-1], SALT) != page_digest(STATS, SALT)
    assert page_digest(STATS, digest_salt(PolicyRecord(exclude=("*.log",)))) != page_digest(STATS, SALT)


def test_a_row_cut_short_anywhere_counts_as_absent() -> None:
    data = make_stat_page(PAGE_ID, STATS, SALT, LATER).data
    for length in range(len(data)):
        assert read_stat_page(row(data[:length])) == []


def test_a_bit_flipped_anywhere_in_a_row_is_found_or_changes_nothing() -> None:
    data = make_stat_page(PAGE_ID, STATS, SALT, LATER).data
    right = read_stat_page(row(data))
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert read_stat_page(row(bytes(damaged))) in ([], right)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000 + b"\x90",
        msgspec.msgpack.encode([(1, 2, 3)]),
        msgspec.msgpack.encode([("1", 2)]),
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([(1, 2)]) + b"\0",
    ],
)
def test_a_row_that_holds_something_else_counts_as_absent(content: bytes) -> None:
    with allocating_at_most(1 << 20):
        assert read_stat_page(row(zlib.compress(content))) == []


def test_a_row_that_would_unpack_to_more_than_a_page_counts_as_absent() -> None:
    bomb = zlib.compress(bytes(1 << 26))
    assert len(bomb) < 1 << 17
    with allocating_at_most(1 << 20):
        assert read_stat_page(row(bomb)) == []


def test_the_fullest_page_is_readable() -> None:
    stats = [FileStat(b"%d" % n, Kind.FILE, ctime_ns=-(1 << 62) - n, inode=(1 << 64) - 1 - n) for n in range(256)]
    page = make_stat_page(PAGE_ID, stats, SALT, LATER)
    assert read_stat_page(page) == [(s.ctime_ns, s.inode) for s in stats]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=100), st.booleans())
def test_no_bytes_make_the_reader_fail(data: bytes, packed: bool) -> None:
    assert isinstance(read_stat_page(row(zlib.compress(data) if packed else data)), list)


def test_a_file_without_a_ctime_is_never_trusted() -> None:
    page = make_stat_page(PAGE_ID, [msgspec.structs.replace(STATS[1], ctime_ns=0)], SALT, LATER)
    assert page.digest == b""
    assert read_stat_page(page) == [(UNTRUSTED, 2)]
