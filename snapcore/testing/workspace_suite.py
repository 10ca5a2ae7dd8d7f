"""What every workspace must do, as tests to subclass.

    class TestMyWorkspace(WorkspaceTests):
        def make_workspace(self, root: Path) -> Workspace:
            return MyWorkspace(root)

`root` is a local folder, which the tests also read and change directly, so that a workspace is never checked with
itself. What the workspace's `capabilities` do not declare is not asked of it.
"""

import asyncio
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.model import FileStat, Kind, Note, path_key
from snapcore.protocols import (
    PlaceStep,
    ReadBlock,
    RemoveStep,
    SetMetaStep,
    Stage,
    StageFile,
    StageFolder,
    StageHardLink,
    StageLink,
    StageWrite,
    Step,
    SwapReport,
    Workspace,
)

from .trees import compare_trees, make_tree

__all__ = ["Selecting", "WorkspaceTests", "read_all", "restore", "scan_all", "staged_file"]

MTIME = 1_234_567_890_000_000_000


class Selecting:
    """A selection that leaves out the given paths."""

    def __init__(self, *excluded: bytes, marked: dict[bytes, bytes] | None = None) -> None:
        self.excluded = excluded
        self.marked_folders = marked or {}
        self.asked: list[bytes] = []

    def excludes(self, path: bytes, kind: int) -> bool:
        self.asked.append(path)
        return path in self.excluded


async def scan_all(workspace: Workspace, selection: Selecting | None = None, *, cross_mounts: bool = False) -> list[FileStat]:
    """Everything that a scan shows."""
    found: list[FileStat] = []
    async for batch in workspace.scan(selection or Selecting(), cross_mounts=cross_mounts):
        found += batch
    return found


async def read_all(workspace: Workspace, files: Sequence[FileStat]) -> list[tuple[bytes, ReadBlock]]:
    """For each file its bytes and its last block. Checks that blocks come in order and that each file ends once."""
    out: list[tuple[bytes, ReadBlock]] = []
    data = b""
    async for batch in workspace.read(files):
        for block in batch:
            assert block.index == len(out)
            assert block.problem or block.offset == len(data)
            data += bytes(block.data)
            if block.last:
                out.append((data, block))
                data = b""
    assert len(out) == len(files)
    return out


def staged_file(staged: bytes, data: bytes, mode: int = 0o644) -> StageFile:
    """A whole file in one piece."""
    return StageFile(staged, 0, data, len(data), True, mode, MTIME)


async def restore(workspace: Workspace, writes: Sequence[StageWrite], steps: Sequence[Step]) -> SwapReport:
    """Stage, seal and swap, and let others swap."""
    stage = await workspace.open_stage()
    await stage.write(writes)
    await stage.log(steps)
    await stage.seal(durable=False)
    report = await stage.swap()
    await stage.abort()
    return report


