"""`snapcore config`, and what goes before what: flags, environment variables, the settings file, defaults."""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapcore.cli.effective import DEFAULTS, VARIABLES, Effective, effective, effective_policy
from snapcore.settings import PolicySettings, Settings
from snapcore.settings_files import Loaded

from .conftest import Run

CANARY = "hunter2-canary"
KEYS = ("repo", "database", "thread", "progress")
FLAGS = {"repo": "/flag", "database": "sqlite:////flag.db", "thread": "of-the-flag", "progress": "none"}
VARIABLE_VALUES = {"repo": "/variable", "database": "sqlite:////variable.db", "thread": "of-the-variable", "progress": "plain"}
WRITTEN = {"repo": "/file", "database": "sqlite:////file.db", "thread": "of-the-file", "progress": "auto"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: Path) -> Path:
    """The current folder, with none of the variables set."""
    folder = tmp_path / "project" / "here"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    return folder


def write(folder: Path, text: str) -> Path:
    path = folder / "snapcore.toml"
    path.write_text(text)
    return path


def rows(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in told["settings"]}


# ---- what goes before what


@pytest.mark.parametrize(("by_flag", "by_variable", "by_file"), list(itertools.product((False, True), repeat=3)))
def test_flags_go_before_variables_and_these_before_the_file(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch, by_flag: bool, by_variable: bool, by_file: bool
) -> None:
    path = write(here, "".join(f'{key} = "{WRITTEN[key]}"\n' for key in KEYS if by_file))
    for key in KEYS if by_variable else ():
        monkeypatch.setenv(VARIABLES[key], VARIABLE_VALUES[key])
    flags = [word for key in KEYS if by_flag for word in (f"--{key}", FLAGS[key])]
    told = run("config", "--json", *flags).json
    assert (told["message_type"], told["file"], told["named"]) == ("config", str(path), False)
    for key in KEYS:
        row = rows(told)[key]
        expected = (
            (FLAGS[key], "flag", f"--{key}")
            if by_flag
            else (VARIABLE_VALUES[key], "environment", VARIABLES[key])
            if by_variable
            else (WRITTEN[key], "file", key)
            if by_file
            else (DEFAULTS[key], "default", "")
        )
        assert (row["value"], row["source"], row["name"]) == expected


words = st.none() | st.text("abc/", min_size=1, max_size=4)


@pytest.fixture(scope="module")
def without_variables() -> Iterator[None]:
    kept = dict(os.environ)
    for name in VARIABLES.values():
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(kept)


@given(st.sampled_from(["thread", "repo"]), words, words | st.just(""), words)
def test_the_first_source_that_says_something_holds(
    without_variables: None, key: str, flag: str | None, variable: str | None, written: str | None
) -> None:
    settings: dict[str, Any] = {key: written}
    loaded = Loaded(Settings(**settings), "/folder/snapcore.toml", "/folder", named=True)
    os.environ.pop(VARIABLES[key], None)
    if variable is not None:
        os.environ[VARIABLES[key]] = variable
    found = effective(key, flag, loaded)
    if flag is not None:
        assert found == Effective(flag, "flag", f"--{key}")
    elif variable:  # an empty one counts as none
        assert found == Effective(variable, "environment", VARIABLES[key])
    elif written is not None:
        assert found == Effective(loaded.address(written) if key == "repo" else written, "file", key)
    else:
        assert found == Effective(DEFAULTS[key], "default", "")


options = {
    "include": st.lists(st.sampled_from(["a", "b"]), max_size=2),
    "everything": st.booleans(),
    "with_git": st.booleans(),
    "cross_mounts": st.booleans(),
    "on_torn": st.sampled_from(["error", "keep"]),
    "max_files": st.integers(1, 9),
}
policies = st.fixed_dictionaries({}, optional=options)
patterns = st.lists(st.sampled_from(["*.log", "tmp/", "x"]), max_size=3)


