"""The stat cache, as functions on a running transaction: what lets a capture skip files that did not change."""

from collections.abc import Collection, Iterable, Sequence

from sqlalchemy import delete, select, update

from snapcore.model import StatPage, StatUpdate

from . import sql_schema as schema
from .sql_dialects import batches
from .sql_transactions import Transaction

__all__ = ["bases", "digests", "pages", "save"]

_SANDBOXES = schema.sandboxes
_ROWS = schema.stat_rows


def bases(tx: Transaction, sandbox_id: str, roots: Collection[str]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """By root: the manifest that the cache aligns with, and the redaction fingerprint it was made under."""
    rows = tx.connection.execute(
        select(_SANDBOXES.c.root, _SANDBOXES.c.manifest, _SANDBOXES.c.redaction).where(
            _SANDBOXES.c.sandbox_id == sandbox_id, _SANDBOXES.c.root.in_(roots)
        )
    ).all()
    return {row.root: row.manifest for row in rows}, {row.root: row.redaction for row in rows}


def digests(tx: Transaction, sandbox_id: str, root: str) -> dict[bytes, bytes]:
    """Digest of every stat page by page id."""
    number = _number(tx, sandbox_id, root)
    rows = tx.connection.execute(select(_ROWS.c.page_id, _ROWS.c.digest).where(_ROWS.c.sandbox_number == number))
    return {row[0]: row[1] for row in rows}


def pages(tx: Transaction, sandbox_id: str, root: str, page_ids: Collection[bytes]) -> dict[bytes, StatPage]:
    """Those of the stat pages that are there."""
    number = _number(tx, sandbox_id, root)
    statement = select(_ROWS.c.page_id, _ROWS.c.digest, _ROWS.c.data).where(_ROWS.c.sandbox_number == number)
    return {
        row[0]: StatPage(*row)
        for some in batches(page_ids)
        for row in tx.connection.execute(statement.where(_ROWS.c.page_id.in_(some)))
    }


def save(tx: Transaction, updates: Iterable[StatUpdate]) -> None:
    """Apply updates."""
    for change in updates:
        number = _align(tx, change)
        if number is None:
            number = _add(tx, change)
        elif change.replace:
            tx.connection.execute(delete(_ROWS).where(_ROWS.c.sandbox_number == number))
        else:
            _drop(tx, number, change.dropped)
            _drop(tx, number, [page.page_id for page in change.saved])
        saved = {page.page_id: page for page in change.saved}
        if saved:
            tx.connection.execute(
                _ROWS.insert(),
                [
                    {"sandbox_number": number, "page_id": page.page_id, "digest": page.digest, "data": page.data}
                    for page in saved.values()
                ],
            )


def _align(tx: Transaction, change: StatUpdate) -> int | None:
    """Align the change's sandbox and root with its manifest. Their number, None when there is none yet."""
    here = (_SANDBOXES.c.sandbox_id == change.sandbox_id, _SANDBOXES.c.root == change.root)
    aligning = update(_SANDBOXES).where(*here).values(_state(tx, change)).returning(_SANDBOXES.c.number)
    number: int | None = tx.connection.execute(aligning).scalar_one_or_none()
    return number


def _add(tx: Transaction, change: StatUpdate) -> int:
    key = {"sandbox_id": change.sandbox_id, "root": change.root}
    adding = _SANDBOXES.insert().values(key | _state(tx, change)).returning(_SANDBOXES.c.number)
    number: int = tx.connection.execute(adding).scalar_one()
    return number


def _state(tx: Transaction, change: StatUpdate) -> dict[str, bytes | int]:
    return {"manifest": change.manifest, "redaction": change.redaction, "used_at": tx.now}


def _drop(tx: Transaction, number: int, page_ids: Sequence[bytes]) -> None:
    for some in batches(page_ids):
        tx.connection.execute(delete(_ROWS).where(_ROWS.c.sandbox_number == number, _ROWS.c.page_id.in_(some)))


def _number(tx: Transaction, sandbox_id: str, root: str) -> int | None:
    return tx.connection.scalar(
        select(_SANDBOXES.c.number).where(_SANDBOXES.c.sandbox_id == sandbox_id, _SANDBOXES.c.root == root)
    )
