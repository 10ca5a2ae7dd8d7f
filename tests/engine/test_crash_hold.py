"""Captures and swaps of one local folder keep apart, within a process and between processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

import snapcore
from snapcore.errors import Code, ProviderError
from snapcore.model import FileStat
from snapcore.protocols import PlaceStep, ReadBlock, ScanSelection
from snapcore.providers.direct import DirectWorkspace
from snapcore.providers.direct_stage import DirectStage
from snapcore.testing.trees import compare_trees
from snapcore.testing.workspace_suite import staged_file

from .crash_helpers import THREAD, Scene, leaks_nothing, make_scene, stage_names


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    with leaks_nothing():
        yield


@pytest.fixture
async def scene(tmp_path: Path) -> Scene:
    return await make_scene(tmp_path, files=25)


class PausingWorkspace(DirectWorkspace):
    """Lets the test act while a capture is under way: after the scan's first batch, or before anything is read."""

    def __init__(self, root: Path, at: str) -> None:
        super().__init__(root)
        self._at = at
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        async for batch in super().scan(selection, cross_mounts=cross_mounts):
            yield batch
            await self._pause("scan")

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        await self._pause("read")
        async for blocks in super().read(files):
            yield blocks

    async def _pause(self, where: str) -> None:
        if where == self._at and not self.reached.is_set():
            self.reached.set()
            await self.go_on.wait()


CHILD = """
import asyncio, sys, snapcore
from snapcore.errors import SnapcoreError
from snapcore.providers.direct import DirectWorkspace
async def main():
    async with snapcore.open_repository(sys.argv[1]) as repo:
        try:
            workspace = DirectWorkspace(sys.argv[2], busy_seconds=float(sys.argv[4]))
            await repo.restore(workspace, thread_id="thread", checkpoint_id=sys.argv[3])
        except SnapcoreError as error:
            print(error.code)
        else:
            print("done")
asyncio.run(main())
"""


async def restore_elsewhere(scene: Scene, busy_seconds: float) -> asyncio.subprocess.Process:
    """A process of its own that restores the first checkpoint."""
    arguments = (scene.repo, scene.work, scene.checkpoints[0].id, str(busy_seconds))
    return await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, *arguments, stdout=subprocess.PIPE)


async def answer(process: asyncio.subprocess.Process) -> str:
    output, _ = await process.communicate()
    return output.decode().strip()


@pytest.mark.parametrize("at", ["scan", "read"])
async def test_a_restore_that_begins_during_a_capture_waits_for_it(scene: Scene, at: str) -> None:
    workspace = PausingWorkspace(scene.work, at)
    async with snapcore.open_repository(scene.repo) as repo:
        capturing = asyncio.create_task(repo.capture(workspace, thread_id=THREAD, reread=True))
        await workspace.reached.wait()
        restoring = await restore_elsewhere(scene, 60)
        while not (scene.work / ".snapcore-stage" / "journal.part").exists():  # noqa: ASYNC110 (of another process)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # room to go wrong in
        assert compare_trees(scene.work, scene.trees[1], excluded=_stage_too) == []
        workspace.go_on.set()
        assert (await capturing).content_id == scene.checkpoints[1].content_id
        assert await answer(restoring) == "done"
        assert compare_trees(scene.work, scene.trees[0]) == []
        assert (await repo.capture(scene.work, thread_id=THREAD)).content_id == scene.checkpoints[0].content_id


def _stage_too(name: bytes) -> bool:
    return name in (b"node_modules", b".git", b"__pycache__") or name.startswith((b".env", b".snapcore"))


async def test_a_restore_gives_up_when_a_capture_takes_too_long_and_has_changed_nothing(scene: Scene) -> None:
    workspace = PausingWorkspace(scene.work, "read")
    async with snapcore.open_repository(scene.repo) as repo:
        capturing = asyncio.create_task(repo.capture(workspace, thread_id=THREAD, reread=True))
        await workspace.reached.wait()
        assert await answer(await restore_elsewhere(scene, 0.1)) == Code.WORKSPACE_BUSY
        assert stage_names(scene.work) == []
        workspace.go_on.set()
        assert (await capturing).content_id == scene.checkpoints[1].content_id
        assert compare_trees(scene.work, scene.trees[1], folder_times=True) == []


async def test_captures_of_one_folder_do_not_exclude_each_other(scene: Scene) -> None:
    workspace = PausingWorkspace(scene.work, "read")
    async with snapcore.open_repository(scene.repo) as repo:
        capturing = asyncio.create_task(repo.capture(workspace, thread_id=THREAD, reread=True))
        await workspace.reached.wait()
        other = await repo.capture(scene.work, thread_id="another")
        workspace.go_on.set()
        assert (await capturing).content_id == other.content_id


