"""A restore through a shell that is cut off at any point: before the seal the tree is as it was, after it whoever comes next
finishes. Cases 23 and 24 of the field: what did not arrive whole is an error, and a crash leaves nothing behind."""

import asyncio
import contextlib
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from snapcore.errors import Code, ProviderError, SnapcoreError, SnapshotError
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
from snapcore.providers.shell_stage import ShellStage
from snapcore.sandboxes import Pipe, Shell
from snapcore.testing.trees import compare_trees, make_tree
from snapcore.testing.workspace_suite import restore, staged_file

from .shell_kinds import StagedWorkspace, make_shell

MTIME = 1_234_567_890_000_000_000
CHANGING = ("mkdir", "mv", "rm", "rmdir", "ln", "chmod", "touch", "tar", "mkfifo", "sync")

WRITES: list[StageWrite] = [
    staged_file(b"0", b"new"),
    StageFolder(b"1"),
    staged_file(b"1/in", b"in"),
    StageFolder(b"1/deep"),
    staged_file(b"1/deep/er", b"er", 0o444),
    staged_file(b"2", b"shared"),
    StageHardLink(b"3", b"2"),
    StageLink(b"4", b"run.sh", MTIME),
    staged_file(b"5", b"was a folder"),
    StageFolder(b"6"),
    staged_file(b"6/in", b"was a file"),
]
STEPS: list[Step] = [
    RemoveStep(b"before-1970.txt", False),
    RemoveStep(b"empty", True),
    RemoveStep(b"empty/nested", True),
    RemoveStep(b"empty/nested/deeper", True),
    RemoveStep(b"empty/nested/up", False),
    RemoveStep(b"empty/vacant", True),
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
    PlaceStep(b"6", b"read-only.txt"),
    SetMetaStep(b"", 0o750, None),
    SetMetaStep(b"a", 0o700, MTIME),
    SetMetaStep(b"added", 0o755, MTIME),
    SetMetaStep(b"added/deep", 0o555, MTIME),
    SetMetaStep(b"run.sh", 0o700, MTIME),
]


class Deadly:
    """Tools of which the call of a given number, of those that change something, kills the script and all its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "at").write_text("-1\n")
        self.reset()
        for name in CHANGING:
            (folder / name).write_text(
                f"#!/bin/dash\nread -r n <{folder}/count\nread -r at <{folder}/at\nprintf '%s\\n' $((n + 1)) >{folder}/count\n"
                f'[ "$n" != "$at" ] || kill -9 0\nexec {shutil.which(name)} "$@"\n'
            )
            (folder / name).chmod(0o755)

    def reset(self, at: int = -1) -> None:
        (self.folder / "at").write_text(f"{at}\n")
        (self.folder / "count").write_text("0\n")


async def test_a_script_killed_at_any_tool_leaves_the_old_tree_or_the_new_one(tmp_path: Path) -> None:
    deadly = Deadly(tmp_path / "tools")
    shell = make_shell("gnu", first=deadly.folder)
    for name in ("old", "new"):
        make_tree(tmp_path / name, files=6)
    assert (await restore(StagedWorkspace(tmp_path / "new", shell), WRITES, STEPS)).undone == ()
    assert differences(tmp_path / "new", tmp_path / "old") != []
    outcomes = []
    for at in range(300):
        root = tmp_path / f"t{at}"
        make_tree(root, files=6)
        deadly.reset(at)
        alive = await try_restore(StagedWorkspace(root, shell))
        if alive:
            break
        outcome = await StagedWorkspace(root, make_shell("gnu")).recover()
        assert not any(name.startswith(".snapcore") for name in os.listdir(root)), at
        as_new, as_old = differences(root, tmp_path / "new"), differences(root, tmp_path / "old")
        assert [] in (as_new, as_old), (at, outcome, as_new, as_old)
        if outcome == "finished":
            assert as_new == [], at
        outcomes.append((outcome, as_new == []))
        shutil.rmtree(root)
    assert alive
    # first the old tree, then swaps that were finished, last the new tree with the rest of its stage swept
    order = [outcome for outcome, _ in itertools.groupby(outcomes)]
    assert [o for o in order if o[0]] == [("swept", False), ("finished", True), ("swept", True)]
    assert outcomes.count(("finished", True)) >= 15


def differences(a: Path, b: Path) -> list[str]:
    """Times of the making of a tree differ between two that were made one after the other."""
    return [line for line in compare_trees(a, b, excluded=lambda name: name == b"app.db") if ": mtime" not in line]


async def try_restore(workspace: StagedWorkspace) -> bool:
    """Restore up to the error, if there is one, and leave everything as the death of this host would."""
    stage: ShellStage | None = None
    try:
        stage = await workspace.open_shell_stage()
        await stage.write(WRITES)
        await stage.log(STEPS)
        await stage.seal(durable=True)
        assert (await stage.swap()).undone == ()
    except ProviderError:
        if stage is not None:
            stage.drop()
        return False
    return True


class Cutting:
    """A shell whose scripts get only so many bytes of their input, from the call of a given number on."""

    def __init__(self, shell: Shell, call: int, keep: int) -> None:
        self.sandbox_id = shell.sandbox_id
        self._shell = shell
        self._call = call
        self._keep = keep

    def pipe(self, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> AbstractAsyncContextManager[Pipe]:
        self._call -= 1
        return self._shell.pipe(script, self._cut(stdin) if self._call < 0 else stdin)

    async def _cut(self, stdin: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        left = self._keep
        pieces = one(stdin) if isinstance(stdin, bytes) else stdin
        async for piece in pieces:
            yield piece[:left]
            left = max(0, left - len(piece))


async def opened(root: Path, shell: Shell) -> ShellStage:
    """A stage in `root`, opened by the shell's first pipe: its tools are known already."""
    await StagedWorkspace(root, make_shell(shell.sandbox_id.split(":")[1].split("(")[0])).recover()
    return await StagedWorkspace(root, shell).open_shell_stage()


