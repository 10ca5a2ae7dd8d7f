"""Users' own handles, from six methods to all, pass the conformance suite and finish a restore that died."""

import asyncio
import errno
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.model import Kind, Note
from snapcore.protocols import (
    FileHandle,
    PlaceStep,
    RemoveStep,
    SetMetaStep,
    StageFolder,
    StageHardLink,
    StageLink,
    StageWrite,
    Step,
    Workspace,
)
from snapcore.providers.direct import DirectWorkspace
from snapcore.providers.direct_stage import DirectStage
from snapcore.providers.perfile import PerFileWorkspace
from snapcore.testing.trees import compare_trees, make_tree
from snapcore.testing.workspace_suite import WorkspaceTests, restore, scan_all, staged_file


class SixHandle:
    """The six methods, plain; `read` gives the whole file."""

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def list(self, path: str) -> list[str]:
        return os.listdir(path)

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def remove(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        else:
            os.unlink(path)


class PlainHandle(SixHandle):
    """Every optional method too; `read` is an iterator."""

    sandbox_id = "plain://one"

    def read(self, path: str) -> Iterator[bytes]:  # type: ignore[override]
        with open(path, "rb") as file:
            while piece := file.read(100_000):
                yield piece

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, path)

    def readlink(self, path: str) -> str:
        return os.readlink(path)

    def link(self, existing: str, path: str) -> None:
        os.link(existing, path, follow_symlinks=False)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(path, mode)

    def utime(self, path: str, mtime_ns: int) -> None:
        os.utime(path, ns=(mtime_ns, mtime_ns))


class AsyncHandle:
    """Async methods; `read` is an async generator; `rename` refuses to replace."""

    def __init__(self) -> None:
        self.local = PlainHandle()

    async def lstat(self, path: str) -> os.stat_result:
        return self.local.lstat(path)

    async def list(self, path: str) -> "list[str]":
        return self.local.list(path)

    async def read(self, path: str) -> AsyncIterator[bytes]:
        for piece in self.local.read(path):
            yield piece

    async def write(self, path: str, data: bytes) -> None:
        self.local.write(path, data)

    async def mkdir(self, path: str) -> None:
        self.local.mkdir(path)

    async def remove(self, path: str) -> None:
        self.local.remove(path)

    async def rename(self, old: str, new: str) -> None:
        if os.path.lexists(new):
            raise FileExistsError(new)
        self.local.rename(old, new)

    async def symlink(self, target: str, path: str) -> None:
        self.local.symlink(target, path)

    async def readlink(self, path: str) -> str:
        return self.local.readlink(path)

    async def link(self, existing: str, path: str) -> None:
        self.local.link(existing, path)

    async def chmod(self, path: str, mode: int) -> None:
        self.local.chmod(path, mode)

    async def utime(self, path: str, mtime_ns: int) -> None:
        self.local.utime(path, mtime_ns)


class TestPlainHandle(WorkspaceTests):
    def make_workspace(self, root: Path) -> Workspace:
        return PerFileWorkspace(PlainHandle(), str(root))


class TestAsyncHandle(WorkspaceTests):
    def make_workspace(self, root: Path) -> Workspace:
        return PerFileWorkspace(AsyncHandle(), str(root))


class TestSixMethods(WorkspaceTests):
    def make_workspace(self, root: Path) -> Workspace:
        return PerFileWorkspace(SixHandle(), str(root))


class NoRename(PlainHandle):
    """Links, but no rename: staged files are copied into place."""

    rename = property()  # pyright: ignore[reportAssignmentType]


class TestNoRename(WorkspaceTests):
    def make_workspace(self, root: Path) -> Workspace:
        return PerFileWorkspace(NoRename(), str(root))


class Dying:
    """Passes calls on to a handle until the one of that number, which it and all later ones refuse: a process that died,
    as the sandbox sees it."""

    class Died(BaseException):
        pass

    def __init__(self, handle: FileHandle, at: int) -> None:
        self.handle = handle
        self.counter = itertools.count()
        self.at = at

    def __getattr__(self, name: str) -> object:
        method = getattr(self.handle, name)
        if name in ("lstat", "list", "read", "readlink", "sandbox_id"):
            return method

        def call(*args: object) -> object:
            if next(self.counter) >= self.at:
                raise self.Died
            return method(*args)

        return call


