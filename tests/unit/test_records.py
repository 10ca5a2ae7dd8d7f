"""Reading records: which ranges are fetched, and what is missing, damaged or moved meanwhile."""

import asyncio
import itertools
import tracemalloc
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapcore.chunking import CODEC_RAW, compress_many, record_id
from snapcore.config import new_config
from snapcore.engine import Engine
from snapcore.errors import Code, RepositoryError, SnapshotError
from snapcore.manifest import encode_chunk_list
from snapcore.model import ContentRef, Entry, Kind, Location, PackWrite, RecordType, RootState
from snapcore.packs import PackBuilder, pack_key
from snapcore.protocols import Commit
from snapcore.records import MAX_GAP_BYTES, MAX_RANGE_BYTES, READS_AT_ONCE, RecordReader, join_ranges
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing.entries import IDENTITY, checkpoint_for, new_pack_id
from snapcore.testing.faults import Faults, with_faults

PACKS = ("a" * 32, "b" * 32)


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


# ---- ranges


def at(offset: int, size: int, pack: str = PACKS[0]) -> tuple[bytes, Location]:
    return (b"%s/%d" % (pack[:1].encode(), offset), Location(pack, offset, size, size, CODEC_RAW))


places = st.lists(
    st.tuples(st.integers(0, 40 << 20), st.integers(0, 8 << 20) | st.integers(0, 100), st.sampled_from(PACKS)).map(
        lambda p: at(*p)
    ),
    max_size=30,
    unique_by=lambda item: item[0],
)


@settings(max_examples=200, deadline=None)
@given(places)
def test_ranges_cover_every_record_once_and_stay_bounded(items: list[tuple[bytes, Location]]) -> None:
    ranges = join_ranges(items)
    assert sorted(r for piece in ranges for r in piece.records) == sorted(items)
    for piece in ranges:
        ends = [where.offset + where.stored_size for _, where in piece.records]
        assert {where.pack_id for _, where in piece.records} == {piece.pack_id}
        assert piece.offset == min(where.offset for _, where in piece.records)
        assert piece.offset + piece.length == max(ends)
        assert piece.length <= MAX_RANGE_BYTES


@settings(max_examples=100, deadline=None)
@given(places)
def test_neighbours_are_only_read_apart_for_a_reason(items: list[tuple[bytes, Location]]) -> None:
    ranges = join_ranges(items)
    for a, b in itertools.pairwise(ranges):
        first = b.records[0][1]
        assert (
            a.pack_id != b.pack_id
            or b.offset - (a.offset + a.length) > MAX_GAP_BYTES
            or first.offset + first.stored_size - a.offset > MAX_RANGE_BYTES
        )


def test_near_neighbours_are_read_together_and_far_ones_apart() -> None:
    near, far = at(100 + MAX_GAP_BYTES, 50), at(151 + 2 * MAX_GAP_BYTES, 50)
    ranges = join_ranges([far, at(0, 100), near, at(0, 10, PACKS[1])])
    assert [(r.pack_id, r.offset, r.length) for r in ranges] == [
        (PACKS[0], 0, 150 + MAX_GAP_BYTES),
        (PACKS[0], 151 + 2 * MAX_GAP_BYTES, 50),
        (PACKS[1], 0, 10),
    ]
    assert join_ranges([]) == []


# ---- a repository of a few records


class Shelf:
    """Stores in memory with one committed pack, and a reader over them."""

    def __init__(self) -> None:
        self.blobs = MemoryBlobStore()
        self.store = SqlCheckpointStore("sqlite://")
        self.blob_faults = Faults()
        self.engine = Engine(with_faults(self.blobs, self.blob_faults), self.store, new_config())
        self.reader = RecordReader(self.engine)
        self.threads = 0

    async def put(self, *contents: tuple[int, bytes]) -> str:
        """Store records of (type, content) in a pack of their own; its id."""
        self.threads += 1
        pack_id = new_pack_id()
        grant = await self.store.acquire_writer(f"thread-{self.threads}", pack_id=pack_id)
        builder = PackBuilder(pack_id)
        manifest, record = (RecordType.INDEX, b"manifest"), (RecordType.CHECKPOINT, b"%d" % self.threads)
        records = [*contents, manifest, record]
        for (kind, raw), (codec, payload) in zip(records, compress_many([raw for _, raw in records]), strict=True):
            builder.add(kind, record_id(kind, raw), len(raw), codec, payload)
        placed = tuple(builder.records)
        data = builder.finish()
        await self.blobs.put(pack_key(pack_id), data)
        root = RootState("workspace", "/workspace", record_id(*manifest), bytes(32))
        checkpoint = checkpoint_for(
            grant.lease.thread_id, f"c{self.threads}", roots=(root,), content_id=bytes(32), record_id=record_id(*record)
        )
        await self.store.append(grant.lease, checkpoint, Commit(packs=(PackWrite(pack_id, len(data), placed),)))
        return pack_id

    def change(self, pack_id: str, change: Callable[[bytearray], None]) -> None:
        data = bytearray(self.blobs.blobs[pack_key(pack_id)])
        change(data)
        self.blobs.blobs[pack_key(pack_id)] = bytes(data)


