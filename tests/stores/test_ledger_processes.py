"""Two processes and one thread's ledger (case 38): the claim is checked in the transaction that writes, not before it.

On SQLite and on Postgres. One process stops inside its transaction, or before it, while the other does its part.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator

import msgspec
import pytest

from snapcore.errors import CheckpointWriterLostError, Code, RepositoryError
from snapcore.ledger import Claim, Event, EventKind
from snapcore.model import WriterLease
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing.entries import IDENTITY, start
from snapcore.testing.ledger_suite import claim_thread, new_event

from . import ledger_process
from .held_process import ENOUGH, held, release
from .ledger_process import Job, work
from .postgres_helpers import Wire


class Scene:
    """A worker that has claimed the thread, and another one that is about to."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = SqlCheckpointStore(url)
        self.claim: Claim
        self.lease: WriterLease

    async def prepare(self) -> None:
        await self.store.initialize(IDENTITY)
        self.claim = await claim_thread(self.store, "thread")
        await self.store.append_event(self.claim, new_event())

    async def takeover(self) -> Job:
        """The other worker's claim; its lease is granted, so that it only has to be made."""
        return Job("claim", lease=(await self.store.acquire_writer("thread")).lease)

    def event(self) -> Job:
        return Job("append", claim=self.claim, event=new_event())

    async def checkpoint(self) -> Job:
        """A capture by the first worker, of which only the commit is left."""
        grant, checkpoint, commit = await start(self.store, "thread", "first")
        event = new_event(EventKind.CHECKPOINT, checkpoint_id="first")
        with_event = msgspec.structs.replace(commit, event=(self.claim, event))
        return Job("commit", lease=grant.lease, checkpoint=checkpoint, commit=with_event)

    async def events(self) -> list[Event]:
        return await self.store.events("thread")


@pytest.fixture
async def scene(url: str) -> AsyncIterator[Scene]:
    scene = Scene(url)
    await scene.prepare()
    yield scene
    await scene.store.close()


async def test_a_worker_that_was_superseded_before_its_event_is_told(scene: Scene) -> None:
    """Case 38."""
    async with held(ledger_process.__file__, scene.url, "start", scene.event()) as process:
        assert await work(scene.store, await scene.takeover()) == "done"
        assert await release(process) == "CheckpointWriterLostError"
    assert len(await scene.events()) == 1


async def test_an_event_that_waits_for_a_takeover_in_another_process_is_refused(scene: Scene) -> None:
    """Case 38: the claim is replaced and not yet committed when the event's transaction begins."""
    async with held(ledger_process.__file__, scene.url, "claim", await scene.takeover()) as process:
        waiting = asyncio.create_task(work(scene.store, scene.event()))
        assert await release(process) == "done"
        assert await asyncio.wait_for(waiting, ENOUGH) == "CheckpointWriterLostError"
    assert len(await scene.events()) == 1


async def test_a_takeover_that_waits_for_an_event_in_another_process_sees_it(scene: Scene) -> None:
    """Case 38: whoever has claimed a thread reads all that was written before, and nothing comes after it."""
    takeover = await scene.takeover()
    async with held(ledger_process.__file__, scene.url, "append", scene.event()) as process:
        waiting = asyncio.create_task(work(scene.store, takeover))
        assert await release(process) == "done"
        assert await asyncio.wait_for(waiting, ENOUGH) == "done"
    assert len(await scene.events()) == 2
    with pytest.raises(CheckpointWriterLostError):
        await scene.store.append_event(scene.claim, new_event())


async def test_a_capture_that_was_superseded_before_its_commit_moves_no_head(scene: Scene) -> None:
    """Case 38: the claim ends under the very lease that the capture holds."""
    commit = await scene.checkpoint()
    async with held(ledger_process.__file__, scene.url, "start", commit) as process:
        assert await work(scene.store, Job("claim", lease=commit.lease)) == "done"
        assert await release(process) == "CheckpointWriterLostError"
    assert await scene.store.head("thread") is None
    assert len(await scene.events()) == 1


async def test_a_commit_that_waits_for_a_takeover_in_another_process_is_refused_as_a_whole(scene: Scene) -> None:
    """Case 38."""
    commit = await scene.checkpoint()
    async with held(ledger_process.__file__, scene.url, "claim", Job("claim", lease=commit.lease)) as process:
        waiting = asyncio.create_task(work(scene.store, commit))
        assert await release(process) == "done"
        assert await asyncio.wait_for(waiting, ENOUGH) == "CheckpointWriterLostError"
    assert await scene.store.head("thread") is None
    assert len(await scene.events()) == 1


async def test_a_process_killed_inside_its_transaction_leaves_neither_checkpoint_nor_event(scene: Scene) -> None:
    commit = await scene.checkpoint()
    async with held(ledger_process.__file__, scene.url, "enter", commit) as process:
        process.kill()
    assert await scene.store.head("thread") is None
    assert len(await scene.events()) == 1
    assert await work(scene.store, commit) == "done"
    assert [event.sequence for event in await scene.events()] == [1, 2]


async def test_processes_that_append_at_once_leave_no_gap(scene: Scene) -> None:
    """Each event has a number of its own, also when a claim is shared by mistake."""
    jobs = [scene.event() for _ in range(4)]
    stores = [SqlCheckpointStore(scene.url) for _ in jobs]
    async with held(ledger_process.__file__, scene.url, "append", scene.event()) as process:
        waiting = [asyncio.create_task(work(store, job)) for store, job in zip(stores, jobs, strict=True)]
        assert await release(process) == "done"
        assert await asyncio.wait_for(asyncio.gather(*waiting), ENOUGH) == ["done"] * 4
    assert [event.sequence for event in await scene.events()] == [1, 2, 3, 4, 5, 6]
    for store in stores:
        await store.close()


# ---- answers that are lost


@pytest.mark.parametrize("late", [False, True], ids=["the message is lost", "the answer is lost"])
async def test_an_event_whose_wire_is_cut_at_commit_is_there_once(wire: Wire, late: bool) -> None:
    store = SqlCheckpointStore(wire.url)
    await store.initialize(IDENTITY)
    lease = (await store.acquire_writer("thread")).lease
    token = secrets.token_hex(16)
    wire.cut(1, late=late, commits=True)
    with pytest.raises(RepositoryError) as caught:
        await store.claim_ledger(lease, token)
    assert (caught.value.code, caught.value.retryable) == (Code.STORE_UNAVAILABLE, True)
    claim = await store.claim_ledger(lease, token)
    event = new_event()
    wire.cut(1, late=late, commits=True)
    with pytest.raises(RepositoryError) as caught:
        await store.append_event(claim, event)
    assert caught.value.retryable
    assert len(await store.events("thread")) == late
    stored = await store.append_event(claim, event)
    assert await store.events("thread") == [stored]
    assert stored.sequence == 1
    await store.close()
