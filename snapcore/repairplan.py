"""What a repair will do, found by looking alone: at the blob store, at the database where there is one, and at both together.

Nothing that merely could not be read counts as gone: a store that is out of reach or refuses ends the survey with its error,
before anything was changed.
"""

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from .engine import Engine, each
from .errors import Code, SnapshotError, printable
from .lineage import Lineage
from .maintenance import Maintenance, PackContents
from .model import Checkpoint, PackState, Progress
from .overlay import overlay
from .packcheck import PRESENT, rows_without
from .packs import pack_key
from .packscan import PackScan, read_tail, scan_pack, scan_whole
from .protocols import CheckpointStore, PackInfo, ProgressCallback, StoreIdentity
from .verification import Verification, VerifyReport

__all__ = ["RepairAction", "RepairPlan", "Scratch", "Step", "survey"]

SCANS_AT_ONCE: Final = 4  # each may hold a pack
WHOLE_AT_ONCE: Final = 2
GOING: Final = frozenset({PackState.DELETING, PackState.DELETED})  # a gc deletes their blobs, or has: none is used in place
TAILS_AT_ONCE: Final = 8
CONTENTS_AT_ONCE: Final = 8
CHECKPOINTS_AT_ONCE: Final = 256
PACKS: Final = "packs/"
_PACK_ID: Final = re.compile("[0-9a-f]{32}")
_NOBODY: Final = StoreIdentity("0" * 32, "0" * 32)

Scratch = Callable[[], AbstractAsyncContextManager[CheckpointStore]]
"""Makes an empty checkpoint store that is thrown away afterwards: what was found in packs is gathered there."""


class Step(StrEnum):
    """What an action does, in the order of doing."""

    CREATE_DATABASE = "create-database"
    ENTER_CHECKPOINTS = "enter-checkpoints"
    LOSE_PACK = "lose-pack"
    DROP_ROWS = "drop-rows"
    ADOPT_PACK = "adopt-pack"
    SALVAGE_PACK = "salvage-pack"
    WRITE_RECORDS = "write-records"
    DISTRUST_HEADS = "distrust-heads"
    MEND_HEADS = "mend-heads"
    RENAME_DATABASE = "rename-database"
    WRITE_CONFIG = "write-config"


