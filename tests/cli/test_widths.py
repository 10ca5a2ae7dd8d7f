"""What the command shows on terminals of 80 and of 120 columns, whatever threads and labels are called."""

from pathlib import Path

import pytest

from snapcore.cli.output import columns, shortened

from .conftest import Run

THREAD = f"research-agent-of-a-team-with-a-long-name/task-{'0' * 80}1"
LABEL = "after installing all of the dependencies, before the first change: 日本語のとても長いラベル" + "." * 60

TABLES = (
    ("list", "--thread", THREAD),
    ("threads",),
    ("stats", "--threads", "--checkpoints"),
    ("forget", "--all", "--keep-last", "1", "--dry-run"),
)


@pytest.fixture
def long(run: Run, tree: Path) -> Run:
    run("init")
    run("capture", str(tree), "--thread", THREAD, "--label", LABEL)
    (tree / ("a-file-with-a-name-" * 8)).write_bytes(b"1\n")
    run("capture", str(tree), "--thread", THREAD)
    return run


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal_and_are_whole_elsewhere(long: Run, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for words in TABLES:
        shown = long(*words, terminal=True).text
        assert max(map(columns, shown.splitlines())) <= width, words
        assert "…" in shown
        whole = long(*words).text
        assert THREAD in whole or LABEL in whole
        assert "…" not in whole + long(*words, "-v", terminal=True).text


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_a_diff_fits_the_terminal(long: Run, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(columns, long("diff", "latest", "-t", THREAD, "--stat", terminal=True).text.splitlines())) <= width


def test_what_is_too_long_loses_its_middle() -> None:
    assert shortened("short", 5) == "short"
    assert shortened("agent/task-000001", 9) == "agen…0001"
    assert shortened("日本語のラベル", 8) == "日本…ル"
    for width in range(6, 30):
        assert width - 1 <= columns(shortened("日本語 and some 日本語 of letters e\u0301", width)) <= width


def test_a_log_has_what_an_event_was_about_below_it_on_a_narrow_terminal(
    long: Run, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long("exec", str(tree), "--thread", "t", "--", "echo", "hello")
    lines = long("log", "t", terminal=True).text.splitlines()
    (at,) = (number for number, line in enumerate(lines) if "exec.completed  exit 0" in line)
    assert lines[at + 1] == " " * 10 + "echo hello"
    assert len(long("log", "t").text.splitlines()) * 2 == len(lines)


def test_a_log_of_a_thread_without_sessions_says_so(made: Run) -> None:
    for thread in ("t", "none"):
        said = f"Nothing was recorded for thread {thread}: sessions and 'snapcore exec' record what they do.\n"
        assert made("log", thread).text == said
        assert made("log", thread, "--json").text == ""
