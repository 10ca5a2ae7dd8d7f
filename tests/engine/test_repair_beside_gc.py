"""A repair beside a gc that has stopped just before it deletes blobs, and goes on when the repair has ended: deletes of blobs
ask nobody, so that a pack whose deletion has begun is never relied on again.

Case 38: gc beside others, and case 46: what a damaged repository can still be healed from.
"""

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import snapcore
from snapcore.collecting import collect
from snapcore.errors import Code, RepositoryError
from snapcore.model import PackState
from snapcore.stores.local import LocalBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import Faults, with_faults
from snapcore.testing.entries import new_pack_id
from snapcore.testing.entries import pack_of as made_pack

from .repair_helpers import everything, pack_file, pack_of, sql

Make = Callable[..., Path]


def saved(url: Path, table: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(url / "snapcore.db") as database:
        return database.execute(f"SELECT * FROM {table}").fetchall()


def put_back(url: Path, table: str, rows: list[tuple[Any, ...]]) -> None:
    with sqlite3.connect(url / "snapcore.db") as database:
        marks = ", ".join("?" for _ in rows[0])
        database.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", rows)


async def states(url: Path) -> dict[str, str]:
    async with snapcore.open_repository(url, create=False) as repo:
        return {p.pack_id: p.state for p in await repo.checkpoints.packs()}


async def gc_that_stops(url: Path, meanwhile: Callable[[], Any]) -> None:
    """A gc without grace that stops at its first delete of a blob, goes on after `meanwhile`, and learns then that it lost."""
    faults = Faults()
    faults.run("delete", meanwhile, 1)
    async with snapcore.open_repository(url, create=False) as repo:
        blobs = with_faults(LocalBlobStore(str(url)), faults)
        engine = type(repo._engine)(blobs, repo.checkpoints, repo.config, repo._engine.workers)
        with pytest.raises(RepositoryError) as caught:
            await collect(engine, grace=0, repack="none")
        assert caught.value.code == Code.MAINTENANCE_LOST
        await blobs.close()


@pytest.mark.parametrize("rows", [("checkpoints",), ("checkpoints", "chunks")])
async def test_what_gc_is_deleting_is_copied_and_not_used_in_place(tmp_path: Path, make: Make, rows: tuple[str, ...]) -> None:
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        await repo.capture(make({"a": os.urandom(3000)}), thread_id="kept")
        lost = await repo.capture(make({"b": os.urandom(3000)}, base=tmp_path / "b"), thread_id="t")
        before = await everything(repo)
        swept = await pack_of(repo, lost.record_id)
    kept = {table: saved(url, table) for table in rows}
    assert sql(url, "DELETE FROM checkpoints WHERE thread_id = 't'") == 1

    async def repair() -> None:
        assert (await states(url))[swept] == PackState.DELETING
        for table in rows:
            put_back(url, table, kept[table])
        report = await snapcore.repair_repository(url)
        assert report.ok
        assert "salvage-pack" in {str(action.step) for action in report.done}

    await gc_that_stops(url, repair)
    assert not pack_file(url, swept).exists()
    assert (await states(url))[swept] == PackState.DELETING
    async with snapcore.open_repository(url, create=False) as repo:
        assert await everything(repo) == before
        assert (await repo.verify(read_data=True)).ok
        await repo.gc(grace=0, repack="none")  # goes on with what the first one had begun
        assert (await repo.verify(read_data=True)).ok
    assert (await states(url))[swept] == PackState.DELETED
    assert not (await snapcore.plan_repair(url, read_data=True)).actions


async def test_a_pack_in_the_grace_of_gc_is_used_again(tmp_path: Path, make: Make) -> None:
    """The rows of its records are there yet, and no gc deletes it without looking again."""
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        c = await repo.capture(make({"a": os.urandom(3000)}), thread_id="t")
        needed = await pack_of(repo, c.record_id)
    kept = saved(url, "checkpoints")
    sql(url, "DELETE FROM checkpoints")
    async with snapcore.open_repository(url) as repo:
        await repo.gc(grace=3600)
    assert (await states(url))[needed] == PackState.CONDEMNED
    put_back(url, "checkpoints", kept)
    assert sql(url, "DELETE FROM chunks WHERE id = ?", c.record_id) == 1
    assert (await snapcore.repair_repository(url)).ok
    assert (await states(url))[needed] == PackState.LIVE
    async with snapcore.open_repository(url) as repo:
        await repo.gc(grace=0)
        assert (await repo.verify(read_data=True)).ok


async def test_a_pack_that_a_capture_is_writing_is_left_to_it(tmp_path: Path, work: Path, make: Make) -> None:
    """Though a checkpoint needs what is in it: its own copy is lost."""
    url = tmp_path / "repo"
    (work / "same").write_bytes(os.urandom(3000))
    async with snapcore.open_repository(url) as repo:
        first = await repo.capture(work, thread_id="t")
        needed = first.roots[0].manifest
        lost = await pack_of(repo, needed)
    pack_file(url, lost).unlink()
    report = await snapcore.repair_repository(url)
    assert report.hurt == [("t", first.id)]
    async with snapcore.open_repository(url) as repo:
        store = repo.checkpoints
        grant = await store.acquire_writer("other", pack_id=(writing := new_pack_id()))
        pack = made_pack(writing, "content")
        record = msgspec.structs.replace(pack.records[0], id=needed)
        await store.add_pack(grant.lease, msgspec.structs.replace(pack, records=(record,)))
        report = await snapcore.repair_repository(url)
        assert any(writing in note for note in report.notes)
        assert (await states(url))[writing] == PackState.WRITING
        assert (await store.locate([needed]))[needed].pack_id == writing
        await store.release_writer(grant.lease)
    report = await snapcore.repair_repository(url)
    assert (await states(url))[writing] == PackState.LOST  # its writer is gone, and it was never put
    assert report.hurt == [("t", first.id)]


async def test_a_pack_that_is_lost_while_gc_deletes_it_does_not_come_back(tmp_path: Path, make: Make) -> None:
    """`lost` would let the next repair use it in place, as long as its blob is there."""
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        c = await repo.capture(make({"a": "1"}), thread_id="t")
        pack = await pack_of(repo, c.record_id)
    sql(url, "DELETE FROM checkpoints")

    async def lose() -> None:
        store = SqlCheckpointStore(f"sqlite:///{url}/snapcore.db")
        await store.lose_packs(await store.start_maintenance(), [pack])
        await store.close()
        await snapcore.repair_repository(url)
        assert (await states(url))[pack] == PackState.DELETING

    await gc_that_stops(url, lose)
    assert not pack_file(url, pack).exists()
    async with snapcore.open_repository(url) as repo:
        assert (await repo.verify(read_data=True)).ok