async def one(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


@pytest.mark.parametrize("kind", ["gnu", "busybox"])
async def test_what_does_not_arrive_whole_is_an_error_before_the_seal(tmp_path: Path, kind: str) -> None:
    for keep in (0, 100, 512, 1024, 1536, 2000, 2048, 2560, 3072, 3584, 4096):
        root = tmp_path / f"r{keep}"
        root.mkdir()
        (root / "file").write_text("old")
        stage = await opened(root, Cutting(make_shell(kind), 1, keep))  # the second pipe carries what is staged
        await stage.write([staged_file(b"0", b"new"), staged_file(b"1", b"x" * 600)])
        await stage.log([PlaceStep(b"0", b"file"), PlaceStep(b"1", b"other")])
        with pytest.raises(ProviderError):
            await stage.seal(durable=False)
        with pytest.raises(SnapshotError):
            await stage.seal(durable=False)
        stage.drop()
        assert await StagedWorkspace(root, make_shell(kind)).recover() == "swept"
        assert {name: (root / name).read_text() for name in os.listdir(root)} == {"file": "old"}


async def test_what_arrives_changed_is_an_error(tmp_path: Path) -> None:
    class Changing(Cutting):
        async def _cut(self, stdin: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for piece in one(stdin) if isinstance(stdin, bytes) else stdin:
                yield piece.replace(b"fresh", b"stale")

    stage = await opened(tmp_path, Changing(make_shell("gnu"), 1, 0))
    await stage.write([staged_file(b"0", b"fresh")])
    await stage.log([PlaceStep(b"0", b"file")])
    with pytest.raises(ProviderError, match="arrived changed"):
        await stage.seal(durable=False)
    stage.drop()
    assert await StagedWorkspace(tmp_path, make_shell("gnu")).recover() == "swept"


@pytest.mark.parametrize("kind", ["gnu", "busybox"])
async def test_steps_that_do_not_arrive_whole_are_not_begun(tmp_path: Path, kind: str) -> None:
    for keep in (0, 10, 40, 60):
        root = tmp_path / f"r{keep}"
        root.mkdir()
        for name in ("a", "b", "c"):
            (root / name).write_text("old")
        stage = await opened(root, Cutting(make_shell(kind), 2, keep))
        await stage.log([RemoveStep(b"a", False), RemoveStep(b"b", False), RemoveStep(b"c", False)])
        await stage.seal(durable=False)
        with pytest.raises(ProviderError):
            await stage.swap()
        stage.drop()
        assert {"a", "b", "c"} <= set(os.listdir(root))
        assert await StagedWorkspace(root, make_shell(kind)).recover() == "finished"
        assert os.listdir(root) == []


class Severed:
    """A shell that loses the connection, while the script, once begun, goes on by itself; from the call of a number on."""

    def __init__(self, shell: Shell, environment: dict[str, str], call: int) -> None:
        self.sandbox_id = shell.sandbox_id
        self._shell = shell
        self._environment = environment
        self._call = call
        self.left: asyncio.subprocess.Process | None = None

    def pipe(self, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> AbstractAsyncContextManager[Pipe]:
        self._call -= 1
        return self._lose(script, stdin) if self._call == -1 else self._shell.pipe(script, stdin)

    @asynccontextmanager
    async def _lose(self, script: str, stdin: bytes | AsyncIterator[bytes]) -> AsyncIterator[Pipe]:
        assert isinstance(stdin, bytes)
        null = asyncio.subprocess.DEVNULL
        self.left = await asyncio.create_subprocess_exec(
            *("sh", "-c", script), stdin=asyncio.subprocess.PIPE, stdout=null, stderr=null, env=self._environment
        )
        assert self.left.stdin is not None
        self.left.stdin.write(stdin)
        self.left.stdin.close()
        await self.left.stdin.wait_closed()
        raise ProviderError("The connection is lost.", code=Code.SANDBOX_UNAVAILABLE, retryable=True)
        yield  # type: ignore[unreachable]


async def test_a_swap_that_goes_on_without_its_host_is_waited_for(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    os.mkfifo(tools / "gate")
    os.mkfifo(tools / "begun")
    (tools / "mv").write_text(
        f'#!/bin/sh\ncase $* in *./file) echo >{tools}/begun; read -r x <{tools}/gate ;; esac\nexec {shutil.which("mv")} "$@"\n'
    )
    (tools / "mv").chmod(0o755)
    root = tmp_path / "root"
    root.mkdir()
    environment = {"PATH": f"{tools}:/usr/bin:/bin"}
    shell = Severed(make_shell("gnu"), environment, 2)
    stage = await opened(root, shell)
    await stage.write([staged_file(b"0", b"new"), staged_file(b"1", b"new")])
    await stage.log([PlaceStep(b"0", b"file"), PlaceStep(b"1", b"other")])
    await stage.seal(durable=False)
    with pytest.raises(ProviderError) as caught:
        await stage.swap()
    assert caught.value.retryable
    await stage.abort()
    assert shell.left is not None
    await asyncio.to_thread((tools / "begun").read_text)
    recovering = asyncio.create_task(StagedWorkspace(root, make_shell("gnu")).recover())
    assert await asyncio.wait([recovering], timeout=1.0) == (set(), {recovering})
    assert not (root / "other").exists()
    (tools / "gate").write_text("\n")
    assert await recovering == "finished"
    assert await shell.left.wait() == 0
    assert sorted(os.listdir(root)) == ["file", "other"]


async def test_a_lost_seal_is_taken_back_by_an_abort(tmp_path: Path) -> None:
    """The script may have sealed although nobody heard of it."""

    class Deaf(Cutting):
        def pipe(self, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> AbstractAsyncContextManager[Pipe]:
            self._call -= 1
            return self._deaf(script, stdin) if self._call == -1 else self._shell.pipe(script, stdin)

        @asynccontextmanager
        async def _deaf(self, script: str, stdin: bytes | AsyncIterator[bytes]) -> AsyncIterator[Pipe]:
            async with self._shell.pipe(script, stdin) as pipe:
                async for _ in pipe.stdout():
                    pass
                await pipe.wait()
            raise ProviderError("The connection is lost.", code=Code.SANDBOX_UNAVAILABLE, retryable=True)
            yield  # type: ignore[unreachable]

    (tmp_path / "file").write_text("old")
    stage = await opened(tmp_path, Deaf(make_shell("gnu"), 1, 0))
    await stage.write([staged_file(b"0", b"new")])
    await stage.log([PlaceStep(b"0", b"file")])
    with pytest.raises(ProviderError):
        await stage.seal(durable=True)
    assert (tmp_path / ".snapcore-stage" / "journal").exists()
    await stage.abort()
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


async def test_a_swap_finishes_although_its_caller_is_cancelled(tmp_path: Path) -> None:
    stage = await StagedWorkspace(tmp_path, make_shell("gnu")).open_shell_stage()
    count = 100
    await stage.write([staged_file(b"%d" % number, b"x") for number in range(count)])
    await stage.log([PlaceStep(b"%d" % number, b"f%d" % number) for number in range(count)])
    await stage.seal(durable=False)
    task = asyncio.create_task(stage.swap())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(os.listdir(tmp_path)) == count


async def test_what_came_after_a_swap_was_cut_short_is_not_removed(tmp_path: Path) -> None:
    deadly = Deadly(tmp_path / "tools")
    root = tmp_path / "root"
    root.mkdir()
    (root / "gone").write_text("old")
    stage = await StagedWorkspace(root, make_shell("gnu", first=deadly.folder)).open_shell_stage()
    await stage.write([staged_file(b"0", b"new")])
    await stage.log([RemoveStep(b"gone", False), PlaceStep(b"0", b"file")])
    await stage.seal(durable=False)
    deadly.reset(2)  # mv is asked for what it can do, rm runs, and mv dies
    with pytest.raises(ProviderError):
        await stage.swap()
    stage.drop()
    assert sorted(os.listdir(root)) == [".snapcore-stage"]
    (root / "gone").write_text("made since")
    assert await StagedWorkspace(root, make_shell("gnu")).recover() == "finished"
    assert {name: (root / name).read_text() for name in os.listdir(root)} == {"gone": "made since", "file": "new"}


async def test_a_damaged_sealed_journal_is_never_swept(tmp_path: Path) -> None:
    workspace = StagedWorkspace(tmp_path, make_shell("gnu"))
    stage = await workspace.open_shell_stage()
    await stage.write([staged_file(b"0", b"x")])
    await stage.log([PlaceStep(b"0", b"file")])
    await stage.seal(durable=False)
    stage.drop()
    journal = tmp_path / ".snapcore-stage" / "journal"
    whole = journal.read_bytes()
    for damaged in (whole[:-1], whole[:20], whole[:-1] + b"f", whole[:45] + b"\xff" + whole[46:]):
        journal.write_bytes(damaged)
        with pytest.raises(SnapshotError) as caught:
            await workspace.recover()
        assert caught.value.code == Code.RESTORE_BLOCKED
    journal.write_bytes(whole)
    assert await workspace.recover() == "finished"
    assert (tmp_path / "file").read_text() == "x"


async def test_a_local_restore_that_died_is_finished_through_a_shell_and_the_other_way_round(tmp_path: Path) -> None:
    """A bind mount is reached both ways. While an owner lives, neither takes the other's stage."""
    from snapcore.providers.direct import DirectWorkspace
    from snapcore.providers.direct_stage import DirectStage

    direct, staged = DirectWorkspace(tmp_path), StagedWorkspace(tmp_path, make_shell("gnu"))
    for number, (first, second) in enumerate(((direct, staged), (staged, direct))):
        stage = await first.open_stage()
        assert isinstance(stage, DirectStage | ShellStage)
        await stage.write([staged_file(b"0", b"x")])
        await stage.log([PlaceStep(b"0", b"file%d" % number)])
        await stage.seal(durable=False)
        with pytest.raises(ProviderError) as caught:
            await second.recover()
        assert caught.value.code == Code.WORKSPACE_BUSY
        stage.drop()
        # the other cannot know whether this process still wants it, but a heartbeat tells in time
        os.utime(tmp_path / ".snapcore-stage" / "owner", (1_000_000_000, 1_000_000_000))
        assert await second.recover() == "finished"
    assert sorted(os.listdir(tmp_path)) == ["file0", "file1"]


async def test_an_owner_on_another_host_is_dead_after_ten_minutes_without_a_heartbeat(tmp_path: Path) -> None:
    workspace = StagedWorkspace(tmp_path, make_shell("gnu"))
    stage = await workspace.open_shell_stage()
    owner = tmp_path / ".snapcore-stage" / "owner"
    owner.write_bytes(owner.read_bytes().replace(os.uname().nodename.encode(), b"elsewhere"))
    with pytest.raises(ProviderError, match="elsewhere") as caught:
        await workspace.recover()
    assert caught.value.code == Code.WORKSPACE_BUSY
    os.utime(owner, (1_000_000_000, 1_000_000_000))
    assert await workspace.recover() == "swept"
    # the owner, should it live after all, is told
    await stage.write([staged_file(b"0", b"x")])
    with pytest.raises(ProviderError) as caught:
        await stage.seal(durable=False)
    assert caught.value.code == Code.WORKSPACE_BUSY
    stage.drop()
    assert os.listdir(tmp_path) == []


async def test_a_planted_stage_is_refused_or_swept(tmp_path: Path) -> None:
    workspace = StagedWorkspace(tmp_path, make_shell("gnu"))
    planted = tmp_path / ".snapcore-stage"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    planted.symlink_to("elsewhere")
    for act in (workspace.recover, workspace.open_stage):
        with pytest.raises(SnapshotError) as caught:
            await act()
        assert caught.value.code == Code.RESTORE_BLOCKED
    planted.unlink()
    planted.touch()
    with pytest.raises(SnapshotError):
        await workspace.recover()
    planted.unlink()
    planted.mkdir()
    os.mkfifo(planted / "owner")
    with pytest.raises(SnapshotError):
        await workspace.recover()
    (planted / "owner").unlink()
    (planted / "run").symlink_to("../elsewhere/kept")
    (planted / "opened").symlink_to("../elsewhere/kept")
    (planted / "new").symlink_to("../elsewhere")
    (planted / "-odd\n").mkdir()
    os.utime(planted, (1_000_000_000, 1_000_000_000))
    assert await workspace.recover() == "swept"
    assert os.listdir(tmp_path) == ["elsewhere"]
    assert os.listdir(tmp_path / "elsewhere") == ["kept"]


async def test_a_journal_that_leads_out_of_the_root_is_refused(tmp_path: Path) -> None:
    from snapcore.providers.journal import Journal

    (tmp_path / "victim").write_text("safe")
    stage_folder = tmp_path / "root" / ".snapcore-stage"
    (stage_folder / "new").mkdir(parents=True)
    for step in (RemoveStep(b"../victim", False), PlaceStep(b"../../../victim", b"taken"), SetMetaStep(b"/etc", 0, None)):
        (stage_folder / "journal").write_bytes(Journal.encode([step]))
        os.utime(stage_folder, (1_000_000_000, 1_000_000_000))
        with pytest.raises(SnapshotError):
            await StagedWorkspace(tmp_path / "root", make_shell("gnu")).recover()
    assert (tmp_path / "victim").read_text() == "safe"


@pytest.mark.parametrize("kind", ["gnu", "busybox"])
async def test_a_full_disk_is_a_typed_error_and_leaves_the_tree(small_disk: Path, kind: str) -> None:
    (small_disk / "kept").write_text("kept")
    stage = await StagedWorkspace(small_disk, make_shell(kind)).open_shell_stage()
    too_much: list[StageWrite] = [StageFile(b"%d" % n, 0, os.urandom(1 << 20), 1 << 20, True) for n in range(9)]
    with pytest.raises(ProviderError) as caught:
        await write_and_seal(stage, too_much)
    assert caught.value.code == Code.SANDBOX_FULL
    assert "No space left" in str(caught.value)
    (small_disk / "filler").write_bytes(b"")
    with contextlib.suppress(OSError):
        fill(small_disk / "filler")
    await stage.abort()
    with contextlib.suppress(OSError):  # what the stage had, too
        fill(small_disk / "filler")
    with pytest.raises(ProviderError, match="No space left") as caught:
        await StagedWorkspace(small_disk, make_shell(kind)).open_stage()
    assert caught.value.code == Code.SANDBOX_FULL
    assert sorted(os.listdir(small_disk)) == ["filler", "kept"]


async def test_errors_that_a_stage_raises_are_typed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SnapcoreError):
        await StagedWorkspace(tmp_path / "file", make_shell("gnu")).open_stage()


def fill(path: Path) -> None:
    """Leave not a byte of room."""
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def write_and_seal(stage: ShellStage, writes: list[StageWrite]) -> None:
    await stage.write(writes)
    await stage.seal(durable=False)