@pytest.fixture
async def shelf() -> AsyncIterator[Shelf]:
    shelf = Shelf()
    await shelf.store.initialize(IDENTITY)
    yield shelf
    await shelf.engine.close()


CHUNKS = [b"first", b"second " * 100, bytes(5000), b"x"]
IDS = [record_id(RecordType.CHUNK, c) for c in CHUNKS]


async def refusal(reader: RecordReader, ids: list[bytes], record_type: int = RecordType.CHUNK) -> Code:
    with pytest.raises(SnapshotError) as error:
        await reader.fetch(ids, record_type)
    return error.value.code


async def test_records_come_back_by_id_with_one_read_of_their_pack(shelf: Shelf) -> None:
    await shelf.put(*((RecordType.CHUNK, c) for c in CHUNKS))
    assert await shelf.reader.fetch([*IDS, *IDS], RecordType.CHUNK) == dict(zip(IDS, CHUNKS, strict=True))
    assert shelf.blob_faults.calls["get"] == 1
    assert await shelf.reader.fetch([], RecordType.CHUNK) == {}


async def test_a_record_that_no_row_knows_is_missing(shelf: Shelf) -> None:
    await shelf.put((RecordType.CHUNK, CHUNKS[0]))
    assert await refusal(shelf.reader, IDS[:2]) == Code.MISSING_BLOB
    assert shelf.blob_faults.calls["get"] == 0


async def test_a_record_whose_pack_is_gone_is_missing(shelf: Shelf) -> None:
    pack_id = await shelf.put((RecordType.CHUNK, CHUNKS[0]))
    await shelf.blobs.delete(pack_key(pack_id))
    assert await refusal(shelf.reader, IDS[:1]) == Code.MISSING_BLOB


async def test_a_pack_cut_short_is_invalid(shelf: Shelf) -> None:
    pack_id = await shelf.put(*((RecordType.CHUNK, c) for c in CHUNKS))
    shelf.change(pack_id, lambda data: data.__delitem__(slice(60, None)))
    assert await refusal(shelf.reader, IDS) == Code.INVALID_BLOB


async def test_every_flipped_byte_of_a_record_is_found(shelf: Shelf) -> None:
    pack_id = await shelf.put((RecordType.CHUNK, CHUNKS[0]))
    where = (await shelf.reader.locate(IDS[:1]))[IDS[0]]
    for place in range(where.offset, where.offset + where.stored_size):
        shelf.change(pack_id, lambda data, p=place: data.__setitem__(p, data[p] ^ 1))  # type: ignore[misc]
        assert await refusal(shelf.reader, IDS[:1]) == Code.INVALID_BLOB
        shelf.change(pack_id, lambda data, p=place: data.__setitem__(p, data[p] ^ 1))  # type: ignore[misc]
    assert await shelf.reader.fetch(IDS[:1], RecordType.CHUNK)


async def test_a_record_of_another_type_is_invalid(shelf: Shelf) -> None:
    await shelf.put((RecordType.CHUNK, CHUNKS[0]))
    assert await refusal(shelf.reader, IDS[:1], RecordType.PAGE) == Code.INVALID_BLOB


async def test_one_damaged_record_does_not_hide_behind_good_ones(shelf: Shelf) -> None:
    for chunk in CHUNKS:
        bad = await shelf.put((RecordType.CHUNK, chunk))
    shelf.change(bad, lambda data: data.__setitem__(slice(56, 57), b"y"))
    assert await refusal(shelf.reader, IDS) == Code.INVALID_BLOB
    assert len(await shelf.reader.fetch(IDS[:3], RecordType.CHUNK)) == 3


async def test_a_store_that_does_not_answer_is_not_taken_for_damage(shelf: Shelf) -> None:
    await shelf.put((RecordType.CHUNK, CHUNKS[0]))
    shelf.blob_faults.fail("get", None)
    with pytest.raises(RepositoryError) as error:
        await shelf.reader.fetch(IDS[:1], RecordType.CHUNK)
    assert error.value.code == Code.STORE_UNAVAILABLE
    assert error.value.retryable


# ---- records that move while they are read


class Moving(SqlCheckpointStore):
    """Tells stale places the first `times` times."""

    def __init__(self, stale: Location, times: int) -> None:
        super().__init__("sqlite://")
        self.stale = stale
        self.times = times

    async def locate(self, ids: Collection[bytes]) -> dict[bytes, Location]:
        found = await super().locate(ids)
        self.times -= 1
        return dict.fromkeys(found, self.stale) if self.times >= 0 else found


