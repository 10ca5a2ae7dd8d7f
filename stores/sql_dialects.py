"""Everything that differs between databases: connecting, beginning, locking, conflicts, clocks and what errors mean.

SQLite is the only dialect so far. What is here and nowhere else: SQL or driver behaviour that another database would not
share. The other `sql_*` modules use SQLAlchemy Core alone.
"""

import errno
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Insert,
    LargeBinary,
    Subquery,
    Table,
    bindparam,
    column,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import NullPool, QueuePool, StaticPool

from snapcore.errors import Code, RepositoryError

__all__ = ["Database", "batches", "insert_or_ignore", "insert_rows", "wanted_ids"]

_BATCH: Final = 500  # ids in one IN list: SQLAlchemy renders a statement for each length that occurs
_WRITES: Final = "snapcore_writes"

_CODES: Final = {
    sqlite3.SQLITE_BUSY: (Code.STORE_UNAVAILABLE, "is locked by another process", True),
    sqlite3.SQLITE_LOCKED: (Code.STORE_UNAVAILABLE, "is locked by another connection", True),
    sqlite3.SQLITE_IOERR: (Code.STORE_UNAVAILABLE, "cannot be read or written", True),
    sqlite3.SQLITE_NOMEM: (Code.STORE_UNAVAILABLE, "needs more memory than there is", True),
    sqlite3.SQLITE_READONLY: (Code.READ_ONLY, "is read-only", False),
    sqlite3.SQLITE_FULL: (Code.STORE_FULL, "cannot grow: no space is left", True),
    sqlite3.SQLITE_CORRUPT: (Code.DAMAGED, "is damaged", False),
    sqlite3.SQLITE_NOTADB: (Code.DAMAGED, "is no SQLite database", False),
    sqlite3.SQLITE_CANTOPEN: (Code.ACCESS_DENIED, "cannot be opened", False),
    sqlite3.SQLITE_PERM: (Code.ACCESS_DENIED, "may not be accessed", False),
    sqlite3.SQLITE_AUTH: (Code.ACCESS_DENIED, "may not be accessed", False),
}


def batches(ids: Collection[bytes] | Collection[str] | Collection[int]) -> Iterator[list[Any]]:
    """The ids sorted, in lists short enough for one IN."""
    ordered: list[Any] = sorted(ids)
    for start in range(0, len(ordered), _BATCH):
        yield ordered[start : start + _BATCH]


def wanted_ids(ids: Collection[bytes]) -> Subquery:
    """A selectable with one column `id` that holds these 32-byte record ids, to be joined with what is looked up.

    They go to the database as one value: a third faster than IN lists for 25,000 ids, and of no limited number.
    """
    joined = b"".join(sorted(ids))  # in the order of the key, which keeps the pages that are read together
    return (
        text(
            "WITH RECURSIVE place(i) AS ("
            "SELECT 1 WHERE :size > 0 UNION ALL SELECT i + 32 FROM place WHERE i + 32 <= :size"
            ") SELECT substr(:ids, i, 32) AS id FROM place"
        )
        .bindparams(bindparam("ids", joined, LargeBinary, unique=True), bindparam("size", len(joined), unique=True))
        .columns(column("id", LargeBinary))
        .subquery("wanted")
    )


def insert_or_ignore(table: Table) -> Insert:
    """INSERT that passes over rows whose key is taken; read them back in a statement of its own."""
    return sqlite_insert(table).on_conflict_do_nothing()


