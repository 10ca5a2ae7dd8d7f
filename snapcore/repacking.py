"""Repack: move what is live out of packs that are mostly dead or small, into few new ones."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .engine import Engine
from .errors import Code, SnapshotError
from .idset import IdSet
from .maintenance import Maintenance
from .model import PackRecord, PackWrite
from .packs import TARGET_PACK_BYTES, TARGET_PACK_RECORDS, PackBuilder, pack_key, read_pack
from .packwriter import new_pack_id

__all__ = ["Repacker"]


@dataclass(frozen=True, slots=True)
class _Source:
    pack_id: str
    records: Sequence[tuple[PackRecord, bytes]]  # with their payloads: the pack itself is not kept in memory

    @property
    def size(self) -> int:
        return sum(record.stored_size for record, _ in self.records)


class Repacker:
    """Moves live records for one gc. A pack that cannot be read, or whose hash is wrong, is left as it is.

    `told` is called with the number of packs that were looked at, and the bytes written so far.
    """

    def __init__(
        self, engine: Engine, run: Maintenance, mark: int, live: IdSet, told: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        self._engine = engine
        self._store = engine.checkpoints
        self._run = run
        self._mark = mark
        self._live = live
        self._told = told
        self.bytes_written = 0

    async def move(self, pack_ids: Sequence[str]) -> set[str]:
        """Move what is live out of the packs, in order. Returns those that are condemned now: others had to stay, since somebody
        has referred to them since the mark."""
        moved: set[str] = set()
        group: list[_Source] = []
        size = records = 0
        for number, pack_id in enumerate(pack_ids):
            self._told(number, self.bytes_written)
            source = await self._read(pack_id)
            if source is None:
                continue
            size += source.size
            records += len(source.records)
            if group and (size > TARGET_PACK_BYTES or records > TARGET_PACK_RECORDS):
                moved |= await self._write(group)
                group, size, records = [], source.size, len(source.records)
            group.append(source)
        if group:
            moved |= await self._write(group)
        return moved

    async def _read(self, pack_id: str) -> _Source | None:
        try:
            data = await self._engine.blobs.get(pack_key(pack_id))
            records = await self._engine.run(read_pack, data)
        except SnapshotError as error:
            if error.code not in (Code.MISSING_BLOB, Code.INVALID_BLOB):
                raise
            return None
        live = {record.id: record for record in records if record.id in self._live}
        places = await self._store.locate(live)
        mine = [r for r in live.values() if r.id in places and places[r.id].pack_id == pack_id]
        return _Source(pack_id, [(r, data[r.offset : r.offset + r.stored_size]) for r in mine])

    async def _write(self, group: Sequence[_Source]) -> set[str]:
        pack_id = new_pack_id()
        await self._store.reserve_maintenance_packs(self._run, [pack_id])
        builder = PackBuilder(pack_id)
        data = await self._engine.run(_build, builder, group)
        await self._engine.blobs.put(pack_key(pack_id), data)
        self.bytes_written += len(data)
        pack = PackWrite(pack_id, len(data), tuple(builder.records))
        return set(await self._store.move_records(self._run, self._mark, pack, [source.pack_id for source in group]))


def _build(builder: PackBuilder, group: Sequence[_Source]) -> bytes:
    """Contents first, structure last, each in the order it was written: as in the packs of a capture."""
    records = itertools.chain.from_iterable(source.records for source in group)
    for r, payload in sorted(records, key=lambda pair: pair[0].type):
        builder.add(r.type, r.id, r.raw_size, r.codec, payload)
    return builder.finish()
