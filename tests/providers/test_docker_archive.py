"""Containers without any tool, stopped ones and frozen ones, by the engine's archive API alone, on a real engine.

Cases 4, 8, 9, 10, 12, 13, 14, 15, 17, 19, 21, 23, 41 and 49 on Docker. Case 50 does not apply: where something is, nothing is
restored a second time. Cases 25 and 26 do not apply: the engine reads as
root, and what a scan kept is what is read.
"""

import os
import resource
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.model import FileStat, Kind, Note
from snapcore.protocols import PlaceStep, SetMetaStep, StageFolder, StageHardLink, StageLink
from snapcore.providers.docker import DockerSandbox, connect
from snapcore.providers.docker_archive import ArchiveWorkspace
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree
from snapcore.testing.workspace_suite import Selecting, read_all, restore, scan_all, staged_file

from .checkpoint_cases import EVERYTHING, whole_seconds
from .docker_fixtures import MakeContainer, Proxy

SECOND = 1_000_000_000


def put(api: Any, container: str, tree: Path, name: str = "workspace") -> None:
    """Copy a local tree into a container, past what is tested."""
    data = subprocess.run(
        ["tar", "-C", tree, "--format=pax", "--numeric-owner", f"--transform=flags=rh;s,^[.],{name},", "-cf", "-", "."],
        check=True,
        capture_output=True,
    ).stdout
    assert api.put_archive(container, "/", data)


def take(api: Any, container: str, target: Path, path: str = "/workspace/.") -> Path:
    """A container's tree as a local one, past what is tested."""
    pieces, _ = api.get_archive(container, path)
    target.mkdir()
    archive = target.with_suffix(".tar")
    archive.write_bytes(b"".join(pieces))
    subprocess.run(["tar", "-C", target, "-xpf", archive], check=True)
    return target


def differences(a: Path, b: Path) -> list[str]:
    """How two trees differ, besides parts of a second and the times of folders."""
    return [line for line in compare_trees(a, b) if "mtime" not in line]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    make_tree(tree, files=60, big_bytes=9_500_001)
    whole_seconds(tree)
    return tree


@pytest.fixture(params=["toolless", "stopped"])
def container(request: pytest.FixtureRequest, make_container: MakeContainer, docker_host: str) -> str:
    """A running container without any tool, or one with all of busybox that does not run."""
    if request.param == "toolless":
        return make_container("toolless")
    return make_container("busybox", start=False)


async def opened(container: str, root: str = "/workspace", **options: Any) -> DockerSandbox:
    return await connect(f"docker://{container}{root}" + ("?freeze=1" if options.get("freeze") else ""))


async def test_what_is_captured_is_restored_into_a_fresh_container_and_elsewhere(
    container: str, make_container: MakeContainer, docker_api: Any, tree: Path, tmp_path: Path
) -> None:
    put(docker_api, container, tree)
    fresh = make_container("toolless")
    source, target = await opened(container), await opened(fresh)
    assert isinstance(source.workspace(), ArchiveWorkspace)
    async with snapcore.open_repository("memory://") as repo:
        checkpoint = await repo.capture(source, thread_id="t", policy=EVERYTHING)
        local = await repo.capture(str(tree), thread_id="local", policy=EVERYTHING)
        assert checkpoint.content_id == local.content_id
        await repo.restore(str(tmp_path / "copy"), thread_id="t")
        receipt = await repo.restore(target, thread_id="t", verify="content")
        assert receipt is not None
        assert receipt.differences == ()
        again = await repo.capture(target, thread_id="u", policy=EVERYTHING)
        assert again.content_id == checkpoint.content_id
    assert compare_trees(tree, tmp_path / "copy") == []
    assert differences(tree, take(docker_api, fresh, tmp_path / "fresh")) == []
    await source.close()
    await target.close()


