"""What repair changes, as functions on a running transaction: rows of packs that were found or lost, and of checkpoints."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import and_, delete, func, or_, select, update

from snapcore.errors import CheckpointConflictError, Code
from snapcore.maintenance import Maintenance
from snapcore.model import Checkpoint, PackState, PackWrite

from . import sql_checkpoints, sql_gc, sql_packs
from . import sql_schema as schema
from .sql_dialects import batches, insert_or_ignore
from .sql_transactions import Transaction

__all__ = [
    "adopt_checkpoints",
    "adopt_pack",
    "astray_heads",
    "damaged_threads",
    "drop_records",
    "lose_packs",
    "mend_heads",
    "note_damage",
    "rename_database",
    "replace_record",
]

_CHUNKS = schema.chunks
_PACKS = schema.packs
_SPARES = schema.spares
_REPOSITORY = schema.repository
_NOBODY: Final = "repair"  # who wrote a pack that was found is not known
_GOING: Final = (PackState.DELETING, PackState.DELETED)  # whoever deletes the blob does so without the lock


def adopt_pack(tx: Transaction, run: Maintenance, pack: PackWrite, instead_of: str | None) -> int:
    """Enter a pack that is in the blob store as live; see `MaintenanceStore.adopt_pack`."""
    sql_gc.check(tx, run)
    new = {"pack_id": pack.pack_id, "state": PackState.LIVE, "lease_token": _NOBODY, "fence": run.fence, "size": pack.size}
    tx.connection.execute(insert_or_ignore(_PACKS), [new])
    _check_free(tx, run, pack.pack_id)
    live = {"state": PackState.LIVE, "size": pack.size, "commit_seq": tx.seq, "condemned_at": None}
    tx.connection.execute(update(_PACKS).where(_PACKS.c.pack_id == pack.pack_id).values(live))
    (number,) = sql_packs.numbers_of(tx, [pack.pack_id])
    tx.connection.execute(delete(_SPARES).where(_SPARES.c.pack_number == number))
    replaced = {number, *sql_packs.numbers_of(tx, [instead_of] if instead_of is not None else [])}
    before = sql_packs.count_rows(tx, number)
    sql_packs.point_rows(tx, number, pack.records, only_from=replaced)
    sql_packs.insert_records(tx, number, pack.records)
    return sql_packs.count_rows(tx, number) - before


def lose_packs(tx: Transaction, run: Maintenance, pack_ids: Sequence[str]) -> int:
    """Set packs to `lost` and drop the rows of their records."""
    sql_gc.check(tx, run)
    row = {"state": PackState.LOST, "lease_token": _NOBODY, "fence": run.fence, "size": 0}
    if pack_ids:
        tx.connection.execute(insert_or_ignore(_PACKS), [{"pack_id": pack_id, **row} for pack_id in sorted(pack_ids)])
    dropped = 0
    for some in batches(_not_being_written(tx, pack_ids)):
        dropped += tx.connection.execute(delete(_CHUNKS).where(_CHUNKS.c.pack_number.in_(some))).rowcount
        tx.connection.execute(delete(_SPARES).where(_SPARES.c.pack_number.in_(some)))
        lost = update(_PACKS).where(_PACKS.c.number.in_(some), _PACKS.c.state.not_in(_GOING))
        tx.connection.execute(lost.values(state=PackState.LOST, condemned_at=None))
    if dropped:
        note_damage(tx, run)
    return dropped


def drop_records(tx: Transaction, run: Maintenance, pack_id: str, ids: Sequence[bytes]) -> int:
    """Drop those of the records' rows that lead to the pack."""
    sql_gc.check(tx, run)
    dropped = 0
    for number in sql_packs.numbers_of(tx, [pack_id]):
        for some in batches(ids):
            wrong = delete(_CHUNKS).where(_CHUNKS.c.pack_number == number, _CHUNKS.c.id.in_(some))
            dropped += tx.connection.execute(wrong).rowcount
    if dropped:
        note_damage(tx, run)
    return dropped


