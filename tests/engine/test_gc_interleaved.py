"""gc at every call that a capture, a restore or a fork makes to its stores, and these at every call of a gc; without grace.

Cases 34 and 35: whatever comes between two steps, each checkpoint restores, and a writer that was overtaken is told.
"""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from snapcore.config import new_config
from snapcore.errors import CheckpointWriterLostError
from snapcore.repository import Repository
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import Faults, ManualClock, with_faults
from snapcore.testing.trees import compare_trees

FIRST = {"a": b"first " * 400, "b": b"second " * 500, "folder/c": b"third " * 300}
SECOND = FIRST | {"b": b"another second " * 500}
THIRD = {"a": b"new " * 400, "b": b"newer " * 500, "folder/c": b"third " * 300}
FEWEST_CALLS, CALLS_AT_MOST = 4, 60


class Scene:
    """A repository in memory whose store has a clock of its own, and a folder to capture.

    The head of `thread` shares its first pack with a checkpoint that was deleted, so that gc repacks it. What the folder holds
    now lies in a deleted checkpoint of another thread: garbage, until somebody refers to it again.
    """

    def __init__(self, base: Path) -> None:
        self.work, self.out = base / "work", base / "out"
        self.clock = ManualClock()
        self.faults = Faults()
        self.blobs, self.store = MemoryBlobStore(), SqlCheckpointStore("sqlite://", clock=self.clock)
        config = new_config()
        self.identity = config.identity
        self.repo = Repository(self.blobs, self.store, config)
        self.faulty = Repository(with_faults(self.blobs, self.faults), with_faults(self.store, self.faults), config)

    async def prepare(self) -> None:
        await self.store.initialize(self.identity)
        self.fill(FIRST)
        first = await self.repo.capture(self.work, thread_id="thread")
        self.fill(SECOND)
        await self.repo.capture(self.work, thread_id="thread", conversation=["one", "two"])
        await self.repo.delete("thread", first.id)
        self.fill(THIRD)
        await self.repo.capture(self.work, thread_id="gone")
        await self.repo.delete_head("gone")
        with self.store._transactions._database.engine.connect() as connection:
            self.database = connection.connection.driver_connection
        assert self.database is not None
        self.saved = dict(self.blobs.blobs), self.database.serialize()

    def reset(self) -> None:
        """Go back to where `prepare` ended."""
        assert self.database is not None
        self.blobs.blobs = dict(self.saved[0])
        self.database.deserialize(self.saved[1])
        self.faults.clear()
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()

    def fill(self, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    # ---- what is done, by either side

    async def gc(self, repo: Repository) -> None:
        await repo.gc(grace=0, repack="all")

    async def capture(self, repo: Repository) -> None:
        await repo.capture(self.work, thread_id="thread", conversation=["one"])
        await self.restores_as("thread", self.work)

    async def restore(self, repo: Repository) -> None:
        assert await repo.restore(self.out, thread_id="thread")
        assert {name: (self.out / name).read_bytes() for name in SECOND} == SECOND

    async def fork(self, repo: Repository) -> None:
        await repo.fork("thread", to_thread_id="forked")

    async def fork_of_what_is_deleted(self, repo: Repository) -> None:
        await repo.fork("thread", to_thread_id="forked")
        await self.repo.delete_head("thread")

    async def rewind(self, repo: Repository) -> None:
        head = await self.repo.get("thread")
        assert head is not None
        await repo.rewind("thread", head.id)

    async def label(self, repo: Repository) -> None:
        head = await self.repo.get("thread")
        assert head is not None
        await repo.label("thread", head.id, "named")

    async def delete(self, repo: Repository) -> None:
        if await self.repo.get("thread") is not None:
            await repo.delete_head("thread")

    # ---- what must be so

    async def restores_as(self, thread_id: str, folder: Path) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        await self.repo.restore(self.out, thread_id=thread_id)
        assert compare_trees(folder, self.out) == []

    async def is_sound(self) -> None:
        """Nothing is missing, and when all is over, no garbage stays."""
        assert (await self.repo.verify(read_data=True)).problems == []
        await self.gc(self.repo)
        dead = (await self.repo.gc(grace=0, dry_run=True)).packs
        assert [pack for pack in dead if not pack.live_bytes] == []


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    await scene.prepare()
    yield scene
    scene.faults.clear()
    await scene.repo.close()
    await scene.faulty.close()


Job = Callable[[Repository], Awaitable[None]]


async def at_every_call(scene: Scene, job: Job, between: Callable[[], Awaitable[None]]) -> int:
    """Do the job once for each call that it makes, with something else before that call. Returns the number of calls."""
    for call in range(1, CALLS_AT_MOST):
        scene.reset()
        scene.faults.run("*", between, call)
        await job(scene.faulty)
        if len(scene.faults.log) < call:
            return call - 1
        await scene.is_sound()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("name", ["capture", "restore", "fork", "rewind", "label", "delete"])
async def test_a_gc_at_any_call_hurts_nothing(scene: Scene, name: str) -> None:
    """Case 34: what gc deletes was not, and is not going to be, referred to."""

    async def between() -> None:
        await scene.gc(scene.repo)

    assert await at_every_call(scene, getattr(scene, name), between) >= FEWEST_CALLS


@pytest.mark.parametrize("name", ["capture", "fork_of_what_is_deleted", "rewind", "delete"])
async def test_a_gc_is_not_disturbed_by_what_happens_at_any_of_its_calls(scene: Scene, name: str) -> None:
    """Case 34, the other way round: a whole capture, fork or deletion between two steps of a gc."""

    async def between() -> None:
        await getattr(scene, name)(scene.repo)

    assert await at_every_call(scene, scene.gc, between) >= 2 * FEWEST_CALLS


async def test_a_writer_frozen_at_any_call_until_another_took_over_is_told(scene: Scene) -> None:
    """Case 35: its lease ran out, another captured, and gc took what it had stored; the head is the other's."""
    lost = 0
    for call in range(1, CALLS_AT_MOST):
        scene.reset()

        async def take_over() -> None:
            scene.clock.advance(121)
            await scene.repo.capture(scene.work, thread_id="thread", label="other")
            await scene.gc(scene.repo)

        scene.faults.run("*", take_over, call)
        try:
            await scene.faulty.capture(scene.work, thread_id="thread", label="frozen")
        except CheckpointWriterLostError:
            lost += 1
            head = await scene.repo.get("thread")
            assert head is not None
            assert head.label == "other"
        if len(scene.faults.log) < call:
            break
        await scene.is_sound()
    assert lost >= FEWEST_CALLS
