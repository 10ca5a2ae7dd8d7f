"""Threads and their checkpoints, as functions on a running transaction."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Select, delete, func, select, update

from snapcore.errors import CheckpointConflictError, Code, RepositoryError, SnapshotError
from snapcore.model import Checkpoint, ThreadInfo, WriterLease, relabelled
from snapcore.protocols import Commit

from . import sql_leases, sql_ledger, sql_packs, sql_stats
from . import sql_schema as schema
from .sql_dialects import batches, insert_or_ignore, insert_rows
from .sql_transactions import Transaction

__all__ = [
    "append",
    "by_idempotency_key",
    "by_label",
    "decode",
    "deleted_since_head",
    "enter",
    "find",
    "fork",
    "get",
    "head",
    "is_damaged",
    "list_thread",
    "list_threads",
    "remove",
    "replace_record",
    "require",
    "set_label",
    "set_newest_head",
]

_ROWS = schema.checkpoints
_THREADS = schema.threads
_DELETIONS = schema.deletions
_FOUND_AT_MOST: Final = 20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Checkpoint)


# ---------------------------------------------------------------------------------------------------------- reading


def get(tx: Transaction, thread_id: str, checkpoint_id: str) -> Checkpoint | None:
    """A checkpoint of the thread."""
    return _one(tx, _of(thread_id).where(_ROWS.c.id == checkpoint_id))


def require(tx: Transaction, thread_id: str, checkpoint_id: str) -> Checkpoint:
    """A checkpoint of the thread; `MISSING_CHECKPOINT` when it has none such."""
    found = get(tx, thread_id, checkpoint_id)
    if found is None:
        raise SnapshotError(
            f"Thread {thread_id!r} has no checkpoint {checkpoint_id!r}.",
            code=Code.MISSING_CHECKPOINT,
            hint="`snapcore list` shows those it has.",
        )
    return found


def head(tx: Transaction, thread_id: str) -> Checkpoint | None:
    """The thread's newest checkpoint."""
    return _one(tx, select(_ROWS.c.record).join(_THREADS, _THREADS.c.head_id == _ROWS.c.id).where(_is(thread_id)))


def by_label(tx: Transaction, thread_id: str, label: str) -> Checkpoint | None:
    """The newest checkpoint with that label."""
    newest = _of(thread_id).where(_ROWS.c.label == label).order_by(_ROWS.c.created_at.desc(), _ROWS.c.id.desc())
    return _one(tx, newest.limit(1))


def by_idempotency_key(tx: Transaction, thread_id: str, key: str) -> Checkpoint | None:
    """The checkpoint that was appended under that key."""
    return _one(tx, _of(thread_id).where(_ROWS.c.idempotency_key == key))


def list_thread(tx: Transaction, thread_id: str) -> list[Checkpoint]:
    """All checkpoints of the thread, oldest first."""
    return _many(tx, _in_order(_of(thread_id)))


def find(tx: Transaction, prefix: str, thread_id: str | None) -> list[Checkpoint]:
    """Checkpoints whose id starts with `prefix`, oldest first, at most 20."""
    wanted = select(_ROWS.c.record) if thread_id is None else _of(thread_id)
    if prefix:
        wanted = wanted.where(_ROWS.c.id >= prefix)
        end = _after_all_with(prefix)
        if end is not None:
            wanted = wanted.where(_ROWS.c.id < end)
    return _many(tx, _in_order(wanted).limit(_FOUND_AT_MOST))


def list_threads(tx: Transaction) -> list[ThreadInfo]:
    """All threads that have a checkpoint."""
    statement = (
        select(_ROWS.c.thread_id, _THREADS.c.head_id, func.count(), func.max(_ROWS.c.created_at))
        .join(_THREADS, _THREADS.c.thread_id == _ROWS.c.thread_id)
        .group_by(_ROWS.c.thread_id, _THREADS.c.head_id)
        .order_by(_ROWS.c.thread_id)
    )
    return [ThreadInfo(*row) for row in tx.connection.execute(statement)]


