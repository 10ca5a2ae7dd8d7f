"""`--secret-command` and secrets that come through pipes, in processes of their own: what is asked for, and what ends them."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Run, spawn

CANARY = "hunter2-canary"
PATIENCE = 60  # seconds for what takes a fraction of one


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes] | None" = None) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def is_gone(number: int) -> bool:
    """Whether a process has ended, also when whoever inherited it has not asked how."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_command_ends_both_and_what_the_command_started(
    run: Run, repo: Path, tree: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run("init")
    pid = tmp_path / "pid"
    script = tmp_path / "slow"
    script.write_text(f"#!/bin/sh\necho {CANARY}\nsleep 600 &\necho $$ $! > {shlex.quote(str(pid))}\nwait\n")
    script.chmod(0o755)
    process = spawn("capture", str(tree), "--thread", "t", "--secret-command", f"TOKEN={script}")
    try:
        wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"), process)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (process.returncode, stdout, stderr) == (code, b"", b"interrupted\n")
    command, started = map(int, pid.read_text().split())
    assert is_gone(command)
    wait_for(lambda: is_gone(started))
    assert run("list", "--thread", "t", "--json").json == []


def test_a_signal_ends_the_wait_for_a_pipe_that_nobody_writes_into(run: Run, tree: Path, tmp_path: Path) -> None:
    run("init")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = spawn("capture", str(tree), "--thread", "t", "--secret-file", f"TOKEN={pipe}")
    try:
        # Opening the pipe to write without waiting works once the process has it open for reading: let it, and write nothing.
        writer = -1

        def is_read() -> bool:
            nonlocal writer
            try:
                writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                return False
            return True

        wait_for(is_read, process)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE)
        os.close(writer)
    finally:
        process.kill()
    assert (process.returncode, stderr) == (130, b"interrupted\n")


def test_a_secret_may_come_through_a_pipe(run: Run, tree: Path) -> None:
    run("init")
    (tree / "notes.txt").write_text(CANARY)
    command = [sys.executable, "-m", "snapcore.cli", "capture", str(tree), "--thread", "t", "--secret-file", "TOKEN=/dev/stdin"]
    subprocess.run(command, input=f"{CANARY}\n".encode(), check=True, stdout=subprocess.DEVNULL)
    assert run("cat", "latest:notes.txt", "--thread", "t").stdout == b"\0" * len(CANARY)


def test_what_the_command_complains_of_is_seen_and_its_output_is_not(run: Run, tree: Path) -> None:
    run("init")
    failing = f"TOKEN=sh -c 'echo {CANARY}; echo the vault is locked >&2; exit 7'"
    for more in ([], ["--json", "--debug"]):
        process = spawn("capture", str(tree), "--thread", "t", "--secret-command", failing, *more)
        stdout, stderr = process.communicate(timeout=PATIENCE)
        assert (process.returncode, stdout) == (2, b"")
        assert b"the vault is locked\n" in stderr
        assert b"exit code 7" in stderr
        assert CANARY.encode() not in stderr


def test_the_command_does_not_take_what_is_imported_from_stdin(run: Run, tree: Path, tmp_path: Path) -> None:
    run("init")
    run("capture", str(tree), "--thread", "t")
    archive = tmp_path / "all.tar"
    run("export", "latest", "--thread", "t", "-o", str(archive))
    greedy = f"TOKEN=sh -c 'cat; echo {CANARY}'"
    command = [sys.executable, "-m", "snapcore.cli", "import", "-", "--thread", "u", "--secret-command", greedy]
    subprocess.run(command, input=archive.read_bytes(), check=True, stdout=subprocess.DEVNULL)
    assert run("ls", "latest", "--thread", "u", "--json").json == run("ls", "latest", "--thread", "t", "--json").json


def test_nothing_of_it_is_loaded_without_need(run: Run, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("init")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\ndependencies = ['snapcore>=0.1']\n")
    command = [sys.executable, "-X", "importtime", "-m", "snapcore.cli", "capture", str(tree), "--thread", "t"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "snapcore.capturing" in loaded
    assert not loaded & {"tomllib", "shlex", "snapcore.secret_sources", "snapcore.settings"}
