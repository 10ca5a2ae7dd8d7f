"""Telling the caller of long work how far it is."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from .engine import stop
from .model import Progress
from .protocols import ProgressCallback

__all__ = ["ticking"]

TICK_SECONDS: Final = 0.2


@asynccontextmanager
async def ticking(callback: ProgressCallback | None, state: Callable[[], Progress]) -> AsyncIterator[None]:
    """Report `state()` at once, several times a second while the block runs, and when it ends.

    What the callback raises ends the reports and nothing else: the work may have been committed by then.
    """
    if callback is None:
        yield
        return

    async def tick() -> None:
        try:
            while True:
                callback(state())
                await asyncio.sleep(TICK_SECONDS)
        except asyncio.CancelledError:
            callback(state())
            raise

    reports = asyncio.create_task(tick())
    try:
        yield
    finally:
        await stop([reports])
