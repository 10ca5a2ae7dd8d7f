"""Full disks: of the repository while it is captured into, of the workspace while it is restored."""

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapcore
from snapcore.errors import Code, ProviderError, RepositoryError
from snapcore.repository import Repository
from snapcore.testing.trees import compare_trees, make_tree

from ..disks import disk_at  # noqa: TID252 (tests are no package that could be named)
from .crash_helpers import THREAD, copy_tree, leaks_nothing, sound, stage_names


class Disk:
    """A file system of its own, of a size that can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def resize(self, mebibytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={mebibytes}m", self.path], check=True)

    def leave(self, free: int) -> None:
        """Fill the disk up to so many bytes."""
        self.empty()
        room = os.statvfs(self.path)
        size = room.f_bavail * room.f_frsize - free
        if size > 0:
            self._filler.write_bytes(bytes(size))

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with disk_at(tmp_path / "disk", "size=4m") as folder, leaks_nothing():
        yield Disk(folder)


async def thread_ids(repo: Repository) -> list[str]:
    return [c.id for c in await repo.list(THREAD)]


async def test_a_capture_into_a_full_repository_moves_no_head_and_works_once_there_is_room(disk: Disk, tmp_path: Path) -> None:
    work = tmp_path / "work"
    make_tree(work, files=20)
    async with snapcore.open_repository(disk.path / "repo") as repo:
        await repo.capture(work, thread_id=THREAD)
        ids = await thread_ids(repo)
        (work / "big").write_bytes(random.Random(1).randbytes(6 << 20))
        with pytest.raises(RepositoryError) as caught:
            await repo.capture(work, thread_id=THREAD)
        assert caught.value.code == Code.STORE_FULL
        assert caught.value.retryable
        assert await thread_ids(repo) == ids
        assert (await repo.verify(read_data=True)).ok
        disk.resize(64)
        await sound(repo, work, tmp_path / "scratch", ids)


async def test_wherever_the_repositorys_disk_fills_up(disk: Disk, tmp_path: Path) -> None:
    """From no free byte to just enough: the pack, the log of the database or nothing at all fits."""
    work = tmp_path / "work"
    make_tree(work, files=20)
    outcomes = set()
    async with snapcore.open_repository(disk.path / "repo") as repo:
        await repo.capture(work, thread_id=THREAD)
        for step, free in enumerate(range(0, 400_000, 24_576)):
            ids = await thread_ids(repo)
            for name in range(4):
                (work / f"fresh-{name}").write_bytes(random.Random(100 * step + name).randbytes(20_000))
            disk.leave(free)
            try:
                await repo.capture(work, thread_id=THREAD)
                outcomes.add("done")
            except RepositoryError as error:
                outcomes.add(error.code)
                assert await thread_ids(repo) == ids
            disk.empty()
            await sound(repo, work, tmp_path / "scratch", await thread_ids(repo))
            disk.resize(4 + step)
    assert outcomes == {"done", Code.STORE_FULL}


async def test_a_restore_from_a_repository_on_a_full_disk_works_or_says_why_not(disk: Disk, tmp_path: Path) -> None:
    """Even to read, SQLite needs a little room beside its file."""
    make_tree(tmp_path / "work", files=20)
    async with snapcore.open_repository(disk.path / "repo") as repo:
        await repo.capture(tmp_path / "work", thread_id=THREAD)
    disk.leave(0)
    with pytest.raises(RepositoryError) as caught:
        async with snapcore.open_repository(disk.path / "repo") as repo:
            await repo.restore(tmp_path / "copy", thread_id=THREAD)
    assert caught.value.code in (Code.STORE_FULL, Code.STORE_UNAVAILABLE)
    assert caught.value.retryable
    assert not (tmp_path / "copy").exists()
    disk.leave(128 << 10)
    async with snapcore.open_repository(disk.path / "repo") as repo:
        await repo.restore(tmp_path / "copy", thread_id=THREAD)
    assert compare_trees(tmp_path / "work", tmp_path / "copy") == []


async def test_a_restore_onto_a_full_disk_leaves_the_workspace_and_works_once_there_is_room(disk: Disk, tmp_path: Path) -> None:
    source, work = tmp_path / "source", disk.path / "work"
    make_tree(source, files=20, big_bytes=6 << 20)
    make_tree(work, files=20, seed=2)
    copy_tree(work, tmp_path / "before")
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        await repo.capture(source, thread_id=THREAD)
        with pytest.raises(ProviderError) as caught:
            await repo.restore(work, thread_id=THREAD)
        assert caught.value.code == Code.SANDBOX_FULL
        assert stage_names(work) == []
        assert compare_trees(work, tmp_path / "before", folder_times=True) == []
        disk.resize(64)
        await repo.restore(work, thread_id=THREAD)
        assert compare_trees(work, source) == []


async def test_wherever_the_workspaces_disk_fills_up(disk: Disk, tmp_path: Path) -> None:
    source, work = tmp_path / "source", disk.path / "work"
    make_tree(source, files=20)
    make_tree(work, files=20, seed=2)
    copy_tree(work, tmp_path / "before")
    outcomes = set()
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        first = await repo.capture(work, thread_id=THREAD)
        second = await repo.capture(source, thread_id=THREAD)
        for free in range(0, 700_000, 57_344):
            disk.leave(free)
            try:
                await repo.restore(work, thread_id=THREAD, checkpoint_id=second.id)
                outcomes.add("done")
            except ProviderError as error:
                outcomes.add(error.code)
                assert stage_names(work) == []
                assert compare_trees(work, tmp_path / "before") == []
                continue
            assert compare_trees(work, source) == []
            disk.empty()
            await repo.restore(work, thread_id=THREAD, checkpoint_id=first.id)
    assert outcomes == {"done", Code.SANDBOX_FULL}