async def test_five_rounds_from_container_to_container_are_equal_each_time(
    make_container: MakeContainer, docker_api: Any, docker_host: str, tree: Path, tmp_path: Path
) -> None:
    """Case 4."""
    container = make_container("toolless")
    put(docker_api, container, tree)
    async with snapcore.open_repository("memory://") as repo:
        for number in range(5):
            handle = await opened(container)
            await repo.capture(handle, thread_id="t", policy=EVERYTHING)
            await handle.close()
            local = tmp_path / f"local-{number}"
            await repo.restore(str(local), thread_id="t")
            mutate_tree(local, seed=number)
            whole_seconds(local)
            await repo.capture(str(local), thread_id="t", policy=EVERYTHING)
            container = make_container("toolless", start=number % 2 == 0)
            handle = await opened(container)
            receipt = await repo.restore(handle, thread_id="t", verify="content")
            assert receipt is not None
            assert receipt.differences == ()
            await handle.close()
            assert differences(local, take(docker_api, container, tmp_path / f"taken-{number}")) == []


async def test_a_scan_shows_what_is_there(container: str, docker_api: Any, tree: Path) -> None:
    os.mkfifo(tree / "fifo")
    (tree / "out").symlink_to("../outside")
    (tree / "absolute").symlink_to("/etc/passwd")
    (tree / "in-root").symlink_to("/workspace/fifo")
    put(docker_api, container, tree)
    handle = await opened(container)
    found = await scan_all(handle.workspace(), Selecting(b"node_modules"))
    by_path = {stat.path: stat for stat in found}
    assert [stat.path for stat in found] == sorted(by_path, key=lambda path: path.replace(b"/", b"\0"))
    assert by_path[b"node_modules"].note == Note.EXCLUDED
    assert not any(path.startswith(b"node_modules/") for path in by_path)
    assert by_path[b"fifo"].kind == Kind.FIFO
    assert {path for path, stat in by_path.items() if stat.note == Note.OUTSIDE} == {b"out", b"absolute"}
    for stat in found:
        if stat.note == Note.EXCLUDED or not stat.path:
            continue
        there = os.lstat(os.path.join(os.fsencode(tree), stat.path))
        assert stat.mode == there.st_mode & 0o7777
        if stat.kind == Kind.FILE:
            assert (stat.size, stat.mtime_ns, stat.nlink) == (there.st_size, there.st_mtime_ns, there.st_nlink), stat
    await handle.close()


async def test_reads_come_from_the_scan_or_are_asked_for(container: str, docker_api: Any, tree: Path) -> None:
    put(docker_api, container, tree)
    handle = await opened(container)
    workspace = handle.workspace()
    files = [stat for stat in await scan_all(workspace) if stat.kind == Kind.FILE][::-1]
    calls = handle.engine.traffic.calls
    first = await read_all(workspace, files)
    assert handle.engine.traffic.calls == calls
    other = await read_all(handle.workspace(), files[:20])
    for file, (data, last) in zip(files, first, strict=True):
        assert data == Path(os.fsdecode(os.path.join(os.fsencode(tree), file.path))).read_bytes()
        assert last.after == file
    assert [(data, last.after) for data, last in other] == [(data, last.after) for data, last in first[:20]]
    gone = [FileStat(b"no/such", Kind.FILE, size=3), FileStat(b"src", Kind.FILE, size=3)]
    assert [bool(last.problem) for _, last in await read_all(workspace, gone)] == [True, True]
    await handle.close()