def note_damage(tx: Transaction, run: Maintenance) -> None:
    """From this transaction's sequence number on, what was written before is not relied on."""
    sql_gc.check(tx, run)
    tx.connection.execute(update(_REPOSITORY).values(damage_epoch=tx.seq))


def damaged_threads(tx: Transaction) -> frozenset[str]:
    """Threads whose head was written before records were lost."""
    rows, threads = schema.checkpoints, schema.threads
    heads = select(threads.c.thread_id).join(rows, rows.c.id == threads.c.head_id)
    return frozenset(
        tx.connection.scalars(heads.where(rows.c.commit_seq <= select(_REPOSITORY.c.damage_epoch).scalar_subquery()))
    )


def astray_heads(tx: Transaction) -> list[str]:
    """Threads whose head is not their newest checkpoint, or is one that is not there."""
    rows, threads = schema.checkpoints, schema.threads
    newest_first = func.row_number().over(partition_by=rows.c.thread_id, order_by=(rows.c.created_at.desc(), rows.c.id.desc()))
    ranked = select(rows.c.thread_id, rows.c.id, newest_first.label("place")).subquery()
    newest = select(ranked.c.thread_id, ranked.c.id).where(ranked.c.place == 1).subquery()
    wrong = (
        select(threads.c.thread_id)
        .join(newest, newest.c.thread_id == threads.c.thread_id, isouter=True)
        .where(threads.c.head_id.is_distinct_from(newest.c.id))
    )
    headless = (
        select(newest.c.thread_id)
        .join(threads, threads.c.thread_id == newest.c.thread_id, isouter=True)
        .where(threads.c.thread_id.is_(None))
    )
    return sorted(tx.connection.scalars(wrong.union(headless)))


def replace_record(tx: Transaction, run: Maintenance, thread_id: str, checkpoint_id: str, was: bytes, record_id: bytes) -> bool:
    """Make another record the checkpoint's own."""
    sql_gc.check(tx, run)
    return sql_checkpoints.replace_record(tx, thread_id, checkpoint_id, was, record_id)


def adopt_checkpoints(tx: Transaction, run: Maintenance, checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Enter checkpoints whose ids are not taken, and make each thread's newest its head."""
    sql_gc.check(tx, run)
    entered = sql_checkpoints.enter(tx, checkpoints)
    for thread_id in sorted({c.thread_id for c in checkpoints}):
        sql_checkpoints.set_newest_head(tx, thread_id)
    return [c.id for c in entered]


def mend_heads(tx: Transaction, run: Maintenance) -> list[str]:
    """Make the newest checkpoint of each thread its head where that is not so."""
    sql_gc.check(tx, run)
    return [thread_id for thread_id in astray_heads(tx) if sql_checkpoints.set_newest_head(tx, thread_id)]


def rename_database(tx: Transaction, run: Maintenance, database_id: str) -> None:
    """Give the database another id."""
    sql_gc.check(tx, run)
    tx.connection.execute(update(_REPOSITORY).values(database_id=database_id))


def _check_free(tx: Transaction, run: Maintenance, pack_id: str) -> None:
    """Refuse a pack whose blob may yet be deleted, or that somebody else is writing."""
    ours = and_(_PACKS.c.lease_token == sql_gc.OWNER, _PACKS.c.fence == run.fence)
    row = select(_PACKS.c.state, and_(sql_gc.owned(tx), ~ours).label("others")).where(_PACKS.c.pack_id == pack_id)
    state, others = tx.connection.execute(row).one()
    if state in _GOING or (state == PackState.WRITING and others):
        raise CheckpointConflictError(
            f"The pack {pack_id} is in the state '{state}', from which nobody may take it.",
            code=Code.DUPLICATE_ID,
            hint="Copy what is needed of it into a new pack.",
        )


def _not_being_written(tx: Transaction, pack_ids: Sequence[str]) -> list[int]:
    """The numbers of the packs without those whose writer may still commit them."""
    free = or_(_PACKS.c.state != PackState.WRITING, ~sql_gc.owned(tx))
    numbers: list[int] = []
    for some in batches(pack_ids):
        numbers += tx.connection.scalars(select(_PACKS.c.number).where(_PACKS.c.pack_id.in_(some), free))
    return numbers
