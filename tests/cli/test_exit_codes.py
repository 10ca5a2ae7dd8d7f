"""Exit codes and errors: each foreseen failure has its code, says what to do, and shows no traceback."""

import asyncio
import os
import sqlite3
from pathlib import Path

import pytest

import snapcore

from .conftest import Run


def test_usage(run: Run, tree: Path) -> None:
    run("init")
    for wrong in (
        ("list",),
        ("no-such-command",),
        ("capture", str(tree), "--thread", "t", "--no-such-option"),
        ("capture", str(tree), "--thread", "t", "--step", "many"),
        ("capture", "--thread", "t"),
        ("capture", str(tree), "--thread", "t", "--root", "nameless"),
        ("capture", str(tree), "--thread", "t", "--on-unsupported", "perhaps"),
        ("capture", str(tree), "--thread", "t", "--max-files", "0"),
        ("capture", str(tree), "--thread", "a\nb"),
        ("capture", str(tree), "--thread", "t", "--secret-env", "NO_SUCH_VARIABLE"),
        ("capture", str(tree), "--thread", "t", "--secret-file", "NAME=/no/such/file"),
        ("restore", str(tree), "--thread", "t", "--verify", "never"),
        ("show", "latest"),
        ("show", "label:x"),
        ("store", "test", "nowhere://x"),
        ("store", "test", "file://host/x"),
        ("store", "test", str(tree / "notes.txt")),
        ("init", "--repo", str(tree / "notes.txt" / "x")),
    ):
        outcome = run(*wrong, code=2)
        assert outcome.stdout == b""
        assert "Traceback" not in outcome.stderr
    assert run("list", "--thread", "t", "--json").json == []


def test_no_arguments_show_the_help(run: Run) -> None:
    outcome = run(code=2)
    assert "capture" in outcome.text + outcome.stderr
    assert "capture" in run("--help").text
    assert "--skip-unchanged" in run("capture", "-h").text


def test_version(run: Run) -> None:
    assert run("--version").text.startswith("snapcore ")


def test_no_repository(run: Run, repo: Path, tree: Path) -> None:
    for command in (("list", "-t", "t"), ("capture", str(tree), "-t", "t"), ("restore", str(tree), "-t", "t"), ("verify",)):
        outcome = run(*command, code=10)
        assert "[NO_REPOSITORY]" in outcome.stderr
        assert "init" in outcome.stderr
    assert not repo.exists()


def test_another_writer_holds_the_lease(run: Run, repo: Path, tree: Path) -> None:
    run("init")

    async def hold() -> None:
        async with snapcore.open_repository(str(repo)) as opened:
            grant = await opened.checkpoints.acquire_writer("t", ttl=600)
            assert grant.lease.thread_id == "t"

    asyncio.run(hold())
    outcome = run("capture", str(tree), "--thread", "t", "--json", code=11)
    assert (outcome.error["message_type"], outcome.error["code"]) == ("error", "WRITER_HELD")
    assert outcome.error["retryable"] is True
    run("capture", str(tree), "--thread", "t", "--wait", "0.2", code=11)
    assert run("capture", str(tree), "--thread", "t", "--skip-locked", "--json").json["locked"] is True
    run("capture", str(tree), "--thread", "another")


def test_warnings(run: Run, tree: Path) -> None:
    run("init")
    os.mkfifo(tree / "pipe")
    refused = run("capture", str(tree), "--thread", "t", "--json", code=1)
    assert refused.error["code"] == "UNSUPPORTED_ENTRY"
    assert refused.error["paths"] == [{"path": "pipe"}]
    assert refused.error["hint"]
    kept = run("capture", str(tree), "--thread", "t", "--on-unsupported", "skip", "--json", code=3).json
    assert [each["path"] for each in kept["skipped"]] == ["pipe"]
    assert run("ls", "latest", "--thread", "t", "--json").json[0]["kind"] == "folder"
    run("capture", str(tree), "--thread", "t", "--exclude", "pipe")


def test_what_makes_the_exit_code_3_is_told_when_no_result_is_wanted(run: Run, tree: Path, tmp_path: Path) -> None:
    run("init")
    os.mkfifo(tree / "pipe")
    skip = ("-t", "t", "--on-unsupported", "skip", "-q")
    outcome = run("capture", str(tree), *skip, code=3)
    assert (outcome.stdout, outcome.stderr) == (b"", "left out: 1 path; --verbose names them\n")
    assert run("import", str(tree), *skip, "-v", code=3).stderr == "left out: pipe (a FIFO)\n"
    outcome = run("diff", "latest", str(tree), "-t", "t", "-q", code=3)
    assert (outcome.stdout, outcome.stderr.partition(":")[0]) == (b"", "? pipe")
    assert "left out: 1 path" in run("capture", str(tree), *skip[:-1], code=3).text