@given(policies, policies, patterns, patterns)
def test_flags_replace_what_the_files_policy_says_and_exclusions_add_to_it(
    written: dict[str, Any], flags: dict[str, Any], excluded: list[str], also: list[str]
) -> None:
    texts: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in written.items()}
    policy = PolicySettings(exclude=tuple(excluded), **texts)
    loaded = Loaded(Settings(policy=policy), "/folder/snapcore.toml", "/folder", named=False)
    nothing = dict.fromkeys(options)
    found = effective_policy({**nothing, **flags, "exclude": also or None}, loaded)
    assert found.exclude == (*excluded, *also)
    for name in options:
        value = flags.get(name, written.get(name, getattr(PolicySettings(), name)))
        assert getattr(found, name) == (tuple(value) if isinstance(value, list) else value)
    assert effective_policy({}, loaded) == policy
    assert effective_policy(nothing, None) == PolicySettings()


# ---- which file


def test_a_named_file_goes_before_a_found_one_and_a_flag_before_the_variable(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here, "thread = 'found'")
    (here / "variable.toml").write_text("thread = 'variable'")
    (here / "flag.toml").write_text("thread = 'flag'")

    def thread(*flags: str) -> tuple[str | None, bool | None]:
        told = run("config", "--json", *flags).json
        return rows(told)["thread"]["value"], told["named"]

    assert thread() == ("found", False)
    monkeypatch.setenv("SNAPCORE_CONFIG", "")
    assert thread() == ("found", False)
    monkeypatch.setenv("SNAPCORE_CONFIG", "variable.toml")
    assert thread() == ("variable", True)
    assert thread("--config", "flag.toml") == ("flag", True)
    assert thread("--no-config") == (None, None)
    assert "exclude each other" in run("config", "--no-config", "--config", "flag.toml", code=2).stderr
    assert "is empty" in run("config", "--config", "", code=2).stderr
    assert "none.toml" in run("config", "--config", "none.toml", code=2).stderr


def test_the_file_is_found_from_below_and_a_folder_that_is_gone_has_none(here: Path, run: Run) -> None:
    path = write(here.parent, "thread = 'above'")
    assert run("config", "--json").json["file"] == str(path)
    here.rmdir()
    assert run("config", "--json").json["file"] is None


def test_a_broken_file_stops_every_command_with_wrong_usage(here: Path, run: Run) -> None:
    path = write(here, f"thred = '{CANARY}'")
    for command in (("list", "-t", "t"), ("threads",), ("init",), ("capture", ".", "-t", "t"), ("config",), ("verify",), ("gc",)):
        outcome = run(*command, "--repo", "/nowhere/at/all", "--json", code=2)
        assert (outcome.error["code"], outcome.stdout) == ("INVALID_REQUEST", b"")
        assert "thred" in outcome.error["message"]
        assert str(path) in outcome.error["message"]
        assert CANARY not in outcome.stderr
    run("list", "-t", "t", "--no-config", "--repo", "/nowhere/at/all", code=10)


