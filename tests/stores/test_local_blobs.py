"""What only the local folder store has to show: durability in order, modes, and what a failed or killed put leaves."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapcore.errors import Code, RepositoryError, SnapshotError
from snapcore.stores.local import LocalBlobStore, open_local

KEY = "packs/0a/0a1b"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


@pytest.fixture
def store(root: Path) -> LocalBlobStore:
    return LocalBlobStore(root)


def files_under(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def test_files_and_folders_are_for_their_owner_alone(store: LocalBlobStore, root: Path) -> None:
    await store.put(KEY, b"data")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    assert {path.name for path, mode in modes.items() if mode == 0o600} == {"0a1b"}
    assert {path.name for path, mode in modes.items() if mode == 0o700} == {"blobs", "packs", "0a", ".tmp"}


async def test_data_is_synced_before_it_gets_its_name_and_the_folder_after(
    store: LocalBlobStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}") if sys.platform == "linux" else ""
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append(f"sync folder {os.path.relpath(path, root)}" if is_folder else "sync data")
        real_sync(descriptor)

    def replace(source: str, target: str) -> None:
        assert os.stat(source).st_size == 4
        done.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    await store.put(KEY, b"data")
    assert done == [
        "sync folder ..",  # blobs
        "sync folder .",  # .tmp
        "sync folder .",  # packs
        "sync folder packs",  # 0a
        "sync data",
        "rename",
        "sync folder packs/0a",
    ]
    done.clear()
    await store.put("packs/0a/0a1c", b"data")
    assert done == ["sync data", "rename", "sync folder packs/0a"]


@pytest.mark.parametrize(
    ("number", "code", "retryable"),
    [
        (errno.ENOSPC, Code.STORE_FULL, True),
        (errno.EDQUOT, Code.STORE_FULL, True),
        (errno.EROFS, Code.READ_ONLY, False),
        (errno.EACCES, Code.ACCESS_DENIED, False),
        (errno.EIO, Code.STORE_UNAVAILABLE, True),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
async def test_a_put_that_fails_anywhere_leaves_the_key_as_it_was_and_no_file(
    store: LocalBlobStore,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: Code,
    retryable: bool,
    call: str,
) -> None:
    await store.put(KEY, b"before")

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(RepositoryError) as caught:
            await store.put(KEY, b"after")
    assert (caught.value.code, caught.value.retryable) == (code, retryable)
    assert await store.get(KEY) == b"before"
    assert files_under(root) == [KEY]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for about 1 MB: a file system of its own for root, a limit on file sizes for others."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() == 0 and sys.platform == "linux":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield folder
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


async def test_a_full_disk_is_told_and_leaves_what_was_there(small_disk: Path) -> None:
    store = LocalBlobStore(small_disk / "blobs")
    await store.put("packs/small", b"x" * 1000)
    with pytest.raises(RepositoryError) as caught:
        await store.put("packs/large", b"x" * (2 << 20))
    assert caught.value.code is Code.STORE_FULL
    assert caught.value.retryable
    assert files_under(small_disk / "blobs") == ["packs/small"]
    await store.put("packs/other", b"y" * 1000)
    assert await store.get("packs/small") == b"x" * 1000


async def test_a_process_killed_in_a_put_leaves_nothing_that_is_listed(store: LocalBlobStore, root: Path) -> None:
    put_and_die(root)
    assert len(files_under(root)) == 1
    assert [info async for info in store.list()] == []
    assert await store.head(KEY) is None
    await store.put(KEY, b"data")
    assert [info.key async for info in store.list()] == [KEY]


def put_and_die(root: Path) -> None:
    """Kill a process after it has written a blob and before the rename."""
    script = f"""
import asyncio, os, signal
from snapcore.stores.local import LocalBlobStore
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(LocalBlobStore({str(root)!r}).put({KEY!r}, b"data"))
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == -signal.SIGKILL


async def test_old_leftovers_are_swept_and_young_ones_are_not(store: LocalBlobStore, root: Path) -> None:
    (root / ".tmp").mkdir(parents=True)
    for name, age in (("old", 2 * 86400), ("young", 60)):
        path = root / ".tmp" / name
        path.write_bytes(b"part of a blob")
        then = time.time() - age
        os.utime(path, (then, then))
    await store.put(KEY, b"data")
    assert files_under(root) == [".tmp/young", KEY]


async def test_a_key_under_another_key_is_refused(store: LocalBlobStore, root: Path) -> None:
    await store.put("packs/a", b"data")
    await store.put("packs/b/c", b"data")
    for key in ("packs/a/b", "packs/b"):
        with pytest.raises(SnapshotError) as caught:
            await store.put(key, b"data")
        assert caught.value.code is Code.INVALID_REQUEST
    assert files_under(root) == ["packs/a", "packs/b/c"]


async def test_a_truncated_file_is_an_invalid_blob(store: LocalBlobStore, root: Path) -> None:
    await store.put(KEY, b"0123456789")
    os.truncate(root / KEY, 5)
    with pytest.raises(SnapshotError) as caught:
        await store.get(KEY, 2, 8)
    assert caught.value.code is Code.INVALID_BLOB


async def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(store: LocalBlobStore, root: Path) -> None:
    root.mkdir()
    os.mkfifo(root / "pipe")
    with pytest.raises(RepositoryError) as caught:
        await store.get("pipe")
    assert caught.value.code is Code.STORE_UNAVAILABLE


async def test_reading_makes_no_folder(store: LocalBlobStore, root: Path) -> None:
    assert await store.head(KEY) is None
    await store.delete(KEY)
    assert [info async for info in store.list()] == []
    assert not root.exists()


async def test_an_address_is_a_path_or_a_file_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    addresses = [f"file://{tmp_path}/blobs", f"{tmp_path}/blobs", "~/blobs", "blobs", "./blobs"]
    assert {open_local(address).url for address in addresses} == {f"file://{tmp_path}/blobs"}
    with pytest.raises(SnapshotError, match="no absolute path"):
        open_local("file://host/blobs")


async def test_a_file_is_no_folder_for_blobs(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SnapshotError, match="is no folder") as caught:
            await LocalBlobStore(root).put("a", b"x")
        assert caught.value.code == Code.INVALID_REQUEST
