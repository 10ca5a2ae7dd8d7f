"""gc beside outputs that are stored for the ledger: at every call that storing one makes to the stores, and the other way round.

Case 34: whatever comes between two steps, an output that an event tells of can be read.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from sqlalchemy import select

from snapcore.config import new_config
from snapcore.errors import CheckpointWriterLostError
from snapcore.leases import WriterHold
from snapcore.ledger import Event, EventKind
from snapcore.model import PackState
from snapcore.outputs import read_output
from snapcore.recording import Recorder, claim_thread, new_event_id
from snapcore.repository import Repository
from snapcore.stores import sql_schema as schema
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import Crash, Faults, ManualClock, with_faults

OUT, ERR = Random(1).randbytes(40_000), b"line of text\n" * 3_000
FEWEST_CALLS, CALLS_AT_MOST = 3, 60

Prepare = Callable[["Place", Path], Awaitable[None]]


class Place:
    """A repository in memory whose database has a clock of its own; `faulty` is the same one, with faults."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.faults = Faults()
        self.blobs, self.store = MemoryBlobStore(), SqlCheckpointStore("sqlite://", clock=self.clock)
        config = new_config()
        self.identity = config.identity
        self.repo = Repository(self.blobs, self.store, config)
        self.faulty = Repository(with_faults(self.blobs, self.faults), with_faults(self.store, self.faults), config)

    async def gc(self) -> None:
        await self.repo.gc(grace=0, repack="all")

    async def record(self, repo: Repository | None = None, thread_id: str = "thread") -> Event:
        """Append an event with two outputs that are too large for it."""
        engine = (repo or self.repo)._engine
        async with WriterHold(self.repo._engine, thread_id) as hold:
            claim = await claim_thread(self.repo._engine, hold.lease)
        event = Event(id=new_event_id(), kind=EventKind.EXEC_COMPLETED, sandbox_id="sandbox", exit_code=0)
        return await Recorder(engine, claim).complete(event, OUT, ERR)

    async def readable(self, thread_id: str = "thread") -> int:
        """How many events the thread has; both outputs of each are read back, from packs that are there to stay."""
        await self.gc()
        events = await self.store.events(thread_id)
        for event in events:
            assert event.stdout.ref is not None
            assert await read_output(self.repo._engine, event.stdout) == OUT
            assert await read_output(self.repo._engine, event.stderr) == ERR
        assert {pack.state for pack in await self.store.packs()} <= {PackState.LIVE, PackState.DELETED}
        assert (await self.repo.verify(read_data=True)).ok
        return len(events)


@asynccontextmanager
async def opened(prepare: Prepare, work: Path) -> AsyncIterator[Place]:
    place = Place()
    await place.store.initialize(place.identity)
    await prepare(place, work)
    yield place
    for repo in (place.repo, place.faulty):
        repo._engine.workers.shutdown()
    await place.store.close()


async def nothing(place: Place, work: Path) -> None:
    """An empty repository."""


async def garbage(place: Place, work: Path) -> None:
    """The very bytes lie in a checkpoint that was deleted."""
    work.mkdir(exist_ok=True)
    (work / "out").write_bytes(OUT)
    (work / "err").write_bytes(ERR)
    await place.repo.capture(work, thread_id="other")
    await place.repo.delete_head("other")


async def condemned(place: Place, work: Path) -> None:
    """The same, and a gc has condemned it, and keeps it for a while."""
    await garbage(place, work)
    await place.repo.gc(grace=3600, repack="none")
    place.clock.advance(3600)


@pytest.fixture(params=[nothing, garbage, condemned], ids=lambda prepare: str(prepare.__name__))
def prepare(request: pytest.FixtureRequest) -> Prepare:
    chosen: Prepare = request.param
    return chosen


async def test_gc_at_any_moment_takes_nothing_from_an_output(prepare: Prepare, tmp_path: Path) -> None:
    """Between the put of its pack and its event too."""
    for at in range(1, CALLS_AT_MOST):
        async with opened(prepare, tmp_path / "work") as place:
            place.faults.run("*", place.gc, at)
            await place.record(place.faulty)
            made = len(place.faults.log)
            assert await place.readable() == 1
        if at > made:
            break
    assert FEWEST_CALLS < at < CALLS_AT_MOST, "each call had its turn"


async def test_an_output_at_any_moment_of_a_gc_is_kept(prepare: Prepare, tmp_path: Path) -> None:
    for at in range(1, CALLS_AT_MOST):
        async with opened(prepare, tmp_path / "work") as place:

            async def record(place: Place = place) -> None:
                await place.record()

            await place.record(thread_id="earlier")
            place.faults.run("*", record, at)
            await place.faulty.gc(grace=0, repack="all")
            made = len(place.faults.log)
            assert await place.readable() == (1 if at <= made else 0)
            assert await place.readable("earlier") == 1
        if at > made:
            break
    assert FEWEST_CALLS < at < CALLS_AT_MOST, "each call had its turn"


async def test_a_process_that_ends_at_any_moment_leaves_an_event_with_its_outputs_or_neither(tmp_path: Path) -> None:
    seen = set()
    for at in range(1, CALLS_AT_MOST):
        async with opened(nothing, tmp_path / "work") as place:
            place.faults.crash("*", at)
            try:
                await place.record(place.faulty)
            except Crash:
                place.clock.advance(121)
            events = await place.readable()
            seen.add(events)
            assert bool(place.blobs.blobs) == bool(events), "no garbage is left when its lease has run out"
            made = len(place.faults.log)
        if at > made:
            break
    assert seen == {0, 1}
    assert FEWEST_CALLS < at < CALLS_AT_MOST, "each call had its turn"


async def test_a_writer_whose_lease_ran_out_stores_no_event_without_outputs(tmp_path: Path) -> None:
    async with opened(nothing, tmp_path / "work") as place:

        async def late() -> None:
            place.clock.advance(121)
            await place.gc()

        place.faults.run("append_event", late)
        with pytest.raises(CheckpointWriterLostError):
            await place.record(place.faulty)
        assert await place.readable() == 0
        assert place.blobs.blobs == {}


async def test_outputs_are_read_after_they_were_moved(tmp_path: Path) -> None:
    async with opened(nothing, tmp_path / "work") as place:
        for _ in range(3):
            await place.record()
        await garbage(place, tmp_path / "work")
        first = set(place.blobs.blobs)
        await place.repo.gc(grace=0, repack="all")
        assert await place.readable() == 3
        (tmp_path / "work" / "more").write_bytes(Random(2).randbytes(200_000))
        await place.repo.capture(tmp_path / "work", thread_id="other")
        await place.repo.delete_head("other")
        await place.repo.gc(grace=0, repack="all")
        assert await place.readable() == 3
        assert len(place.blobs.blobs) < len(first), "they lie in fewer packs now"


async def test_leases_that_nobody_can_use_any_more_are_forgotten() -> None:
    """A worker that is killed while it stores an output leaves the lease of a thread that is named at random."""
    async with opened(nothing, Path()) as place:
        for number in range(3):
            await place.store.acquire_writer(f"outputs-{number}", ttl=120)
        await place.gc()
        assert len(await leases(place.store)) == 3  # they are in force
        place.clock.advance(121)
        kept = await place.store.acquire_writer("thread", ttl=120)
        await place.gc()
        assert await leases(place.store) == ["thread"]
        await place.store.renew_writer(kept.lease)


async def leases(store: SqlCheckpointStore) -> list[str]:
    """The threads that somebody holds, or held to the end."""
    return await store._transactions.read(lambda tx: list(tx.connection.scalars(select(schema.writer_leases.c.thread_id))))
