"""When the files of a deepagents backend are captured: before the first call that may change them, and after every so many."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from snapcore.autocheckpoint import FailureCallback, Failures, attempted
from snapcore.errors import Code, SnapcoreError, SnapshotError
from snapcore.model import Checkpoint

from .deepagents_handle import sandbox_of
from .langgraph_home import home_of
from .langgraph_points import thread_of

try:
    from deepagents.backends.protocol import SandboxBackendProtocol
    from langgraph.config import get_config
except ImportError as error:
    raise SnapcoreError(
        "deepagents is not installed.", code=Code.MISSING_EXTRA, hint="Install it: pip install 'snapcore[deepagents]'."
    ) from error

__all__ = ["Captures"]

T = TypeVar("T")
BASELINE_SECONDS: Final = 60.0  # a thread that waits may be the one that the capture is waiting for


class Captures:
    """Counts the calls that affect files. Of calls that run at once, the last to end captures."""

    def __init__(
        self,
        backend: SandboxBackendProtocol,
        repository: Any,
        *,
        thread_id: str | None,
        root: str | None,
        every: int,
        on_failure: FailureCallback | None,
        options: dict[str, Any],
    ) -> None:
        if every < 1:
            raise SnapshotError("every is a number of calls, 1 or more.", code=Code.INVALID_REQUEST)
        self._repository, self._home = home_of(repository)
        self._sandbox = sandbox_of(backend, root)
        self._thread_id = thread_id
        self._every = every
        self._failures = Failures(on_failure)
        self._options = {"wait": 30.0, "skip_unchanged": True, **options}
        self._lock = threading.Lock()
        self._running = 0
        self._uncovered: dict[str | None, int] = {}  # calls since the newest checkpoint, by thread
        self._baselines: dict[str, Future[None]] = {}

    @property
    def failures(self) -> list[SnapcoreError]:
        """What went wrong, oldest first."""
        return self._failures.kept

    def around(self, call: Callable[[], T], affects: Callable[[T], bool]) -> T:
        """Make a call that may affect files, from a thread."""
        thread_id = self._thread()
        baseline, first = self._enter(thread_id)
        affected = True
        try:
            if first:
                self._take(thread_id, baseline)
            wait([baseline], timeout=BASELINE_SECONDS)
            result = call()
            affected = affects(result)
        finally:
            due = self._leave(thread_id, affected)
        if due:
            self._take(thread_id)
        return result

    async def aaround(self, call: Callable[[], Awaitable[T]], affects: Callable[[T], bool]) -> T:
        """The same from a coroutine."""
        thread_id = self._thread()
        baseline, first = self._enter(thread_id)
        affected = True
        try:
            if first:
                await self._atake(thread_id, baseline)
            await asyncio.shield(asyncio.wrap_future(baseline))
            result = await call()
            affected = affects(result)
        finally:
            due = self._leave(thread_id, affected)
        if due:
            await self._atake(thread_id)
        return result

    def finish(self) -> None:
        """Capture what no checkpoint covers yet."""
        for thread_id in self._left_over():
            self._take(thread_id)

    async def afinish(self) -> None:
        """See `finish`."""
        for thread_id in self._left_over():
            await self._atake(thread_id)

    def _thread(self) -> str | None:
        """The thread that a call is to be captured into; None where no graph with one is running."""
        if self._thread_id is not None:
            return self._thread_id
        try:
            return thread_of(get_config())
        except (RuntimeError, SnapshotError):
            return None

    def _enter(self, thread_id: str | None) -> tuple[Future[None], bool]:
        """What is done once the thread has its baseline, and whether the caller is to take that."""
        with self._lock:
            self._running += 1
            if thread_id is None:
                return Future(), True  # which tells of it
            first = thread_id not in self._baselines
            return self._baselines.setdefault(thread_id, Future()), first

    def _leave(self, thread_id: str | None, affected: bool) -> bool:
        """Whether it is time to capture."""
        with self._lock:
            self._running -= 1
            if affected and thread_id is not None:
                self._uncovered[thread_id] = self._uncovered.get(thread_id, 0) + 1
            return self._running == 0 and self._uncovered.get(thread_id, 0) >= self._every

    def _left_over(self) -> list[str | None]:
        with self._lock:
            return [thread_id for thread_id, count in self._uncovered.items() if count]

    def _take(self, thread_id: str | None, done: Future[None] | None = None) -> None:
        try:
            self._home.attempt(self._captured(thread_id), self._failures, thread_id)
        finally:
            if done is not None:
                done.set_result(None)

    async def _atake(self, thread_id: str | None, done: Future[None] | None = None) -> None:
        try:
            await self._home.aattempt(self._captured(thread_id), self._failures, thread_id)
        finally:
            if done is not None:
                done.set_result(None)

    async def _captured(self, thread_id: str | None) -> None:
        with self._lock:
            covered = self._uncovered.get(thread_id, 0)
        found = await attempted(self._capture(thread_id))
        if isinstance(found, SnapcoreError):
            await self._failures.report(found, thread_id)
            return
        with self._lock:
            self._uncovered[thread_id] = max(0, self._uncovered.get(thread_id, 0) - covered)

    async def _capture(self, thread_id: str | None) -> Checkpoint:
        if thread_id is None:
            raise SnapshotError("No graph with a thread is running.", code=Code.INVALID_REQUEST, hint="Give thread_id.")
        return await self._repository.capture(self._sandbox, thread_id=thread_id, **self._options)
