"""What gc does to packs and the rows of their records, as functions on a running transaction; docs/format.md has the rules.

Time of condemnation and of deletion share the column `condemned_at`: each says when the pack got into its state.
"""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Row, and_, delete, exists, or_, select, update

from snapcore.errors import Code, RepositoryError
from snapcore.maintenance import Maintenance, PackContents, Roots
from snapcore.model import PackState, PackWrite, split_ids

from . import sql_checkpoints, sql_ledger, sql_packs, sql_runs
from . import sql_schema as schema
from .sql_dialects import batches
from .sql_transactions import Transaction

__all__ = [
    "OWNER",
    "check",
    "condemn",
    "condemn_abandoned",
    "deleted_before",
    "expire_caches",
    "forget_packs",
    "mark_deleted",
    "move_records",
    "owned",
    "pack_contents",
    "reserve",
    "roots",
    "start",
    "sweep",
]

OWNER: Final = "maintenance"  # in the place of a lease's token, which has 32 hex digits
_CHUNKS = schema.chunks
_PACKS = schema.packs
_SPARES = schema.spares
_LEASES = schema.writer_leases
_PINS = schema.pins
_REPOSITORY = schema.repository


def start(tx: Transaction) -> Maintenance:
    """Take the fence: this transaction's sequence number, so that every later one is larger."""
    tx.connection.execute(update(_REPOSITORY).values(gc_fence=tx.seq))
    return Maintenance(fence=tx.seq)


def check(tx: Transaction, run: Maintenance) -> None:
    """Raise `RepositoryError` `MAINTENANCE_LOST` unless the run is the latest."""
    if tx.connection.scalar(select(_REPOSITORY.c.gc_fence)) != run.fence:
        raise RepositoryError(
            "Another gc or repair of this repository has started since; this one has stopped.",
            code=Code.MAINTENANCE_LOST,
            hint="Let the other one end.",
        )


def roots(tx: Transaction) -> Roots:
    """The mark and all roots. The transaction sees one state."""
    mark = tx.connection.scalar(select(_REPOSITORY.c.commit_seq))
    # first, as the clock stands when the state is taken: one that runs out while the rest is read may have been renewed since
    pins = tx.connection.scalars(select(_PINS.c.roots).where(_PINS.c.expires_at > tx.now)).all()
    records: set[bytes] = set()
    manifests: set[bytes] = {manifest for pinned in pins for manifest in split_ids(pinned)}
    chunks: set[bytes] = set()
    lists: set[bytes] = set()
    for record in tx.connection.execution_options(yield_per=256).scalars(select(schema.checkpoints.c.record)):
        checkpoint = sql_checkpoints.decode(record)
        records.add(checkpoint.record_id)
        manifests.update(root.manifest for root in checkpoint.roots)
        for ref in (checkpoint.conversation, *checkpoint.artifacts.values()):
            chunks.update(split_ids(ref.chunks))
            lists.update([ref.chunk_list] if ref.chunk_list else [])
    output_lists: set[bytes] = set()
    for chunk_ids, list_ids in sql_ledger.roots(tx):
        chunks.update(chunk_ids)
        output_lists.update(list_ids)
    # of a list that was lost nothing can be read any more, and no event is ever deleted: it must not stop gc for good
    lists |= sql_packs.known(tx, output_lists)
    return Roots(mark or 0, tx.now, frozenset(records), frozenset(manifests), frozenset(chunks), frozenset(lists))


def pack_contents(tx: Transaction, after: int, limit: int) -> list[PackContents]:
    """Rows of packs by number, with the records whose rows lead to them."""
    is_owned = owned(tx).label("owned")
    rows = tx.connection.execute(
        select(_PACKS, is_owned).where(_PACKS.c.number > after).order_by(_PACKS.c.number).limit(limit)
    ).all()
    records: dict[int, list[tuple[bytes, int, int]]] = {row.number: [] for row in rows}
    placed = select(_CHUNKS.c.pack_number, _CHUNKS.c.id, _CHUNKS.c.offset, _CHUNKS.c.stored_size)
    for some in batches(records):
        for number, record_id, offset, size in tx.connection.execute(placed.where(_CHUNKS.c.pack_number.in_(some))):
            records[number].append((record_id, offset, size))
    return [_contents(row, records[row.number]) for row in rows]


