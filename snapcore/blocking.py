"""The same without async: a thin facade over one event loop in a background thread.

    with snapcore.blocking.open_repository("~/.snapcore") as repo:
        checkpoint = repo.capture("./project", thread_id="thread-1")

Methods, options, results and errors are those of `snapcore.Repository`; methods that iterate there return plain iterators.
Safe to call from any thread. A `KeyboardInterrupt` cancels the running call and waits for its clean end.
"""

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from . import opening, registry
from .errors import Code, SnapshotError
from .repository import Repository

if TYPE_CHECKING:
    from .autocheckpoint import CheckpointEvery
    from .forking import ForkReport, RunAgain
    from .model import Checkpoint
    from .repairing import RepairReport
    from .repairplan import RepairPlan
    from .sandboxes import SandboxProvider
    from .session import Session
    from .session_options import SessionArguments
    from .workflows import Workflow, WorkflowResult

__all__ = [
    "BlockingCheckpointEvery",
    "BlockingRepository",
    "BlockingSession",
    "connect",
    "init_repository",
    "open_repository",
    "plan_repair",
    "repair_repository",
]

T = TypeVar("T")


class _Loop:
    """One event loop in a daemon thread, started when it is first needed, shared by all facades of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._running()
        if self._thread is threading.current_thread():  # it would wait for itself
            work.close()
            raise SnapshotError(
                "A callback, or a hook, called snapcore.blocking in the thread that does its work.",
                code=Code.INVALID_REQUEST,
                hint="Return from the callback first, or call from a thread of your own.",
            )
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = loop.create_task(work)
            task.add_done_callback(lambda _: ended.set())
            tasks.append(task)

        loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except KeyboardInterrupt:
            # the call is cancelled and waited for, so that it gives its lease, pin or stage back
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            ended.wait()
            raise
        return tasks[0].result()

    def stop(self) -> None:
        """End the thread; the next call starts another."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None and self._pid == os.getpid():
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():  # threads do not survive a fork
                loop = self._loop = asyncio.new_event_loop()
                self._pid = os.getpid()
                self._thread = threading.Thread(target=loop.run_forever, name="snapcore-blocking", daemon=True)
                self._thread.start()
            return self._loop


_loop = _Loop()


class BlockingRepository:
    """A `Repository` whose methods block. Use it as a context manager, or call `close`."""

    def __init__(self, inner: Repository) -> None:
        self._inner = inner

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close both stores. Idempotent."""
        _loop.run(self._inner.close())

    def checkpoint_every(self, sandbox: Any, **options: Any) -> "BlockingCheckpointEvery":
        """As `Repository.checkpoint_every`, for a `with` block. `on_failure` is called in the background thread."""
        return BlockingCheckpointEvery(self._inner.checkpoint_every(sandbox, **options))

    def session(self, provider: "SandboxProvider", *, thread_id: str, **options: "Unpack[SessionArguments]") -> "BlockingSession":
        """As `Repository.session`."""
        return BlockingSession(_loop.run(self._inner.session(provider, thread_id=thread_id, **options)))

    def attach(
        self, sandbox: Any = None, *, thread_id: str, take_over: bool = False, **options: "Unpack[SessionArguments]"
    ) -> "BlockingSession":
        """As `Repository.attach`."""
        return BlockingSession(_loop.run(self._inner.attach(sandbox, thread_id=thread_id, take_over=take_over, **options)))

    def resume(self, thread_or_sandbox_id: str, **options: Any) -> "BlockingSession":
        """As `Repository.resume`."""
        return BlockingSession(_loop.run(self._inner.resume(thread_or_sandbox_id, **options)))

    def run_workflow(self, flow: "Workflow", **options: Any) -> "WorkflowResult":
        """As `Workflow.run`. `on_output` and `on_step` are called in the thread of the loop."""
        return _loop.run(flow.run(self._inner, **options))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if inspect.iscoroutinefunction(found):
            return _blocking(found)
        if name in ("ls", "open_file", "patches", "tree"):
            return functools.wraps(found)(lambda *args, **kwargs: _iterate(found(*args, **kwargs)))
        return found

    def __dir__(self) -> list[str]:
        return dir(self._inner)


class BlockingCheckpointEvery:
    """A `CheckpointEvery` for a `with` block."""

    def __init__(self, inner: "CheckpointEvery") -> None:
        self._inner = inner

    def __enter__(self) -> Self:
        _loop.run(self._inner.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _loop.run(self._inner.__aexit__(kind, error, trace))

    def checkpoint(self, label: str | None = None) -> "Checkpoint":
        """Capture now, in turn with the automatic captures."""
        return _loop.run(self._inner.checkpoint(label))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class BlockingSession:
    """A `Session` whose methods block. Use it as a context manager, or call `close`. `on_output` is called in the thread of the
    loop."""

    def __init__(self, inner: "Session") -> None:
        self._inner = inner

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """As `Session.close`."""
        _loop.run(self._inner.close())

    def fork(self, to_thread_id: str, **options: Any) -> "BlockingSession":
        """As `Session.fork`."""
        return BlockingSession(_loop.run(self._inner.fork(to_thread_id, **options)))

    def run_again(self, report: "ForkReport") -> "RunAgain":
        """As `ForkReport.run_again`, in this session."""
        return _loop.run(report.run_again(self._inner))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return _blocking(found) if inspect.iscoroutinefunction(found) else found

    def __dir__(self) -> list[str]:
        return dir(self._inner)


def _blocking(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    return functools.wraps(method)(lambda *args, **kwargs: _loop.run(method(*args, **kwargs)))


def _iterate(items: AsyncIterator[T]) -> Iterator[T]:
    async def following() -> tuple[bool, Any]:
        try:
            return True, await anext(items)
        except StopAsyncIteration:
            return False, None

    while True:
        more, item = _loop.run(following())
        if not more:
            return
        yield item


def open_repository(
    url: str | os.PathLike[str] = "~/.snapcore", *, database: str | None = None, create: bool = True
) -> BlockingRepository:
    """As `snapcore.open_repository`."""

    async def opened() -> Repository:
        return await opening.open_repository(url, database=database, create=create)

    return BlockingRepository(_loop.run(opened()))


def init_repository(url: str | os.PathLike[str], *, database: str | None = None) -> BlockingRepository:
    """As `snapcore.init_repository`."""
    return BlockingRepository(_loop.run(opening.init_repository(url, database=database)))


def plan_repair(url: str | os.PathLike[str], **options: Any) -> "RepairPlan":
    """As `snapcore.plan_repair`."""
    from .rebuilding import plan_repair

    return _loop.run(plan_repair(url, **options))


def repair_repository(url: str | os.PathLike[str], **options: Any) -> "RepairReport":
    """As `snapcore.repair_repository`."""
    from .rebuilding import repair_repository

    return _loop.run(repair_repository(url, **options))


def connect(address: str) -> Any:
    """As `snapcore.connect`: a sandbox handle, to be passed to `capture` and `restore`."""
    return _loop.run(registry.connect(address))
