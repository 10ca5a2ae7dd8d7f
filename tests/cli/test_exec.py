"""`snapcore exec`: a command in a sandbox; its output, its exit code, what the log has of it, and checkpoints around it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapcore.cli import exec as exec_module
from snapcore.cli.exec import NOT_RUN, TIMED_OUT

from .conftest import Run, spawn

DEADLINE = 60.0


def log(run: Run, thread: str = "t") -> list[dict[str, Any]]:
    return [json.loads(line) for line in run("log", thread, "--json").text.splitlines()]


def kinds(run: Run, thread: str = "t") -> list[str]:
    return [event["kind"] for event in log(run, thread)]


def until(path: Path) -> str:
    """What a file holds, once it holds something."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return text
        time.sleep(0.02)
    raise AssertionError(f"nothing came into {path}")


def until_full(pipe: int) -> None:
    """Wait until nothing more fits into a pipe."""
    size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    end = time.monotonic() + DEADLINE
    while int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder) < size:
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- the command


def test_output_comes_byte_for_byte_and_the_exit_code_is_the_commands(run: Run, tree: Path) -> None:
    script = r"printf '\000\377\n'; printf 'err' >&2; exit 7"
    outcome = run("exec", str(tree), "--", "sh", "-c", script, code=7)
    assert outcome.stdout == b"\x00\xff\n"
    assert outcome.stderr == "err"


def test_arguments_are_passed_as_they_are(run: Run, tree: Path) -> None:
    words = ["", "a b", "--thread", "--", "=x", "$HOME", "ä\n"]
    outcome = run("exec", str(tree), "--", "printf", "%s|", *words)
    assert outcome.text == "".join(f"{word}|" for word in words)


def test_it_needs_neither_a_repository_nor_a_thread(run: Run, repo: Path, tree: Path) -> None:
    run("exec", str(tree), "--", "true")
    assert not repo.exists()


def test_where_and_with_what_it_runs(run: Run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "one")
    monkeypatch.setenv("NOT_PASSED", "two")
    script = 'pwd; echo "$FROM_HERE $GIVEN $NOT_PASSED"'
    outcome = run("exec", str(tree), "--cwd", "src", "--env", "FROM_HERE", "-e", "GIVEN=a=b", "--", "sh", "-c", script)
    assert outcome.text == f"{tree / 'src'}\none a=b \n"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("{tree}",),
        ("{tree}", "--"),
        ("--", "true"),
        ("{tree}", "--nope", "--", "true"),
        ("{tree}", "more", "--", "true"),
        ("{tree}", "--checkpoint", "--", "true"),
        ("{tree}", "--before", "--", "true"),
        ("{tree}", "--restore", "latest", "--", "true"),
        ("{tree}", "--thread", "t", "--always", "--", "true"),
        ("{tree}", "--thread", "t", "--step", "-1", "--", "true"),
        ("{tree}", "--thread", "t", "--step", str(2**63), "--", "true"),
        ("{tree}", "--thread", "t", "--label", "a\nb", "--", "touch", "ran"),
        ("{tree}", "--thread", "t", "--wait", "nan", "--", "true"),
        ("--thread", "t", "--no-record", "--", "true"),
        ("{tree}", "--timeout", "soon", "--", "true"),
        ("{tree}", "--env", "SURELY_NOT_SET", "--", "true"),
        ("{tree}", "--env", "1=2", "--", "true"),
        ("{tree}", "--secret-env", "SURELY_NOT_SET", "--", "true"),
        ("nope://x", "--", "true"),
        ("./not-there", "--", "true"),
        ("{tree}", "--thread", "t", "--repo", "{tree}/none", "--", "true"),
    ],
    ids=" ".join,
)
def test_what_fails_before_the_command_ends_with_125(run: Run, tree: Path, words: tuple[str, ...]) -> None:
    run("init")
    outcome = run("exec", *(word.replace("{tree}", str(tree)) for word in words), code=NOT_RUN)
    assert outcome.stdout == b""
    assert outcome.stderr
    assert not (tree / "ran").exists()
    run("exec", str(tree), "--thread", "t", "--", "true")  # nothing has hold of the thread


def test_errors_are_typed(run: Run, tree: Path) -> None:
    error = run("exec", "./not-there", "--json", "--", "true", code=NOT_RUN).error
    assert (error["message_type"], error["code"]) == ("error", "NO_SANDBOX")


@pytest.mark.parametrize(
    ("word", "mode", "code"), [("./surely-not-there", 0o644, 127), ("./notes.txt", 0o644, 126), ("./notes.txt", 0o755, 126)]
)
def test_a_command_that_cannot_be_run(run: Run, tree: Path, word: str, mode: int, code: int) -> None:
    (tree / "notes.txt").chmod(mode)
    assert word in run("exec", str(tree), "--", word, code=code).stderr


