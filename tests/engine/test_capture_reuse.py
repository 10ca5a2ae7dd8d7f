"""What a capture takes over from the one before, or from another name of the same file: never the content of another file."""

import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from snapcore.model import Entry, FileStat
from snapcore.protocols import ReadBlock, SandboxClock, ScanSelection
from snapcore.providers.direct import DirectWorkspace
from snapcore.providers.perfile import PerFileWorkspace
from snapcore.repository import Repository
from snapcore.testing.trees import compare_trees

Make = Callable[..., Path]
Settle = Callable[[Path], None]


async def entries(repo: Repository, thread_id: str = "t") -> dict[bytes, Entry]:
    checkpoint = await repo.get(thread_id)
    assert checkpoint is not None
    return {entry.path: entry async for entry in repo.ls(checkpoint)}


class Changing(DirectWorkspace):
    """Something changes between the scan and the first read."""

    def __init__(self, root: Path, change: Callable[[], object]) -> None:
        super().__init__(root)
        self._change: Callable[[], object] | None = change

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        change, self._change = self._change, None
        if change is not None:
            change()
        async for batch in super().read(files):
            yield batch


async def test_a_linked_file_that_changes_has_one_state_for_all_its_names(
    memory_repo: Repository, make: Make, tmp_path: Path
) -> None:
    """Case 17: two mtimes for one inode could never be restored."""
    work = make({"a/first": "before", "b/": ""})
    os.link(work / "a/first", work / "b/second")
    os.utime(work / "a/first", ns=(5_000_000_000, 5_000_000_000))
    await memory_repo.capture(Changing(work, lambda: (work / "a/first").write_text("afterwards")), thread_id="t")
    found = await entries(memory_repo)
    assert found[b"b/second"].hardlink == b"a/first"
    assert found[b"b/second"].mtime_ns == found[b"a/first"].mtime_ns == (work / "b/second").stat().st_mtime_ns
    assert await memory_repo.restore(tmp_path / "target", thread_id="t", verify="content") is not None
    assert compare_trees(work, tmp_path / "target") == []
    report = await memory_repo.capture_with_report(work, thread_id="t", skip_unchanged=True)
    assert not report.created


async def test_a_first_name_that_was_replaced_does_not_give_its_content_to_the_others(
    memory_repo: Repository, make: Make, tmp_path: Path
) -> None:
    work = make({"a/first": "linked", "b/": "", "other": "replacement"})
    for name in ("b/second", "b/third"):
        os.link(work / "a/first", work / name)
    await memory_repo.capture(Changing(work, lambda: os.replace(work / "other", work / "a/first")), thread_id="t")
    found = await entries(memory_repo)
    assert (found[b"a/first"].hardlink, found[b"b/second"].hardlink, found[b"b/third"].hardlink) == (b"", b"", b"b/second")
    await memory_repo.restore(tmp_path / "target", thread_id="t", verify="content")
    assert compare_trees(work, tmp_path / "target") == []


class Reusing(DirectWorkspace):
    """The inode of `a` was freed and taken by `z` while the scan went on."""

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        async for batch in super().scan(selection, cross_mounts=cross_mounts):
            first = next(s for s in batch if s.path == b"a")
            yield [msgspec.structs.replace(s, inode=first.inode, nlink=2) if s.path in (b"a", b"z") else s for s in batch]


async def test_an_inode_that_was_used_again_does_not_make_one_file_of_two(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "first", "z": "another"})
    checkpoint = await memory_repo.capture(Reusing(work), thread_id="t")
    assert (await entries(memory_repo))[b"z"].hardlink == b""
    assert await memory_repo.read_file(checkpoint, b"z") == b"another"


class Handle:
    """A handle of the folder above several workspaces, with a stable id and times that do or do not include a ctime."""

    sandbox_id = "own://box"

    def __init__(self, folder: Path, *, ctime: bool) -> None:
        self._folder = folder
        self._ctime = ctime

    def _real(self, path: str) -> str:
        return str(self._folder) + path

    def lstat(self, path: str) -> Any:
        st = os.lstat(self._real(path))
        known = {"st_mode": st.st_mode, "st_size": st.st_size, "st_mtime_ns": st.st_mtime_ns}
        return SimpleNamespace(**known, **({"st_ctime_ns": 1_700_000_000_000_000_000} if self._ctime else {}))

    def list(self, path: str) -> "list[str]":
        return os.listdir(self._real(path))

    def read(self, path: str) -> bytes:
        return Path(self._real(path)).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        Path(self._real(path)).write_bytes(data)

    def mkdir(self, path: str) -> None:
        os.mkdir(self._real(path))

    def remove(self, path: str) -> None:
        os.unlink(self._real(path))


class Later(PerFileWorkspace):
    """A handle's files long after they were last changed."""

    async def clock(self) -> SandboxClock:
        clock = await super().clock()
        return SandboxClock(clock.now_ns + 10**12, clock.granularity_ns)


def put(path: Path, text: str) -> None:
    path.write_text(text)
    os.utime(path, ns=(5_000_000_000, 5_000_000_000))


async def test_without_a_ctime_no_file_is_taken_for_unchanged(memory_repo: Repository, make: Make) -> None:
    """An edit that keeps size and mtime does not show otherwise."""
    work = make({"w/": ""})
    put(work / "w/f", "AAAA")
    await memory_repo.capture(Later(Handle(work, ctime=False), "/w"), thread_id="t")
    put(work / "w/f", "ZZZZ")
    checkpoint = await memory_repo.capture(Later(Handle(work, ctime=False), "/w"), thread_id="t")
    assert await memory_repo.read_file(checkpoint, b"f") == b"ZZZZ"


async def test_another_root_of_the_same_sandbox_is_not_taken_for_the_first(memory_repo: Repository, make: Make) -> None:
    """The stat cache is kept by the root's path and not by its name in the checkpoint."""
    work = make({"a/": "", "b/": ""})
    put(work / "a/f", "AAAA")
    put(work / "b/f", "BBBB")
    await memory_repo.capture(Later(Handle(work, ctime=True), "/a"), thread_id="t")
    checkpoint = await memory_repo.capture(Later(Handle(work, ctime=True), "/b"), thread_id="t")
    assert await memory_repo.read_file(checkpoint, b"f") == b"BBBB"
    report = await memory_repo.capture_with_report(Later(Handle(work, ctime=True), "/a"), thread_id="t")
    assert report.files_read == 0
    assert await memory_repo.read_file(report.checkpoint, b"f") == b"AAAA"


class Nameless(DirectWorkspace):
    """A sandbox that has no stable id."""

    @property
    def sandbox_id(self) -> str:
        return ""


async def test_of_a_sandbox_without_an_id_no_stats_are_kept(repo: Repository, make: Make, tmp_path: Path, settle: Settle) -> None:
    """They could be taken for another sandbox's."""
    work = make({"f": "content"})
    settle(work)
    for _ in range(2):
        report = await repo.capture_with_report(Nameless(work), thread_id="t")
        assert report.files_read == 1
    assert not (await repo.capture_with_report(Nameless(work), thread_id="t", skip_unchanged=True)).created
    connection = sqlite3.connect(tmp_path / "repo/snapcore.db")
    try:
        assert connection.execute("SELECT count(*) FROM sandboxes").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM stat_rows").fetchone() == (0,)
    finally:
        connection.close()