def test_no_result_when_none_is_wanted(made: Run) -> None:
    for words in ("ls latest", "ls latest --tree", "ls latest --long", "list", "show latest", "diff latest", "stats", "log t"):
        args = words.split() if words.startswith(("stats", "log")) else [*words.split(), "-t", "t"]
        outcome = made(*args, "-q")
        assert outcome.stdout + outcome.stderr.encode() == b"", words
    assert "INVALID_REQUEST" in made("ls", "latest:absent", "-t", "t", "-q", code=1).stderr


def test_limits(run: Run, tree: Path) -> None:
    run("init")
    for limit in (("--max-files", "1"), ("--max-file-bytes", "10"), ("--max-total-bytes", "10")):
        assert "[LIMIT_EXCEEDED]" in run("capture", str(tree), "--thread", "t", *limit, code=1).stderr
    assert run("list", "--thread", "t", "--json").json == []


def test_roots_that_are_too_much(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("init")
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").write_bytes(b"x")
    monkeypatch.setenv("HOME", str(home))
    assert "[INVALID_WORKSPACE]" in run("capture", str(home), "--thread", "t", code=1).stderr
    assert "[INVALID_WORKSPACE]" in run("capture", "/", "--thread", "t", code=1).stderr
    run("capture", str(home), "--thread", "t", "--allow-any-root")
    for place in (str(home), "~", "/"):
        assert "[INVALID_WORKSPACE]" in run("diff", "latest", place, "--thread", "t", code=1).stderr
    run("diff", "latest", "~", "--thread", "t", "--allow-any-root")


def test_a_restore_that_has_nothing_to_restore_fails(run: Run, tree: Path) -> None:
    run("init")
    before = sorted(os.listdir(tree))
    for which in ((), ("--checkpoint", "latest"), ("--checkpoint", "label:none"), ("--checkpoint", "feed")):
        assert "[MISSING_CHECKPOINT]" in run("restore", str(tree), "--thread", "t", *which, code=1).stderr
    assert sorted(os.listdir(tree)) == before


def test_ids_may_be_shortened_while_they_are_unique(run: Run, tree: Path) -> None:
    run("init")
    for each in ("abc1", "abc2"):
        run("capture", str(tree), "--thread", "t", "--id", each)
    assert run("show", "abc1", "--json").json["id"] == "abc1"
    ambiguous = run("show", "abc", code=1).stderr
    assert "[AMBIGUOUS_ID]" in ambiguous
    assert "abc1" in ambiguous
    assert "abc2" in ambiguous


def test_a_current_folder_that_is_gone_is_told(made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    try:
        made("list", "-t", "t")
        for command in (
            ("export", "one", "-o", "x.tar"),
            ("import", ".", "-t", "i"),
            ("init", "-r", "r"),
            ("capture", ".", "-t", "t"),
        ):
            assert "The current folder is gone. [MISSING_WORKSPACE]" in made(*command, code=1).stderr
    finally:
        os.chdir(tmp_path)


def test_an_address_that_can_be_no_folder(made: Run) -> None:
    for command in (("capture",), ("restore",), ("diff", "latest")):
        assert "[INVALID_WORKSPACE]" in made(*command, "file:///a%00b", "--thread", "t", code=1).stderr


def test_a_workspace_whose_path_is_no_text_can_be_reached_by_a_link(made: Run, tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(odd)
    for command in (
        ("capture", odd),
        ("restore", odd),
        ("import", odd),
        ("diff", "latest", odd),
        ("capture", "--root", f"a={odd}"),
    ):
        assert "caf\\xe9. [INVALID_WORKSPACE]" in made(*command, "--thread", "t", code=1).stderr
    (tmp_path / "link").symlink_to(odd)
    made("restore", str(tmp_path / "link"), "--thread", "t")
    assert "notes.txt" in os.listdir(odd)


def test_a_user_without_a_home_folder_gets_none_called_after_its_sign(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    before = sorted(os.listdir(tmp_path))
    for place in ("~", "~/work"):
        assert "this user has none. [INVALID_REQUEST]" in made("restore", place, "--thread", "t", code=1).stderr
    monkeypatch.delenv("SNAPCORE_REPO")
    for command in (("init",), ("list", "--thread", "t")):
        assert "Set HOME" in made(*command, code=2).stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_an_unknown_sandbox_scheme(run: Run) -> None:
    run("init")
    assert "[UNKNOWN_SCHEME]" in run("capture", "nowhere://x", "--thread", "t", code=1).stderr


def test_damage_is_found(made: Run, repo: Path) -> None:
    packs = sorted(path for path in (repo / "packs").rglob("*") if path.is_file())
    packs[0].unlink()
    outcome = made("verify", "--json", code=1)
    assert outcome.json["ok"] is False
    assert outcome.json["problems"][0]["checkpoints"]
    assert "needed by checkpoint" in made("verify", "--quiet", code=1).text


def test_a_repository_that_has_lost_its_settings_is_not_taken_for_none(made: Run, repo: Path) -> None:
    kept = (repo / "snapcore.json").read_bytes()
    (repo / "snapcore.json").unlink()
    for command in (("list", "-t", "t"), ("threads",), ("init",), ("repair",)):
        outcome = made(*command, code=1)
        assert "has packs and no snapcore.json. [DAMAGED]" in outcome.stderr
        assert "from a copy" in outcome.stderr
    assert not list(repo.glob("snapcore*.json")), "an init makes no other repository of it"
    (repo / "snapcore.json").write_bytes(kept)
    made("verify")


def test_a_foreign_file_in_the_place_of_the_database(run: Run, repo: Path) -> None:
    run("init")
    for path in repo.glob("*.db*"):
        path.write_bytes(b"no database at all, but long enough to be looked at as one" * 99)
    outcome = run("list", "--thread", "t", code=1)
    assert "snapcore repair" in outcome.stderr
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(next(iter(repo.glob("*.db")))).execute("SELECT * FROM sqlite_master")


def test_debug_shows_the_traceback(run: Run) -> None:
    assert "Traceback" in run("list", "-t", "t", "--debug", code=10).stderr


def test_an_empty_value_is_a_variable_that_was_not_set(made: Run, tree: Path) -> None:
    before = sorted(os.listdir(tree))
    place = str(tree)
    for wrong in (
        ("restore", "", "--thread", "t"),
        ("restore", place, "--thread", "t", "-c", ""),
        ("restore", place, "--thread", ""),
        ("restore", place, "--thread", "t", "--repo", ""),
        ("restore", place, "--thread", "t", "--database", ""),
        ("restore", place, "--thread", "t", "--paths", ""),
        ("restore", place, "--thread", "t", "--paths", "src", "--paths", ""),
        ("capture", "", "--thread", "t"),
        ("capture", place, "--thread", "t", "--label", ""),
        ("capture", place, "--thread", "t", "--id", ""),
        ("label", "one", "", "--thread", "t"),
        ("fork", "--thread", "t", "--to", ""),
        ("show", ""),
        ("init", "--repo", ""),
    ):
        outcome = made(*wrong, code=2)
        assert outcome.stdout == b""
        assert "it is empty" in outcome.stderr
    assert sorted(os.listdir(tree)) == before
    kept = made("list", "--thread", "t", "--json").json
    assert [(each["id"], each["label"]) for each in kept] == [("one", "first"), ("two", None)]


def test_values_that_make_no_sense(made: Run, tree: Path) -> None:
    for wait in ("-1", "nan", "-inf"):
        assert "--wait" in made("capture", str(tree), "--thread", "t", "--wait", wait, code=2).stderr
        assert "--wait" in made("forget", "--thread", "t", "--keep-last", "1", "--wait", wait, code=2).stderr
    assert len(made("list", "--thread", "t", "--json").json) == 2
    made("capture", str(tree), "--thread", "t", "--wait", "0")
    twice = ("--root", f"a={tree}", "--root", f"a={tree / 'src'}")
    for command in ("capture", "restore"):
        assert "twice" in made(command, "--thread", "t", *twice, code=2).stderr
    assert "--secret-env" in made("restore", str(tree), "--thread", "t", "--reinject", code=2).stderr
    for place in (("diff", "one", ":"), ("ls", ":src"), ("cat", ":notes.txt")):
        assert "No checkpoint is named" in made(*place, code=2).stderr


@pytest.mark.parametrize("value", ["", "short", "  short  "])
def test_a_secret_too_short_to_look_for(made: Run, tree: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TEST_SHORT", value)
    for command in ("capture", "restore"):
        outcome = made(command, str(tree), "--thread", "t", "--secret-env", "TEST_SHORT", "--json", code=2)
        assert "TEST_SHORT" in outcome.error["message"]
        assert "no option" in outcome.error["hint"]
        assert "allow_short" not in outcome.stderr
