"""Captures that nobody asks for one by one: of a session by its steps and by time, of a bare sandbox by time.

None of them ever fails the work that it is beside. What went wrong is kept, handed to a callback, and logged as a warning of
the logger `snapcore`.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar
from weakref import WeakKeyDictionary

from .capturing import CaptureReport
from .engine import stop
from .errors import CheckpointWriterConflictError, Code, ProviderError, SnapcoreError, SnapshotError, printable
from .model import Checkpoint
from .session_options import scrubbed

if TYPE_CHECKING:
    from .session import Session

__all__ = ["AutoCheckpoint", "CheckpointEvery", "FailureCallback", "Failures", "Sleep", "attempted", "check_seconds", "tell"]

T = TypeVar("T")
FailureCallback = Callable[[SnapcoreError], None]
Sleep = Callable[[float], Awaitable[None]]

MAX_FAILURES: Final = 100
FIRST_RETRY: Final = 1.0  # seconds
LONGEST_RETRY: Final = 60.0
FINAL_ATTEMPTS: Final = 3
_GONE: Final = (Code.NO_SANDBOX, Code.SANDBOX_UNAVAILABLE, Code.NOT_CAPABLE, Code.MISSING_TOOL)
_log = logging.getLogger("snapcore")


def check_seconds(seconds: float) -> float:
    """Refuse a period that makes no sense. Raises `SnapshotError` `INVALID_REQUEST`."""
    if not (seconds > 0 and math.isfinite(seconds)):  # NaN is not above 0, either
        raise SnapshotError("The time between checkpoints is a number of seconds above 0.", code=Code.INVALID_REQUEST)
    return seconds


async def attempted(work: Awaitable[T]) -> T | SnapcoreError:
    """The result of an automatic capture, or the error that it ended with.

    An exception that is no `SnapcoreError` comes from what the caller passed: a policy, a hook, a handle. It must not fail the
    step beside the capture either, and is told by its type alone, since nobody knows what its text holds.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    finally:
        if not task.done():
            await stop([task])
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, Exception):
        raise error
    _let_go(error)
    if isinstance(error, SnapcoreError):
        return error
    told = SnapshotError(f"The capture ended with {type(error).__name__}.", code=Code.INVALID_REQUEST)
    told.__cause__ = error
    return told


