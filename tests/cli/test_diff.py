"""`snapcore diff`: two checkpoints, a checkpoint and a sandbox; names, tables, patches, JSON, exit codes."""

import base64
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Run

EVIL = b"evil\x1b[31m\nname"


@pytest.fixture
def made(run: Run, tree: Path) -> Run:
    """A repository with the checkpoint `one` of the tree, labelled `first`, and `two` after some changes."""
    run("init")
    run("capture", str(tree), "--thread", "t", "--label", "first")
    (tree / "notes.txt").write_bytes(b"first\nsecond\n")
    (tree / "added.txt").write_bytes(b"new\n")
    (tree / "src" / "main.py").unlink()
    run("capture", str(tree), "--thread", "t", "--label", "second")
    return run


def on_terminal(*args: str, columns: int = 80, no_color: bool = False) -> str:
    """What the command writes to a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **({"NO_COLOR": "1"} if no_color else {})}
    process = subprocess.Popen([sys.executable, "-m", "snapcore.cli", *args], stdout=theirs, env=environment)
    os.close(theirs)
    out = b""
    while True:
        try:
            piece = os.read(ours, 65_536)
        except OSError:  # Linux says EIO where a file would end
            break
        if not piece:
            break
        out += piece
    os.close(ours)
    assert process.wait() == 0
    return out.decode().replace("\r\n", "\n")


def test_a_checkpoint_alone_is_compared_with_the_one_before_it(made: Run) -> None:
    assert made("diff", "latest", "-t", "t").text == made("diff", "label:first", "label:second", "-t", "t").text
    assert made("diff", "label:first", "-t", "t", "--json").json["before"] is None
    assert made("diff", "label:first", "-t", "t").text.splitlines() == ["+ .", "+ link", "+ notes.txt", "+ src", "+ src/main.py"]


def test_what_was_before_may_have_been_deleted(made: Run) -> None:
    made("delete", "label:first", "-t", "t")
    assert "[MISSING_CHECKPOINT]" in made("diff", "latest", "-t", "t", code=1).stderr


def test_a_sandbox_is_told_by_its_address(made: Run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "notes.txt").write_bytes(b"changed\n")
    monkeypatch.chdir(tree.parent)
    monkeypatch.setenv("HOME", str(tree))
    for address in (str(tree), "./tree", "tree/", "../" + tree.parent.name + "/tree", f"file://{tree}", "~", "~/"):
        told = made("diff", "latest", address, "-t", "t", "--allow-any-root").text
        assert told.splitlines() == ["~ notes.txt"], address
    monkeypatch.setenv("HOME", str(tree.parent))
    monkeypatch.chdir(tree)
    assert made("diff", "latest", ".", "-t", "t").text.splitlines() == ["~ notes.txt"]
    monkeypatch.chdir(tree.parent)
    assert "no checkpoint tree" in made("diff", "latest", "tree", "-t", "t", code=1).stderr
    assert "A sandbox comes after" in made("diff", "./tree", "latest", "-t", "t", code=2).stderr


def test_labels_and_paths_are_not_taken_for_addresses(made: Run, tree: Path) -> None:
    (tree / "src" / "x").write_bytes(b"x")
    made("capture", str(tree), "-t", "t", "--label", "./odd")
    assert made("diff", "label:second", "label:./odd", "-t", "t").text.splitlines() == ["+ src/x"]
    made("label", "latest", "//odd", "-t", "t")
    assert made("diff", "label:second", "label://odd", "-t", "t").text.splitlines() == ["+ src/x"]
    assert made("diff", "label:second:src/x", "latest:src/x", "-t", "t").text.splitlines() == ["+ src/x"]
    assert made("diff", "label:second:src", "latest:src", "-t", "t", "--exit-code", code=1).text.splitlines() == ["+ src/x"]
    made("diff", "label:second:src", "latest:other", "-t", "t", code=2)
    made("diff", "label:second:src", "latest:src", "-t", "t", "--paths", "src", code=2)


def test_paths_limit_it(made: Run, tree: Path) -> None:
    (tree / "src" / "x").write_bytes(b"x")
    (tree / "y").write_bytes(b"y")
    assert made("diff", "latest", str(tree), "-t", "t", "--paths", "src").text.splitlines() == ["+ src/x"]
    assert made("diff", "latest:src", str(tree), "-t", "t").text.splitlines() == ["+ src/x"]
    assert "[INVALID_REQUEST]" in made("diff", "latest", str(tree), "-t", "t", "--paths", "absent", code=1).stderr


def test_the_exit_code_tells_of_differences_when_asked(made: Run, tree: Path) -> None:
    made("diff", "latest", str(tree), "-t", "t", "--exit-code", code=0)
    made("diff", "label:first", "latest", "-t", "t", code=0)
    made("diff", "label:first", "latest", "-t", "t", "--exit-code", code=1)
    assert made("diff", "label:first", "latest", "-t", "t", "--exit-code", "-q", code=1).text == ""
    for mode, code in ((), 1), (("--exit-code",), 2), (("--exit-code", "--json"), 2):  # a failure is no difference
        assert "MISSING_CHECKPOINT" in made("diff", "latest", "absent", "-t", "t", *mode, code=code).stderr
    os.mkfifo(tree / "fifo")
    told = made("diff", "latest", str(tree), "-t", "t", code=3).text.splitlines()
    assert told == ["? fifo: a FIFO"]


def test_a_patch_in_a_pipe_is_exact(made: Run, tree: Path) -> None:
    (tree / os.fsdecode(b"caf\xe9")).write_bytes(b"\x1b[31m caf\xe9\r\n")
    patch = made("diff", "latest", str(tree), "-t", "t", "-p").stdout
    assert patch.splitlines()[0] == b'diff --git "a/caf\\351" "b/caf\\351"'
    assert b"+\x1b[31m caf\xe9\r\n" in patch
    shutil.copytree(tree, tree.parent / "copy", symlinks=True)
    (tree.parent / "copy" / os.fsdecode(b"caf\xe9")).unlink()
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=patch, cwd=tree.parent / "copy", check=True)
    assert (tree.parent / "copy" / os.fsdecode(b"caf\xe9")).read_bytes() == b"\x1b[31m caf\xe9\r\n"


def test_lines_around_a_change(made: Run, tree: Path) -> None:
    (tree / "notes.txt").write_bytes(b"first\nsecond\nthird\n")
    assert b"@@ -1,2 +1,3 @@\n" in made("diff", "latest", str(tree), "-t", "t", "-p").stdout
    assert b"@@ -2,0 +3 @@\n+third\n" in made("diff", "latest", str(tree), "-t", "t", "-p", "-U", "0").stdout
    made("diff", "latest", str(tree), "-t", "t", "-p", "-U", "-1", code=2)


def test_a_terminal_is_not_steered_and_gets_colours(made: Run, tree: Path) -> None:
    (tree / "notes.txt").write_bytes(b"first\nsec\tond \x1b[2J\x9b\n")
    command = ("diff", "latest", str(tree), "-t", "t", "-p")
    drawn = on_terminal(*command)
    assert "\x1b[32m+sec\tond \\x1b[2J\\x9b\x1b[m\n" in drawn
    assert "\x1b[31m-second\x1b[m\n" in drawn
    plain = on_terminal(*command, no_color=True)
    assert "\x1b" not in plain
    assert "+sec\tond \\x1b[2J\\x9b\n" in plain


def test_the_table(made: Run, tree: Path) -> None:
    assert made("diff", "label:first", "latest", "-t", "t", "--stat").text.splitlines() == [
        "  path         before  after",
        "+ added.txt         -    4 B  +1",
        "~ notes.txt       6 B   13 B  +1",
        "- src/main.py    15 B      -  -1",
        "3 paths: 1 added, 1 removed, 1 changed",
        "lines: +2 -1; bytes: 21 B before, 17 B after",
    ]
    (tree / "notes.txt").chmod(0o600)
    (tree / "added.txt").write_bytes(b"\0\0\0\0")
    (tree / "link").unlink()
    (tree / "link").mkdir()
    told = made("diff", "latest", str(tree), "-t", "t", "--stat").text.splitlines()
    assert [line.split(maxsplit=2)[2].split("  ")[-1] for line in told[1:4]] == [
        "binary",
        "link -> folder -1",
        "mode 0644 -> 0600",
    ]
    assert made("diff", "latest", "latest", "-t", "t", "--stat").text.splitlines()[0] == "0 paths: 0 added, 0 removed, 0 changed"


def test_the_table_fits_a_terminal_and_is_whole_elsewhere(made: Run, tree: Path) -> None:
    long = "folder-" * 20 + "end"
    (tree / long).write_bytes(b"x\n")
    command = ("diff", "latest", str(tree), "-t", "t", "--stat")
    drawn = on_terminal(*command).splitlines()
    assert max(map(len, drawn)) <= 80
    assert re.search(r"^\+ folder-[a-z-]*…[a-z-]*-end  ", drawn[1])
    assert any(long in line for line in made(*command).text.splitlines())


def test_json_has_both_sides(made: Run, tree: Path) -> None:
    (tree / "notes.txt").chmod(0o600)
    (tree / os.fsdecode(b"caf\xe9")).write_bytes(b"caf\xe9\n")
    answer = made("diff", "latest", str(tree), "-t", "t", "--json", "-p").json
    assert (answer["message_type"], answer["after"], answer["sandbox"]) == ("diff", None, str(tree))
    assert (answer["added"], answer["changed"], answer["removed"]) == (["caf\\xe9"], ["notes.txt"], [])
    new, mode = answer["entries"]
    assert base64.b64decode(new["path_b64"]) == b"caf\xe9"
    assert (new["change"], new["before"], new["after"]["size"], new["lines_added"]) == ("added", None, 5, 1)
    assert base64.b64decode(new["patch_b64"]).endswith(b"+caf\xe9\n")
    assert (mode["what"], mode["before"]["mode"], mode["after"]["mode"], mode["patch"]) == (["mode"], "0644", "0600", "")
    plain = made("diff", "label:first", "latest", "-t", "t", "--json").json
    assert [each["path"] for each in plain["entries"]] == ["src/main.py", "added.txt", "notes.txt"]
    assert "patch" not in plain["entries"][0]
    assert "lines_added" not in plain["entries"][0]


def test_hostile_names(made: Run, tree: Path) -> None:
    for name in (EVIL, b'quo"te', b"back\\slash", b"b", b"a"):
        os.makedirs(os.path.join(os.fsencode(tree), b"odd", b"a"), exist_ok=True)
        with open(os.path.join(os.fsencode(tree), b"odd", name + b"x"), "wb") as file:
            file.write(b"x\n")
    told = made("diff", "latest", str(tree), "-t", "t").text.splitlines()
    assert "+ odd/evil\\x1b[31m\\nnamex" in told
    for option in ("-p", "--stat", "-v"):
        assert b"\x1b" not in made("diff", "latest", str(tree), "-t", "t", option).stdout
    assert b'+++ "b/odd/quo\\"tex"\n' in made("diff", "latest", str(tree), "-t", "t", "-p").stdout


def test_several_roots_are_named(run: Run, tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "x").write_bytes(b"x\n")
    run("init")
    run("capture", "-t", "t", "--root", f"one={tree}", "--root", f"two={other}")
    (other / "x").write_bytes(b"yy\n")
    (tree / "notes.txt").write_bytes(b"yy\n")
    roots = ("--root", f"one={tree}", "--root", f"two={other}")
    assert run("diff", "latest", "-t", "t", *roots).text.splitlines() == ["~ one:notes.txt", "~ two:x"]
    assert b"+++ b/two/x\n" in run("diff", "latest", "-t", "t", *roots, "-p").stdout
    made_of_one = run("diff", "latest", "-t", "t", "--root", f"two={other}").text.splitlines()
    assert made_of_one == ["~ two:x"]
    assert "--root NAME=DIR" in run("diff", "latest", str(tree), "-t", "t", code=2).stderr


def test_secrets_stay_hidden(run: Run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    run("init")
    (tree / "conf").write_bytes(b"a\ntoken=hunter2-hunter2\n")
    run("capture", str(tree), "-t", "t", "--secret-env", "TOKEN")
    (tree / "conf").write_bytes(b"b\ntoken=hunter2-hunter2\n")
    assert b"hunter2" not in run("diff", "latest", str(tree), "-t", "t", "-p").stdout
    (tree / "conf").write_bytes(b"b\nother=hunter2-hunter2\n")
    told = run("diff", "latest", str(tree), "-t", "t", "-p").stdout
    assert told.endswith(b"Files a/conf (24 bytes) and b/conf (24 bytes) differ\n")
    told = run("diff", "latest", str(tree), "-t", "t", "-p", "--secret-env", "TOKEN").stdout
    assert b"+other=" + bytes(15) in told
    assert "<15 zeros>" in on_terminal("diff", "latest", str(tree), "-t", "t", "-p", "--secret-env", "TOKEN")


def test_a_folder_that_is_taken_for_a_checkpoint_is_answered_with_how_to_name_it(
    made: Run, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree.parent)
    assert "write ./tree." in made("diff", "latest", "tree", "-t", "t", code=1).stderr
    assert "write ./" not in made("diff", "latest", "none", "-t", "t", code=1).stderr