def test_a_folder_of_the_sandbox_that_is_not_there_is_named(run: Run, tree: Path) -> None:
    assert "missing: No such file" in run("exec", str(tree), "--cwd", "missing", "--", "pwd", code=127).stderr


def test_a_command_does_not_run_elsewhere_when_the_folder_of_the_address_is_not_there(run: Run, tmp_path: Path) -> None:
    error = run("exec", f"exec:env {tmp_path}/absent", "--", "touch", str(tmp_path / "ran"), code=126).stderr
    assert "absent" in error
    assert not (tmp_path / "ran").exists()


def test_a_command_that_a_signal_ends(run: Run, tree: Path) -> None:
    run("exec", str(tree), "--", "sh", "-c", "kill -TERM $$", code=128 + signal.SIGTERM)


def test_a_command_that_takes_too_long_is_ended(run: Run, tree: Path) -> None:
    outcome = run("exec", str(tree), "--timeout", "1s", "--json", "--", "sh", "-c", "echo begun; sleep 100", code=TIMED_OUT)
    assert outcome.stdout == b"begun\n"
    assert outcome.error["code"] == "EXEC_TIMEOUT"


# ---- stdin


def piped(tree: Path, *words: str, given: bytes) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "snapcore.cli", "exec", str(tree), *words]
    return subprocess.run(command, input=given, capture_output=True, timeout=DEADLINE, check=False)


@pytest.mark.usefixtures("repo")
def test_stdin_is_passed_on_byte_for_byte(tree: Path) -> None:
    given = bytes(range(256)) * 5_000
    done = piped(tree, "--", "cat", given=given)
    assert (done.returncode, done.stdout, done.stderr) == (0, given, b"")
    assert piped(tree, "--no-stdin", "--", "cat", given=given).stdout == b""


def test_more_on_stdin_than_fits_is_refused_before_the_command(
    tree: Path, repo: Path, monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "input").write_bytes(b"x" * 2_000)
    monkeypatch.setattr(exec_module, "MAX_STDIN", 1_000)
    with open(tmp_path / "input") as file:
        monkeypatch.setattr(sys, "stdin", file)
        run("exec", str(tree), "--", "touch", "ran", code=NOT_RUN)
    assert not (tree / "ran").exists()


# ---- with a thread


@pytest.fixture
def ready(run: Run) -> Run:
    run("init")
    return run


def test_the_log_has_it(ready: Run, tree: Path) -> None:
    outcome = ready("exec", str(tree), "--thread", "t", "--json", "--", "sh", "-c", "echo out; exit 3", code=3)
    told = outcome.error
    assert (told["message_type"], told["thread_id"], told["exit_code"]) == ("exec", "t", 3)
    assert kinds(ready) == ["sandbox.opened", "exec.started", "exec.completed", "sandbox.closed"]
    ended = log(ready)[2]
    assert ended["sequence"] == told["sequence"]
    assert (ended["exit_code"], ended["operation"]["command"]) == (3, ["sh", "-c", "echo out; exit 3"])
    assert ready("log", "t", "--output", str(told["sequence"])).text == "out\n"
    assert ready("list", "--thread", "t", "--json").json == []


def test_without_a_sandbox_the_threads_own_is_taken(ready: Run, tree: Path) -> None:
    assert ready("exec", "--thread", "t", "--json", "--", "pwd", code=NOT_RUN).error["code"] == "NO_SANDBOX"
    ready("exec", str(tree), "--thread", "t", "--", "true")
    assert ready("exec", "--thread", "t", "--", "pwd").text == f"{tree}\n"


def test_checkpoints_before_and_after(ready: Run, tree: Path) -> None:
    outcome = ready(
        "exec", str(tree), "-t", "t", "--before", "--label", "built", "--step", "4", "--json", "--", "sh", "-c", "echo x > made"
    )
    before, after = ready("list", "--thread", "t", "--json").json
    assert (outcome.error["before_id"], outcome.error["checkpoint_id"]) == (before["id"], after["id"])
    assert (before["files"] + 1, before["label"]) == (after["files"], None)
    assert (after["label"], after["step"]) == ("built", 4)
    ready("restore", str(tree), "--thread", "t", "-c", before["id"])
    assert not (tree / "made").exists()


def test_before_makes_no_second_checkpoint_of_the_same(ready: Run, tree: Path) -> None:
    ready("capture", str(tree), "--thread", "t", "--id", "one")
    assert ready("exec", str(tree), "-t", "t", "--before", "--json", "--", "true").error["before_id"] == "one"
    assert len(ready("list", "--thread", "t", "--json").json) == 1


