"""Work that is always waited for: in a worker thread, or as a coroutine."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

__all__ = ["in_thread", "together", "uncancelled"]

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a worker thread and return its result.

    A cancelled caller waits for the thread to end before `CancelledError` goes on: descriptors that the work uses may
    then be closed, and a step that has begun is complete. What the work raised is dropped in that case.
    """
    return await _ended(asyncio.get_running_loop().run_in_executor(None, lambda: work(*args, **kwargs)))


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even when the caller is cancelled; `CancelledError` then goes on."""
    return await _ended(asyncio.ensure_future(work))


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all of them side by side; their results in order.

    When one raises, the others are waited for before its error goes on; when the caller is cancelled, so are they. Either
    way nothing is still at work once this is left.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if not all(task.done() for task in tasks):
            await _ended(asyncio.gather(*tasks, return_exceptions=True))


async def _ended(future: asyncio.Future[T]) -> T:
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])  # unlike an await of the future, it does not cancel it
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    if cancelled is not None:
        future.exception()  # marks it as seen
        raise cancelled
    return future.result()
