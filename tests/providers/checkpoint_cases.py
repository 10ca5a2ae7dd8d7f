"""Cases of the field that every kind of sandbox with a shell of its own has to hold, by checkpoints into it and out of it.

Cases 8, 9, 10, 11, 12, 13, 14, 17, 19, 21, 22, 25, 27, 28, 41, 43, 49 and 50. A subclass gives the fixture `handle`, a sandbox
with an empty `/workspace` whose user has the id 1000 and is not root, and says where that folder is seen from outside.
"""

import hashlib
import os
import resource
import secrets
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import snapcore
from snapcore import FilePolicy, Repository
from snapcore.errors import Code, SnapshotError
from snapcore.model import Entry
from snapcore.testing.trees import compare_trees

__all__ = ["EVERYTHING", "USER", "CheckpointCases", "digest", "whole_seconds"]

EVERYTHING = FilePolicy.everything()
USER = 1000


def digest(folder: Path) -> str:
    """All that can be seen of a tree without reading it."""
    lines = []
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place, name)
            found = path.lstat()
            lines.append(f"{path} {found.st_mode} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_nlink}")
    return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()


def whole_seconds(tree: Path) -> None:
    """Give all that lies in a tree times that any sandbox can hold."""
    for folder, folders, files in os.walk(os.fsencode(tree), topdown=False):
        for name in files + folders:
            path = os.path.join(folder, name)
            seconds = max(int(os.lstat(path).st_mtime), 1)
            os.utime(path, (seconds, seconds), follow_symlinks=False)
    os.utime(tree, (1_700_000_000, 1_700_000_000))


async def paths_of(repo: Repository, checkpoint_id: str) -> set[bytes]:
    """What a checkpoint holds besides its root."""
    checkpoint = await repo.get("thread", checkpoint_id)
    assert checkpoint is not None
    return {entry.path async for entry in repo.ls(checkpoint) if entry.path}


def _but_time(entry: Entry | None) -> tuple[object, ...]:
    assert entry is not None
    return entry.kind, entry.mode, entry.size, entry.chunks, entry.target


