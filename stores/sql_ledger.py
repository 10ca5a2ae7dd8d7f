"""The ledger of each thread, as functions on a running transaction.

Events of a thread are numbered under the repository's lock, so that there is no gap, and carry what a claim is known by: its
fence, the sequence number of the transaction that granted it.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Row, Select, delete, func, select

from snapcore.errors import CheckpointConflictError, CheckpointWriterLostError, Code, RepositoryError
from snapcore.ledger import Claim, Event, EventKind
from snapcore.model import WriterLease, split_ids
from snapcore.protocols import Commit

from . import sql_leases, sql_packs, sql_stats
from . import sql_schema as schema
from .sql_transactions import Transaction

__all__ = ["append", "check", "claim", "enter", "list_events", "not_before", "roots", "sandbox_thread"]

_EVENTS = schema.events
_CLAIMS = schema.ledger_claims
_CHECKPOINTS = schema.checkpoints
_OPENING: Final = (EventKind.CREATED, EventKind.OPENED, EventKind.RESUMED)
_ROWS_AT_ONCE: Final = 1024

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event)
_outputs = msgspec.msgpack.Decoder(tuple[bytes, bytes])


def claim(tx: Transaction, lease: WriterLease, token: str) -> Claim:
    """Take the thread's ledger; the claim with this very token, if it is the newest, is returned again."""
    sql_leases.check(tx, lease)
    thread_id = lease.thread_id
    row = tx.connection.execute(select(_CLAIMS).where(_CLAIMS.c.thread_id == thread_id)).one_or_none()
    if row is not None and row.token == token:
        return Claim(thread_id=thread_id, token=token, fence=row.fence)
    tx.connection.execute(delete(_CLAIMS).where(_CLAIMS.c.thread_id == thread_id))
    tx.connection.execute(_CLAIMS.insert().values(thread_id=thread_id, token=token, fence=tx.seq))
    return Claim(thread_id=thread_id, token=token, fence=tx.seq)


def check(tx: Transaction, claim: Claim) -> None:
    """Raise `CheckpointWriterLostError` unless the claim is its thread's newest."""
    newest = select(_CLAIMS.c.token, _CLAIMS.c.fence).where(_CLAIMS.c.thread_id == claim.thread_id)
    row = tx.connection.execute(newest).one_or_none()
    if row is None or (row.token, row.fence) != (claim.token, claim.fence):
        raise CheckpointWriterLostError(
            f"Another session has taken over thread {claim.thread_id!r}; nothing was changed.",
            hint="Let the other one go on, or open a new session.",
        )


def append(tx: Transaction, claim: Claim, event: Event, lease: WriterLease | None, commit: Commit | None) -> Event:
    """Append an event, with the records that its outputs refer to; see `LedgerStore.append_event`."""
    check(tx, claim)
    stored = _same(tx, claim, event)
    if stored is not None:
        return stored  # before the lease is looked at: the first answer, lost on the way, released it
    if lease is not None and commit is not None:
        sql_leases.check(tx, lease)
        sql_packs.settle(tx, lease, commit, [record for ids in _referred(event) for record in ids])
        sql_stats.save(tx, commit.stats)
        sql_leases.remove(tx, lease)
    return _insert(tx, claim, event)


def enter(tx: Transaction, commit: Commit) -> None:
    """Append the event of a commit, if it has one whose claim `check` has passed. Repeating it changes nothing."""
    if commit.event is not None and _same(tx, *commit.event) is None:
        _insert(tx, *commit.event)


def list_events(tx: Transaction, thread_id: str, after: int, limit: int) -> list[Event]:
    """Up to `limit` events with a number above `after`, in order."""
    page = _of(thread_id).where(_EVENTS.c.sequence > after).order_by(_EVENTS.c.sequence).limit(limit)
    return [_decode(record) for record in tx.connection.scalars(page)]


def not_before(tx: Transaction, lease: WriterLease) -> WriterLease:
    """The lease, acquired no earlier than the thread's newest event was appended: what is captured under it comes after that."""
    last = _last(tx, lease.thread_id)
    return lease if last is None else msgspec.structs.replace(lease, acquired_at=max(lease.acquired_at, last.at))


