"""Sandboxes of the user's own: handles of six methods and more, stores that stay the user's, and calls without async."""

import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import Code, SnapcoreError, SnapshotError
from snapcore.protocols import SandboxClock
from snapcore.providers.direct import DirectWorkspace
from snapcore.providers.local import LocalSandbox
from snapcore.providers.perfile import PerFileWorkspace
from snapcore.repository import Repository
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree

Make = Callable[..., Path]


class SixMethods:
    """The least that a handle needs, on a folder of this host, which it calls `/workspace`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _real(self, path: str) -> str:
        assert path == "/workspace" or path.startswith("/workspace/"), path
        return str(self._folder) + path.removeprefix("/workspace")

    def lstat(self, path: str) -> Any:
        return os.lstat(self._real(path))

    def list(self, path: str) -> "list[str]":
        return os.listdir(self._real(path))

    def read(self, path: str) -> Any:
        return Path(self._real(path)).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        Path(self._real(path)).write_bytes(data)

    def mkdir(self, path: str) -> None:
        os.mkdir(self._real(path))

    def remove(self, path: str) -> None:
        real = self._real(path)
        if os.path.isdir(real) and not os.path.islink(real):
            os.rmdir(real)
        else:
            os.unlink(real)


class AllMethods(SixMethods):
    """Everything that is used where a handle has it; contents come in pieces; a stable id."""

    @property
    def sandbox_id(self) -> str:
        return f"own://{self._folder}"

    def read(self, path: str) -> Iterator[bytes]:
        with open(self._real(path), "rb") as file:
            while piece := file.read(100_000):
                yield piece

    def rename(self, old: str, new: str) -> None:
        os.rename(self._real(old), self._real(new))

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, self._real(path))

    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    def link(self, existing: str, path: str) -> None:
        os.link(self._real(existing), self._real(path), follow_symlinks=False)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._real(path), mode)

    def utime(self, path: str, mtime_ns: int) -> None:
        os.utime(self._real(path), ns=(mtime_ns, mtime_ns))


def asynchronous(handle: type[SixMethods]) -> type:
    """The same handle with async methods."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(method):

            async def pieces(*args: Any) -> AsyncIterator[bytes]:
                for piece in method(*args):
                    yield piece

            return pieces

        async def call(*args: Any) -> Any:
            return method(*args)

        return call

    names = [n for n in dir(handle) if not n.startswith("_") and n != "sandbox_id"]
    return type(f"Async{handle.__name__}", (handle,), {name: wrap(getattr(handle, name)) for name in names})


HANDLES = {
    "six": SixMethods,
    "six async": asynchronous(SixMethods),
    "all": AllMethods,
    "all async": asynchronous(AllMethods),
}


class Quick(PerFileWorkspace):
    """With a clock of fine grain, so that a restore does not wait whole seconds for times to move on."""

    def __init__(self, handle: SixMethods) -> None:
        super().__init__(handle, "/workspace")

    async def clock(self) -> SandboxClock:
        return SandboxClock((await super().clock()).now_ns, 1)


