"""Progress: drawn on a terminal, written as lines where that is asked for, and never anywhere else."""

import gzip
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from fcntl import ioctl
from pathlib import Path
from typing import Final

import pytest

from snapcore.cli.progress import Course, fitting, progress
from snapcore.cli.runtime import Invocation
from snapcore.model import Progress

from .conftest import Run

AT_ONCE: Final = "import snapcore.cli.progress as p; p.PATIENCE = 0; p.LINE_SECONDS = 0; p.LOG_SECONDS = 0"
COMMAND: Final = (sys.executable, "-c", f"{AT_ONCE}; import snapcore.cli.main as m; m.run()")


# ---- the words


def told(*reports: tuple[float, Progress]) -> list[str]:
    course = Course("restore", 0.0)
    for now, report in reports:
        course.update(report, now)
    return course.words(reports[-1][0])


def test_what_is_done_of_how_much_how_fast_and_how_long_it_takes() -> None:
    half = Progress("restore", 100, 50_000_000, 200, 100_000_000)
    assert told((0.0, Progress("restore", 0, 0, 200, 100_000_000)), (5.0, half)) == [
        "restore",
        "100 of 200 files",
        "50.0 MB of 100.0 MB",
        "10.0 MB/s",
        "0:05 left",
    ]


def test_without_a_total_the_time_that_has_passed_is_told() -> None:
    assert told((0.0, Progress("restore")), (65.0, Progress("restore", 1))) == ["restore", "1 file", "1:05"]
    assert told((0.0, Progress("mark", 2_000, unit="record")))[:2] == ["restore: mark", "2,000 records"]
    assert told((3_600.0, Progress("look", 1, total_files=1, unit="pack")))[1:] == ["1 of 1 pack", "1:00:00"]


def test_each_phase_has_its_own_rate() -> None:
    first = [(float(now), Progress("read", bytes=now * 1_000_000)) for now in range(4)]
    then = [(4.0, Progress("write", bytes=0)), (6.0, Progress("write", bytes=10_000_000))]
    assert "5.0 MB/s" in told(*first, *then)


def test_a_rate_is_that_of_the_last_seconds() -> None:
    slow = [(float(now), Progress("read", bytes=now)) for now in range(100)]
    fast = [(100.0 + now, Progress("read", bytes=100 + now * 1_000_000)) for now in range(1, 13)]
    assert "1.0 MB/s" in told(*slow, *fast)


def test_what_does_not_fit_is_left_out_from_the_end() -> None:
    words = ["restore", "100 of 200 files", "50.0 MB of 100.0 MB", "10.0 MB/s", "0:05 left"]
    assert fitting(words, 200).endswith("0:05 left")
    assert fitting(words, 40) == "restore  100 of 200 files"
    assert fitting(words, 3) == "res"


def test_words_cannot_steer_the_terminal() -> None:
    assert told((0.0, Progress("\x1b[31mred", 1)))[0] == r"restore: \x1b[31mred"


