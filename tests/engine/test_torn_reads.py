"""Files that change while they are captured: between the scan and the read, while being read, once or again and again."""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from snapcore.errors import Code, SnapshotError
from snapcore.model import FileStat
from snapcore.protocols import ReadBlock, SandboxClock, ScanSelection
from snapcore.providers.direct import DirectWorkspace
from snapcore.repository import Repository
from snapcore.selection import FilePolicy

Make = Callable[..., Path]
Settle = Callable[[Path], None]
Change = Callable[[Path], None]
KEEP = FilePolicy(on_torn="keep")


class RestlessWorkspace(DirectWorkspace):
    """Before each of the first `times` reads, and in the middle of them when `within`, something changes."""

    def __init__(self, root: Path, change: Callable[[int], None], *, times: int = 1, within: bool = False) -> None:
        super().__init__(root)
        self.reads = 0
        self._change = change
        self._times = times
        self._within = within

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        self.reads += 1
        strike = self.reads <= self._times
        if strike and not self._within:
            self._change(self.reads)
        async for batch in super().read(files):
            yield batch
            if strike and self._within:
                strike = False
                self._change(self.reads)


def rewrite(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"R" * path.stat().st_size)
    other.replace(path)


def rewrite_keeping_time(path: Path) -> None:
    st = path.stat()
    rewrite(path)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


@pytest.mark.parametrize(("size", "within"), [(1_000, False), (9 << 20, False), (9 << 20, True)])
@pytest.mark.parametrize("change", [rewrite, grow, shrink, empty, replace, rewrite_keeping_time])
async def test_a_file_that_changed_once_is_read_again(
    memory_repo: Repository, make: Make, change: Change, size: int, within: bool
) -> None:
    """Case 26: found by size, times or inode, and stored as it is the second time; in one read or over several blocks."""
    work = make({"file": b"x" * size, "quiet": "q"})
    workspace = RestlessWorkspace(work, lambda _: change(work / "file"), within=within)
    report = await memory_repo.capture_with_report(workspace, thread_id="t")
    assert report.warnings == ()
    assert workspace.reads >= 2
    assert await memory_repo.read_file(report.checkpoint, b"file") == (work / "file").read_bytes()
    assert await memory_repo.read_file(report.checkpoint, b"quiet") == b"q"
    await memory_repo.restore(work.parent / "target", thread_id="t")
    assert (work.parent / "target" / "file").stat().st_mtime_ns == (work / "file").stat().st_mtime_ns


@pytest.mark.parametrize("change", [rewrite, shrink, replace])
async def test_a_file_that_never_rests_is_a_typed_error(memory_repo: Repository, make: Make, change: Change) -> None:
    """Case 26: read at most three times more, then `TORN_READ` with its path; the head does not move."""
    work = make({"file": b"x" * 4096, "quiet": "q"})
    workspace = RestlessWorkspace(work, lambda _: change(work / "file"), times=100)
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(workspace, thread_id="t")
    assert caught.value.code == Code.TORN_READ
    assert caught.value.paths == (b"file",)
    assert "on_torn" in caught.value.hint
    assert workspace.reads == 4
    assert await memory_repo.get("t") is None


async def test_a_file_that_never_rests_can_be_kept_and_is_listed(memory_repo: Repository, make: Make) -> None:
    work = make({"file": b"x" * 4096, "quiet": "q"})
    workspace = RestlessWorkspace(work, lambda _: rewrite(work / "file"), times=100)
    report = await memory_repo.capture_with_report(workspace, thread_id="t", policy=KEEP)
    assert len(report.warnings) == 1
    assert "file" in report.warnings[0]
    assert report.checkpoint.warnings == report.warnings
    assert len(await memory_repo.read_file(report.checkpoint, b"file")) == 4096
    receipt = await memory_repo.restore(work.parent / "target", thread_id="t", verify="content")
    assert receipt is not None
    assert receipt.files == 2


