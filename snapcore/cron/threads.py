"""Work that may never end, such as to look into a disk that does not answer: nothing else waits for it, not even the end of the
process."""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["apart", "end_process_after"]

P = ParamSpec("P")
T = TypeVar("T")


async def apart(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work`, which has a thread of its own. A cancelled caller leaves it behind."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]  # one of the two is there

    def run() -> None:
        value, problem = None, None
        try:
            value = work(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # it is raised where it is waited for
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, problem)

    threading.Thread(target=run, daemon=True, name="snapcore-apart").start()
    return await result


def end_process_after(seconds: float, code: int, tell: Callable[[], None]) -> None:
    """Should this process still be there after so many seconds, call `tell`, write what is left of the log, and end it with a
    code. Nothing that the process holds is given back, as when it is killed."""

    def end() -> None:
        try:
            tell()
            logging.shutdown()
        finally:
            os._exit(code)

    last_resort = threading.Timer(seconds, end)
    last_resort.daemon = True
    last_resort.start()
