"""A writer that is frozen until its lease has run out and another has taken over."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import snapcore
from snapcore.errors import CheckpointWriterConflictError, Code
from snapcore.testing.trees import compare_trees

from .crash_helpers import THREAD, Scene, make_scene, sound

FREEZING = """
import asyncio, os, signal, sys
import snapcore, snapcore.packwriter
from snapcore.errors import SnapcoreError
from snapcore.repository import Repository
from snapcore.testing import Faults, with_faults

snapcore.packwriter.TARGET_PACK_BYTES = 12_000

async def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)

async def main():
    faults = Faults()
    faults.run(sys.argv[3], freeze)
    async with snapcore.open_repository(sys.argv[1]) as opened:
        repo = Repository(with_faults(opened.blobs, faults), with_faults(opened.checkpoints, faults), opened.config)
        try:
            made = await repo.capture(sys.argv[2], thread_id="thread", lease_ttl=6.0, conversation=["frozen"])
        except SnapcoreError as error:
            print(error.code)
        else:
            print(made.id)

asyncio.run(main())
"""


@pytest.fixture
async def scene(tmp_path: Path) -> Scene:
    return await make_scene(tmp_path, files=25)


def start(scene: Scene, frozen_at: str) -> subprocess.Popen[str]:
    """A process that captures, and freezes before the first call of that store method."""
    return subprocess.Popen(
        [sys.executable, "-c", FREEZING, scene.repo, scene.work, frozen_at], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("frozen_at", ["known", "put", "add_pack", "append"])
async def test_a_writer_that_thaws_after_another_took_over_is_told_and_changes_nothing(scene: Scene, frozen_at: str) -> None:
    """Cases 35 and 38: wherever it was frozen, the commit of the other is the head."""
    for name in range(6):
        (scene.work / f"fresh-{name}").write_bytes(os.urandom(5000))
    child = start(scene, frozen_at)
    _, status = await asyncio.to_thread(os.waitpid, child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    async with snapcore.open_repository(scene.repo) as repo:
        with pytest.raises(CheckpointWriterConflictError):  # frozen is not dead: its lease has to run out
            await repo.capture(scene.work, thread_id=THREAD, wait=0)
        winner = await repo.capture(scene.work, thread_id=THREAD, wait=60)
        os.kill(child.pid, signal.SIGCONT)
        output, _ = await asyncio.to_thread(child.communicate)
        assert output.strip() == Code.WRITER_LOST
        ids = [c.id for c in await repo.list(THREAD)]
        assert ids == [*(c.id for c in scene.checkpoints), winner.id]
        await sound(repo, scene.work, scene.base / "scratch", ids)


async def test_a_writer_that_thaws_after_its_lease_ran_out_is_told_though_nobody_took_over(scene: Scene) -> None:
    child = start(scene, "append")
    await asyncio.to_thread(os.waitpid, child.pid, os.WUNTRACED)
    async with snapcore.open_repository(scene.repo) as repo:
        database = sqlite3.connect(scene.repo / "snapcore.db")
        ((expires_at,),) = database.execute("select expires_at from writer_leases").fetchall()
        database.close()
        while (left := expires_at - await repo.checkpoints.now()) >= 0:  # noqa: ASYNC110 (of the database's clock)
            await asyncio.sleep(left / 1e6 + 0.001)
        os.kill(child.pid, signal.SIGCONT)
        output, _ = await asyncio.to_thread(child.communicate)
        assert output.strip() == Code.WRITER_LOST
        assert [c.id for c in await repo.list(THREAD)] == [c.id for c in scene.checkpoints]
        await repo.capture(scene.work, thread_id=THREAD, wait=5)


async def test_a_restore_needs_no_lease(scene: Scene) -> None:
    async with snapcore.open_repository(scene.repo) as repo:
        lease = (await repo.checkpoints.acquire_writer(THREAD)).lease
        await repo.restore(scene.work, thread_id=THREAD, checkpoint_id=scene.checkpoints[0].id)
        assert compare_trees(scene.work, scene.trees[0]) == []
        await repo.checkpoints.release_writer(lease)