def reserve(tx: Transaction, run: Maintenance, pack_ids: Sequence[str]) -> None:
    """Enter packs in state `writing`, owned by the run."""
    check(tx, run)
    sql_packs.reserve(tx, pack_ids, OWNER, run.fence)


def condemn(tx: Transaction, run: Maintenance, mark: int, pack_ids: Sequence[str]) -> list[str]:
    """Condemn those that are still live and were not stamped since the mark."""
    check(tx, run)
    return _condemn(tx, _still(mark), pack_ids)


def condemn_abandoned(tx: Transaction, run: Maintenance) -> list[str]:
    """Condemn every pack in state `writing` that nobody can commit any more."""
    check(tx, run)
    given_up = tx.connection.scalars(select(_PACKS.c.pack_id).where(_PACKS.c.state == PackState.WRITING, ~owned(tx))).all()
    # a lease that has run out can neither be renewed nor commit, and a fence is never used again
    return _condemn(tx, _PACKS.c.state == PackState.WRITING, given_up)


def move_records(tx: Transaction, run: Maintenance, mark: int, pack: PackWrite, sources: Sequence[str]) -> list[str]:
    """Make rows that lead to `sources` lead to their copies in `pack`; see `MaintenanceStore.move_records`."""
    check(tx, run)
    number = tx.connection.scalar(
        select(_PACKS.c.number).where(
            _PACKS.c.pack_id == pack.pack_id,
            _PACKS.c.state == PackState.WRITING,
            _PACKS.c.lease_token == OWNER,
            _PACKS.c.fence == run.fence,
        )
    )
    if number is None:
        raise RepositoryError(
            f"The pack {pack.pack_id} is not one that this run reserved.", code=Code.MAINTENANCE_LOST, hint="Start again."
        )
    free = _condemn(tx, _still(mark), sources)
    if free:
        sql_packs.point_rows(tx, number, pack.records, only_from=sql_packs.numbers_of(tx, free))
        live = {"state": PackState.LIVE, "commit_seq": tx.seq, "size": pack.size}
        tx.connection.execute(update(_PACKS).where(_PACKS.c.number == number).values(live))
    return free


def sweep(tx: Transaction, run: Maintenance, grace: int, limit: int) -> list[str]:
    """Set packs that were condemned `grace` microseconds ago or earlier to `deleting`, and drop the rows of their records. Leases
    that ran out as long ago go, too: nobody asks again for those of threads that were made up for one commit."""
    check(tx, run)
    tx.connection.execute(delete(_LEASES).where(_LEASES.c.expires_at <= tx.now - grace))
    left = list(tx.connection.scalars(select(_PACKS.c.pack_id).where(_PACKS.c.state == PackState.DELETING).limit(limit)))
    due = tx.connection.execute(
        select(_PACKS.c.number, _PACKS.c.pack_id)
        .where(_PACKS.c.state == PackState.CONDEMNED, _PACKS.c.condemned_at <= tx.now - grace)
        .order_by(_PACKS.c.number)
        .limit(max(0, limit - len(left)))
    ).all()
    for some in batches([row.number for row in due]):
        tx.connection.execute(delete(_CHUNKS).where(_CHUNKS.c.pack_number.in_(some)))
        tx.connection.execute(
            update(_PACKS).where(_PACKS.c.number.in_(some)).values(state=PackState.DELETING, condemned_at=tx.now)
        )
    return left + [row.pack_id for row in due]


