"""What a database has to offer to `sql_transactions`: connections, a clock, and the meaning of its errors."""

from abc import ABC, abstractmethod
from typing import Final

from sqlalchemy import ColumnElement, Connection, Engine
from sqlalchemy.exc import DBAPIError

from snapcore.errors import SnapcoreError

__all__ = ["CONNECTIONS", "Database", "begin_mode"]

CONNECTIONS: Final = 3  # one for the thread that writes, two for those that read
_WRITES: Final = "snapcore_writes"


class Database(ABC):
    """Connections to one database. Transactions are synchronous; `Transactions` runs them in threads.

    `url` is its address without credentials; `patience` how long to wait for another process's lock, in seconds.
    """

    url: str
    patience: float

    def __init__(self) -> None:
        self._engine: Engine | None = None

    @property
    def shared_by_threads(self) -> bool:
        """Whether several connections see the same data."""
        return True

    def exists(self) -> bool:
        """Whether there is a database to connect to. True where only connecting can tell."""
        return True

    def create(self) -> None:  # noqa: B027 (most have nothing to do)
        """Make an empty database, where that is for a client to do."""

    def prepare(self, connection: Connection) -> None:  # noqa: B027 (the same)
        """Begin a transaction that makes or upgrades the schema: wait for others that do the same, check what must hold."""

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
        """A connection whose transactions may write (`writes`), or only read, and then see one state of the database."""
        return self.engine.connect().execution_options(**{_WRITES: writes})

    @abstractmethod
    def clock(self) -> ColumnElement[int]:
        """The database's clock, in microseconds since the epoch, to be asked for after the repository's lock was obtained."""

    @abstractmethod
    def explain(self, error: DBAPIError) -> SnapcoreError:
        """What a driver's error means to the caller."""

    def undone(self, error: DBAPIError, *, committing: bool) -> bool:
        """Whether the transaction that failed so was surely undone, and may well succeed when it is run again at once.
        `committing`: the failure came after COMMIT had been sent."""
        del error, committing
        return False

    @abstractmethod
    def _make_engine(self) -> Engine: ...


def begin_mode(connection: Connection) -> bool | None:
    """True for a transaction that writes, False for one that reads, None for what SQLAlchemy does on its own account."""
    mode: bool | None = connection.get_execution_options().get(_WRITES)
    return mode
