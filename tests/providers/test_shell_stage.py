"""What a restore through the shell of a sandbox does to a tree, with GNU tools under dash and bash, and with busybox alone.

Cases 4, 11, 12, 13, 14, 15, 16, 17, 21, 43, 49 and 50 of the field.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

import snapcore
from snapcore.errors import Code, ProviderError
from snapcore.protocols import (
    PlaceStep,
    RemoveStep,
    SetMetaStep,
    StageFile,
    StageFolder,
    StageHardLink,
    StageLink,
    StageWrite,
    Step,
)
from snapcore.providers.shell import ShellWorkspace
from snapcore.sandboxes import Pipe, Shell
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree
from snapcore.testing.workspace_suite import restore, staged_file

from .shell_kinds import KINDS, StagedWorkspace, make_shell

NOBODY = 65534
MTIME = 1_234_567_890_000_000_000


class Sandbox:
    """A handle for a folder that is reached through a shell alone. Counts its pipes."""

    def __init__(self, shell: Shell, root: Path) -> None:
        self._shell = shell
        self.sandbox_id = shell.sandbox_id
        self.workspace_root = str(root)
        self.pipes = 0

    def workspace(self, root: str | None = None) -> ShellWorkspace:
        return ShellWorkspace(self, root or self.workspace_root)

    def pipe(self, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> AbstractAsyncContextManager[Pipe]:
        self.pipes += 1
        return self._shell.pipe(script, stdin)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", KINDS)
async def test_five_rounds_of_capture_restore_and_change_are_equal(tmp_path: Path, kind: str) -> None:
    live, copy = tmp_path / "live", tmp_path / "copy"
    make_tree(live, files=40)
    shell = make_shell(kind)
    whole_seconds = kind == "busybox"
    async with snapcore.open_repository("memory://") as repo:
        for number in range(5):
            await repo.capture(Sandbox(shell, live), thread_id="t", reread=True)
            for _ in range(2):  # the second time there is nothing to do: hard links, too, are as they should be
                receipt = await repo.restore(Sandbox(shell, copy), thread_id="t")
                assert receipt is not None
                lines = compare_trees(live, copy)
                assert [line for line in lines if not (whole_seconds and ": mtime" in line)] == []
                assert bool(receipt.differences) == whole_seconds
                written = receipt.bytes_written
            assert written == 0
            mutate_tree(live, number)


@pytest.mark.parametrize("kind", ["gnu", "busybox"])
async def test_a_small_restore_takes_three_pipes(tmp_path: Path, kind: str) -> None:
    sandbox = Sandbox(make_shell(kind), tmp_path)
    workspace = StagedWorkspace(tmp_path, sandbox)
    await workspace.recover()
    sandbox.pipes = 0
    writes: list[StageWrite] = [staged_file(b"%d" % number, b"x" * 10_000) for number in range(15)]
    steps: list[Step] = [PlaceStep(b"%d" % number, b"f%d" % number) for number in range(15)]
    assert (await restore(workspace, writes, steps)).undone == ()
    assert sandbox.pipes == 3
    assert len(os.listdir(tmp_path)) == 15


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_written_through_what_stands_in_the_way(tmp_path: Path, kind: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    for folder in (outside, root, root / "real"):
        folder.mkdir()
    (outside / "victim").write_text("safe")
    (outside / "victim").chmod(0o600)
    os.link(outside / "victim", root / "shared")
    for name in ("to-folder", "over-folder", "gone", "real/deep"):
        (root / name).symlink_to(outside)
    for name in ("to-file", "meta-file"):
        (root / name).symlink_to(outside / "victim")
    before = os.stat(outside).st_mtime_ns, os.stat(outside / "victim").st_mtime_ns
    report = await restore(
        StagedWorkspace(root, make_shell(kind)),
        [*(staged_file(b"%d" % number, b"new") for number in range(6)), StageFolder(b"6"), staged_file(b"6/in", b"new")],
        [
            RemoveStep(b"gone", False),
            RemoveStep(b"real/deep/victim", False),
            RemoveStep(b"real/deep", True),
            RemoveStep(b"over-folder", False),
            PlaceStep(b"0", b"to-folder"),
            PlaceStep(b"1", b"to-file"),
            PlaceStep(b"2", b"shared"),
            PlaceStep(b"3", b"real/deep/planted"),
            PlaceStep(b"6", b"over-folder"),
            SetMetaStep(b"meta-file", 0o777, MTIME),
            SetMetaStep(b"real/deep", 0o777, MTIME),
            SetMetaStep(b"real/deep/victim", 0o777, MTIME),
        ],
    )
    assert sorted(path for path, _ in report.undone) == [
        b"meta-file",
        b"real/deep",
        b"real/deep/planted",
        b"real/deep/victim",
        b"real/deep/victim",
    ]
    assert os.listdir(outside) == ["victim"]
    assert (outside / "victim").read_text() == "safe"
    assert (outside / "victim").stat().st_mode & 0o7777 == 0o600
    assert before == (os.stat(outside).st_mtime_ns, os.stat(outside / "victim").st_mtime_ns)
    for name in ("to-folder", "to-file", "shared", "over-folder/in"):
        assert not (root / name).is_symlink()
        assert (root / name).read_text() == "new"


@pytest.mark.parametrize("kind", ["gnu", "bash"])
async def test_a_folder_that_becomes_a_link_while_the_swap_runs_leads_nowhere(tmp_path: Path, kind: str) -> None:
    """Each tool, when it is called, finds a folder of the path it may have been meant for replaced by a link."""
    tools, outside = tmp_path / "tools", tmp_path / "outside"
    for folder in (tools, outside):
        folder.mkdir()
    for name in ("file", "gone", "meta", "file-meta"):
        (outside / name).write_text("safe")
    (outside / "folder").mkdir()
    before = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(outside)}
    for tool in ("mv", "rm", "rmdir", "ln", "chmod", "touch"):
        root = tmp_path / f"root-{tool}"
        sub = root / "sub"
        (sub / "folder").mkdir(parents=True)
        (sub / "meta").mkdir()
        for name in ("file", "gone", "file-meta"):
            (sub / name).write_text("old")
        plant = f"mv {sub} {root}/moved 2>/dev/null && ln -s {outside} {sub}"
        paths = f"PATH=/usr/bin:/bin; {plant.replace('mv ', '/bin/mv ').replace('ln ', '/bin/ln ')}"
        for each in tools.iterdir():
            each.unlink()
        (tools / tool).write_text(f'#!/bin/sh\n({paths})\nexec {shutil.which(tool)} "$@"\n')
        (tools / tool).chmod(0o755)
        stage = await StagedWorkspace(root, make_shell(kind)).open_shell_stage()
        await stage.write([staged_file(b"0", b"new"), staged_file(b"1", b"new")])
        await stage.log(
            [
                RemoveStep(b"sub/gone", False),
                RemoveStep(b"sub/folder", True),
                PlaceStep(b"0", b"sub/file"),
                PlaceStep(b"1", b"sub/other"),
                SetMetaStep(b"sub/meta", 0o711, MTIME),
                SetMetaStep(b"sub/file-meta", 0o711, MTIME),
            ]
        )
        await stage.seal(durable=False)
        stage._lock.shell = make_shell(kind, first=tools)
        await stage.swap()
        assert sub.is_symlink(), tool
        assert {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(outside)} == before, tool
        assert all((outside / name).read_text() == "safe" for name in ("file", "gone", "meta", "file-meta")), tool
        assert all(entry.stat().st_mode & 0o7777 != 0o711 for entry in os.scandir(outside)), tool


@pytest.mark.parametrize("kind", KINDS)
async def test_modes_times_and_odd_names_come_back(tmp_path: Path, kind: str) -> None:
    names = [bytes([byte]) * 3 for byte in range(1, 256) if byte not in b"/"]
    writes: list[StageWrite] = []
    steps: list[Step] = []
    for number, name in enumerate(names):
        writes += [StageFolder(b"%d" % number), staged_file(b"%d/" % number + name, name, 0o444 if number % 2 else 0o1755)]
        writes += [
            StageLink(b"%d/l" % number + name, name * 60, MTIME),
            StageHardLink(b"%d/h" % number + name, b"%d/" % number + name),
        ]
        steps += [PlaceStep(b"%d" % number, b"d" + name), SetMetaStep(b"d" + name, 0o555, MTIME)]
    assert (await restore(StagedWorkspace(tmp_path, make_shell(kind)), writes, steps)).undone == ()
    base = os.fsencode(tmp_path)
    assert sorted(os.listdir(base)) == sorted(b"d" + name for name in names)
    for number, name in enumerate(names):
        folder = os.path.join(base, b"d" + name)
        st = os.stat(folder)
        assert (st.st_mode & 0o7777, st.st_mtime_ns) == (0o555, MTIME)
        st = os.stat(os.path.join(folder, name))
        assert (st.st_mode & 0o7777, st.st_mtime_ns, st.st_nlink) == (0o444 if number % 2 else 0o1755, MTIME, 2)
        assert os.readlink(os.path.join(folder, b"l" + name)) == name * 60


async def test_folders_too_deep_for_one_path_are_restored(tmp_path: Path) -> None:
    """With GNU's tools under dash. Bash and busybox look at every folder above at every step: it takes them minutes."""
    depth = 2200
    staged = [b"/".join([b"0"] + [b"d"] * level) for level in range(depth)]
    report = await restore(
        StagedWorkspace(tmp_path, make_shell("gnu")),
        [*(StageFolder(path) for path in staged), staged_file(staged[-1] + b"/file", b"deep")],
        [
            PlaceStep(b"0", b"top"),
            *(SetMetaStep(b"top" + path[1:], 0o750, MTIME) for path in staged),
        ],
    )
    assert report.undone == ()
    fd = os.open(tmp_path / "top", os.O_RDONLY)
    for _ in range(depth - 1):
        st = os.fstat(fd)
        assert (st.st_mode & 0o7777, st.st_mtime_ns) == (0o750, MTIME)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    assert os.listdir(fd) == ["file"]
    os.close(fd)
    report = await restore(
        StagedWorkspace(tmp_path, make_shell("gnu")),
        [staged_file(b"0", b"new")],
        [PlaceStep(b"0", b"top" + staged[-1][1:] + b"/file"), SetMetaStep(b"top" + staged[-1][1:], 0o700, MTIME)],
    )
    assert report.undone == ()
    await asyncio.to_thread(run, "rm", "-rf", str(tmp_path / "top"))