def test_progress_takes_three_words_wherever_it_is_said(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "auto, plain, none" in run("config", "--progress", "loud", code=2).stderr
    monkeypatch.setenv("SNAPCORE_PROGRESS", "loud")
    assert "auto, plain, none" in run("threads", code=2).stderr
    monkeypatch.delenv("SNAPCORE_PROGRESS")
    write(here, "progress = 'loud'")
    assert "progress" in run("threads", code=2).stderr


# ---- what it shows

FILE = f"""
repo = "store"
database = "postgresql://user:{CANARY}@db.example.org/snapcore?password={CANARY}"
[policy]
exclude = ["*.log", "tmp/"]
with-git = true
[secrets]
FROM_VARIABLE = {{ env = "A_TOKEN" }}
FROM_FILE = {{ file = "token" }}
FROM_COMMAND = {{ command = "echo {CANARY}" }}
MISSING = {{ file = "none" }}
[cron]
parallel = 2
[jobs.nightly]
sandbox = "exec:curl -H {CANARY} /w"
cron = "0 3 * * *"
"""


@pytest.fixture
def full(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a secret of each kind."""
    monkeypatch.setenv("A_TOKEN", CANARY)
    (here / "token").write_text(CANARY)
    return write(here, FILE)


def test_what_holds_is_a_table_that_fits_a_terminal(full: Path, here: Path, run: Run) -> None:
    outcome = run("config", "--thread", "t")
    assert outcome.text.startswith(f"settings file {full} (found: it runs no command)\n")
    lines = [re.split(" {2,}", line) for line in outcome.text.splitlines()]
    for row in (
        ["KEY", "FROM", "VALUE"],
        ["repo", "file", str(here / "store")],
        ["thread", "--thread", "t"],
        ["progress", "default", "auto"],
        ["policy.exclude", "file", "*.log"],
        ["", "tmp/"],
        ["policy.with-git", "file", "true"],
        ["policy.max-files", "default", "-"],
        ["cron.parallel", "file", "2"],
        ["jobs.nightly", "file", "exec:curl ***"],
        ["SECRET", "FROM", "STATE"],
        ["FROM_VARIABLE", "env A_TOKEN", "present"],
        ["FROM_FILE", "file token", "present"],
        ["FROM_COMMAND", "command echo ***", "missing"],
        ["MISSING", "file none", "missing"],
    ):
        assert row in lines
    assert CANARY not in outcome.text + outcome.stderr
    assert [line for line in outcome.text.splitlines() if len(line) > 80 and "/" not in line] == []  # addresses are not cut


def test_what_holds_as_json(full: Path, run: Run) -> None:
    outcome = run("config", "--json", "--secret-env", "A_TOKEN")
    told = outcome.json
    assert CANARY not in outcome.text
    assert rows(told)["database"]["value"] == "postgresql://user:***@db.example.org/snapcore?password=***"
    assert rows(told)["policy.exclude"] == {
        "key": "policy.exclude",
        "value": ["*.log", "tmp/"],
        "source": "file",
        "name": "policy.exclude",
    }
    secrets = {row["name"]: row for row in told["secrets"]}
    assert {name: row["state"] for name, row in secrets.items()} == {
        "FROM_VARIABLE": "present",
        "FROM_FILE": "present",
        "FROM_COMMAND": "missing",
        "MISSING": "missing",
        "A_TOKEN": "present",
    }
    assert (secrets["A_TOKEN"]["source"], secrets["MISSING"]["source"]) == ("flag", "file")
    assert "--config" in secrets["FROM_COMMAND"]["message"]


def test_commands_are_run_by_check_only_and_for_a_named_file_only(full: Path, here: Path, run: Run) -> None:
    full.write_text("[secrets]\nRAN = { command = \"sh -c 'touch ran; echo abcdefgh'\" }")

    def state(*flags: str, code: int = 0) -> str:
        return str(run("config", "--json", *flags, code=code).json["secrets"][0]["state"])

    assert state("--config", str(full)) == "not tried"
    assert state() == "missing"
    assert state("--check", code=1) == "missing"
    assert not (here / "ran").exists()
    assert state("--config", str(full), "--check") == "present"
    assert (here / "ran").exists()


def test_a_flag_takes_the_place_of_the_files_secret(full: Path, run: Run) -> None:
    full.write_text("[secrets]\nTOKEN = { file = 'none' }")
    secrets = run("config", "--json", "--secret-command", "TOKEN=echo abcdefgh", "--check").json["secrets"]
    assert [(row["name"], row["kind"], row["state"]) for row in secrets] == [("TOKEN", "command", "present")]


def test_a_pipe_is_not_read(here: Path, run: Run) -> None:
    os.mkfifo(here / "pipe")
    told = run("config", "--json", "--secret-file", f"TOKEN={here / 'pipe'}").json
    assert told["secrets"][0]["state"] == "not tried"


def test_without_a_file_it_says_so(here: Path, run: Run) -> None:
    assert run("config").text.startswith("no settings file\n")
    assert run("config", "-q").text == ""