def test_a_failed_command_is_captured_only_when_that_is_said(ready: Run, tree: Path) -> None:
    ready("exec", str(tree), "-t", "t", "--checkpoint", "--", "false", code=1)
    assert ready("list", "--thread", "t", "--json").json == []
    outcome = ready("exec", str(tree), "-t", "t", "--checkpoint", "--always", "--", "false", code=1)
    (made,) = ready("list", "--thread", "t", "--json").json
    assert made["id"] in outcome.stderr
    ready("exec", str(tree), "-t", "t", "--checkpoint", "--always", "--timeout", "1s", "--", "sleep", "60", code=TIMED_OUT)
    assert len(ready("list", "--thread", "t", "--json").json) == 2


def test_a_checkpoint_is_restored_first(ready: Run, tree: Path) -> None:
    ready("capture", str(tree), "--thread", "t", "--id", "one", "--label", "start")
    (tree / "notes.txt").write_text("spoiled\n")
    outcome = ready("exec", str(tree), "-t", "t", "--restore", "label:start", "--json", "--", "cat", "notes.txt")
    assert outcome.stdout == b"first\n"
    assert outcome.error["restored_id"] == "one"


def test_the_files_are_those_of_the_threads_newest_checkpoint(ready: Run, tree: Path) -> None:
    (tree / "node_modules").mkdir()
    (tree / "node_modules" / "x").write_text("x")
    (tree / "skip.log").write_text("x")
    ready("capture", str(tree), "--thread", "t", "--exclude", "*.log")
    ready("exec", str(tree), "-t", "t", "--checkpoint", "--", "true")
    paths = {each["path"] for each in ready("ls", "latest", "--thread", "t", "--json").json}
    assert "notes.txt" in paths
    assert not paths & {"skip.log", "node_modules"}


def test_several_folders_are_no_sandbox_to_capture(ready: Run, tree: Path) -> None:
    (tree / "other").mkdir()
    ready("capture", "--thread", "t", "--root", f"a={tree / 'src'}", "--root", f"b={tree / 'other'}")
    ready("exec", str(tree), "-t", "t", "--checkpoint", "--", "touch", "ran", code=NOT_RUN)
    assert not (tree / "ran").exists()


