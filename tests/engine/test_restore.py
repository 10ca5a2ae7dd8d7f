"""Restore: the workspace becomes what the checkpoint holds, by writing what differs and nothing else."""

import asyncio
import os
import shutil
import sqlite3
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import Code, RepositoryError, SnapshotError
from snapcore.model import FileStat
from snapcore.packs import pack_key
from snapcore.protocols import ScanSelection, Stage, Step, SwapReport
from snapcore.providers.direct import DirectWorkspace
from snapcore.repository import Repository
from snapcore.restoring import Receipt
from snapcore.selection import FilePolicy
from snapcore.testing.faults import Faults, with_faults
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree

Make = Callable[..., Path]
Settle = Callable[[Path], None]
ALL = FilePolicy.everything()


async def restore(repo: Repository, place: Any, **options: Any) -> Receipt:
    receipt = await repo.restore(place, **{"thread_id": "t", **options})
    assert receipt is not None
    return receipt


def state(root: Path) -> dict[str, tuple[int, ...]]:
    """Everything that would tell of a write: inode, mode, size, times of each path."""
    return {
        str(path.relative_to(root)): (st.st_ino, st.st_mode, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
        for path in [root, *root.rglob("*")]
        for st in [path.lstat()]
    }


def nothing(name: bytes) -> bool:
    return False


# ---- exactly


async def test_files_that_were_added_are_gone(memory_repo: Repository, make: Make) -> None:
    """Case 1: files, empty and full folders, links, FIFOs, at any depth and with any mode."""
    work = make({"a": "1", "sub/b": "2"})
    await memory_repo.capture(work, thread_id="t")
    make({"added": "x", "sub/added": "x", "new/deep/er/added": "x", "empty/": "", "sub/empty/": "", "sealed/in": "x"})
    (work / "link").symlink_to("a")
    (work / "out").symlink_to("/etc")
    os.mkfifo(work / "fifo")
    (work / "sealed").chmod(0o555)
    (work / "added").chmod(0)
    receipt = await restore(memory_repo, work)
    assert sorted(path.relative_to(work).as_posix() for path in work.rglob("*")) == ["a", "sub", "sub/b"]
    assert receipt.removed == 13
    assert receipt.unchanged >= 3


async def test_five_rounds_of_capture_change_and_restore(repo: Repository, work: Path, tmp_path: Path) -> None:
    """Case 4: each state comes back, in the same folder and in another sandbox, after all that came later."""
    make_tree(work, files=60, seed=2)
    states = []
    for number in range(5):
        checkpoint = await repo.capture(work, thread_id="t", policy=ALL)
        states.append(checkpoint)
        await repo.restore(tmp_path / "other", thread_id="t")
        assert compare_trees(work, tmp_path / "other", excluded=nothing) == []
        mutate_tree(work, seed=number)
        mutate_tree(tmp_path / "other", seed=50 + number)
    for checkpoint in [*states, *reversed(states)]:
        receipt = await restore(repo, work, checkpoint_id=checkpoint.id, verify="content")
        assert receipt.content_id == checkpoint.content_id
        again = await repo.capture(work, thread_id="check", policy=ALL, reread=True)
        assert again.content_id == checkpoint.content_id


async def test_only_what_differs_is_written(memory_repo: Repository, work: Path, settle: Settle) -> None:
    """Of 200 files two changed and one went: three are written, the others keep inode and ctime."""
    make_tree(work, files=200)
    settle(work)
    await memory_repo.capture(work, thread_id="t")
    before = state(work)
    (work / "run.sh").unlink()
    (work / "nothing.txt").write_text("no more")
    (work / "read-only.txt").unlink()
    receipt = await restore(memory_repo, work)
    after = state(work)
    changed = {path for path in after if before.get(path) != after[path]}
    assert (
        changed - {"."}
        == {"run.sh", "nothing.txt", "read-only.txt"} | {"private/run-too.sh", "a/run-three.sh"} | {"private", "a"} & changed
    )
    assert receipt.bytes_written < 1_000
    assert (receipt.added, receipt.removed) == (2, 0)
    nothing_to_do = await restore(memory_repo, work)
    assert (nothing_to_do.added, nothing_to_do.changed, nothing_to_do.removed, nothing_to_do.bytes_written) == (0, 0, 0, 0)


async def test_a_restore_of_an_equal_tree_touches_nothing(memory_repo: Repository, work: Path) -> None:
    make_tree(work, files=50)
    await memory_repo.capture(work, thread_id="t", policy=ALL)
    before = state(work)
    del before["."]
    await restore(memory_repo, work)
    after = state(work)
    del after["."]  # the stage came and went in it
    assert after == before
    assert not [name for name in os.listdir(work) if name.startswith(".snapcore")]


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def full_folder(path: Path) -> None:
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "file").write_text("x")


