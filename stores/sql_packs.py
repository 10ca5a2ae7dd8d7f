"""Packs and the rows of their records, as functions on a running transaction.

A long capture enters the records of each pack as soon as it is put (`enter`), while the pack stays `writing`; the commit
(`settle`) then stamps the pack live. Two writers may store the same record meanwhile. The rule that keeps both right:

    For every record of a pack in state `writing`, either the record's row leads to that pack, or a *spare* keeps where
    in the pack it is.

A commit settles the spares of its own packs. Where the row leads to a pack that is live, condemned or of this commit,
that pack is stamped live too. Otherwise (the row is gone, or leads to a pack that another writer has not committed) the
row is made to lead to the commit's own copy, and the other writer's pack gets a spare in turn, which its own commit
will find. So no writer trusts a pack that may still be given up, and none has to store a record twice.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from sqlalchemy import Join, Row, delete, func, select, update

from snapcore.errors import CheckpointConflictError, CheckpointWriterLostError, Code, RecordsMissingError
from snapcore.model import Location, PackRecord, PackState, PackWrite, WriterLease
from snapcore.protocols import Commit, PackInfo

from . import sql_schema as schema
from .sql_dialects import batches, insert_or_ignore, insert_rows, wanted_ids
from .sql_transactions import Transaction

__all__ = [
    "count_rows",
    "enter",
    "has_records",
    "insert_records",
    "known",
    "list_packs",
    "locate",
    "numbers_of",
    "point_rows",
    "record_totals",
    "reserve",
    "settle",
]

_CHUNKS = schema.chunks
_PACKS = schema.packs
_SPARES = schema.spares
_KEPT: Final = (PackState.LIVE, PackState.CONDEMNED)  # gc will not drop the rows of such a pack in this transaction
_ROWS_AT_ONCE: Final = 8_192
_PLACE: Final = (_CHUNKS.c.offset, _CHUNKS.c.stored_size, _CHUNKS.c.raw_size, _CHUNKS.c.codec)

_AnyRow = Row[*tuple[Any, ...]]


def record_totals(tx: Transaction) -> tuple[int, int]:
    """(number of records, their raw size in bytes) over all packs."""
    count, size = tx.connection.execute(select(func.count(), func.coalesce(func.sum(_CHUNKS.c.raw_size), 0))).one()
    return int(count), int(size)


def reserve(tx: Transaction, pack_ids: Sequence[str], token: str, fence: int) -> None:
    """Enter packs in state `writing`, owned by (token, fence), before their blobs are put. Repeating it changes nothing."""
    rows = [
        {"pack_id": pack_id, "state": PackState.WRITING, "lease_token": token, "fence": fence, "size": 0}
        for pack_id in sorted(pack_ids)
    ]
    if not rows:
        return
    tx.connection.execute(insert_or_ignore(_PACKS), rows)
    owners = select(_PACKS.c.pack_id, _PACKS.c.lease_token, _PACKS.c.fence)
    for some in batches(pack_ids):
        for pack_id, *owner in tx.connection.execute(owners.where(_PACKS.c.pack_id.in_(some))):
            if owner != [token, fence]:
                raise CheckpointConflictError(f"The pack id {pack_id} is taken.", code=Code.DUPLICATE_ID, hint="Use a random id.")


def numbers_of(tx: Transaction, pack_ids: Collection[str]) -> list[int]:
    """The numbers of those packs that have a row."""
    return [
        number
        for some in batches(pack_ids)
        for number in tx.connection.scalars(select(_PACKS.c.number).where(_PACKS.c.pack_id.in_(some)))
    ]


def point_rows(tx: Transaction, number: int, records: Sequence[PackRecord], only_from: Collection[int]) -> int:
    """Make those of the records' rows that lead to the packs `only_from` lead to pack `number`. Returns how many."""
    copies = {record.id: record for record in records}
    sources = set(only_from)
    moved = [row.id for row in _rows_of(tx, copies) if row.pack_number in sources]
    if moved:
        tx.connection.execute(delete(_CHUNKS).where(_CHUNKS.c.id.in_(select(wanted_ids(moved).c.id))))
        insert_rows(tx.connection, _CHUNKS, [(i, number, *_place(copies[i])) for i in sorted(moved)])
    return len(moved)


