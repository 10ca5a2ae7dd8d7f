"""A local restore that dies at any point: before the seal the tree is as it was, after it the next one finishes."""

import asyncio
import errno
import fcntl
import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapcore.errors import Code, ProviderError, SnapshotError
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
from snapcore.providers.direct import DirectWorkspace
from snapcore.providers.direct_stage import DirectStage
from snapcore.providers.folders import FOLDER_FLAGS
from snapcore.providers.stage_lock import StageLock
from snapcore.testing.trees import compare_trees, make_tree
from snapcore.testing.workspace_suite import restore, staged_file

MTIME = 1_234_567_890_000_000_000

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
    RemoveStep(b"a/inside", False),
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
    RemoveStep(b"sealed/note", False),
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
    SetMetaStep(b"added/deep", 0o555, None),
    SetMetaStep(b"sealed", 0o555, None),
]


def run_forked(root: Path, at: int) -> int:
    """As `run_child`, without the start of an interpreter, since some hundred deaths are tried."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        die_at(at)
        report = asyncio.new_event_loop().run_until_complete(restore(DirectWorkspace(root), WRITES, STEPS))
        os._exit(3 if report.undone else 0)
    finally:
        os._exit(77)


def die_at(at: int) -> None:
    """Let this process die, without any clean-up, at the call of that number to what changes the file system."""
    counter = itertools.count()

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == at:
                os._exit(9)
            return call(*args, **kwargs)

        return wrapped

    for name in ("rename", "rmdir", "unlink", "mkdir", "utime", "fchmod", "symlink", "link", "pwrite", "chmod"):
        setattr(os, name, dying(getattr(os, name)))


def test_a_death_at_any_call_leaves_the_old_tree_or_the_new_one(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make_tree(old, files=6)
    make_tree(new, files=6)
    assert run_forked(new, -1) == 0
    assert compare_trees(new, old) != []
    outcomes = []
    for at in range(1000):
        root = tmp_path / f"t{at}"
        make_tree(root, files=6)
        code = run_forked(root, at)
        if code == 0:
            break
        assert code == 9, at
        outcome = asyncio.run(DirectWorkspace(root).recover())
        there = {name for name in os.listdir(root) if name.startswith(".snapcore")}
        assert there == set(), at
        as_new, as_old = _differences(root, new), _differences(root, old)
        assert [] in (as_new, as_old), (at, outcome, as_new, as_old)
        if outcome == "finished":
            assert as_new == [], at
        outcomes.append((outcome, as_new == []))
    assert code == 0
    # first the old tree, then swaps that were finished, last the new tree with the rest of its stage swept
    order = [("", False), ("swept", False), ("finished", True), ("swept", True), ("", True)]
    assert [outcome for outcome, _ in itertools.groupby(outcomes)] == order
    assert outcomes.count(("finished", True)) >= 25


def _differences(a: Path, b: Path) -> list[str]:
    """Times of the making of a tree differ between two that were made one after the other."""
    return [line for line in compare_trees(a, b, excluded=lambda name: name == b"app.db") if ": mtime" not in line]


def test_a_death_before_the_seal_leaves_the_tree_untouched(tmp_path: Path) -> None:
    make_tree(tmp_path / "t", files=6)
    make_tree(tmp_path / "same", files=6)
    assert run_forked(tmp_path / "t", 20) == 9
    assert os.path.isdir(tmp_path / "t" / ".snapcore-stage")
    assert asyncio.run(DirectWorkspace(tmp_path / "t").recover()) == "swept"
    assert _differences(tmp_path / "t", tmp_path / "same") == []


async def test_the_next_restore_recovers_by_itself(tmp_path: Path) -> None:
    make_tree(tmp_path / "t", files=6)
    assert run_forked(tmp_path / "t", 20) == 9
    report = await restore(DirectWorkspace(tmp_path / "t"), [staged_file(b"0", b"x")], [PlaceStep(b"0", b"new.txt")])
    assert report.undone == ()
    assert (tmp_path / "t" / "new.txt").read_text() == "x"


async def test_a_stage_that_is_dropped_frees_the_workspace(tmp_path: Path) -> None:
    workspace = DirectWorkspace(tmp_path)
    stage = await workspace.open_stage()
    await stage.write([staged_file(b"0", b"x")])
    await stage.log([PlaceStep(b"0", b"file")])
    await stage.seal(durable=False)
    assert isinstance(stage, DirectStage)
    stage.drop()
    assert not (tmp_path / "file").exists()
    assert await workspace.recover() == "finished"
    assert (tmp_path / "file").read_text() == "x"
    stage = await workspace.open_stage()
    dropped = asyncio.Event()
    weakref.finalize(stage, asyncio.get_running_loop().call_soon_threadsafe, dropped.set)
    del stage
    await dropped.wait()  # the thread that made it lets go of it in its own time
    assert await workspace.recover() == "swept"


async def test_a_swap_finishes_although_its_caller_is_cancelled(tmp_path: Path) -> None:
    workspace = DirectWorkspace(tmp_path)
    stage = await workspace.open_stage()
    count = 300
    await stage.write([staged_file(b"%d" % number, b"x") for number in range(count)])
    await stage.log([PlaceStep(b"%d" % number, b"f%d" % number) for number in range(count)])
    await stage.seal(durable=False)
    task = asyncio.create_task(stage.swap())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(os.listdir(tmp_path)) == count


async def test_a_damaged_sealed_journal_is_never_swept(tmp_path: Path) -> None:
    workspace = DirectWorkspace(tmp_path)
    stage = await workspace.open_stage()
    await stage.write([staged_file(b"0", b"x")])
    await stage.log([PlaceStep(b"0", b"file")])
    await stage.seal(durable=False)
    assert isinstance(stage, DirectStage)
    stage.drop()
    journal = tmp_path / ".snapcore-stage" / "journal"
    whole = journal.read_bytes()
    for damaged in (whole[:-1], whole[:20], whole[:-1] + b"f", whole[:45] + b"\xff" + whole[46:]):
        journal.write_bytes(damaged)
        with pytest.raises(SnapshotError) as caught:
            await workspace.recover()
        assert caught.value.code == Code.RESTORE_BLOCKED
        assert ".snapcore-stage" in str(caught.value)
    journal.write_bytes(whole)
    assert await workspace.recover() == "finished"


async def test_a_journal_that_leads_out_of_the_root_is_refused(tmp_path: Path) -> None:
    from snapcore.providers.journal import Journal

    (tmp_path / "victim").write_text("safe")
    root = tmp_path / "root"
    stage_folder = root / ".snapcore-stage"
    (stage_folder / "new").mkdir(parents=True)
    (stage_folder / "trash").mkdir()
    for step in (RemoveStep(b"../victim", False), PlaceStep(b"../../../victim", b"taken"), SetMetaStep(b"/etc", 0, None)):
        (stage_folder / "journal").write_bytes(Journal.encode([step]))
        with pytest.raises(SnapshotError):
            await DirectWorkspace(root).recover()
    assert (tmp_path / "victim").read_text() == "safe"


async def test_a_stage_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".snapcore-stage").symlink_to("elsewhere")
    with pytest.raises(SnapshotError) as caught:
        await DirectWorkspace(tmp_path).open_stage()
    assert caught.value.paths == (b".snapcore-stage",)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_stage_is_never_made_over_another(tmp_path: Path) -> None:
    root_fd = os.open(tmp_path, FOLDER_FLAGS)
    lock = StageLock.create(root_fd)
    assert lock is not None
    assert StageLock.create(root_fd) is None
    assert os.listdir(tmp_path) == [".snapcore-stage"]
    lock.dismantle()
    again = StageLock.create(root_fd)
    assert again is not None
    again.dismantle()
    os.close(root_fd)
    assert os.listdir(tmp_path) == []


def test_a_stage_that_died_while_it_was_made_is_swept(tmp_path: Path) -> None:
    half_made = tmp_path / ".snapcore-stage.0123456789abcdef"
    half_made.mkdir()
    (half_made / "owner").touch()
    young = tmp_path / ".snapcore-stage.00000000ffffffff"
    young.mkdir()
    assert asyncio.run(DirectWorkspace(tmp_path).recover()) == ""
    assert os.listdir(tmp_path) == [young.name]  # its maker may be about to write the owner file
    os.utime(young, (1_000_000_000, 1_000_000_000))
    assert asyncio.run(DirectWorkspace(tmp_path).recover()) == ""
    assert os.listdir(tmp_path) == []


def test_of_many_openers_one_wins(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from snapcore.errors import ProviderError\n"
        "from snapcore.providers.direct import DirectWorkspace\n"
        "async def main():\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    try:\n"
        "        stage = await DirectWorkspace(sys.argv[1]).open_stage()\n"
        "    except ProviderError as error:\n"
        "        print(error.code, flush=True)\n"
        "    else:\n"
        "        print('won', flush=True)\n"
        "        sys.stdin.readline()\n"
        "        await stage.abort()\n"
        "asyncio.run(main())\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = []
    for child in children:
        assert child.stdout is not None
        answers.append(child.stdout.readline().strip())
    for child in children:
        child.communicate("end\n", timeout=30)
    assert sorted(answers) == ["WORKSPACE_BUSY"] * 5 + ["won"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("refused", [b"journal.part", b"new", b"owner", b".snapcore-stage"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
async def test_a_stage_that_could_not_be_made_leaves_nothing_held(
    tmp_path: Path, refused: bytes, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = DirectWorkspace(tmp_path)
    await (await workspace.open_stage()).abort()
    before = len(os.listdir("/proc/self/fd"))
    plain_open = os.open

    def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
        if os.fsencode(path) == refused or (refused == b".snapcore-stage" and os.fsencode(path).startswith(refused)):
            raise OSError(number, "refused", path)
        return plain_open(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refusing)
        with pytest.raises((ProviderError, SnapshotError)) as caught:
            await workspace.open_stage()
    del caught
    assert len(os.listdir("/proc/self/fd")) == before
    await (await workspace.open_stage()).abort()
    assert os.listdir(tmp_path) == []


async def test_a_file_system_without_locks_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = DirectWorkspace(tmp_path)
    await workspace.recover()
    before = len(os.listdir("/proc/self/fd"))

    def refusing(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refusing)
        with pytest.raises(ProviderError):
            await workspace.open_stage()
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


def test_a_seal_that_is_taken_back_is_never_finished_whenever_the_process_dies(tmp_path: Path) -> None:
    async def seal_and_abort(root: Path, at: int) -> None:
        stage = await DirectWorkspace(root).open_stage()
        await stage.write([staged_file(b"0", b"x")])
        await stage.log([PlaceStep(b"0", b"file")])
        await stage.seal(durable=False)
        die_at(at)
        await stage.abort()

    outcomes = []
    for at in range(100):
        root = tmp_path / f"t{at}"
        root.mkdir()
        pid = os.fork()
        if not pid:
            try:
                asyncio.new_event_loop().run_until_complete(seal_and_abort(root, at))
                os._exit(0)
            finally:
                os._exit(77)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        outcomes.append(asyncio.run(DirectWorkspace(root).recover()))
        assert (root / "file").exists() == (outcomes[-1] == "finished")
        if code == 0:
            break
        assert code == 9
    assert [outcome for outcome, _ in itertools.groupby(outcomes)] == ["finished", "swept", ""]
    assert outcomes.count("finished") == 1  # only before the first thing that an abort does


async def test_a_full_disk_is_a_typed_error_and_leaves_the_tree(small_disk: Path) -> None:
    (small_disk / "kept").write_text("kept")
    stage = await DirectWorkspace(small_disk).open_stage()
    too_much: list[StageWrite] = [StageFile(b"%d" % n, 0, os.urandom(1 << 20), 1 << 20, True) for n in range(8)]
    with pytest.raises(ProviderError) as caught:
        await stage.write(too_much)
    assert caught.value.code == Code.SANDBOX_FULL
    await stage.abort()
    assert os.listdir(small_disk) == ["kept"]