def deleted_since_head(tx: Transaction, thread_id: str) -> tuple[str, ...]:
    """Checkpoints of the thread that were deleted and that no later checkpoint notes yet."""
    ids = _DELETIONS.c.checkpoint_id
    return tuple(tx.connection.scalars(select(ids).where(_DELETIONS.c.thread_id == thread_id).order_by(ids)))


# ---------------------------------------------------------------------------------------------------------- writing


def append(
    tx: Transaction,
    lease: WriterLease,
    checkpoint: Checkpoint,
    commit: Commit,
    source: tuple[str, str] | None,
    release: bool,
) -> Checkpoint:
    """Append a checkpoint that is well formed; see `CheckpointStore.append`."""

    def check_place() -> None:
        head_id = _head_id(tx, lease.thread_id)
        if checkpoint.parent_id != head_id:
            raise _not_the_head(tx, checkpoint, head_id)
        if source is not None:
            require(tx, *source)

    return _add(tx, lease, checkpoint, commit, check_place, source, release)


def fork(tx: Transaction, lease: WriterLease, checkpoint: Checkpoint, commit: Commit, source: tuple[str, str]) -> Checkpoint:
    """Start an empty thread with a copy of `source`; see `CheckpointStore.fork`."""

    def check_place() -> None:
        require(tx, *source)
        if tx.connection.execute(_of(lease.thread_id).limit(1)).first() is not None:
            raise CheckpointConflictError(
                f"Thread {lease.thread_id!r} has checkpoints already.",
                code=Code.DESTINATION_NOT_EMPTY,
                hint="Fork into a new thread.",
            )

    return _add(tx, lease, checkpoint, commit, check_place, source, release=True)


def set_label(
    tx: Transaction, lease: WriterLease, checkpoint_id: str, label: str | None, record_id: bytes, commit: Commit
) -> Checkpoint:
    """Change a checkpoint's label and the record that says so."""
    _check_writer(tx, lease, commit)
    old = require(tx, lease.thread_id, checkpoint_id)
    new = msgspec.structs.replace(relabelled(old, label), record_id=record_id)
    sql_packs.settle(tx, lease, commit, [record_id])
    sql_stats.save(tx, commit.stats)
    sql_ledger.enter(tx, commit)
    seq = _seq(tx, checkpoint_id)  # its content is no newer for it
    tx.connection.execute(update(_ROWS).where(_ROWS.c.id == checkpoint_id).values(_columns(new, seq)))
    return _copy(new)


def remove(tx: Transaction, lease: WriterLease, checkpoint_ids: Sequence[str]) -> list[Checkpoint]:
    """Remove checkpoints; the newest that remains becomes the head if the head is among them."""
    sql_leases.check(tx, lease)
    thread_id = lease.thread_id
    ids = list(dict.fromkeys(checkpoint_ids))
    found = {
        checkpoint.id: checkpoint for some in batches(ids) for checkpoint in _many(tx, _of(thread_id).where(_ROWS.c.id.in_(some)))
    }
    removed = [found.get(checkpoint_id) or require(tx, thread_id, checkpoint_id) for checkpoint_id in ids]
    for some in batches(ids):
        tx.connection.execute(delete(_ROWS).where(_ROWS.c.id.in_(some)))
        rows = [{"thread_id": thread_id, "checkpoint_id": checkpoint_id} for checkpoint_id in some]
        tx.connection.execute(insert_or_ignore(_DELETIONS), rows)
    if _head_id(tx, thread_id) in ids:
        set_newest_head(tx, thread_id)
    return removed


