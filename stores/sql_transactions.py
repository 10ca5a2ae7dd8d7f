"""Transactions of the SQL store: each is one function that runs in a thread of the store's own.

SQLAlchemy is used synchronously: a transaction is then a plain function that no cancellation can cut in two, and no
statement costs a change of threads. One thread writes, since all writers take one lock anyway; two read.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection, inspect, select, update
from sqlalchemy.exc import DBAPIError

from snapcore.errors import Code, RepositoryError

from . import sql_schema as schema
from .sql_dialects import Database

__all__ = ["Transaction", "Transactions", "no_repository"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Transaction:
    """A running transaction. `seq` is its commit sequence number, 0 when it only reads; `now` the database's clock."""

    connection: Connection
    seq: int
    now: int


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
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="snapcore-sql") if database.shared_by_threads else self._writer

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a short transaction that sees one state of the database."""

        def run() -> T:
            self._check_schema()
            with self._database.connect(writes=False) as connection, connection.begin():
                return work(Transaction(connection, 0, self._now(connection)))

        return await self._run(self._readers, run)

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` under the repository's lock; whatever it raises undoes all of it."""

        def run() -> T:
            self._check_schema()
            with self._database.connect(writes=True) as connection, connection.begin():
                seq = _lock(connection)
                if seq is None:
                    raise no_repository(self._database.url)
                return work(Transaction(connection, seq, self._now(connection)))

        return await self._run(self._writer, run)

    async def initialize(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in the transaction that creates the schema, unless there is one already."""

        def run() -> T:
            self._database.create()
            with self._database.connect(writes=True) as connection, connection.begin():
                if stored_revision(connection) is None:
                    schema.metadata.create_all(connection)
                    connection.execute(schema.versions.insert().values(version_num=schema.HEAD_REVISION))
                return work(connection)

        return await self._run(self._writer, run)

    async def exists(self) -> bool:
        """Whether there is a database with a schema in it."""

        def run() -> bool:
            if not self._database.exists():
                return False
            with self._database.connect(writes=False) as connection, connection.begin():
                return stored_revision(connection) is not None

        return await self._run(self._readers, run)

    async def close(self) -> None:
        """Let running transactions end and close every connection. Idempotent."""
        self._closed = True
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        self._readers.shutdown()
        self._writer.shutdown()
        self._database.dispose()

    def _now(self, connection: Connection) -> int:
        return self._clock() if self._clock else self._database.now(connection)

    async def _run(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        def guarded() -> T:
            try:
                return work()
            except DBAPIError as error:
                raise self._database.explain(error) from error

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
            with self._database.connect(writes=False) as connection, connection.begin():
                revision = stored_revision(connection)
            if revision is None:
                raise no_repository(self._database.url)
            if revision != schema.HEAD_REVISION:
                self._upgrade()
            self._ready = True

    def _upgrade(self) -> None:
        from .sql_migrate import knows, upgrade  # here: Alembic takes 0.3 s to import and is hardly ever needed

        with self._database.connect(writes=True) as connection, connection.begin():
            revision = stored_revision(connection)  # once more, now that nobody else can be upgrading
            if revision is None or not knows(revision):
                raise RepositoryError(
                    f"The database {self._database.url} has schema {revision}, which this release does not know.",
                    code=Code.UNSUPPORTED_FORMAT,
                    hint="Use a newer release of snapcore.",
                )
            upgrade(connection)


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


def _lock(connection: Connection) -> int | None:
    """Lock the repository row and take the next sequence number; None when there is no such row."""
    row = schema.repository
    seq: int | None = connection.scalar(update(row).values(commit_seq=row.c.commit_seq + 1).returning(row.c.commit_seq))
    return seq
