"""What every engine operation works with: the two stores, the repository's configuration, and worker threads."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from .config import RepositoryConfig
from .errors import Code, RepositoryError
from .model import WriterLease
from .protocols import BlobStore, CheckpointStore

__all__ = ["Engine", "each", "finish", "stop"]

P = ParamSpec("P")
T = TypeVar("T")

WORKERS = max(2, min(8, os.cpu_count() or 2))


@dataclass(frozen=True, slots=True)
class Engine:
    """The stores of one repository, and threads for the work that must stay out of the event loop."""

    blobs: BlobStore
    checkpoints: CheckpointStore
    config: RepositoryConfig
    workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="snapcore-work")
    )
    unreleased: dict[str, WriterLease] = field(default_factory=dict)
    """Leases, by thread, that could not be given up when their work was over: the disk was full, the database locked."""

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run CPU work on a worker thread. Raises `RepositoryError` `STORE_UNAVAILABLE` once the engine is closed."""
        loop = asyncio.get_running_loop()
        try:
            begun = loop.run_in_executor(self.workers, lambda: work(*args, **kwargs))
        except RuntimeError as error:  # the threads have been ended
            raise RepositoryError(
                "The repository is closed.", code=Code.STORE_UNAVAILABLE, hint="Open it again, and what works in it."
            ) from error
        return await begun

    async def close(self) -> None:
        """Close both stores and end the threads, also when the caller is cancelled meanwhile."""
        self.workers.shutdown(wait=False, cancel_futures=True)
        try:
            await finish(self.checkpoints.close())
        finally:
            await finish(self.blobs.close())


async def finish(work: Awaitable[T], undo: Callable[[T], Awaitable[object]] | None = None) -> T:
    """Await `work` to its end even when the caller is cancelled; the cancellation is raised afterwards.

    Its result would be lost then: `undo` gives it back, and is awaited to its end as well.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(asyncio.CancelledError):
            await _ended([task])
        if not task.cancelled() and (error := task.exception()):
            raise asyncio.CancelledError from error
        if undo is not None and not task.cancelled():
            await finish(undo(task.result()))
        raise


async def each(items: Iterable[T], work: Callable[[T], Awaitable[object]], *, at_once: int) -> None:
    """Do the work for every item, for at most `at_once` of them at a time. The first failure stops all and is raised."""
    todo = iter(items)

    async def worker() -> None:
        for item in todo:
            await work(item)

    workers = [asyncio.create_task(worker()) for _ in range(at_once)]
    try:
        for task in workers:
            await task
    finally:
        await stop(workers)


async def stop(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended, even when the caller is cancelled; the cancellation is raised afterwards.
    What the tasks raise is dropped."""
    for task in tasks:
        task.cancel()
    try:
        await _ended(tasks)
    finally:
        for task in tasks:
            if not task.cancelled():
                task.exception()  # it was seen


async def _ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
