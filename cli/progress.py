"""Progress on stderr, for a terminal only. Work that is over in an instant never loads the library that draws it."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from .runtime import Invocation

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress as Display
    from rich.progress import TaskID

    from snapcore.model import Progress

__all__ = ["progress"]

PATIENCE: Final = 0.5  # seconds before the first sign of life


@contextmanager
def progress(invocation: Invocation, what: str) -> "Iterator[Callable[[Progress], None] | None]":
    """The callback to hand to the work; None when nobody would see it."""
    if invocation.quiet or not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(what)
    try:
        yield bar.update
    finally:
        bar.stop()


class _Bar:
    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._display: Display | None = None
        self._task: TaskID | None = None

    def update(self, report: "Progress") -> None:
        if self._display is None or self._task is None:
            if time.monotonic() - self._started < PATIENCE:
                return
            self._display = _display()
            self._display.start()
            self._task = self._display.add_task(self._what, total=None, files=0)
        self._display.update(
            self._task,
            description=f"{self._what}: {report.phase}",
            completed=report.bytes,
            total=report.total_bytes,
            files=report.files,
        )

    def stop(self) -> None:
        if self._display is not None:
            self._display.stop()


def _display() -> "Display":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[files]:,} files", markup=False),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
