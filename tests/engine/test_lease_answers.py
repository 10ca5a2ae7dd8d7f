"""Answers that a writer never gets: the lease was granted, and the connection was lost."""

from pathlib import Path

import pytest

import snapcore
from snapcore.errors import Code, RepositoryError
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import Faults, with_faults


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "file").write_bytes(b"content")
    return tmp_path / "work"


async def test_a_lease_whose_answer_was_lost_is_asked_for_again_and_holds_up_nobody(work: Path) -> None:
    faults = Faults()
    blobs, store = MemoryBlobStore(), with_faults(SqlCheckpointStore("sqlite://"), faults)
    faults.lose_response("acquire_writer", 1)
    faults.lose_response("acquire_writer", 2)
    first = await snapcore.capture(handle=str(work), checkpoints=store, blobs=blobs, thread_id="thread")
    assert faults.calls["acquire_writer"] == 3
    assert await store.head("thread") == first
    assert len(await store.packs()) == 1
    await snapcore.capture(handle=str(work), checkpoints=store, blobs=blobs, thread_id="thread")
    await store.close()


async def test_a_store_that_stays_away_is_told_after_some_tries(work: Path) -> None:
    faults = Faults()
    blobs, store = MemoryBlobStore(), with_faults(SqlCheckpointStore("sqlite://"), faults)
    faults.fail("acquire_writer", None)
    with pytest.raises(RepositoryError) as caught:
        await snapcore.capture(handle=str(work), checkpoints=store, blobs=blobs, thread_id="thread")
    assert caught.value.code is Code.STORE_UNAVAILABLE
    assert 1 < faults.calls["acquire_writer"] < 10
    await store.close()


async def test_what_trying_again_cannot_mend_is_told_at_once(work: Path) -> None:
    faults = Faults()
    blobs, store = MemoryBlobStore(), with_faults(SqlCheckpointStore("sqlite://"), faults)
    faults.fail("acquire_writer", None, RepositoryError("The database is read-only.", code=Code.READ_ONLY))
    with pytest.raises(RepositoryError):
        await snapcore.capture(handle=str(work), checkpoints=store, blobs=blobs, thread_id="thread")
    assert faults.calls["acquire_writer"] == 1
    await store.close()
