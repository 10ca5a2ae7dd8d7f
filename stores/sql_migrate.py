"""Upgrades of databases that older releases made, by Alembic. Imported only when there is one to upgrade.

New databases are created from the metadata and stamped; a test holds that both ways lead to the same schema.
"""

import os

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection

__all__ = ["knows", "upgrade"]


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "migrations")
    config.set_main_option("script_location", folder.replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def knows(revision: str) -> bool:
    """Whether this release has that revision."""
    try:
        ScriptDirectory.from_config(_config()).get_revision(revision)
    except CommandError:
        return False
    return True


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema to the newest revision, or an earlier one, within the transaction that is open on `connection`."""
    command.upgrade(_config(connection), revision)