async def test_a_large_file_in_pieces_takes_little_memory(tmp_path: Path) -> None:
    """In a process of its own, as the most memory that a process ever had is what the system tells."""
    script = (
        "import asyncio, os, resource, sys\n"
        "from pathlib import Path\n"
        "from snapcore.protocols import PlaceStep, StageFile\n"
        "from tests.providers.shell_kinds import StagedWorkspace, make_shell\n"
        "async def main():\n"
        "    stage = await StagedWorkspace(Path(sys.argv[1]), make_shell('gnu')).open_shell_stage()\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "    size, piece = 200 << 20, 4 << 20\n"
        "    for number, offset in enumerate(reversed(range(0, size, piece)), 1):\n"
        "        data = bytes([number]) * piece\n"
        "        await stage.write([StageFile(b'0', offset, data, size, number == size // piece, 0o644)])\n"
        "    await stage.log([PlaceStep(b'0', b'file')])\n"
        "    await stage.seal(durable=False)\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
        "    print((await stage.swap()).undone)\n"
        "asyncio.run(main())\n"
    )
    output = await asyncio.to_thread(run, sys.executable, "-c", script, str(tmp_path))
    grown, undone = output.splitlines()
    assert int(grown) < 64 << 10  # KiB
    assert undone == "()"
    assert (tmp_path / "file").stat().st_size == 200 << 20
    with open(tmp_path / "file", "rb") as file:  # noqa: ASYNC230 (a local file)
        assert file.read(1) == b"\x32"
        file.seek(-1, os.SEEK_END)
        assert file.read() == b"\x01"


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def nobodys() -> Iterator[Callable[[str], tuple[Path, Shell]]]:
    """Makes a folder and a shell of a user without rights; of this one, when it has none itself."""
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)

    def make(kind: str) -> tuple[Path, Shell]:
        root = base / kind
        root.mkdir(mode=0o755)
        prefix: tuple[str, ...] = ()
        if os.geteuid() == 0:
            os.chown(root, NOBODY, NOBODY)
            prefix = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
        return root, make_shell(kind, prefix)

    yield make
    subprocess.run(["chmod", "-R", "u+rwx", base], check=True)
    shutil.rmtree(base)


