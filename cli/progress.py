"""Progress on stderr: a line that is drawn again and again on a terminal, or plain lines, or nothing.

Work that is over in an instant shows nothing, and the library that draws is loaded only when something is drawn.
"""

import io
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Final, cast

from snapcore.errors import printable

from .output import count, size, takes_colours
from .runtime import Invocation

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from snapcore.model import Progress

__all__ = ["Course", "fitting", "progress"]

PATIENCE: Final = 0.5  # seconds before the first sign of life
REDRAWS_PER_SECOND: Final = 8
LINE_SECONDS: Final = 1.0  # between plain lines on a terminal
LOG_SECONDS: Final = 10.0  # between plain lines elsewhere
RATE_SECONDS: Final = 10.0  # over which a rate is taken
LEAST_RATE_SECONDS: Final = 0.5
MOST_BAR: Final = 30  # columns
LEAST_BAR: Final = 8


@contextmanager
def progress(
    invocation: Invocation, what: str, *, first: Callable[[], None] | None = None
) -> "Iterator[Callable[[Progress], None] | None]":
    """The callback to hand to the work; None when nobody would see it. What was drawn is gone when the block ends. `first` is
    called before anything is shown."""
    shown = _chosen(invocation, what, first or _nothing)
    if shown is None:
        yield None
        return
    try:
        yield shown.update
    finally:
        shown.stop()


def _nothing() -> None:
    """There is nothing to do before anything is shown."""


def _chosen(invocation: Invocation, what: str, first: Callable[[], None]) -> "_Lines | _Drawn | None":
    if invocation.quiet or invocation.progress == "none":
        return None
    on_terminal = sys.stderr.isatty()
    if on_terminal and invocation.progress == "auto" and os.environ.get("TERM") != "dumb":
        return _Drawn(what, first)
    if on_terminal or invocation.progress == "plain":
        return _Lines(what, LINE_SECONDS if on_terminal else LOG_SECONDS, first)
    return None


class Course:
    """How far work is, and how fast it goes, in words. Another thread may ask for them."""

    def __init__(self, what: str, now: float) -> None:
        self._what = what
        self._began = now
        self._seen: deque[tuple[float, int]] = deque()
        self._state: tuple[Progress, float, int] | None = None  # the last report; when the rate begins, with the bytes then

    def update(self, report: "Progress", now: float) -> None:
        """Take the work's next report; `now` is in seconds."""
        last = self._state[0] if self._state is not None else None
        if last is None or report.phase != last.phase or report.bytes < last.bytes:
            self._seen.clear()
        self._seen.append((now, report.bytes))
        while len(self._seen) > 2 and now - self._seen[1][0] > RATE_SECONDS:
            self._seen.popleft()
        self._state = (report, *self._seen[0])

    @property
    def share(self) -> float | None:
        """How much of the work is done, from 0 to 1; None when its size is not known."""
        if self._state is None:
            return None
        report = self._state[0]
        done, total = (report.bytes, report.total_bytes) if report.total_bytes else (report.files, report.total_files)
        return min(done / total, 1.0) if total else None

    def words(self, now: float) -> list[str]:
        """What to tell, the most important first: the work, how much is done, how fast, how long it takes."""
        if self._state is None:
            return [self._what]
        report, since, before = self._state
        parts = [self._what if report.phase == self._what else f"{self._what}: {report.phase}"]
        if report.total_files:
            parts.append(f"{report.files:,} of {count(report.total_files, report.unit)}")
        elif report.files:
            parts.append(count(report.files, report.unit))
        if report.bytes or report.total_bytes:
            parts.append(size(report.bytes) + (f" of {size(report.total_bytes)}" if report.total_bytes else ""))
        rate = (report.bytes - before) / (now - since) if now - since >= LEAST_RATE_SECONDS else 0.0
        if rate:
            parts.append(f"{size(round(rate))}/s")
        if rate and report.total_bytes:
            parts.append(f"{_clock(max(report.total_bytes - report.bytes, 0) / rate)} left")
        else:
            parts.append(_clock(now - self._began))
        return [printable(part) for part in parts]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def fitting(words: list[str], columns: int) -> str:
    """As many of the parts as fit into one line, the first ones first."""
    line = ""
    for word in words:
        longer = f"{line}  {word}" if line else word
        if len(longer) > columns:
            break
        line = longer
    return line or words[0][:columns]


