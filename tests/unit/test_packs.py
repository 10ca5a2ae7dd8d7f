"""Packs: their layout, and what damage anywhere in them does to a reader."""

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from snapcore.chunking import CODEC_RAW, CODEC_ZSTD, MAX_RECORD_BYTES, compress_many, record_id
from snapcore.errors import Code, SnapshotError
from snapcore.model import PackRecord, RecordType
from snapcore.packs import (
    HEADER_BYTES,
    MAX_PACK_BYTES,
    TAIL_BYTES,
    PackBuilder,
    pack_key,
    read_footer,
    read_pack,
    record_content,
    scan_records,
)

PACK_ID = "0123456789abcdef0123456789abcdef"
RECORD_HEADER = 44
MIB = 1 << 20

CONTENTS = [
    (RecordType.CHUNK, random.Random(1).randbytes(60)),
    (RecordType.CHUNK, b"repeated " * 40),
    (RecordType.CHUNK_LIST, b"\0" + bytes(64)),
    (RecordType.PAGE, b""),
    (RecordType.INDEX, b"index" * 30),
    (RecordType.CHECKPOINT, b"last"),
]


def build(contents: list[tuple[int, bytes]]) -> bytes:
    builder = PackBuilder(PACK_ID)
    packed = compress_many([raw for _, raw in contents])
    for (kind, raw), (codec, payload) in zip(contents, packed, strict=True):
        builder.add(kind, record_id(kind, raw), len(raw), codec, payload)
    return builder.finish()


PACK = build(CONTENTS)
RECORDS = read_pack(PACK)
END_OF_RECORDS = RECORDS[-1].offset + RECORDS[-1].stored_size


def with_footer(footer: bytes, front: bytes = PACK[:END_OF_RECORDS]) -> bytes:
    """A pack with the given footer, whose length and hash are right."""
    body = front + footer + struct.pack("<I", len(footer))
    return body + blake3(body).digest() + b"SNAPFOOT"


def with_records(*records: PackRecord) -> bytes:
    return with_footer(zstandard.compress(msgspec.msgpack.encode(list(records))))


def contents_of(pack: bytes, records: list[PackRecord]) -> list[tuple[int, bytes]]:
    return [(r.type, record_content(pack[r.offset : r.offset + r.stored_size], r)) for r in records]


def code_of(call: Callable[[], object]) -> Code:
    """The code of the error that the call raises; anything but a `SnapshotError` fails the test."""
    with pytest.raises(SnapshotError) as error:
        call()
    return error.value.code


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


# ---- the layout


def test_a_pack_is_laid_out_as_the_format_says() -> None:
    assert PACK[:12] == b"SNAPPACK" + bytes([1, 0, 0, 0])
    at = 12
    for (kind, raw), record in zip(CONTENTS, RECORDS, strict=True):
        magic, own_kind, codec, stored, size, rid = struct.unpack_from("<2sBBII32s", PACK, at)
        at += RECORD_HEADER
        assert (magic, own_kind, size, rid) == (b"SR", kind, len(raw), blake3(bytes([kind]) + raw).digest())
        assert record == PackRecord(rid, kind, at, stored, size, codec)
        payload = PACK[at : at + stored]
        assert (zstandard.decompress(payload) if codec == CODEC_ZSTD else payload) == raw
        at += stored
    length, digest, magic = struct.unpack("<I32s8s", PACK[-44:])
    footer = PACK[at:-44]
    assert (len(footer), magic) == (length, b"SNAPFOOT")
    assert digest == blake3(PACK[:-40]).digest()
    assert msgspec.msgpack.decode(zstandard.decompress(footer)) == [
        [r.id, r.type, r.offset, r.stored_size, r.raw_size, r.codec] for r in RECORDS
    ]


def test_the_key_of_a_pack_is_spread_over_folders() -> None:
    assert pack_key(PACK_ID) == f"packs/01/{PACK_ID}"


def test_the_builder_knows_its_size() -> None:
    builder = PackBuilder(PACK_ID)
    assert len(builder) == HEADER_BYTES
    builder.add(RecordType.CHUNK, record_id(1, b"abc"), 3, CODEC_RAW, memoryview(b"abc"))
    assert len(builder) == HEADER_BYTES + RECORD_HEADER + 3
    assert builder.finish()[: HEADER_BYTES + RECORD_HEADER + 3].endswith(b"abc")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.binary(max_size=300) | st.integers(0, 3000).map(bytes)), max_size=12))
def test_what_goes_into_a_pack_comes_out_by_footer_and_by_scan(contents: list[tuple[int, bytes]]) -> None:
    pack = build(contents)
    assert contents_of(pack, read_pack(pack)) == contents
    assert list(scan_records(pack)) == read_pack(pack)
    assert read_pack(memoryview(pack)) == read_pack(bytearray(pack)) == read_pack(pack)


