"""Repair: does what a survey of the repository asks for, and looks again until there is nothing left to do."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from .chunking import compress_many, record_id
from .engine import Engine
from .errors import CheckpointConflictError, Code, SnapshotError
from .maintenance import Maintenance
from .model import Checkpoint, PackRecord, PackWrite, RecordType
from .packs import MAX_PACK_BYTES, PackBuilder, pack_key, sound_records
from .packscan import read_tail
from .packwriter import NewRecord, new_pack_id
from .protocols import ProgressCallback
from .repairplan import RepairAction, RepairPlan, Scratch, Step, survey

__all__ = ["RepairReport", "Repairer"]

OF_THE_WHOLE: Final = (Step.CREATE_DATABASE, Step.RENAME_DATABASE, Step.WRITE_CONFIG)  # what is done around all this
CHECKPOINTS_AT_ONCE: Final = 256
ROUNDS: Final = 8  # what one round brings back may lead to what the next one finds


@dataclass(slots=True)
class RepairReport:
    """What was done, in order, and how things stand now.

    `hurt` are the (thread, checkpoint) pairs that are not whole, `uncommitted`, `incomplete` and `notes` as in `RepairPlan`.
    """

    done: list[RepairAction] = field(default_factory=list)
    hurt: list[tuple[str, str]] = field(default_factory=list)
    uncommitted: tuple[Checkpoint, ...] = ()
    incomplete: tuple[Checkpoint, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every checkpoint is whole now."""
        return not self.hurt


class Repairer:
    """One repair of an open engine whose database has a repository. It supersedes a gc or repair that runs, and any later one
    supersedes it: `RepositoryError` `MAINTENANCE_LOST`. Whatever was done until then stays right."""

    def __init__(self, engine: Engine, run: Maintenance) -> None:
        self._engine = engine
        self._store = engine.checkpoints
        self._run = run

    async def repair(
        self,
        scratch: Scratch,
        *,
        first: RepairPlan | None = None,
        rebuilding: bool,
        read_data: bool,
        on_progress: ProgressCallback | None,
    ) -> RepairReport:
        """Look and act by turns; what is to be done `first` may be known already. When the first look fails, nothing was
        changed."""
        report = RepairReport()
        for n in range(ROUNDS):
            plan = (
                first
                if first is not None and n == 0
                else await survey(
                    self._engine, scratch, rebuilding=rebuilding, read_data=read_data and n == 0, on_progress=on_progress
                )
            )
            _note(report, plan)
            todo = [action for action in plan.actions if action.step not in OF_THE_WHOLE]
            if not todo:
                break
            for some in _together(todo):
                try:
                    await self._do(some)
                except CheckpointConflictError:
                    continue  # somebody has got hold of the pack since the survey: the next one sees how it stands
                report.done += some
        return report

    async def _do(self, actions: Sequence[RepairAction]) -> None:
        """One action, or several that enter checkpoints."""
        action = actions[0]
        match action.step:
            case Step.ENTER_CHECKPOINTS:
                await self._store.adopt_checkpoints(self._run, [c for one in actions for c in one.checkpoints])
            case Step.LOSE_PACK:
                await self._store.lose_packs(self._run, [action.subject])
            case Step.DROP_ROWS:
                await self._store.drop_records(self._run, action.subject, action.ids)
            case Step.ADOPT_PACK:
                await self._adopt(action.subject)
            case Step.SALVAGE_PACK:
                await self._salvage(action.subject, action.ids)
            case Step.WRITE_RECORDS:
                await self._write_records(action.checkpoints)
            case Step.DISTRUST_HEADS:
                await self._store.note_damage(self._run)
            case Step.MEND_HEADS:
                await self._store.mend_heads(self._run)

    async def _adopt(self, pack_id: str) -> None:
        info = await self._engine.blobs.head(pack_key(pack_id))
        if info is None:
            return  # deleted since the survey: the next one finds it missing
        records, _ = await read_tail(self._engine, pack_id, info.size)
        await self._store.adopt_pack(self._run, PackWrite(pack_id, info.size, tuple(records)))

    async def _salvage(self, pack_id: str, needed: Collection[bytes]) -> None:
        """Copy what can be read into a new pack, or those records of it that are needed, then set the old one aside. Its blob is
        kept."""
        try:
            data = await self._engine.blobs.get(pack_key(pack_id))
        except SnapshotError as error:
            if error.code != Code.MISSING_BLOB:
                raise
            return
        builders = await self._engine.run(_copy, data, frozenset(needed))
        for builder in builders:
            await self._put(builder, instead_of=pack_id)
        await self._store.lose_packs(self._run, [pack_id])

    async def _put(self, builder: PackBuilder, instead_of: str | None = None) -> None:
        await self._store.reserve_maintenance_packs(self._run, [builder.pack_id])
        records = tuple(builder.records)
        data = await self._engine.run(builder.finish)
        await self._engine.blobs.put(pack_key(builder.pack_id), data)
        await self._store.adopt_pack(self._run, PackWrite(builder.pack_id, len(data), records), instead_of=instead_of)

    async def _write_records(self, checkpoints: Sequence[Checkpoint]) -> None:
        builder, records = await self._engine.run(_record_pack, checkpoints)
        await self._put(builder)
        for c, record in zip(checkpoints, records, strict=True):
            await self._store.replace_record(self._run, c.thread_id, c.id, c.record_id, record.id)


def _together(actions: Sequence[RepairAction]) -> Iterator[list[RepairAction]]:
    """Actions that one transaction does: those that enter checkpoints, whole threads of some hundred in all."""
    some: list[RepairAction] = []
    for action in actions:
        mixed = action.step != Step.ENTER_CHECKPOINTS or (some and some[0].step != action.step)
        if some and (mixed or sum(len(one.checkpoints) for one in some) >= CHECKPOINTS_AT_ONCE):
            yield some
            some = []
        some.append(action)
    if some:
        yield some


def _note(report: RepairReport, plan: RepairPlan) -> None:
    report.hurt = sorted(set(plan.report.hurt) | set(plan.hurt))
    report.uncommitted, report.incomplete, report.notes = plan.uncommitted, plan.incomplete, plan.notes


def _copy(data: bytes, needed: Collection[bytes]) -> list[PackBuilder]:
    """The sound records of a pack in new ones; only those that are `needed`, when any are named."""
    builders: list[PackBuilder] = []
    for r in _once(r for r in sound_records(data) if not needed or r.id in needed):
        if not builders or builders[-1].full or len(builders[-1]) + r.stored_size > MAX_PACK_BYTES // 2:
            builders.append(PackBuilder(new_pack_id()))
        builders[-1].add(r.type, r.id, r.raw_size, r.codec, data[r.offset : r.offset + r.stored_size])
    return builders


def _once(records: Iterable[PackRecord]) -> list[PackRecord]:
    return list({r.id: r for r in records}.values())


def _record_pack(checkpoints: Sequence[Checkpoint]) -> tuple[PackBuilder, list[NewRecord]]:
    """A pack with the checkpoints' own records, and these."""
    builder = PackBuilder(new_pack_id())
    raws = [msgspec.msgpack.encode(msgspec.structs.replace(c, record_id=b"", recovered=False)) for c in checkpoints]
    packed = compress_many(raws)
    records = [
        NewRecord(RecordType.CHECKPOINT, record_id(RecordType.CHECKPOINT, raw), len(raw), codec, payload)
        for raw, (codec, payload) in zip(raws, packed, strict=True)
    ]
    for r in records:
        builder.add(r.type, r.id, r.raw_size, r.codec, r.payload)
    return builder, records