@pytest.mark.asyncio
class WorkspaceTests:
    """Subclass this, named `Test...`, and give `make_workspace`."""

    def make_workspace(self, root: Path) -> Workspace:
        """A workspace over a local folder, which may not exist."""
        pytest.fail("A subclass has to say how to make its workspace.")

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "workspace"
        root.mkdir()
        return root

    @pytest.fixture
    def workspace(self, root: Path) -> Workspace:
        return self.make_workspace(root)

    # ---- scan

    async def test_scan_starts_with_the_root_and_goes_in_walk_order(self, root: Path, workspace: Workspace) -> None:
        make_tree(root, files=60)
        paths = [found.path for found in await scan_all(workspace)]
        assert paths[0] == b""
        assert paths == sorted(paths, key=path_key)
        assert len(set(paths)) == len(paths)
        base = os.fsencode(root)
        there = {
            os.path.relpath(os.path.join(folder, name), base)
            for folder, folders, names in os.walk(base)
            for name in folders + names
        }
        assert set(paths[1:]) == there

    async def test_scan_shows_what_stat_shows(self, root: Path, workspace: Workspace) -> None:
        make_tree(root, files=30)
        can = workspace.capabilities
        for found in await scan_all(workspace):
            st = os.lstat(os.path.join(os.fsencode(root), found.path) if found.path else root)
            assert found.kind == {stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.DIR}.get(stat.S_IFMT(st.st_mode), Kind.LINK)
            assert found.note in ((Note.NONE, Note.OUTSIDE) if can.symlinks or found.kind != Kind.LINK else (Note.UNREADABLE,))
            assert found.mode == st.st_mode & 0o7777
            assert found.mtime_ns // can.time_granularity_ns == st.st_mtime_ns // can.time_granularity_ns
            if found.kind == Kind.FILE:
                assert found.size == st.st_size
            if found.kind == Kind.LINK and can.symlinks:
                assert found.target == os.readlink(os.path.join(os.fsencode(root), found.path))
            if can.stable_inodes:
                assert (found.inode, found.nlink) == (st.st_ino, st.st_nlink)
            if can.ctime:
                assert found.ctime_ns == st.st_ctime_ns

    async def test_scan_of_many_entries_comes_in_batches(self, root: Path, workspace: Workspace) -> None:
        for number in range(4500):
            (root / f"f{number}").touch()
        sizes = [len(batch) async for batch in workspace.scan(Selecting())]
        assert sum(sizes) == 4501
        assert max(sizes) < 4501

    async def test_excluded_paths_come_once_and_are_not_listed(self, root: Path, workspace: Workspace) -> None:
        make_tree(root, files=10)
        selection = Selecting(b"node_modules", b".env")
        notes = {found.path: found.note for found in await scan_all(workspace, selection)}
        assert notes[b"node_modules"] == notes[b".env"] == Note.EXCLUDED
        assert not any(path.startswith(b"node_modules/") for path in notes)
        assert selection.asked == sorted(selection.asked, key=path_key)

    async def test_a_marked_folder_is_excluded_only_with_its_marker(self, root: Path, workspace: Workspace) -> None:
        for name in ("a", "b"):
            (root / name / "venv").mkdir(parents=True)
            (root / name / "venv" / "lib").touch()
        (root / "a" / "venv" / "pyvenv.cfg").touch()
        notes = {found.path: found.note for found in await scan_all(workspace, Selecting(marked={b"venv": b"pyvenv.cfg"}))}
        assert notes[b"a/venv"] == Note.EXCLUDED
        assert b"a/venv/lib" not in notes
        assert notes[b"b/venv"] == notes[b"b/venv/lib"] == Note.NONE

    async def test_a_fifo_is_listed_and_never_opened(self, root: Path, workspace: Workspace) -> None:
        os.mkfifo(root / "pipe")
        (fifo,) = [found for found in await scan_all(workspace) if found.path]
        assert fifo.kind == Kind.FIFO

    async def test_links_that_lead_out_are_marked(self, root: Path, workspace: Workspace) -> None:
        if not workspace.capabilities.symlinks:
            return
        (root / "sub" / "deep").mkdir(parents=True)
        outside = {
            "absolute": "/etc/passwd",
            "up": "../x",
            "sub/up-twice": "../../x",
            "down-and-up": "sub/../../x",
            "to-root-parent": str(root.parent),
            "longer-name": str(root) + "-other/x",
            "absolute-up": f"{root}/../x",
            "jump": "sub/deep/three-up/../x",
            "chain": "absolute",
        }
        inside = {
            "file": "sub/deep",
            "sub/one-up": "../file",
            "sub/deep/three-up": "../../.",
            "dangling": "no/such/../thing",
            "loop": "loop",
            "loop-a": "loop-b",
            "loop-b": "loop-a",
            "in-root": f"{root}/sub",
            "the-root": str(root),
            "dot": ".",
        }
        for name, target in {**outside, **inside}.items():
            (root / name).symlink_to(target)
        notes = {found.path.decode(): found.note for found in await scan_all(workspace) if found.kind == Kind.LINK}
        assert {name for name, note in notes.items() if note == Note.OUTSIDE} == set(outside)
        assert notes.keys() == {*outside, *inside}

    async def test_scan_and_read_change_nothing(self, root: Path, workspace: Workspace, tmp_path: Path) -> None:
        make_tree(root, files=20)
        before = {found.path: found for found in await scan_all(workspace)}
        await read_all(workspace, [found for found in before.values() if found.kind == Kind.FILE])
        assert {found.path: found for found in await scan_all(workspace)} == before
        assert await workspace.recover() == ""
        assert {found.path: found for found in await scan_all(workspace)} == before

    async def test_only_a_stage_itself_is_hidden(self, root: Path, workspace: Workspace) -> None:
        names = [".snapcore-stage-notes.md", ".snapcore-stage.bak", ".snapcore-stage.0123456789ABCDEF", ".snapcore-stages"]
        for name in names:
            (root / name).touch()
        (root / ".snapcore-stage.0123456789abcdef").mkdir()
        (root / ".snapcore-stage").mkdir()
        (root / "sub").mkdir()
        (root / "sub" / ".snapcore-stage").touch()
        shown = {os.fsdecode(found.path) for found in await scan_all(workspace)}
        assert shown == {"", *names, "sub", "sub/.snapcore-stage"}

    async def test_the_place_on_this_host_is_the_real_one_or_not_told(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(root)
        for name in (root, tmp_path / "link", root / "missing"):
            assert self.make_workspace(name).host_path in (None, os.path.realpath(name))

    async def test_a_root_that_is_no_folder_is_refused(self, root: Path) -> None:
        (root / "file").touch()
        for name, code in (("file", Code.INVALID_WORKSPACE), ("missing", Code.MISSING_WORKSPACE)):
            with pytest.raises(SnapshotError) as caught:
                await scan_all(self.make_workspace(root / name))
            assert caught.value.code == code

    # ---- read

    async def test_read_gives_the_bytes_in_the_order_asked_for(self, root: Path, workspace: Workspace) -> None:
        make_tree(root, files=40, big_bytes=9_500_001)
        files = [found for found in await scan_all(workspace) if found.kind == Kind.FILE][::-1]
        for file, (data, last) in zip(files, await read_all(workspace, files), strict=True):
            assert data == Path(os.fsdecode(os.path.join(os.fsencode(root), file.path))).read_bytes()
            assert last.after == file
            assert not last.problem

    async def test_a_file_that_grew_is_read_up_to_its_scanned_size(self, root: Path, workspace: Workspace) -> None:
        (root / "log").write_bytes(b"one\n")
        files = [found for found in await scan_all(workspace) if found.kind == Kind.FILE]
        (root / "log").write_bytes(b"one\ntwo\n")
        ((data, last),) = await read_all(workspace, files)
        assert data == b"one\n"
        assert last.after is not None
        assert last.after.size == 8

    async def test_a_file_that_shrank_ends_where_it_ends(self, root: Path, workspace: Workspace) -> None:
        (root / "log").write_bytes(b"one\ntwo\n")
        files = [found for found in await scan_all(workspace) if found.kind == Kind.FILE]
        (root / "log").write_bytes(b"one\n")
        ((data, last),) = await read_all(workspace, files)
        assert data == b"one\n"
        assert last.after is not None
        assert last.after.size == 4

    async def test_what_cannot_be_read_has_a_problem_and_the_rest_is_read(self, root: Path, workspace: Workspace) -> None:
        for name in ("a", "b", "c", "d"):
            (root / name).write_text(name)
        (root / "sub").mkdir()
        (root / "sub" / "file").write_text("file")
        files = [found for found in await scan_all(workspace) if found.kind == Kind.FILE]
        (root / "a").unlink()
        (root / "b").unlink()
        (root / "b").mkdir()
        (root / "c").unlink()
        (root / "c").symlink_to("d")
        (root / "sub" / "file").unlink()
        (root / "sub").rmdir()
        results = await read_all(workspace, files)
        assert [bool(last.problem) for _, last in results] == [True, True, True, False, True]
        assert [data for data, _ in results] == [b"", b"", b"", b"d", b""]
        assert results[0][1].problem == results[4][1].problem == "vanished"
        assert results[0][1].after is None

    async def test_a_parent_that_became_a_link_is_not_read_through(
        self, root: Path, workspace: Workspace, tmp_path: Path
    ) -> None:
        outside = tmp_path / "outside"
        for folder in (root / "sub", outside):
            folder.mkdir()
            (folder / "file").write_text(folder.name)
        files = [found for found in await scan_all(workspace) if found.kind == Kind.FILE]
        (root / "sub").rename(root / "moved")
        (root / "sub").symlink_to(outside)
        ((data, last),) = await read_all(workspace, files)
        assert data == b""
        assert last.problem

    # ---- stage and swap

    async def test_a_restore_replaces_adds_and_removes(self, root: Path, workspace: Workspace) -> None:
        (root / "kept").write_text("kept")
        (root / "replaced").write_text("old")
        (root / "gone").write_text("gone")
        (root / "old" / "nested").mkdir(parents=True)
        (root / "old" / "nested" / "file").write_text("x")
        (root / "folder-to-file").mkdir()
        (root / "file-to-folder").write_text("x")
        report = await restore(
            workspace,
            [
                staged_file(b"0", b"new", 0o600),
                StageFolder(b"1"),
                staged_file(b"1/run", b"#!/bin/sh\n", 0o755),
                StageFolder(b"1/empty"),
                staged_file(b"2", b"now a file"),
                StageFolder(b"3"),
                staged_file(b"3/in", b"", 0o444),
            ],
            [
                RemoveStep(b"gone", False),
                RemoveStep(b"old", True),
                RemoveStep(b"old/nested", True),
                RemoveStep(b"old/nested/file", False),
                RemoveStep(b"folder-to-file", True),
                RemoveStep(b"file-to-folder", False),
                PlaceStep(b"0", b"replaced"),
                PlaceStep(b"1", b"added"),
                PlaceStep(b"2", b"folder-to-file"),
                PlaceStep(b"3", b"file-to-folder"),
                SetMetaStep(b"added", 0o750, MTIME),
                SetMetaStep(b"added/empty", 0o755, MTIME),
                SetMetaStep(b"file-to-folder", 0o555, None),
            ],
        )
        assert report.undone == ()
        files = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}
        assert files == {
            "kept": "kept",
            "replaced": "new",
            "added/run": "#!/bin/sh\n",
            "folder-to-file": "now a file",
            "file-to-folder/in": "",
        }
        assert sorted(os.listdir(root)) == ["added", "file-to-folder", "folder-to-file", "kept", "replaced"]
        can = workspace.capabilities
        if can.modes:
            for name, mode in (("replaced", 0o600), ("added/run", 0o755), ("added", 0o750), ("file-to-folder/in", 0o444)):
                assert (root / name).stat().st_mode & 0o7777 == mode, name
            assert (root / "file-to-folder").stat().st_mode & 0o7777 == 0o555
        if can.mtimes:
            for name in ("replaced", "added/run", "added", "added/empty"):
                assert (root / name).stat().st_mtime_ns == MTIME, name

    async def test_pieces_come_in_any_order_and_zeros_come_back(self, root: Path, workspace: Workspace) -> None:
        data = os.urandom(100_000) + bytes(700_000) + os.urandom(10) + bytes(199_990)
        stage = await workspace.open_stage()
        cuts = [(600_000, 1_000_000), (0, 300_000), (300_000, 600_000)]
        for start, end in cuts:
            await stage.write(
                [StageFile(b"0", start, data[start:end], len(data), (start, end) == cuts[-1], 0o640, -1_500_000_000)]
            )
        await stage.log([PlaceStep(b"0", b"big")])
        await stage.seal(durable=True)
        assert (await stage.swap()).undone == ()
        assert (root / "big").read_bytes() == data
        if workspace.capabilities.modes:
            assert (root / "big").stat().st_mode & 0o7777 == 0o640
        if workspace.capabilities.mtimes:
            assert (root / "big").stat().st_mtime_ns == -1_500_000_000

    async def test_links_and_hard_links(self, root: Path, workspace: Workspace) -> None:
        (root / "target").write_text("safe")
        (root / "over").symlink_to("target")
        can = workspace.capabilities
        report = await restore(
            workspace,
            [
                StageLink(b"0", b"no \xff such", MTIME),
                staged_file(b"1", b"shared"),
                StageHardLink(b"2", b"1"),
                staged_file(b"3", b"a file now"),
            ],
            [PlaceStep(b"0", b"link"), PlaceStep(b"1", b"one"), PlaceStep(b"2", b"two"), PlaceStep(b"3", b"over")],
        )
        assert [path for path, _ in report.undone] == ([] if can.symlinks else [b"link"])
        if can.symlinks:
            assert os.readlink(os.fsencode(root / "link")) == b"no \xff such"
        assert (root / "one").read_text() == (root / "two").read_text() == "shared"
        if can.hard_links:
            assert (root / "one").samefile(root / "two")
        assert not (root / "over").is_symlink()
        assert (root / "target").read_text() == "safe"

    async def test_a_folder_that_is_not_empty_is_left_and_reported(self, root: Path, workspace: Workspace) -> None:
        (root / "folder").mkdir()
        (root / "folder" / "unplanned").touch()
        (root / "in-the-way").mkdir()
        (root / "empty").mkdir(mode=0o711)
        report = await restore(
            workspace,
            [staged_file(b"0", b"new"), staged_file(b"1", b"new"), StageFolder(b"2"), StageFolder(b"3")],
            [
                RemoveStep(b"folder", True),
                PlaceStep(b"0", b"in-the-way"),
                PlaceStep(b"2", b"folder"),
                PlaceStep(b"3", b"empty"),
                PlaceStep(b"1", b"placed"),
                SetMetaStep(b"missing", 0o700, None),
            ],
        )
        assert {path for path, reason in report.undone if reason} == {b"folder", b"in-the-way", b"empty", b"missing"}
        assert (root / "empty").stat().st_mode & 0o7777 == 0o711
        assert (root / "folder" / "unplanned").exists()
        assert (root / "in-the-way").is_dir()
        assert (root / "placed").read_text() == "new"

    async def test_nothing_goes_through_a_link_in_place_of_a_parent(
        self, root: Path, workspace: Workspace, tmp_path: Path
    ) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "victim").write_text("safe")
        (root / "sub").symlink_to(outside)
        report = await restore(
            workspace,
            [staged_file(b"0", b"evil")],
            [
                RemoveStep(b"sub/victim", False),
                PlaceStep(b"0", b"sub/new"),
                SetMetaStep(b"sub/victim", 0o777, 1),
                SetMetaStep(b"sub", 0o777, 1),
            ],
        )
        assert {path for path, _ in report.undone} == {b"sub/victim", b"sub/new", b"sub"}
        assert os.listdir(outside) == ["victim"]
        assert (outside / "victim").read_text() == "safe"
        assert (outside / "victim").stat().st_mtime_ns != 1
        assert outside.stat().st_mtime_ns != 1

    async def test_abort_leaves_the_tree_as_it_was(self, root: Path, workspace: Workspace, tmp_path: Path) -> None:
        make_tree(root, files=20)
        make_tree(tmp_path / "same", files=20)
        before = os.stat(root).st_mode
        stage = await workspace.open_stage()
        await stage.write([staged_file(b"0", b"x"), StageFolder(b"1"), staged_file(b"1/y", b"y")])
        await stage.log([PlaceStep(b"0", b"run.sh"), RemoveStep(b"app.db", False)])
        await stage.abort()
        await stage.abort()
        assert os.stat(root).st_mode == before
        lines = [line for line in compare_trees(root, tmp_path / "same") if "mtime" not in line]
        assert lines == []
        assert await workspace.recover() == ""

    async def test_an_abort_takes_a_seal_back(self, root: Path, workspace: Workspace, tmp_path: Path) -> None:
        """Else half of a restore of several roots would be finished by whoever comes next."""
        make_tree(root, files=20)
        make_tree(tmp_path / "same", files=20)
        stage = await workspace.open_stage()
        await stage.write([staged_file(b"0", b"x")])
        await stage.log([PlaceStep(b"0", b"run.sh"), RemoveStep(b"app.db", False)])
        await stage.seal(durable=True)
        await stage.abort()
        await stage.abort()
        assert await workspace.recover() == ""
        assert [line for line in compare_trees(root, tmp_path / "same") if "mtime" not in line] == []
        async with self.make_workspace(root).hold():
            pass
        await (await self.make_workspace(root).open_stage()).abort()

    async def test_one_stage_at_a_time(self, root: Path, workspace: Workspace) -> None:
        stage: Stage = await workspace.open_stage()
        try:
            for act in (workspace.open_stage, workspace.recover, self.make_workspace(root).open_stage):
                with pytest.raises(ProviderError) as caught:
                    await act()
                assert caught.value.code == Code.WORKSPACE_BUSY
                assert caught.value.retryable
            assert [found.path for found in await scan_all(workspace)] == [b""]
        finally:
            await stage.abort()
        await (await workspace.open_stage()).abort()
        assert os.listdir(root) == []

    async def test_holds_do_not_exclude_each_other_nor_a_restore_after_them(self, root: Path, workspace: Workspace) -> None:
        async with workspace.hold(), self.make_workspace(root).hold():
            assert [found.path for found in await scan_all(workspace)] == [b""]
        assert (await restore(workspace, [staged_file(b"0", b"x")], [PlaceStep(b"0", b"file")])).undone == ()
        async with workspace.hold():
            assert len(await scan_all(workspace)) == 2

    async def test_holds_do_not_exclude_each_other_and_change_nothing(self, root: Path, workspace: Workspace) -> None:
        make_tree(root, files=6)
        before = await scan_all(workspace)
        async with workspace.hold(), self.make_workspace(root).hold():
            assert await scan_all(workspace) == before
        assert await scan_all(workspace) == before

    async def test_no_restore_seals_while_a_hold_lasts(self, root: Path, workspace: Workspace) -> None:
        if not workspace.capabilities.holds:
            return
        (root / "file").write_text("old")
        async with workspace.hold():
            stage = await self.make_workspace(root).open_stage()
            await stage.write([staged_file(b"0", b"new")])
            await stage.log([PlaceStep(b"0", b"file")])
            sealing = asyncio.create_task(stage.seal(durable=False))
            assert await asyncio.wait([sealing], timeout=0.2) == (set(), {sealing})
        await sealing
        await stage.swap()
        await stage.abort()
        assert (root / "file").read_text() == "new"

    async def test_a_stage_creates_the_root(self, root: Path) -> None:
        workspace = self.make_workspace(root / "new" / "er")
        report = await restore(workspace, [staged_file(b"0", b"x")], [PlaceStep(b"0", b"file")])
        assert report.undone == ()
        assert (root / "new" / "er" / "file").read_text() == "x"

    async def test_odd_names_are_restored(self, root: Path, workspace: Workspace) -> None:
        names = [b"new\nline", b"caf\xe9 \xff", b" ", b"-rf", "naïve 文".encode(), b"x" * 255, b"a'b\"c\\d$e`f*?"]
        report = await restore(
            workspace,
            [staged_file(b"%d" % number, name) for number, name in enumerate(names)],
            [PlaceStep(b"%d" % number, name) for number, name in enumerate(names)],
        )
        assert report.undone == ()
        base = os.fsencode(root)
        assert sorted(os.listdir(base)) == sorted(names)
        for name in names:
            assert Path(os.fsdecode(os.path.join(base, name))).read_bytes() == name