KINDS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "file": lambda path: path.write_bytes(b"content"),
    "other file": lambda path: path.write_bytes(b"other content"),
    "empty file": Path.touch,
    "folder": Path.mkdir,
    "full folder": full_folder,
    "link": lambda path: path.symlink_to("target"),
    "other link": lambda path: path.symlink_to("another"),
    "link to a folder": lambda path: path.symlink_to("../beside"),
    "hard link": lambda path: os.link(path.parent.parent / "beside" / "file", path),
}


@pytest.mark.parametrize("round_trips", [1, 2])
async def test_any_kind_becomes_any_other(memory_repo: Repository, make: Make, round_trips: int) -> None:
    """All pairs of kinds at once, each in a folder of its own; what links lead to is as it was."""
    work = make({"beside/file": "linked"})
    pairs = [(before, after) for before in KINDS for after in KINDS]
    for number, (_, after) in enumerate(pairs):
        (work / str(number)).mkdir()
        KINDS[after](work / str(number) / "thing")
    checkpoint = await memory_repo.capture(work, thread_id="t")
    for _ in range(round_trips):
        for number, (before, _) in enumerate(pairs):
            clear(work / str(number) / "thing")
            KINDS[before](work / str(number) / "thing")
        plan = (await restore(memory_repo, work, dry_run=True)).plan
        receipt = await restore(memory_repo, work, verify="content")
        assert plan is not None
        assert (len(plan.adds), len(plan.changes), len(plan.removes)) == (receipt.added, receipt.changed, receipt.removed)
        again = await memory_repo.capture(work, thread_id="again", reread=True)
        wrong = await memory_repo.diff(checkpoint, again)
        assert [pairs[int(d.path.split(b"/")[0])] for d in (*wrong.added, *wrong.changed, *wrong.removed)] == []
        assert (work / "beside" / "file").read_text() == "linked"


@pytest.mark.parametrize("mode", [0o600, 0o755, 0o000])
async def test_a_changed_mode_or_time_is_put_back_without_writing_bytes(memory_repo: Repository, make: Make, mode: int) -> None:
    work = make({"a": "x" * 1000, "folder/b": "y"})
    await memory_repo.capture(work, thread_id="t")
    before = {name: ((work / name).stat().st_ino, (work / name).stat().st_mtime_ns) for name in ("a", "folder/b", "folder")}
    (work / "a").chmod(mode)
    (work / "folder").chmod(0o700)
    os.utime(work / "folder" / "b", ns=(9, 9))
    receipt = await restore(memory_repo, work)
    assert (receipt.bytes_written, receipt.changed) == (0, 3)
    assert {name: ((work / name).stat().st_ino, (work / name).stat().st_mtime_ns) for name in before} == before
    assert stat.S_IMODE((work / "a").stat().st_mode) == 0o644
    assert stat.S_IMODE((work / "folder").stat().st_mode) == 0o755


