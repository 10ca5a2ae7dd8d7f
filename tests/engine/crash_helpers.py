"""For tests of interruptions: processes that die at a chosen call, tasks cancelled at a chosen await, and what must hold
afterwards."""

import asyncio
import gc
import itertools
import mmap
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import snapcore
from snapcore.model import Checkpoint
from snapcore.providers.direct import GRANULARITY_NS
from snapcore.repository import Repository
from snapcore.testing import Faults, with_faults
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree

__all__ = [
    "ON_DISK",
    "THREAD",
    "Scene",
    "cancelled_at",
    "copy_tree",
    "count_calls",
    "die_at",
    "faulty",
    "leaks_nothing",
    "make_scene",
    "run_forked",
    "sound",
    "stage_names",
]

T = TypeVar("T")
Job = Callable[[], Coroutine[Any, Any, object]]
Point = tuple[Any, str]

THREAD = "thread"
ON_DISK: list[Point] = [
    (os, name)
    for name in ("rename", "replace", "rmdir", "unlink", "mkdir", "utime", "fchmod", "symlink", "link", "pwrite", "fsync", "open")
]


# ------------------------------------------------------------------------------------------------------------ scenes


@dataclass(frozen=True)
class Scene:
    """A repository with two checkpoints of one workspace, which holds the second; all below `base`.

    `trees[0]` and `trees[1]` are copies of the workspace as it was at each; `repo` and `work` are to be copied, not used.
    """

    base: Path
    repo: Path
    work: Path
    trees: tuple[Path, Path]
    checkpoints: tuple[Checkpoint, Checkpoint]

    def copies(self, name: str) -> tuple[Path, Path]:
        """A repository and a workspace of one's own."""
        own = self.base / name
        own.mkdir()
        copy_tree(self.repo, own / "repo")
        copy_tree(self.work, own / "work")
        return own / "repo", own / "work"


async def make_scene(base: Path, files: int = 40) -> Scene:
    """Make a tree, capture it, change it, capture it again."""
    repo, work = base / "scene-repo", base / "scene-work"
    make_tree(work, files=files)
    checkpoints, trees = [], []
    async with snapcore.open_repository(repo) as opened:
        for step in (1, 2):
            if step == 2:
                mutate_tree(work, seed=7)
            checkpoints.append(await opened.capture(work, thread_id=THREAD))
            trees.append(base / f"tree-{step}")
            copy_tree(work, trees[-1])
    return Scene(base, repo, work, (trees[0], trees[1]), (checkpoints[0], checkpoints[1]))


def copy_tree(source: Path, target: Path) -> None:
    """Copy a tree with its times, modes, links and hard links."""
    subprocess.run(["cp", "-a", source, target], check=True)


def stage_names(root: Path) -> list[str]:
    """What restores left in a workspace."""
    return [name for name in os.listdir(root) if name.startswith(".snapcore")]


async def sound(repo: Repository, work: Path, scratch: Path, ids: Sequence[str]) -> Checkpoint:
    """Check what must hold after any failed capture of `work`: the thread is as `ids` says, or longer by one; every byte of the
    repository is right; and a capture works at once and restores to an equal tree. Returns that capture's checkpoint."""
    found = [c.id for c in await repo.list(THREAD)]
    assert found[: len(ids)] == list(ids)
    assert len(found) <= len(ids) + 1
    head = await repo.get(THREAD)
    assert (head.id if head else None) == (found[-1] if found else None)
    report = await repo.verify(read_data=True)
    assert report.ok, report.problems
    after = await repo.capture(work, thread_id=THREAD)
    if len(found) > len(ids):
        assert head is not None
        assert head.content_id == after.content_id
    await repo.restore(scratch, thread_id=THREAD)
    assert compare_trees(work, scratch) == []
    shutil.rmtree(scratch)
    return after


# ------------------------------------------------------------------------------------------------------------- deaths