class CheckpointCases:
    """Subclass this, named `Test...`, and give `handle` and `workspace`."""

    workspace: Path
    """The sandbox's workspace, looked at from outside."""

    def calls(self, handle: Any) -> int:
        """How many calls to the provider were made until now."""
        pytest.fail("A subclass has to count its calls.")

    @pytest_asyncio.fixture
    async def repo(self) -> AsyncIterator[Repository]:
        async with snapcore.open_repository("memory://") as repo:
            yield repo

    async def test_what_is_restored_belongs_to_the_user_and_can_be_written(
        self, repo: Repository, handle: Any, tmp_path: Path
    ) -> None:
        """Cases 12, 13 and 49: modes, owners, a read-only folder that is restored into."""
        for name, mode in (("run.sh", 0o755), ("private", 0o600), ("read-only", 0o444)):
            (tmp_path / name).write_text(name)
            (tmp_path / name).chmod(mode)
        (tmp_path / "closed").mkdir()
        (tmp_path / "closed/file").write_text("in a read-only folder")
        (tmp_path / "closed").chmod(0o555)
        await repo.capture(str(tmp_path), thread_id="thread")
        change = "cd /workspace; echo more >> private && ./run.sh; chmod 755 closed && echo new > closed/file"
        for _ in range(2):
            await repo.restore(handle, thread_id="thread")
            assert {path.name: path.stat().st_mode & 0o7777 for path in self.workspace.iterdir()} == {
                "run.sh": 0o755,
                "private": 0o600,
                "read-only": 0o444,
                "closed": 0o555,
            }
            assert {path.stat().st_uid for path in self.workspace.rglob("*")} == {USER}
            assert (await handle.exec(change)).exit_code == 0
            await handle.exec("chmod 555 /workspace/closed")
        await repo.restore(handle, thread_id="thread")
        assert (self.workspace / "closed/file").read_text() == "in a read-only folder"

    async def test_names_that_are_not_text_and_hard_links_go_round_twice(
        self, repo: Repository, handle: Any, tmp_path: Path
    ) -> None:
        """Cases 14, 17 and 50: bytes for names; one of two hard links was replaced in between."""
        base = os.fsencode(tmp_path)
        for name in (b"\xff\xfe", b"new\nline", b" lead", b"-rf", b"it's", "naïve 文".encode()):
            Path(os.fsdecode(base + b"/" + name)).write_bytes(name)
        os.link(base + b"/-rf", base + b"/linked")
        whole_seconds(tmp_path)
        await repo.capture(str(tmp_path), thread_id="thread")
        for _ in range(2):
            receipt = await repo.restore(handle, thread_id="thread")
            assert receipt is not None
            assert not receipt.differences
            assert compare_trees(tmp_path, self.workspace) == []
            await handle.exec("cd /workspace; rm -- linked && cp -- -rf linked")
        assert (self.workspace / "linked").stat().st_nlink == 1

    async def test_links_out_and_fifos_are_refused_or_skipped(self, repo: Repository, handle: Any) -> None:
        """Cases 8, 9, 10 and 41: refused by name, or skipped and left where they are."""
        await handle.exec(
            "cd /workspace; echo x > file; ln -s /etc/passwd out; ln -s file in; ln -s /workspace/file absolute; mkfifo fifo"
        )
        with pytest.raises(SnapshotError) as caught:
            await repo.capture(handle, thread_id="thread")
        assert caught.value.code == Code.UNSUPPORTED_ENTRY
        assert set(caught.value.paths) == {b"fifo", b"out"}
        taken = await repo.capture(handle, thread_id="thread", policy=FilePolicy(on_unsupported="skip"))
        assert await paths_of(repo, taken.id) == {b"file", b"in", b"absolute"}
        await handle.exec("cd /workspace; rm absolute in; echo changed > file")
        await repo.restore(handle, thread_id="thread")
        assert sorted(os.listdir(self.workspace)) == ["absolute", "fifo", "file", "in", "out"]
        assert (self.workspace / "file").read_text() == "x\n"

    async def test_nothing_is_written_through_a_planted_link(self, repo: Repository, handle: Any) -> None:
        """Case 11: a folder was replaced by a link that leads out."""
        await handle.exec("cd /workspace; mkdir -p a/b; echo x > a/b/file")
        await repo.capture(handle, thread_id="thread")
        await handle.exec("cd /workspace; rm -r a; mkdir -p /tmp/outside/b; ln -s /tmp/outside a")
        await repo.restore(handle, thread_id="thread")
        assert (await handle.exec("find /tmp/outside")).stdout.split() == [b"/tmp/outside", b"/tmp/outside/b"]
        assert not (self.workspace / "a").is_symlink()
        assert (self.workspace / "a/b/file").read_text() == "x\n"

    async def test_pruned_folders_are_never_listed_and_stay(self, repo: Repository, handle: Any) -> None:
        """Case 19: what is excluded is neither in the checkpoint nor removed."""
        await handle.exec(
            "cd /workspace; echo x > file; mkdir -p node_modules/deep .git; echo y > node_modules/deep/file; echo SECRET=1 > .env"
        )
        taken = await repo.capture(handle, thread_id="thread")
        assert await paths_of(repo, taken.id) == {b"file"}
        await handle.exec("echo changed > /workspace/file")
        await repo.restore(handle, thread_id="thread")
        assert (self.workspace / "node_modules/deep/file").read_text() == "y\n"
        assert (self.workspace / ".env").exists()

    async def test_an_unreadable_folder_is_an_error_or_skipped(self, repo: Repository, handle: Any) -> None:
        """Case 25: either way it is named."""
        await handle.exec("cd /workspace; echo x > file; mkdir locked; echo y > locked/file")
        os.chown(self.workspace / "locked", 0, 0)
        (self.workspace / "locked").chmod(0o700)
        with pytest.raises(SnapshotError) as caught:
            await repo.capture(handle, thread_id="thread")
        assert (caught.value.code, set(caught.value.paths)) == (Code.UNREADABLE_ENTRY, {b"locked"})
        taken = await repo.capture(handle, thread_id="thread", policy=FilePolicy(on_unreadable="skip"))
        assert b"file" in await paths_of(repo, taken.id)

    async def test_side_files_of_a_database_go_with_it(self, repo: Repository, handle: Any, tmp_path: Path) -> None:
        """Case 27: stale side files go when the database comes back."""
        with closing(sqlite3.connect(tmp_path / "app.db")) as database, database:
            database.execute("CREATE TABLE t AS SELECT 1 AS n")
        await repo.capture(str(tmp_path), thread_id="thread")
        await repo.restore(handle, thread_id="thread")
        await handle.exec("cd /workspace; echo stale > app.db-wal; echo stale > app.db-shm; echo y >> app.db")
        await repo.restore(handle, thread_id="thread")
        assert os.listdir(self.workspace) == ["app.db"]
        assert (self.workspace / "app.db").read_bytes() == (tmp_path / "app.db").read_bytes()

    async def test_no_secret_is_stored(self, repo: Repository, handle: Any) -> None:
        """Case 28: a secret inside the root."""
        secret = secrets.token_hex(20)
        await handle.exec(f"cd /workspace; printf 'key={secret}' > config; printf %s {secret} > only")
        checkpoint = await repo.capture(handle, thread_id="thread", secrets={"TOKEN": secret})
        assert await repo.read_file(checkpoint, b"config") == b"key=" + bytes(40)
        assert await repo.read_file(checkpoint, b"only") == bytes(40)

    async def test_deep_and_many_paths_go_round(self, repo: Repository, handle: Any, tmp_path: Path) -> None:
        """Cases 22 and 43: 10,000 paths, through commands of bounded length; one path longer than PATH_MAX."""
        tree = tmp_path / "tree"
        for number in range(10_000):
            folder = tree / f"a-folder-with-a-long-name-{number % 50}"
            if number < 50:
                folder.mkdir(parents=True)
            (folder / f"a-file-with-a-name-that-is-rather-long-{number}").write_text(str(number))
        here = os.getcwd()
        try:
            os.chdir(tree)
            for _ in range(30):  # 6000 bytes of path
                os.mkdir("d" * 200)
                os.chdir("d" * 200)
            Path("end").write_text("deep")
        finally:
            os.chdir(here)
        first = await repo.capture(str(tree), thread_id="local")
        await repo.restore(handle, thread_id="local")
        calls = self.calls(handle)
        again = await repo.capture(handle, thread_id="there")
        found = await repo.diff(first, again)
        assert (found.added, found.removed) == ((), ())
        # besides times, which some tools set in whole seconds
        assert [each.path for each in found.changed if _but_time(each.before) != _but_time(each.after)] == []
        assert self.calls(handle) - calls < 100
        # it is there, but what lies deeper than a path may be long cannot be read by a shell's tools: named, never left out
        with pytest.raises(SnapshotError) as caught:
            await repo.capture(handle, thread_id="read", reread=True)
        assert caught.value.code == Code.UNREADABLE_ENTRY
        assert set(caught.value.paths) == {b"/".join([b"d" * 200] * 30) + b"/end"}

    async def test_a_large_file_goes_round_in_little_memory(self, repo: Repository, handle: Any) -> None:
        """Case 21: less memory than the file has bytes."""
        await handle.exec("yes 0123456789abcdef | head -c 200000000 > /workspace/large")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await repo.capture(handle, thread_id="thread")
        await handle.exec("rm /workspace/large")
        await repo.restore(handle, thread_id="thread")
        assert (self.workspace / "large").stat().st_size == 200_000_000
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # KiB
