"""Two that create a repository at one place at once end with one repository, whatever the order of their steps."""

from pathlib import Path

import pytest

from snapcore.config import CONFIG_KEY, CREATING_KEY, RepositoryConfig, decode_config
from snapcore.opening import borrowed
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import Faults, with_faults


async def create(blobs: MemoryBlobStore, store: SqlCheckpointStore) -> RepositoryConfig:
    try:
        async with borrowed(blobs, store) as repo:
            return repo.config
    finally:
        await store.close()


@pytest.mark.parametrize("method", ["get", "put", "delete", "identity", "initialize"])
@pytest.mark.parametrize("call", [1, 2, 3])
async def test_another_that_comes_between_any_two_steps_finds_or_makes_the_same(tmp_path: Path, method: str, call: int) -> None:
    """The blob store promises no more than a bucket does: whoever puts last is read."""
    blobs = MemoryBlobStore()
    url = f"sqlite:///{tmp_path / 'one.db'}"
    other: list[RepositoryConfig] = []

    async def come_between() -> None:
        other.append(await create(blobs, SqlCheckpointStore(url)))

    faults = Faults()
    faults.run(method, come_between, call)
    mine = await create(with_faults(blobs, faults), with_faults(SqlCheckpointStore(url), faults))
    stored = decode_config(blobs.blobs[CONFIG_KEY])
    assert {c.identity for c in [mine, *other]} == {stored.identity}
    assert {c.salt for c in [mine, *other]} == {stored.salt}
    assert CREATING_KEY not in blobs.blobs
    late = await create(blobs, SqlCheckpointStore(url))
    assert late == stored