WRITES: list[StageWrite] = [
    staged_file(b"0", b"new"),
    StageFolder(b"1"),
    staged_file(b"1/in", b"in", 0o444),
    StageFolder(b"1/deep"),
    staged_file(b"1/deep/er", b"er"),
    staged_file(b"2", b"shared"),
    StageHardLink(b"3", b"2"),
    StageLink(b"4", b"run.sh", 0),
    staged_file(b"5", b"was a folder"),
]
STEPS: list[Step] = [
    RemoveStep(b"a/inside", False),
    RemoveStep(b"private", True),
    RemoveStep(b"private/key", False),
    RemoveStep(b"private/run-too.sh", False),
    RemoveStep(b"read-only.txt", False),
    PlaceStep(b"0", b"nothing.txt"),
    PlaceStep(b"1", b"added"),
    PlaceStep(b"2", b"a/inside"),
    PlaceStep(b"3", b"two"),
    PlaceStep(b"4", b"dangling"),
    PlaceStep(b"5", b"private"),
    SetMetaStep(b"added", 0o755, 1_000_000_000),
]


def differences(a: Path, b: Path) -> list[str]:
    return [line for line in compare_trees(a, b, excluded=lambda name: name == b"app.db") if ": mtime" not in line]


@pytest.mark.parametrize("make_handle", [PlainHandle, NoRename])
async def test_a_restore_that_dies_at_any_call_is_swept_or_finished(
    tmp_path: Path, make_handle: Callable[[], FileHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapcore.providers.perfile_lock.is_gone", lambda holder: True)  # the "dead" one is this process
    monkeypatch.setattr("snapcore.providers.perfile_lock.OWNER_SECONDS", 0)
    old, new = tmp_path / "old", tmp_path / "new"
    make_tree(old, files=5)
    make_tree(new, files=5)
    assert (await restore(PerFileWorkspace(make_handle(), str(new)), WRITES, STEPS)).undone == ()
    outcomes = []
    for at in range(500):
        root = tmp_path / f"t{at}"
        make_tree(root, files=5)
        try:
            await restore(PerFileWorkspace(Dying(make_handle(), at), str(root)), WRITES, STEPS)  # type: ignore[arg-type]
            break
        except Dying.Died:
            pass
        outcome = await PerFileWorkspace(make_handle(), str(root)).recover()
        assert not any(name.startswith(".snapcore") for name in os.listdir(root))
        as_new, as_old = differences(root, new), differences(root, old)
        assert [] in (as_new, as_old), (at, outcome, as_new, as_old)
        outcomes.append((outcome, as_new == []))
    order = [("", False), ("swept", False), ("finished", True), ("swept", True)]
    assert [outcome for outcome, _ in itertools.groupby(outcomes)] == order


async def test_a_handle_can_finish_what_a_local_restore_left(tmp_path: Path) -> None:
    stage = await DirectWorkspace(tmp_path).open_stage()
    await stage.write([staged_file(b"0", b"x")])
    await stage.log([PlaceStep(b"0", b"file")])
    await stage.seal(durable=False)
    workspace = PerFileWorkspace(PlainHandle(), str(tmp_path))
    with pytest.raises(ProviderError) as caught:
        await workspace.recover()
    assert caught.value.code == Code.WORKSPACE_BUSY
    assert isinstance(stage, DirectStage)
    stage.drop()
    long_ago = 1_000_000_000
    os.utime(tmp_path / ".snapcore-stage" / "owner", (long_ago, long_ago))
    assert await workspace.recover() == "finished"
    assert (tmp_path / "file").read_text() == "x"
    assert os.listdir(tmp_path) == ["file"]


async def test_a_swap_that_was_cut_short_is_finished_once_it_was_let_go(tmp_path: Path) -> None:
    class CutShort(PlainHandle):
        def rename(self, old: str, new: str) -> None:
            if old.endswith("/0"):
                raise Dying.Died
            super().rename(old, new)

    stage = await PerFileWorkspace(CutShort(), str(tmp_path)).open_stage()
    await stage.write([staged_file(b"0", b"x")])
    await stage.log([PlaceStep(b"0", b"file")])
    await stage.seal(durable=True)
    with pytest.raises(Dying.Died):
        await stage.swap()
    await stage.abort()
    assert not (tmp_path / "file").exists()
    assert await PerFileWorkspace(PlainHandle(), str(tmp_path)).recover() == "finished"
    assert (tmp_path / "file").read_text() == "x"


async def test_a_stage_that_was_taken_over_is_not_swapped(tmp_path: Path) -> None:
    stage = await PerFileWorkspace(PlainHandle(), str(tmp_path)).open_stage()
    await stage.log([])
    owner = tmp_path / ".snapcore-stage" / "owner"
    mine = owner.read_bytes()
    owner.write_bytes(b"{}")
    with pytest.raises(ProviderError) as caught:
        await stage.seal(durable=False)
    assert caught.value.code == Code.WORKSPACE_BUSY
    owner.write_bytes(mine)
    await stage.abort()


async def test_a_swap_finishes_although_its_caller_is_cancelled(tmp_path: Path) -> None:
    stage = await PerFileWorkspace(AsyncHandle(), str(tmp_path)).open_stage()
    await stage.write([staged_file(b"%d" % number, b"x") for number in range(40)])
    await stage.log([PlaceStep(b"%d" % number, b"f%d" % number) for number in range(40)])
    await stage.seal(durable=False)
    task = asyncio.create_task(stage.swap())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(os.listdir(tmp_path)) == 40


async def test_a_remove_that_takes_whole_folders_is_not_given_one_with_something_in_it(tmp_path: Path) -> None:
    class Sweeping(PlainHandle):
        def remove(self, path: str) -> None:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "unplanned").touch()
    report = await restore(PerFileWorkspace(Sweeping(), str(tmp_path)), [], [RemoveStep(b"folder", True)])
    assert report.undone == ((b"folder", "the folder is not empty"),)
    assert (tmp_path / "folder" / "unplanned").exists()


async def test_links_in_a_new_folder_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    report = await restore(
        PerFileWorkspace(SixHandle(), str(tmp_path)),
        [StageFolder(b"0"), staged_file(b"0/file", b"x"), StageLink(b"0/sub", b"file", 0)],
        [PlaceStep(b"0", b"folder")],
    )
    assert report.undone == ((b"folder/sub", "this sandbox handle cannot make links"),)
    assert os.listdir(tmp_path / "folder") == ["file"]


async def test_links_whose_target_cannot_be_seen_are_noted(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("x")
    (entry,) = [found for found in await scan_all(PerFileWorkspace(SixHandle(), str(tmp_path))) if found.path]
    assert (entry.kind, entry.note) == (Kind.LINK, Note.UNREADABLE)


def test_a_handle_without_an_id_has_none() -> None:
    """So no stats are kept for it, which another sandbox's files could be taken for."""
    assert PerFileWorkspace(SixHandle(), "/x").sandbox_id == ""
    assert PerFileWorkspace(PlainHandle(), "/x").sandbox_id == "plain://one"


class OneAtATimeFails(AsyncHandle):
    """Of the calls that are made side by side the third fails at once, while the others are still on their way."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.started = self.running = 0
        self.busy = asyncio.Event()

    async def meet(self, method: str) -> None:
        if method != self.method:
            return
        self.started += 1
        if self.started == 3:
            raise OSError(errno.ENOSPC, "no space left")
        self.running += 1
        self.busy.set()
        try:
            for _ in range(50):
                await asyncio.sleep(0)
        finally:
            self.running -= 1

    async def write(self, path: str, data: bytes) -> None:
        if "/new/" in path:
            await self.meet("write")
        await super().write(path, data)

    async def lstat(self, path: str) -> os.stat_result:
        if path.endswith(".txt"):
            await self.meet("lstat")
        return await super().lstat(path)


async def test_a_write_that_fails_leaves_none_of_its_batch_at_work_and_no_stage(tmp_path: Path) -> None:
    handle = OneAtATimeFails("write")
    stage = await PerFileWorkspace(handle, str(tmp_path)).open_stage()
    with pytest.raises(ProviderError) as caught:
        await stage.write([staged_file(b"%d" % number, b"x") for number in range(12)])
    assert caught.value.code == Code.SANDBOX_FULL
    assert (handle.started, handle.running) == (12, 0)
    await stage.abort()
    assert os.listdir(tmp_path) == []


async def test_a_scan_that_fails_or_is_cancelled_leaves_nothing_at_work(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number}.txt").touch()
    handle = OneAtATimeFails("lstat")
    with pytest.raises(ProviderError):
        await scan_all(PerFileWorkspace(handle, str(tmp_path)))
    assert (handle.started, handle.running) == (12, 0)
    handle.started = 3
    handle.busy.clear()
    scanning = asyncio.create_task(scan_all(PerFileWorkspace(handle, str(tmp_path))))
    await handle.busy.wait()
    scanning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scanning
    assert handle.running == 0


async def test_an_unreachable_handle_is_a_typed_error(tmp_path: Path) -> None:
    class Broken(SixHandle):
        def lstat(self, path: str) -> os.stat_result:
            raise ConnectionResetError(104, "connection reset")

    workspace = PerFileWorkspace(Broken(), str(tmp_path))
    for act in (workspace.open_stage, workspace.recover):
        with pytest.raises(ProviderError):
            await act()
    with pytest.raises(ProviderError):
        await scan_all(workspace)


async def test_a_stage_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / ".snapcore-stage").touch()
    with pytest.raises(SnapshotError) as caught:
        await PerFileWorkspace(PlainHandle(), str(tmp_path)).open_stage()
    assert caught.value.paths == (b".snapcore-stage",)
