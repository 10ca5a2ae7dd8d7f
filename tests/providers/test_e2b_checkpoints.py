"""Checkpoints of E2B sandboxes, as the template's own user, who is not root.

Cases 4, 8, 9, 10, 11, 12, 13, 14, 17, 19, 21, 22, 24, 25, 27, 28, 41, 43, 49 and 50.
"""

import hashlib
import os
import resource
import secrets
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import snapcore
from snapcore import FilePolicy, Repository
from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.providers.e2b import E2BProvider
from snapcore.providers.e2b_handle import E2BSandbox
from snapcore.sandboxes import SandboxSpec
from snapcore.testing.e2b_server import E2BServer
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree

from .e2b_service import need_server

EVERYTHING = FilePolicy.everything()


@pytest.fixture(scope="module")
def server() -> Iterator[E2BServer]:
    need_server()
    with E2BServer() as server:
        yield server


@pytest.fixture
def provider(server: E2BServer) -> E2BProvider:
    options: dict[str, Any] = server.options
    return E2BProvider(timeout=3600, **options)


@pytest_asyncio.fixture
async def handle(provider: E2BProvider, server: E2BServer) -> AsyncIterator[E2BSandbox]:
    made = await provider.create(SandboxSpec())
    yield made
    await provider.destroy(made.binding)


@pytest_asyncio.fixture
async def repo() -> AsyncIterator[Repository]:
    async with snapcore.open_repository("memory://") as repo:
        yield repo


def inside(server: E2BServer, handle: E2BSandbox, path: str = "workspace") -> Path:
    """A path of the sandbox, looked at from outside."""
    return server.folder(handle.binding.sandbox_id) / path


def give(folder: Path) -> None:
    """All below a folder belongs to the sandbox's user."""
    for place, folders, names in os.walk(os.fsencode(folder)):
        for name in (*folders, *names, b""):
            os.chown(os.path.join(place, name) if name else place, 1000, 1000, follow_symlinks=False)


def digest(folder: Path) -> str:
    """All that can be seen of a tree."""
    lines = []
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place, name)
            found = path.lstat()
            lines.append(f"{path} {found.st_mode} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_nlink}")
    return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()


async def test_five_times_round_and_equal_each_time(
    repo: Repository, provider: E2BProvider, server: E2BServer, tmp_path: Path
) -> None:
    """Case 4: restored, changed and captured, five times. Case 24: a capture changes nothing."""
    local = tmp_path / "0"
    make_tree(local, files=30)
    await repo.capture(str(local), thread_id="thread", policy=EVERYTHING)
    for number in range(1, 6):
        handle = await provider.create(SandboxSpec())
        receipt = await repo.restore(handle, thread_id="thread")
        assert receipt is not None
        assert not receipt.differences
        assert compare_trees(local, inside(server, handle)) == []
        mutate_tree(inside(server, handle), seed=number)
        give(inside(server, handle))
        before = digest(inside(server, handle))
        taken = await repo.capture(handle, thread_id="thread", policy=EVERYTHING)
        assert digest(inside(server, handle)) == before
        assert not [name for name in os.listdir(inside(server, handle)) if name.startswith(".snapcore")]
        local = tmp_path / str(number)
        await repo.restore(str(local), thread_id="thread")
        assert compare_trees(local, inside(server, handle)) == []
        assert (await repo.capture(str(local), thread_id="copy", policy=EVERYTHING)).content_id == taken.content_id
        await provider.destroy(handle.binding)


async def test_what_is_restored_belongs_to_the_user_and_can_be_written(
    repo: Repository, handle: E2BSandbox, server: E2BServer, tmp_path: Path
) -> None:
    """Cases 12, 13 and 49: modes, owners, a read-only folder that is restored into."""
    for name, mode in (("run.sh", 0o755), ("private", 0o600), ("read-only", 0o444)):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(mode)
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed/file").write_text("in a read-only folder")
    (tmp_path / "closed").chmod(0o555)
    await repo.capture(str(tmp_path), thread_id="thread")
    for _ in range(2):
        await repo.restore(handle, thread_id="thread")
        there = inside(server, handle)
        assert {path.name: path.stat().st_mode & 0o7777 for path in there.iterdir()} == {
            "run.sh": 0o755,
            "private": 0o600,
            "read-only": 0o444,
            "closed": 0o555,
        }
        assert {path.stat().st_uid for path in there.rglob("*")} == {1000}
        assert (await handle.exec("echo more >> private && ./run.sh; chmod 755 closed && echo new > closed/file")).exit_code == 0
    await repo.restore(handle, thread_id="thread")
    assert (inside(server, handle) / "closed/file").read_text() == "in a read-only folder"


