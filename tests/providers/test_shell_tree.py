"""Trees that a shell's tools have trouble with: odd names, many and long paths, special files, mounts, rights, moving files.

Cases 14, 22, 25, 26, 40, 41 and 43 of the field, where the sandbox is behind a shell.
"""

import asyncio
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.model import FileStat, Kind, Note
from snapcore.providers.command_shell import CommandShell
from snapcore.providers.direct import DirectWorkspace
from snapcore.providers.folders import FOLDER_FLAGS, FolderCache, remove_tree
from snapcore.providers.shell import ShellWorkspace
from snapcore.selection import FilePolicy
from snapcore.testing.workspace_suite import read_all, scan_all

from .shell_kinds import KINDS, make_shell

AsUser = Callable[[Callable[[Path], None]], Path]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def workspace_of(kind: str, root: Path) -> ShellWorkspace:
    return ShellWorkspace(make_shell(kind), str(root))


def notes(found: list[FileStat]) -> dict[bytes, str]:
    return {entry.path: entry.note for entry in found}


def files_of(found: list[FileStat]) -> list[FileStat]:
    return [entry for entry in found if entry.kind == Kind.FILE and not entry.note]


async def assert_same_as_direct(kind: str, root: Path) -> None:
    """The scan and the contents are what the file system itself shows."""
    direct, workspace = DirectWorkspace(root), workspace_of(kind, root)
    expected = await scan_all(direct)
    assert await scan_all(workspace) == expected
    files = files_of(expected)
    read, expected_read = await read_all(workspace, files), await read_all(direct, files)
    assert [(data, last.after, last.problem) for data, last in read] == [
        (data, last.after, last.problem) for data, last in expected_read
    ]


