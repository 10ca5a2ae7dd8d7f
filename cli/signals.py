"""SIGINT and SIGTERM: they cancel what a command does, so that its lease is given up."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

__all__ = ["SignalError", "interruptible", "with_signals"]


class SignalError(Exception):
    """A signal ended the work; `number` is its."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def with_signals(work: Callable[[], Awaitable[int]]) -> int:
    """Do the work; SIGINT and SIGTERM cancel it, so that its lease is given up. A second one ends the process at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    caught: list[int] = []

    def stop(number: int) -> None:
        caught.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if caught:
            raise SignalError(caught[0]) from None
        raise


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal end what blocks, such as a command that gives a secret, or a pipe that nobody writes into: the event loop,
    which waits for it, hears of no signal meanwhile."""

    def stop(number: int, _: object) -> None:
        raise SignalError(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