@pytest.mark.parametrize(
    "stale", [Location("f" * 32, 56, 5, 5, CODEC_RAW), Location("e" * 32, 56, 5, 5, CODEC_RAW)], ids=["pack gone", "other bytes"]
)
async def test_a_record_that_was_moved_meanwhile_is_located_again(stale: Location) -> None:
    shelf = Shelf()
    await shelf.store.close()
    shelf.store = Moving(stale, 1)
    await shelf.store.initialize(IDENTITY)
    engine = Engine(shelf.blobs, shelf.store, new_config())
    await shelf.put((RecordType.CHUNK, CHUNKS[0]))
    shelf.blobs.blobs[pack_key("e" * 32)] = bytes(100)
    assert await RecordReader(engine).fetch(IDS[:1], RecordType.CHUNK) == {IDS[0]: CHUNKS[0]}
    shelf.store.times = 2
    expected = Code.MISSING_BLOB if stale.pack_id[0] == "f" else Code.INVALID_BLOB
    assert await refusal(RecordReader(engine), IDS[:1]) == expected
    await engine.close()


# ---- many reads


class CountingBlobs(MemoryBlobStore):
    """Knows how many reads ran at the same time."""

    running = 0
    most = 0

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(20):
            await asyncio.sleep(0)
        self.running -= 1
        return await super().get(key, offset, length)


async def test_only_so_many_packs_are_read_at_once(shelf: Shelf) -> None:
    counting = CountingBlobs()
    contents = [b"content %d" % n for n in range(30)]
    for content in contents:
        await shelf.put((RecordType.CHUNK, content))
    counting.blobs = shelf.blobs.blobs
    reader = RecordReader(Engine(counting, shelf.store, new_config(), shelf.engine.workers))
    found = await reader.fetch([record_id(RecordType.CHUNK, c) for c in contents], RecordType.CHUNK)
    assert sorted(found.values()) == sorted(contents)
    assert counting.most == READS_AT_ONCE


async def test_a_cancelled_fetch_leaves_no_read_behind(shelf: Shelf) -> None:
    await shelf.put((RecordType.CHUNK, CHUNKS[0]))
    waiting = asyncio.Event()

    async def hang() -> None:
        waiting.set()
        await asyncio.Event().wait()

    shelf.blob_faults.run("get", hang)
    task = asyncio.create_task(shelf.reader.fetch(IDS[:1], RecordType.CHUNK))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


# ---- chunk lists


def listing(level: int, *ids: bytes) -> tuple[int, bytes]:
    return (RecordType.CHUNK_LIST, bytes([level]) + b"".join(ids))


async def test_a_chunk_list_of_many_levels_leads_to_all_chunks(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapcore.manifest.IDS_IN_CHUNK_LIST", 4)
    ids = [record_id(RecordType.CHUNK, b"%d" % (n % 9)) for n in range(40)]
    top, records = encode_chunk_list(b"".join(ids))
    await shelf.put(*((RecordType.CHUNK_LIST, raw) for raw in records.values()))
    assert await shelf.reader.chunk_ids(Entry(b"f", Kind.FILE, size=40, chunk_list=top)) == ids
    assert await shelf.reader.chunk_ids(ContentRef(40, chunk_list=top)) == ids
    met: set[bytes] = set()
    assert await shelf.reader.expand([top], met) == {top: ids}
    assert met == set(records)


async def test_chunk_ids_in_an_entry_need_no_read(shelf: Shelf) -> None:
    assert await shelf.reader.chunk_ids(Entry(b"f", Kind.FILE, chunks=b"".join(IDS))) == IDS
    assert await shelf.reader.chunk_ids(ContentRef()) == []
    assert shelf.blob_faults.calls["get"] == 0


async def test_levels_of_chunk_lists_must_go_down_one_by_one(shelf: Shelf) -> None:
    bottom = listing(0, IDS[0])
    equal = listing(1, record_id(*bottom))
    for wrong in (listing(2, record_id(*bottom)), listing(1, record_id(*equal)), listing(3, record_id(*equal))):
        await shelf.put(bottom, equal, wrong)
        with pytest.raises(SnapshotError) as error:
            await shelf.reader.expand([record_id(*wrong)])
        assert error.value.code == Code.INVALID_BLOB


async def test_a_chain_of_chunk_lists_ends_in_a_typed_error(shelf: Shelf) -> None:
    chain = [listing(0, IDS[0])]
    for _ in range(600):
        chain.append(listing(1, record_id(*chain[-1])))
    await shelf.put(*chain)
    with pytest.raises(SnapshotError) as error:
        await shelf.reader.expand([record_id(*chain[-1])])
    assert error.value.code == Code.INVALID_BLOB
    assert shelf.blob_faults.calls["get"] <= 4


async def test_chunk_lists_that_list_one_another_over_and_over_are_refused_before_they_grow(shelf: Shelf) -> None:
    lists = [listing(0, *(IDS[0] for _ in range(5000)))]
    for level in (1, 2, 3):
        lists.append(listing(level, *(record_id(*lists[-1]) for _ in range(5000))))
    await shelf.put(*lists)
    with allocating_at_most(16 << 20), pytest.raises(SnapshotError) as error:
        await shelf.reader.expand([record_id(*lists[-1])])
    assert error.value.code == Code.INVALID_BLOB
