"""What needs a process of its own: start-up, signals, pipes, terminals."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from snapcore.cli.signals import SignalError, interruptible, with_signals

from .conftest import Run, spawn

HEAVY = {"sqlalchemy", "alembic", "rich", "pathspec", "pydantic", "boto3", "docker"}


def modules_of(*args: str) -> set[str]:
    """The modules that the command loads."""
    command = [sys.executable, "-X", "importtime", "-m", "snapcore.cli", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_help_loads_nothing_heavy() -> None:
    loaded = modules_of("--help")
    assert "typer" in loaded
    assert not loaded & HEAVY


def test_a_local_capture_loads_nothing_that_it_does_not_use(run: Run, tree: Path) -> None:
    run("init")
    loaded = modules_of("capture", str(tree), "--thread", "t", "--step", "1", "--label", "L")
    assert "snapcore.capturing" in loaded
    assert not loaded & {"rich", "alembic", "pydantic", "boto3", "docker", "sqlalchemy.ext.asyncio"}
    assert not loaded & {"email", "zipfile"}  # importlib.metadata loads these, which SQLAlchemy imports
    assert not loaded & {"snapcore.restoring", "snapcore.browse", "snapcore.verification"}


def test_the_installed_command_runs(repo: Path) -> None:
    command = Path(sys.executable).with_name("snapcore")
    done = subprocess.run([command, "init", "--json"], capture_output=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["message_type"]) == (0, "init")


def leases(repo: Path) -> int:
    """How many writer leases there are; one that was given up has no row."""
    with contextlib.closing(sqlite3.connect(repo / "snapcore.db")) as database:
        return int(database.execute("SELECT count(*) FROM writer_leases").fetchone()[0])


@pytest.mark.parametrize(
    ("number", "code", "quiet"), [(signal.SIGINT, 130, []), (signal.SIGTERM, 143, []), (signal.SIGTERM, 143, ["-q"])]
)
def test_a_signal_ends_a_capture_and_gives_up_the_lease(
    run: Run, repo: Path, tree: Path, tmp_path: Path, number: signal.Signals, code: int, quiet: list[str]
) -> None:
    run("init")
    with open(tree / "big", "wb") as file:
        file.writelines(os.urandom(1 << 20) for _ in range(160))
    process = spawn("capture", str(tree), "--thread", "t", *quiet)
    try:
        while leases(repo) == 0:
            assert process.poll() is None, process.communicate()
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert stderr == (b"" if quiet else b"interrupted\n")
    assert leases(repo) == 0
    assert run("list", "--thread", "t", "--json").json == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_just_before_something_blocks_ends_it_too(number: signal.Signals) -> None:
    async def work() -> int:
        signal.raise_signal(number)  # the event loop is not asked before this function waits for something
        with interruptible():
            raise AssertionError("this would block until it is done")

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SignalError) as caught:
            asyncio.run(with_signals(work))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert caught.value.number == number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_when_all_is_done_ends_the_process_quietly(number: signal.Signals) -> None:
    late = f"import os; leave = os._exit; os._exit = lambda code: (os.kill(os.getpid(), {number:d}), leave(code))"
    script = f"{late}; import snapcore.cli.main as m; m.run()"
    done = subprocess.run([sys.executable, "-c", script, "config", "--no-config", "-q"], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-number, b"", b"")  # a shell has 130 and 143 for these


def test_a_reader_that_goes_away_is_no_error_to_talk_about(run: Run, tree: Path) -> None:
    run("init")
    for number in range(3000):
        (tree / f"a-file-with-a-rather-long-name-{number:06}").write_bytes(b"")
    run("capture", str(tree), "--thread", "t")
    process = spawn("ls", "latest", "--thread", "t")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert stderr == b""


def test_progress_is_for_terminals(run: Run, tree: Path) -> None:
    run("init")
    run("capture", str(tree), "--thread", "t")
    code = "import snapcore.cli.progress as p; p.PATIENCE = 0; import snapcore.cli.main as m; m.run()"
    command = [sys.executable, "-c", code, "verify", "--read-data"]
    piped = subprocess.run(command, capture_output=True, check=True)
    assert piped.stderr == b""
    main, secondary = pty.openpty()
    try:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=secondary, env=environment, check=True)
        os.set_blocking(main, False)
        shown = os.read(main, 1 << 16)
    finally:
        os.close(main)
        os.close(secondary)
    assert b"verify" in shown
    assert done.stdout == piped.stdout


def test_output_that_the_terminals_encoding_lacks_is_escaped(run: Run, tree: Path) -> None:
    run("init")
    (tree / "snow☃").write_bytes(b"")
    run("capture", str(tree), "--thread", "t")
    process = spawn("ls", "latest", "--thread", "t", env={"PYTHONIOENCODING": "latin-1:strict"})
    stdout, _ = process.communicate()
    assert process.returncode == 0
    assert b"snow\\u2603" in stdout


def test_a_full_disk_under_stdout_is_a_failure_in_words(run: Run, tree: Path) -> None:
    run("init")
    for number in range(300):
        (tree / f"a-file-with-a-rather-long-name-{number:06}").write_bytes(b"")
    run("capture", str(tree), "--thread", "t")
    command = [sys.executable, "-m", "snapcore.cli", "ls", "latest", "--thread", "t"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
        as_json = subprocess.run([*command, "--json"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == as_json.returncode == 1
    assert b"No space left" in done.stderr
    assert b"[SYSTEM]" in done.stderr
    assert b"Traceback" not in done.stderr
    error = json.loads(as_json.stderr)
    assert (error["message_type"], error["code"], error["retryable"]) == ("error", "SYSTEM", False)
    assert "No space left" in error["message"]
    assert error["hint"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lose_the_output_and_nothing_else(run: Run, tree: Path, tmp_path: Path, closed: str) -> None:
    run("init")
    log = tmp_path / "log"

    def code_of(*args: str) -> int:
        command = ["sh", "-c", f'exec 3>&-; exec "$@" {closed}', "sh", sys.executable, "-m", "snapcore.cli", *args]
        with open(log, "ab") as file:
            return subprocess.run(command, stdout=file, stderr=file, check=False).returncode

    assert code_of("capture", str(tree), "--thread", "t") == 0
    assert code_of("ls", "latest", "--thread", "t") == 0
    assert code_of("cat", "latest:notes.txt", "--thread", "t") == 0
    assert code_of("show", "latest", "--thread", "none") == 1
    assert code_of("no-such-command") == 2
    assert code_of("--help") == 0
    assert b"Traceback" not in log.read_bytes()
    assert len(run("list", "--thread", "t", "--json").json) == 1
    assert run("verify", "--read-data", "--json").json["ok"] is True


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("list", "--thread", "t"), 10),
        (("list",), 2),
        (("list", "--no-such-option"), 2),
        (("exec", "/nowhere", "--", "true"), 125),
    ],
)
def test_an_error_that_cannot_be_told_keeps_its_exit_code(repo: Path, args: tuple[str, ...], code: int) -> None:
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-m", "snapcore.cli", *args], stderr=full, check=False).returncode == code


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("capture", "--help")])
def test_help_onto_a_full_disk_fails_in_one_line(args: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "snapcore.cli", *args]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
        silent = subprocess.run(command, stdout=full, stderr=full, check=False)
    assert done.returncode == 1
    assert b"No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert silent.returncode == 1


def test_help_that_nobody_reads_ends_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "snapcore.cli", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
