"""Transactions of the SQL store: each is one function that runs in a thread of the store's own.

SQLAlchemy is used synchronously: a transaction is then a plain function that no cancellation can cut in two, and no
statement costs a change of threads. One thread writes, since all writers take one lock anyway; two read.
"""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Final, TypeVar

from sqlalchemy import ColumnElement, Connection, inspect, select, update
from sqlalchemy.exc import DBAPIError

from snapcore.errors import Code, RepositoryError, SnapshotError

from . import sql_schema as schema
from .sql_database import CONNECTIONS, Database

__all__ = ["Transaction", "Transactions", "no_repository"]

T = TypeVar("T")


_ATTEMPTS: Final = 6  # of a transaction that the database gives up
_FIRST_PAUSE: Final = 0.02


class Transaction:
    """A running transaction. `seq` is its commit sequence number, 0 when it only reads."""

    def __init__(self, connection: Connection, seq: int, clock: Callable[[], int]) -> None:
        self.connection = connection
        self.seq = seq
        self._clock = clock

    @cached_property
    def now(self) -> int:
        """The database's clock, microseconds since the epoch: of the moment it is first asked for, since a transaction that
        reads has seldom use for it; of one that writes, of the moment it got the repository's lock."""
        return self._clock()


class Transactions:
    """Runs transactions against a database, and checks once that its schema is one this release knows.

    `clock` replaces the database's clock in tests. A caller that is cancelled waits for its running transaction to end
    and is then told; a transaction that has not begun is dropped.
    """

    def __init__(self, database: Database, clock: Callable[[], int] | None) -> None:
        self._database = database
        self._clock = clock
        self._ready = False
        self._closed = False
        self._ready_lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="snapcore-sql")
        self._readers = self._writer
        if database.shared_by_threads:
            self._readers = ThreadPoolExecutor(CONNECTIONS - 1, thread_name_prefix="snapcore-sql")

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a short transaction that sees one state of the database."""

        def look(connection: Connection) -> T:
            return work(Transaction(connection, 0, lambda: self._now(connection)))

        def run() -> T:
            self._check_schema()
            return self._transact(look, writes=False, idempotent=True)

        return await self._run(self._readers, run)

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` under the repository's lock; whatever it raises undoes all of it. It is run again when the database
        gives the transaction up, so it changes nothing else."""

        def change(connection: Connection) -> T:
            locked = _lock(connection, self._database.clock())
            if locked is None:
                raise no_repository(self._database.url)
            seq, now = locked
            return work(Transaction(connection, seq, self._clock or (lambda: now)))

        def run() -> T:
            self._check_schema()
            return self._transact(change, writes=True)

        return await self._run(self._writer, run)

    async def initialize(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which may be repeated, in the transaction that creates the schema, unless there is one already."""

        def make(connection: Connection) -> T:
            self._database.prepare(connection)
            if stored_revision(connection) is None:
                # never over tables of something else, which may be called the same
                schema.metadata.create_all(connection, checkfirst=False)
                connection.execute(schema.versions.insert().values(version_num=schema.HEAD_REVISION))
            return work(connection)

        def run() -> T:
            self._database.create()
            return self._transact(make, writes=True, idempotent=True)

        return await self._run(self._writer, run)

    async def exists(self) -> bool:
        """Whether there is a database with a schema in it."""

        def run() -> bool:
            if not self._database.exists():
                return False
            revision = self._transact(stored_revision, writes=False, idempotent=True)
            if revision == schema.HEAD_REVISION:
                self._ready = True  # so that the next transaction need not look again
            return revision is not None

        return await self._run(self._readers, run)

    async def close(self) -> None:
        """Let running transactions end and close every connection. Idempotent."""
        self._closed = True
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        self._readers.shutdown()
        self._writer.shutdown()
        self._database.dispose()

    def _transact(self, work: Callable[[Connection], T], *, writes: bool, idempotent: bool = False) -> T:
        """One transaction, run again while the database says that it was undone and may succeed at once.

        Of a COMMIT whose answer was lost nobody knows whether it was done: only what is `idempotent` is run again then.
        """
        deadline = time.monotonic() + self._database.patience
        for attempt in itertools.count(1):
            committing = False
            try:
                with self._database.connect(writes=writes) as connection, connection.begin() as transaction:
                    result = work(connection)
                    committing = not idempotent
                    transaction.commit()
                    return result
            except DBAPIError as error:
                if attempt == _ATTEMPTS or time.monotonic() >= deadline:
                    raise
                if not self._database.undone(error, committing=committing):
                    raise
            time.sleep(_FIRST_PAUSE * 2**attempt * random.random())  # noqa: S311 (spreads out those who collided)
        raise AssertionError("unreachable")

    def _now(self, connection: Connection) -> int:
        if self._clock:
            return self._clock()
        now: int = connection.execute(select(self._database.clock())).scalar_one()
        return now

    async def _run(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        def guarded() -> T:
            try:
                return work()
            except DBAPIError as error:
                raise self._database.explain(error) from error
            except UnicodeEncodeError as error:
                raise SnapshotError("A text holds a lone surrogate, which is not valid text.", code=Code.INVALID_ENTRY) from error

        if self._closed:
            raise RepositoryError(f"The store {self._database.url} is closed.", code=Code.STORE_UNAVAILABLE)
        running = executor.submit(guarded)
        waiting = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            running.cancel()  # only what has not begun
            while not waiting.done():
                try:
                    await asyncio.wait({waiting})
                except asyncio.CancelledError:
                    continue
            if not waiting.cancelled():
                waiting.exception()  # seen: the caller is told of its cancellation instead
            raise

    def _check_schema(self) -> None:
        with self._ready_lock:
            if self._ready:
                return
            if not self._database.exists():
                raise no_repository(self._database.url)
            revision = self._transact(stored_revision, writes=False, idempotent=True)
            if revision is None:
                raise no_repository(self._database.url)
            if revision != schema.HEAD_REVISION:
                self._upgrade()
            self._ready = True

    def _upgrade(self) -> None:
        from .sql_migrate import knows, upgrade  # here: Alembic takes 0.3 s to import and is hardly ever needed

        def work(connection: Connection) -> None:
            self._database.prepare(connection)
            revision = stored_revision(connection)  # once more, now that nobody else can be upgrading
            if revision is None or not knows(revision):
                raise RepositoryError(
                    f"The database {self._database.url} has schema {revision}, which this release does not know.",
                    code=Code.UNSUPPORTED_FORMAT,
                    hint="Use a newer release of snapcore.",
                )
            upgrade(connection)

        self._transact(work, writes=True, idempotent=True)


def stored_revision(connection: Connection) -> str | None:
    """The Alembic revision of the database's schema, None when it has none."""
    if not inspect(connection).has_table(schema.versions.name):
        return None
    return connection.scalar(select(schema.versions.c.version_num))


def no_repository(url: str) -> RepositoryError:
    """The error for a database that was never initialised."""
    return RepositoryError(
        f"The database {url} holds no repository.", code=Code.NO_REPOSITORY, hint="Create one with `snapcore init`."
    )


def _lock(connection: Connection, clock: ColumnElement[int]) -> tuple[int, int] | None:
    """Lock the repository row; the next sequence number and the time at which the lock was got. None when there is no row."""
    row = schema.repository
    locking = update(row).values(commit_seq=row.c.commit_seq + 1).returning(row.c.commit_seq, clock)
    found = connection.execute(locking).one_or_none()
    return None if found is None else (found[0], found[1])