def test_secrets_are_passed_and_nowhere_stored(ready: Run, tree: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    script = 'echo "$TOKEN"; echo "$TOKEN" > kept'
    outcome = ready("exec", str(tree), "-t", "t", "--secret-env", "TOKEN", "--checkpoint", "--json", "--", "sh", "-c", script)
    assert outcome.stdout == b"hunter2-hunter2\n"
    assert "hunter2" not in outcome.stderr
    assert ready("cat", "latest:kept", "--thread", "t").stdout == bytes(15) + b"\n"
    assert ready("log", "t", "--output", str(outcome.error["sequence"])).text == "{secret:TOKEN}\n"
    assert log(ready)[1]["operation"]["environment"] == ["TOKEN"]
    for file in repo.rglob("*"):
        assert not file.is_file() or b"hunter2" not in file.read_bytes()


def test_another_sandbox_of_the_thread_is_refused_or_left_unrecorded(ready: Run, tree: Path) -> None:
    ready("exec", str(tree), "-t", "t", "--", "true")
    before = kinds(ready)
    other = tree / "src"
    ready("exec", str(other), "-t", "t", "--", "touch", "ran", code=NOT_RUN)
    assert not (other / "ran").exists()
    ready("exec", str(other), "-t", "t", "--no-record", "--checkpoint", "--", "touch", "ran")
    assert kinds(ready) == before
    assert len(ready("list", "--thread", "t", "--json").json) == 1


def test_a_thread_that_a_session_holds(ready: Run, tree: Path, repo: Path) -> None:
    import snapcore

    with snapcore.blocking.open_repository(repo) as opened:
        session = opened.attach(tree, thread_id="t")
        error = ready("exec", "-t", "t", "--json", "--", "true", code=NOT_RUN).error
        assert error["code"] == "WRITER_HELD"
        ready("exec", "-t", "t", "--take-over", "--", "true")
        session.close()
    ready("exec", "-t", "t", "--", "true")


def test_the_thread_of_the_environment_is_meant(ready: Run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPCORE_THREAD", "from-there")
    ready("exec", str(tree), "--", "true")
    assert kinds(ready, "from-there")[1] == "exec.started"


def test_quiet_leaves_the_output_to_the_command(ready: Run, tree: Path) -> None:
    outcome = ready("exec", str(tree), "-t", "t", "--checkpoint", "-q", "--", "echo", "out")
    assert (outcome.stdout, outcome.stderr) == (b"out\n", "")


# ---- what is cut short


@pytest.fixture
def running(ready: Run, tree: Path) -> Iterator["tuple[subprocess.Popen[bytes], int]"]:
    """A command that runs in a sandbox of thread `t`, and its process id."""
    process = spawn(
        "exec", str(tree), "--thread", "t", "--no-stdin", "--checkpoint", "--", "sh", "-c", "echo $$ > pid; exec sleep 600"
    )
    try:
        yield process, int(until(tree / "pid"))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command(
    running: "tuple[subprocess.Popen[bytes], int]", ready: Run, tree: Path, number: signal.Signals
) -> None:
    process, pid = running
    process.send_signal(number)
    _, said = process.communicate(timeout=DEADLINE)
    assert (process.returncode, said) == (128 + number, b"interrupted\n")
    assert not is_running(pid)
    assert kinds(ready) == ["sandbox.opened", "exec.started", "sandbox.closed"]
    assert ready("list", "--thread", "t", "--json").json == []
    ready("capture", str(tree), "--thread", "t")  # nobody holds the thread any more
    ready("exec", "-t", "t", "--", "true")


@pytest.mark.usefixtures("ready")
def test_a_reader_that_goes_away_ends_the_command(tree: Path) -> None:
    process = spawn("exec", str(tree), "--thread", "t", "--no-stdin", "--", "sh", "-c", "echo $$ > pid; exec yes")
    pid = int(until(tree / "pid"))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(DEADLINE) == 128 + signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()
    assert not is_running(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_whose_output_nobody_reads_just_now(ready: Run, tree: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "snapcore.cli", "exec", str(tree), "-t", "t", "--no-stdin", "--"]
    script = "echo $$ > pid; exec yes"
    process = subprocess.Popen([*command, "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        pid = int(until(tree / "pid"))
        assert process.stdout is not None
        until_full(process.stdout.fileno())
        process.send_signal(number)
        assert process.wait(DEADLINE) == 128 + number
    finally:
        process.kill()
        process.communicate()
    assert not is_running(pid)
    assert kinds(ready) == ["sandbox.opened", "exec.started", "sandbox.closed"]
    ready("exec", "-t", "t", "--", "true")  # nobody holds the thread any more


def test_output_comes_as_it_is_written(run: Run, repo: Path, tree: Path) -> None:
    script = "echo now; until [ -e go ]; do sleep 0.05; done; echo end"
    process = spawn("exec", str(tree), "--no-stdin", "--", "sh", "-c", script, env={"PYTHONUNBUFFERED": ""})
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    (tree / "go").touch()
    rest, _ = process.communicate(timeout=DEADLINE)
    assert (process.returncode, rest) == (0, b"end\n")


def test_a_terminal_as_stdin_is_not_read(run: Run, repo: Path, tree: Path) -> None:
    ours, theirs = os.openpty()
    try:
        command = [sys.executable, "-m", "snapcore.cli", "exec", str(tree), "--", "cat"]
        done = subprocess.run(command, stdin=theirs, capture_output=True, timeout=DEADLINE, check=False)
        assert (done.returncode, done.stdout) == (0, b"")
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_sandbox_that_goes_away_leaves_the_end_unknown_and_the_thread_free(ready: Run, tree: Path) -> None:
    script = "echo $PPID > pid; exec sleep 600"
    process = spawn("exec", f"exec:env {tree}", "-t", "t", "--no-stdin", "--checkpoint", "--json", "--", "sh", "-c", script)
    try:
        os.killpg(int(until(tree / "pid")), signal.SIGKILL)  # the connection, and all behind it
        stdout, said = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert (process.returncode, stdout, json.loads(said)["code"]) == (NOT_RUN, b"", "SANDBOX_UNAVAILABLE")
    assert kinds(ready) == ["sandbox.opened", "exec.started", "sandbox.closed"]
    ready("exec", "-t", "t", "--checkpoint", "--", "sh", "-c", "kill -KILL $$; :", code=128 + signal.SIGKILL)
    assert kinds(ready)[-2:] == ["exec.completed", "sandbox.closed"]


# ---- kinds of sandboxes


def test_in_what_a_command_leads_to(ready: Run, tree: Path) -> None:
    address = f"exec:env {tree}"
    ready("exec", address, "-t", "t", "--before", "--checkpoint", "--", "sh", "-c", "pwd; echo x > made; exit 0")
    assert len(ready("list", "--thread", "t", "--json").json) == 2
    assert ready("exec", "-t", "t", "--", "cat", "made").text == "x\n"
    ready("exec", address, "-u", "nobody", "--", "true", code=NOT_RUN)
