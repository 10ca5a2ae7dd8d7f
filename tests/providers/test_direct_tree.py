"""Local trees that are deep, hostile, special, mounted or not the superuser's."""

import asyncio
import contextlib
import gc
import os
import shutil
import socket
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.model import FileStat, Kind, Note
from snapcore.protocols import PlaceStep, RemoveStep, SetMetaStep, StageFile, StageFolder, StageLink, StageWrite, Step
from snapcore.providers.direct import DirectWorkspace
from snapcore.providers.direct_stage import DirectStage
from snapcore.providers.folders import FOLDER_FLAGS, FolderCache, remove_tree
from snapcore.providers.local import LocalSandbox, connect
from snapcore.testing.workspace_suite import Selecting, read_all, restore, scan_all, staged_file

AsUser = Callable[[Callable[[Path], None]], Path]
DEPTH = 2200


def notes(found: list[FileStat]) -> dict[bytes, str]:
    return {entry.path: entry.note for entry in found}


# ---- deep trees


def make_deep(root: Path, depth: int) -> None:
    """Nested folders, each with a file; longer than PATH_MAX in all, so made one by one."""
    fd = os.open(root, FOLDER_FLAGS)
    for _ in range(depth):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=fd))
        os.mkdir("folder", dir_fd=fd)
        below = os.open("folder", FOLDER_FLAGS, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A tree of nested folders, removed afterwards: neither pytest nor shutil can."""
    root = tmp_path / "deep"
    root.mkdir()
    make_deep(root, DEPTH)
    yield root
    with FolderCache(os.open(tmp_path, FOLDER_FLAGS)) as folders:
        remove_tree(folders, b"deep")


async def test_a_tree_deeper_than_path_max_is_scanned_read_and_restored(deep: Path, tmp_path: Path) -> None:
    source, target = deep, tmp_path / "target"
    found = await scan_all(DirectWorkspace(source))
    assert len(found) == 2 * DEPTH + 1
    assert len(found[-1].path) > os.pathconf("/", "PC_PATH_MAX")
    files = [entry for entry in found if entry.kind == Kind.FILE]
    assert all(not last.problem for _, last in await read_all(DirectWorkspace(source), files))

    workspace = DirectWorkspace(target)
    writes: list[StageWrite] = [
        StageFolder(entry.path) if entry.kind == Kind.DIR else staged_file(entry.path, b"") for entry in found[1:]
    ]
    steps: list[Step] = [PlaceStep(name, name) for name in (b"file", b"folder")]
    steps += [SetMetaStep(entry.path, 0o755, entry.mtime_ns) for entry in found[1:] if entry.kind == Kind.DIR]
    assert (await restore(workspace, writes, steps)).undone == ()
    restored = await scan_all(workspace)
    assert [(entry.path, entry.kind) for entry in restored] == [(entry.path, entry.kind) for entry in found]

    removals: list[Step] = [RemoveStep(entry.path, entry.kind == Kind.DIR) for entry in found[1:]]
    assert (await restore(workspace, [], removals)).undone == ()
    assert os.listdir(target) == []


async def test_a_deep_stage_is_swept(tmp_path: Path) -> None:
    stage = await DirectWorkspace(tmp_path).open_stage()
    make_deep(tmp_path / ".snapcore-stage" / "new", DEPTH)
    await stage.abort()
    assert os.listdir(tmp_path) == []


def test_the_folder_cache_keeps_few_descriptors_and_finds_evicted_folders(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"d{number}" / "sub").mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with FolderCache(os.open(tmp_path, FOLDER_FLAGS), limit=4) as folders:
        for _ in range(2):
            for number in range(20):
                path = b"d%d/sub" % number
                assert os.path.samestat(os.fstat(folders.fd(path)), os.stat(tmp_path / os.fsdecode(path)))
        assert len(os.listdir("/proc/self/fd")) <= before + 5
    assert len(os.listdir("/proc/self/fd")) == before


def open_files() -> list[str]:
    """What this process has open below any temporary folder."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(link for link in links)


async def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(20 << 20))
    (tmp_path / "d").mkdir()
    gc.collect()  # what other tests dropped
    before = open_files()
    workspace = DirectWorkspace(tmp_path)
    found = await scan_all(workspace)
    blocks = workspace.read([entry for entry in found if entry.kind == Kind.FILE])
    async for _ in blocks:
        break  # in the middle of a file
    await blocks.aclose()  # type: ignore[attr-defined]
    await restore(workspace, [staged_file(b"0", b"x")], [PlaceStep(b"0", b"d/file"), RemoveStep(b"big", False)])
    await (await workspace.open_stage()).abort()
    assert open_files() == before