def mark_deleted(tx: Transaction, run: Maintenance, pack_ids: Sequence[str]) -> None:
    """From `deleting` to `deleted`."""
    check(tx, run)
    for some in batches(pack_ids):
        tx.connection.execute(
            update(_PACKS)
            .where(_PACKS.c.pack_id.in_(some), _PACKS.c.state == PackState.DELETING)
            .values(state=PackState.DELETED, condemned_at=tx.now)
        )


def deleted_before(tx: Transaction, run: Maintenance, age: int, limit: int) -> list[str]:
    """Packs that were deleted `age` microseconds ago or earlier."""
    check(tx, run)
    old = select(_PACKS.c.pack_id).where(_PACKS.c.state == PackState.DELETED, _PACKS.c.condemned_at <= tx.now - age)
    return list(tx.connection.scalars(old.limit(limit)))


def forget_packs(tx: Transaction, run: Maintenance, pack_ids: Sequence[str]) -> None:
    """Remove the rows of deleted packs."""
    check(tx, run)
    for some in batches(pack_ids):
        tx.connection.execute(delete(_PACKS).where(_PACKS.c.pack_id.in_(some), _PACKS.c.state == PackState.DELETED))


def expire_caches(tx: Transaction, run: Maintenance, unused: int) -> int:
    """Drop stat caches not used for `unused` microseconds, pins that have run out, and runs of long ago."""
    check(tx, run)
    sql_runs.drop_old(tx)
    tx.connection.execute(delete(_PINS).where(_PINS.c.expires_at <= tx.now))
    sandboxes, rows = schema.sandboxes, schema.stat_rows
    old = tx.connection.scalars(select(sandboxes.c.number).where(sandboxes.c.used_at <= tx.now - unused)).all()
    for some in batches(old):
        tx.connection.execute(delete(rows).where(rows.c.sandbox_number.in_(some)))
        tx.connection.execute(delete(sandboxes).where(sandboxes.c.number.in_(some)))
    return len(old)


def _contents(row: Row[*tuple[Any, ...]], records: list[tuple[bytes, int, int]]) -> PackContents:
    records.sort(key=lambda record: record[1])
    return PackContents(
        number=row.number,
        pack_id=row.pack_id,
        state=row.state,
        size=row.size,
        commit_seq=row.commit_seq,
        condemned_at=row.condemned_at,
        owned=bool(row.owned) and row.state == PackState.WRITING,
        records=tuple(records),
    )


def owned(tx: Transaction) -> ColumnElement[bool]:
    """Whether the lease or the run that a pack belongs to is still in force."""
    lease = exists().where(
        _LEASES.c.token == _PACKS.c.lease_token, _LEASES.c.fence == _PACKS.c.fence, _LEASES.c.expires_at > tx.now
    )
    run = exists().where(_PACKS.c.lease_token == OWNER, _REPOSITORY.c.gc_fence == _PACKS.c.fence)
    return or_(lease, run)


def _still(mark: int) -> ColumnElement[bool]:
    """Live, and referred to by no commit since the mark."""
    return and_(_PACKS.c.state == PackState.LIVE, _PACKS.c.commit_seq <= mark)


def _condemn(tx: Transaction, which: ColumnElement[bool], pack_ids: Sequence[str]) -> list[str]:
    condemned: list[str] = []
    for some in batches(pack_ids):
        chosen = select(_PACKS.c.number, _PACKS.c.pack_id).where(_PACKS.c.pack_id.in_(some), which)
        rows = tx.connection.execute(chosen).all()
        numbers = [row.number for row in rows]
        tx.connection.execute(
            update(_PACKS).where(_PACKS.c.number.in_(numbers)).values(state=PackState.CONDEMNED, condemned_at=tx.now)
        )
        tx.connection.execute(delete(_SPARES).where(_SPARES.c.pack_number.in_(numbers)))
        condemned += [row.pack_id for row in rows]
    return condemned
