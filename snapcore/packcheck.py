"""What is wrong with the packs themselves: each is looked for, and read where that was asked for."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from .engine import Engine, each
from .errors import Code, SnapshotError
from .maintenance import PackContents
from .model import PackRecord, PackState, Progress
from .packs import pack_key, read_pack, record_content, sound_records
from .protocols import PackInfo, ProgressCallback
from .subset import Subset
from .treecheck import Found

__all__ = ["PRESENT", "PackCheck", "rows_without"]

PRESENT: Final = frozenset({PackState.LIVE, PackState.CONDEMNED})  # packs whose content can be relied on
HEADS_AT_ONCE: Final = 16
READS_AT_ONCE: Final = 2  # each holds a pack, of up to 32 MiB
CONTENTS_AT_ONCE: Final = 4  # packs whose rows are held: of tiny records, 16,384 each


class _Verdict(msgspec.Struct, frozen=True):
    """A pack that was read: what is wrong with it (empty: nothing), and the rows that do not lead to what they say: since the
    content is damaged, or since the pack has the record elsewhere or not at all."""

    message: str
    damaged: tuple[bytes, ...] = ()
    misplaced: tuple[bytes, ...] = ()


class PackCheck:
    """`problems` has the message by kind and subject; `packs` and `bytes_read` count what was looked at."""

    def __init__(self, engine: Engine, on_progress: ProgressCallback | None) -> None:
        self._engine = engine
        self._on_progress = on_progress
        self._to_look = 0
        self._to_read = (0, 0)  # packs, and their bytes
        self._read_packs = 0
        self._usable: dict[str, int] = {}  # how many bytes of each pack can be relied on
        self._faults: dict[str, Found] = {}  # of packs that cannot be relied on as a whole
        self._rows: dict[bytes, tuple[str, Found]] = {}  # rows that lead to no good, with the pack they lead to
        self._looking = asyncio.Lock()
        self.problems: dict[Found, str] = {}
        self.packs = 0
        self.bytes_read = 0

    async def run(self, *, read: Subset | bool) -> None:
        """Look for all packs that can be relied on by their state, and read those of a part of them, or all."""
        # one without a size was condemned before its writer, now gone, had entered what it stored, if it stored it
        packs = [p for p in await self._engine.checkpoints.packs() if p.state in PRESENT and p.size]
        self._to_look = len(packs)
        await each(packs, self._head, at_once=HEADS_AT_ONCE)
        if read:
            whole = [p for p in packs if p.pack_id not in self._faults]
            chosen = {p.pack_id for p in whole} if read is True else read.choose(whole)
            self._to_read = (len(chosen), sum(p.size for p in whole if p.pack_id in chosen))
            await self._read(chosen)

    async def judge(self, ids: Collection[bytes]) -> dict[bytes, Found]:
        """Which of the records cannot be relied on where they are."""
        located = await self._engine.checkpoints.locate(ids)
        async with self._looking:
            await self._look_again({at.pack_id for at in located.values()} - self._usable.keys())
        bad: dict[bytes, Found] = {}
        for record in ids:
            at = located.get(record)
            if at is None:
                bad[record] = ("record-missing", record.hex())
            elif at.offset + at.stored_size > self._usable[at.pack_id]:
                bad[record] = self._faults.get(at.pack_id) or self._misplaced(record, at.pack_id)
            elif self._rows and record in self._rows and self._rows[record][0] == at.pack_id:
                bad[record] = self._rows[record][1]
        return bad

    async def settle(self) -> None:
        """Forget problems of packs that gc has freed meanwhile."""
        if self._faults:
            kept = {p.pack_id for p in await self._engine.checkpoints.packs() if p.state in PRESENT}
            for pack_id, found in self._faults.items():
                if pack_id not in kept and found[0] != "pack-state":
                    self.problems.pop(found, None)

    # ---- whether they are there

    async def _head(self, pack: PackInfo) -> None:
        info = await self._engine.blobs.head(pack_key(pack.pack_id))
        self.packs += 1
        if info is None:
            self._fault(pack.pack_id, "pack-missing", f"Pack {pack.pack_id} is missing from the blob store.", 0)
        elif info.size < pack.size:
            self._fault(
                pack.pack_id, "pack-size", f"Pack {pack.pack_id} has {info.size} bytes instead of {pack.size}.", info.size
            )
        elif info.size > pack.size:
            # what was written is never written to again: these are other bytes
            self._fault(pack.pack_id, "pack-size", f"Pack {pack.pack_id} has {info.size} bytes instead of {pack.size}.", 0)
        else:
            self._usable[pack.pack_id] = pack.size
        self._tell(Progress("look", self.packs, total_files=max(self._to_look, self.packs), unit="pack"))

    def _tell(self, report: Progress) -> None:
        if self._on_progress is not None:
            self._on_progress(report)

    def _fault(self, pack_id: str, kind: str, message: str, usable: int) -> None:
        self._usable[pack_id] = usable
        self._faults[pack_id] = (kind, pack_id)
        self.problems[kind, pack_id] = message

    def _misplaced(self, record: bytes, pack_id: str) -> Found:
        found: Found = ("record-misplaced", record.hex())
        self.problems[found] = f"The row of record {record.hex()} leads to where pack {pack_id} does not have it."
        return found

    async def _look_again(self, needed: set[str]) -> None:
        """Packs that were not kept for good when the work began, and that a checkpoint needs: a commit may have come since."""
        if not needed:
            return
        packs = {pack.pack_id: pack for pack in await self._engine.checkpoints.packs()}
        for pack_id in sorted(needed):
            pack = packs.get(pack_id)
            if pack is not None and pack.state in PRESENT:
                await self._head(pack)
            else:
                state = f"in the state '{pack.state}'" if pack is not None else "not in the database"
                self._fault(pack_id, "pack-state", f"Pack {pack_id} is needed, but {state}.", 0)

    # ---- what is in them

    async def _read(self, chosen: set[str]) -> None:
        after = 0
        while found := await self._engine.checkpoints.pack_contents(after, CONTENTS_AT_ONCE):
            await each([p for p in found if p.pack_id in chosen], self._read_pack, at_once=READS_AT_ONCE)
            after = found[-1].number

    async def _read_pack(self, pack: PackContents) -> None:
        try:
            data = await self._engine.blobs.get(pack_key(pack.pack_id))
        except SnapshotError as error:
            if error.code not in (Code.MISSING_BLOB, Code.INVALID_BLOB):
                raise
            self._fault(pack.pack_id, "pack-missing", f"Pack {pack.pack_id}: {error.message}", 0)
            return
        self.bytes_read += len(data)
        verdict = await self._engine.run(_check_pack, data, pack.records)
        if verdict.message:
            damaged: Found = ("pack-damaged", pack.pack_id)
            self.problems[damaged] = f"Pack {pack.pack_id} is damaged: {verdict.message}"
            self._rows.update(dict.fromkeys(verdict.damaged, (pack.pack_id, damaged)))
        for record in verdict.misplaced:
            self._rows[record] = (pack.pack_id, self._misplaced(record, pack.pack_id))
        self._read_packs += 1
        self._tell(Progress("read", self._read_packs, self.bytes_read, *self._to_read, unit="pack"))


def _check_pack(data: bytes, rows: Sequence[tuple[bytes, int, int]]) -> _Verdict:
    """Compare a pack's bytes with its hash, each record with its id, and the rows with the records."""
    view = memoryview(data)
    try:
        records = read_pack(data)
        for record in records:
            record_content(view[record.offset : record.offset + record.stored_size], record)
    except SnapshotError as error:
        return _check_damaged(data, rows, error.message)
    return _Verdict("", misplaced=rows_without(rows, records))


def _check_damaged(data: bytes, rows: Sequence[tuple[bytes, int, int]], message: str) -> _Verdict:
    sound = sound_records(data)
    elsewhere = {r.id for r in sound}
    wrong = rows_without(rows, sound)
    return _Verdict(message, tuple(i for i in wrong if i not in elsewhere), tuple(i for i in wrong if i in elsewhere))


def rows_without(rows: Sequence[tuple[bytes, int, int]], records: Sequence[PackRecord]) -> tuple[bytes, ...]:
    """The rows that none of the records answers to."""
    places = {(r.id, r.offset, r.stored_size) for r in records}
    return tuple(row[0] for row in rows if row not in places)
