"""Two processes on one database, one of which stops inside its transaction while the other begins its own (cases 34, 35, 38).

On SQLite and on Postgres: whoever has the lock first is done first, and the other sees what it did.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapcore.model import PackState, WriterLease
from snapcore.protocols import Commit
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing.entries import IDENTITY, append, checkpoint_for, digest, new_pack_id, pack_of

from . import gc_process
from .gc_process import Job, work
from .held_process import ENOUGH, held, release

HOLD = {
    "start": "sql_gc.start",
    "condemn": "sql_gc.condemn",
    "sweep": "sql_gc.sweep",
    "move": "sql_gc.move_records",
    "commit": "sql_checkpoints.append",
}


class Scene:
    """A pack of garbage, `old`; a writer that has found its record `x` and is about to commit; a gc that is about to free it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = SqlCheckpointStore(url)

    async def prepare(self) -> None:
        await self.store.initialize(IDENTITY)
        grant = await self.store.acquire_writer("other", pack_id=(pack := new_pack_id()))
        made = checkpoint_for("other", "old")
        await self.store.append(
            grant.lease, made, Commit(packs=(pack_of(pack, "x", "manifest-old", "record-old"),)), release=False
        )
        await self.store.delete(grant.lease, ["old"])
        self.old = pack
        self.moved = pack_of(new_pack_id(), "x", "manifest-old")
        self.run = await self.store.start_maintenance()
        self.mark = (await self.store.roots()).mark
        await self.store.reserve_maintenance_packs(self.run, [self.moved.pack_id])

    async def writer(self, name: str, ttl: float = 120.0) -> Job:
        """A writer that is about to commit."""
        grant = await self.store.acquire_writer("thread", pack_id=(pack := new_pack_id()), ttl=ttl)
        parent = None if grant.head is None else grant.head.id
        assert await self.store.known([digest("x")]) == {digest("x")}
        commit = Commit(packs=(pack_of(pack, f"manifest-{name}", f"record-{name}"),), refs=(digest("x"),))
        return Job("commit", lease=grant.lease, checkpoint=checkpoint_for("thread", name, parent), commit=commit)

    def collector(self, call: str) -> Job:
        return Job(call, run=self.run, mark=self.mark, packs=(self.old,), moved=self.moved)

    async def condemn(self) -> None:
        assert await work(self.store, self.collector("condemn")) == self.old

    async def both(self, first: Job, second: Job) -> tuple[str, str]:
        """The first, in a process of its own, has done its work and not committed when the second begins."""
        async with held(gc_process.__file__, self.url, HOLD[first.call], first) as process:
            waiting = asyncio.create_task(work(self.store, second))
            return await release(process), await asyncio.wait_for(waiting, ENOUGH)

    async def states(self) -> dict[str, str]:
        return {pack.pack_id: pack.state for pack in await self.store.packs()}

    async def place(self) -> str | None:
        """The pack in which the record is, None when it has no row."""
        found = await self.store.locate([digest("x")])
        return found[digest("x")].pack_id if found else None