async def test_a_capture_waits_for_a_swap_and_saves_its_result(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swap is held up between two of its steps."""
    real, loop = os.rename, asyncio.get_running_loop()
    half, go_on = asyncio.Event(), asyncio.Event()
    steps = 0

    def slow(*args: object, **kwargs: object) -> None:
        nonlocal steps
        real(*args, **kwargs)  # type: ignore[arg-type]
        steps += 1
        if steps == 6:
            loop.call_soon_threadsafe(half.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

    monkeypatch.setattr(os, "rename", slow)
    async with snapcore.open_repository(scene.repo) as repo:
        restoring = asyncio.create_task(repo.restore(scene.work, thread_id=THREAD, checkpoint_id=scene.checkpoints[0].id))
        await half.wait()
        assert compare_trees(scene.work, scene.trees[1], excluded=_stage_too) != []
        assert compare_trees(scene.work, scene.trees[0], excluded=_stage_too) != []
        with pytest.raises(ProviderError) as caught:
            await repo.capture(DirectWorkspace(scene.work, busy_seconds=0.1), thread_id=THREAD)
        assert caught.value.code == Code.WORKSPACE_BUSY
        assert caught.value.retryable
        capturing = asyncio.create_task(repo.capture(scene.work, thread_id=THREAD))
        await asyncio.sleep(0.1)
        assert not capturing.done()
        go_on.set()
        await restoring
        assert (await capturing).content_id == scene.checkpoints[0].content_id


async def test_a_dry_run_plans_against_the_finished_tree_of_a_dead_restore(scene: Scene) -> None:
    (await sealed(scene.work)).drop()
    async with snapcore.open_repository(scene.repo) as repo, DirectWorkspace(scene.work).hold():
        receipt = await repo.restore(scene.work, thread_id=THREAD, dry_run=True)
        assert receipt is not None
        assert receipt.plan is not None
        assert receipt.plan.removes == (b"file",)
        assert receipt.plan.changes == receipt.plan.adds == ()


async def sealed(root: Path) -> DirectStage:
    stage = await DirectWorkspace(root).open_stage()
    await stage.write([staged_file(b"0", b"restored")])
    await stage.log([PlaceStep(b"0", b"file")])
    await stage.seal(durable=False)
    assert isinstance(stage, DirectStage)
    return stage


async def test_a_hold_finishes_what_a_dead_restore_left_before_anything_is_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    stage = await sealed(root)
    stage.drop()
    async with DirectWorkspace(root).hold():
        assert os.listdir(root) == ["file"]


async def test_a_restore_that_dies_between_recovery_and_hold_is_finished_too(tmp_path: Path) -> None:
    """The last look is taken under the lock."""
    root = tmp_path / "root"
    root.mkdir()
    rounds = 0

    class LateWorkspace(DirectWorkspace):
        async def recover(self):  # type: ignore[no-untyped-def]
            nonlocal rounds
            rounds += 1
            outcome = await super().recover()
            if rounds == 1:
                (await sealed(root)).drop()
            return outcome

    async with LateWorkspace(root).hold():
        assert os.listdir(root) == ["file"]
    assert rounds == 2


async def test_no_second_swap_comes_before_the_first_result_was_looked_at(tmp_path: Path) -> None:
    """Else the stats of another restore's files would be remembered for this one's contents."""
    root = tmp_path / "root"
    root.mkdir()
    stage = await sealed(root)
    await stage.swap()
    second = await DirectWorkspace(root, busy_seconds=0.1).open_stage()
    await second.log([])
    with pytest.raises(ProviderError) as caught:
        await second.seal(durable=False)
    assert caught.value.code == Code.WORKSPACE_BUSY
    await stage.abort()
    await second.seal(durable=False)
    await second.swap()
    await second.abort()
    assert os.listdir(root) == ["file"]


async def test_a_hold_of_a_process_that_was_killed_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    script = (
        "import asyncio, sys\n"
        "from snapcore.providers.direct import DirectWorkspace\n"
        "async def main():\n"
        "    async with DirectWorkspace(sys.argv[1]).hold():\n"
        "        print('held', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", script, root, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"held\n"
    stage = await DirectWorkspace(root, busy_seconds=0.1).open_stage()
    with pytest.raises(ProviderError):
        await stage.seal(durable=False)
    child.send_signal(signal.SIGKILL)
    await child.communicate()
    await stage.seal(durable=False)
    await stage.swap()
    await stage.abort()
