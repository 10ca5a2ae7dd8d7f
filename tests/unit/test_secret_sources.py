"""Where secrets come from, and that no message holds anything of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from snapcore import secret_sources
from snapcore.errors import Code, SnapshotError
from snapcore.secret_sources import MAX_VALUE_BYTES, secret_values, without_waiting
from snapcore.settings import SecretSource

CANARY = "hunter2-canary"


def value(source: SecretSource, folder: str | Path = "", *, may_run: bool = True) -> bytes:
    found = secret_values({"TOKEN": source}, folder=str(folder), may_run=may_run)
    assert list(found) == ["TOKEN"]
    return found["TOKEN"]


def refusal(source: SecretSource, folder: str | Path = "", *, may_run: bool = True) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        value(source, folder, may_run=may_run)
    error = caught.value
    assert error.code is Code.INVALID_REQUEST
    assert "TOKEN" in error.message
    assert CANARY not in str(error)
    return error


def test_a_value_comes_from_the_environment_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", f"{CANARY}\n")
    assert value(SecretSource(env="A_TOKEN")) == f"{CANARY}\n".encode()
    monkeypatch.delenv("A_TOKEN")
    assert "not set" in refusal(SecretSource(env="A_TOKEN")).message


def test_a_value_that_was_written_where_a_variable_is_named_is_not_told() -> None:
    refusal(SecretSource(env=CANARY))


def test_a_value_comes_from_a_file_relative_to_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(CANARY)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("token", "./token", str(tmp_path / "token"), "~/token"):
        assert value(SecretSource(file=path), tmp_path) == CANARY.encode()
    assert "No such file" in refusal(SecretSource(file="none"), tmp_path).message


def test_one_line_break_at_the_end_is_no_part_of_a_value(tmp_path: Path) -> None:
    for written, meant in (
        (b"abcdef", b"abcdef"),
        (b"abcdef\n", b"abcdef"),
        (b"abcdef\r\n", b"abcdef"),
        (b"abcdef\n\n", b"abcdef\n"),
    ):
        (tmp_path / "token").write_bytes(written)
        assert value(SecretSource(file="token"), tmp_path) == meant
        assert value(SecretSource(command="cat token"), tmp_path) == meant


def test_a_value_comes_from_a_command_that_no_shell_runs(tmp_path: Path) -> None:
    assert value(SecretSource(command="""printf '%s' "a b; $HOME" """)) == b"a b; $HOME"
    assert value(SecretSource(command=("printf", "%s|%s", "a b", "$c"))) == b"a b|$c"
    script = tmp_path / "print-it"
    script.write_text(f"#!/bin/sh\npwd\necho {CANARY}\n")
    script.chmod(0o755)
    assert value(SecretSource(command="./print-it"), tmp_path) == f"{tmp_path.resolve()}\n{CANARY}".encode()


def test_what_a_command_complains_of_goes_to_our_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    value(SecretSource(command="sh -c 'echo unlocked >&2; echo abcdefg'"))
    assert capfd.readouterr() == ("", "unlocked\n")


def test_a_command_has_no_input() -> None:
    assert value(SecretSource(command="sh -c 'wc -c; echo abcdefg'")).split() == [b"0", b"abcdefg"]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (f"sh -c 'echo {CANARY}; echo {CANARY} >&2; exit 3'", "exit code 3"),
        (f"sh -c 'echo {CANARY}; kill -9 $$'", "signal 9"),
        ("true", "wrote nothing"),
        ("sh -c 'echo; echo'", "less than 6 bytes"),
        ("echo short", "less than 6 bytes"),
        ("yes", "larger than 1 MiB"),
        (f"no-such-{CANARY} x", "cannot be started"),
        (f"sh -c '{CANARY}", "quote"),
        ("  ", "empty"),
        (("", CANARY), "empty"),
        (("sh", f"{CANARY}\0"), "cannot be started"),
    ],
)
def test_a_command_that_gives_no_value_is_refused_without_its_words(
    command: str | tuple[str, ...], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert why in refusal(SecretSource(command=command)).message


def test_a_command_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(secret_sources, "COMMAND_SECONDS", 0.3)
    for script in ("exec sleep 600", "echo $$ > pid; exec >&-; exec sleep 600"):
        error = refusal(SecretSource(command=("sh", "-c", script)), tmp_path)
        assert "longer than" in error.message
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_file_that_was_merely_found_runs_nothing(tmp_path: Path) -> None:
    error = refusal(SecretSource(command=f"sh -c 'touch ran; echo {CANARY}'"), tmp_path, may_run=False)
    assert "--config" in error.hint
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_is_too_large_or_too_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_bytes(b"x" * MAX_VALUE_BYTES)
    assert len(value(SecretSource(file="token"), tmp_path)) == MAX_VALUE_BYTES
    (tmp_path / "token").write_bytes(b"x" * (MAX_VALUE_BYTES + 1))
    assert "larger than" in refusal(SecretSource(file="token"), tmp_path).message
    for short in ("", "short", "  short  "):
        monkeypatch.setenv("A_TOKEN", short)
        assert "less than 6 bytes" in refusal(SecretSource(env="A_TOKEN")).message


def test_a_name_that_cannot_be_stored_is_refused_and_not_shown() -> None:
    with pytest.raises(SnapshotError) as caught:
        secret_values({f"{CANARY} ": SecretSource(env="HOME")}, folder="", may_run=True)
    assert CANARY not in str(caught.value)


def test_a_source_names_just_one_place() -> None:
    for wrong in ({}, {"env": "A", "file": "b"}, {"file": "a", "command": "b"}):
        with pytest.raises(ValueError, match="just one of"):
            SecretSource(**wrong)


def test_what_has_to_be_waited_for_is_told_apart(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "token").write_text(CANARY)
    for source in (SecretSource(env="A"), SecretSource(file="token"), SecretSource(file="none")):
        assert without_waiting(source, folder=str(tmp_path))
    for source in (SecretSource(command="true"), SecretSource(file="pipe")):
        assert not without_waiting(source, folder=str(tmp_path))


def test_an_interruption_leaves_no_command_behind(tmp_path: Path) -> None:
    code = f"""
import signal
from snapcore.secret_sources import secret_values
from snapcore.settings import SecretSource
signal.signal(signal.SIGINT, signal.default_int_handler)
source = SecretSource(command=("sh", "-c", "echo $$ > pid; exec sleep 600"))
secret_values({{"TOKEN": source}}, folder={str(tmp_path)!r}, may_run=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    command = wait_for_number(tmp_path / "pid", process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    with pytest.raises(ProcessLookupError):
        os.kill(command, 0)


def wait_for_number(path: Path, process: "subprocess.Popen[bytes]") -> int:
    """The number that a program writes into the file, once it is there."""
    giving_up = threading.Event()
    timer = threading.Timer(60, giving_up.set)
    timer.start()
    try:
        while not (path.exists() and path.read_text().endswith("\n")):
            assert process.poll() is None, process.communicate()
            assert not giving_up.is_set()
            time.sleep(0.01)
    finally:
        timer.cancel()
    return int(path.read_text())