def give(root: Path) -> None:
    if os.geteuid() == 0:
        subprocess.run(["chown", "-hR", f"{NOBODY}:{NOBODY}", root], check=True)


@pytest.mark.parametrize("kind", KINDS)
async def test_read_only_folders_are_opened_and_closed_again(nobodys: Callable[[str], tuple[Path, Shell]], kind: str) -> None:
    root, shell = nobodys(kind)
    for name in ("closed/inner", "dark/inner", "kept", "gone/inner"):
        (root / name).mkdir(parents=True)
    for name in ("closed/old", "closed/inner/old", "dark/inner/old", "kept/old", "gone/inner/old"):
        (root / name).write_text("old")
    give(root)
    modes = {"closed/inner": 0o555, "closed": 0o511, "dark/inner": 0o500, "dark": 0o0, "kept": 0o555, "gone/inner": 0o500}
    for name, mode in modes.items():
        (root / name).chmod(mode)
    root.chmod(0o555)
    report = await restore(
        StagedWorkspace(root, shell),
        [
            *(staged_file(b"%d" % number, b"new") for number in range(4)),
            StageFolder(b"5"),
            StageFolder(b"5/in"),
            staged_file(b"5/in/x", b""),
        ],
        [
            RemoveStep(b"closed/old", False),
            RemoveStep(b"gone", True),
            RemoveStep(b"gone/inner", True),
            RemoveStep(b"gone/inner/old", False),
            PlaceStep(b"0", b"closed/inner/old"),
            PlaceStep(b"1", b"dark/inner/new"),
            PlaceStep(b"2", b"kept/new"),
            PlaceStep(b"3", b"new"),
            PlaceStep(b"5", b"closed/inner/folder"),
            SetMetaStep(b"closed/inner/folder", 0o555, MTIME),
            SetMetaStep(b"closed/inner/folder/in", 0o555, MTIME),
            SetMetaStep(b"kept", 0o500, MTIME),
        ],
    )
    assert report.undone == ()
    assert root.stat().st_mode & 0o7777 == 0o555
    modes["kept"] = 0o500
    del modes["gone/inner"]
    if os.geteuid() != 0:
        (root / "dark").chmod(0o700)
        modes["dark"] = 0o700
    assert {name: (root / name).stat().st_mode & 0o7777 for name in modes} == modes
    assert sorted(os.listdir(root)) == ["closed", "dark", "kept", "new"]
    assert (root / "closed/inner/old").read_text() == (root / "dark/inner/new").read_text() == "new"
    assert not (root / "closed/old").exists()
    assert (root / "kept").stat().st_mtime_ns == MTIME
    st = (root / "closed/inner/folder/in").stat()
    assert (st.st_mode & 0o7777, st.st_mtime_ns) == (0o555, MTIME)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_user_without_rights_restores_is_that_users(nobodys: Callable[[str], tuple[Path, Shell]], kind: str) -> None:
    root, shell = nobodys(kind)
    workspace = StagedWorkspace(root, shell)
    report = await restore(
        workspace,
        [staged_file(b"0", b"x", 0o4755), staged_file(b"1", b"x", 0o644)],
        [PlaceStep(b"0", b"tool"), PlaceStep(b"1", b"file")],
    )
    assert report.undone == ()
    assert (root / "tool").stat().st_mode & 0o7777 == 0o755
    if os.geteuid() == 0:
        assert {(root / name).stat().st_uid for name in ("tool", "file")} == {NOBODY}
    stage = await workspace.open_shell_stage()
    with pytest.raises(ProviderError) as caught:
        await stage.write([StageFile(b"0", 0, b"x", 1, True, 0o644, MTIME, (4321, 4321))])
    assert caught.value.code == Code.NOT_CAPABLE
    await stage.abort()
    (root / "theirs").mkdir(mode=0o755)
    (root / "theirs" / "file").write_text("x")
    if os.geteuid() == 0:  # folders of another user: what cannot be done there is told
        report = await restore(
            workspace,
            [staged_file(b"0", b"x")],
            [RemoveStep(b"theirs/file", False), PlaceStep(b"0", b"theirs/new"), SetMetaStep(b"theirs", 0o777, MTIME)],
        )
        assert {path for path, _ in report.undone} == {b"theirs/file", b"theirs/new", b"theirs"}