# ---- reading the tail


def test_a_tail_that_is_too_short_says_how_much_is_needed() -> None:
    assert read_footer(b"", len(PACK)) == TAIL_BYTES
    needed = read_footer(PACK[-TAIL_BYTES:], len(PACK))
    assert isinstance(needed, int)
    assert needed == len(PACK) - END_OF_RECORDS
    for length in range(TAIL_BYTES, needed):
        assert read_footer(PACK[-length:], len(PACK)) == needed
    for length in range(needed, len(PACK) + 1):
        assert read_footer(PACK[-length:], len(PACK)) == RECORDS


def test_a_pack_cut_short_at_any_length_is_damaged() -> None:
    for length in range(len(PACK)):
        assert code_of(lambda end=length: read_pack(PACK[:end])) == Code.INVALID_BLOB  # type: ignore[misc]
        if length >= TAIL_BYTES + HEADER_BYTES:
            assert code_of(lambda end=length: read_footer(PACK[:end], end)) == Code.INVALID_BLOB  # type: ignore[misc]


def test_bytes_behind_the_footer_are_damage() -> None:
    assert code_of(lambda: read_pack(PACK + b"\0")) == Code.INVALID_BLOB


def test_any_flipped_bit_of_a_pack_is_found() -> None:
    unseen = []
    for bit in range(8 * len(PACK)):
        damaged = bytearray(PACK)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            read_pack(damaged)
        except SnapshotError as error:
            if error.code == Code.INVALID_BLOB:
                continue
        unseen.append(bit)
    assert unseen == []


def test_any_flipped_bit_is_found_by_ranged_readers_or_changes_nothing() -> None:
    """Ranged readers do not see the hash of the whole; the footer's checks and the records' ids must do."""
    wrong = []
    for bit in range(8 * len(PACK)):
        data = bytearray(PACK)
        data[bit // 8] ^= 1 << bit % 8
        damaged = bytes(data)
        try:
            records = read_footer(damaged, len(damaged))
            assert isinstance(records, list)
            if not set(contents_of(damaged, records)) <= set(CONTENTS):
                wrong.append(bit)
        except SnapshotError as error:
            if error.code != Code.INVALID_BLOB:
                wrong.append(bit)
    assert wrong == []


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES + TAIL_BYTES - 1, 2 * MAX_PACK_BYTES + 1, 1 << 62, -1])
def test_a_size_that_no_pack_has_is_refused(size: int) -> None:
    assert code_of(lambda: read_footer(PACK, size)) == Code.INVALID_BLOB


def test_a_footer_that_claims_to_be_larger_than_its_pack_is_refused() -> None:
    for length in (len(PACK) - TAIL_BYTES - HEADER_BYTES + 1, 1 << 31, (1 << 32) - 1):
        tail = struct.pack("<I32s8s", length, bytes(32), b"SNAPFOOT")
        assert code_of(lambda t=tail: read_footer(t, len(PACK))) == Code.INVALID_BLOB  # type: ignore[misc]


def frame_stating(size: int) -> bytes:
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + (3 << 3 | 1).to_bytes(3, "little") + b"\x93\x01\x01"


FOOTERS = {
    "nothing": b"",
    "no frame": b"no zstd frame at all",
    "an empty frame": zstandard.compress(b""),
    "a frame without its size": zstandard.ZstdCompressor(write_content_size=False).compress(b"\x90"),
    "a frame of 2^32 bytes": frame_stating(1 << 32),
    "a frame of 2^62 bytes": frame_stating(1 << 62),
    "a frame of a byte more than allowed": frame_stating(MAX_PACK_BYTES + 1),
    "a frame shorter than stated": frame_stating(1000),
    "a map": zstandard.compress(msgspec.msgpack.encode({"id": 1})),
    "an array of 2^32 records": zstandard.compress(b"\xdd\xff\xff\xff\xff"),
    "an id of 2^32 bytes": zstandard.compress(b"\x91\x96\xc6\xff\xff\xff\xff"),
    "arrays in arrays": zstandard.compress(b"\x91" * 100_000 + b"\x90"),
    "a record with arrays in arrays at its end": zstandard.compress(
        b"\x91\x97" + msgspec.msgpack.encode(RECORDS[0])[1:] + b"\x91" * 100_000 + b"\x90"
    ),
    "a compression bomb": zstandard.compress(bytes(1 << 28)),
    "bytes after the array": zstandard.compress(b"\x90\x00"),
}


@pytest.mark.parametrize("footer", FOOTERS.values(), ids=FOOTERS)
def test_a_crafted_footer_is_refused_without_room_for_what_it_claims(footer: bytes) -> None:
    pack = with_footer(footer)
    with allocating_at_most(MIB):
        assert code_of(lambda: read_pack(pack)) == Code.INVALID_BLOB