async def test_nothing_outside_the_root_is_touched(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    """Case 3: neighbours, parents, what links lead to."""
    work = make({"a": "1"})
    outside = make({"b": "2", "sub/c": "3"}, base=tmp_path / "outside")
    await memory_repo.capture(work, thread_id="t", policy=FilePolicy(on_unsupported="skip"))
    (work / "to-outside").symlink_to(outside)
    (work / "folder").mkdir()
    (work / "folder" / "deep-out").symlink_to(outside / "sub")
    before = state(outside)
    await restore(memory_repo, work)
    assert state(outside) == before
    assert sorted(os.listdir(tmp_path)) == ["outside", "work"]


# ---- databases


@pytest.mark.parametrize("left", ["-wal", "-shm", "-journal"])
async def test_stale_sidecars_of_a_database_go(repo: Repository, work: Path, left: str) -> None:
    """Case 27: what is not in the checkpoint is gone when the old database is back, so that it is not mixed up."""
    connection = sqlite3.connect(work / "app.db")
    with connection:
        connection.execute("create table t (x)")
        connection.execute("insert into t values (1)")
    connection.close()
    await repo.capture(work, thread_id="t")
    writer = sqlite3.connect(work / "app.db")
    writer.execute("pragma journal_mode=wal")
    writer.execute("insert into t values (2)")
    writer.commit()
    (work / f"app.db{left}").touch()
    await restore(repo, work)
    writer.close()
    assert os.listdir(work) == ["app.db"]
    reader = sqlite3.connect(work / "app.db")
    assert reader.execute("select x from t").fetchall() == [(1,)]
    assert reader.execute("pragma integrity_check").fetchone() == ("ok",)
    reader.close()


async def test_sidecars_are_removed_before_the_database_is_put_back(repo: Repository, work: Path) -> None:
    """Case 27, in order: in the swap's steps each removal comes before each placement."""
    kinds: list[str] = []

    class Watching(DirectWorkspace):
        async def open_stage(self) -> Stage:
            stage = await super().open_stage()
            swap, log = stage.swap, stage.log

            async def logging(steps: Sequence[Step]) -> None:
                kinds.extend(type(step).__name__ for step in steps)
                await log(steps)

            async def looking() -> SwapReport:
                rename = os.rename

                def spy(old: Any, new: Any, **kwargs: Any) -> None:
                    order.append(os.fsdecode(new if kwargs.get("dst_dir_fd") is not None and old.isdigit() else old))
                    rename(old, new, **kwargs)

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(os, "rename", spy)
                    return await swap()

            stage.swap, stage.log = looking, logging  # type: ignore[method-assign]
            return stage

    order: list[str] = []
    (work / "app.db").write_text("old")
    await repo.capture(work, thread_id="t")
    (work / "app.db").write_text("newer")
    for name in ("app.db-wal", "app.db-shm"):
        (work / name).write_text("stale")
    await restore(repo, Watching(work))
    assert kinds.count("RemoveStep") == 2
    assert order.index("app.db") > max(order.index("app.db-wal"), order.index("app.db-shm"))


# ---- what there is to restore


async def test_a_thread_without_a_checkpoint_leaves_the_sandbox_as_it_is(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "1"})
    before = state(work)
    assert await memory_repo.restore(work, thread_id="none") is None
    assert await memory_repo.restore(work, thread_id="none", safety_checkpoint=True) is None
    assert state(work) == before
    assert await memory_repo.threads() == []


async def test_an_unknown_checkpoint_is_an_error(memory_repo: Repository, make: Make) -> None:
    """On a thread that has others, on one that has none, and an id that another thread has."""
    work = make({"a": "1"})
    other = await memory_repo.capture(work, thread_id="other")
    await memory_repo.capture(work, thread_id="t")
    for thread, checkpoint_id in (("t", "none"), ("none", "x"), ("t", other.id)):
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.restore(work, thread_id=thread, checkpoint_id=checkpoint_id)
        assert caught.value.code == Code.MISSING_CHECKPOINT


@pytest.mark.parametrize("place", ["target", "deep/er/target", "an/empty/one"])
async def test_a_missing_folder_is_created(memory_repo: Repository, make: Make, tmp_path: Path, place: str) -> None:
    work = make({"a": "1", "sub/b": "2"})
    await memory_repo.capture(work, thread_id="t")
    if "empty" in place:
        (tmp_path / place).mkdir(parents=True)
    receipt = await restore(memory_repo, tmp_path / place)
    assert compare_trees(work, tmp_path / place) == []
    assert receipt.added >= 3


async def test_the_receipt_counts_what_was_done(memory_repo: Repository, make: Make) -> None:
    """Case 5: verified numbers, that cannot say "restored" when nothing was."""
    work = make({"a": "12345", "b": "1", "c": "x", "sub/d": "22", "empty/": ""})
    (work / "link").symlink_to("a")
    checkpoint = await memory_repo.capture(work, thread_id="t")
    (work / "a").write_text("54321!")
    (work / "b").unlink()
    make({"extra": "x", "more/x": "1"})
    receipt = await restore(memory_repo, work)
    assert (receipt.checkpoint_id, receipt.content_id) == (checkpoint.id, checkpoint.content_id)
    assert (receipt.files, receipt.folders, receipt.links, receipt.bytes) == (4, 2, 1, 9)
    assert (receipt.added, receipt.changed, receipt.removed) == (1, 1, 3)
    assert receipt.bytes_written == 6
    assert (receipt.dry_run, receipt.plan, receipt.differences, receipt.kept) == (False, None, (), ())


