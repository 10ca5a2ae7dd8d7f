"""Completion in real shells, and what it answers."""

import fcntl
import os
import pty
import select
import shutil
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from .conftest import Run

SHELLS = ("bash", "zsh", "fish")


def answer(run: Run, *words: str) -> list[str]:
    """The words that are proposed, after the kind of the answer."""
    return [line.partition("\t")[0] for line in run("completion", "zsh", "--", *words).text.splitlines()]


@pytest.fixture(autouse=True)
def _no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the tests' own process no alarm may go off."""
    monkeypatch.setattr("signal.setitimer", lambda *_: None)


def test_commands_options_and_choices(run: Run) -> None:
    assert answer(run, "ca") == ["words", "capture", "cat"]
    assert answer(run, "store", "") == ["words", "test"]
    assert answer(run, "help", "sta") == ["words", "stats"]
    assert "--skip-unchanged" in answer(run, "capture", "--skip")
    assert answer(run, "capture", "--on-torn", "") == ["words", "error", "keep"]
    assert answer(run, "capture", "--on-torn=k") == ["words", "--on-torn=keep"]
    assert answer(run, "--vers") == ["words", "--version"]
    assert answer(run, "no-such-command", "") == ["words"]


def test_an_option_that_is_given_is_proposed_again_only_if_it_repeats(run: Run) -> None:
    assert "--label" not in answer(run, "capture", "--label", "x", "--")
    assert "--exclude" in answer(run, "capture", "--exclude", "x", "--")


def test_places(run: Run) -> None:
    assert answer(run, "capture", "") == ["folders"]
    assert answer(run, "import", "") == ["files"]
    assert answer(run, "export", "--output", "") == ["files"]
    assert answer(run, "list", "--repo", "") == ["folders"]


def test_threads_labels_ids_and_paths_come_from_the_repository(made: Run) -> None:
    assert answer(made, "list", "--thread", "") == ["words", "t"]
    assert answer(made, "show", "-tt", "") == ["words", "latest", "label:first", "two", "one"]
    assert answer(made, "show", "--thread=t", "l") == ["words", "latest", "label:first"]
    assert answer(made, "show", "tw") == ["words", "two"]
    assert answer(made, "restore", "x", "-t", "t", "-c", "label:") == ["words", "label:first"]
    assert answer(made, "forget", "-t", "t", "--keep-label", "f") == ["words", "first"]
    assert answer(made, "ls", "-t", "t", "latest:") == [
        "words",
        "latest:added.txt",
        "latest:link",
        "latest:notes.txt",
        "latest:src/",
    ]
    assert answer(made, "cat", "one:src/m") == ["words", "one:src/main.py"]
    assert answer(made, "cat", "-t", "t", "label:first:src/") == ["words", "label:first:src/main.py"]


def test_the_repository_of_the_words_goes_before_the_environments(made: Run, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    made("init", "--repo", other)
    assert answer(made, "list", "--repo", other, "--thread", "") == ["words"]


def test_what_cannot_be_asked_gives_no_word_no_error_and_makes_nothing(run: Run, repo: Path) -> None:
    outcome = run("completion", "zsh", "--", "list", "--thread", "")
    assert (outcome.text, outcome.stderr) == ("words\n", "")
    assert not repo.exists()
    outcome = run("completion", "zsh", "--", "list", "--repo", "nowhere://x", "--thread", "")
    assert (outcome.text, outcome.stderr) == ("words\n", "")


def test_a_repository_that_does_not_answer_is_given_up() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never says a word
        address = f"s3://bucket/prefix?endpoint=http://127.0.0.1:{silent.getsockname()[1]}&region=us-east-1"
        command = [sys.executable, "-m", "snapcore.cli", "completion", "zsh", "--", "list", "--repo", address, "--thread", ""]
        done = subprocess.run(command, capture_output=True, timeout=50, env={**os.environ, **keys}, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_an_unknown_shell(run: Run) -> None:
    assert "bash, zsh, fish" in run("completion", "tcsh", code=2).stderr


# ---- in the shells themselves


class Typed:
    """An interactive shell that has loaded the script, on a terminal."""

    def __init__(self, shell: str, folder: Path, program_text: str = "") -> None:
        bin_ = folder / "bin"
        bin_.mkdir()
        program = bin_ / "snapcore"
        program.write_text(f'#!/bin/sh\n{program_text}\nexec {sys.executable} -m snapcore.cli "$@"\n')
        program.chmod(0o755)
        commands = {
            "bash": ["bash", "--norc", "--noprofile", "-i"],
            "zsh": ["zsh", "-f", "-i"],
            "fish": ["fish", "--no-config", "-i"],
        }
        self.main, secondary = pty.openpty()
        home = folder / "home"
        home.mkdir()
        environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "TERM": "xterm", "HOME": str(home), "PS1": "$ "}
        self.process = subprocess.Popen(
            commands[shell],
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            env=environment,
            cwd=folder,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(secondary)
        self.shown = b""
        load = {
            "bash": 'eval "$(snapcore completion bash)"',
            "zsh": 'autoload -Uz compinit; compinit -u -D; eval "$(snapcore completion zsh)"',
            "fish": "snapcore completion fish | source",
        }
        self.send(f"{load[shell]}; echo load''ed\r")
        self.wait_for("loaded")

    def send(self, text: str) -> None:
        os.write(self.main, text.encode())

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text.encode() not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.main], [], [], 1)[0]:
                self.shown += os.read(self.main, 65536)
        self.shown = b""

    def completes(self, typed: str, expected: str) -> None:
        """Type something and a tab, until the line's last word is the expected one: `echo` shows what stands there."""
        self.send(f"{typed}\t")
        self.wait_for(expected)
        self.send("\x15")  # the line is given up

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.main)


