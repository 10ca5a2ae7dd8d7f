"""Reading records: where they are by the database, then ranged reads of packs, joined where they lie close together."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from .chunking import decode_payload
from .engine import Engine, stop
from .errors import Code, SnapshotError, printable
from .manifest import IndexEntry, decode_chunk_list, load_index
from .model import ContentRef, Entry, Location, RecordType, Redaction, split_ids
from .packs import pack_key
from .protocols import CheckpointStore

__all__ = ["PackRange", "RecordReader", "entry_records", "join_ranges"]

MAX_GAP_BYTES: Final = 64 << 10
MAX_RANGE_BYTES: Final = 8 << 20
READS_AT_ONCE: Final = 8
MAX_CHUNKS_IN_FILE: Final = 1 << 24  # 16 TiB: a few records that repeat one another could list any number

_redactions_decoder: Final = msgspec.msgpack.Decoder(tuple[Redaction, ...])


def entry_records(entry: Entry) -> tuple[list[bytes], list[bytes]]:
    """All records that an entry refers to by itself: ids of chunks, and ids of chunk lists (which refer to more). Those of its
    redactions are among them. Whoever gathers what a manifest needs has to ask this and not `Entry.chunk_ids`."""
    chunks = entry.chunk_ids()
    if entry.redaction_chunks:
        chunks += split_ids(entry.redaction_chunks)
    return chunks, [i for i in (entry.chunk_list, entry.redaction_list) if i]


@dataclass(frozen=True, slots=True)
class PackRange:
    """One ranged read of a pack, and the records that lie in it: (id, location)."""

    pack_id: str
    offset: int
    length: int
    records: tuple[tuple[bytes, Location], ...]


def join_ranges(locations: Iterable[tuple[bytes, Location]]) -> list[PackRange]:
    """Ranged reads that cover the records: neighbours with small gaps are read together, up to some MiB."""
    ranges: list[PackRange] = []
    run: list[tuple[bytes, Location]] = []
    pack_id, start, end = "", 0, 0
    for item in sorted(locations, key=_place):
        at = item[1]
        offset, stop_at = at.offset, at.offset + at.stored_size
        if run and at.pack_id == pack_id and offset - end <= MAX_GAP_BYTES and stop_at - start <= MAX_RANGE_BYTES:
            run.append(item)
        else:
            if run:
                ranges.append(PackRange(pack_id, start, end - start, tuple(run)))
            run, pack_id, start, end = [item], at.pack_id, offset, offset
        end = max(end, stop_at)
    if run:
        ranges.append(PackRange(pack_id, start, end - start, tuple(run)))
    return ranges


def _place(item: tuple[bytes, Location]) -> tuple[str, int]:
    return item[1].pack_id, item[1].offset


class RecordReader:
    """Fetches records by id, checked against it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gate = asyncio.Semaphore(READS_AT_ONCE)

    @property
    def store(self) -> CheckpointStore:
        """The checkpoint store that knows the places."""
        return self._engine.checkpoints

    async def fetch(self, ids: Sequence[bytes], record_type: int) -> dict[bytes, bytes]:
        """Raw contents by id. All are held in memory: for structure, and content in bounded batches.

        Raises `SnapshotError` `MISSING_BLOB` for a record without a place or whose pack is gone, `INVALID_BLOB` for damage.
        """
        wanted = set(ids)
        located = await self.locate(wanted)
        while True:
            try:
                return await self._fetch_at(located, record_type)
            except SnapshotError as error:
                # a repack may have moved records since they were located, and another since then
                moved = await self.locate(wanted)
                if error.code not in (Code.MISSING_BLOB, Code.INVALID_BLOB) or moved == located:
                    raise
                located = moved

    async def locate(self, ids: Collection[bytes]) -> dict[bytes, Location]:
        """Places of all the records. Raises `SnapshotError` `MISSING_BLOB` when one has none."""
        located = await self._engine.checkpoints.locate(ids)
        missing = [i for i in ids if i not in located]
        if missing:
            raise SnapshotError(
                f"{len(missing)} stored records are missing, {missing[0].hex()[:16]} among them.",
                code=Code.MISSING_BLOB,
                hint="Run 'snapcore verify' to see which checkpoints are hurt.",
            )
        return located

    async def read_range(self, piece: PackRange) -> bytes:
        """The bytes of one ranged read; at most `READS_AT_ONCE` run at a time."""
        async with self._gate:
            return await self._engine.blobs.get(pack_key(piece.pack_id), piece.offset, piece.length)

    async def _fetch_at(self, located: dict[bytes, Location], record_type: int) -> dict[bytes, bytes]:
        async def one(piece: PackRange) -> dict[bytes, bytes]:
            data = await self.read_range(piece)
            return await self._engine.run(decode_range, data, piece, record_type)

        tasks = [asyncio.create_task(one(piece)) for piece in join_ranges(located.items())]
        out: dict[bytes, bytes] = {}
        try:
            for task in tasks:
                out |= await task
        finally:
            await stop(tasks)
        return out

    async def index(self, manifest: bytes) -> tuple[list[IndexEntry], list[bytes]]:
        """The pages of a root in order, and the ids of its index records."""
        return await load_index(manifest, self.fetch)

    async def chunk_ids(self, item: Entry | ContentRef) -> list[bytes]:
        """The ids of a file's or content's chunks, in order."""
        if item.chunk_list:
            return (await self.expand([item.chunk_list]))[item.chunk_list]
        return split_ids(item.chunks)

    async def redactions(self, entry: Entry) -> tuple[Redaction, ...]:
        """What was taken out of a file, by offset; fetched when its entry does not carry it.

        Raises what `fetch` raises, and `INVALID_BLOB` for a list that cannot be read.
        """
        if entry.redaction_list:
            ids = (await self.expand([entry.redaction_list]))[entry.redaction_list]
        elif entry.redaction_chunks:
            ids = split_ids(entry.redaction_chunks)
        else:
            return entry.redactions
        raws = await self.fetch(ids, RecordType.CHUNK)
        try:
            return await self._engine.run(_redactions_decoder.decode, b"".join(raws[i] for i in ids))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise SnapshotError(
                f"The list of what was redacted in {printable(entry.path)} is damaged.",
                code=Code.INVALID_BLOB,
                paths=[entry.path],
                hint="Run 'snapcore verify' to see which checkpoints are hurt.",
            ) from error

    async def expand(self, lists: Sequence[bytes], into: set[bytes] | None = None) -> dict[bytes, list[bytes]]:
        """Chunk ids of each chunk list. `into` receives the ids of all chunk-list records met on the way down.

        Raises what `fetch` raises, and `INVALID_BLOB` for lists that cannot be right.
        """
        return await self._expand(lists, set() if into is None else into, None)

    async def _expand(self, lists: Sequence[bytes], into: set[bytes], expected: int | None) -> dict[bytes, list[bytes]]:
        raws = await self.fetch(lists, RecordType.CHUNK_LIST)
        into.update(raws)
        out: dict[bytes, list[bytes]] = {}
        for list_id, raw in raws.items():
            level, ids = decode_chunk_list(raw)
            if expected not in (None, level):
                raise _damaged_list(list_id, "refers to a list that is not one level below")
            if level:
                lower = await self._expand(ids, into, level - 1)
                if sum(len(lower[i]) for i in ids) > MAX_CHUNKS_IN_FILE:
                    raise _damaged_list(list_id, "leads to more chunks than a file can have")
                ids = [chunk for i in ids for chunk in lower[i]]
            out[list_id] = ids
        return out


def _damaged_list(list_id: bytes, what: str) -> SnapshotError:
    return SnapshotError(
        f"Chunk list {list_id.hex()[:16]} is damaged: it {what}.",
        code=Code.INVALID_BLOB,
        hint="Run 'snapcore verify' to see which checkpoints are hurt.",
    )


def decode_range(data: bytes, piece: PackRange, record_type: int) -> dict[bytes, bytes]:
    """The records of one ranged read, decoded and checked."""
    view = memoryview(data)
    out = {}
    for record_id, at in piece.records:
        start = at.offset - piece.offset
        out[record_id] = decode_payload(view[start : start + at.stored_size], at.codec, at.raw_size, record_type, record_id)
    return out
