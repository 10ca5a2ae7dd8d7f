"""Where asynchronous objects are at home. Agents call their tools from threads and from event loops, while a repository and a
sandbox handle belong to the loop that opened them: calls from elsewhere are carried there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from snapcore import blocking
from snapcore.errors import Code, SnapcoreError, SnapshotError
from snapcore.repository import Repository

__all__ = ["Home", "home_of"]

T = TypeVar("T")

_SYNC: Final = "Call the agent by its asynchronous methods (ainvoke), or open both with snapcore.blocking."


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
        if self._loop is _running() or not self._loop.is_running():
            work.close()
            raise SnapshotError("A blocking call cannot wait for its own event loop.", code=Code.INVALID_REQUEST, hint=_SYNC)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` at home, from any loop."""
        if self._loop is None:
            return await asyncio.to_thread(self.run, work)
        if self._loop is _running():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


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
