"""Fork, rewind and relabel: new records over old content, no file bytes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from .capturing import commit_checkpoint, new_checkpoint_id
from .engine import Engine, finish
from .errors import CheckpointConflictError, Code, RepositoryError, SnapshotError, printable
from .leases import WriterHold
from .model import Checkpoint, RecordType, relabelled, validate_id, validate_text, validate_thread_id
from .packwriter import PackWriter, new_pack_id

__all__ = ["delete", "fork", "missing", "rewind", "set_label", "surely"]

T = TypeVar("T")

ATTEMPTS: Final = 3
FIRST_PAUSE: Final = 0.1


def missing(thread_id: str, checkpoint_id: str | None) -> SnapshotError:
    """The error for a checkpoint that a thread does not have."""
    what = f"checkpoint {printable(checkpoint_id)}" if checkpoint_id else "checkpoint"
    look = f"list --thread {printable(thread_id)}" if checkpoint_id else "threads"
    return SnapshotError(
        f"Thread {printable(thread_id)} has no {what}.",
        code=Code.MISSING_CHECKPOINT,
        hint=f"'snapcore {look}' shows what there is.",
    )


async def _source(engine: Engine, thread_id: str, checkpoint_id: str | None) -> Checkpoint:
    store = engine.checkpoints
    found = await (store.head(thread_id) if checkpoint_id is None else store.get(thread_id, checkpoint_id))
    if found is None:
        raise missing(thread_id, checkpoint_id)
    return found


async def _write_record(engine: Engine, hold: WriterHold, pack_id: str, checkpoint: Checkpoint) -> tuple[Checkpoint, PackWriter]:
    writer = PackWriter(engine, hold.lease, pack_id, lookups=False)
    bare = msgspec.structs.replace(checkpoint, record_id=b"", recovered=False)
    record_id = await writer.add_record(msgspec.msgpack.encode(bare), RecordType.CHECKPOINT)
    return msgspec.structs.replace(bare, record_id=record_id), writer


async def surely(work: Callable[[], Awaitable[T]], done: Callable[[], Awaitable[T | None]]) -> T:
    """Do the work. Of an answer that was lost on the way nobody knows whether it was done: `done` looks, else it is repeated."""
    for attempt in range(ATTEMPTS):
        try:
            if attempt and (found := await done()) is not None:
                return found
            return await finish(work())
        except RepositoryError as error:
            if not error.retryable or attempt + 1 == ATTEMPTS:
                raise
            await asyncio.sleep(FIRST_PAUSE * 2**attempt)
    raise AssertionError("unreachable")


async def _with_record(engine: Engine, checkpoint: Checkpoint) -> Checkpoint | None:
    """The stored checkpoint, when its record is this one."""
    found = await engine.checkpoints.get(checkpoint.thread_id, checkpoint.id)
    return found if found is not None and found.record_id == checkpoint.record_id else None


async def fork(
    engine: Engine,
    thread_id: str,
    checkpoint_id: str | None,
    to_thread_id: str,
    *,
    new_id: str | None = None,
) -> Checkpoint:
    """Start the empty thread `to_thread_id` with a copy of a checkpoint's record (the head's by default).

    `new_id` is the id of the copy. Raises `SnapshotError` `MISSING_CHECKPOINT`, `CheckpointConflictError` `SAME_THREAD` or
    `DESTINATION_NOT_EMPTY`.
    """
    validate_thread_id(thread_id)
    validate_thread_id(to_thread_id)
    if new_id is not None:
        validate_id(new_id)
    if thread_id == to_thread_id:
        raise CheckpointConflictError(
            "A thread cannot be forked into itself.", code=Code.SAME_THREAD, hint="Choose another destination.", retryable=False
        )
    source = await _source(engine, thread_id, checkpoint_id)
    pack_id = new_pack_id()
    async with WriterHold(engine, to_thread_id, pack_id=pack_id) as hold:
        copy = msgspec.structs.replace(
            source,
            id=new_id or new_checkpoint_id(),
            thread_id=to_thread_id,
            parent_id=None,
            created_at=hold.lease.acquired_at,
            reason="fork-root",
            idempotency_key=None,
            source_thread_id=thread_id,
            source_id=source.id,
            deleted=(),
            revision=0,
        )
        copy, writer = await _write_record(engine, hold, pack_id, copy)
        commit = await writer.finish()
        done = await surely(lambda: engine.checkpoints.fork(hold.lease, copy, commit), lambda: _with_record(engine, copy))
        hold.released = True
        return done


async def rewind(engine: Engine, thread_id: str, checkpoint_id: str, *, new_id: str | None = None) -> Checkpoint:
    """Append a checkpoint with the content of an older one; `new_id` is its id. History is never rewritten."""
    if new_id is not None:
        validate_id(new_id)
    source = await _source(engine, thread_id, checkpoint_id)
    pack_id = new_pack_id()
    async with WriterHold(engine, thread_id, pack_id=pack_id) as hold:
        head = hold.grant.head
        if head is None:
            raise missing(thread_id, checkpoint_id)
        copy = msgspec.structs.replace(
            source,
            id=new_id or new_checkpoint_id(),
            parent_id=head.id,
            created_at=max(hold.lease.acquired_at, head.created_at + 1),
            reason="rewind",
            label=None,
            idempotency_key=None,
            source_thread_id=thread_id,
            source_id=source.id,
            deleted=hold.grant.deleted,
            revision=0,
        )
        copy, writer = await _write_record(engine, hold, pack_id, copy)
        return await commit_checkpoint(engine, hold, copy, await writer.finish(), source=(thread_id, source.id))


async def set_label(engine: Engine, thread_id: str, checkpoint_id: str, label: str | None) -> Checkpoint:
    """Give a checkpoint a label, or take it away with None. Raises `SnapshotError` `INVALID_ENTRY` for what no capture takes."""
    if label is not None:
        validate_text(label, "A label", code=Code.INVALID_ENTRY)
    source = await _source(engine, thread_id, checkpoint_id)
    pack_id = new_pack_id()
    async with WriterHold(engine, thread_id, pack_id=pack_id) as hold:
        changed, writer = await _write_record(engine, hold, pack_id, relabelled(source, label))
        commit = await writer.finish()
        return await surely(
            lambda: engine.checkpoints.set_label(hold.lease, checkpoint_id, label, changed.record_id, commit),
            lambda: _with_record(engine, changed),
        )


async def delete(engine: Engine, thread_id: str, checkpoint_id: str | None) -> Checkpoint:
    """Remove a checkpoint (the head when None) from its thread. What only it referred to becomes garbage."""
    source = await _source(engine, thread_id, checkpoint_id)
    async with WriterHold(engine, thread_id) as hold:
        return await surely(lambda: _delete(engine, hold, source), lambda: _when_gone(engine, source))


async def _delete(engine: Engine, hold: WriterHold, checkpoint: Checkpoint) -> Checkpoint:
    (removed,) = await engine.checkpoints.delete(hold.lease, [checkpoint.id])
    return removed


async def _when_gone(engine: Engine, checkpoint: Checkpoint) -> Checkpoint | None:
    """The checkpoint, once its thread has it no more."""
    return checkpoint if await engine.checkpoints.get(checkpoint.thread_id, checkpoint.id) is None else None