@pytest.mark.parametrize("user", ["", "1000", "dev"])
async def test_restored_files_belong_to_the_containers_user(
    user: str, make_container: MakeContainer, docker_api: Any, docker_host: str, tmp_path: Path
) -> None:
    """Case 13, and 12: owners only when they are asked for."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name, mode in (("run", 0o755), ("secret", 0o600), ("readonly", 0o444), ("setuid", 0o4755)):
        (tree / name).write_text(name)
        (tree / name).chmod(mode)
    if os.geteuid() == 0:
        os.chown(tree / "run", 5, 6)
    async with snapcore.open_repository("memory://") as repo:
        await repo.capture(str(tree), thread_id="t")
        for owners in (False, True):
            container = make_container("busybox", start=False, user=user)
            handle = await opened(container, "/home/work/space")
            await repo.restore(handle, thread_id="t", owners=owners)
            await handle.close()
            pieces, _ = docker_api.get_archive(container, "/home/work/space/.")
            archive = tmp_path / f"{owners}.tar"
            archive.write_bytes(b"".join(pieces))
            with tarfile.open(archive) as tar:
                found = {member.name: (member.uid, member.gid, member.mode & 0o7777) for member in tar}
            ids = (1000, 1000) if user else (0, 0)
            assert found["./run"] == ((*ids, 0o755) if not owners else (5, 6, 0o755))
            assert found["./secret"] == ((*ids, 0o600) if not owners else (0, 0, 0o600))
            assert found["./setuid"][2] == (0o4755 if owners else 0o755)
            assert found["./readonly"][2] == 0o444


async def test_nothing_can_be_replaced_and_that_is_said_before_anything_is_touched(
    container: str, docker_api: Any, tree: Path, tmp_path: Path
) -> None:
    put(docker_api, container, tree)
    before = take(docker_api, container, tmp_path / "before")
    async with snapcore.open_repository("memory://") as repo:
        await repo.capture(str(tree), thread_id="t")
        handle = await opened(container)
        with pytest.raises(ProviderError) as caught:
            await repo.restore(handle, thread_id="t")
        await handle.close()
    assert caught.value.code == Code.NOT_CAPABLE
    assert compare_trees(before, take(docker_api, container, tmp_path / "after")) == []


async def test_links_hard_links_times_and_odd_names_are_restored_past_links_on_the_way(
    container: str, docker_api: Any, tmp_path: Path
) -> None:
    (tmp_path / "given" / "real").mkdir(parents=True)
    (tmp_path / "given" / "workspace").symlink_to("/given/real")
    put(docker_api, container, tmp_path / "given", "given")
    handle = await opened(container, "/given/workspace")
    names = [b"new\nline", b"caf\xe9 \xff", b" ", b"-rf", "naïve 文".encode(), b"x" * 255, b"a'b\"c\\d$e`f*?"]
    deep = b"/".join([b"d" * 200] * 12)
    report = await restore(
        handle.workspace(),
        [
            *(staged_file(b"%d" % number, name) for number, name in enumerate(names)),
            StageLink(b"up", b"../../../out", 1_234_567_890_500_000_000),
            StageLink(b"absolute", b"/given/workspace/x", 1),
            staged_file(b"first", b"shared"),
            StageHardLink(b"second", b"first"),
            *(StageFolder(b"/".join(deep.split(b"/")[:depth])) for depth in range(1, 13)),
            staged_file(deep + b"/file", b"deep"),
        ],
        [
            *(PlaceStep(b"%d" % number, name) for number, name in enumerate(names)),
            PlaceStep(b"up", b"up"),
            PlaceStep(b"absolute", b"absolute"),
            PlaceStep(b"first", b"z-first"),
            PlaceStep(b"second", b"a-second"),
            PlaceStep(b"d" * 200, b"d" * 200),
            SetMetaStep(b"", 0o750, 1_111_111_111_000_000_000),
        ],
    )
    assert report.undone == ()
    taken = take(docker_api, container, tmp_path / "taken", "/given/real/.")
    base = os.fsencode(taken)
    for name in names:
        assert Path(os.fsdecode(os.path.join(base, name))).read_bytes() == name
    assert os.readlink(taken / "up") == "../../../out"
    assert os.readlink(taken / "absolute") == "/given/workspace/x"
    assert (taken / "z-first").samefile(taken / "a-second")
    assert Path(os.fsdecode(base + b"/" + deep + b"/file")).read_bytes() == b"deep"
    assert (taken.stat().st_mode & 0o7777, taken.stat().st_mtime) == (0o750, 1_111_111_111)
    assert docker_api.get_archive(container, "/given/workspace")[1]["linkTarget"] == "/given/real"
    exact = {stat.path: stat.mtime_ns for stat in await scan_all(handle.workspace())}
    assert exact[b"up"] == 1_234_567_890 * SECOND
    await handle.close()


async def test_mounts_are_left_alone_unless_asked_for(
    make_container: MakeContainer, docker_api: Any, docker_host: str, tmp_path: Path
) -> None:
    (tmp_path / "bound").mkdir()
    (tmp_path / "bound" / "theirs").write_text("theirs")
    host = {"binds": [f"{tmp_path}/bound:/workspace/bound"], "tmpfs": {"/workspace/memory": ""}}
    container = make_container("toolless", host=host, volumes=["/workspace/volume"])
    handle = await opened(container)
    async with snapcore.open_repository("memory://") as repo:
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree" / "file").write_text("file")
        await repo.capture(str(tmp_path / "tree"), thread_id="t")
        receipt = await repo.restore(handle, thread_id="t")
        assert receipt is not None
        assert receipt.added == 1
        notes = {stat.path: stat.note for stat in await scan_all(handle.workspace())}
        assert {path for path, note in notes.items() if note == Note.MOUNT} == {b"bound", b"volume", b"memory"}
        assert b"bound/theirs" not in notes
        crossed = {stat.path: stat.note for stat in await scan_all(handle.workspace(), cross_mounts=True)}
        assert crossed[b"bound/theirs"] == Note.NONE
        assert crossed[b"memory"] == Note.MOUNT
    assert (tmp_path / "bound" / "theirs").read_text() == "theirs"
    await handle.close()


async def test_special_files_and_links_out_are_refused_or_skipped_and_excluded_folders_left(
    container: str, docker_api: Any, tree: Path
) -> None:
    """Cases 8, 9, 10, 19 and 41: named, or all the rest is kept."""
    os.mkfifo(tree / "fifo")
    (tree / "out").symlink_to("../outside")
    (tree / "in-root").symlink_to("/workspace/fifo")
    put(docker_api, container, tree)
    handle = await opened(container)
    async with snapcore.open_repository("memory://") as repo:
        with pytest.raises(SnapshotError) as caught:
            await repo.capture(handle, thread_id="t")
        assert caught.value.code == Code.UNSUPPORTED_ENTRY
        assert set(caught.value.paths) == {b"fifo", b"out"}
        taken = await repo.capture(handle, thread_id="t", policy=snapcore.FilePolicy(on_unsupported="skip"))
        paths = {entry.path async for entry in repo.ls(taken)}
    assert b"in-root" in paths
    assert not paths & {b"fifo", b"out"}
    assert (tree / "node_modules").is_dir()
    assert not [path for path in paths if path.startswith(b"node_modules")]
    await handle.close()


async def test_a_large_file_goes_round_in_little_memory(
    make_container: MakeContainer, docker_api: Any, docker_host: str, tmp_path: Path
) -> None:
    """Case 21: less memory than the file has bytes."""
    size = 200 << 20
    (tmp_path / "workspace").mkdir()
    (tmp_path / "target").mkdir()
    with (tmp_path / "workspace" / "large").open("wb") as file:
        file.truncate(size)
    source = await opened(make_container("toolless", host={"binds": [f"{tmp_path}/workspace:/workspace"]}))
    target = await opened(make_container("toolless", host={"binds": [f"{tmp_path}/target:/workspace"]}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with snapcore.open_repository("memory://") as repo:
        await repo.capture(source, thread_id="t")
        await repo.restore(target, thread_id="t")
    assert (tmp_path / "target" / "large").stat().st_size == size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # KiB
    await source.close()
    await target.close()


async def test_transfers_that_are_cut_off_are_told_and_never_taken_for_the_whole(
    make_container: MakeContainer, docker_api: Any, docker_proxy: Proxy, tree: Path
) -> None:
    """Case 23: on the way out, and on the way in."""
    source = make_container("toolless")
    put(docker_api, source, tree)
    handle, target = await opened(source), await opened(make_container("toolless"))
    async with snapcore.open_repository("memory://") as repo:
        await repo.capture(str(tree), thread_id="local")
        docker_proxy.break_after = docker_proxy.received + (4 << 20)
        with pytest.raises(ProviderError) as out:
            await repo.capture(handle, thread_id="t")
        assert list(await repo.list("t")) == []
        docker_proxy.mend()
        docker_proxy.break_after_sent = docker_proxy.sent + (4 << 20)
        with pytest.raises(ProviderError) as back:
            await repo.restore(target, thread_id="local")
        docker_proxy.mend()
        assert {(error.value.code, error.value.retryable) for error in (out, back)} == {(Code.SANDBOX_UNAVAILABLE, True)}
        await repo.capture(handle, thread_id="t")
    await handle.close()
    await target.close()


@pytest.mark.parametrize(
    ("root", "code"), [("/no/such", Code.MISSING_WORKSPACE), ("/busybox-sleeper", Code.INVALID_WORKSPACE)], ids=["none", "file"]
)
async def test_a_root_that_is_missing_or_no_folder_is_told(
    root: str, code: Code, make_container: MakeContainer, docker_host: str
) -> None:
    handle = await opened(make_container("toolless"), root)
    with pytest.raises(SnapshotError) as caught:
        await scan_all(handle.workspace())
    assert caught.value.code == code
    await handle.close()