@pytest.mark.parametrize("shell", SHELLS)
def test_in_a_real_shell(made: Run, tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (Debian: apt-get install {shell})")
    (tmp_path / "a-folder").mkdir()
    typed = Typed(shell, tmp_path)
    try:
        typed.completes("snapcore thre", "ads")
        typed.completes("snapcore capture --skip-unch", "anged")
        typed.completes("snapcore show --thread t label:fi", "rst")
        typed.completes("snapcore cat one:src/ma", "in.py")
        typed.completes("snapcore capture a-fol", "der")
    finally:
        typed.close()


HOSTILE = ["A$(touch ran)`touch ran`;touch ran|x&", """B 'one' "two" \\ end""", "C*?[a]~{a,b}!#<>$HOME", "D:e=f", "-E $x"]


@pytest.mark.parametrize("shell", SHELLS)
def test_names_that_a_shell_could_run_are_put_in_as_they_are(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (Debian: apt-get install {shell})")
    for name in HOSTILE:
        (tmp_path / name[:2].strip(" $*:")).write_text(f"words\n{name}\tabout\n")
    given = tmp_path / "given"
    answers = f"""
    if [ "$1" = completion ] && [ $# -gt 2 ]; then
        for last; do :; done
        exec cat "{tmp_path}/${{last##* }}"
    elif [ "$1" = forget ]; then
        printf '%s\\0' "$@" > '{given}.new'; exec mv '{given}.new' '{given}'
    fi"""
    typed = Typed(shell, tmp_path, answers)
    try:
        typed.send("snapcore forget " + "".join(f"-l {name[:2].strip(' $*:')}\t" for name in HOSTILE) + "; echo do''ne\r")
        typed.wait_for("done")
    finally:
        typed.close()
    assert given.read_text().split("\0")[1:-1] == [word for name in HOSTILE for word in ("-l", name)]
    assert not (tmp_path / "ran").exists()


def test_bash_hands_over_its_line(made: Run, tree: Path) -> None:
    def proposed(line: str) -> list[str]:
        return [word.partition("\t")[0] for word in made("completion", "bash", "--", line).text.splitlines()]

    made("capture", str(tree), "--thread", "a 'b'", "--label", "x y:z")
    assert proposed("snapcore list --thread ") == ["words", "a 'b'", "t"]
    assert proposed(r"snapcore show -t a\ \'b\' label:x\ ") == ["words", "x y:z"]
    assert proposed("""snapcore show -t "a 'b'" label:x""") == ["words", "x y:z"]
    for within in ('label:"x', "label:'x", r"label:x\ y\:", "label:'x'"):  # could not be put in as bash does it
        assert proposed(rf"snapcore show -t a\ \'b\' {within}") == ["words"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_well_formed(run: Run, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (Debian: apt-get install {shell})")
    script = run("completion", shell).stdout
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