async def test_a_handle_is_a_sandbox(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    """Passed as it is; its root is `/workspace` unless it names another."""
    work = make({"a": "1", "sub/b": "2"})
    checkpoint = await memory_repo.capture(SixMethods(work), thread_id="t")
    assert checkpoint.roots[0].path == "/workspace"
    receipt = await memory_repo.restore(SixMethods(tmp_path / "target"), thread_id="t")
    assert receipt is not None
    assert receipt.added == 3
    assert (tmp_path / "target" / "sub" / "b").read_text() == "2"

    class Elsewhere(SixMethods):
        workspace_root = "/workspace/sub"

    assert (await memory_repo.capture(Elsewhere(work), thread_id="u")).totals.files == 1


@pytest.mark.parametrize("kind", HANDLES)
async def test_files_round_trip_through_any_handle(memory_repo: Repository, make: Make, tmp_path: Path, kind: str) -> None:
    """Files, folders, emptiness, odd names: into a missing folder, over a changed one, and again."""
    work = make(
        {
            "a": "1",
            "sub/deep/b": b"\0" * 300_000 + b"x",
            "empty/": "",
            "nothing": "",
            "odd\n\udcff": "o",
            "big": os.urandom(9 << 20),
        }
    )
    checkpoint = await memory_repo.capture(Quick(HANDLES[kind](work)), thread_id="t")
    assert checkpoint.totals.files == 5
    target = tmp_path / "target"
    receipt = await memory_repo.restore(Quick(HANDLES[kind](target)), thread_id="t", verify="content")
    assert receipt is not None
    assert receipt.added == 8
    make({"a": "changed", "sub/added": "x", "sub/deep/b": "y", "new/x": "z"}, base=target)
    (target / "nothing").unlink()
    await memory_repo.restore(Quick(HANDLES[kind](target)), thread_id="t")
    await memory_repo.restore(Quick(HANDLES[kind](target)), thread_id="t")
    assert sorted(os.listdir(target)) == sorted(os.listdir(work))
    for path in work.rglob("*"):
        other = target / path.relative_to(work)
        assert path.is_dir() == other.is_dir()
        if path.is_file():
            assert other.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["all", "all async"])
async def test_a_handle_with_all_methods_restores_all_that_a_local_folder_does(
    memory_repo: Repository, work: Path, tmp_path: Path, kind: str
) -> None:
    """Modes, times, links, hard links; only a link's own time is not set. Local capture, own handle, and back."""
    make_tree(work, files=40)
    target = tmp_path / "target"
    target.mkdir()

    def wrong() -> list[str]:
        links = {repr(os.fsencode(path.relative_to(target))) for path in target.rglob("*") if path.is_symlink()}
        lines = compare_trees(work, target)
        return [line for line in lines if not (line.partition(": mtime")[0] in links and ": mtime" in line)]

    for seed in range(2):
        await memory_repo.capture(work, thread_id="t")
        await memory_repo.restore(Quick(HANDLES[kind](target)), thread_id="t")
        assert wrong() == []
        mutate_tree(target, seed=seed)
        await memory_repo.capture(Quick(HANDLES[kind](target)), thread_id="t")
        await memory_repo.restore(work, thread_id="t")
        assert wrong() == []


