"""Blocking work in a worker thread that is always waited for."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["in_thread"]

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a worker thread and return its result.

    A cancelled caller waits for the thread to end before `CancelledError` goes on: descriptors that the work uses may
    then be closed, and a step that has begun is complete. What the work raised is dropped in that case.
    """
    future = asyncio.get_running_loop().run_in_executor(None, lambda: work(*args, **kwargs))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue  # the first cancellation is the one that is passed on
        if not future.cancelled():
            future.exception()  # marks it as seen
        raise
