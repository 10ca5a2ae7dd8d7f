"""The SQL store does what every checkpoint store does, in a file and in memory."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import CheckpointStoreTests, ManualClock, RecordTests, WriterLeaseTests
from snapcore.testing.entries import IDENTITY


class OnSql:
    """Each test runs on both kinds of database."""

    @pytest.fixture(params=["file", "memory"])
    async def store(
        self, request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
    ) -> AsyncIterator[SqlCheckpointStore]:
        url = f"sqlite:///{tmp_path}/snapcore.db" if request.param == "file" else "sqlite://"
        store = SqlCheckpointStore(url, clock=clock)
        assert await store.initialize(IDENTITY) == IDENTITY
        yield store
        await store.close()


class TestCheckpoints(OnSql, CheckpointStoreTests):
    pass


class TestLeases(OnSql, WriterLeaseTests):
    pass


class TestRecords(OnSql, RecordTests):
    pass