async def test_what_a_handle_cannot_hold_is_in_the_receipt(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    """Six methods only: modes, times and links are named one by one; hard links become equal files; nothing is silent."""
    work = make({"a": "1", "tool": "#!", "linked": "x"})
    (work / "tool").chmod(0o755)
    (work / "private").mkdir(mode=0o700)
    os.link(work / "linked", work / "also")
    (work / "link").symlink_to("a")
    os.utime(work / "a", ns=(7, 7))
    await memory_repo.capture(work, thread_id="t")
    target = tmp_path / "target"
    receipt = await memory_repo.restore(Quick(SixMethods(target)), thread_id="t")
    assert receipt is not None
    told = dict(receipt.differences)
    assert {b"tool", b"private", b"link", b"a"} <= set(told)
    assert "link" in told[b"link"]
    assert "mode" in told[b"private"]
    assert (target / "also").read_text() == (target / "linked").read_text() == "x"
    assert not (target / "link").exists()


class Later(PerFileWorkspace):
    """By this clock all files are old, and their times trusted."""

    async def clock(self) -> SandboxClock:
        now = await super().clock()
        return SandboxClock(now.now_ns + 10**10, now.granularity_ns)


@pytest.mark.parametrize("kind", ["all", "all async"])
async def test_a_handle_with_an_id_is_captured_incrementally(memory_repo: Repository, make: Make, kind: str) -> None:
    """Old files are known by the stats that the handle gives; one without an id is read again, never mistaken."""
    work = make({"a": "1", "b": "2"})
    workspace = HANDLES[kind](work)

    first = await memory_repo.capture_with_report(Later(workspace, "/workspace"), thread_id="t")
    (work / "b").write_text("changed")
    second = await memory_repo.capture_with_report(Later(workspace, "/workspace"), thread_id="t")
    assert (first.files_read, second.files_read) == (2, 1)
    six = Later(SixMethods(work), "/workspace")
    assert (await memory_repo.capture_with_report(six, thread_id="t")).files_read == 2


async def test_links_and_special_files_through_a_handle(memory_repo: Repository, make: Make) -> None:
    """Refused as on a local folder; a FIFO is not opened."""
    work = make({"a": "1"})
    os.mkfifo(work / "fifo")
    (work / "out").symlink_to("/etc")
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(AllMethods(work), thread_id="t")
    assert caught.value.code == Code.UNSUPPORTED_ENTRY
    assert caught.value.paths == (b"fifo", b"out")
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(SixMethods(work), thread_id="t")
    assert b"fifo" in caught.value.paths


async def test_a_file_that_vanishes_while_a_handle_reads_it_is_listed(memory_repo: Repository, make: Make) -> None:
    """Cases 26 and 40: its bytes came, but at the end there is nothing left to check them against."""
    work = make({"a": "1" * 1000, "b": "2"})

    class Vanishing(AllMethods):
        def read(self, path: str) -> Iterator[bytes]:
            pieces = list(super().read(path))
            if path.endswith("/a"):
                (work / "a").unlink()
            yield from pieces

    report = await memory_repo.capture_with_report(Vanishing(work), thread_id="t")
    assert [(s.path, s.reason) for s in report.skipped] == [(b"a", "vanished while it was read")]
    assert [e.path async for e in memory_repo.ls(report.checkpoint)] == [b"", b"b"]


async def test_a_handle_that_fails_leaves_head_and_workspace(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    """Whatever call of it fails: a typed error, and the files as they were before the swap."""
    work = make({"a": "1", "sub/b": "2"})
    await memory_repo.capture(AllMethods(work), thread_id="t")

    class Failing(AllMethods):
        def lstat(self, path: str) -> Any:
            if path.endswith("/sub/b"):
                raise ConnectionResetError("the sandbox went away")
            return super().lstat(path)

        def write(self, path: str, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    (work / "a").write_text("changed")
    for act in (memory_repo.capture, memory_repo.restore):
        with pytest.raises(SnapcoreError):
            await act(Failing(work), thread_id="t")
    assert len(await memory_repo.list("t")) == 1
    assert (work / "a").read_text() == "changed"
    assert sorted(os.listdir(work)) == ["a", "sub"]


@pytest.mark.parametrize("thing", [object(), 5, None, {"lstat": 1}])
async def test_what_is_no_sandbox_is_refused(memory_repo: Repository, thing: object) -> None:
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(thing, thread_id="t")
    assert caught.value.code == Code.INVALID_REQUEST
    assert "lstat" in caught.value.hint


async def test_every_way_to_name_a_local_folder(
    memory_repo: Repository, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A path object, text, a URL, a connected handle, a workspace, a relative path: one and the same sandbox."""
    work = make({"sub/a": "1"})
    monkeypatch.chdir(tmp_path)
    ids = set()
    for sandbox in (
        work,
        str(work),
        "./work",
        "work",
        f"file://{work}",
        await snapcore.connect("./work"),
        LocalSandbox(work),
        DirectWorkspace(work),
    ):
        report = await memory_repo.capture_with_report(sandbox, thread_id="t")
        ids.add(report.checkpoint.content_id)
        assert report.checkpoint.roots[0].path == str(work)
    assert len(ids) == 1
    inner = await memory_repo.capture(work, thread_id="inner", workspace_root=str(work / "sub"))
    assert inner.roots[0].path == str(work / "sub")
    assert inner.totals.files == 1
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(work, thread_id="t", workspace_root=str(work), roots={"a": str(work)})
    assert caught.value.code == Code.INVALID_REQUEST


# ---- stores of the caller's own


async def test_capture_and_restore_with_own_stores(make: Make, tmp_path: Path) -> None:
    """`snapcore.capture` and `snapcore.restore`: the same options and results; the stores stay open and the caller's."""
    work = make({"a": "1", "b.log": "2"})
    blobs, store = MemoryBlobStore(), SqlCheckpointStore(f"sqlite:///{tmp_path}/own.db")
    policy = snapcore.FilePolicy.patterns(exclude=["*.log"])
    own: dict[str, Any] = {"checkpoints": store, "blobs": blobs, "thread_id": "t"}
    checkpoint = await snapcore.capture(handle=str(work), label="one", policy=policy, **own)
    assert checkpoint.label == "one"
    (work / "a").write_text("changed")
    second = await snapcore.capture(handle=AllMethods(work), **own)
    assert second.parent_id == checkpoint.id
    receipt = await snapcore.restore(handle=str(tmp_path / "target"), checkpoint_id=checkpoint.id, **own)
    assert receipt is not None
    assert os.listdir(tmp_path / "target") == ["a"]
    assert await snapcore.restore(handle=str(work), **{**own, "thread_id": "none"}) is None
    assert await store.head("t") == second
    foreign = MemoryBlobStore()
    with pytest.raises(SnapcoreError) as caught:
        await snapcore.capture(handle=str(work), checkpoints=store, blobs=foreign, thread_id="t")
    assert caught.value.code == Code.WRONG_DATABASE
    await store.close()


# ---- without async


def test_the_blocking_facade_does_the_same(make: Make, tmp_path: Path) -> None:
    """Every method; iterators are plain ones; errors are the same; it works from other threads."""
    work = make({"a": "1", "sub/b": "2"})
    with snapcore.blocking.open_repository(tmp_path / "repo") as repo:
        extras: dict[str, Any] = {"conversation": [1], "artifacts": {"x": b"y"}}
        checkpoint = repo.capture(str(work), thread_id="t", **extras)
        assert [entry.path for entry in repo.ls(checkpoint)] == [b"", b"a", b"sub", b"sub/b"]
        assert b"".join(repo.open_file(checkpoint, b"a")) == repo.read_file(checkpoint, b"a") == b"1"
        assert (repo.read_conversation(checkpoint), repo.read_artifact(checkpoint, "x")) == ([1], b"y")
        assert repo.capture_with_report(work, thread_id="t", skip_unchanged=True, **extras).created is False
        (work / "a").write_text("changed")
        second = repo.capture(snapcore.blocking.connect(str(work)), thread_id="t")
        assert [d.path for d in repo.diff(checkpoint, second).changed] == [b"a"]
        assert repo.restore(work, thread_id="t", checkpoint_id=checkpoint.id).changed == 1
        assert repo.fork("t", to_thread_id="u").source_id == second.id
        assert repo.rewind("t", checkpoint.id).reason == "rewind"
        assert repo.label("t", second.id, "l").label == "l"
        assert repo.get("t", label="l").id == second.id
        assert len(repo.list("t")) == 3
        assert repo.resolve(checkpoint.id[:20]) == checkpoint
        assert repo.delete_head("t").reason == "rewind"
        assert repo.verify(read_data=True).ok
        assert repo.stats().checkpoints == 3
        assert {info.thread_id for info in repo.threads()} == {"t", "u"}
        assert repo.config.repository_id
        with pytest.raises(SnapshotError) as caught:
            repo.restore(work, thread_id="t", checkpoint_id="none")
        assert caught.value.code == Code.MISSING_CHECKPOINT
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(lambda n: repo.capture(work, thread_id=f"p{n}"), range(4)))
        assert len({c.id for c in made}) == 4
        with pytest.raises(AttributeError):
            repo.no_such_method  # noqa: B018
        assert "capture" in dir(repo)
    with snapcore.blocking.open_repository(tmp_path / "repo", create=False) as repo:
        assert len(repo.list("t")) == 2
    repo.close()
    snapcore.blocking.init_repository(tmp_path / "new").close()


async def test_the_blocking_facade_works_beside_a_running_loop(make: Make) -> None:
    """Called from async code it blocks, as it says, and does not fail."""
    work = make({"a": "1"})
    with snapcore.blocking.open_repository("memory://") as repo:
        assert repo.capture(work, thread_id="t").totals.files == 1