# ---- where it is shown


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The lines of work that reports at some times, in seconds."""

    def work(seconds: list[float], *, how: str = "plain", on_terminal: bool = False, quiet: bool = False) -> list[str]:
        clock = [0.0]
        with monkeypatch.context() as patch, open(tmp_path / "stderr", "w+") as stderr:
            patch.setattr(sys, "stderr", stderr)
            patch.setattr(stderr, "isatty", lambda: on_terminal)
            patch.setattr("snapcore.cli.progress.time.monotonic", lambda: clock[0])
            patch.setenv("SNAPCORE_PROGRESS", how)
            with progress(Invocation(quiet=quiet), "gc") as update:
                for number, now in enumerate(seconds):
                    clock[0] = now
                    if update is not None:
                        update(Progress("gc", number + 1, total_files=10, unit="record"))
        return (tmp_path / "stderr").read_text().splitlines()

    return work


def test_lines_come_after_a_while_now_and_then_and_in_the_end(shown: Callable[..., list[str]]) -> None:
    assert shown([0.1, 0.4, 0.6, 5.0, 10.0, 10.7, 12.0]) == [
        "gc, 30%, 3 of 10 records, 0:01",
        "gc, 60%, 6 of 10 records, 0:11",
        "gc, 70%, 7 of 10 records, 0:12",
    ]


def test_on_a_terminal_lines_come_each_second(shown: Callable[..., list[str]]) -> None:
    assert len(shown([0.6, 1.0, 1.7, 1.8], on_terminal=True)) == 3


def test_what_is_over_soon_writes_nothing(shown: Callable[..., list[str]]) -> None:
    assert shown([0.1, 0.4]) == []


def test_where_nothing_is_to_be_shown_nothing_is(shown: Callable[..., list[str]]) -> None:
    assert shown([0.6, 20.0, 40.0], how="none") == []
    assert shown([0.6, 20.0, 40.0], how="none", on_terminal=True) == []
    assert shown([0.6, 20.0, 40.0], how="auto") == []
    assert shown([0.6, 20.0, 40.0], quiet=True) == []


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_a_stream_that_is_full_or_closed_stops_nothing(made: Run, redirection: str) -> None:
    script = f'"$@" verify --read-data --progress plain {redirection}'
    done = subprocess.run(["sh", "-c", script, "sh", *COMMAND], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"no problem found" in done.stdout


# ---- on a real terminal


class Terminal:
    """A terminal of some width, as stderr of a command."""

    def __init__(self, columns: int) -> None:
        self.main, self.secondary = pty.openpty()
        ioctl(self.secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.shown = b""

    def start(
        self, *args: str, env: Mapping[str, str] | None = None, stdin: int = subprocess.DEVNULL
    ) -> "subprocess.Popen[bytes]":
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        return subprocess.Popen(
            [*COMMAND, *args],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=self.secondary,
            env={**environment, "TERM": "xterm-256color", "PYTHONUTF8": "1", **(env or {})},
        )

    def run(self, *args: str, code: int = 0, env: Mapping[str, str] | None = None) -> bytes:
        """What the command wrote to stdout; what is shown is kept in `shown`."""
        process = self.start(*args, env=env)
        assert process.stdout is not None
        while process.poll() is None:
            self.read()
        self.read()
        assert process.returncode == code, self.shown
        with process.stdout:
            return process.stdout.read()

    def read(self, timeout: float = 0.05) -> None:
        if select.select([self.main], [], [], timeout)[0]:
            self.shown += os.read(self.main, 1 << 16)

    def until(self, reached: Callable[[bytes], bool]) -> None:
        deadline = time.monotonic() + 60
        while not reached(self.shown):
            assert time.monotonic() < deadline, self.shown
            self.read(1)

    def close(self) -> None:
        os.close(self.main)
        os.close(self.secondary)


@pytest.fixture
def terminal() -> Iterator[Callable[[int], Terminal]]:
    made: list[Terminal] = []

    def make(columns: int = 80) -> Terminal:
        made.append(Terminal(columns))
        return made[-1]

    yield make
    for each in made:
        each.close()


def plain(shown: bytes) -> list[str]:
    """The lines that were drawn, without what moves the cursor and colours."""
    return [
        line for line in re.split(r"\r|\n|\x1b\[2K|\x1b\[1A", re.sub(r"\x1b\[[0-9;?]*[mhl]", "", shown.decode())) if line.strip()
    ]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_it_is_drawn_within_the_width_and_gone_in_the_end(made: Run, terminal: Callable[[int], Terminal], columns: int) -> None:
    screen = terminal(columns)
    piped = subprocess.run([*COMMAND, "verify", "--read-data"], capture_output=True, check=True)
    assert piped.stderr == b""
    assert screen.run("verify", "--read-data") == piped.stdout
    lines = plain(screen.shown)
    assert any(line.startswith("verify") for line in lines)
    assert max(map(len, lines)) < columns
    assert b"\x1b[2K" in screen.shown
    assert screen.shown.rindex(b"\x1b[2K") > screen.shown.rindex(b"verify")  # the last line was erased
    assert screen.shown.index(b"\x1b[?25h") < screen.shown.rindex(b"verify")  # a killed process would leave the cursor


def test_without_colours(made: Run, terminal: Callable[[int], Terminal]) -> None:
    for variables in ({"NO_COLOR": "1"}, {"CLICOLOR": "0"}):
        screen = terminal(80)
        screen.run("verify", "--read-data", env=variables)
        assert b"verify" in screen.shown
        assert not re.search(rb"\x1b\[(3|4|9|10)[0-9]", screen.shown)
    screen = terminal(80)
    screen.run("verify", "--read-data")
    assert re.search(rb"\x1b\[(3|9)[0-9]", screen.shown)


def test_a_terminal_that_can_do_nothing_gets_lines(made: Run, terminal: Callable[[int], Terminal]) -> None:
    screen = terminal(80)
    screen.run("verify", "--read-data", env={"TERM": "dumb"})
    assert b"verify: read" in screen.shown
    assert b"\x1b" not in screen.shown


@pytest.mark.parametrize("option", [["--progress", "none"], ["--quiet"]])
def test_nothing_on_a_terminal(made: Run, terminal: Callable[[int], Terminal], option: list[str]) -> None:
    screen = terminal(80)
    screen.run("verify", "--read-data", *option)
    assert screen.shown == b""


def test_plain_lines_without_a_terminal_have_no_escapes(made: Run, tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "verify", "--read-data", "--progress", "plain"], capture_output=True, check=True)
    assert re.match(rb"verify: look, 100%, 1 of 1 pack", done.stderr) or b"verify: read" in done.stderr
    assert b"\x1b" not in done.stderr + done.stdout


def test_an_error_stands_alone(made: Run, terminal: Callable[[int], Terminal], tmp_path: Path) -> None:
    """What was drawn is gone before the error is told."""
    archive = tmp_path / "broken.tar.gz"
    made("export", "--thread", "t", "-o", str(archive))
    archive.write_bytes(archive.read_bytes()[:-20])
    screen = terminal(80)
    screen.run("import", str(archive), "--thread", "u", code=1)
    last = screen.shown.rpartition(b"\x1b[2K")[2]
    assert b"[INVALID_ARCHIVE]" in last


@pytest.mark.parametrize("options", [[], ["--no-record"]])
def test_around_a_command_it_does_not_touch_what_the_command_wrote(
    made: Run, terminal: Callable[[int], Terminal], tree: Path, options: list[str]
) -> None:
    screen = terminal(80)
    words = ["--before", "--restore", "one", "--checkpoint", "--", "sh", "-c", "echo >changed; printf unfinished >&2"]
    screen.run("exec", str(tree), "--thread", "t", "--no-stdin", *options, *words)
    before, after = screen.shown.split(b"unfinished")
    assert [line for line in plain(before) if line.startswith("restore")]
    assert [line for line in plain(before) if line.startswith("checkpoint")]
    assert [line for line in plain(after) if line.startswith("checkpoint")]
    assert after.startswith(b"\r\n")
    assert after.rpartition(b"\x1b[2K")[2].strip().endswith(b"after the command")
    assert before.rpartition(b"\x1b[2K")[2].strip() == b""  # the line of before is gone


def test_an_interruption_leaves_a_clean_line(made: Run, terminal: Callable[[int], Terminal]) -> None:
    """Also while an archive comes in, which is before anything else of an import."""
    screen = terminal(80)
    read, write = os.pipe()
    process = screen.start("import", "-", "--thread", "u", stdin=read)
    os.close(read)
    try:
        os.write(write, gzip.compress(os.urandom(9 << 20), 1))  # more than is copied in one go, and not all
        screen.until(lambda shown: b"import: unpack" in shown)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        os.close(write)
        process.kill()
    screen.read()
    assert process.returncode == 130
    assert screen.shown.rpartition(b"\x1b[2K")[2].strip().endswith(b"interrupted")
