"""Putting new records into packs: dedup against this capture and the store, uploads in the background, bounded memory."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from .chunking import MAX_RECORD_BYTES, compress_many, record_id
from .engine import Engine, stop
from .errors import Code, SnapshotError
from .idset import IdSet
from .model import PackWrite, RecordType, StatUpdate, WriterLease
from .packs import TARGET_PACK_BYTES, PackBuilder, pack_key
from .protocols import Buffer, Commit

__all__ = ["NewRecord", "PackWriter", "new_pack_id"]

IDS_RESERVED: Final = 4  # pack ids entered by one transaction, for each upload that may run at once
_NAMES: Final = {
    RecordType.CHUNK: "A chunk of a file",
    RecordType.CHUNK_LIST: "A list of a file's chunks",
    RecordType.PAGE: "A page of the manifest",
    RecordType.INDEX: "A page of the manifest's index",
    RecordType.CHECKPOINT: "The checkpoint's own record",
}


def _check_size(record_type: int, size: int) -> None:
    if size > MAX_RECORD_BYTES:
        raise SnapshotError(
            f"{_NAMES[record_type]} would take {size} bytes, and no record may be larger than {MAX_RECORD_BYTES}.",
            code=Code.LIMIT_EXCEEDED,
            hint="Nothing was committed.",
        )


def new_pack_id() -> str:
    """A random 128-bit pack id, never reused."""
    return secrets.token_hex(16)


class NewRecord(msgspec.Struct, frozen=True, gc=False):
    """A record to be stored: `payload` is compressed by `codec`."""

    type: int
    id: bytes
    raw_size: int
    codec: int
    payload: Buffer


class PackWriter:
    """Collects the new records of one commit.

    Content records fill packs that are put while the capture goes on; structure is kept apart and comes last: in the same
    pack when both fit into one. `refs` gathers records that lie elsewhere and that the commit has to check.
    """

    def __init__(self, engine: Engine, lease: WriterLease, pack_id: str, *, lookups: bool) -> None:
        self._engine = engine
        self._lease = lease
        self._lookups = lookups
        self._content = PackBuilder(pack_id)
        self._structure: list[NewRecord] = []
        self._structure_bytes = 0
        self._claimed = IdSet()
        self._reserved: list[str] = []
        self._uploads: set[asyncio.Task[None]] = set()
        self._waiting = asyncio.Semaphore(engine.blobs.uploads_at_once)
        self._flushing = asyncio.Lock()
        self._own: list[str] = []
        self._sound: dict[str, int] = {}  # sizes of packs of others that were found in the blob store
        self.refs: set[bytes] = set()
        self.bytes_stored = 0
        self.packs_put = 0

    @property
    def lookups(self) -> bool:
        """Whether records may exist already, so that the store must be asked."""
        return self._lookups

    def claim(self, ids: Iterable[bytes]) -> list[bytes]:
        """Those of `ids` that this capture has not met yet, once each. Safe to call from worker threads."""
        return self._claimed.add_new(ids)

    async def unknown(self, ids: Sequence[bytes]) -> list[bytes]:
        """Those of freshly claimed `ids` that the store does not hold; the others are referred to from now on."""
        if not self._lookups or not ids:
            return list(ids)
        known = await self._engine.checkpoints.known(ids)
        if doubtful := await self._without_pack(known):
            # gc may have dropped them just now; where the database still knows them, the blob store has lost them
            if lost := await self._without_pack(await self._engine.checkpoints.known(doubtful)):
                raise SnapshotError(
                    f"{len(lost)} stored records that this checkpoint would share are in packs that are missing or cut short;"
                    " nothing was captured.",
                    code=Code.MISSING_BLOB,
                    hint="Run 'snapcore verify' to see what is hurt, and 'snapcore repair'; a capture then stores them again.",
                )
            known -= doubtful
        self.refs |= known
        return [i for i in ids if i not in known]

    async def _without_pack(self, known: frozenset[bytes]) -> frozenset[bytes]:
        """Those that lie in packs which the database knows and the blob store does not hold whole: a checkpoint must not rest on
        them."""
        places = await self._engine.checkpoints.locate(known) if known else {}
        ends: dict[str, int] = {}
        for at in places.values():
            ends[at.pack_id] = max(ends.get(at.pack_id, 0), at.offset + at.stored_size)
        for pack_id, end in ends.items():
            if self._sound.get(pack_id, 0) < end:
                info = await self._engine.blobs.head(pack_key(pack_id))
                self._sound[pack_id] = 0 if info is None else info.size
        return frozenset(i for i, at in places.items() if self._sound[at.pack_id] < at.offset + at.stored_size)

    async def add(self, records: Iterable[NewRecord]) -> None:
        """Store content records. May wait for uploads, so that memory stays bounded."""
        for r in records:
            _check_size(r.type, r.raw_size)
            while self._is_full():  # another reader's flush is still waiting for its turn
                await self._flush_full()
            self._content.add(r.type, r.id, r.raw_size, r.codec, r.payload)
            if self._is_full():
                await self._flush_full()
        self._raise_failed()

    async def add_structure(self, raws: dict[bytes, bytes], record_type: int) -> None:
        """Store pages, index records or chunk lists, given as raw contents by id. Raises `SnapshotError` `LIMIT_EXCEEDED` for
        one that is larger than a record may be, and which no reader would accept."""
        for raw in raws.values():
            _check_size(record_type, len(raw))
        fresh = await self.unknown(self.claim(raws))
        packed = await self._engine.run(compress_many, [raws[i] for i in fresh])
        for i, (codec, payload) in zip(fresh, packed, strict=True):
            self._structure.append(NewRecord(record_type, i, len(raws[i]), codec, payload))
            self._structure_bytes += len(payload)
        if self._structure_bytes >= TARGET_PACK_BYTES:
            async with self._flushing:
                while self._structure_bytes >= TARGET_PACK_BYTES:
                    await self._flush_content()
                    self._take_structure()
                    await self._flush_content()

    async def add_record(self, raw: bytes, record_type: int) -> bytes:
        """Store one structure record without asking whether it exists; its id. Raises as `add_structure` does."""
        _check_size(record_type, len(raw))
        rid = record_id(record_type, raw)
        self.claim([rid])
        ((codec, payload),) = await self._engine.run(compress_many, [raw])
        self._structure.append(NewRecord(record_type, rid, len(raw), codec, payload))
        self._structure_bytes += len(payload)
        return rid

    async def finish(self, stats: Sequence[StatUpdate] = ()) -> Commit:
        """Put what is left and wait for every upload: what the commit needs."""
        async with self._flushing:
            if len(self._content) + self._structure_bytes > TARGET_PACK_BYTES and self._structure:
                await self._flush_content()
            self._take_structure()
            while self._structure:
                await self._flush_content()
                self._take_structure()
        for upload in list(self._uploads):
            await upload
        packs = []
        if self._content.records:
            packs.append(await self._put(self._content))
        return Commit(packs=tuple(packs), own=tuple(self._own), refs=tuple(sorted(self.refs)), stats=tuple(stats))

    async def reopen(self, commit: Commit) -> None:
        """Carry on after a commit that was refused: its packs are kept, and what it found in the store is looked up again."""
        self._claimed.remove(self.refs)
        self.refs.clear()
        self._lookups = True
        self._content = PackBuilder(await self._next_id())
        for pack in commit.packs:
            self.refs |= await self._engine.checkpoints.add_pack(self._lease, pack)
            self._own.append(pack.pack_id)

    async def abandon(self) -> None:
        """Stop uploading. What was put is garbage, to be found by gc."""
        await stop(list(self._uploads))

    async def _next_id(self) -> str:
        """A pack id that the store knows as this writer's: a blob that it knows nothing of would be a stray for ever."""
        if not self._reserved:
            self._reserved = [new_pack_id() for _ in range(IDS_RESERVED * self._engine.blobs.uploads_at_once)]
            await self._engine.checkpoints.reserve_packs(self._lease, self._reserved)
        return self._reserved.pop()

    def _take_structure(self) -> None:
        """Move structure into the pack, as much as it has room for."""
        taken = 0
        for r in self._structure:
            if self._content.full:
                break
            self._content.add(r.type, r.id, r.raw_size, r.codec, r.payload)
            self._structure_bytes -= len(r.payload)
            taken += 1
        del self._structure[:taken]

    def _is_full(self) -> bool:
        return self._content.full

    async def _flush_full(self) -> None:
        async with self._flushing:
            if self._content.full:  # or else another reader has flushed it meanwhile
                await self._flush_content()

    async def _flush_content(self) -> None:
        """Upload the pack and begin the next. Only under `_flushing`: two that wait here would flush one pack after another,
        however little is in it by then."""
        self._raise_failed()
        if not self._content.records:
            return
        await self._waiting.acquire()
        try:
            next_id = await self._next_id()
        except BaseException:
            self._waiting.release()
            raise
        full, self._content = self._content, PackBuilder(next_id)
        self._uploads.add(asyncio.create_task(self._upload(full)))

    async def _upload(self, builder: PackBuilder) -> None:
        try:
            pack = await self._put(builder)
            self.refs |= await self._engine.checkpoints.add_pack(self._lease, pack)
            self._own.append(pack.pack_id)
        finally:
            self._waiting.release()

    def _raise_failed(self) -> None:
        for upload in [u for u in self._uploads if u.done()]:
            upload.result()
            self._uploads.discard(upload)

    async def _put(self, builder: PackBuilder) -> PackWrite:
        records = tuple(builder.records)
        data = await self._engine.run(builder.finish)
        await self._engine.blobs.put(pack_key(builder.pack_id), data)
        self.bytes_stored += len(data)
        self.packs_put += 1
        return PackWrite(builder.pack_id, len(data), records)