def test_the_largest_footer_that_may_be_claimed_bounds_memory() -> None:
    pack = with_footer(zstandard.compress(bytes(MAX_PACK_BYTES)))
    with allocating_at_most(MAX_PACK_BYTES + MIB):
        assert code_of(lambda: read_pack(pack)) == Code.INVALID_BLOB


@pytest.mark.parametrize(
    "changes",
    [
        {"id": b""},
        {"id": bytes(31)},
        {"type": 0},
        {"type": 6},
        {"codec": 2},
        {"codec": -1},
        {"offset": -1},
        {"offset": HEADER_BYTES + RECORD_HEADER - 1},
        {"offset": END_OF_RECORDS},
        {"offset": 1 << 62},
        {"stored_size": -1},
        {"stored_size": END_OF_RECORDS},
        {"stored_size": 1 << 62},
        {"raw_size": -1},
        {"raw_size": MAX_RECORD_BYTES + 1},
        {"raw_size": 1 << 62},
    ],
)
def test_a_footer_that_lists_an_impossible_record_is_refused(changes: dict[str, object]) -> None:
    assert len(read_pack(with_records(RECORDS[0]))) == 1
    pack = with_records(msgspec.structs.replace(RECORDS[0], **changes))
    assert code_of(lambda: read_pack(pack)) == Code.INVALID_BLOB
    assert code_of(lambda: read_footer(pack, len(pack))) == Code.INVALID_BLOB


def test_a_footer_that_swaps_two_records_is_found_by_their_ids() -> None:
    a, b = RECORDS[0], RECORDS[1]
    pack = with_records(msgspec.structs.replace(a, id=b.id), b)
    assert code_of(lambda: contents_of(pack, read_pack(pack))) == Code.INVALID_BLOB


def test_a_newer_version_is_refused_and_says_so() -> None:
    for place in range(8, 12):
        newer = PACK[:place] + bytes([PACK[place] + 1]) + PACK[place + 1 :]
        with pytest.raises(SnapshotError, match="Use a newer snapcore") as error:
            read_pack(newer)
        assert error.value.code == Code.INVALID_BLOB


# ---- packs whose footer is torn


def test_a_scan_finds_every_whole_record_of_a_pack_torn_at_any_length() -> None:
    for length in range(HEADER_BYTES, len(PACK)):
        whole = [r for r in RECORDS if r.offset + r.stored_size <= length]
        assert list(scan_records(PACK[:length])) == whole
    for length in range(HEADER_BYTES):
        assert code_of(lambda end=length: list(scan_records(PACK[:end]))) == Code.INVALID_BLOB  # type: ignore[misc]


def test_a_scan_yields_the_records_before_a_flipped_bit_and_nothing_false() -> None:
    for bit in range(8 * HEADER_BYTES, 8 * END_OF_RECORDS):
        data = bytearray(PACK)
        data[bit // 8] ^= 1 << bit % 8
        damaged = bytes(data)
        found = list(scan_records(damaged))
        before = [r for r in RECORDS if r.offset + r.stored_size <= bit // 8]
        assert found[: len(before)] == before
        assert contents_of(damaged, found) == CONTENTS[: len(found)]


def test_a_scan_refuses_what_does_not_begin_as_a_pack() -> None:
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(PACK)
        damaged[bit // 8] ^= 1 << bit % 8
        assert code_of(lambda data=bytes(damaged): list(scan_records(data))) == Code.INVALID_BLOB  # type: ignore[misc]


@pytest.mark.parametrize(("stored", "raw"), [((1 << 32) - 1, 3), (3, (1 << 32) - 1), (MAX_RECORD_BYTES + 1, 3)])
def test_a_scan_makes_no_room_for_a_record_that_claims_too_much(stored: int, raw: int) -> None:
    for codec in (CODEC_RAW, CODEC_ZSTD):
        record = struct.pack("<2sBBII32s", b"SR", 1, codec, stored, raw, record_id(1, b"abc"))
        with allocating_at_most(MIB):
            assert list(scan_records(PACK[:HEADER_BYTES] + record + b"abc")) == []


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_make_a_reader_fail_otherwise(data: bytes, begins_as_pack: bool) -> None:
    if begins_as_pack:
        data = PACK[:HEADER_BYTES] + data + PACK[-TAIL_BYTES:]
    assert outcome(lambda: read_pack(data)) == Code.INVALID_BLOB
    assert outcome(lambda: read_footer(data, len(data))) == Code.INVALID_BLOB
    assert outcome(lambda: list(scan_records(data))) == ([] if begins_as_pack else Code.INVALID_BLOB)