async def test_names_that_are_not_text_and_hard_links_go_round_twice(
    repo: Repository, handle: E2BSandbox, server: E2BServer, tmp_path: Path
) -> None:
    """Cases 14, 17 and 50: bytes for names; one of two hard links was replaced in between."""
    base = os.fsencode(tmp_path)
    for name in (b"\xff\xfe", b"new\nline", b" lead", b"-rf", b"it's", "naïve 文".encode()):
        Path(os.fsdecode(base + b"/" + name)).write_bytes(name)
    os.link(base + b"/-rf", base + b"/linked")
    await repo.capture(str(tmp_path), thread_id="thread")
    for _ in range(2):
        receipt = await repo.restore(handle, thread_id="thread")
        assert receipt is not None
        assert not receipt.differences
        assert compare_trees(tmp_path, inside(server, handle)) == []
        await handle.exec("rm -- linked && cp -- -rf linked")
    assert inside(server, handle, "workspace/linked").stat().st_nlink == 1


async def test_links_out_and_fifos_are_refused_or_skipped(repo: Repository, handle: E2BSandbox, server: E2BServer) -> None:
    """Cases 8, 9, 10 and 41: refused by name, or skipped and left where they are."""
    await handle.exec("echo x > file; ln -s /etc/passwd out; ln -s file in; ln -s /workspace/file absolute; mkfifo fifo")
    with pytest.raises(SnapshotError) as caught:
        await repo.capture(handle, thread_id="thread")
    assert caught.value.code == Code.UNSUPPORTED_ENTRY
    assert set(caught.value.paths) == {b"fifo", b"out"}
    taken = await repo.capture(handle, thread_id="thread", policy=FilePolicy(on_unsupported="skip"))
    assert set(await _paths(repo, taken.id)) == {b"file", b"in", b"absolute"}
    await handle.exec("rm absolute in; echo changed > file")
    await repo.restore(handle, thread_id="thread")
    assert sorted(os.listdir(inside(server, handle))) == ["absolute", "fifo", "file", "in", "out"]
    assert (inside(server, handle) / "file").read_text() == "x\n"


async def _paths(repo: Repository, checkpoint_id: str) -> list[bytes]:
    checkpoint = await repo.get("thread", checkpoint_id)
    assert checkpoint is not None
    return [entry.path async for entry in repo.ls(checkpoint) if entry.path]


async def test_nothing_is_written_through_a_planted_link(repo: Repository, handle: E2BSandbox, server: E2BServer) -> None:
    """Case 11: a folder was replaced by a link that leads out."""
    await handle.exec("mkdir -p a/b; echo x > a/b/file")
    await repo.capture(handle, thread_id="thread")
    await handle.exec("rm -r a; mkdir /tmp/outside; ln -s /tmp/outside a")
    await repo.restore(handle, thread_id="thread")
    assert os.listdir(inside(server, handle, "tmp/outside")) == []
    assert (inside(server, handle) / "a/b/file").read_text() == "x\n"


async def test_pruned_folders_are_never_listed_and_stay(repo: Repository, handle: E2BSandbox, server: E2BServer) -> None:
    """Case 19: what is excluded is neither in the checkpoint nor removed."""
    await handle.exec("echo x > file; mkdir -p node_modules/deep .git; echo y > node_modules/deep/file; echo SECRET=1 > .env")
    taken = await repo.capture(handle, thread_id="thread")
    assert set(await _paths(repo, taken.id)) == {b"file"}
    await handle.exec("echo changed > file")
    await repo.restore(handle, thread_id="thread")
    assert (inside(server, handle) / "node_modules/deep/file").read_text() == "y\n"
    assert (inside(server, handle) / ".env").exists()


async def test_an_unreadable_folder_is_an_error_or_skipped(repo: Repository, handle: E2BSandbox, server: E2BServer) -> None:
    """Case 25: either way it is named."""
    await handle.exec("echo x > file; mkdir locked; echo y > locked/file")
    os.chown(inside(server, handle) / "locked", 0, 0)
    (inside(server, handle) / "locked").chmod(0o700)
    with pytest.raises(SnapshotError) as caught:
        await repo.capture(handle, thread_id="thread")
    assert (caught.value.code, set(caught.value.paths)) == (Code.UNREADABLE_ENTRY, {b"locked"})
    taken = await repo.capture(handle, thread_id="thread", policy=FilePolicy(on_unreadable="skip"))
    assert set(await _paths(repo, taken.id)) >= {b"file"}