class RepairAction(msgspec.Struct, frozen=True):
    """One thing that a repair does: to which pack or thread, and in words. `ids` and `checkpoints` are what it is done with."""

    step: Step
    subject: str
    message: str
    ids: tuple[bytes, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()


@dataclass(slots=True)
class RepairPlan:
    """What a repair will do, in order. Nothing to do: `actions` is empty.

    `report` is what is wrong as it stands. `uncommitted` are checkpoints that were written but never committed, as far as one
    can tell; `incomplete` are newest ones that are not whole: neither is entered. `hurt` (thread, checkpoint) are those that are
    entered although not whole. `notes` say what else was found and is of no use.
    """

    report: VerifyReport
    actions: list[RepairAction] = field(default_factory=list)
    uncommitted: tuple[Checkpoint, ...] = ()
    incomplete: tuple[Checkpoint, ...] = ()
    hurt: tuple[tuple[str, str], ...] = ()
    notes: list[str] = field(default_factory=list)


async def survey(
    engine: Engine,
    scratch: Scratch,
    *,
    has_database: bool = True,
    rebuilding: bool = False,
    read_data: bool = False,
    on_progress: ProgressCallback | None = None,
) -> RepairPlan:
    """Look at everything and say what is to be done. Changes nothing.

    `has_database` is false when there is none: all comes from packs. `rebuilding` looks for checkpoints in packs that the
    database knows, too. `read_data` reads every byte of every pack.
    """
    async with scratch() as found:
        await found.initialize(_NOBODY)
        work = _Survey(engine, found, await found.start_maintenance(), has_database, rebuilding, on_progress)
        return await work.run(read_data=read_data)


class _Survey:
    def __init__(
        self,
        engine: Engine,
        found: CheckpointStore,
        run: Maintenance,
        has_database: bool,
        rebuilding: bool,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._engine = engine
        self._database = engine.checkpoints if has_database else None
        self._found = found
        self._run = run
        self._rebuilding = rebuilding
        self._on_progress = on_progress
        self._whole = dataclasses.replace(engine, checkpoints=overlay(self._database, found))
        self._lineage = Lineage()
        self._records: list[Checkpoint] = []
        self._actions: list[RepairAction] = []
        self._notes: list[str] = []
        self._scanned = self._to_scan = 0
        self._reading = asyncio.Semaphore(WHOLE_AT_ONCE)

    async def run(self, *, read_data: bool) -> RepairPlan:
        listed = await self._listed()  # first: a pack is entered before it is put, so that no new one is taken for unknown
        rows = {p.pack_id: p for p in await self._database.packs()} if self._database is not None else {}
        await self._scan(listed, rows)
        verification = Verification(self._whole, self._on_progress)
        await verification.packs(read=read_data)
        await verification.stored()
        plan = await self._choose(verification)
        plan.report = await verification.report()
        if self._database is not None:
            await self._mend(rows, plan.report)
        plan.actions = sorted(self._actions, key=lambda a: (list(Step).index(a.step), a.subject))
        plan.notes = sorted(self._notes)
        return plan

    def _act(
        self, step: Step, subject: str, message: str, ids: Sequence[bytes] = (), checkpoints: Sequence[Checkpoint] = ()
    ) -> None:
        self._actions.append(RepairAction(step, subject, message, tuple(ids), tuple(checkpoints)))

    # ---- packs that the database does not know, or knows as lost

    async def _listed(self) -> dict[str, int]:
        listed: dict[str, int] = {}
        async for info in self._engine.blobs.list(PACKS):
            pack_id = info.key.rpartition("/")[2]
            if _PACK_ID.fullmatch(pack_id) and info.key == pack_key(pack_id):
                listed[pack_id] = info.size
            else:
                self._notes.append(f"The blob {printable(info.key)} is no pack of snapcore's.")
        return listed

    async def _scan(self, listed: dict[str, int], rows: dict[str, PackInfo]) -> None:
        lost = [i for i in listed if i in rows and rows[i].state == PackState.LOST]
        await each(sorted(lost), self._scan_lost, at_once=WHOLE_AT_ONCE)
        known = [i for i in listed if i in rows and rows[i].state in PRESENT] if self._rebuilding else []
        unknown = [i for i in listed if i not in rows]
        todo = [(i, i in rows, listed[i]) for i in sorted([*known, *unknown])]
        self._to_scan = len(todo)
        await each(todo, lambda item: self._scan_one(*item), at_once=SCANS_AT_ONCE)
        for start in range(0, len(self._records), CHECKPOINTS_AT_ONCE):
            for c in await self._valid(self._records[start : start + CHECKPOINTS_AT_ONCE]):
                self._lineage.add(c)

    async def _scan_lost(self, pack_id: str) -> None:
        scan = await self._scan_whole(pack_id)
        if scan is not None and not scan.problem:
            await self._found.adopt_pack(self._run, scan.pack)
            self._act(Step.ADOPT_PACK, pack_id, f"Use pack {pack_id} again, which was lost and is whole now.")

    async def _scan_whole(self, pack_id: str) -> PackScan | None:
        async with self._reading:
            info = await self._engine.blobs.head(pack_key(pack_id))
            return await scan_whole(self._engine, pack_id, info.size) if info is not None else None

    async def _scan_one(self, pack_id: str, known: bool, size: int) -> None:
        scan = await scan_pack(self._engine, pack_id, size)
        self._scanned += 1
        if self._on_progress is not None:
            self._on_progress(Progress("scan", self._scanned, total_files=self._to_scan, unit="pack"))
        if scan is None:
            return
        self._records += scan.checkpoints
        if known:
            return
        records = len(scan.pack.records)
        if records:
            await self._found.adopt_pack(self._run, scan.pack)
        if not scan.problem:
            self._act(Step.ADOPT_PACK, pack_id, f"Enter pack {pack_id}, of {_count(records)}.")
        elif records:
            words = f"Copy {_count(records)} out of pack {pack_id}, which is damaged ({scan.problem})."
            self._act(Step.SALVAGE_PACK, pack_id, words)
        else:
            self._notes.append(f"Pack {pack_id} holds nothing that can be read: {scan.problem}")

    async def _valid(self, records: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Those that a store accepts: what is in a pack may be forged."""
        try:
            await self._found.adopt_checkpoints(self._run, records)
        except SnapshotError as error:
            if len(records) > 1:
                return [c for one in records for c in await self._valid([one])]
            self._notes.append(f"A record of a checkpoint is of no use: {error.message}")
            return []
        return list(records)

    # ---- checkpoints

    async def _choose(self, verification: Verification) -> RepairPlan:
        plan = RepairPlan(VerifyReport())
        if not self._records:
            return plan
        if self._database is not None:
            for thread in await self._database.threads():
                for c in await self._database.checkpoints(thread.thread_id):
                    self._lineage.add_known(c)
        whole: set[tuple[str, str]] = set()
        candidates = self._lineage.candidates()
        for start in range(0, len(candidates), CHECKPOINTS_AT_ONCE):
            some = candidates[start : start + CHECKPOINTS_AT_ONCE]
            for c, fine in zip(some, await verification.look(some), strict=True):
                if fine:
                    whole.add((c.thread_id, c.id))
        verdict = self._lineage.judge(whole)
        entered = await self._without_taken(verdict.entered)
        plan.uncommitted, plan.incomplete = verdict.uncommitted, verdict.incomplete
        plan.hurt = tuple((c.thread_id, c.id) for c in entered if (c.thread_id, c.id) not in whole)
        threads: dict[str, list[Checkpoint]] = {}
        for c in entered:
            threads.setdefault(c.thread_id, []).append(c)
        for thread_id, some in threads.items():
            noun = "checkpoint" if len(some) == 1 else "checkpoints"
            words = f"Enter {len(some)} {noun} of thread {printable(thread_id)}, marked as recovered."
            self._act(Step.ENTER_CHECKPOINTS, thread_id, words, checkpoints=some)
        return plan

    async def _without_taken(self, chosen: Sequence[Checkpoint]) -> list[Checkpoint]:
        """An id belongs to one checkpoint of the repository, and an idempotency key to one of its thread."""
        taken: set[str] = set()
        keys: set[tuple[str, str]] = set()
        out: list[Checkpoint] = []
        for c in chosen:
            if c.id in taken or (self._database is not None and any(f.id == c.id for f in await self._database.find(c.id))):
                self._notes.append(f"Checkpoint {c.id} of thread {printable(c.thread_id)} is not entered: its id is taken.")
                continue
            key = (c.thread_id, c.idempotency_key or "")
            taken_key = c.idempotency_key is not None and (key in keys or await self._has_key(*key))
            taken.add(c.id)
            keys.add(key)
            out.append(msgspec.structs.replace(c, idempotency_key=None) if taken_key else c)
        return out

    async def _has_key(self, thread_id: str, key: str) -> bool:
        return self._database is not None and await self._database.by_idempotency_key(thread_id, key) is not None

    # ---- what the database has

    async def _mend(self, rows: dict[str, PackInfo], report: VerifyReport) -> None:
        by_kind: dict[str, list[str]] = {}
        for p in report.problems:
            by_kind.setdefault(p.kind, []).append(p.subject)
        missing = {i for i in by_kind.get("pack-missing", ()) if i in rows}
        for pack_id in missing:
            if await self._engine.blobs.head(pack_key(pack_id)) is None:  # once more, before so much depends on it
                words = f"Set pack {pack_id} aside as lost: it is not in the blob store. What it held is stored again by the next"
                self._act(Step.LOSE_PACK, pack_id, f"{words} capture of the same files.")
        suspects = {i for kind in ("pack-size", "pack-damaged", "pack-state") for i in by_kind.get(kind, ())} & rows.keys()
        records = [bytes.fromhex(i) for kind in ("record-damaged", "record-misplaced") for i in by_kind.get(kind, ())]
        suspects |= {at.pack_id for at in (await self._engine.checkpoints.locate(records)).values()}
        async for contents in self._contents():
            await each(
                [p for p in contents if p.state in PRESENT and p.pack_id not in missing],
                lambda p: self._compare(p, suspect=p.pack_id in suspects),
                at_once=TAILS_AT_ONCE,
            )
        if unkept := {i for i in by_kind.get("pack-state", ()) if i in rows}:
            async for contents in self._contents():
                for pack in contents:
                    if pack.pack_id in unkept:
                        await self._keep(pack)
        if lacking := {bytes.fromhex(i) for i in by_kind.get("record-missing", ())}:
            await self._find_records(lacking)
        if threads := by_kind.get("head"):
            names = ", ".join(printable(t) for t in threads[:5]) + (", ..." if len(threads) > 5 else "")
            self._act(Step.MEND_HEADS, "", f"Make the newest checkpoint of each of {len(threads)} threads its head: {names}.")
        if not self._actions:
            await self._distrust(report)

    async def _contents(self) -> AsyncIterator[list[PackContents]]:
        after = 0
        while found := await self._engine.checkpoints.pack_contents(after, CONTENTS_AT_ONCE):
            yield found
            after = found[-1].number

    async def _compare(self, pack: PackContents, *, suspect: bool) -> None:
        """Compare the rows that lead to a pack with its footer; one that is suspect, or whose footer says otherwise, is read
        whole: the footer alone may be what is damaged."""
        try:
            listed = None if suspect else (await read_tail(self._engine, pack.pack_id, pack.size))[0]
        except SnapshotError as error:
            if error.code == Code.MISSING_BLOB:
                return  # gc has freed it just now
            if error.code != Code.INVALID_BLOB:
                raise
            listed = None
        if listed is None or rows_without(pack.records, listed):
            scan = await self._scan_whole(pack.pack_id)
            if scan is None:
                return
            if scan.problem:
                self._salvage(pack, scan)
                return
            listed = list(scan.pack.records)
            if scan.pack.size != pack.size:
                words = f"Correct the size of pack {pack.pack_id}: {scan.pack.size} bytes, all of which are sound."
                self._act(Step.ADOPT_PACK, pack.pack_id, words)
        wrong = rows_without(pack.records, listed)
        there = {r.id for r in listed}
        elsewhere = [i for i in wrong if i in there]
        absent = [i for i in wrong if i not in there]
        if elsewhere:
            words = f"Correct the rows of {len(elsewhere)} records, which lead to a wrong place in pack {pack.pack_id}."
            self._act(Step.ADOPT_PACK, pack.pack_id, words)
        if absent:
            words = f"Drop the rows of {len(absent)} records that pack {pack.pack_id} does not hold."
            self._act(Step.DROP_ROWS, pack.pack_id, words, absent)

    def _salvage(self, pack: PackContents, scan: PackScan) -> None:
        good = {r.id for r in scan.pack.records}
        kept = sum(i in good for i, _, _ in pack.records)
        words = (
            f"Copy {kept} of {len(pack.records)} records out of pack {pack.pack_id}, which is damaged ({scan.problem}), and set"
            " it aside as lost. Its blob stays."
        )
        self._act(Step.SALVAGE_PACK, pack.pack_id, words)

    async def _keep(self, pack: PackContents) -> None:
        """A pack that checkpoints need and that is not kept for good by its state."""
        pack_id = pack.pack_id
        if pack.owned:
            self._notes.append(f"Pack {pack_id} is needed, and a capture is writing it: look again when that has ended.")
            return
        scan = await self._scan_whole(pack_id)
        if scan is None:
            self._act(Step.LOSE_PACK, pack_id, f"Set pack {pack_id} aside as lost: it is not in the blob store.")
        elif scan.problem:
            self._act(Step.SALVAGE_PACK, pack_id, f"Copy what can be read out of pack {pack_id}, and set it aside as lost.")
        elif pack.state in GOING:
            ids = [record_id for record_id, _, _ in pack.records]
            self._act(Step.SALVAGE_PACK, pack_id, f"Copy {_count(len(ids))} out of pack {pack_id}, which gc is deleting.", ids)
        else:
            self._act(Step.ADOPT_PACK, pack_id, f"Keep pack {pack_id} for good, since checkpoints need it.")

    async def _find_records(self, lacking: set[bytes]) -> None:
        """Records without a row: a pack may hold them all the same, and a checkpoint's own can be written again."""
        holders: dict[str, tuple[PackInfo, frozenset[bytes]]] = {}

        async def look(pack: PackInfo) -> None:
            try:
                listed, _ = await read_tail(self._engine, pack.pack_id, pack.size)
            except SnapshotError as error:
                if error.code not in (Code.MISSING_BLOB, Code.INVALID_BLOB):
                    raise
                return
            held = lacking & {r.id for r in listed}
            if held:
                holders[pack.pack_id] = (pack, frozenset(held))
                lacking.difference_update(held)

        packs = await self._engine.checkpoints.packs()
        for states in (PRESENT, GOING):
            await each([p for p in packs if lacking and p.state in states], look, at_once=TAILS_AT_ONCE)
        for pack_id, (pack, held) in holders.items():
            if pack.state in GOING:
                words = f"Copy {_count(len(held))} that checkpoints need out of pack {pack_id}, which gc is deleting."
                self._act(Step.SALVAGE_PACK, pack_id, words, sorted(held))
            else:
                words = f"Give {len(held)} records of pack {pack_id} that checkpoints need the rows that they lack."
                self._act(Step.ADOPT_PACK, pack_id, words)
        if lacking:
            await self._write_again(lacking)

    async def _write_again(self, lacking: Collection[bytes]) -> None:
        owners: list[Checkpoint] = []
        for thread in await self._engine.checkpoints.threads():
            owners += [c for c in await self._engine.checkpoints.checkpoints(thread.thread_id) if c.record_id in lacking]
        for start in range(0, len(owners), CHECKPOINTS_AT_ONCE):
            some = owners[start : start + CHECKPOINTS_AT_ONCE]
            words = f"Write the records of {len(some)} checkpoints again, from the database."
            self._act(Step.WRITE_RECORDS, some[0].id, words, checkpoints=some)

    async def _distrust(self, report: VerifyReport) -> None:
        """Heads that are not whole though their threads' captures would rely on them."""
        hurt = set(report.hurt)
        heads = {(t.thread_id, t.head_id or "") for t in await self._engine.checkpoints.threads()}
        threads = sorted({thread for thread, _ in hurt & heads} - await self._engine.checkpoints.damaged_threads())
        if threads:
            words = f"Have the next capture of each thread look up all that it rests on: {len(threads)} heads are not whole."
            self._act(Step.DISTRUST_HEADS, "", words)


def _count(records: int) -> str:
    return "1 record" if records == 1 else f"{records} records"