def _let_go(error: BaseException | None) -> None:
    """Drop the frames of an error that is kept: they hold what was being stored."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def tell(callback: Callable[[T], object] | None, value: T) -> None:
    """Call back, if there is somebody to be told. By the event loop, which tells of what the callback raises and goes on."""
    if callback is not None:
        asyncio.get_running_loop().call_soon(callback, value)
        await asyncio.sleep(0)  # it is the next thing that the loop does


class Failures:
    """Keeps the newest failures of automatic captures in `kept`, and tells of each as it comes."""

    def __init__(self, callback: FailureCallback | None, kept: list[SnapcoreError] | None = None) -> None:
        self.kept = [] if kept is None else kept
        self._callback = callback

    async def report(self, error: SnapcoreError, thread_id: str | None) -> None:
        """Tell of a failure; a capture that was left out because another writer holds the thread is one too."""
        self.kept.append(error)
        del self.kept[:-MAX_FAILURES]
        # a thread id that holds a secret is what that error is about
        where = "" if thread_id is None or error.code == Code.SECRET_IN_NAME else f" of thread {printable(thread_id)}"
        what = "left out" if isinstance(error, CheckpointWriterConflictError) else "failed"
        _log.warning("An automatic checkpoint%s %s: %s [%s]", where, what, printable(str(error)), error.code)
        await tell(self._callback, error)


@dataclass(eq=False, slots=True)
class _Watch:
    """What `AutoCheckpoint` remembers of a session: since which step nothing was captured, and what waits for the time."""

    step: int
    timer: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoCheckpoint:
    """When a session is captured by itself: after `every_steps` affecting operations, `every_seconds` after the capture before,
    before it is closed (`on_completion`; not when what closes it was cancelled), and as it begins (`baseline`).

    Unchanged content makes no new checkpoint. A failed capture never fails the operation beside it: it is in the session's
    `failures` (the newest 100), handed to `on_failure`, logged, and tried again after the next operation. It is left
    out, and that reported, while another writer holds the thread. By time nothing is done while the sandbox is paused or a
    command runs. One `AutoCheckpoint` may serve many sessions. `sleep` is what waits.

    Raises `SnapshotError` `INVALID_REQUEST` for numbers that make no sense.
    """

    every_steps: int | None = 5
    every_seconds: float | None = None
    on_completion: bool = True
    baseline: bool = True
    on_failure: FailureCallback | None = None
    sleep: Sleep = field(default=asyncio.sleep, repr=False, compare=False)
    _watched: "WeakKeyDictionary[Session, _Watch]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.every_steps is not None and not (type(self.every_steps) is int and self.every_steps > 0):
            raise SnapshotError("every_steps is a whole number above 0, or None.", code=Code.INVALID_REQUEST)
        if self.every_seconds is not None:
            check_seconds(self.every_seconds)

    async def started(self, session: "Session") -> None:
        """The session is open."""
        watch = _Watch(session.step)
        if self.baseline:
            async with session._lock:
                await self._capture(session, watch)
        self._watched[session] = watch  # now: a session that was cancelled before did not begin
        if self.every_seconds is not None:
            watch.timer = asyncio.create_task(self._by_time(session, watch, self.every_seconds))

    async def stepped(self, session: "Session") -> None:
        """An affecting operation has ended; the session does nothing else meanwhile."""
        watch = self._watched.get(session)
        if watch is not None and self.every_steps is not None and _steps(session, watch) >= self.every_steps:
            await self._capture(session, watch)

    async def ended(self, session: "Session") -> None:
        """The session is about to be closed."""
        watch = self._watched.pop(session, None)
        if watch is None:
            return
        if watch.timer is not None:
            await stop([watch.timer])
        task = asyncio.current_task()
        if self.on_completion and (task is None or not task.cancelling()):
            async with session._lock:
                if session._handle is not None or _steps(session, watch):  # else it would be opened for nothing
                    await self._capture(session, watch)

    async def _by_time(self, session: "Session", watch: _Watch, seconds: float) -> None:
        while True:
            await self.sleep(seconds)
            async with session._lock:
                if session._handle is not None:
                    await self._capture(session, watch)

    async def _capture(self, session: "Session", watch: _Watch) -> None:
        async def work() -> Checkpoint:
            with scrubbed(session._options.redactor):
                return await session._checkpoint_locked(None, automatic=True, skip_unchanged=True, wait=0)

        found = await attempted(work())
        if isinstance(found, SnapcoreError):
            await Failures(self.on_failure, session.failures).report(found, session.thread_id)
        else:
            watch.step = session.step


def _steps(session: "Session", watch: _Watch) -> int:
    """How many affecting operations no checkpoint covers."""
    saved = session._saved[0] if session._saved is not None else 0
    return session.step - max(watch.step, saved)


class CheckpointEvery:
    """Captures a sandbox again and again while its `async with` block runs; see `Repository.checkpoint_every`.

    `latest` is the newest checkpoint (of an unchanged sandbox: the one it equals), `made` how many were made, `failures` are
    the newest 100, and `ended` is the error that ended it early, such as that the sandbox is gone.
    """

    def __init__(
        self,
        capture: Callable[..., Awaitable[CaptureReport]],
        *,
        thread_id: str,
        seconds: float,
        baseline: bool = True,
        on_completion: bool = True,
        on_failure: FailureCallback | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._capture = capture
        self._seconds = check_seconds(seconds)
        self._baseline = baseline
        self._on_completion = on_completion
        self._thread_id = thread_id
        self._failures = Failures(on_failure)
        self._sleep = sleep
        self._in_turn = asyncio.Lock()
        self._failed = 0  # in a row, each of a kind that may pass
        self._timer: asyncio.Task[None] | None = None
        self.latest: Checkpoint | None = None
        self.made = 0
        self.ended: SnapcoreError | None = None

    @property
    def failures(self) -> list[SnapcoreError]:
        """What went wrong, oldest first."""
        return self._failures.kept

    async def checkpoint(self, label: str | None = None) -> Checkpoint:
        """Capture now, in turn with the automatic ones. Raises as `Repository.capture` does."""
        async with self._in_turn:
            return self._took(await self._capture(label=label))

    async def __aenter__(self) -> Self:
        if self._baseline:
            await self._once()
        self._timer = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer is not None:
            await stop([self._timer])
        # who is cancelled or interrupted wants to be gone
        if self._on_completion and (kind is None or issubclass(kind, Exception)):
            await self._finally()

    async def _run(self) -> None:
        while self.ended is None:
            await self._sleep(self._pause())
            await self._once()

    def _pause(self) -> float:
        if not self._failed:
            return self._seconds
        return min(FIRST_RETRY * float(2 ** min(self._failed - 1, 20)), max(LONGEST_RETRY, self._seconds))

    async def _finally(self) -> None:
        for attempt in range(FINAL_ATTEMPTS):
            error = None if self.ended is not None else await self._once()
            if error is None or not error.retryable or attempt + 1 == FINAL_ATTEMPTS:
                return
            await self._sleep(FIRST_RETRY * 2**attempt)

    async def _once(self) -> SnapcoreError | None:
        async with self._in_turn:
            found = await attempted(self._capture(skip_unchanged=True))
        if isinstance(found, CaptureReport):
            self._took(found)
            return None
        await self._failures.report(found, self._thread_id)
        held = isinstance(found, CheckpointWriterConflictError)
        self._failed = self._failed + 1 if found.retryable and not held else 0
        if isinstance(found, ProviderError) and found.code in _GONE and not found.retryable:
            self.ended = found
        return found

    def _took(self, report: CaptureReport) -> Checkpoint:
        self._failed = 0
        self.made += report.created
        self.latest = report.checkpoint
        return report.checkpoint