async def test_side_files_of_a_database_go_with_it(
    repo: Repository, handle: E2BSandbox, server: E2BServer, tmp_path: Path
) -> None:
    """Case 27: stale side files go when the database comes back."""
    with closing(sqlite3.connect(tmp_path / "app.db")) as database, database:
        database.execute("CREATE TABLE t AS SELECT 1 AS n")
    await repo.capture(str(tmp_path), thread_id="thread")
    await repo.restore(handle, thread_id="thread")
    await handle.exec("echo stale > app.db-wal; echo stale > app.db-shm; echo y >> app.db")
    await repo.restore(handle, thread_id="thread")
    assert os.listdir(inside(server, handle)) == ["app.db"]


async def test_no_secret_is_stored(repo: Repository, handle: E2BSandbox) -> None:
    """Case 28: a secret inside the root."""
    secret = secrets.token_hex(20)
    await handle.exec(f"printf 'key={secret}' > config; printf %s {secret} > only")
    checkpoint = await repo.capture(handle, thread_id="thread", secrets={"TOKEN": secret})
    for path in (b"config", b"only"):
        assert secret.encode() not in await repo.read_file(checkpoint, path)


async def test_deep_and_many_paths_go_round(repo: Repository, handle: E2BSandbox, server: E2BServer, tmp_path: Path) -> None:
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
    server.requests.clear()
    again = await repo.capture(handle, thread_id="there")
    assert again.content_id == first.content_id
    assert server.requests.total() < 100


async def test_a_capture_of_few_changes_takes_few_calls(repo: Repository, handle: E2BSandbox, server: E2BServer) -> None:
    await handle.exec("i=0; while [ $i -lt 300 ]; do i=$((i + 1)); echo $i > file-$i; done; touch -d @1000000000 file-*")
    await repo.capture(handle, thread_id="thread")
    await handle.exec("for i in 1 2 3; do echo changed > file-$i; done")
    server.requests.clear()
    await repo.capture(handle, thread_id="thread")
    assert server.requests["Start"] <= 4
    assert server.requests.total() <= 14


async def test_a_large_file_goes_round_in_little_memory(
    repo: Repository, handle: E2BSandbox, server: E2BServer, tmp_path: Path
) -> None:
    """Case 21: less memory than the file has bytes, with the server in the same process."""
    await handle.exec("yes 0123456789abcdef | head -c 200000000 > large")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await repo.capture(handle, thread_id="thread")
    await handle.exec("rm large")
    await repo.restore(handle, thread_id="thread")
    assert inside(server, handle, "workspace/large").stat().st_size == 200_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # KiB


@pytest.mark.parametrize("name", ["Start", "read", "write"])
async def test_a_capture_and_a_restore_outlive_dropped_connections(
    repo: Repository, handle: E2BSandbox, server: E2BServer, tmp_path: Path, name: str
) -> None:
    make_tree(tmp_path / "tree", files=30)
    await repo.capture(str(tmp_path / "tree"), thread_id="thread", policy=EVERYTHING)
    server.faults.clear()
    for call in range(2, 40, 3):
        server.faults.cut(name, 100, call)
    try:
        await repo.restore(handle, thread_id="thread", verify="content")
        await repo.capture(handle, thread_id="there", policy=EVERYTHING)
    finally:
        server.faults.clear()
    assert compare_trees(tmp_path / "tree", inside(server, handle)) == []


async def test_a_restore_that_loses_its_sandbox_says_so(repo: Repository, provider: E2BProvider, server: E2BServer) -> None:
    handle = await provider.create(SandboxSpec())
    await handle.exec("echo x > file")
    await repo.capture(handle, thread_id="thread")
    server.expire(handle.binding.sandbox_id)
    with pytest.raises(ProviderError) as caught:
        await repo.restore(handle, thread_id="thread")
    assert caught.value.code == Code.NO_SANDBOX
    with pytest.raises(ProviderError) as caught:
        await repo.capture(handle, thread_id="thread")
    assert caught.value.code == Code.NO_SANDBOX