class _Lines:
    """Lines, one now and then."""

    def __init__(self, what: str, seconds: float, first: Callable[[], None]) -> None:
        self._seconds = seconds
        self._first = first
        now = time.monotonic()
        self._course = Course(what, now)
        self._due = now + PATIENCE
        self._told = ""

    def update(self, report: "Progress") -> None:
        now = time.monotonic()
        self._course.update(report, now)
        if now >= self._due:
            self._due = now + self._seconds
            self._tell(now)

    def stop(self) -> None:
        """The last line, if there was one before."""
        if self._told:
            self._tell(time.monotonic())

    def _tell(self, now: float) -> None:
        share = self._course.share
        words = self._course.words(now)
        line = ", ".join([words[0], *([f"{share:.0%}"] if share is not None else []), *words[1:]])
        if line != self._told:
            if not self._told:
                self._first()
            self._told = line
            _write(line + "\n")


def _write(text: str) -> None:
    """Write to stderr, which may be full or gone: that nobody sees how far work is does not stop it, and is no failure. Past
    Python's buffer, in which what could not be written would stay and fail again."""
    with suppress(OSError):
        sys.stderr.flush()
        os.write(sys.stderr.fileno(), text.encode(sys.stderr.encoding, "backslashreplace"))


class _Drawn:
    """One line at the bottom of a terminal, drawn again and again."""

    def __init__(self, what: str, first: Callable[[], None]) -> None:
        now = time.monotonic()
        self._began = now
        self._first = first
        self._course = Course(what, now)
        self._live: Live | None = None

    def update(self, report: "Progress") -> None:
        now = time.monotonic()
        self._course.update(report, now)
        if self._live is None and now - self._began >= PATIENCE:
            self._first()
            self._live = _live(self._course)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()


class _Terminal(io.TextIOBase):
    """stderr, whose failures are nobody's business."""

    def isatty(self) -> bool:
        return sys.stderr.isatty()

    def fileno(self) -> int:
        return sys.stderr.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stderr.encoding

    def write(self, text: str) -> int:
        _write(text)
        return len(text)


def _live(course: Course) -> "Live":
    from rich.console import Console
    from rich.live import Live

    colours = takes_colours()
    console = Console(file=cast("IO[str]", _Terminal()), no_color=not colours, highlight=False, markup=False, emoji=False)
    bar = ("━", "━") if colours else ("━", "─")
    if not (sys.stderr.encoding or "").lower().startswith("utf"):
        bar = ("#", ".")
    live = Live(
        console=console,
        get_renderable=lambda: _line(course, console.width, *bar),
        refresh_per_second=REDRAWS_PER_SECOND,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    live.start()
    console.show_cursor(True)  # a process that is killed could not bring it back
    return live


def _line(course: Course, columns: int, full: str, empty: str) -> "Text":
    """The parts that fit, with a bar where there is room for one."""
    from rich.text import Text

    words = course.words(time.monotonic())
    line = fitting(words, columns - 1)
    share = course.share
    length = min(columns - 1 - len(line) - 2, MOST_BAR)
    if share is None or length < LEAST_BAR:
        return Text(line, no_wrap=True)
    done = round(share * length)
    text = Text(f"{words[0]}  ", no_wrap=True)
    text.append(full * done, style="green")
    text.append(empty * (length - done), style="bright_black")
    text.append(line[len(words[0]) :])
    return text