def write(path: bytes, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


ODD_NAMES = [
    bytes(range(1, 47)) + bytes(range(48, 128)),
    bytes(range(128, 256)),
    b"-rf",
    b"--",
    b"-print0 -o",
    b" leading and trailing ",
    b"new\nline\n",
    b"\n",
    b"'single' \"double\" `tick` $(echo x) $HOME ${x}",
    b"back\\slash\\0\\n",
    b"*?[a-z]{a,b}~!",
    b"a' -> 'b",
    b"%s%n%d",
    b"tab\there",
    "ünïcödé".encode(),
    b"x" * 255,
]


async def test_odd_names_come_back_with_their_contents_and_targets(kind: str, tmp_path: Path) -> None:
    base = os.fsencode(tmp_path)
    for name in ODD_NAMES:
        for folder in (base, base + b"/in-" + name[:200]):
            os.makedirs(folder, exist_ok=True)
            write(folder + b"/" + name, name * 3)
            os.symlink(name, folder + b"/l" + name[:200])
            os.symlink(b"x -> " + name + b"' -> '", folder + b"/m" + name[:200])
    await assert_same_as_direct(kind, tmp_path)


async def test_names_that_hold_every_separator_are_read_too(kind: str, tmp_path: Path) -> None:
    controls = bytes(range(1, 32))
    for at in range(4):
        (tmp_path / f"plain{at}").write_text("plain")
        folder = os.fsencode(tmp_path) + b"/%d" % at + controls
        os.mkdir(folder)
        write(folder + b"/" + controls, b"%d" % at)
    await assert_same_as_direct(kind, tmp_path)


async def test_ten_thousand_long_paths_are_read_in_one_go(tmp_path: Path) -> None:
    for number in range(10_000):
        folder = tmp_path / ("f" * 100 + str(number // 1000))
        folder.mkdir(exist_ok=True)
        (folder / ("n" * 150 + str(number))).write_text(str(number))
    await assert_same_as_direct("busybox", tmp_path)
    await assert_same_as_direct("gnu", tmp_path)


async def test_files_of_every_size_around_a_group_and_a_block_are_whole(kind: str, tmp_path: Path) -> None:
    sizes = [0, 1, 511, 512, 513, 10_240, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (8 << 20) + 12_345]
    for number, size in enumerate(sizes):
        (tmp_path / f"f{number}").write_bytes(os.urandom(size))
    await assert_same_as_direct(kind, tmp_path)


async def test_names_of_one_inode_are_each_read_whole(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("shared")
    for name in ("b", "c"):
        os.link(tmp_path / "a", tmp_path / name)
    await assert_same_as_direct(kind, tmp_path)


async def test_times_before_1970_and_after_2038_are_exact(kind: str, tmp_path: Path) -> None:
    for number, ns in enumerate([-1, -1_500_000_000, -315_619_199_750_000_001, 0, 5_000_000_000_123_456_789]):
        (tmp_path / f"f{number}").touch()
        os.utime(tmp_path / f"f{number}", ns=(ns, ns))
    await assert_same_as_direct(kind, tmp_path)


# ---- long paths


def make_deep(root: Path, depth: int) -> None:
    fd = os.open(root, FOLDER_FLAGS)
    for _ in range(depth):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=fd))
        os.mkdir("d" * 200, dir_fd=fd)
        below = os.open("d" * 200, FOLDER_FLAGS, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


async def test_what_lies_too_deep_for_the_tools_is_named_and_never_passed_over(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "deep"
    root.mkdir()
    make_deep(root, 30)
    try:
        direct = await scan_all(DirectWorkspace(root))
        workspace = workspace_of(kind, root)
        found = await scan_all(workspace)
        if kind == "busybox":
            assert [entry.note for entry in found if entry.note] == [Note.UNREADABLE]
            shown = {entry.path for entry in found if not entry.note}
            assert [entry for entry in found if not entry.note] == [entry for entry in direct if entry.path in shown]
            assert len(shown) > 30
        else:
            assert found == direct
        read = await read_all(workspace, files_of(direct))
        problems: dict[bool, set[str]] = {True: set(), False: set()}
        for file, (_, last) in zip(files_of(direct), read, strict=True):
            # between the two it depends on whether the tools go from the root or from the top
            if len(file.path) >= 4096 or len(file.path) + len(os.fsencode(root)) < 4080:
                problems[len(file.path) >= 4096].add(last.problem)
        assert problems == {True: {"the path is too long for the sandbox's tools"}, False: {""}}
    finally:
        with FolderCache(os.open(tmp_path, FOLDER_FLAGS)) as folders:
            remove_tree(folders, b"deep")


# ---- special files, mounts, rights


async def test_special_files_are_named_by_kind(kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    if os.geteuid() == 0:
        os.mknod(tmp_path / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    await assert_same_as_direct(kind, tmp_path)


async def test_a_file_that_became_a_fifo_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    for name in ("alone", "beside"):
        (tmp_path / name).write_text("x")
    workspace = workspace_of(kind, tmp_path)
    files = files_of(await scan_all(workspace))
    (tmp_path / "alone").unlink()
    os.mkfifo(tmp_path / "alone")
    for asked in (files, files[:1]):
        read = await read_all(workspace, asked)
        assert read[0][1].problem == "not a regular file any more"


async def test_mounts_are_noted_and_only_listed_when_asked_for(kind: str, mounted: Path) -> None:
    (mounted / "mount" / "inner").write_text("x")
    (mounted / "mount" / ".snapcore-stage").mkdir()
    workspace = workspace_of(kind, mounted)
    assert notes(await scan_all(workspace)) == {b"": "", b"mount": Note.MOUNT}
    assert notes(await scan_all(workspace, cross_mounts=True)) == {b"": "", b"mount": "", b"mount/inner": ""}


async def test_mounts_of_the_same_file_system_are_noted(kind: str, bound: Path) -> None:
    for cross_mounts in (False, True):
        found = await scan_all(workspace_of(kind, bound), cross_mounts=cross_mounts)
        assert found == await scan_all(DirectWorkspace(bound), cross_mounts=cross_mounts)


def test_what_a_user_may_not_see_is_noted(as_user: AsUser) -> None:
    """Case 25, as a user without rights."""

    def work(root: Path) -> None:
        for name in ("closed", "no-search", "open"):
            (root / name).mkdir()
            (root / name / "file").write_text("x")
        (root / "open" / "file").chmod(0)
        (root / "open" / "other").write_text("other")
        (root / "closed").chmod(0)
        (root / "no-search").chmod(0o444)
        for each in KINDS:
            workspace = workspace_of(each, root)
            found = asyncio.run(scan_all(workspace))
            assert notes(found) == {
                b"": "",
                b"closed": Note.UNREADABLE,
                b"no-search": Note.UNREADABLE,
                b"open": "",
                b"open/file": "",
                b"open/other": "",
            }
            read = asyncio.run(read_all(workspace, files_of(found)))
            assert [(data, last.problem) for data, last in read] == [(b"", "unreadable"), (b"other", "")]
            assert workspace.capabilities.owners is (os.geteuid() == 0)

    as_user(work)


def test_a_folder_that_was_closed_meanwhile_has_not_vanished(as_user: AsUser) -> None:
    def work(root: Path) -> None:
        (root / "sub" / "deeper").mkdir(parents=True)
        (root / "sub" / "deeper" / "file").write_text("x")
        for each in KINDS:
            workspace = workspace_of(each, root)
            files = files_of(asyncio.run(scan_all(workspace)))
            (root / "sub").chmod(0)
            ((_, last),) = asyncio.run(read_all(workspace, files))
            (root / "sub").chmod(0o755)
            assert last.problem == "unreadable"

    as_user(work)


def test_a_root_that_may_not_be_entered_or_listed_is_a_typed_error(as_user: AsUser) -> None:
    def work(root: Path) -> None:
        for mode in (0o000, 0o300):
            root.chmod(mode)
            for each in KINDS:
                with pytest.raises(SnapshotError) as caught:
                    asyncio.run(scan_all(workspace_of(each, root)))
                assert caught.value.code == Code.INVALID_WORKSPACE
        root.chmod(0o755)

    as_user(work)


# ---- what is left out


async def test_what_the_policy_leaves_out_is_pruned_at_the_source_and_noted_once(kind: str, tmp_path: Path) -> None:
    for name in ("node_modules", "sub/node_modules", ".git", "venv", "sub/venv", "b/__pycache__"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_text("x")
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "sub" / ".env.local").touch()
    (tmp_path / ".envrc").symlink_to("x")
    selection = FilePolicy.patterns(exclude=["b/"]).compile()
    found = [entry async for batch in workspace_of(kind, tmp_path).scan(selection) for entry in batch]
    assert found == [entry async for batch in DirectWorkspace(tmp_path).scan(selection) for entry in batch]
    assert sum(entry.note == Note.EXCLUDED for entry in found) == 7


async def test_links_through_what_is_left_out_are_followed_there(kind: str, tmp_path: Path) -> None:
    (tmp_path / "node_modules" / ".bin").mkdir(parents=True)
    (tmp_path / "node_modules" / "out").symlink_to("/etc")
    (tmp_path / "node_modules" / "in").symlink_to("../src")
    (tmp_path / "node_modules" / "far").symlink_to(".bin/out")
    (tmp_path / "node_modules" / ".bin" / "out").symlink_to("../out")
    (tmp_path / "src").mkdir()
    for name, target in {"a": "out/passwd", "b": "in/x", "c": "far", "d": "missing/../../..", "e": ".bin"}.items():
        (tmp_path / name).symlink_to(f"node_modules/{target}")
    selection = FilePolicy().compile()
    found = [entry async for batch in workspace_of(kind, tmp_path).scan(selection) for entry in batch]
    assert found == [entry async for batch in DirectWorkspace(tmp_path).scan(selection) for entry in batch]
    assert {path for path, note in notes(found).items() if note == Note.OUTSIDE} == {b"a", b"c", b"d"}


async def test_a_root_that_is_named_through_a_link_is_the_folder_it_leads_to(kind: str, tmp_path: Path) -> None:
    real = tmp_path / "real\n"
    (real / "sub").mkdir(parents=True)
    (real / "absolute").symlink_to(real / "sub")
    (real / "file").write_text("x")
    (tmp_path / "link").symlink_to(real)
    await assert_same_as_direct(kind, tmp_path / "link")


# ---- tools


def gnu_tools_but(folder: Path, missing: str) -> CommandShell:
    folder.mkdir()
    for name in ("sh", "env", "id", "find", "stat", "xargs", "tar", "head", "date", "touch"):
        program = shutil.which(name)
        if name != missing and program is not None:
            (folder / name).symlink_to(program)
    return CommandShell(["/usr/bin/env", "-i", f"PATH={folder}"], "x")


@pytest.mark.parametrize("tool", ["find", "xargs", "tar", "head", "stat", "id"])
async def test_a_tool_that_is_missing_is_named_where_it_is_needed(tmp_path: Path, tool: str) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    (root / "file").write_text("x")
    workspace = ShellWorkspace(gnu_tools_but(tmp_path / "tools", tool), str(root))
    files = files_of(await scan_all(DirectWorkspace(root)))
    if tool in ("stat", "id"):
        assert files_of(await scan_all(workspace)) == files
        assert [data for data, _ in await read_all(workspace, files)] == [b"x"]
        return
    with pytest.raises(ProviderError) as caught:
        await (scan_all(workspace) if tool == "find" else read_all(workspace, files))
    assert caught.value.code == Code.MISSING_TOOL
    assert f"`{tool}`" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="a chroot needs root")
@pytest.mark.parametrize("folders", [["bin", "w"], ["bin", "w", "dev"]])
def test_a_sandbox_without_dev_null_is_told_so_and_left_alone(tmp_path: Path, folders: list[str]) -> None:
    """Without it a shell cannot begin what runs in the background, and what waits for that would wait for good; where there is
    a /dev, root would leave a file in it."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox is not installed")
    for name in folders:
        (tmp_path / name).mkdir()
    subprocess.run([busybox, "--install", tmp_path / "bin"], check=True)
    workspace = ShellWorkspace(CommandShell(["chroot", str(tmp_path)], "x"), "/w")

    async def stage() -> None:
        await workspace.open_stage()

    async def scan() -> None:
        await scan_all(workspace)

    for work in (scan, stage):
        with pytest.raises(ProviderError, match="/dev/null") as caught:
            asyncio.run(work())
        assert caught.value.code == Code.MISSING_TOOL
    assert sorted(os.listdir(tmp_path)) == sorted(folders)
    assert [path for name in folders if name != "bin" for path in (tmp_path / name).iterdir()] == []


async def test_there_is_no_workspace_without_sh(tmp_path: Path) -> None:
    for prefix in (["/usr/bin/env", "PATH=/nowhere"], ["/nowhere/ssh"]):
        with pytest.raises(ProviderError) as caught:
            await scan_all(ShellWorkspace(CommandShell(prefix, "x"), str(tmp_path)))
        assert caught.value.code == Code.NOT_CAPABLE
        assert not caught.value.retryable


def put(folder: Path, name: str, script: str) -> None:
    """A tool of this name that comes before the real one."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


ONLY_PRINT0 = 'case "$*" in *-printf*) exit 1 ;; esac; exec /usr/bin/find "$@"'
WHOLE_SECONDS = """case "$*" in *%.9Y*) echo 5; exit ;; esac; /usr/bin/stat "$@" | sed 's/[.][0-9]\\{9\\} /.000000000 /g'"""


async def test_the_stat_of_gnu_does_where_find_prints_nothing_but_names(tmp_path: Path) -> None:
    put(tmp_path / "tools", "find", ONLY_PRINT0)
    root = tmp_path / "workspace"
    base = os.fsencode(root)
    for name in ODD_NAMES:
        os.makedirs(base + b"/in-" + name[:200])
        write(base + b"/in-" + name[:200] + b"/" + name, name)
        os.symlink(b"x -> " + name, base + b"/l" + name[:200])
    workspace = ShellWorkspace(make_shell("gnu", first=tmp_path / "tools"), str(root))
    assert await scan_all(workspace) == await scan_all(DirectWorkspace(root))
    assert workspace.capabilities.time_granularity_ns == 20_000_000


async def test_whole_seconds_are_told_and_trusted_less(tmp_path: Path) -> None:
    put(tmp_path / "tools", "find", ONLY_PRINT0)
    put(tmp_path / "tools", "stat", WHOLE_SECONDS)
    put(tmp_path / "tools", "date", "exec /usr/bin/date +%s")
    root = tmp_path / "workspace"
    root.mkdir()
    (root / "file").write_text("x")
    workspace = ShellWorkspace(make_shell("gnu", first=tmp_path / "tools"), str(root))
    (file,) = files_of(await scan_all(workspace))
    st = os.stat(root / "file")
    second = 1_000_000_000
    assert (file.mtime_ns, file.ctime_ns) == (st.st_mtime_ns // second * second, st.st_ctime_ns // second * second)
    clock = await workspace.clock()
    assert (clock.granularity_ns, clock.now_ns % second) == (3 * second, 0)
    can = workspace.capabilities
    assert (can.ctime, can.mtimes, can.time_granularity_ns) == (False, False, 3 * second)
    ((data, last),) = await read_all(workspace, [file])
    assert (data, last.after) == (b"x", file)


async def test_a_clock_of_whole_seconds_adds_one_to_what_a_time_has_to_be_older_by(tmp_path: Path) -> None:
    put(tmp_path / "tools", "date", "exec /usr/bin/date +%s")
    workspace = ShellWorkspace(make_shell("gnu", first=tmp_path / "tools"), str(tmp_path))
    assert (await workspace.clock()).granularity_ns == 1_020_000_000


async def test_what_vanishes_between_find_and_stat_is_passed_over(tmp_path: Path) -> None:
    """Case 40: a file, and a folder with all in it."""
    root = tmp_path / "workspace"
    for name in ("kept", "gone", "sub/gone", "sub/deeper/gone"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    put(tmp_path / "tools", "find", ONLY_PRINT0)
    put(tmp_path / "tools", "stat", f'[ "$#" -lt 5 ] || rm -rf {root}/gone {root}/sub; exec /usr/bin/stat "$@"')
    workspace = ShellWorkspace(make_shell("gnu", first=tmp_path / "tools"), str(root))
    assert [entry.path for entry in await scan_all(workspace)] == [b"", b"kept"]


@pytest.mark.parametrize("status", [2, 137])
@pytest.mark.parametrize("tool", ["find", "stat"])
async def test_a_tool_that_dies_or_fails_midway_is_an_error_and_not_a_smaller_tree(
    tmp_path: Path, tool: str, status: int
) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    for number in range(50):
        (root / f"f{number}").touch()
    put(tmp_path / "tools", "find", ONLY_PRINT0)
    real = f"/usr/bin/{tool}"
    refuse = 'case "$*" in *-printf*) exit 1 ;; esac'
    put(tmp_path / "tools", tool, f'{refuse}; [ "$#" -lt 9 ] && exec {real} "$@"; {real} "$@" | head -c 500; exit {status}')
    with pytest.raises(ProviderError) as caught:
        await scan_all(ShellWorkspace(make_shell("gnu", first=tmp_path / "tools"), str(root)))
    assert caught.value.code == Code.SANDBOX_UNAVAILABLE


async def test_an_error_of_the_disk_is_not_a_smaller_tree(tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    complains = "echo \"find: './x': Input/output error\" >&2; exit 1"
    failing = f'/usr/bin/find "$@"; case "$*" in *.snapcore-stage*) {complains} ;; esac'
    put(tmp_path / "tools", "find", failing)
    with pytest.raises(ProviderError, match="Input/output error"):
        await scan_all(ShellWorkspace(make_shell("gnu", first=tmp_path / "tools"), str(root)))
