"""What every engine operation works with: the two stores, the repository's configuration, and worker threads."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from .config import RepositoryConfig
from .protocols import BlobStore, CheckpointStore

__all__ = ["Engine", "finish"]

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

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run CPU work on a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, lambda: work(*args, **kwargs))

    async def close(self) -> None:
        """Close both stores and end the threads."""
        self.workers.shutdown(wait=False, cancel_futures=True)
        try:
            await self.checkpoints.close()
        finally:
            await self.blobs.close()


async def finish(work: Awaitable[T]) -> T:
    """Await `work` to its end even when the caller is cancelled; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):  # cancelled once more: it changes nothing
                await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise asyncio.CancelledError from error
        raise