async def test_a_log_that_only_grows_keeps_what_it_had(memory_repo: Repository, make: Make) -> None:
    """Step 5 of a capture: whatever the policy; the prefix that was scanned is kept, and the file is listed."""
    work = make({"log": b"line\n" * 1000, "quiet": "q"})
    workspace = RestlessWorkspace(work, lambda _: grow(work / "log"), times=100)
    report = await memory_repo.capture_with_report(workspace, thread_id="t")
    assert len(report.warnings) == 1
    assert "log" in report.warnings[0]
    kept = await memory_repo.read_file(report.checkpoint, b"log")
    assert kept.startswith(b"line\n" * 1000)
    assert (work / "log").read_bytes().startswith(kept)
    await memory_repo.restore(work.parent / "target", thread_id="t", verify="content")
    again = await memory_repo.capture_with_report(work, thread_id="t")
    assert await memory_repo.read_file(again.checkpoint, b"log") == (work / "log").read_bytes()


def vanish(path: Path) -> None:
    path.unlink()


def vanish_with_folder(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("change", [vanish, vanish_with_folder])
async def test_what_vanishes_is_listed_and_the_rest_is_captured(
    memory_repo: Repository, make: Make, change: Change, within: bool
) -> None:
    """Cases 26 and 40: a file, or its folder, goes between scan and read: no crash, no error, a line in the record."""
    work = make({"folder/file": b"x" * (9 << 20), "quiet": "q"})
    workspace = RestlessWorkspace(work, lambda _: change(work / "folder" / "file"), within=within)
    report = await memory_repo.capture_with_report(workspace, thread_id="t")
    if within:  # an open file is still there to be read, but its name is gone
        assert {s.path for s in report.skipped} <= {b"folder/file"}
    else:
        assert [s.path for s in report.skipped] == [b"folder/file"]
        assert "vanished" in report.skipped[0].reason
    assert await memory_repo.read_file(report.checkpoint, b"quiet") == b"q"
    assert (await memory_repo.verify(read_data=True)).ok


class VanishingWorkspace(DirectWorkspace):
    """Removes what the scan is about to list."""

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        class Removing:
            marked_folders = selection.marked_folders

            @staticmethod
            def excludes(path: bytes, kind: int) -> bool:
                if path == b"a":  # already listed by its parent, not yet entered
                    os.rmdir(self.root + "/b/inner")
                    os.rmdir(self.root + "/b")
                return selection.excludes(path, kind)

        async for batch in super().scan(Removing(), cross_mounts=cross_mounts):
            yield batch


async def test_a_folder_that_vanishes_during_the_scan_is_passed_over(memory_repo: Repository, make: Make) -> None:
    """Case 40."""
    work = make({"a/file": "x", "b/inner/": "", "c": "y"})
    checkpoint = await memory_repo.capture(VanishingWorkspace(work), thread_id="t")
    assert [e.path async for e in memory_repo.ls(checkpoint)] == [b"", b"a", b"a/file", b"c"]


def to_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [to_link, to_fifo, to_folder])
@pytest.mark.parametrize("policy", [FilePolicy(), FilePolicy(on_unreadable="skip")])
async def test_a_file_that_became_something_else_is_not_followed_nor_opened(
    memory_repo: Repository, make: Make, change: Change, policy: FilePolicy
) -> None:
    """Cases 8, 26, 41: between scan and read; by policy an error that names it, or a skip that lists it."""
    work = make({"file": "x" * 100, "quiet": "q"})
    workspace = RestlessWorkspace(work, lambda _: change(work / "file"))
    if policy.on_unreadable == "error":
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.capture(workspace, thread_id="t", policy=policy)
        assert caught.value.code == Code.UNREADABLE_ENTRY
        assert caught.value.paths == (b"file",)
        assert await memory_repo.get("t") is None
        return
    report = await memory_repo.capture_with_report(workspace, thread_id="t", policy=policy)
    assert [s.path for s in report.skipped] == [b"file"]
    assert b"file" not in [e.path async for e in memory_repo.ls(report.checkpoint)]


