"""What a settings file does to commands, and what one that was merely found may not do."""

import io
import json
import os
import pty
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from snapcore.cli.effective import VARIABLES

from .conftest import Run

CANARY = "hunter2-canary"


@pytest.fixture
def project(tree: Path, repo: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files, current, whose settings file names the repository beside it. No variable is set."""
    monkeypatch.chdir(tree)
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    write(tree, "")
    run("init")
    return tree


def write(folder: Path, more: str) -> Path:
    path = folder / "snapcore.toml"
    path.write_text(f"repo = '../repo'\nthread = 'of-the-file'\n{more}")
    return path


def paths(run: Run, *args: str) -> set[str]:
    return {entry["path"] for entry in run("ls", "latest", *args, "--json").json}


def stored(repo: Path) -> bytes:
    """All that is in the repository's files."""
    return b"".join(path.read_bytes() for path in sorted(repo.rglob("*")) if path.is_file())


# ---- the thread and the repository


def test_no_command_needs_a_repository_or_a_thread_that_the_file_names(project: Path, repo: Path, run: Run) -> None:
    assert (repo / "snapcore.json").exists()
    made = run("capture", ".", "--label", "first", "--json").json
    assert made["thread_id"] == "of-the-file"
    assert [each["id"] for each in run("list", "--json").json] == [made["id"]]
    assert run("show", "latest", "--json").json["id"] == made["id"]
    assert run("show", "label:first", "--json").json["id"] == made["id"]
    assert run("restore", ".", "--json").json["thread_id"] == "of-the-file"
    assert run("label", "latest", "second", "--json").json["label"] == "second"
    assert run("log", "--json").text == ""
    assert "message_type" in run("fork", "--to", "other", "--json").json
    assert {each["thread_id"] for each in run("threads", "--json").json} == {"of-the-file", "other"}


def test_the_thread_of_the_settings_does_not_narrow_what_an_id_means(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("capture", ".", "--thread", "another", "--id", "abc1")
    assert run("show", "abc", "--json").json["thread_id"] == "another"
    monkeypatch.setenv("SNAPCORE_THREAD", "a-third")
    assert run("show", "abc", "--json").json["thread_id"] == "another"
    run("show", "abc", "--thread", "a-third", code=1)
    assert "a-third" in run("show", "latest", code=1).stderr
    assert run("capture", ".", "--json").json["thread_id"] == "a-third"


def test_without_a_thread_all_ways_to_name_one_are_told(project: Path, run: Run) -> None:
    (project / "snapcore.toml").write_text("repo = '../repo'")
    for command in (("capture", "."), ("list",), ("restore", "."), ("show", "latest"), ("import", "."), ("log",)):
        outcome = run(*command, code=2)
        for way in ("--thread", "SNAPCORE_THREAD", "snapcore.toml"):
            assert way in outcome.stderr


def test_forget_takes_no_thread_from_the_file(project: Path, run: Run) -> None:
    run("capture", ".")
    assert "--thread" in run("forget", "--keep-last", "1", code=2).stderr


def test_a_pyproject_does_the_same(project: Path, run: Run) -> None:
    (project / "snapcore.toml").unlink()
    (project / "pyproject.toml").write_text("[tool.snapcore]\nrepo = '../repo'\nthread = 'p'\npolicy.exclude = ['*.toml']\n")
    assert run("capture", "src", "--json").json["thread_id"] == "p"
    run("capture", ".")
    assert "pyproject.toml" not in paths(run)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--repo", "nosuch://x"), "UNKNOWN_SCHEME"),
        (("--repo", "s3:bucket"), "UNKNOWN_SCHEME"),
        (("--repo", "s3://"), "INVALID_REQUEST"),
        (("--repo", f"s3://user:{CANARY}@bucket"), "INVALID_REQUEST"),
        (("--repo", "a\0b"), "INVALID_REQUEST"),
        (("--database", "nosuch://x"), "UNKNOWN_SCHEME"),
        (("--database", "no address at all"), "UNKNOWN_SCHEME"),
        (("--database", f"postgresql://user:{CANARY}@host:port/x"), "UNKNOWN_SCHEME"),
    ],
)
def test_an_address_of_a_repository_that_makes_no_sense_is_wrong_usage(
    project: Path, run: Run, flags: tuple[str, str], code: str
) -> None:
    commands = [("list",), ("capture", "."), ("verify",), ("repair",), ("repair", "--yes")]
    if flags[0] == "--repo":
        commands.append(("init",))
    for command in commands:
        error = run(*command, *flags, "--json", code=2).error
        assert error["code"] == code
        assert error["hint"]
        assert CANARY not in json.dumps(error)
    assert [path.name for path in project.iterdir() if path.name.startswith(("s3", "a"))] == []