async def test_a_large_folder_is_scanned_as_a_small_one_and_kept_as_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / "large").mkdir(parents=True)
    for number in range(200):
        (root / "large" / f"f{number}").write_text("x" * number)
    for number in range(140):  # more than descriptors are kept open, so that the large folder's is closed in between
        (root / "large" / f"d{number}" / "sub").mkdir(parents=True)
    (root / "large" / "link").symlink_to("f1")
    (root / "large" / "out").symlink_to("/etc")
    os.mkfifo(root / "large" / "fifo")
    (root / ".snapcore-stage").mkdir()
    plain = await scan_all(DirectWorkspace(root))
    monkeypatch.setattr("snapcore.providers.direct.LARGE_FOLDER", 2)
    monkeypatch.setattr("snapcore.providers.direct.SCAN_BATCH", 50)
    assert await scan_all(DirectWorkspace(root)) == plain

    selection = Vanishing(root / "large", at=b"large/f100")
    found = {entry.path for entry in await scan_all(DirectWorkspace(root), selection)}
    assert b"large/f100" in found
    assert b"large/f99" not in found


class Vanishing(Selecting):
    """Empties a folder when the scan gets to a path."""

    def __init__(self, folder: Path, at: bytes) -> None:
        super().__init__()
        self.folder, self.at = folder, at

    def excludes(self, path: bytes, kind: int) -> bool:
        if path == self.at:
            shutil.rmtree(self.folder)
        return super().excludes(path, kind)


async def test_a_large_folder_takes_little_memory(tmp_path: Path) -> None:
    count = 40_000
    fd = os.open(tmp_path, FOLDER_FLAGS)
    for number in range(count):
        os.mknod(f"{number}", dir_fd=fd)
    os.close(fd)
    tracemalloc.start()
    try:
        found = 0
        async for batch in DirectWorkspace(tmp_path).scan(Selecting()):
            found += len(batch)
        assert found == count + 1
        assert tracemalloc.get_traced_memory()[1] < count * 150
    finally:
        tracemalloc.stop()


# ---- links in the way


async def test_a_link_planted_after_the_seal_is_not_written_through(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "sub").mkdir(parents=True)
    outside.mkdir()
    stage = await DirectWorkspace(root).open_stage()
    await stage.write([staged_file(b"0", b"x")])
    await stage.log([PlaceStep(b"0", b"sub/file")])
    await stage.seal(durable=False)
    assert isinstance(stage, DirectStage)
    stage.drop()
    (root / "sub").rmdir()
    (root / "sub").symlink_to(outside)
    assert await DirectWorkspace(root).recover() == "finished"
    assert os.listdir(outside) == []
    assert sorted(os.listdir(root)) == ["sub"]


async def test_the_root_may_be_named_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "named").symlink_to("real")
    (tmp_path / "real" / "by-name").symlink_to(tmp_path / "named" / "x")
    (tmp_path / "real" / "by-real").symlink_to(tmp_path / "real" / "x")
    (tmp_path / "real" / "out").symlink_to(tmp_path / "other")
    workspace = DirectWorkspace(tmp_path / "named")
    found = {entry.path: entry for entry in await scan_all(workspace)}
    assert workspace.root == str(tmp_path / "named")
    assert found[b"by-name"].target == found[b"by-real"].target == os.fsencode(tmp_path / "named" / "x")
    assert [path for path, note in notes(list(found.values())).items() if note] == [b"out"]
    assert workspace.sandbox_id == DirectWorkspace(tmp_path / "real").sandbox_id


# ---- special files and mounts


