"""What stands in for the installed `snapcore` in tests does the same as it, for whatever a process is given and can do.

With `SNAPCORE_TEST_INSTALLED` set, the same is shown of the installed one.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

REAL: Final = Path(sys.executable).parent / "snapcore"


@pytest.fixture
def snapcore(quick_snapcore: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The command, in a folder with a file `a` in `tree`, and a repository."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("text\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SNAPCORE_REPO", str(tmp_path / "repo"))
    for name in ("DATABASE", "THREAD", "PROGRESS", "CONFIG"):
        monkeypatch.delenv(f"SNAPCORE_{name}", raising=False)
    command = str(REAL if os.environ.get("SNAPCORE_TEST_INSTALLED") else quick_snapcore / "snapcore")
    shell("$snapcore init", command)
    return command


def shell(script: str, snapcore: str, **more: str) -> "subprocess.CompletedProcess[bytes]":
    """What a script does that calls the command `$snapcore`."""
    return subprocess.run(
        ["bash", "-euc", script], env={**os.environ, **more, "snapcore": snapcore}, capture_output=True, check=False, timeout=60
    )


def test_exit_codes_and_streams(snapcore: str) -> None:
    done = shell("$snapcore threads --json && $snapcore nonsense", snapcore)
    assert done.returncode == 2
    assert done.stdout == b"[]\n"
    assert b"No such command" in done.stderr
    assert shell("$snapcore exec tree --thread t -- sh -c 'exit 7'", snapcore).returncode == 7
    assert shell("$snapcore help >/dev/full", snapcore).returncode == 1


def test_variables_and_the_folder_are_the_callers(snapcore: str) -> None:
    script = """
        SNAPCORE_THREAD=one $snapcore capture tree
        cd tree
        PATH=/the-callers:/usr/bin:/bin $snapcore exec . --thread t -- env
        pwd
        unset SNAPCORE_THREAD
        $snapcore capture .
    """
    missing = shell("env -u PATH $snapcore capture tree --thread t --secret-env PATH", snapcore)
    assert b"PATH" in missing.stderr, "what the process that forks has is not the command's"
    done = shell(script, snapcore)
    assert b" of thread one: " in done.stdout
    assert b"PATH=/the-callers:/usr/bin:/bin\n" in done.stdout
    assert done.returncode == 2, "no thread is given"


def test_it_is_quick(snapcore: str) -> None:
    """It is not the installed one that runs, which is left what this one cannot do."""
    done = shell("$snapcore exec tree --thread t -- sh -c 'cat /proc/$PPID/cmdline' </dev/null", snapcore)
    assert b"quick_command.py" in done.stdout, done


def test_input_output_and_other_files(snapcore: str) -> None:
    script = """
        echo from-a-pipe | $snapcore exec tree --thread t -- cat
        $snapcore capture tree --thread t --quiet --secret-file TOKEN=<(echo a-secret-of-many-letters)
        $snapcore cat latest:a --thread t | cat >out
        cat out
        $snapcore capture tree --thread u --quiet 5>&1
    """
    done = shell(script, snapcore)
    assert (done.returncode, done.stdout.decode().splitlines()[-2:]) == (0, ["from-a-pipe", "text"]), done


def test_the_umask(snapcore: str) -> None:
    shell("umask 077; $snapcore exec tree --thread t -- touch new", snapcore)
    assert Path("tree/new").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it(snapcore: str, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [snapcore, "exec", "tree", "--thread", "t", "--", "sh", "-c", "echo begun; exec sleep 60"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(number)
        ends = -number if number == signal.SIGKILL else 128 + number
        assert process.wait(60) == ends


def test_what_it_does_not_pass_on_is_left_to_the_installed_one(snapcore: str) -> None:
    assert (
        shell("$snapcore list --thread t <&- >&- 2>&-", snapcore).returncode
        == shell(f"{REAL} list -t t >&-", snapcore).returncode
    )
    done = shell("$snapcore --version", snapcore, PYTHONVERBOSE="1")
    assert b"import 'site'" in done.stderr
