"""Where asynchronous objects are at home. Agents call their tools from threads and from event loops, while a repository and a
sandbox handle belong to the loop that opened them: calls from elsewhere are carried there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from snapcore import blocking
from snapcore.autocheckpoint import Failures
from snapcore.errors import Code, SnapcoreError, SnapshotError
from snapcore.repository import Repository

__all__ = ["Home", "home_of"]

T = TypeVar("T")

_SYNC: Final = "Call the agent by its asynchronous methods (ainvoke), or open both with snapcore.blocking."

_ONE_LOOP: Final = "Open it, and call the agent, in one asyncio.run."


class Home:
    """An event loop: the one that runs now, or, where none does, the one in the background of `snapcore.blocking`."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop

    @classmethod
    def here(cls) -> "Home":
        """The loop that runs now, or the one in the background."""
        return cls(_running())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` at home and wait for it. `SnapshotError` `INVALID_REQUEST` when home would wait for itself, or is gone."""
        if self._loop is None:
            return blocking._loop.run(work)
        self._check_running(work)
        if self._loop is _running():
            work.close()
            raise SnapshotError("A blocking call cannot wait for its own event loop.", code=Code.INVALID_REQUEST, hint=_SYNC)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` at home, from any loop. `SnapshotError` `INVALID_REQUEST` when home is gone."""
        if self._loop is None:
            return await asyncio.to_thread(self.run, work)
        if self._loop is _running():
            return await work
        self._check_running(work)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _check_running(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._loop is not None and not self._loop.is_running():
            work.close()
            raise SnapshotError("The event loop that opened the repository has ended.", code=Code.INVALID_REQUEST, hint=_ONE_LOOP)

    def attempt(self, work: Coroutine[Any, Any, T], failures: Failures, thread_id: str | None) -> T | None:
        """`run`, beside work that must not fail: that there is no way home is reported, and the result None."""
        try:
            return self.run(work)
        except SnapcoreError as error:
            blocking._loop.run(failures.report(error, thread_id))
            return None

    async def aattempt(self, work: Coroutine[Any, Any, T], failures: Failures, thread_id: str | None) -> T | None:
        """See `attempt`."""
        try:
            return await self.arun(work)
        except SnapcoreError as error:
            await failures.report(error, thread_id)
            return None


def home_of(repository: Any) -> tuple[Repository, Home]:
    """A repository and where it is at home; what `snapcore.blocking` opened is in the background."""
    if isinstance(repository, blocking.BlockingRepository):
        return repository._inner, Home()
    if not isinstance(repository, Repository):
        raise SnapshotError(f"{type(repository).__name__} is no repository.", code=Code.INVALID_REQUEST)
    loop = _running()
    if loop is None:
        raise SnapcoreError(
            "An asynchronous repository is used outside of its event loop.",
            code=Code.INVALID_REQUEST,
            hint="Use snapcore.blocking.open_repository, or do this inside of the coroutine that opened it.",
        )
    return repository, Home(loop)


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