@pytest.fixture(params=["sqlite", "postgres"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    url = f"sqlite:///{tmp_path}/snapcore.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    scene = Scene(url)
    await scene.prepare()
    yield scene
    await scene.store.close()


async def test_a_commit_that_is_first_keeps_its_pack_from_being_condemned(scene: Scene) -> None:
    """Case 34: the number is looked at in the statement that condemns."""
    assert await scene.both(await scene.writer("new"), scene.collector("condemn")) == ("done", "")
    assert (await scene.states())[scene.old] == PackState.LIVE


async def test_a_commit_after_a_condemnation_takes_the_pack_back(scene: Scene) -> None:
    """Case 34."""
    assert await scene.both(scene.collector("condemn"), await scene.writer("new")) == (scene.old, "done")
    assert (await scene.states())[scene.old] == PackState.LIVE
    assert await scene.store.sweep(scene.run, grace=0) == []
    assert await scene.place() == scene.old


async def test_a_sweep_after_a_commit_leaves_the_pack(scene: Scene) -> None:
    """Case 34: the state is looked at in the sweep."""
    await scene.condemn()
    assert await scene.both(await scene.writer("new"), scene.collector("sweep")) == ("done", "")
    assert await scene.place() == scene.old


async def test_a_commit_after_a_sweep_is_refused_whole(scene: Scene) -> None:
    """Case 34: the row is gone, and nothing of the checkpoint is there."""
    await scene.condemn()
    job = await scene.writer("new")
    assert await scene.both(scene.collector("sweep"), job) == (scene.old, "RecordsMissingError")
    assert await scene.store.head("thread") is None
    assert await scene.place() is None
    assert job.lease is not None
    assert job.checkpoint is not None
    assert job.commit is not None
    await scene.store.reserve_packs(job.lease, [again := new_pack_id()])
    packs = (*job.commit.packs, pack_of(again, "x"))
    assert await scene.store.append(job.lease, job.checkpoint, Commit(packs=packs)) == job.checkpoint
    assert await scene.place() == again


async def test_a_commit_after_a_repack_relies_on_the_new_pack(scene: Scene) -> None:
    """Case 34: the pack is looked up in the commit, not taken from an earlier look."""
    job = await scene.writer("new")
    moved = scene.moved.pack_id
    before = (await scene.store.roots()).mark
    assert await scene.both(scene.collector("move"), job) == (scene.old, "done")
    assert await scene.place() == moved
    numbers = {pack.pack_id: pack.commit_seq for pack in await scene.store.packs()}
    assert numbers[moved] == before + 2, "stamped by the commit too"
    assert await scene.store.sweep(scene.run, grace=0) == [scene.old]


async def test_a_repack_leaves_a_pack_that_a_commit_has_come_back_to(scene: Scene) -> None:
    """Case 34: its dead records may be alive again."""
    assert await scene.both(await scene.writer("new"), scene.collector("move")) == ("done", "")
    assert await scene.place() == scene.old
    assert (await scene.states())[scene.moved.pack_id] == PackState.WRITING


@pytest.mark.parametrize("call", ["condemn", "sweep", "move"])
async def test_a_gc_that_was_superseded_meanwhile_changes_nothing(scene: Scene, call: str) -> None:
    if call == "sweep":
        await scene.condemn()
    states = await scene.states()
    assert await scene.both(Job("start"), scene.collector(call)) == ("done", "MAINTENANCE_LOST")
    assert await scene.states() == states
    assert await scene.place() == scene.old


@pytest.mark.parametrize("call", ["condemn", "sweep", "move"])
async def test_a_gc_that_has_begun_its_step_ends_it_before_it_is_superseded(scene: Scene, call: str) -> None:
    if call == "sweep":
        await scene.condemn()
    assert await scene.both(scene.collector(call), Job("start")) == (scene.old, "done")
    assert (await scene.states())[scene.old] == (PackState.DELETING if call == "sweep" else PackState.CONDEMNED)


async def test_a_lease_that_ends_before_the_commit_begins_is_lost(scene: Scene) -> None:
    """Cases 35 and 38: the writer has checked its lease, stands still, and another takes over."""
    job = await scene.writer("late", ttl=0.2)
    async with held(gc_process.__file__, scene.url, "start", job) as process:
        await run_out(scene.store, job.lease)
        quick = await append(scene.store, "thread", "quick")
        run = await scene.store.start_maintenance()
        assert await scene.store.condemn_abandoned(run)
        assert await release(process) == "CheckpointWriterLostError"
    assert await scene.store.head("thread") == quick


async def test_a_takeover_waits_for_a_commit_that_has_begun(scene: Scene) -> None:
    """Case 38: the check and the write are one transaction, and whoever takes over waits for it."""
    job = await scene.writer("late")
    async with held(gc_process.__file__, scene.url, HOLD["commit"], job) as process:
        waiting = asyncio.create_task(scene.store.acquire_writer("thread"))
        assert await release(process) == "done"
        grant = await asyncio.wait_for(waiting, ENOUGH)
    assert grant.head == job.checkpoint


async def run_out(store: SqlCheckpointStore, lease: WriterLease | None) -> None:
    """Returns once the lease is over by the database's clock."""
    assert lease is not None
    while await store.now() <= lease.expires_at:  # noqa: ASYNC110 - the database's clock sends no events
        await asyncio.sleep(0.01)
