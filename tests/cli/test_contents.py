"""`ls` and `cat`, and how checkpoints are named on every command that takes one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Run


@pytest.fixture
def made(run: Run, tree: Path) -> Run:
    """The checkpoint `one` of the tree with an empty folder and a hard link, labelled `first`."""
    (tree / "empty").mkdir()
    os.link(tree / "notes.txt", tree / "src" / "same.txt")
    (tree / "inside").symlink_to(tree / "src")
    for each in (tree / "notes.txt", tree / "src" / "main.py", tree / "src", tree / "empty", tree):
        os.utime(each, (86_400, 86_400))
    run("init")
    run("capture", str(tree), "--thread", "t", "--label", "first")
    return run


def test_ls_long(made: Run) -> None:
    lines = made("ls", "latest:src", "-t", "t", "--long").text.splitlines()
    assert lines == [
        "drwxr-xr-x             0 1970-01-02 00:00:00 src",
        "-rw-r--r--            15 1970-01-02 00:00:00 src/main.py",
        "-rw-r--r--             6 1970-01-02 00:00:00 src/same.txt == notes.txt",
    ]
    assert made("ls", "latest:notes.txt", "-t", "t", "-l").text == "-rw-r--r--             6 1970-01-02 00:00:00 notes.txt\n"
    assert made("ls", "latest:link", "-t", "t", "-l").text.endswith(" link -> src/main.py\n")
    assert made("ls", "latest:inside", "-t", "t", "-l").text.endswith(" inside -> ROOT/src\n")
    assert made("ls", "latest:src/main.py", "-t", "t", "-H").text == "-rw-r--r--       15 B 1970-01-02 00:00:00 src/main.py\n"


def test_a_time_far_away(run: Run, tree: Path) -> None:
    os.utime(tree / "notes.txt", (9_000_000_000, 9_000_000_000))
    run("init")
    run("capture", str(tree), "-t", "t")
    assert "2255-03-14 16:00:00 notes.txt" in run("ls", "latest", "-t", "t", "-l").text


def test_what_is_not_there_is_looked_for_with_ls(made: Run) -> None:
    for command in ("cat", "ls"):
        missing = made(command, "latest:nothing", "-t", "t", code=1).stderr
        assert re.search(r"has no nothing\. \[INVALID_REQUEST\]\n  'snapcore ls [0-9a-f]{32}' lists what it holds\.", missing)
    assert "'snapcore ls' shows" in made("cat", "latest:link", "-t", "t", code=1).stderr


def test_the_tree(made: Run) -> None:
    assert made("ls", "latest", "-t", "t", "--tree").text.splitlines() == [
        ".",
        "├── empty",
        "├── inside -> ROOT/src",
        "├── link -> src/main.py",
        "├── notes.txt",
        "└── src",
        "    ├── main.py",
        "    └── same.txt",
        "",
        "2 folders, 5 files",
    ]
    assert made("ls", "latest:src", "-t", "t", "--tree", "-l").text.splitlines()[:2] == [
        "[drwxr-xr-x             0 1970-01-02 00:00:00]  src",
        "├── [-rw-r--r--            15 1970-01-02 00:00:00]  main.py",
    ]
    assert made("ls", "latest:notes.txt", "-t", "t", "--tree").text.splitlines()[0] == "notes.txt"
    made("ls", "latest", "-t", "t", "--tree", "--flat", code=2)
    made("ls", "latest:absent", "-t", "t", "--tree", code=1)


def test_the_tree_is_drawn_in_ascii_where_nothing_else_can_be_shown(made: Run) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "snapcore.cli", "ls", "latest:src", "-t", "t", "--tree"]
    told = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    assert told.splitlines()[:3] == [b"src", b"|-- main.py", b"`-- same.txt"]


def test_the_tree_is_right_across_pages(run: Run, tmp_path: Path) -> None:
    """Whether a folder is the last of its own is known only many pages later."""
    root = tmp_path / "large"
    for folder in ("a/x", "a/y/z", "b"):
        (root / folder).mkdir(parents=True)
    for number in range(700):
        for folder in ("a/x", "a/y/z", "b"):
            (root / folder / f"{number:04}").touch()
    run("init")
    run("capture", str(root), "-t", "t")
    lines = run("ls", "latest", "-t", "t", "--tree").text.splitlines()
    assert [line for line in lines if not line[-4:].isdigit()] == [
        ".",
        "├── a",
        "│   ├── x",
        "│   └── y",
        "│       └── z",
        "└── b",
        "",
        "5 folders, 2,100 files",
    ]
    assert lines.count("│           └── 0699") == lines.count("│   │   └── 0699") == lines.count("    └── 0699") == 1


def test_names_are_escaped_in_a_tree(run: Run, tree: Path) -> None:
    (tree / "evil\x1b[31m\n├── fake").write_bytes(b"")
    run("init")
    run("capture", str(tree), "-t", "t")
    assert "├── evil\\x1b[31m\\n├── fake" in run("ls", "latest", "-t", "t", "--tree").text.splitlines()


@pytest.mark.parametrize("what", ["src", "link"])
def test_cat_refuses_what_is_no_file(made: Run, what: str) -> None:
    told = made("cat", f"latest:{what}", "-t", "t", code=1).stderr
    assert f"is a {'folder' if what == 'src' else 'link'}, not a file. [INVALID_REQUEST]" in told


# ---- how checkpoints are named

TAKING: list[tuple[str, ...]] = [
    ("show", "{}"),
    ("ls", "{}"),
    ("ls", "{}:src"),
    ("cat", "{}:notes.txt"),
    ("diff", "{}"),
    ("diff", "{}", "{}"),
    ("diff", "{}:src", "{tree}"),
    ("export", "{}", "-o", "{out}"),
    ("restore", "{tree}", "--checkpoint", "{}", "-n"),
    ("fork", "--to", "other", "--checkpoint", "{}"),
    ("rewind", "{}"),
    ("label", "{}", "again"),
    ("delete", "{}"),
]
IDS = [" ".join(each) for each in TAKING]


def filled(command: tuple[str, ...], which: str, tree: Path) -> list[str]:
    places = {"tree": str(tree), "out": str(tree.parent / "out.tar")}
    return [word.format(which, **places) if "{}" in word else word.format(**places) for word in command]


@pytest.fixture
def two(run: Run, tree: Path) -> Run:
    """The checkpoints `abc1` and `abc2` of thread `t`, the first labelled `L`."""
    from snapcore import blocking

    run("init")
    with blocking.open_repository(os.environ["SNAPCORE_REPO"]) as repo:
        repo.capture(tree, thread_id="t", checkpoint_id="abc1", label="L")
        repo.capture(tree, thread_id="t", checkpoint_id="abc2")
    return run


@pytest.mark.parametrize("command", TAKING, ids=IDS)
@pytest.mark.parametrize("which", ["latest", "label:L", "abc2", "abc1"])
def test_every_command_takes_every_name(two: Run, tree: Path, command: tuple[str, ...], which: str) -> None:
    two(*filled(command, which, tree), "-t", "t")


@pytest.mark.parametrize("command", TAKING, ids=IDS)
def test_an_ambiguous_prefix_is_refused_with_the_candidates(two: Run, tree: Path, command: tuple[str, ...]) -> None:
    told = two(*filled(command, "abc", tree), "-t", "t", code=1).stderr
    assert "[AMBIGUOUS_ID]" in told
    assert "abc1" in told
    assert "abc2" in told


@pytest.mark.parametrize("command", TAKING, ids=IDS)
@pytest.mark.parametrize("which", ["label:none", "xyz"])
def test_what_there_is_not_is_refused(two: Run, tree: Path, command: tuple[str, ...], which: str) -> None:
    assert "[MISSING_CHECKPOINT]" in two(*filled(command, which, tree), "-t", "t", code=1).stderr
