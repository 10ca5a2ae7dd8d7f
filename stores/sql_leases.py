"""Writer leases and readers' pins, as functions on a running transaction."""

import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Row, delete, or_, select, update

from snapcore.errors import (
    CheckpointConflictError,
    CheckpointWriterConflictError,
    CheckpointWriterLostError,
    Code,
    RepositoryError,
    SnapshotError,
)
from snapcore.hosts import is_gone
from snapcore.model import Holder, WriterLease
from snapcore.protocols import Pin

from . import sql_schema as schema
from .sql_transactions import Transaction

__all__ = ["acquire", "add_pin", "check", "check_token", "new_token", "release", "remove", "remove_pin", "renew", "renew_pin"]

_TOKEN: Final = re.compile(r"[0-9a-f]{32}")
_LEASES = schema.writer_leases
_PINS = schema.pins


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_hex(16)


def check_token(token: object) -> None:
    """Refuse a token that is not 32 hex digits."""
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise SnapshotError("A lease's token must be 32 hex digits.", code=Code.INVALID_REQUEST)


def acquire(tx: Transaction, thread_id: str, ttl: int, holder: Holder | None, token: str) -> WriterLease:
    """Take the thread's lease; the transaction's sequence number is its fence, so that every later one is larger.

    A lease in force with this very token is granted again: the answer to an earlier call was lost on the way.
    """
    rows = tx.connection.execute(select(_LEASES).where(or_(_LEASES.c.thread_id == thread_id, _LEASES.c.token == token))).all()
    if any(row.thread_id != thread_id for row in rows):
        raise CheckpointConflictError("The token is another lease's.", code=Code.DUPLICATE_ID, hint="Use a random token.")
    if rows and rows[0].token == token:
        return _again(tx, rows[0], thread_id, ttl)
    if rows:
        _require_free(tx, rows[0], thread_id)
        tx.connection.execute(delete(_LEASES).where(_LEASES.c.thread_id == thread_id))
    holder = holder or Holder()
    lease = WriterLease(
        thread_id=thread_id,
        token=token,
        fence=tx.seq,
        acquired_at=tx.now,
        expires_at=tx.now + ttl,
        ttl=ttl,
    )
    tx.connection.execute(
        _LEASES.insert().values(
            thread_id=thread_id,
            token=lease.token,
            fence=lease.fence,
            expires_at=lease.expires_at,
            host=holder.host,
            pid=holder.pid,
            boot_id=holder.boot_id,
            started=holder.started,
        )
    )
    return lease


def _again(tx: Transaction, row: Row[*tuple[Any, ...]], thread_id: str, ttl: int) -> WriterLease:
    # whoever asks has never seen this lease, so it was not renewed: the time it was acquired need not be stored
    lease = WriterLease(
        thread_id=thread_id,
        token=row.token,
        fence=row.fence,
        acquired_at=row.expires_at - ttl,
        expires_at=row.expires_at,
        ttl=ttl,
    )
    check(tx, lease)
    return lease


def _require_free(tx: Transaction, row: Row[*tuple[object, ...]], thread_id: str) -> None:
    holder = Holder(host=row.host, pid=row.pid, boot_id=row.boot_id, started=row.started)
    if row.expires_at > tx.now and not is_gone(holder):
        seconds = (row.expires_at - tx.now) / 1_000_000
        raise CheckpointWriterConflictError(
            f"Thread {thread_id!r} is being written by {holder.describe()}.",
            holder=holder.describe(),
            expires_at=row.expires_at,
            hint=f"Wait for it, or for its lease to run out in {seconds:.0f} s.",
        )


def check(tx: Transaction, lease: WriterLease) -> None:
    """Raise `CheckpointWriterLostError` unless the lease is in force: by token, fence and the database's clock."""
    row = tx.connection.execute(
        select(_LEASES.c.token, _LEASES.c.fence, _LEASES.c.expires_at).where(_LEASES.c.thread_id == lease.thread_id)
    ).one_or_none()
    if row is None or row.token != lease.token or row.fence != lease.fence:
        what = "was released or taken over"
    elif row.expires_at <= tx.now:
        what = "has run out"
    else:
        return
    raise CheckpointWriterLostError(
        f"The lease on thread {lease.thread_id!r} {what}; nothing was changed.", hint="Start again with a new lease."
    )


def renew(tx: Transaction, lease: WriterLease) -> WriterLease:
    """Extend the lease by its ttl from now."""
    check(tx, lease)
    expires_at = tx.now + lease.ttl
    tx.connection.execute(update(_LEASES).where(_LEASES.c.thread_id == lease.thread_id).values(expires_at=expires_at))
    return WriterLease(
        thread_id=lease.thread_id,
        token=lease.token,
        fence=lease.fence,
        acquired_at=lease.acquired_at,
        expires_at=expires_at,
        ttl=lease.ttl,
    )


def release(tx: Transaction, lease: WriterLease) -> None:
    """Give the lease up."""
    check(tx, lease)
    remove(tx, lease)


def remove(tx: Transaction, lease: WriterLease) -> None:
    """Give up a lease that this transaction has checked."""
    tx.connection.execute(delete(_LEASES).where(_LEASES.c.thread_id == lease.thread_id))


def add_pin(tx: Transaction, roots: Sequence[bytes], ttl: int) -> Pin:
    """Hold records until `ttl` microseconds from now. Pins that have run out are cleared away."""
    tx.connection.execute(delete(_PINS).where(_PINS.c.expires_at <= tx.now))
    pin = Pin(id=new_token(), roots=tuple(roots), expires_at=tx.now + ttl)
    tx.connection.execute(_PINS.insert().values(id=pin.id, roots=b"".join(roots), expires_at=pin.expires_at))
    return pin


def renew_pin(tx: Transaction, pin: Pin, ttl: int) -> Pin:
    """Hold for `ttl` microseconds from now. A pin that has run out may have lost its records already, and is refused."""
    expires_at = tx.connection.scalar(select(_PINS.c.expires_at).where(_PINS.c.id == pin.id))
    if expires_at is None or expires_at <= tx.now:
        raise RepositoryError(
            "The hold on the records that are being read has run out.",
            code=Code.STORE_UNAVAILABLE,
            hint="Start the restore again.",
            retryable=True,
        )
    tx.connection.execute(update(_PINS).where(_PINS.c.id == pin.id).values(expires_at=tx.now + ttl))
    return Pin(id=pin.id, roots=pin.roots, expires_at=tx.now + ttl)


def remove_pin(tx: Transaction, pin: Pin) -> None:
    """Let go."""
    tx.connection.execute(delete(_PINS).where(_PINS.c.id == pin.id))
