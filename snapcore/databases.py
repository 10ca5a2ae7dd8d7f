"""Where a repository's database is when nobody names one.

A folder has it inside, and so is whole in one place. A bucket cannot hold one: it is a SQLite file of this user on this
machine then, named by the repository's id, which every other machine lacks. Those are refused, and told so.
"""

import os
import sys
from typing import Final

from .errors import Code, RepositoryError, printable
from .registry import split_scheme

__all__ = ["DATABASE_NAME", "data_folder", "has_own_database", "inner_database", "new_own_database", "own_database"]

DATABASE_NAME: Final = "snapcore.db"


def inner_database(url: str) -> str | None:
    """The URL of the database that lies in the repository itself: in memory, or in its folder. None for other schemes."""
    scheme, rest = split_scheme(url)
    if scheme == "memory":
        return "sqlite://"
    if scheme == "file":
        return _sqlite_url(os.path.join(os.path.abspath(os.path.expanduser(rest)), DATABASE_NAME))
    return None


def new_own_database(repository_id: str) -> str:
    """The URL of this machine's own database of a repository that is being created. Its folder is for this user alone."""
    path = _own_path(repository_id)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return _sqlite_url(path)


def has_own_database(repository_id: str) -> bool:
    """Whether this machine has a database of its own for a repository."""
    return os.path.exists(_own_path(repository_id))


def own_database(repository_id: str, url: str) -> str:
    """The URL of this machine's own database of the repository at `url`.

    Raises `RepositoryError` `WRONG_DATABASE` when there is none: an existing repository must never get a second database,
    which would know nothing of the checkpoints in the first.
    """
    if has_own_database(repository_id):
        return _sqlite_url(_own_path(repository_id))
    raise RepositoryError(
        f"The database of the repository at {printable(url)} is not on this machine: there is no"
        f" {printable(_own_path(repository_id))}.",
        code=Code.WRONG_DATABASE,
        hint="Give --database with the URL that the other machines use. If the database is lost, 'snapcore repair' rebuilds it"
        " from the blobs.",
    )


def _own_path(repository_id: str) -> str:
    return os.path.join(data_folder(), "snapcore", f"{repository_id}.db")


def _sqlite_url(path: str) -> str:
    return "sqlite:///" + path.replace("%", "%25").replace("?", "%3F")  # the rest has no meaning in such a URL


def data_folder() -> str:
    """Where this user's programs keep what is theirs."""
    given = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(given):  # others have to be ignored, says the XDG specification
        return given
    return os.path.expanduser("~/Library/Application Support" if sys.platform == "darwin" else "~/.local/share")
