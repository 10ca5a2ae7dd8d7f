"""Lines that go to a stream without anybody waiting for it: a log that nobody reads must not stop captures."""

import collections
import contextlib
import io
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final, TextIO

__all__ = ["LineWriter"]

MAX_WAITING: Final = 4 << 20  # bytes
LAST_SECONDS: Final = 2.0  # for what is left when the process ends


class LineWriter:
    """Writes lines on a thread of its own. What the stream does not take in time, or refuses, is lost and counted; `lost` makes
    the line that tells how many were, as soon as the stream takes lines again."""

    def __init__(self, stream: TextIO, lost: Callable[[int], str]) -> None:
        self._write = _writing(stream)
        self._lost_line = lost
        self._lines: collections.deque[bytes] = collections.deque()
        self._waiting = 0  # bytes, with those that are being written
        self._lost = 0
        self._is_broken_off = False  # in the middle of a line
        self._ended = False
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Write a line some time. Never waits for the stream."""
        data = f"{line}\n".encode(errors="backslashreplace")
        with self._more:
            if self._waiting + len(data) > MAX_WAITING:
                self._lost += 1
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="snapcore-log")
                self._thread.start()
            self._lines.append(data)
            self._waiting += len(data)
            self._more.notify_all()

    def close(self) -> None:
        """Wait for what is left, but not for long."""
        deadline = time.monotonic() + LAST_SECONDS
        with self._more:
            self._ended = True
            self._more.notify_all()
            while self._waiting and (left := deadline - time.monotonic()) > 0:
                self._more.wait(left)

    def _work(self) -> None:
        while True:
            with self._more:
                while not self._lines and not self._ended:
                    self._more.wait()
                if not self._lines:
                    return
                line = self._lines.popleft()
            written = self._has_written(line)
            with self._more:
                self._lost += not written
                lost = self._lost if written and not self._lines else 0  # it came after all that waited
            told = lost > 0 and self._has_written(f"{self._lost_line(lost)}\n".encode(errors="backslashreplace"))
            with self._more:
                self._lost -= lost if told else 0
                self._waiting -= len(line)
                self._more.notify_all()

    def _has_written(self, line: bytes) -> bool:
        left = memoryview(b"\n" + line if self._is_broken_off else line)
        begun = False
        try:
            while left:
                left = left[self._write(left) :]
                begun = True
        except (OSError, ValueError):  # full, or closed
            self._is_broken_off |= begun
            return False
        self._is_broken_off = False
        return True


def _writing(stream: TextIO) -> Callable[[memoryview], int]:
    """What writes some bytes to a stream and says how many. A descriptor is written to directly: the end of the process flushes
    the stream, and would wait for this thread in it."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, io.UnsupportedOperation):

        def write(data: memoryview) -> int:
            stream.write(str(data, "utf-8"))
            stream.flush()
            return len(data)

        return write

    def write_directly(data: memoryview) -> int:
        while True:
            with contextlib.suppress(BlockingIOError):  # somebody has made it so who has it, too
                return os.write(descriptor, data)
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()

    return write_directly