def test_a_repository_that_is_not_there_is_none_however_it_was_named(project: Path, run: Run) -> None:
    (project / "snapcore.toml").write_text("repo = 'none'\nthread = 't'")
    assert "[NO_REPOSITORY]" in run("list", code=10).stderr


# ---- the policy


def test_the_policy_of_the_file_holds_for_capture_and_import(project: Path, run: Run) -> None:
    (project / ".git").mkdir()
    (project / ".git" / "HEAD").write_text("ref: x\n")
    write(project, "[policy]\nexclude = ['*.txt']\nwith-git = true\n")
    run("capture", ".")
    assert paths(run) >= {".git/HEAD", "src/main.py"}
    assert "notes.txt" not in paths(run)
    run("import", ".", "--thread", "i")
    assert paths(run, "--thread", "i") == paths(run)
    archive = project.parent / "some.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("notes.txt", "kept.md"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    run("import", str(archive), "--thread", "j")
    assert paths(run, "--thread", "j") == {"", "kept.md"}


def test_exclusions_of_flags_add_to_the_files_and_switches_turn_both_ways(project: Path, run: Run) -> None:
    (project / ".git").mkdir()
    (project / ".git" / "HEAD").write_text("ref: x\n")
    (project / "node_modules").mkdir()
    (project / "node_modules" / "x.js").write_text("x")
    write(project, "[policy]\nexclude = ['*.txt']\nwith-git = true\neverything = true\nkeep-rebuildable = true\n")
    run("capture", ".", "--exclude", "*.py", "--no-with-git", "--no-everything", "--no-keep-rebuildable")
    assert paths(run) == {"", "link", "snapcore.toml", "src"}
    run("capture", ".", "--exclude", "*.py", "--no-everything")
    assert paths(run) >= {".git/HEAD", "node_modules/x.js"}
    run("capture", ".", "--include", "*.py")
    assert {path for path in paths(run) if path.endswith((".py", ".txt", ".js", ".toml", "HEAD"))} == {"src/main.py"}


def test_limits_and_refusals_of_the_file_hold_until_a_flag_says_otherwise(project: Path, run: Run) -> None:
    write(project, "[policy]\nmax-files = 1\n")
    assert "[LIMIT_EXCEEDED]" in run("capture", ".", code=1).stderr
    run("capture", ".", "--max-files", "100")
    os.mkfifo(project / "pipe")
    write(project, "[policy]\non-unsupported = 'skip'\n")
    run("capture", ".", code=3)
    run("capture", ".", "--on-unsupported", "error", code=1)
    assert "on_unsupported" in run("capture", ".", "--on-unsupported", "perhaps", code=2).stderr


# ---- secrets