async def test_a_restore_of_no_root_is_refused(memory_repo: Repository, make: Make) -> None:
    """Case 5: it would do nothing and could not say so."""
    work = make({"a": "1"})
    await memory_repo.capture(work, thread_id="t")
    for roots in ({}, {"another": str(work)}):
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.restore(work, thread_id="t", roots=roots)
        assert caught.value.code == Code.INVALID_REQUEST


class UndoingWorkspace(DirectWorkspace):
    """Undoes a part of what a restore did, before it is checked."""

    def __init__(self, root: Path, undo: Callable[[], object]) -> None:
        super().__init__(root)
        self._undo = undo
        self._scans = 0

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        self._scans += 1
        if self._scans == 2:
            self._undo()
        async for batch in super().scan(selection, cross_mounts=cross_mounts):
            yield batch


def flip(path: Path) -> None:
    """Change a byte, and neither size nor mtime."""
    st = path.stat()
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def lead_elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("b")


UNDONE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "gone": ("a", Path.unlink),
    "other size": ("a", lambda path: path.write_text("longer than it was")),
    "other time": ("a", lambda path: os.utime(path, ns=(1, 1))),
    "a folder": ("a", become_folder),
    "other target": ("link", lead_elsewhere),
    "folder gone": ("empty", Path.rmdir),
}


@pytest.mark.parametrize("what", UNDONE)
async def test_a_result_that_is_not_the_checkpoint_is_an_error(memory_repo: Repository, make: Make, what: str) -> None:
    """Case 5: `verify="stat"` scans the result and names what is wrong."""
    work = make({"a": "1", "b": "2", "empty/": ""})
    (work / "link").symlink_to("a")
    await memory_repo.capture(work, thread_id="t")
    (work / "b").write_text("changed")
    name, undo = UNDONE[what]
    workspace = UndoingWorkspace(work, lambda: undo(work / name))
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.restore(workspace, thread_id="t")
    assert caught.value.code == Code.VERIFY_FAILED
    assert caught.value.paths == (os.fsencode(name),)
    await restore(memory_repo, work)
    assert (await memory_repo.capture_with_report(work, thread_id="t", skip_unchanged=True)).created is False


async def test_verify_content_reads_everything_back(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "content", "b": "x" * 6_000_000})
    await memory_repo.capture(work, thread_id="t")
    for name in ("a", "b"):
        (work / "trigger").touch()
        workspace = UndoingWorkspace(work, lambda name=name: flip(work / name))  # type: ignore[misc]
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.restore(workspace, thread_id="t", verify="content")
        assert caught.value.code == Code.VERIFY_FAILED
        assert caught.value.paths == (os.fsencode(name),)
        await restore(memory_repo, work, verify="content")


# ---- flags


