"""The SQL store on each kind of database."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import inspect

from snapcore.model import Checkpoint
from snapcore.stores import sql_schema as schema
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.stores.sql_dialects import open_database
from snapcore.stores.sql_migrate import upgrade
from snapcore.stores.sql_transactions import stored_revision
from snapcore.testing import ManualClock
from snapcore.testing.entries import IDENTITY


class OnSql:
    """Each test runs on each kind of database."""

    @pytest.fixture(params=["file", "memory", "postgres"])
    async def store(
        self, request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
    ) -> AsyncIterator[SqlCheckpointStore]:
        url = {"file": f"sqlite:///{tmp_path}/snapcore.db", "memory": "sqlite://"}.get(request.param)
        store = SqlCheckpointStore(url or request.getfixturevalue("postgres_url"), clock=clock)
        assert await store.initialize(IDENTITY) == IDENTITY
        yield store
        await store.close()


def make_old_database(url: str, revision: str, checkpoint: Checkpoint, *, lacks: str) -> None:
    """A database as an earlier release left it: of that revision, without the table `lacks`, and with one checkpoint."""
    database = open_database(url)
    database.create()
    with database.connect(writes=True) as connection, connection.begin():
        database.prepare(connection)
        upgrade(connection, revision)
        connection.execute(
            schema.repository.insert().values(
                id=1, repository_id="repository", database_id="database", commit_seq=41, gc_fence=3, damage_epoch=0
            )
        )
        connection.execute(schema.threads.insert().values(thread_id=checkpoint.thread_id, head_id=checkpoint.id))
        connection.execute(
            schema.checkpoints.insert().values(
                id=checkpoint.id,
                thread_id=checkpoint.thread_id,
                created_at=checkpoint.created_at,
                label=checkpoint.label,
                commit_seq=40,
                record_id=checkpoint.record_id,
                record=msgspec.msgpack.encode(checkpoint),
            )
        )
    with database.connect(writes=False) as connection, connection.begin():
        assert stored_revision(connection) == revision
        assert not inspect(connection).has_table(lacks)
    database.dispose()