def enter(tx: Transaction, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Enter checkpoints as they are, but for those whose id or idempotency key is taken, by an earlier one of them too; nothing
    is known of their records. Returns those entered."""
    firsts: dict[str, Checkpoint] = {}
    for c in checkpoints:
        firsts.setdefault(c.id, c)
    taken = _taken(tx, firsts)
    new = [c for c in firsts.values() if c.id not in taken]
    insert_rows(tx.connection, _ROWS, [tuple(_columns(c, 0).values()) for c in new])
    there = _taken(tx, [c.id for c in new])
    entered = [c for c in new if c.id in there]
    insert_rows(tx.connection, _THREADS, [(thread_id, None) for thread_id in sorted({c.thread_id for c in entered})])
    return entered


def replace_record(tx: Transaction, thread_id: str, checkpoint_id: str, was: bytes, record_id: bytes) -> bool:
    """Make another record the checkpoint's own, unless it is not `was` any more. Returns whether it did."""
    old = get(tx, thread_id, checkpoint_id)
    if old is None or old.record_id != was:
        return False
    columns = _columns(msgspec.structs.replace(old, record_id=record_id), _seq(tx, checkpoint_id))
    tx.connection.execute(update(_ROWS).where(_ROWS.c.id == checkpoint_id).values(columns))
    return True


def set_newest_head(tx: Transaction, thread_id: str) -> bool:
    """Make the thread's newest checkpoint its head; None when it has none. Returns whether that changed it."""
    newest = (
        select(_ROWS.c.id).where(_ROWS.c.thread_id == thread_id).order_by(_ROWS.c.created_at.desc(), _ROWS.c.id.desc()).limit(1)
    )
    head_id = tx.connection.scalar(newest)
    changed = head_id != _head_id(tx, thread_id)
    if changed:
        _set_head(tx, thread_id, head_id)
    return changed


def is_damaged(tx: Transaction, thread_id: str) -> bool:
    """Whether records were lost since the thread's head was written."""
    written = select(_ROWS.c.commit_seq).join(_THREADS, _THREADS.c.head_id == _ROWS.c.id).where(_is(thread_id)).scalar_subquery()
    return bool(tx.connection.scalar(select(written <= schema.repository.c.damage_epoch)))


def _add(
    tx: Transaction,
    lease: WriterLease,
    checkpoint: Checkpoint,
    commit: Commit,
    check_place: Callable[[], None],
    source: tuple[str, str] | None,
    release: bool,
) -> Checkpoint:
    same_id = _one(tx, select(_ROWS.c.record).where(_ROWS.c.id == checkpoint.id))
    if same_id is not None and _is_repeat(same_id, checkpoint):
        return same_id  # before the lease is looked at: the first answer, lost on the way, may have released it
    _check_writer(tx, lease, commit)
    if checkpoint.idempotency_key is not None:
        holder = by_idempotency_key(tx, lease.thread_id, checkpoint.idempotency_key)
        if holder is not None:
            if release:
                sql_leases.remove(tx, lease)
            return holder
    if same_id is not None:
        raise CheckpointConflictError(
            f"The checkpoint id {checkpoint.id!r} is taken.", code=Code.DUPLICATE_ID, hint="Choose another id, or give none."
        )
    check_place()
    manifests = [root.manifest for root in checkpoint.roots]
    sql_packs.settle(tx, lease, commit, [checkpoint.record_id, *manifests])
    # what was lost since the lease was taken may be what the writer took over from the head; a copy is no newer than its source
    seq = lease.fence if source is None else _seq(tx, source[1])
    tx.connection.execute(_ROWS.insert().values(_columns(checkpoint, seq)))
    _set_head(tx, lease.thread_id, checkpoint.id)
    for noted in checkpoint.deleted:
        tx.connection.execute(
            delete(_DELETIONS).where(_DELETIONS.c.thread_id == lease.thread_id, _DELETIONS.c.checkpoint_id == noted)
        )
    sql_stats.save(tx, commit.stats)
    sql_ledger.enter(tx, commit)
    if release:
        sql_leases.remove(tx, lease)
    return _copy(checkpoint)


def _check_writer(tx: Transaction, lease: WriterLease, commit: Commit) -> None:
    sql_leases.check(tx, lease)
    if commit.event is not None:
        sql_ledger.check(tx, commit.event[0])


def _taken(tx: Transaction, ids: Collection[str]) -> set[str]:
    return {i for some in batches(ids) for i in tx.connection.scalars(select(_ROWS.c.id).where(_ROWS.c.id.in_(some)))}


def _is_repeat(stored: Checkpoint, checkpoint: Checkpoint) -> bool:
    return stored.thread_id == checkpoint.thread_id and stored.record_id == checkpoint.record_id


def _not_the_head(tx: Transaction, checkpoint: Checkpoint, head_id: str | None) -> CheckpointConflictError:
    thread_id, parent_id = checkpoint.thread_id, checkpoint.parent_id
    if parent_id is None or get(tx, thread_id, parent_id) is not None:
        return CheckpointConflictError(
            f"Thread {thread_id!r} has moved on: its head is {head_id!r}, not {parent_id!r}.",
            code=Code.STALE_HEAD,
            hint="Read the head again.",
        )
    return CheckpointConflictError(
        f"The parent {parent_id!r} is no checkpoint of thread {thread_id!r}.",
        code=Code.PARENT_MISMATCH,
        hint="Read the head again.",
    )


def _head_id(tx: Transaction, thread_id: str) -> str | None:
    return tx.connection.scalar(select(_THREADS.c.head_id).where(_is(thread_id)))


def _set_head(tx: Transaction, thread_id: str, head_id: str | None) -> None:
    moved = tx.connection.execute(update(_THREADS).where(_is(thread_id)).values(head_id=head_id))
    if not moved.rowcount:
        tx.connection.execute(_THREADS.insert().values(thread_id=thread_id, head_id=head_id))


def _seq(tx: Transaction, checkpoint_id: str) -> int:
    seq: int = tx.connection.execute(select(_ROWS.c.commit_seq).where(_ROWS.c.id == checkpoint_id)).scalar_one()
    return seq


def _columns(checkpoint: Checkpoint, seq: int) -> dict[str, Any]:
    return {
        "id": checkpoint.id,
        "thread_id": checkpoint.thread_id,
        "created_at": checkpoint.created_at,
        "label": checkpoint.label,
        "idempotency_key": checkpoint.idempotency_key,
        "commit_seq": seq,
        "record_id": checkpoint.record_id,
        "record": _encoder.encode(checkpoint),
    }


def _copy(checkpoint: Checkpoint) -> Checkpoint:
    return _decoder.decode(_encoder.encode(checkpoint))


def _is(thread_id: str) -> ColumnElement[bool]:
    return _THREADS.c.thread_id == thread_id


def _of(thread_id: str) -> Select[bytes]:
    return select(_ROWS.c.record).where(_ROWS.c.thread_id == thread_id)


def _in_order(wanted: Select[bytes]) -> Select[bytes]:
    return wanted.order_by(_ROWS.c.created_at, _ROWS.c.id)


def _one(tx: Transaction, wanted: Select[bytes]) -> Checkpoint | None:
    record = tx.connection.scalar(wanted)
    return None if record is None else decode(record)


def _many(tx: Transaction, wanted: Select[bytes]) -> list[Checkpoint]:
    return [decode(record) for record in tx.connection.scalars(wanted)]


def decode(record: bytes) -> Checkpoint:
    """A checkpoint from its row. Raises `RepositoryError` `DAMAGED`."""
    try:
        return _decoder.decode(record)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RepositoryError(
            "The database holds a checkpoint that cannot be read.", code=Code.DAMAGED, hint="Put a copy of its file back."
        ) from error


def _after_all_with(prefix: str) -> str | None:
    """The least text that sorts after every text with that prefix, as UTF-8 bytes; None when there is none."""
    for end in range(len(prefix), 0, -1):
        following = ord(prefix[end - 1]) + 1
        if following == 0xD800:
            following = 0xE000  # surrogates are no text
        if following <= 0x10FFFF:
            return prefix[: end - 1] + chr(following)
    return None
