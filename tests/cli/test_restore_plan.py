"""`snapcore restore --dry-run`: the plan as a table and as JSON, and `restore --paths` in sandboxes of several kinds."""

import io
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapcore.cli import restore_plan
from snapcore.cli.restore_plan import print_plan
from snapcore.model import Kind
from snapcore.planned import PlannedChange
from snapcore.restoring import RestorePlan

from .conftest import Run

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def changed(run: Run, tree: Path) -> Run:
    """A workspace that differs from checkpoint `base` in all the ways there are."""
    (tree / "mode").write_bytes(b"x")
    (tree / "touched").write_bytes(b"same")
    (tree / "became").write_bytes(b"a file")
    (tree / "gone").mkdir()
    (tree / "gone" / "below").write_bytes(b"123")
    os.link(tree / "touched", tree / "twin")
    run("init")
    run("capture", str(tree), "--thread", "t", "--id", "base")
    (tree / "notes.txt").write_bytes(b"second, longer\n")
    (tree / "mode").chmod(0o755)
    os.utime(tree / "src" / "main.py", ns=(0, 10**18))
    (tree / "twin").unlink()
    (tree / "twin").write_bytes(b"same")
    stat = (tree / "touched").stat()
    os.utime(tree / "twin", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (tree / "link").unlink()
    (tree / "link").symlink_to("notes.txt")
    (tree / "became").unlink()
    (tree / "became").mkdir()
    (tree / "gone" / "below").unlink()
    (tree / "gone").rmdir()
    (tree / "new").mkdir()
    (tree / "new" / "file").write_bytes(b"12345")
    (tree / "src").chmod(0o700 if (tree / "src").stat().st_mode & 0o77 else 0o755)
    return run


def planned(run: Run, tree: Path) -> dict[str, Any]:
    return {each["path"]: each for each in run("restore", str(tree), "-t", "t", "-n", "--json").json["plan"]["paths"]}


def test_each_path_says_what_and_why(changed: Run, tree: Path) -> None:
    plan = planned(changed, tree)
    assert plan["notes.txt"] == {
        "root": "workspace",
        "path": "notes.txt",
        "action": "change",
        "kind": "file",
        "size": 6,
        "size_before": 15,
        "why": ["content", "time"],
    }
    assert plan["new/file"] == {
        "root": "workspace",
        "path": "new/file",
        "action": "remove",
        "kind": "file",
        "size": 5,
        "size_before": 0,
        "why": [],
    }
    assert (plan["new"]["action"], plan["new"]["kind"]) == ("remove", "folder")
    assert (plan["gone"]["action"], plan["gone"]["kind"]) == ("add", "folder")
    assert (plan["gone/below"]["action"], plan["gone/below"]["size"]) == ("add", 3)
    assert plan["mode"]["why"] == ["mode"]
    assert plan["src"]["why"] == ["mode"]
    assert plan["src/main.py"]["why"] == ["time"]
    assert plan["twin"]["why"] == ["hard link"]
    assert "content" in plan["link"]["why"]
    assert (plan["became"]["why"], plan["became"]["kind"]) == (["kind"], "file")


def test_the_plan_has_the_paths_of_its_lists_and_is_what_is_done(changed: Run, tree: Path) -> None:
    outcome = changed("restore", str(tree), "-t", "t", "-n", "--json").json
    plan = outcome["plan"]
    for action, key in (("remove", "removes"), ("add", "adds"), ("change", "changes")):
        assert [each["path"] for each in plan["paths"] if each["action"] == action] == plan[key]
    done = changed("restore", str(tree), "-t", "t", "--json").json
    assert "plan" not in done
    counts = ("removed", "added", "changed", "unchanged")
    assert [done[name] for name in counts] == [outcome[name] for name in counts]
    assert planned(changed, tree) == {}


def test_the_table_has_removals_first(changed: Run, tree: Path) -> None:
    lines = changed("restore", str(tree), "-t", "t", "-n").text.splitlines()
    assert lines[0].split() == ["BEFORE", "AFTER", "WHAT", "PATH"]
    signs = "".join(line[0] for line in lines[1:-5])
    assert signs == "".join(sorted(signs, key="-+~".index))
    assert "-     5 B         file           new/file" in lines
    assert any(line.split() == ["~", "15", "B", "6", "B", "content,", "time", "notes.txt"] for line in lines)
    assert any(line.endswith("now a file     became") for line in lines)
    assert lines[-5].startswith("- 2 paths removed: 5 B")
    assert lines[-4].startswith("+ 2 paths added: 3 B")
    assert lines[-3].startswith("~ 8 paths changed:")
    assert lines[-2].startswith("would restore checkpoint base: ")
    assert lines[-1].startswith("2 removed, 2 added, 8 changed")
    assert max(map(len, lines)) <= 80


def test_nothing_to_do_is_no_table(made: Run, tree: Path) -> None:
    first, _counts = made("restore", str(tree), "-t", "t", "-n").text.splitlines()
    assert first.startswith("would restore checkpoint two: ")


def many(number: int) -> RestorePlan:
    paths = tuple(PlannedChange("workspace", b"f%05d" % i, "remove", Kind.FILE, 10) for i in range(number))
    return RestorePlan(tuple(p.path for p in paths), (), (), 0, paths)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "all_paths", "shown"), [(Terminal, False, 50), (Terminal, True, 1284), (io.StringIO, False, 1284)]
)
def test_a_long_plan_is_cut_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], all_paths: bool, shown: int
) -> None:
    written = stream()
    monkeypatch.setattr(sys, "stdout", written)
    print_plan(many(1284), all_paths=all_paths)
    text = written.getvalue()
    assert text.count(" f0") == shown
    assert ("... and 1,234 more; -v shows all" in text) == (shown == 50)
    assert "- 1,284 paths removed: 12.8 kB" in text


