"""What Postgres's errors mean: by SQLSTATE; those of connecting, which carry none, by what the server and libpq say."""

import re
from collections.abc import Sequence
from typing import Final

import psycopg

from snapcore.errors import Code, RepositoryError, SnapcoreError, SnapshotError

__all__ = ["explain", "state_of", "will_pass"]

_Meaning = tuple[Code, str, str, bool]  # code, what the database does, hint, retryable

_LATER: Final = "Try again later."
_DENIED: Final = "Check user, password and rights; docs/postgres.md lists those that are needed."
_UNREACHABLE: Final = "Check host and port, and whether the server runs."
_TLS: Final = "Check sslmode, sslrootcert and the server's certificate."
_FOREIGN: Final = "Give the repository a database or a schema of its own: ?schema=name."

# The longest match decides: classes are the first two characters.
_STATES: Final[dict[str, _Meaning]] = {
    "08": (Code.STORE_UNAVAILABLE, "lost the connection", _LATER, True),
    "22021": (Code.INVALID_ENTRY, "cannot hold such text", "", False),
    "25006": (Code.READ_ONLY, "is read-only", "Use the primary server, or only read.", False),
    "25P": (Code.STORE_UNAVAILABLE, "ended a transaction that waited too long for its client", _LATER, True),
    "28": (Code.ACCESS_DENIED, "refuses this user", _DENIED, False),
    "3D000": (Code.NO_REPOSITORY, "does not exist", "Create it first: createdb NAME", False),
    "3F000": (Code.NO_REPOSITORY, "has no such schema", "Create a repository with `snapcore init`.", False),
    "40": (Code.STORE_UNAVAILABLE, "gave up the transaction for another's sake", _LATER, True),
    "42501": (Code.ACCESS_DENIED, "does not allow this to its user", _DENIED, False),
    "42P01": (Code.DAMAGED, "lacks a table", "Put a copy of it back.", False),
    "42703": (Code.DAMAGED, "lacks a column", "Put a copy of it back.", False),
    "42P07": (Code.WRONG_DATABASE, "holds tables of something else", _FOREIGN, False),
    "42710": (Code.WRONG_DATABASE, "holds something else", _FOREIGN, False),
    "53": (Code.STORE_UNAVAILABLE, "has too few resources", _LATER, True),
    "53100": (Code.STORE_FULL, "cannot grow: no space is left", "Make room, then try again.", True),
    "53300": (Code.STORE_UNAVAILABLE, "has too many connections", "Use a pooler, or fewer processes.", True),
    "55P03": (Code.STORE_UNAVAILABLE, "is locked by another writer", _LATER, True),
    "57014": (Code.STORE_UNAVAILABLE, "took too long", _LATER, True),
    "57P": (Code.STORE_UNAVAILABLE, "is shutting down or starting up", _LATER, True),
    "57P04": (Code.NO_REPOSITORY, "was dropped", "", False),
    "58": (Code.STORE_UNAVAILABLE, "cannot read or write its files", "See the server's log.", True),
    "XX001": (Code.DAMAGED, "is damaged", "Put a copy of it back.", False),
    "XX002": (Code.DAMAGED, "is damaged", "Put a copy of it back.", False),
}

# libpq gives no SQLSTATE for a connection that was not made, or was lost. A server that speaks another language is told apart
# by what libpq says only.
_WORDS: Final[tuple[tuple[str, _Meaning], ...]] = (
    ("starting up|shutting down|in recovery mode|not yet accepting connections", _STATES["57P"]),
    ("too many (clients|connections)|connection slots are reserved|no more connections allowed", _STATES["53300"]),
    ("database .* does not exist", _STATES["3D000"]),
    (
        "password|authentication failed|role .* does not exist|pg_hba.conf|not permitted to log in|permission denied",
        _STATES["28"],
    ),
    ("closed|connection is lost|terminating|Connection reset|Broken pipe|EOF", _STATES["08"]),
    ("certificate|SSL", (Code.STORE_UNAVAILABLE, "cannot be reached by TLS as asked", _TLS, False)),
    ("resolve host|translate host name", (Code.STORE_UNAVAILABLE, "is on a host that is not known", _UNREACHABLE, True)),
    ("invalid .*(option|value)", (Code.INVALID_REQUEST, "has an option in its address that libpq refuses", "", False)),
    ("refused|time|No such file|unreachable|No route", (Code.STORE_UNAVAILABLE, "cannot be reached", _UNREACHABLE, True)),
)
_PASSING: Final = re.compile(f"{_WORDS[0][0]}|{_WORDS[1][0]}")


def state_of(error: BaseException | None) -> str:
    """The SQLSTATE of a driver's error, empty when it has none."""
    return (getattr(error, "sqlstate", None) or "") if isinstance(error, psycopg.Error) else ""


def will_pass(error: BaseException | None) -> bool:
    """Whether the server took no connection for a reason that ends by itself within seconds."""
    return not state_of(error) and isinstance(error, psycopg.OperationalError) and _PASSING.search(str(error)) is not None


def explain(error: BaseException | None, url: str, secrets: Sequence[str]) -> SnapcoreError:
    """The error for the caller. The driver's own words appear only where nothing better is known, and without secrets."""
    if isinstance(error, psycopg.DataError) and state_of(error) in ("", "22021"):
        return SnapshotError("Postgres cannot hold text with a NUL character.", code=Code.INVALID_ENTRY)
    code, what, hint, retryable = _meaning(error) or (Code.STORE_UNAVAILABLE, f"failed: {_words(error, secrets)}", "", False)
    return RepositoryError(f"The database {url} {what}.", code=code, hint=hint, retryable=retryable)


def _meaning(error: BaseException | None) -> _Meaning | None:
    state = state_of(error)
    for length in (5, 3, 2):
        if state[:length] in _STATES:
            return _STATES[state[:length]]
    if state:
        return None
    text = str(error)
    return next((meaning for words, meaning in _WORDS if re.search(words, text)), None)


def _words(error: BaseException | None, secrets: Sequence[str]) -> str:
    text = str(error).strip().split("\n")[0].rstrip(".")
    for secret in secrets:
        text = text.replace(secret, "***")
    return text