async def test_emptying_a_folder_has_to_be_asked_for(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    """Case 2: an empty checkpoint over a folder with files, or with empty folders only; the workspace stays as it was."""
    empty = tmp_path / "empty"
    empty.mkdir()
    await memory_repo.capture(empty, thread_id="t")
    for spec in ({"a": "1", "sub/b": "2"}, {"only/": ""}):
        work = make(spec, base=tmp_path / f"work{len(spec)}")
        before = state(work)
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.restore(work, thread_id="t")
        assert caught.value.code == Code.EMPTY_RESTORE
        assert "allow_empty" in caught.value.hint
        assert {p: s for p, s in state(work).items() if p != "."} == {p: s for p, s in before.items() if p != "."}
        await restore(memory_repo, work, allow_empty=True)
        assert os.listdir(work) == []
    await restore(memory_repo, empty)
    kept = make({".env": "1"}, base=tmp_path / "kept")
    await restore(memory_repo, kept)
    assert os.listdir(kept) == [".env"]


async def test_the_plan_of_a_dry_run_is_what_restore_does(memory_repo: Repository, work: Path) -> None:
    """Case 2: removals first; the same paths, numbers and bytes; and nothing was changed by planning."""
    make_tree(work, files=80, seed=3)
    await memory_repo.capture(work, thread_id="t")
    for seed in range(4):
        mutate_tree(work, seed=seed)
    before = state(work)
    planned = await restore(memory_repo, work, dry_run=True)
    assert state(work) == before
    assert planned.dry_run
    plan = planned.plan
    assert plan is not None
    assert list(plan.__dataclass_fields__)[:3] == ["removes", "adds", "changes"]
    done = await restore(memory_repo, work)
    assert (planned.added, planned.changed, planned.removed, planned.unchanged) == (
        done.added,
        done.changed,
        done.removed,
        done.unchanged,
    )
    assert (len(plan.adds), len(plan.changes), len(plan.removes)) == (done.added, done.changed, done.removed)
    assert plan.bytes == done.bytes_written
    after = state(work)
    assert {os.fsdecode(p) for p in plan.removes} == {p for p in before if p not in after}
    assert {os.fsdecode(p) for p in plan.adds} == {p for p in after if p not in before}
    again = (await restore(memory_repo, work, dry_run=True)).plan
    assert again is not None
    assert (again.removes, again.adds, again.changes, again.bytes) == ((), (), (), 0)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a"], {"a": "1", "sub/b": "B", "sub/deep/c": "C", "other/d": "D", "new": "N", "sub/new": "N"}),
        (["sub"], {"a": "A", "sub/b": "2", "sub/deep/c": "3", "other/d": "D", "new": "N"}),
        (["sub/deep"], {"a": "A", "sub/b": "B", "sub/deep/c": "3", "other/d": "D", "new": "N", "sub/new": "N"}),
        ([b"sub/b", "other/"], {"a": "A", "sub/b": "2", "sub/deep/c": "C", "other/d": "4", "new": "N", "sub/new": "N"}),
        (["new"], {"a": "A", "sub/b": "B", "sub/deep/c": "C", "other/d": "D", "sub/new": "N"}),
        ([], {"a": "A", "sub/b": "B", "sub/deep/c": "C", "other/d": "D", "new": "N", "sub/new": "N"}),
        ([""], {"a": "1", "sub/b": "2", "sub/deep/c": "3", "other/d": "4"}),
    ],
)
async def test_paths_limit_a_restore(
    memory_repo: Repository, make: Make, paths: list[str | bytes], expected: dict[str, str]
) -> None:
    """Files, folders with all below, a path that the checkpoint does not have (it goes), none, the root."""
    work = make({"a": "1", "sub/b": "2", "sub/deep/c": "3", "other/d": "4"})
    await memory_repo.capture(work, thread_id="t")
    make({"a": "A", "sub/b": "B", "sub/deep/c": "C", "other/d": "D", "new": "N", "sub/new": "N"})
    await restore(memory_repo, work, paths=paths)
    assert {p.relative_to(work).as_posix(): p.read_text() for p in work.rglob("*") if p.is_file()} == expected


async def test_paths_into_a_folder_that_is_gone(memory_repo: Repository, make: Make) -> None:
    """The folders on the way are made, and only what was asked for is in them."""
    work = make({"sub/deep/a": "1", "sub/deep/b": "2", "sub/c": "3"})
    await memory_repo.capture(work, thread_id="t")
    target = work.parent / "target"
    await restore(memory_repo, target, paths=["sub/deep/a"])
    assert [p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()] == ["sub/deep/a"]


async def test_paths_of_one_member_of_a_hard_link_group(memory_repo: Repository, make: Make) -> None:
    """A later name without the first is a file with the content; both are linked."""
    work = make({"a": "linked"})
    for name in ("b", "c"):
        os.link(work / "a", work / name)
    await memory_repo.capture(work, thread_id="t")
    target = work.parent / "target"
    await restore(memory_repo, target, paths=["b", "c"])
    assert sorted(os.listdir(target)) == ["b", "c"]
    assert (target / "b").read_text() == "linked"
    assert (target / "b").stat().st_ino == (target / "c").stat().st_ino


@pytest.mark.parametrize("bad", ["none/at/all", "a/below-a-file", "../outside", "/etc/passwd"])
async def test_paths_that_cannot_be_are_refused(memory_repo: Repository, make: Make, bad: str) -> None:
    work = make({"a": "1"})
    await memory_repo.capture(work, thread_id="t")
    (work / "a").write_text("changed")
    with pytest.raises(SnapshotError):
        await memory_repo.restore(work, thread_id="t", paths=[bad])
    assert (work / "a").read_text() == "changed"


async def test_a_safety_checkpoint_keeps_what_was_there(memory_repo: Repository, make: Make) -> None:
    """The state before is a checkpoint of the thread, and can be restored."""
    work = make({"a": "1", ".git/HEAD": "one"})
    first = await memory_repo.capture(work, thread_id="t", policy=FilePolicy.with_git())
    make({"a": "precious", "added": "too", ".git/HEAD": "two"})
    receipt = await restore(memory_repo, work, safety_checkpoint=True)
    assert receipt.checkpoint_id == first.id
    assert (work / "a").read_text() == "1"
    head = await memory_repo.get("t")
    assert head is not None
    assert head.parent_id == first.id
    await restore(memory_repo, work)
    assert ((work / "a").read_text(), (work / "added").read_text()) == ("precious", "too")
    assert (work / ".git" / "HEAD").read_text() == "two"