def enter(tx: Transaction, lease: WriterLease, pack: PackWrite) -> frozenset[bytes]:
    """Enter the records of a pack of this lease that was put. Returns the ids whose rows lead to a pack that is live,
    condemned, or of this lease as well."""
    return _enter(tx, lease, _own_numbers(tx, lease, [pack.pack_id])[pack.pack_id], pack)


def _enter(tx: Transaction, lease: WriterLease, number: int, pack: PackWrite) -> frozenset[bytes]:
    tx.connection.execute(update(_PACKS).where(_PACKS.c.number == number).values(size=pack.size))
    records = {record.id: record for record in pack.records}
    if not records:
        return frozenset()
    insert_records(tx, number, list(records.values()))
    if count_rows(tx, number) == len(records):
        return frozenset()
    elsewhere = [row for row in _rows_of(tx, records) if row.pack_number != number]
    insert_rows(tx.connection, _SPARES, [(number, row.id, *_place(records[row.id])) for row in elsewhere])
    return frozenset(row.id for row in elsewhere if row.state in _KEPT or row.lease_token == lease.token)


def insert_records(tx: Transaction, number: int, records: Sequence[PackRecord]) -> None:
    """Give those of the records that have no row one that leads to pack `number`."""
    insert_rows(tx.connection, _CHUNKS, [(r.id, number, *_place(r)) for r in sorted(records, key=_id)])


def settle(tx: Transaction, lease: WriterLease, commit: Commit, needed: Collection[bytes]) -> None:
    """Stamp live every pack that a commit rests on: its own, and those that hold the records it refers to.

    `needed` are records to be found beside `commit.refs`. Raises `CheckpointWriterLostError` when a pack of the commit
    is not (any more) `writing` and of this lease, `RecordsMissingError` when a record has no row that leads to a pack
    to be stamped.
    """
    numbers = _own_numbers(tx, lease, [*commit.own, *(pack.pack_id for pack in commit.packs)])
    for pack in commit.packs:
        _enter(tx, lease, numbers[pack.pack_id], pack)
    own = set(numbers.values())
    stamped = own | _settle_spares(tx, own)
    wanted = {*commit.refs, *needed}
    for row in _rows_of(tx, wanted):
        if row.state in _KEPT or row.pack_number in own:
            stamped.add(row.pack_number)
            wanted.discard(row.id)
    if wanted:
        raise RecordsMissingError(
            f"{len(wanted)} stored records that this checkpoint refers to are gone; nothing was committed.", ids=wanted
        )
    for some in batches(stamped):
        tx.connection.execute(
            update(_PACKS).where(_PACKS.c.number.in_(some)).values(state=PackState.LIVE, commit_seq=tx.seq, condemned_at=None)
        )


def known(tx: Transaction, ids: Collection[bytes]) -> frozenset[bytes]:
    """Which records lie in a pack that is live or condemned."""
    statement = select(_CHUNKS.c.id).select_from(_join(ids)).where(_PACKS.c.state.in_(_KEPT))
    return frozenset(tx.connection.scalars(statement))


def locate(tx: Transaction, ids: Collection[bytes]) -> dict[bytes, Location]:
    """Where records are."""
    statement = select(_CHUNKS.c.id, _PACKS.c.pack_id, *_PLACE).select_from(_join(ids))
    return {row[0]: Location(*row[1:]) for row in tx.connection.execute(statement)}


def has_records(tx: Transaction) -> bool:
    """Whether the store holds any record at all."""
    return tx.connection.execute(select(_CHUNKS.c.id).limit(1)).first() is not None


def list_packs(tx: Transaction) -> list[PackInfo]:
    """Every pack's row, ordered by id."""
    statement = select(_PACKS.c.pack_id, _PACKS.c.state, _PACKS.c.size, _PACKS.c.commit_seq).order_by(_PACKS.c.pack_id)
    return [PackInfo(*row) for row in tx.connection.execute(statement)]