def test_the_secrets_of_the_file_are_taken_out_everywhere(
    project: Path, repo: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {name: f"{CANARY}-{name}-{'x' * 9}" for name in ("env", "file", "command", "flag")}
    monkeypatch.setenv("A_TOKEN", values["env"])
    (project.parent / "token").write_text(values["file"] + "\n")
    (project.parent / "other").write_text(values["command"])
    (project / "config.ini").write_text("\n".join(values.values()))
    named = project / "settings.toml"
    named.write_text(
        "repo = '../repo'\nthread = 't'\n[secrets]\nA = { env = 'A_TOKEN' }\nB = { file = '../token' }\n"
        "C = { command = 'cat ../other' }\n"
    )
    told = []
    for command in (
        ("capture", "."),
        ("import", ".", "--thread", "i"),
        ("capture", ".", "--secret-command", f"D=cat {project}/missing"),
        ("config", "--check"),
        ("config",),
        ("restore", ".", "--dry-run"),
    ):
        for form in ((), ("--json",), ("-v",)):
            flags = () if "--secret-command" in command else ("--secret-command", f"D=sed -n 4p {project}/config.ini")
            outcome = run(*command, *flags, *form, "--config", str(named), code=0 if flags else 2)
            told.append(outcome.stdout + outcome.stderr.encode())
    everything = b"".join(told) + stored(repo)
    assert run("cat", "latest:config.ini", "--config", str(named)).stdout.count(b"\0") == sum(map(len, values.values()))
    for value in values.values():
        assert value.encode() not in everything
    (project / "config.ini").unlink()
    put_back = ("--reinject", "--config", str(named))
    run("restore", ".", *put_back, "--secret-command", f"D=printf %s {values['flag']}")
    assert (project / "config.ini").read_text().splitlines() == list(values.values())


def test_a_flag_goes_before_the_files_secret_of_the_same_name(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, "[secrets]\nTOKEN = { file = 'none' }\n")
    assert "TOKEN" in run("capture", ".", code=2).stderr
    monkeypatch.setenv("TOKEN", CANARY)
    (project / "notes.txt").write_text(f"is {CANARY}\n")
    run("capture", ".", "--secret-env", "TOKEN")
    assert CANARY.encode() not in run("cat", "latest:notes.txt").stdout


def test_what_is_not_in_the_form_of_an_option_is_not_repeated(project: Path, run: Run) -> None:
    for option, form in (("--secret-file", "NAME=PATH"), ("--secret-command", "NAME=COMMAND")):
        for wrong in (CANARY, f"={CANARY}"):
            outcome = run("capture", ".", option, wrong, code=2)
            assert form in outcome.stderr
            assert CANARY not in outcome.stderr
    for command in (("capture", "."), ("config",), ("config", "--check", "--json")):
        outcome = run(*command, "--secret-env", f"TOKEN={CANARY}", code=2)
        assert "name of a secret" in outcome.stderr
        assert CANARY not in outcome.stderr + outcome.text


def test_a_found_file_runs_no_command_and_nothing_is_captured_without_its_secret(project: Path, run: Run) -> None:
    path = write(project, f"[secrets]\nTOKEN = {{ command = \"sh -c 'touch ran; echo {CANARY}'\" }}\n")
    for command in (("capture", "."), ("import", ".")):
        outcome = run(*command, code=2)
        assert "TOKEN" in outcome.stderr
        assert "--config" in outcome.stderr
        assert CANARY not in outcome.stderr
    assert not (project / "ran").exists()
    assert run("list", "--json").json == []
    run("capture", ".", "--config", str(path))
    assert (project / "ran").exists()


def test_secrets_that_a_found_file_names_are_not_put_back(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUD_KEY", CANARY)
    (project / "notes.txt").write_text(CANARY)
    path = write(project, "[secrets]\nCLOUD_KEY = { env = 'CLOUD_KEY' }\n")
    run("capture", ".")
    (project / "notes.txt").write_text("other")
    outcome = run("restore", ".", "--reinject", code=2)
    assert str(path) in outcome.stderr
    run("restore", ".")
    assert CANARY not in (project / "notes.txt").read_text()
    run("restore", ".", "--reinject", "--config", str(path))
    assert (project / "notes.txt").read_text() == CANARY
    (project / "notes.txt").unlink()
    run("restore", ".", "--reinject", "--secret-env", "CLOUD_KEY")
    assert (project / "notes.txt").read_text() == CANARY


def test_a_restore_goes_on_without_a_secret_that_it_does_not_need(project: Path, run: Run) -> None:
    run("capture", ".", "--exclude", "snapcore.toml")
    write(project, "[secrets]\nTOKEN = { env = 'NO_SUCH_VARIABLE' }\n")
    outcome = run("restore", ".")
    assert "warning" in outcome.stderr
    assert "TOKEN" in outcome.stderr
    assert run("restore", ".", "-q").stderr == ""
    for needing in ("--reinject", "--safety-checkpoint"):
        assert "TOKEN" in run("restore", ".", needing, code=2).stderr


# ---- what is told of a file that was found


def on_a_terminal(*args: str) -> str:
    """What a command writes to stderr when that is a terminal."""
    main, secondary = pty.openpty()
    try:
        command = [sys.executable, "-m", "snapcore.cli", *args]
        subprocess.run(command, stdout=subprocess.PIPE, stderr=secondary, check=True)
        os.set_blocking(main, False)
        try:
            return os.read(main, 1 << 16).decode()
        except BlockingIOError:
            return ""
    finally:
        os.close(main)
        os.close(secondary)


def test_a_terminal_is_told_which_found_file_leads_to_the_repository(project: Path, run: Run) -> None:
    path = project / "snapcore.toml"
    assert str(path) in on_a_terminal("list")
    assert str(path) in on_a_terminal("repair")
    assert on_a_terminal("list", "--config", str(path)) == ""
    assert on_a_terminal("list", "--json") == ""
    assert run("list").stderr == ""
