"""SIGINT and SIGTERM: they cancel what a command does, so that its lease is given up."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["SignalError", "interruptible", "with_signals"]


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_caught: Final[list[int]] = []  # since the command began; the event loop may be busy and not have heard of them


class SignalError(Exception):
    """A signal ended the work; `number` is its."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def with_signals(work: Callable[[], Awaitable[int]]) -> int:
    """Do the work; SIGINT and SIGTERM cancel it, so that its lease is given up. A second one ends the process at once. When the
    work is done, they do what they did before: nothing is held any more."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    task = asyncio.ensure_future(work())
    _caught.clear()

    def note(number: int, _: object) -> None:
        _caught.append(number)

    def stop() -> None:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
        signal.signal(number, note)  # at once; the loop hears of it as well
        signal.siginterrupt(number, False)
    try:
        return await task
    except asyncio.CancelledError:
        if _caught:
            raise SignalError(_caught[0]) from None
        raise
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)  # which would, when the loop is closed, put Python's own in its place
            signal.signal(number, handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal end what blocks, such as a command that gives a secret, or a pipe that nobody reads or writes: the event
    loop, which waits for it, hears of no signal meanwhile. One of shortly before, of which the loop has not heard, ends it, too.
    """

    def stop(number: int, _: object) -> None:
        _caught.append(number)  # the loop hears of it later, and cancels what is given up by then
        raise SignalError(number)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        if _caught:
            raise SignalError(_caught[0])
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
            signal.siginterrupt(number, False)