async def test_a_torn_member_of_a_hard_link_group_is_read_again(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "x" * 100})
    os.link(work / "a", work / "b")
    workspace = RestlessWorkspace(work, lambda _: shrink(work / "b"))
    checkpoint = await memory_repo.capture(workspace, thread_id="t")
    assert await memory_repo.read_file(checkpoint, b"a") == await memory_repo.read_file(checkpoint, b"b") == b"x" * 50


async def test_the_first_name_of_a_group_may_vanish_meanwhile(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "x" * 100})
    for name in "bc":
        os.link(work / "a", work / name)
    workspace = RestlessWorkspace(work, lambda _: (work / "a").unlink())
    report = await memory_repo.capture_with_report(workspace, thread_id="t")
    entries = {e.path: e async for e in memory_repo.ls(report.checkpoint)}
    assert sorted(entries) == [b"", b"b", b"c"]
    assert (entries[b"b"].hardlink, entries[b"c"].hardlink) == (b"", b"b")
    assert await memory_repo.read_file(report.checkpoint, b"c") == b"x" * 100


# ---- changes that times barely show


class EarlyWorkspace(DirectWorkspace):
    """A workspace on which every change happened in the tick of the scan, by the sandbox's clock."""

    async def clock(self) -> SandboxClock:
        now = await super().clock()
        return SandboxClock(min(os.stat(self.root + "/file").st_mtime_ns, now.now_ns), now.granularity_ns)


async def test_a_change_in_the_same_tick_as_the_scan_is_found_next_time(memory_repo: Repository, make: Make) -> None:
    """Case 42: a file whose times are as young as the scan is read again by the next capture, unchanged or not."""
    work = make({"file": "x"})
    first = await memory_repo.capture_with_report(EarlyWorkspace(work), thread_id="t")
    second = await memory_repo.capture_with_report(EarlyWorkspace(work), thread_id="t")
    assert (first.files_read, second.files_read) == (1, 1)


async def test_a_change_right_after_a_capture_is_found(memory_repo: Repository, make: Make) -> None:
    """Case 42, without waiting: the same size and the same mtime, as fast as it goes, forty times."""
    work = make({"file": "000"})
    st = (work / "file").stat()
    for number in range(40):
        (work / "file").write_text(f"{number:03}")
        os.utime(work / "file", ns=(st.st_atime_ns, st.st_mtime_ns))
        checkpoint = await memory_repo.capture(work, thread_id="t")
        assert await memory_repo.read_file(checkpoint, b"file") == b"%03d" % number


async def test_an_edit_that_keeps_size_and_mtime_is_found_by_ctime(memory_repo: Repository, make: Make, settle: Settle) -> None:
    """Package managers and editors that put mtimes back do not hide a change."""
    work = make({"file": "old", "other": "x"})
    settle(work)
    await memory_repo.capture(work, thread_id="t")
    rewrite_keeping_time(work / "file")
    report = await memory_repo.capture_with_report(work, thread_id="t")
    assert report.files_read == 1
    assert await memory_repo.read_file(report.checkpoint, b"file") == (work / "file").read_bytes()


async def test_a_file_renamed_over_another_of_equal_size_and_mtime_is_found(
    memory_repo: Repository, make: Make, settle: Settle
) -> None:
    work = make({"a": "one", "b": "two"})
    for name in "ab":
        os.utime(work / name, ns=(7, 7))
    settle(work)
    await memory_repo.capture(work, thread_id="t")
    (work / "b").replace(work / "a")
    report = await memory_repo.capture_with_report(work, thread_id="t")
    assert report.files_read == 1
    assert await memory_repo.read_file(report.checkpoint, b"a") == b"two"