def test_a_group_of_just_the_limit_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Terminal()
    monkeypatch.setattr(sys, "stdout", written)
    print_plan(many(restore_plan.SHOWN), all_paths=False)
    assert "more" not in written.getvalue()


def test_names_cannot_steer_the_terminal(made: Run, tree: Path) -> None:
    (tree / "evil\x1b[2J\n").write_bytes(b"")
    text = made("restore", str(tree), "-t", "t", "-n").text
    assert "\x1b" not in text
    assert "evil" in text


def test_several_roots_are_told_apart(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same").write_text(name)
    run("init")
    roots = [word for name in ("a", "b") for word in ("--root", f"{name}={tmp_path / name}")]
    run("capture", "--thread", "t", *roots)
    for name in ("a", "b"):
        (tmp_path / name / "same").unlink()
    text = run("restore", "--thread", "t", *roots, "-n").text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("+ ") and ":" in line.split()[-1]] == [
        "a:same",
        "b:same",
    ]


KINDS: dict[str, Callable[[Path], str]] = {
    "folder": str,
    "command": lambda path: f"exec:env {shlex.quote(str(path))}",
}


@pytest.mark.parametrize("kind", KINDS)
def test_some_paths_only(made: Run, tree: Path, kind: str) -> None:
    address = KINDS[kind](tree)
    before = (tree / "notes.txt").read_bytes()
    words = ("restore", address, "--thread", "t", "-c", "one", "--paths", "src", "--paths", "added.txt")
    plan = made(*words, "--dry-run", "--json").json["plan"]
    assert (plan["removes"], plan["adds"], plan["changes"]) == (["added.txt"], ["src/main.py"], [])
    made(*words)
    assert (tree / "notes.txt").read_bytes() == before
    assert (tree / "src" / "main.py").read_bytes() == b"print('hello')\n"
    assert not (tree / "added.txt").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("show", "{}"),
        ("ls", "{}"),
        ("cat", "{}:notes.txt"),
        ("diff", "{}", "one"),
        ("rewind", "{}", "--thread", "t"),
        ("label", "{}", "name", "--thread", "t"),
        ("delete", "{}", "--thread", "t"),
        ("fork", "--thread", "t", "--to", "new", "-c", "{}"),
        ("restore", "{tree}", "--thread", "t", "-c", "{}"),
        ("export", "{}", "-o", "{tree}.tar"),
        ("exec", "{tree}", "--thread", "t", "--restore", "{}", "--json", "--", "true"),
    ],
    ids=lambda words: words[0],
)
def test_an_ambiguous_id_is_refused_with_the_candidates(made: Run, tree: Path, words: tuple[str, ...]) -> None:
    for end in ("a", "b"):
        (tree / end).write_text(end)
        made("capture", str(tree), "--thread", "t", "--id", f"twin-{end}")
    command = [word.replace("{tree}", str(tree)).replace("{}", "twin-") for word in words]
    if "--json" not in command:
        command.append("--json")
    error = made(*command, code=125 if words[0] == "exec" else 1).error
    assert error["code"] == "AMBIGUOUS_ID"
    assert "twin-a" in error["message"]
    assert "twin-b" in error["message"]
