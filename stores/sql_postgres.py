"""Postgres, by psycopg 3. Imported only for a Postgres address.

A connection may come from a pooler that hands it to others between transactions (pgbouncer, `pool_mode = transaction`), so
nothing is kept in it: no prepared statement, no setting that outlives its transaction. A transaction's settings travel with
its BEGIN, which makes one round trip of both.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Engine,
    LargeBinary,
    SmallInteger,
    Table,
    cast,
    create_engine,
    event,
    func,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from snapcore.errors import Code, RepositoryError, SnapcoreError

from . import sql_schema as schema
from .sql_database import CONNECTIONS, Database, begin_mode
from .sql_postgres_errors import explain, state_of, will_pass

__all__ = ["PostgresDatabase", "insert_rows"]

IDLE_SECONDS: Final = 20.0
"""How long a transaction may wait for its client. Nothing slow is done inside one, so a client that takes longer is frozen or
gone, and every other writer waits for the lock it holds. Less than the 30 s that those wait."""
STATEMENT_SECONDS: Final = 300.0
_LOCK_TRIES: Final = 3  # lock timeouts within the time that a caller is willing to wait

_SCHEMA_LOCK: Final = 0x736E6170636F7265  # "snapcore": of those who make or upgrade a schema
_UNDONE: Final = ("40001", "40P01", "55P03")  # serialization failure, deadlock, lock timeout
_PARAMETERS: Final[dict[str, Any]] = {
    "autocommit": True,  # BEGIN is sent by `_begin`
    "prepare_threshold": None,
    "client_encoding": "utf8",
    "application_name": "snapcore",
    "connect_timeout": 10,
    # a peer that has gone without a word is noticed in a minute
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
_ARRAYS: Final[dict[type, str]] = {BigInteger: "bigint[]", SmallInteger: "smallint[]", LargeBinary: "bytea[]"}


class PostgresDatabase(Database):
    """A database, or a schema of one (`?schema=name`), on a Postgres server. What else the address holds is libpq's to read."""

    def __init__(self, url: URL, *, busy_timeout: float) -> None:
        super().__init__()
        if "@" in (url.host or "") + (url.database or ""):
            raise RepositoryError(
                "The database address has a part that cannot be told from the next.",
                code=Code.UNKNOWN_SCHEME,
                hint="Write '@' in a user name or password as %40, '/' as %2F, ':' as %3A.",
            )
        options = {name: value if isinstance(value, str) else ",".join(value) for name, value in url.query.items()}
        self._schema = options.pop("schema", None)
        if self._schema is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_$]{0,62}", self._schema, re.ASCII):
            raise RepositoryError(
                "The schema of the database address has an odd name.",
                code=Code.UNKNOWN_SCHEME,
                hint="Use letters, digits and underscores.",
            )
        self.url = URL.create(
            "postgresql+psycopg",
            host=url.host,
            port=url.port,
            database=url.database,
            query={} if self._schema is None else {"schema": self._schema},
        ).render_as_string()
        self.patience = busy_timeout
        own = {"host": url.host, "port": url.port, "dbname": url.database, "user": url.username, "password": url.password}
        self._parameters: dict[str, Any] = {
            **_PARAMETERS,
            **{name: value for name, value in own.items() if value is not None},
            **options,
        }
        self._secrets = [str(self._parameters[name]) for name in ("password", "sslpassword") if self._parameters.get(name)]

    def prepare(self, connection: Connection) -> None:
        """Begin a transaction that makes or upgrades the schema: one at a time; text must be stored as UTF-8."""
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")
        encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
        if encoding != "UTF8":
            raise RepositoryError(
                f"The database {self.url} stores text as {encoding}.",
                code=Code.WRONG_DATABASE,
                hint="Create it with ENCODING 'UTF8'.",
            )
        if self._schema is not None and connection.scalar(func.to_regnamespace(f'"{self._schema}"')) is None:
            connection.exec_driver_sql(f'CREATE SCHEMA "{self._schema}"')

    def clock(self) -> ColumnElement[int]:
        """The server's clock at the moment the row is returned: not when the transaction or a wait for a lock began."""
        return cast(func.extract("epoch", func.clock_timestamp()) * 1_000_000, BigInteger)

    def explain(self, error: DBAPIError) -> SnapcoreError:
        """What a driver's error means to the caller."""
        if state_of(error.orig) == "42501" and (error.statement or "").startswith(f"UPDATE {schema.repository.name} "):
            # that no write gets beyond; what can be read was read before
            return RepositoryError(
                f"The database {self.url} may only be read by its user.", code=Code.READ_ONLY, hint="Use a user who may write."
            )
        return explain(error.orig, self.url, self._secrets)

    def undone(self, error: DBAPIError, *, committing: bool) -> bool:
        """Whether the transaction was surely undone and is worth running again: the server gave it up for another's sake, the
        connection was lost before COMMIT was sent, or the server takes no connection at this moment."""
        if state_of(error.orig) in _UNDONE:
            return True
        return not committing and (error.connection_invalidated or will_pass(error.orig))

    def _make_engine(self) -> Engine:
        engine = create_engine(
            "postgresql+psycopg://",
            creator=self._open,
            hide_parameters=True,
            poolclass=QueuePool,
            pool_size=CONNECTIONS,
            max_overflow=0,
            use_native_hstore=False,
        )
        event.listen(engine, "begin", self._begin)
        return engine

    def _open(self) -> psycopg.Connection[Any]:
        return psycopg.connect(**self._parameters)

    def _begin(self, connection: Connection) -> None:
        writes = begin_mode(connection)
        if writes is None:
            return
        mode = "READ COMMITTED" if writes else "REPEATABLE READ READ ONLY"
        settings = {
            "idle_in_transaction_session_timeout": IDLE_SECONDS,
            "lock_timeout": self.patience / _LOCK_TRIES,
            "statement_timeout": STATEMENT_SECONDS,
        }
        statements = [f"BEGIN ISOLATION LEVEL {mode}"]
        statements += [f"SET LOCAL {name} = {max(1, round(seconds * 1000))}" for name, seconds in settings.items()]
        if self._schema is not None:
            statements.append(f'SET LOCAL search_path = "{self._schema}"')
        connection.exec_driver_sql("; ".join(statements))


def insert_rows(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, with a value for each column in order, but for those whose key is taken: one array a column."""
    quote = connection.dialect.identifier_preparer.quote
    names = ", ".join(quote(column.name) for column in table.columns)
    types = [_array_type(column) for column in table.columns]
    arrays = ", ".join(f"%s::{name}" for name in types)
    statement = f"INSERT INTO {quote(table.name)} ({names}) SELECT * FROM unnest({arrays}) ON CONFLICT DO NOTHING"  # noqa: S608
    values = zip(*rows, strict=True)
    connection.exec_driver_sql(statement, tuple(map(_array, types, values)))


def _array_type(column: Column[Any]) -> str:
    return next((name for kind, name in _ARRAYS.items() if isinstance(column.type, kind)), "text[]")


def _array(name: str, values: Sequence[Any]) -> Any:
    """An array as Postgres writes it, which takes less than half of the time that psycopg needs for one of 25,000 values."""
    if name == "text[]" or None in values:
        return list(values)
    if name == "bytea[]":
        return "{" + ",".join([f'"\\\\x{value.hex()}"' for value in values]) + "}"
    return "{" + ",".join(map(str, values)) + "}"
