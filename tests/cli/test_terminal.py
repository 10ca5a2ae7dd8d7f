"""What is safe to run alone and to look at: pipes that nobody reads, signals at any moment, names that could steer a terminal,
errors with a hint."""

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from snapcore.cli.hints import HINTS
from snapcore.cli.output import columns, print_error, print_table
from snapcore.errors import Code, SnapcoreError

from .conftest import Run

PROGRAM: Final = (sys.executable, "-m", "snapcore.cli")
EVIL: Final = (
    "\x1b[31mred\x07\rover\u202e\u200b\x9b2J"  # colours, a bell, an overwritten line, text from the right, a CSI of 8 bits
)
CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e]")

# Commands that print something, of the repository that `made` has; {tree} is its folder.
PRINTING: Final = (
    "list -t t",
    "list -t t --json",
    "threads",
    "show two",
    "show two --json",
    "ls two",
    "ls two -v",
    "ls two --json",
    "cat two:notes.txt",
    "diff one two",
    "diff one two --json",
    "stats",
    "verify",
    "gc --dry-run",
    "repair",
    "forget -t t --keep-last 1 --dry-run",
    "restore {tree} -t t --dry-run",
    "capture {tree} -t t",
    "fork -t t --to u",
    "label two x -t t",
    "delete one -t t --dry-run",
    "export two",
    "completion bash",
    "completion zsh -- ca",
    "help capture",
    "--version",
    "config",
)


@pytest.mark.parametrize("line", PRINTING)
def test_nobody_reads(made: Run, tree: Path, line: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        words = [word.format(tree=tree) for word in line.split()]
        done = subprocess.run([*PROGRAM, *words], stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_modules_are_loaded_is_quiet(number: signal.Signals, tmp_path: Path) -> None:
    """A module that is loaded early waits, and says that it does: the process is in the middle of its start then."""
    (tmp_path / "typer.py").write_text("import sys, time\nsys.stdout.write('here\\n')\nsys.stdout.flush()\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [*PROGRAM, "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (-number, b"")


# Before that, the interpreter is at work, and Python's own way with an interruption.
BEGUN: Final = "import signal, snapcore.cli.main as m; signal.signal(signal.SIGINT, signal.SIG_DFL); print(flush=True); m.run()"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_at_any_moment_leave_nothing_half_done(
    made: Run, repo: Path, tree: Path, number: signal.Signals, code: int
) -> None:
    """At eight moments of a capture: it ends as it should, holds no lease, and left no checkpoint or a whole one."""
    (tree / "large").write_bytes(os.urandom(8 << 20))
    for moment in range(8):
        command = [sys.executable, "-c", BEGUN, "capture", str(tree), "--thread", f"thread-{moment}", "--reread"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(moment * 0.15)  # whichever moment it is
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode in (0, code, -number), stderr
        assert b"Traceback" not in stderr
        with contextlib.closing(sqlite3.connect(repo / "snapcore.db")) as database:
            assert database.execute("SELECT count(*) FROM writer_leases").fetchone() == (0,)
    assert made("verify", "--read-data", "--json").json["ok"] is True


# ---- names


def test_no_name_steers_the_terminal(run: Run, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.setitimer", lambda *_: None)  # completion's, which would end this process
    run("init")
    folder = tree / EVIL
    folder.mkdir()
    (folder / EVIL).write_text("first\n")
    (tree / f"{EVIL} link").symlink_to(f"{EVIL}/{EVIL}")
    run("capture", str(tree), "--thread", "t", "--id", "one")
    (folder / EVIL).write_text("second\n")
    (folder / f"{EVIL} new").write_text(f"{EVIL}\n")
    os.mkfifo(tree / f"{EVIL} pipe")
    assert run("capture", str(tree), "--thread", "t", "--id", "two", "--on-unsupported", "skip", "-v", code=3)
    shown: tuple[tuple[str, ...], ...] = (
        ("list", "-t", "t"),
        ("show", "two"),
        ("ls", "two"),
        ("ls", "two", "-v"),
        ("diff", "one", "two"),
        ("restore", str(tmp_path / "elsewhere"), "-t", "t", "--dry-run"),
        ("ls", f"two:{EVIL}"),
        ("completion", "zsh", "--", "ls", "two:"),
    )
    for words in shown:
        outcome = run(*words)
        assert not CONTROL.search(outcome.text.replace("\t", "") + outcome.stderr), words
    refused: tuple[tuple[tuple[str, ...], int], ...] = (
        (("capture", str(tree), "-t", "t"), 1),
        (("cat", f"two:{EVIL}x"), 1),
        (("show", EVIL), 2),
        (("list", "-t", EVIL), 2),
        (("capture", EVIL, "-t", "t"), 1),
        (("verify", "--read-data-subset", EVIL), 2),
        (("list", "-t", "t", "--repo", f"s3x://{EVIL}"), 2),
        (("capture", str(tree), "-t", "t", "--on-torn", EVIL), 2),
        (("import", EVIL, "-t", "t"), 1),
        (("gc", "--grace", EVIL), 2),
    )
    for words, code in refused:
        outcome = run(*words, code=code)
        assert not CONTROL.search(outcome.text + outcome.stderr), words


def test_columns_of_wide_and_of_combining_letters(capsys: pytest.CaptureFixture[str]) -> None:
    assert [columns(text) for text in ("plain", "日本", "e\u0301", "🚀", "café")] == [5, 4, 1, 2, 4]
    print_table(("NAME", "SIZE"), [("日本語", "1 B"), ("e\u0301", "10 B"), ("🚀 x", "2 B"), ("plain", "3 B")], right=(1,))
    ends = {columns(line) for line in capsys.readouterr().out.splitlines()}
    assert len(ends) == 1


# ---- errors


def test_each_code_has_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(HINTS) == set(Code)
    for code, hint in HINTS.items():
        print_error(SnapcoreError("It did not work.", code=code), as_json=False)
        assert capsys.readouterr().err == f"snapcore: It did not work. [{code}]\n  {hint}\n"
    print_error(SnapcoreError("It did not work.", code=Code.DAMAGED, hint="Its own."), as_json=True)
    assert '"hint": "Its own."' in capsys.readouterr().err


def test_each_code_is_explained_with_what_to_do() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    rows = {cells[1].strip(" `"): cells[-2].strip() for cells in (row.split("|") for row in page.splitlines()) if len(cells) > 4}
    assert {code: rows[code] for code in Code if not rows.get(code)} == {}


BROKEN: Final = """
import snapcore.cli.main as m, snapcore.repository as r
async def broken(self, *args): raise RuntimeError("token-0123456789")
r.Repository.list = broken
m.run()
"""


def test_what_nobody_foresaw_is_told_in_a_line(made: Run) -> None:
    def outcome(*more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", BROKEN, "list", "--thread", "t", *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = outcome()
    assert (done.returncode, done.stdout) == (1, "")
    first, second = done.stderr.splitlines()
    assert re.match(r"snapcore: An unforeseen RuntimeError in .*, line \d+\. \[INTERNAL\]$", first)
    assert "--debug" in second
    assert "token" not in done.stderr
    assert '"code": "INTERNAL"' in outcome("--json").stderr
    assert "Traceback" in outcome("--debug").stderr