async def test_special_files_are_named_by_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    expected = {b"": Kind.DIR, b"fifo": Kind.FIFO, b"socket": Kind.SOCKET}
    if os.geteuid() == 0:
        os.mknod(tmp_path / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        expected[b"device"] = Kind.DEVICE
    found = await scan_all(DirectWorkspace(tmp_path))
    assert {entry.path: entry.kind for entry in found} == expected


async def test_a_file_that_became_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    workspace = DirectWorkspace(tmp_path)
    files = [entry for entry in await scan_all(workspace) if entry.kind == Kind.FILE]
    (tmp_path / "file").unlink()
    os.mkfifo(tmp_path / "file")
    ((_, last),) = await read_all(workspace, files)
    assert last.problem == "not a regular file any more"


async def test_a_mount_is_listed_only_when_asked_for(mounted: Path) -> None:
    (mounted / "mount" / "inner").write_text("x")
    (mounted / "mount" / ".snapcore-stage").mkdir()
    workspace = DirectWorkspace(mounted)
    assert notes(await scan_all(workspace)) == {b"": "", b"mount": Note.MOUNT}
    assert notes(await scan_all(workspace, cross_mounts=True)) == {b"": "", b"mount": "", b"mount/inner": ""}


FOLDER, FILE = b"a \\ b\n\t", b"bound file"


async def test_a_mount_of_the_same_file_system_is_one_too(bound: Path) -> None:
    (bound / "plain").mkdir()
    (bound / os.fsdecode(FOLDER) / ".snapcore-stage").mkdir()
    found = {entry.path: entry for entry in await scan_all(DirectWorkspace(bound))}
    assert notes(list(found.values())) == {b"": "", b"plain": "", FOLDER: Note.MOUNT, FILE: Note.MOUNT}
    (bound.parent / "link").symlink_to(bound)
    assert notes(await scan_all(DirectWorkspace(bound.parent / "link"))) == notes(list(found.values()))
    workspace = DirectWorkspace(bound)
    crossed = await scan_all(workspace, cross_mounts=True)
    assert notes(crossed) == dict.fromkeys([b"", b"plain", FOLDER, FOLDER + b"/inner", FILE], "")
    files = [entry for entry in crossed if entry.kind == Kind.FILE]
    assert sorted(data for data, _ in await read_all(workspace, files)) == [b"bound", b"inner"]


@pytest.mark.parametrize("path", [FOLDER + b"/inner", FOLDER + b"/new/file", FOLDER, FILE])
async def test_a_placement_at_or_below_any_mount_is_refused_before_the_seal(bound: Path, path: bytes) -> None:
    stage = await DirectWorkspace(bound).open_stage()
    await stage.write([staged_file(b"0", b"x")])
    with pytest.raises(ProviderError) as caught:
        await stage.log([PlaceStep(b"0", path)])
    assert caught.value.code == Code.NOT_CAPABLE
    await stage.log([PlaceStep(b"0", FOLDER + b"-beside")])
    await stage.abort()


async def test_what_is_removed_below_a_mount_of_the_same_file_system_goes(bound: Path) -> None:
    report = await restore(DirectWorkspace(bound), [], [RemoveStep(FOLDER + b"/inner", False)])
    assert report.undone == ()
    assert os.listdir(bound / os.fsdecode(FOLDER)) == []


async def test_a_placement_on_another_file_system_is_refused_before_the_seal(mounted: Path) -> None:
    (mounted / "mount" / "inner").write_text("x")
    stage = await DirectWorkspace(mounted).open_stage()
    await stage.write([staged_file(b"0", b"x")])
    with pytest.raises(ProviderError) as caught:
        await stage.log([PlaceStep(b"0", b"mount/new/file")])
    assert caught.value.code == Code.NOT_CAPABLE
    await stage.abort()
    report = await restore(DirectWorkspace(mounted), [], [RemoveStep(b"mount/inner", False), RemoveStep(b"mount", True)])
    assert [path for path, _ in report.undone] == [b"mount"]
    assert os.listdir(mounted / "mount") == []


# ---- files


async def test_zeros_are_left_as_holes(tmp_path: Path) -> None:
    size = 8 << 20
    report = await restore(
        DirectWorkspace(tmp_path),
        [StageFile(b"0", 0, b"start" + bytes((4 << 20) - 5), size, False), StageFile(b"0", size - 3, b"end", size, True)],
        [PlaceStep(b"0", b"sparse")],
    )
    assert report.undone == ()
    data = (tmp_path / "sparse").read_bytes()
    assert (len(data), data.count(0), data[:5], data[-3:]) == (size, size - 8, b"start", b"end")
    assert (tmp_path / "sparse").stat().st_blocks * 512 < 1 << 20


async def test_setuid_comes_only_with_an_owner(tmp_path: Path) -> None:
    uid, gid = os.geteuid(), os.getegid()
    report = await restore(
        DirectWorkspace(tmp_path),
        [StageFile(b"0", 0, b"", 0, True, 0o4755), StageFile(b"1", 0, b"", 0, True, 0o4755, owner=(uid, gid))],
        [PlaceStep(b"0", b"plain"), PlaceStep(b"1", b"owned")],
    )
    assert report.undone == ()
    assert (tmp_path / "plain").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "owned").stat().st_mode & 0o7777 == 0o4755