async def test_a_safety_checkpoint_has_all_roots(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    one, two = make({"a": "1"}, base=tmp_path / "one"), make({"b": "1", "x.log": "1"}, base=tmp_path / "two")
    roots = {"one": str(one), "two": (str(two), FilePolicy.patterns(exclude=["*.log"]))}
    await memory_repo.capture(one, thread_id="t", roots=roots)
    for path in (one / "a", two / "b"):
        path.write_text("precious")
    places = {"one": str(one), "two": str(two)}
    await restore(memory_repo, one, roots=places, safety_checkpoint=True)
    assert ((one / "a").read_text(), (two / "b").read_text()) == ("1", "1")
    await restore(memory_repo, one, roots=places)
    assert ((one / "a").read_text(), (two / "b").read_text()) == ("precious", "precious")
    assert (two / "x.log").read_text() == "1"


async def test_a_folder_that_is_not_there_needs_no_safety_checkpoint(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    await memory_repo.capture(make({"a": "1"}), thread_id="t")
    assert await memory_repo.restore(tmp_path / "new", thread_id="t", safety_checkpoint=True) is not None
    assert (tmp_path / "new" / "a").read_text() == "1"
    assert len(await memory_repo.list("t")) == 1


async def test_a_dry_run_makes_no_safety_checkpoint(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "1"})
    await memory_repo.capture(work, thread_id="t")
    await restore(memory_repo, work, safety_checkpoint=True, dry_run=True)
    assert len(await memory_repo.list("t")) == 1


# ---- failure before the swap


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut short", "empty"])
async def test_a_damaged_pack_leaves_the_workspace_exactly_as_it_was(memory_repo: Repository, make: Make, damage: str) -> None:
    """Cases 23 and 47: a typed error before anything was swapped; with the pack back the restore is whole."""
    work = make({"a": os.urandom(3_000_000), "b": "small"})
    await memory_repo.capture(work, thread_id="t")
    (pack,) = await memory_repo.checkpoints.packs()
    key = pack_key(pack.pack_id)
    good = await memory_repo.blobs.get(key)
    make({"a": "changed", "added": "x"})
    before = state(work)
    if damage == "missing":
        await memory_repo.blobs.delete(key)
    else:
        middle = len(good) // 2
        bad = {
            "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "cut short": good[:middle],
            "empty": b"",
        }
        await memory_repo.blobs.put(key, bad[damage])
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.restore(work, thread_id="t")
    assert caught.value.code == (Code.MISSING_BLOB if damage == "missing" else Code.INVALID_BLOB)
    after = state(work)
    assert {p: s for p, s in after.items() if p != "."} == {p: s for p, s in before.items() if p != "."}
    assert (await memory_repo.verify(read_data=True)).ok is False
    await memory_repo.blobs.put(key, good)
    await restore(memory_repo, work, verify="content")
    assert (work / "b").read_text() == "small"


async def test_many_sandboxes_may_start_from_one_thread(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    """A restore takes no writer lease: not while another writes, nor beside others."""
    work = make({"a": "1", "sub/b": "2"})
    await memory_repo.capture(work, thread_id="t")
    lease = (await memory_repo.checkpoints.acquire_writer("t", ttl=60)).lease
    await asyncio.gather(*(restore(memory_repo, tmp_path / f"target-{number}") for number in range(5)))
    for number in range(5):
        assert compare_trees(work, tmp_path / f"target-{number}") == []
    await memory_repo.checkpoints.release_writer(lease)


async def test_a_restore_works_with_read_only_credentials(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the blob store nor the database has to be writable."""
    work = make({"a": "1"})
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        await repo.capture(work, thread_id="t")
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        faults = Faults()
        refused = RepositoryError("The store is read-only.", code=Code.READ_ONLY)
        for method in ("put", "delete", "pin", "renew_pin", "save_stats", "append", "acquire_writer", "add_pack"):
            faults.fail(method, None, refused)
        receipt = await snapcore.restore(
            handle=str(tmp_path / "target"),
            checkpoints=with_faults(repo.checkpoints, faults),
            blobs=with_faults(repo.blobs, faults),
            thread_id="t",
        )
        assert receipt is not None
    assert (tmp_path / "target" / "a").read_text() == "1"