def sandbox_thread(tx: Transaction, sandbox_id: str) -> str | None:
    """The thread that last created, opened or resumed the sandbox."""
    opened = select(_EVENTS.c.thread_id).where(_EVENTS.c.sandbox_id == sandbox_id, _EVENTS.c.kind.in_(_OPENING))
    newest = opened.order_by(_EVENTS.c.fence.desc(), _EVENTS.c.sequence.desc())  # fences order the claims of all threads
    return tx.connection.scalar(newest.limit(1))


def roots(tx: Transaction) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """(chunks, chunk lists) of the outputs of each event that has stored ones. No event is decoded."""
    stored = select(_EVENTS.c.outputs).where(_EVENTS.c.outputs.is_not(None))
    for outputs in tx.connection.execution_options(yield_per=_ROWS_AT_ONCE).scalars(stored):
        try:
            chunks, lists = _outputs.decode(outputs)
        except msgspec.MsgspecError as error:
            raise _damaged() from error
        yield split_ids(chunks), split_ids(lists)


def _same(tx: Transaction, claim: Claim, event: Event) -> Event | None:
    """The event with this id, if it was appended already. Raises `CheckpointConflictError` `DUPLICATE_ID` when it is another."""
    record = tx.connection.scalar(select(_EVENTS.c.record).where(_EVENTS.c.id == event.id))
    if record is None:
        return None
    stored = _decode(record)
    if _as_stored(event, claim.thread_id, stored.sequence, stored.at, stored.fence) != stored:
        raise CheckpointConflictError(f"The event id {event.id} is taken.", code=Code.DUPLICATE_ID, hint="Use a new random id.")
    return stored


def _insert(tx: Transaction, claim: Claim, event: Event) -> Event:
    last = _last(tx, claim.thread_id)
    # times never go back within a thread, whatever the database's clock does, and tell what came after a checkpoint
    sequence, at = (1, tx.now) if last is None else (last.sequence + 1, max(last.at, tx.now))
    captured = select(func.max(_CHECKPOINTS.c.created_at)).where(_CHECKPOINTS.c.thread_id == claim.thread_id)
    at = max(at, (tx.connection.scalar(captured) or 0) + 1)
    new = _as_stored(event, claim.thread_id, sequence, at, claim.fence)
    chunks, lists = _referred(new)
    record = _encoder.encode(new)
    tx.connection.execute(
        _EVENTS.insert().values(
            thread_id=new.thread_id,
            sequence=new.sequence,
            id=new.id,
            kind=new.kind,
            at=new.at,
            fence=new.fence,
            sandbox_id=new.sandbox_id,
            outputs=_encoder.encode((b"".join(chunks), b"".join(lists))) if chunks or lists else None,
            record=record,
        )
    )
    return _decode(record)


def _last(tx: Transaction, thread_id: str) -> Row[*tuple[Any, ...]] | None:
    """Number and time of the thread's newest event."""
    last = select(_EVENTS.c.sequence, _EVENTS.c.at).where(_EVENTS.c.thread_id == thread_id)
    return tx.connection.execute(last.order_by(_EVENTS.c.sequence.desc()).limit(1)).one_or_none()


def _as_stored(event: Event, thread_id: str, sequence: int, at: int, fence: int) -> Event:
    return msgspec.structs.replace(event, thread_id=thread_id, sequence=sequence, at=at, fence=fence)


def _referred(event: Event) -> tuple[list[bytes], list[bytes]]:
    """The chunks and the chunk lists that the event's outputs refer to."""
    refs = [output.ref for output in (event.stdout, event.stderr) if output.ref is not None]
    return [i for ref in refs for i in split_ids(ref.chunks)], [ref.chunk_list for ref in refs if ref.chunk_list]


def _of(thread_id: str) -> Select[bytes]:
    is_thread: ColumnElement[bool] = _EVENTS.c.thread_id == thread_id
    return select(_EVENTS.c.record).where(is_thread)


def _decode(record: bytes) -> Event:
    try:
        return _decoder.decode(record)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damaged() from error


def _damaged() -> RepositoryError:
    return RepositoryError(
        "The database holds an event that cannot be read.", code=Code.DAMAGED, hint="Put a copy of its file back."
    )
