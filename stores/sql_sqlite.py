"""SQLite: in a file, in memory, or in a file that is thrown away."""

import errno
import os
import sqlite3
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import URL, BigInteger, ColumnElement, Connection, Engine, Table, create_engine, event, literal
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool, QueuePool, StaticPool

from snapcore.errors import Code, RepositoryError

from .sql_database import CONNECTIONS, Database, begin_mode

__all__ = ["SqliteDatabase", "insert_rows"]

TEMPORARY: Final = ":temporary:"  # what SQLite keeps in memory, and what is too much for that in a file that nobody else sees

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


def insert_rows(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, with a value for each column in order, but for those whose key is taken."""
    quote_name = connection.dialect.identifier_preparer.quote
    names = ", ".join(quote_name(column.name) for column in table.columns)
    marks = ", ".join("?" for _ in table.columns)
    statement = f"INSERT INTO {quote_name(table.name)} ({names}) VALUES ({marks}) ON CONFLICT DO NOTHING"  # noqa: S608
    connection.exec_driver_sql(statement, list(rows))


class SqliteDatabase(Database):
    """A SQLite file, or a database that lives as long as this object: in memory (`sqlite://`), or in memory as far as there is
    room in its cache (`sqlite:///:temporary:`)."""

    def __init__(self, url: URL, *, busy_timeout: float) -> None:
        super().__init__()
        # without options, any of which may be a credential
        self.url = f"{url.drivername}://" + ("" if url.database is None else f"/{quote(os.fsencode(url.database), safe=' +/')}")
        self.patience = busy_timeout
        self.path = None if url.database in (None, "", ":memory:", TEMPORARY) else os.path.abspath(str(url.database))
        self._pathless = "" if url.database == TEMPORARY else ":memory:"

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
        deadline = time.monotonic() + self.patience
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

    def clock(self) -> ColumnElement[int]:
        """The host's clock. A transaction that writes has the lock since it began, so now is not too early to ask."""
        return literal(time.time_ns() // 1000, BigInteger)

    def explain(self, error: DBAPIError) -> RepositoryError:
        """What a driver's error means to the caller."""
        number = getattr(error.orig, "sqlite_errorcode", 0)
        code, what, retryable = _CODES.get(number & 0xFF, (Code.STORE_UNAVAILABLE, f"failed: {error.orig}", False))
        if code is Code.ACCESS_DENIED and not self.exists():
            code, what = Code.NO_REPOSITORY, "does not exist"
        if code is Code.STORE_UNAVAILABLE and self._disk_is_full():
            code, what = Code.STORE_FULL, "cannot be used on a full disk"
        if number & 0xFF == sqlite3.SQLITE_ERROR and str(error.orig).endswith("already exists"):
            code, what = Code.WRONG_DATABASE, "holds tables of something else"
        if number & 0xFF == sqlite3.SQLITE_ERROR and str(error.orig).startswith(("no such table", "no such column")):
            code, what = Code.DAMAGED, "lacks a table or a column"
        hint = {
            Code.WRONG_DATABASE: "Give the repository a database of its own.",
            Code.READ_ONLY: "Make it writable, or only read.",
            Code.STORE_FULL: "Make room, then try again.",
            Code.DAMAGED: "Put a copy of it back; without one, move it away: 'snapcore repair' makes a new one from the packs.",
            Code.ACCESS_DENIED: "Check the permissions of the file and of its folder.",
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
            options = {"poolclass": QueuePool, "pool_size": CONNECTIONS, "max_overflow": 0}
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
        target = self._pathless
        if self.path is not None:
            target = f"file:{quote(os.fsencode(self.path))}?" + ("mode=ro&immutable=1" if self._immutable() else "mode=rw")
        connection = sqlite3.connect(target, uri=True, timeout=self.patience, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA cache_size=-16384")  # KiB: record ids are random, so their rows are all over the file
        except sqlite3.Error:
            connection.close()
            raise
        return connection


def _begin(connection: Connection) -> None:
    writes = begin_mode(connection)
    if writes is not None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
