"""Every command does what it says, in words and as JSON."""

import datetime
import json
import os
from pathlib import Path

import pytest

from snapcore.cli.restore import _warn
from snapcore.cli.runtime import Invocation
from snapcore.restoring import Receipt

from .conftest import Run

CHECKPOINT_KEYS = {"id", "parent_id", "reason", "label", "created_at", "content_id", "files", "bytes"}


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and not p.is_symlink()}


def test_init_creates_a_repository_once(run: Run, repo: Path) -> None:
    assert repo.name in run("init").text
    assert (repo / "snapcore.json").is_file()
    assert "[REPOSITORY_EXISTS]" in run("init", code=1).stderr


def test_a_repository_whose_path_is_not_utf_8(run: Run, tree: Path, tmp_path: Path) -> None:
    place = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    run("init", "--repo", place)
    run("capture", str(tree), "--repo", place, "--thread", "t")
    assert len(run("list", "--repo", place, "--thread", "t", "--json").json) == 1


def test_the_repository_is_named_by_an_option_or_the_environment(run: Run, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    answer = run("init", "--repo", other, "--json").json
    assert answer["message_type"] == "init"
    assert answer["repository_id"]
    assert run("list", "--repo", other, "--thread", "t", "--json").json == []
    run("list", "--thread", "t", code=10)


def test_the_database_can_be_elsewhere(run: Run, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    run("init", "--database", database)
    monkeypatch.setenv("SNAPCORE_DATABASE", database)
    run("capture", str(tree), "--thread", "t")
    assert (tmp_path / "elsewhere.db").is_file()
    assert len(run("list", "--thread", "t", "--json").json) == 1


def test_capture_restore_round_trip(made: Run, tree: Path) -> None:
    made("restore", str(tree), "--thread", "t", "--checkpoint", "one")
    assert contents(tree) == {"src/main.py": b"print('hello')\n", "notes.txt": b"first\n"}
    assert os.readlink(tree / "link") == "src/main.py"
    made("restore", str(tree), "--thread", "t", "--checkpoint", "latest")
    assert contents(tree) == {"notes.txt": b"second, longer\n", "added.txt": b"added\n"}


def test_capture_tells_what_it_did(run: Run, tree: Path) -> None:
    run("init")
    answer = run("capture", str(tree), "--thread", "t", "--label", "L", "--run-id", "r", "--step", "3", "--json").json
    assert answer.keys() >= CHECKPOINT_KEYS | {"files_read", "bytes_read", "bytes_stored", "packs", "skipped", "warnings"}
    assert answer["message_type"] == "capture"
    assert answer["created"] is True
    assert (answer["label"], answer["reason"], answer["run_id"], answer["step"]) == ("L", "named", "r", 3)
    assert (answer["files"], answer["files_read"]) == (2, 2)
    words = run("capture", str(tree), "--thread", "t").text
    assert "2 files" in words
    assert "in thread" not in words


def test_capture_skips_what_is_unchanged_when_asked(run: Run, tree: Path) -> None:
    run("init")
    first = run("capture", str(tree), "--thread", "t", "--json").json
    again = run("capture", str(tree), "--thread", "t", "--skip-unchanged", "--json").json
    assert (again["created"], again["id"]) == (False, first["id"])
    assert first["id"] in run("capture", str(tree), "--thread", "t", "--skip-unchanged").text
    assert len(run("list", "--thread", "t", "--json").json) == 1


def test_an_idempotency_key_finds_the_checkpoint_again(run: Run, tree: Path) -> None:
    run("init")
    first = run("capture", str(tree), "--thread", "t", "--idempotency-key", "k", "--json").json
    (tree / "more").write_bytes(b"more")
    again = run("capture", str(tree), "--thread", "t", "--idempotency-key", "k", "--json").json
    assert (again["id"], again["created"]) == (first["id"], False)


def test_patterns_choose_what_is_captured(run: Run, tree: Path) -> None:
    run("init")
    for name in (".env", "keep.py", "drop.log"):
        (tree / name).write_bytes(b"x")
    (tree / ".git").mkdir()
    (tree / ".git" / "HEAD").write_bytes(b"ref")

    def captured(*options: str) -> set[str]:
        run("capture", str(tree), "--thread", "t", *options)
        entries = run("ls", "latest", "--thread", "t", "--json").json
        return {entry["path"] for entry in entries if entry["kind"] == "file"}

    usual = {"keep.py", "drop.log", "notes.txt", "src/main.py"}
    assert captured() == usual
    assert captured("--exclude", "*.log") == usual - {"drop.log"}
    assert captured("--include", "*.py") == {"keep.py", "src/main.py"}
    assert captured("--with-git") == usual | {".git/HEAD"}
    assert captured("--everything") == usual | {".git/HEAD", ".env"}
    assert captured("--everything", "--exclude", ".git") == usual | {".env"}


def test_several_roots_are_one_checkpoint(run: Run, tmp_path: Path) -> None:
    run("init")
    for name in ("app", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(name.encode())
    options = [f"--root={name}={tmp_path / name}" for name in ("app", "data")]
    run("capture", *options, "--thread", "t", "--id", "one")
    shown = run("show", "one", "--json").json
    assert [root["name"] for root in shown["roots"]] == ["app", "data"]
    assert run("cat", "one:file", "--root", "data").stdout == b"data"
    (tmp_path / "data" / "file").write_bytes(b"changed")
    run("capture", *options, "--thread", "t", "--id", "two")
    assert run("diff", "one", "two", "--json").json["changed"] == ["data:file"]
    run("restore", str(tmp_path / "new"), "--thread", "t", code=2)
    run("restore", "--thread", "t", "--checkpoint", "one", f"--root=data={tmp_path / 'new'}")
    assert contents(tmp_path / "new") == {"file": b"data"}
    assert contents(tmp_path / "data") == {"file": b"changed"}


def test_list_is_an_array_also_when_it_is_empty(made: Run) -> None:
    assert made("list", "--thread", "nothing", "--json").json == []
    checkpoints = made("list", "--thread", "t", "--json").json
    assert [each["id"] for each in checkpoints] == ["one", "two"]
    assert all(each.keys() >= CHECKPOINT_KEYS for each in checkpoints)
    assert [each["parent_id"] for each in checkpoints] == [None, "one"]
    assert [each["label"] for each in checkpoints] == ["first", None]
    assert [each["reason"] for each in checkpoints] == ["named", "automatic"]
    assert [each["files"] for each in checkpoints] == [2, 2]
    times = [datetime.datetime.fromisoformat(each["created_at"]) for each in checkpoints]
    assert times[0] < times[1]
    assert len({each["content_id"] for each in checkpoints}) == 2


def test_list_in_words_has_a_line_for_each(made: Run) -> None:
    lines = made("list", "--thread", "t").text.splitlines()
    assert lines[0].split() == ["ID", "CREATED", "REASON", "LABEL", "FILES", "SIZE"]
    assert [line.split()[0] for line in lines[1:]] == ["one", "two"]
    assert made("snapshots", "--thread", "t").text.splitlines() == lines


def test_where_there_is_no_checkpoint_words_say_so(run: Run, tree: Path) -> None:
    run("init")
    assert run("threads").text == "No thread has a checkpoint yet. 'snapcore capture' makes one.\n"
    run("capture", str(tree), "--thread", "t")
    assert run("list", "--thread", "u").text == "Thread u has no checkpoint. 'snapcore threads' shows the threads there are.\n"
    assert "'snapcore threads'" in run("restore", str(tree), "--thread", "u", code=1).stderr


def test_threads(made: Run) -> None:
    (found,) = made("threads", "--json").json
    assert (found["thread_id"], found["head_id"], found["checkpoints"]) == ("t", "two", 2)
    assert "two" in made("threads").text


def test_show(made: Run) -> None:
    shown = made("show", "label:first", "--thread", "t", "--json").json
    assert (shown["id"], shown["roots"][0]["files"]) == ("one", 2)
    assert made("show", "one", "--json").json["message_type"] == "show"
    assert "content_id" in made("show", "one").text


def test_ls(made: Run) -> None:
    entries = {each["path"]: each for each in made("ls", "one", "--json").json}
    assert {"src", "src/main.py", "notes.txt", "link"} <= entries.keys()
    assert entries["notes.txt"]["size"] == 6
    assert (entries["link"]["kind"], entries["link"]["target"]) == ("link", "src/main.py")
    assert entries["src"]["kind"] == "folder"
    assert "src/main.py" in made("ls", "one:src").text.splitlines()
    assert "notes.txt" not in made("ls", "one:src").text
    assert "src/main.py" not in made("ls", "one", "--flat").text
    assert "-> src/main.py" in made("ls", "one", "-v").text


def test_cat_writes_the_bytes_as_they_are(run: Run, tree: Path) -> None:
    data = bytes(range(256)) * 9000
    (tree / "binary").write_bytes(data)
    run("init")
    run("capture", str(tree), "--thread", "t", "--label", "L")
    assert run("cat", "latest:binary", "--thread", "t").stdout == data
    assert run("cat", "label:L:notes.txt", "--thread", "t").stdout == b"first\n"
    run("cat", "latest:absent", "--thread", "t", code=1)
    run("cat", "latest", "--thread", "t", code=2)


def test_diff(made: Run) -> None:
    answer = made("diff", "one", "two", "--json").json
    assert answer["added"] == ["added.txt"]
    assert answer["removed"] == ["src/main.py"]
    assert "notes.txt" in answer["changed"]
    assert answer["inexact"] == []
    assert {"+ added.txt", "- src/main.py", "~ notes.txt"} <= set(made("diff", "one", "two").text.splitlines())
    assert made("diff", "one", "one", "--json").json["changed"] == []


def test_fork_copies_a_checkpoint_to_an_empty_thread(made: Run, tree: Path) -> None:
    answer = made("fork", "--thread", "t", "--to", "t2", "--checkpoint", "one", "--json").json
    assert (answer["message_type"], answer["reason"], answer["parent_id"]) == ("fork", "fork-root", None)
    assert (answer["source_thread_id"], answer["source_id"]) == ("t", "one")
    made("restore", str(tree), "--thread", "t2")
    assert contents(tree)["notes.txt"] == b"first\n"
    assert "[DESTINATION_NOT_EMPTY]" in made("fork", "--thread", "t", "--to", "t2", code=1).stderr
    made("fork", "--thread", "t", "--to", "t3", "--checkpoint", "one", "--step", "1", code=2)


def test_fork_at_a_step(run: Run, tree: Path) -> None:
    run("init")
    for step in (1, 2, 3):
        run("capture", str(tree), "--thread", "t", "--id", f"step-{step}", "--step", str(step))
    assert run("fork", "--thread", "t", "--to", "t2", "--step", "2", "--json").json["source_id"] == "step-2"


def test_rewind_appends(made: Run) -> None:
    answer = made("rewind", "one", "--thread", "t", "--json").json
    assert (answer["parent_id"], answer["reason"]) == ("two", "rewind")
    assert made("diff", "one", answer["id"], "--json").json["changed"] == []
    assert len(made("list", "--thread", "t", "--json").json) == 3


@pytest.mark.parametrize("label", ["\udcff", "two\nlines", "x" * 600])
def test_label_takes_what_capture_takes(made: Run, tree: Path, label: str) -> None:
    for command in (("label", "two", label), ("capture", str(tree), "--label", label)):
        assert "[INVALID_ENTRY]" in made(*command, "--thread", "t", code=1).stderr
    assert [each["label"] for each in made("list", "-t", "t", "--json").json] == ["first", None]


def test_label_is_given_and_taken_away(made: Run) -> None:
    assert made("label", "two", "new name", "--thread", "t", "--json").json["label"] == "new name"
    assert made("show", "label:new name", "--thread", "t", "--json").json["id"] == "two"
    made("label", "two", "--thread", "t")
    assert made("list", "--thread", "t", "--json").json[1]["label"] is None


def test_delete_removes_a_checkpoint(made: Run) -> None:
    assert made("delete", "two", "--thread", "t", "--dry-run", "--json").json["dry_run"] is True
    assert made("delete", "two", "--thread", "t", "--json").json["id"] == "two"
    assert [each["id"] for each in made("list", "--thread", "t", "--json").json] == ["one"]


def test_verify_and_stats(made: Run) -> None:
    answer = made("verify", "--read-data", "--json").json
    assert (answer["message_type"], answer["ok"], answer["checkpoints"], answer["problems"]) == ("verify", True, 2, [])
    assert answer["bytes_read"] > 0
    assert "no problem found" in made("check").text
    stats = made("stats", "--json").json
    assert (stats["message_type"], stats["threads"], stats["checkpoints"]) == ("stats", 1, 2)
    assert stats["stored_bytes"] > 0
    assert "2 checkpoints in 1 thread" in made("stats").text


def test_restore_tells_what_it_did(made: Run, tree: Path, tmp_path: Path) -> None:
    answer = made("restore", str(tree), "--thread", "t", "--checkpoint", "one", "--json").json
    assert answer["message_type"] == "restore"
    assert (answer["id"], answer["files"], answer["removed"], answer["added"]) == ("one", 2, 1, 1)
    assert answer["differences"] == []
    words = made("restore", str(tmp_path / "new"), "--thread", "t", "--verify", "content").text
    assert "restored checkpoint two" in words


def test_a_dry_run_shows_removals_first_and_changes_nothing(made: Run, tree: Path) -> None:
    before = contents(tree)
    plan = made("restore", str(tree), "--thread", "t", "--checkpoint", "one", "--dry-run", "--json").json["plan"]
    assert plan["removes"] == ["added.txt"]
    assert "src/main.py" in plan["adds"]
    assert "notes.txt" in plan["changes"]
    lines = made("restore", str(tree), "--thread", "t", "--checkpoint", "one", "-n").text.splitlines()
    assert lines[1].split() == ["-", "6", "B", "file", "added.txt"]
    assert contents(tree) == before


def test_restore_takes_some_paths_only(made: Run, tree: Path) -> None:
    made("restore", str(tree), "--thread", "t", "--checkpoint", "one", "--paths", "src")
    assert contents(tree) == {"src/main.py": b"print('hello')\n", "notes.txt": b"second, longer\n", "added.txt": b"added\n"}


def test_emptying_a_folder_has_to_be_asked_for(run: Run, tree: Path, tmp_path: Path) -> None:
    run("init")
    (tmp_path / "empty").mkdir()
    run("capture", str(tmp_path / "empty"), "--thread", "t")
    before = contents(tree)
    assert "[EMPTY_RESTORE]" in run("restore", str(tree), "--thread", "t", code=1).stderr
    assert contents(tree) == before
    run("restore", str(tree), "--thread", "t", "--allow-empty")
    assert contents(tree) == {}


def test_a_safety_checkpoint_keeps_what_was_there(made: Run, tree: Path) -> None:
    (tree / "unsaved").write_bytes(b"work")
    made("restore", str(tree), "--thread", "t", "--checkpoint", "one", "--safety-checkpoint")
    assert "unsaved" not in contents(tree)
    everywhere = [
        each["id"]
        for thread in made("threads", "--json").json
        for each in made("list", "--thread", thread["thread_id"], "--json").json
    ]
    assert any("unsaved" in made("ls", each).text.splitlines() for each in everywhere)


def test_secrets_are_taken_out_and_put_back(run: Run, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("init")
    monkeypatch.setenv("TEST_TOKEN", "tok-123456789")
    (tmp_path / "password").write_bytes(b"swordfish!\n")
    (tree / "config").write_bytes(b"a=tok-123456789\nb=swordfish!\n")
    secrets = ["--secret-env", "TEST_TOKEN", "--secret-file", f"PASSWORD={tmp_path / 'password'}"]
    run("capture", str(tree), "--thread", "t", *secrets)
    assert run("cat", "latest:config", "--thread", "t").stdout == b"a=" + b"\0" * 13 + b"\nb=" + b"\0" * 10 + b"\n"
    plain = run("restore", str(tmp_path / "plain"), "--thread", "t", "--json").json
    assert plain["redacted"] == ["config"]
    run("restore", str(tmp_path / "whole"), "--thread", "t", "--reinject", *secrets)
    assert (tmp_path / "whole" / "config").read_bytes() == b"a=tok-123456789\nb=swordfish!\n"


def test_ls_says_how_much_is_redacted_where_the_entry_tells(run: Run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("init")
    monkeypatch.setenv("TEST_TOKEN", "tok-123456789")
    (tree / "few").write_bytes(b"tok-123456789\n" * 64)
    (tree / "many").write_bytes(b"tok-123456789\n" * 65)
    run("capture", str(tree), "--thread", "t", "--secret-env", "TEST_TOKEN")
    entries = {each["path"]: each for each in run("ls", "latest", "--thread", "t", "--json").json}
    assert entries["few"]["redacted_bytes"] == 64 * 13
    assert entries["many"]["redacted_bytes"] is None
    assert "redacted_bytes" not in entries["notes.txt"]


def test_the_root_folder_is_shown_as_a_dot(made: Run, tree: Path) -> None:
    tree.chmod(0o700 if tree.stat().st_mode & 0o77 else 0o755)
    lines = made("restore", str(tree), "--thread", "t", "-n").text.splitlines()
    assert lines[1].split() == ["~", "mode", "."]
    made("capture", str(tree), "--thread", "t", "--id", "three")
    assert made("diff", "two", "three").text.splitlines() == ["~ ."]


def test_names_that_are_not_utf8_are_exact_in_json(run: Run, tree: Path) -> None:
    run("init")
    with open(os.fsencode(tree) + b"/caf\xe9", "wb") as file:
        file.write(b"x")
    run("capture", str(tree), "--thread", "t")
    entries = run("ls", "latest", "--thread", "t", "--json").json
    assert {"path": "caf\\xe9", "path_b64": "Y2Fm6Q=="}.items() <= entries[1].items()
    assert run("cat", "latest:" + os.fsdecode(b"caf\xe9"), "--thread", "t").stdout == b"x"
    assert "caf\\xe9" in run("ls", "latest", "--thread", "t").text.splitlines()


def test_control_characters_never_reach_the_terminal(run: Run, tree: Path) -> None:
    run("init")
    (tree / "evil\x1b[31m\nname").write_bytes(b"x")
    run("capture", str(tree), "--thread", "t", "--id", "one")
    (tree / "evil\x1b[31m\nname").unlink()
    os.mkfifo(tree / "pipe\x1b[2J")
    refused = run("capture", str(tree), "--thread", "t", code=1)
    run("capture", str(tree), "--thread", "t", "--id", "two", "--on-unsupported", "skip", code=3)
    outputs = [
        refused.stderr.encode(),
        *(
            run(*command).stdout
            for command in (
                ("ls", "one"),
                ("ls", "one", "-v"),
                ("ls", "one", "--json"),
                ("diff", "one", "two"),
                ("diff", "one", "two", "--json"),
                ("show", "two"),
                ("restore", str(tree), "--thread", "t", "--checkpoint", "one", "-n", "-v"),
            )
        ),
    ]
    assert all(b"\x1b" not in output for output in outputs)
    assert "evil\\x1b[31m\\nname" in run("ls", "one").text.splitlines()
    assert "evil\x1b[31m\nname" in [entry["path"] for entry in run("ls", "one", "--json").json]


def test_quiet_prints_nothing(run: Run, tree: Path) -> None:
    assert run("init", "-q").stdout == b""
    assert run("capture", str(tree), "--thread", "t", "-q").stdout == b""
    assert run("verify", "-q").stdout == b""
    assert run("list", "--thread", "t", "-q", "--json").json


def test_every_json_answer_is_one_value(made: Run, tree: Path) -> None:
    for command in (
        ("threads",),
        ("list", "-t", "t"),
        ("show", "one"),
        ("ls", "one"),
        ("diff", "one", "two"),
        ("stats",),
        ("verify",),
        ("capture", str(tree), "-t", "t"),
        ("restore", str(tree), "-t", "t"),
    ):
        json.loads(made(*command, "--json").stdout)


def test_what_the_root_folder_could_not_hold_is_shown_under_a_dot(capsys: pytest.CaptureFixture[str]) -> None:
    told = Receipt(checkpoint_id="one", content_id=b"", files=0, folders=0, links=0, bytes=0, differences=((b"", "other mode"),))
    words = Invocation()
    _warn(words, told)
    assert capsys.readouterr().out == "differs: .: other mode\n"