def with_attributes() -> tuple[list[StageWrite], list[Step]]:
    """Three files with an attribute, the last one without an owner."""
    attributes, me = {"user.note": b"\0value"}, (os.geteuid(), os.getegid())
    writes: list[StageWrite] = [
        StageFile(b"0", 0, b"x", 1, True, owner=me, xattrs=attributes),
        StageFolder(b"1"),
        StageFile(b"1/in", 0, b"x", 1, True, owner=me, xattrs=attributes),
        StageFile(b"2", 0, b"x", 1, True, xattrs=attributes),
    ]
    return writes, [PlaceStep(b"0", b"owned"), PlaceStep(b"1", b"folder"), PlaceStep(b"2", b"plain")]


async def test_extended_attributes_come_only_with_an_owner(tmp_path: Path) -> None:
    report = await restore(DirectWorkspace(tmp_path), *with_attributes())
    assert report.undone == ()
    assert os.getxattr(tmp_path / "owned", "user.note") == b"\0value"
    assert os.getxattr(tmp_path / "folder" / "in", "user.note") == b"\0value"
    assert os.listxattr(tmp_path / "plain") == []


async def test_extended_attributes_are_reported_where_the_system_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "setxattr")
    report = await restore(DirectWorkspace(tmp_path), *with_attributes())
    assert [path for path, _ in report.undone] == [b"owned", b"folder/in"]
    assert (tmp_path / "plain").read_text() == (tmp_path / "owned").read_text() == "x"


async def test_a_link_keeps_its_own_time(tmp_path: Path) -> None:
    await restore(DirectWorkspace(tmp_path), [StageLink(b"0", b"nowhere", -5_000_000_001)], [PlaceStep(b"0", b"link")])
    assert (tmp_path / "link").lstat().st_mtime_ns == -5_000_000_001


# ---- users without rights


def test_a_user_restores_into_read_only_folders(as_user: AsUser) -> None:
    def work(root: Path) -> None:
        for name in ("read-only", "closed", "blind"):
            (root / name / "sub").mkdir(parents=True)
            (root / name / "sub" / "old").write_text("old")
            (root / name / "sub").chmod(0o555)
        (root / "read-only").chmod(0o555)
        (root / "closed").chmod(0o000)
        (root / "blind").chmod(0o444)
        root.chmod(0o555)
        writes: list[StageWrite] = []
        steps: list[Step] = []
        for number, folder in enumerate((b"read-only", b"closed", b"blind")):
            writes += [staged_file(b"%d" % number, b"new", 0), staged_file(b"%d-top" % number, b"top", 0o444)]
            steps.append(RemoveStep(folder + b"/sub/old", False))
            steps.append(PlaceStep(b"%d" % number, folder + b"/sub/new"))
            steps.append(PlaceStep(b"%d-top" % number, folder + b"/top"))
        steps += [SetMetaStep(b"read-only/sub", 0o500, 7), SetMetaStep(b"closed/sub/new", 0o440, None)]
        assert asyncio.run(restore(DirectWorkspace(root), writes, steps)).undone == ()
        modes = {name: (root / name).stat().st_mode & 0o7777 for name in ("", "read-only", "closed", "blind")}
        assert modes == {"": 0o555, "read-only": 0o555, "closed": 0o000, "blind": 0o444}
        for name in ("closed", "blind"):
            (root / name).chmod(0o700)
        assert (root / "read-only" / "sub").stat().st_mode & 0o7777 == 0o500
        assert (root / "read-only" / "sub").stat().st_mtime_ns == 7
        assert (root / "closed" / "sub").stat().st_mode & 0o7777 == 0o555
        for name in ("read-only", "closed", "blind"):
            assert sorted(os.listdir(root / name / "sub")) == ["new"]
            assert (root / name / "top").read_text() == "top"
        assert (root / "closed" / "sub" / "new").stat().st_mode & 0o7777 == 0o440
        assert (root / "blind" / "sub" / "new").stat().st_mode & 0o7777 == 0

    as_user(work)


def test_a_root_that_its_user_cannot_list_is_a_typed_error(as_user: AsUser) -> None:
    def work(root: Path) -> None:
        async def hold() -> None:
            async with DirectWorkspace(root).hold():
                raise AssertionError("it was held")

        root.chmod(0o311)
        with pytest.raises(SnapshotError, match="cannot be opened as a folder: Permission denied") as caught:
            asyncio.run(hold())
        root.chmod(0o755)
        assert caught.value.code is Code.INVALID_WORKSPACE

    as_user(work)