@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_of_a_read_only_root_closes_it_again(nobodys: Callable[[str], tuple[Path, Shell]], kind: str) -> None:
    root, shell = nobodys(kind)
    root.chmod(0o555)
    for seal in (False, True):
        stage = await StagedWorkspace(root, shell).open_shell_stage()
        await stage.write([StageFolder(b"0"), StageFolder(b"0/in"), staged_file(b"0/in/file", b"x")])
        await stage.log([PlaceStep(b"0", b"top"), SetMetaStep(b"top", 0o555, MTIME), SetMetaStep(b"top/in", 0o555, MTIME)])
        if seal:
            await stage.seal(durable=False)
        await stage.abort()
        assert root.stat().st_mode & 0o7777 == 0o555
        assert os.listdir(root) == []
    stage = await StagedWorkspace(root, shell).open_shell_stage()
    stage.drop()
    assert await StagedWorkspace(root, shell).recover() == "swept"
    assert root.stat().st_mode & 0o7777 == 0o555


@pytest.mark.parametrize("kind", ["gnu", "busybox"])
async def test_owners_and_special_bits_are_set_when_they_are_asked_for(tmp_path: Path, kind: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser may give files to others")
    (tmp_path / "there").write_text("x")
    (tmp_path / "folder").mkdir()
    report = await restore(
        StagedWorkspace(tmp_path, make_shell(kind)),
        [
            StageFile(b"0", 0, b"x", 1, True, 0o6755, MTIME, (4321, 4322)),
            StageFile(b"1", 0, b"x", 1, True, 0o6755, MTIME),
            StageLink(b"2", b"target", MTIME, (4321, 4322)),
        ],
        [
            PlaceStep(b"0", b"theirs"),
            PlaceStep(b"1", b"mine"),
            PlaceStep(b"2", b"link"),
            SetMetaStep(b"there", 0o4711, MTIME, (4321, 4322)),
            SetMetaStep(b"folder", 0o3775, MTIME, (4321, 4322)),
        ],
    )
    assert report.undone == ()
    found = {}
    for name in ("theirs", "mine", "there", "folder"):
        st = (tmp_path / name).stat()
        found[name] = (st.st_uid, st.st_gid, st.st_mode & 0o7777)
    assert found == {
        "theirs": (4321, 4322, 0o6755),
        "mine": (0, 0, 0o755),
        "there": (4321, 4322, 0o4711),
        "folder": (4321, 4322, 0o3775),
    }
    if kind == "gnu":  # busybox gives links to nobody
        assert os.lstat(tmp_path / "link").st_uid == 4321


async def test_a_stage_of_another_user_is_not_worked_in(tmp_path: Path) -> None:
    """What its owner may put there at any time cannot be trusted by a user with more rights."""
    if os.geteuid() != 0:
        pytest.skip("only the superuser can make another user's folder")
    (tmp_path / ".snapcore-stage" / "new").mkdir(parents=True)
    os.chown(tmp_path / ".snapcore-stage", NOBODY, NOBODY)
    for act in (StagedWorkspace(tmp_path, make_shell("gnu")).recover, StagedWorkspace(tmp_path, make_shell("gnu")).open_stage):
        with pytest.raises(snapcore.SnapshotError) as caught:
            await act()
        assert caught.value.code == Code.RESTORE_BLOCKED


async def test_what_is_mounted_in_the_workspace_is_refused_before_the_seal(mounted: Path) -> None:
    stage = await StagedWorkspace(mounted, make_shell("gnu")).open_shell_stage()
    await stage.write([staged_file(b"0", b"x")])
    with pytest.raises(ProviderError) as caught:
        await stage.log([PlaceStep(b"0", b"mount/file")])
    assert caught.value.code == Code.NOT_CAPABLE
    await stage.abort()


async def test_a_sandbox_without_tar_is_told_so(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "stat", "env", "id", "mkdir", "rm", "rmdir", "touch", "date", "cat", "find", "xargs"):
        (tools / name).symlink_to(shutil.which("dash" if name == "sh" else name) or "/bin/sh")
    from snapcore.providers.command_shell import CommandShell

    shell = CommandShell(["/usr/bin/env", "-i", f"PATH={tools}"], "test:bare")
    with pytest.raises(ProviderError) as caught:
        await StagedWorkspace(tmp_path, shell).open_stage()
    assert caught.value.code == Code.MISSING_TOOL
    assert os.listdir(tmp_path) == ["tools"]
