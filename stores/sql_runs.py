"""Runs of scheduled jobs, as functions on a running transaction."""

from typing import Final

import msgspec
from sqlalchemy import ColumnElement, and_, delete, select

from snapcore.errors import CheckpointConflictError, Code, RepositoryError
from snapcore.runs import GOOD_OUTCOMES, RUNS_KEPT, JobRun

from . import sql_schema as schema
from .sql_transactions import Transaction

__all__ = ["drop_old", "last_runs", "list_runs", "record"]

_RUNS = schema.job_runs
_NEWEST_FIRST: Final = (_RUNS.c.started_at.desc(), _RUNS.c.id.desc())
_OLD: Final = 400 * 86_400 * 1_000_000  # longer than any schedule: a yearly job has a last run too

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(JobRun)


def record(tx: Transaction, run: JobRun) -> None:
    """Keep a checked run, and drop those of its job and thread that it makes too old; see `RunStore.record_run`."""
    stored = tx.connection.scalar(select(_RUNS.c.record).where(_RUNS.c.id == run.id))
    if stored is not None:
        if _decode(stored) != run:
            raise CheckpointConflictError(
                f"The id {run.id} of a run is taken.", code=Code.DUPLICATE_ID, hint="Use a new random id."
            )
        return
    tx.connection.execute(
        _RUNS.insert().values(
            id=run.id,
            job=run.job,
            thread_id=run.thread_id,
            started_at=run.started_at,
            outcome=run.outcome,
            record=_encoder.encode(run),
        )
    )
    _trim(tx, run.job, run.thread_id)


def list_runs(tx: Transaction, job: str | None, thread_id: str | None, limit: int) -> list[JobRun]:
    """Up to `limit` runs, newest first."""
    newest = select(_RUNS.c.record).order_by(*_NEWEST_FIRST).limit(limit)
    if job is not None:
        newest = newest.where(_RUNS.c.job == job)
    if thread_id is not None:
        newest = newest.where(_RUNS.c.thread_id == thread_id)
    return [_decode(stored) for stored in tx.connection.scalars(newest)]


def last_runs(tx: Transaction) -> list[JobRun]:
    """The newest run of each job in each thread, and the newest good one where that is another."""
    # one look into the index for each job and thread: ten times faster than to number all runs
    pairs = select(_RUNS.c.job, _RUNS.c.thread_id).distinct().subquery("pairs")
    mine = and_(_RUNS.c.job == pairs.c.job, _RUNS.c.thread_id == pairs.c.thread_id)
    found: dict[str, bytes] = {}
    for which in (mine, and_(mine, _good())):
        newest = select(_RUNS.c.id).where(which).order_by(*_NEWEST_FIRST).limit(1).correlate(pairs).scalar_subquery()
        chosen = select(_RUNS.c.id, _RUNS.c.record).where(_RUNS.c.id.in_(select(newest).select_from(pairs)))
        found.update((row.id, row.record) for row in tx.connection.execute(chosen))
    runs = [_decode(stored) for stored in found.values()]
    return sorted(runs, key=lambda run: (run.job, run.thread_id, run.started_at, run.id))


def drop_old(tx: Transaction) -> None:
    """Drop what began so long ago that its job is surely gone."""
    tx.connection.execute(delete(_RUNS).where(_RUNS.c.started_at <= tx.now - _OLD))


def _trim(tx: Transaction, job: str, thread_id: str) -> None:
    mine = and_(_RUNS.c.job == job, _RUNS.c.thread_id == thread_id)
    surplus = tx.connection.scalars(select(_RUNS.c.id).where(mine).order_by(*_NEWEST_FIRST).offset(RUNS_KEPT)).all()
    if not surplus:
        return
    well = tx.connection.scalar(select(_RUNS.c.id).where(mine, _good()).order_by(*_NEWEST_FIRST).limit(1))
    tx.connection.execute(delete(_RUNS).where(_RUNS.c.id.in_([i for i in surplus if i != well])))


def _good() -> ColumnElement[bool]:
    return _RUNS.c.outcome.in_(GOOD_OUTCOMES)


def _decode(stored: bytes) -> JobRun:
    try:
        return _decoder.decode(stored)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RepositoryError(
            "The database holds a run that cannot be read.", code=Code.DAMAGED, hint="Put a copy of its file back."
        ) from error