def test_modes_are_put_back_after_a_death(as_user: AsUser) -> None:
    def work(root: Path) -> None:
        (root / "sub").mkdir()
        (root / "sub" / "old").write_text("old")
        (root / "sub").chmod(0o555)
        pid = os.fork()
        if pid == 0:
            rename = os.rename

            def dying(*args: Any, **kwargs: Any) -> None:
                rename(*args, **kwargs)
                if args[0] == b"0":
                    os._exit(9)

            os.rename = dying
            asyncio.run(restore(DirectWorkspace(root), [staged_file(b"0", b"x")], [PlaceStep(b"0", b"sub/new")]))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert (root / "sub").stat().st_mode & 0o7777 == 0o755
        assert asyncio.run(DirectWorkspace(root).recover()) == "finished"
        assert (root / "sub").stat().st_mode & 0o7777 == 0o555
        assert sorted(os.listdir(root / "sub")) == ["new", "old"]

    as_user(work)


def test_a_read_only_root_is_as_it_was_after_an_abort(as_user: AsUser) -> None:
    def work(root: Path) -> None:
        root.chmod(0o555)

        async def stage_and_abort() -> None:
            await (await DirectWorkspace(root).open_stage()).abort()

        asyncio.run(stage_and_abort())
        assert root.stat().st_mode & 0o7777 == 0o555
        assert os.listdir(root) == []

    as_user(work)


def test_a_read_only_root_is_as_it_was_after_a_death(as_user: AsUser) -> None:
    def work(root: Path) -> None:
        root.chmod(0o555)
        pid = os.fork()
        if pid == 0:

            async def stage_and_die() -> None:
                stage = await DirectWorkspace(root).open_stage()
                await stage.write([staged_file(b"0", b"x")])
                os._exit(9)

            asyncio.run(stage_and_die())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert root.stat().st_mode & 0o7777 == 0o755
        assert asyncio.run(DirectWorkspace(root).recover()) == "swept"
        assert root.stat().st_mode & 0o7777 == 0o555
        assert os.listdir(root) == []

    as_user(work)


def test_what_a_user_may_not_see_is_noted(as_user: AsUser) -> None:
    def work(root: Path) -> None:
        for name in ("closed", "no-search", "open"):
            (root / name).mkdir()
            (root / name / "file").write_text("x")
        (root / "open" / "file").chmod(0)
        (root / "closed").chmod(0)
        (root / "no-search").chmod(0o444)
        workspace = DirectWorkspace(root)
        found = asyncio.run(scan_all(workspace))
        assert notes(found) == {
            b"": "",
            b"closed": Note.UNREADABLE,
            b"no-search": "",
            b"no-search/file": Note.UNREADABLE,
            b"open": "",
            b"open/file": "",
        }
        ((_, last),) = asyncio.run(read_all(workspace, [entry for entry in found if entry.path == b"open/file"]))
        assert last.problem == "unreadable"

    as_user(work)


def test_a_stage_of_another_user_is_finished_without_its_owners(as_user: AsUser) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser can finish what another user left")

    def work(root: Path) -> None:
        async def leave_sealed() -> None:
            stage = await DirectWorkspace(root).open_stage()
            await stage.write([staged_file(b"0", b"x")])
            await stage.log([PlaceStep(b"0", b"tool"), SetMetaStep(b"tool", 0o4755, None, (0, 0))])
            await stage.seal(durable=False)
            os._exit(0)

        asyncio.run(leave_sealed())

    root = as_user(work)
    assert asyncio.run(DirectWorkspace(root).recover()) == "finished"
    st = (root / "tool").stat()
    assert (st.st_uid, st.st_mode & 0o7777) == (65534, 0o755)


# ---- addresses


async def test_addresses_of_local_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for address, path in {
        "./dir": tmp_path / "dir",
        "dir": tmp_path / "dir",
        "/abs/dir": Path("/abs/dir"),
        "file:///abs/with%20space%23": Path("/abs/with space#"),
        "~/work": tmp_path / "home" / "work",
    }.items():
        sandbox = await connect(address)
        assert sandbox.workspace_root == str(path)
        assert sandbox.sandbox_id == LocalSandbox(path).sandbox_id
        assert sandbox.workspace().root == str(path)
        assert sandbox.workspace("sub").root == str(path / "sub")
        await sandbox.close()


async def test_a_scan_that_is_left_early_ends_cleanly(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"f{number}").touch()
    before = len(os.listdir("/proc/self/fd"))
    scan = DirectWorkspace(tmp_path).scan(Selecting())
    async for _ in scan:
        break
    await scan.aclose()  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/fd")) == before