def _own_numbers(tx: Transaction, lease: WriterLease, pack_ids: Sequence[str]) -> dict[str, int]:
    """The number of each pack that is `writing` and of this lease, by id. Raises `CheckpointWriterLostError` when one is not."""
    unique = set(pack_ids)
    found = {
        pack_id: number
        for some in batches(unique)
        for pack_id, number in tx.connection.execute(
            select(_PACKS.c.pack_id, _PACKS.c.number).where(
                _PACKS.c.pack_id.in_(some),
                _PACKS.c.state == PackState.WRITING,
                _PACKS.c.lease_token == lease.token,
                _PACKS.c.fence == lease.fence,
            )
        )
    }
    if len(found) != len(unique):
        raise CheckpointWriterLostError(
            f"A pack that this writer of thread {lease.thread_id!r} stored is not its own any more; nothing was changed.",
            hint="Start again with a new lease.",
        )
    return found


def count_rows(tx: Transaction, number: int) -> int:
    """How many records have a row that leads to the pack."""
    count = tx.connection.scalar(select(func.count()).select_from(_CHUNKS).where(_CHUNKS.c.pack_number == number))
    return count or 0


def _join(ids: Collection[bytes]) -> Join:
    """The rows of these records, with those of their packs."""
    wanted = wanted_ids(ids)
    return wanted.join(_CHUNKS, _CHUNKS.c.id == wanted.c.id).join(_PACKS, _PACKS.c.number == _CHUNKS.c.pack_number)


def _rows_of(tx: Transaction, ids: Collection[bytes]) -> Iterator[_AnyRow]:
    """Id, pack and the pack's state and owner of those records that have a row. Some thousands are held at once: a commit may
    refer to every record of a large tree."""
    statement = select(_CHUNKS.c.id, _CHUNKS.c.pack_number, _PACKS.c.state, _PACKS.c.lease_token)
    ordered = sorted(ids)
    for start in range(0, len(ordered), _ROWS_AT_ONCE):
        some = ordered[start : start + _ROWS_AT_ONCE]
        yield from tx.connection.execute(statement.select_from(_join(some))).all()


def _settle_spares(tx: Transaction, own: set[int]) -> set[int]:
    """Settle the spares of a commit's packs; returns the other packs to be stamped."""
    spares = {
        row.id: row
        for some in batches(own)
        for row in tx.connection.execute(select(_SPARES).where(_SPARES.c.pack_number.in_(some)))
    }
    if not spares:
        return set()
    stamped: set[int] = set()
    adopted = dict(spares)
    for row in _rows_of(tx, spares):
        if row.state in _KEPT or row.pack_number in own:
            stamped.add(row.pack_number)
            del adopted[row.id]
    _adopt(tx, adopted)
    for some in batches(own):
        tx.connection.execute(delete(_SPARES).where(_SPARES.c.pack_number.in_(some)))
    return stamped


def _adopt(tx: Transaction, spares: dict[bytes, _AnyRow]) -> None:
    """Make the rows of these records lead to the copies that the spares name."""
    if not spares:
        return
    foreign = tx.connection.execute(
        select(_CHUNKS.c.pack_number, _CHUNKS.c.id, *_PLACE).select_from(_join(spares)).where(_PACKS.c.state == PackState.WRITING)
    ).all()
    insert_rows(tx.connection, _SPARES, [tuple(row) for row in foreign])
    tx.connection.execute(delete(_CHUNKS).where(_CHUNKS.c.id.in_(select(wanted_ids(spares).c.id))))
    insert_rows(tx.connection, _CHUNKS, [(i, spares[i].pack_number, *_place(spares[i])) for i in sorted(spares)])


def _place(record: PackRecord | _AnyRow) -> tuple[int, int, int, int]:
    return (record.offset, record.stored_size, record.raw_size, record.codec)


def _id(record: PackRecord) -> bytes:
    return record.id