def run_forked(job: Job) -> int:
    """Run a coroutine in a child of this process, and return how the child ended: minus the signal, 0, or 1 for an error."""
    join_threads()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        asyncio.run(_as_main(job))
        code = 0
    finally:
        os._exit(code)


async def _as_main(job: Job) -> None:
    await job()


def join_threads() -> None:
    """Wait for worker threads that were told to end: only a process of one thread is safe to fork."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(10)
            assert not thread.is_alive(), thread.name


def die_at(at: int, points: Sequence[Point]) -> None:
    """Let this process be killed at the call of that number to one of `points`: by even numbers before the call does its
    work, by odd ones after it. -1 for never."""
    counter = itertools.count()

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            number = next(counter)
            if at == 2 * number:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if at == 2 * number + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for owner, name in points:
        setattr(owner, name, dying(getattr(owner, name)))


def count_calls(job: Job, points: Sequence[Point]) -> int:
    """How many calls of `points` the job makes."""
    shared = mmap.mmap(-1, 8)
    one_at_a_time = threading.Lock()

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with one_at_a_time:
                shared[:8] = (int.from_bytes(shared[:8], "little") + 1).to_bytes(8, "little")
            return call(*args, **kwargs)

        return wrapped

    async def counted() -> None:
        for owner, name in points:
            setattr(owner, name, counting(getattr(owner, name)))
        await job()

    assert run_forked(counted) == 0
    return int.from_bytes(shared[:8], "little")


# ------------------------------------------------------------------------------------------------------ cancellations


class _Driven(Awaitable[T]):
    """A coroutine that cancels its own task when it is suspended for the nth time, and once more for each later number."""

    def __init__(self, work: Coroutine[Any, Any, T], at: frozenset[int]) -> None:
        self._work = work
        self._at = at

    def __await__(self) -> Generator[Any, Any, T]:
        step = self._work.send
        value: Any = None
        for number in itertools.count(1):
            try:
                waited_for = step(value)
            except StopIteration as end:
                result: T = end.value
                return result
            if number in self._at:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                value, step = (yield waited_for), self._work.send
            except BaseException as error:  # noqa: BLE001 (it goes on into the coroutine)
                value, step = error, self._work.throw
        raise AssertionError("unreachable")


async def cancelled_at(work: Coroutine[Any, Any, T], *at: int) -> T | None:
    """Run `work` in a task that is cancelled at its suspensions of these numbers, from 1. None when that ended it."""

    async def driven() -> T:
        return await _Driven(work, frozenset(at))

    task = asyncio.create_task(driven())
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


# -------------------------------------------------------------------------------------------------------------- leaks


@contextmanager
def leaks_nothing() -> Iterator[None]:
    """Checks that no descriptor and no thread of snapcore is left by what runs inside."""
    gc.collect()
    before, known = _descriptors(), set(threading.enumerate())
    yield

    def left_threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("snapcore") and t not in known]

    until = time.monotonic() + 5
    while left_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert left_threads() == []
    gc.collect()
    left = {fd: path for fd, path in _descriptors().items() if fd not in before}
    assert left == {}, left


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if path.startswith("/") and not path.startswith(("/dev", "/proc")):
            found[name] = path
    return found


@asynccontextmanager
async def faulty(path: Path, faults: Faults) -> AsyncIterator[Repository]:
    """The repository with both its stores behind `faults`, which count their calls together."""
    async with snapcore.open_repository(path) as opened:
        repository = Repository(with_faults(opened.blobs, faults), with_faults(opened.checkpoints, faults), opened.config)
        try:
            yield repository
        finally:
            repository._engine.workers.shutdown()


def let_times_settle(root: Path) -> None:
    """Wait until the files are old enough for their times to be trusted."""
    newest = max(os.lstat(os.path.join(base, name)).st_ctime_ns for base, _, names in os.walk(root) for name in names)
    while time.time_ns() < newest + GRANULARITY_NS:
        time.sleep(0.002)