def insert_rows(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """As `insert_or_ignore`, for many rows with a value for each column of the table in order.

    The driver takes the tuples as they are: SQLAlchemy's handling of parameters costs more than the insertion.
    """
    if not rows:
        return
    quote_name = connection.dialect.identifier_preparer.quote
    names = ", ".join(quote_name(column.name) for column in table.columns)
    marks = ", ".join("?" for _ in table.columns)
    statement = f"INSERT INTO {quote_name(table.name)} ({names}) VALUES ({marks}) ON CONFLICT DO NOTHING"  # noqa: S608
    connection.exec_driver_sql(statement, list(rows))


class Database:
    """Connections to one database. Transactions are synchronous; `Transactions` runs them in threads.

    `busy_timeout` is how long to wait for another process's lock, in seconds. Raises `RepositoryError`
    `UNKNOWN_SCHEME` for a URL that is not of a supported database.
    """

    def __init__(self, url: str, *, busy_timeout: float = 30.0) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError:
            raise RepositoryError(
                "The database address is not a URL.",
                code=Code.UNKNOWN_SCHEME,
                hint="Use sqlite:///folder/snapcore.db, for example.",
            ) from None
        if parsed.get_backend_name() != "sqlite":
            raise RepositoryError(
                f"Databases of kind {parsed.get_backend_name()!r} are not supported.",
                code=Code.UNKNOWN_SCHEME,
                hint="Use sqlite:///folder/snapcore.db, for example.",
            )
        self.url = _public(parsed)
        self.path = None if parsed.database in (None, "", ":memory:") else os.path.abspath(str(parsed.database))
        self._busy_timeout = busy_timeout
        self._engine: Engine | None = None

    @property
    def shared_by_threads(self) -> bool:
        """Whether several connections see the same data. A database in memory has one connection and one thread."""
        return self.path is not None

    def exists(self) -> bool:
        """Whether there is a database to connect to."""
        return self.path is None or os.path.exists(self.path)

    def create(self) -> None:
        """Make the file, and the folders that lead to it, readable by their owner alone."""
        if self.path is None:
            return
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            code = Code.STORE_FULL if error.errno == errno.ENOSPC else Code.ACCESS_DENIED
            raise RepositoryError(f"The database {self.url} cannot be created: {error.strerror}.", code=code) from error
        deadline = time.monotonic() + self._busy_timeout
        with self.engine.connect() as connection:
            while True:
                try:
                    # Kept in the file. Readers and the one writer do not wait for each other in this mode.
                    connection.exec_driver_sql("PRAGMA journal_mode=WAL")
                    return
                except OperationalError as error:
                    # two that create the file at once: SQLite does not wait here by itself
                    busy = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
                    if not busy or time.monotonic() >= deadline:
                        raise
                time.sleep(0.01)

    @property
    def engine(self) -> Engine:
        """The engine, made when first asked for."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def dispose(self) -> None:
        """Close every connection."""
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def connect(self, *, writes: bool) -> Connection:
        """A connection whose transactions take the write lock at once (`writes`), or only read."""
        return self.engine.connect().execution_options(**{_WRITES: writes})

    def now(self, connection: Connection) -> int:
        """The database's clock, in microseconds since the epoch: for SQLite, that of the host."""
        del connection
        return time.time_ns() // 1000

    def explain(self, error: DBAPIError) -> RepositoryError:
        """What a driver's error means to the caller."""
        number = getattr(error.orig, "sqlite_errorcode", 0)
        code, what, retryable = _CODES.get(number & 0xFF, (Code.STORE_UNAVAILABLE, f"failed: {error.orig}", False))
        if code is Code.ACCESS_DENIED and not self.exists():
            code, what = Code.NO_REPOSITORY, "does not exist"
        if code is Code.STORE_UNAVAILABLE and self._disk_is_full():
            code, what = Code.STORE_FULL, "cannot be used on a full disk"
        hint = {
            Code.READ_ONLY: "Make it writable, or only read.",
            Code.STORE_FULL: "Make room, then try again.",
            Code.DAMAGED: "Put a copy of it back.",
            Code.STORE_UNAVAILABLE: "Try again later." if retryable else "",
        }.get(code, "")
        return RepositoryError(f"The database {self.url} {what}.", code=code, hint=hint, retryable=retryable)

    def _disk_is_full(self) -> bool:
        """Whether the file's disk has no room at all: SQLite then cannot even read, and does not say why."""
        if self.path is None:
            return False
        try:
            return os.statvfs(os.path.dirname(self.path)).f_bavail == 0
        except OSError:
            return False

    def _make_engine(self) -> Engine:
        options: dict[str, Any]
        if self.path is None:
            options = {"poolclass": StaticPool}
        elif self._immutable():
            options = {"poolclass": NullPool}  # looks again for a writer before each transaction
        else:
            options = {"poolclass": QueuePool, "pool_size": 3, "max_overflow": 0}
        engine = create_engine("sqlite://", creator=self._open, hide_parameters=True, **options)
        event.listen(engine, "begin", _begin)
        return engine

    def _immutable(self) -> bool:
        """Whether the file lies where no lock file can be made and nobody has it open for writing.

        SQLite refuses to read such a database in WAL mode unless told that it does not change.
        """
        if self.path is None or not os.path.exists(self.path):
            return False
        return not os.access(os.path.dirname(self.path), os.W_OK) and not os.path.exists(self.path + "-wal")

    def _open(self) -> sqlite3.Connection:
        target = ":memory:"
        if self.path is not None:
            target = f"file:{quote(self.path)}?" + ("mode=ro&immutable=1" if self._immutable() else "mode=rw")
        connection = sqlite3.connect(target, uri=True, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA cache_size=-16384")  # KiB: record ids are random, so their rows are all over the file
        except sqlite3.Error:
            connection.close()
            raise
        return connection


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES)
    if writes is not None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _public(url: URL) -> str:
    """The URL without user, password and options, any of which may be a credential."""
    return URL.create(url.drivername, host=url.host, port=url.port, database=url.database).render_as_string()
