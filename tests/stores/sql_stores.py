"""The SQL store on each kind of database."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapcore.stores.sql import SqlCheckpointStore
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
