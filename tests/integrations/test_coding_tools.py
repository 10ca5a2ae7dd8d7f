"""Coding tools over real sandboxes: what a model may read and write, what it is told, and what it never sees.

Case 28 for results: no secret reaches the model. Cases 8, 11 and 12 for single files: nothing outside is read or written
through a link, and modes stay.
"""

import asyncio
import importlib
import json
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import snapcore
from snapcore.errors import SnapshotError
from snapcore.integrations.coding_tools import MAX_LOOKED_AT, MAX_OUTPUT, MAX_READ, CodingTools
from snapcore.integrations.tool_schemas import ToolResult
from snapcore.providers.local import LocalSandbox
from snapcore.sandboxes import SandboxHandle, SandboxSpec

# by name: `providers` as a package of the tests' would look like that of snapcore
_fixtures: Any = importlib.import_module("..providers.docker_fixtures", __package__)
docker_api, docker_engine, docker_host = _fixtures.docker_api, _fixtures.docker_engine, _fixtures.docker_host
make_container = _fixtures.make_container

TOKEN = "token-0123456789abcdef"  # of no service


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The workspace, as this host has it; beside it lies what must not be touched."""
    (tmp_path / "outside.txt").write_text("outside")
    folder = tmp_path / "work space"
    folder.mkdir()
    return folder


@pytest.fixture(params=["local", "command", "docker"])
async def handle(request: pytest.FixtureRequest, root: Path) -> AsyncIterator[SandboxHandle]:
    """A sandbox over `root`: a folder, a command that leads to it, a container of busybox that has it."""
    opened: Any
    if request.param == "local":
        opened = LocalSandbox(root)
    elif request.param == "command":
        opened = await snapcore.connect(f"exec:env -i PATH=/usr/bin:/bin {shlex.quote(str(root))}")
    else:
        request.getfixturevalue("docker_host")
        make = request.getfixturevalue("make_container")
        parent = root.parent
        opened = await snapcore.connect(f"docker://{make(host={'binds': [f'{parent}:{parent}']})}{str(root).replace(' ', '%20')}")
    yield opened
    await opened.close()


@pytest.fixture
def tools(handle: SandboxHandle) -> CodingTools:
    return CodingTools(handle, secrets={"TOKEN": TOKEN})


def value(result: ToolResult) -> dict[str, Any]:
    """What a call that worked came to, as a model reads it."""
    assert not result.is_error, result
    found: dict[str, Any] = json.loads(result.content)
    return found


def error(result: ToolResult) -> str:
    """The word of a call that failed; nobody is shown a traceback."""
    assert result.is_error, result
    assert "Traceback" not in result.content
    return str(json.loads(result.content)["error"])


# ------------------------------------------------------------------------------------------------ reading and writing


async def test_a_file_is_written_with_its_folders_and_read_back(tools: CodingTools, root: Path) -> None:
    written = value(await tools.write_file("src/deep er/a.txt", "één\ntwo\n"))
    assert written == {"path": "src/deep er/a.txt", "bytes": 10, "created": True}
    assert (root / "src/deep er/a.txt").read_bytes() == "één\ntwo\n".encode()
    read = value(await tools.read_file("src/deep er/a.txt"))
    assert (read["content"], read["lines"], read["bytes"]) == ("één\ntwo\n", 2, 10)
    assert "next_line" not in read
    assert value(await tools.write_file("src/deep er/a.txt", ""))["created"] is False
    assert value(await tools.read_file("src/deep er/a.txt"))["content"] == ""


async def test_a_replaced_file_keeps_its_mode(tools: CodingTools, root: Path) -> None:
    """Case 12 for one file."""
    for mode in (0o755, 0o600, 0o444, 0o4711):
        (root / "run").write_text("echo a\n")
        (root / "run").chmod(mode)
        value(await tools.write_file("run", "echo b\n"))
        assert stat.S_IMODE((root / "run").stat().st_mode) == mode
        value(await tools.edit("run", "echo b", "echo c"))
        assert (root / "run").read_text() == "echo c\n"
        assert stat.S_IMODE((root / "run").stat().st_mode) == mode
    (root / "run").chmod(0o640)
    value(await tools.write_file("run", "echo d\n", executable=True))
    assert stat.S_IMODE((root / "run").stat().st_mode) == 0o750
    value(await tools.write_file("run", "echo e\n", executable=False))
    assert stat.S_IMODE((root / "run").stat().st_mode) == 0o640


async def test_an_edit_needs_exactly_one_match(tools: CodingTools, root: Path) -> None:
    (root / "a.py").write_text("x = 1\ny = 1\nz = 1\n")
    assert error(await tools.edit("a.py", "w = 1", "w = 2")) == "NO_MATCH"
    several = await tools.edit("a.py", " = 1", " = 2")
    assert error(several) == "SEVERAL_MATCHES"
    assert "3 times" in several.value["message"]
    assert error(await tools.edit("a.py", "", "x")) == "INVALID_ARGUMENTS"
    assert (root / "a.py").read_text() == "x = 1\ny = 1\nz = 1\n"
    assert value(await tools.edit("a.py", "y = 1", "y = 2")) == {"path": "a.py", "replaced": 1, "first_line": 2}
    assert value(await tools.edit("a.py", " = 1", " = 3", replace_all=True))["replaced"] == 2
    assert (root / "a.py").read_text() == "x = 3\ny = 2\nz = 3\n"
    assert error(await tools.edit("b.py", "a", "b")) == "NOT_FOUND"


async def test_an_edit_keeps_line_endings(tools: CodingTools, root: Path) -> None:
    (root / "dos.txt").write_bytes(b"one\r\ntwo\r\nthree\r\n")
    value(await tools.edit("dos.txt", "one\ntwo", "1\n2"))
    value(await tools.edit("dos.txt", "three", "3\n4"))
    assert (root / "dos.txt").read_bytes() == b"1\r\n2\r\n3\r\n4\r\n"
    (root / "mixed.txt").write_bytes(b"one\r\ntwo\nthree")
    value(await tools.edit("mixed.txt", "two\nthree", "2\n3"))
    assert (root / "mixed.txt").read_bytes() == b"one\r\n2\n3"


async def test_lines_are_shown_from_anywhere(tools: CodingTools, root: Path) -> None:
    (root / "long").write_text("".join(f"line {number}\n" for number in range(1, 5001)) + "end")
    first = value(await tools.read_file("long"))
    assert (first["first_line"], first["lines"], first["next_line"]) == (1, 2000, 2001)
    part = value(await tools.read_file("long", start_line=first["next_line"], max_lines=2))
    assert (part["content"], part["next_line"]) == ("line 2001\nline 2002\n", 2003)
    last = value(await tools.read_file("long", start_line=5000))
    assert (last["content"], last["lines"]) == ("line 5000\nend", 2)
    assert "next_line" not in last
    assert error(await tools.read_file("long", start_line=5002)) == "NO_SUCH_LINE"
    for start, count in ((0, None), (-1, None), (None, 0), (None, 2001)):
        assert error(await tools.read_file("long", start_line=start, max_lines=count)) == "INVALID_ARGUMENTS"


async def test_a_file_without_line_breaks_is_cut_at_a_whole_character(tools: CodingTools, root: Path) -> None:
    (root / "wide").write_text("x" + "é" * MAX_READ + "\nnext\n")
    shown = value(await tools.read_file("wide"))
    assert shown["content"] == "x" + "é" * ((MAX_READ - 1) // 2)
    assert "Line 1 is not shown to its end" in shown["cut"]
    assert value(await tools.read_file("wide", start_line=shown["next_line"]))["content"] == "next\n"


async def test_what_is_no_text_is_told_apart(tools: CodingTools, root: Path) -> None:
    (root / "image").write_bytes(b"\x89PNG\0\0" + bytes(range(256)))
    (root / "latin").write_bytes(b"caf\xe9\n")
    shown = value(await tools.read_file("image"))
    assert (shown["binary"], shown["content"], shown["bytes"]) == (True, "", 262)
    assert error(await tools.edit("image", "PNG", "GIF")) == "BINARY"
    assert value(await tools.read_file("latin"))["content"] == "caf\\xe9\n"
    value(await tools.edit("latin", "caf", "Caf"))
    assert (root / "latin").read_bytes() == b"Caf\xe9\n"


async def test_names_that_are_no_text_are_listed_and_can_be_used(tools: CodingTools, root: Path) -> None:
    names = [b"caf\xe9", b"two\nlines", b"-rf", b"a b'c\"$(d)", b"back\\slash", "é".encode()]
    for name in names:
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(b"in " + name)
    entries = value(await tools.list())["entries"]
    assert {each["name"] for each in entries} == {"caf\\xe9", "two\\nlines", "-rf", "a b'c\"$(d)", "back\\slash", "é"}
    for each in entries:
        assert value(await tools.read_file(each["name"]))["content"].startswith("in ")
    value(await tools.edit("caf\\xe9", "in", "IN"))
    value(await tools.write_file("a b'c\"$(d)", "x"))
    assert (root / "a b'c\"$(d)").read_text() == "x"
    assert Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9")).read_bytes() == b"IN caf\xe9"
    (root / "caf\\xe9").write_text("literally")
    assert value(await tools.read_file("caf\\xe9"))["content"] == "literally"


async def test_a_folder_is_listed_by_name_with_kinds(tools: CodingTools, root: Path) -> None:
    (root / "b").mkdir()
    (root / "a").write_text("12345")
    (root / "run").write_text("")
    (root / "run").chmod(0o755)
    (root / ".hidden").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    listed = value(await tools.list())
    assert listed == {
        "path": ".",
        "entries": [
            {"name": ".hidden", "kind": "link"},
            {"name": "a", "kind": "file", "size": 5},
            {"name": "b", "kind": "folder"},
            {"name": "pipe", "kind": "other"},
            {"name": "run", "kind": "file", "size": 0, "executable": True},
        ],
    }
    assert value(await tools.list("b"))["entries"] == []
    assert error(await tools.list("a")) == "NOT_A_FOLDER"
    assert error(await tools.list("c")) == "NOT_FOUND"


async def test_a_large_folder_is_listed_in_part_and_says_so(tools: CodingTools, root: Path) -> None:
    for number in range(1_200):
        (root / f"{number:04}").touch()
    listed = value(await tools.list())
    assert [each["name"] for each in listed["entries"]] == [f"{number:04}" for number in range(1_000)]
    assert listed["left_out"] == 200
    for number in range(1_200):
        (root / ("n" * 240 + f"{number:04}")).touch()
    listed = value(await tools.list())
    assert listed["more"] is True
    assert {each["name"] for each in listed["entries"]} <= set(os.listdir(root))
    assert len(json.dumps(listed)) < 200_000


# ------------------------------------------------------------------------------------------------ staying inside


async def test_nothing_leads_out_of_the_workspace(tools: CodingTools, root: Path) -> None:
    """Cases 8 and 11: links are never followed out, to read or to write."""
    outside = root.parent
    (root / "sub").mkdir()
    (root / "up").symlink_to("..")
    (root / "absolute").symlink_to(outside)
    (root / "file").symlink_to("../outside.txt")
    (root / "chain").symlink_to("sub/further")
    (root / "sub/further").symlink_to("../../outside.txt")
    (root / "new").symlink_to("../planted.txt")
    ways = ["../outside.txt", "sub/../../outside.txt", "up/outside.txt", "absolute/outside.txt", "file", "chain"]
    for way in [*ways, str(outside / "outside.txt"), "/etc/passwd", "up/work space/../outside.txt", "../work space/sub/x"]:
        assert error(await tools.read_file(way)) == "OUTSIDE", way
        assert error(await tools.write_file(way, "mine")) == "OUTSIDE", way
        assert error(await tools.edit(way, "outside", "mine")) == "OUTSIDE", way
    for way in ("new", "up/planted.txt", "absolute/a/b", "../planted/a"):
        assert error(await tools.write_file(way, "mine")) == "OUTSIDE", way
    for way in ("..", "up", "absolute", "sub/../.."):
        assert error(await tools.list(way)) == "OUTSIDE", way
        assert error(await tools.exec("true", cwd=way)) == "OUTSIDE", way
    assert sorted(os.listdir(outside)) == ["outside.txt", "work space"]
    assert (outside / "outside.txt").read_text() == "outside"


async def test_links_that_stay_inside_are_followed(tools: CodingTools, root: Path) -> None:
    (root / "real").mkdir()
    (root / "relative").symlink_to("real")
    (root / "absolute").symlink_to(root / "real")
    (root / "one").symlink_to("relative/file")
    for way in ("relative/file", "absolute/file", "one", "real/../real/./file", str(root / "real" / "file")):
        value(await tools.write_file(way, way))
        assert (root / "real" / "file").read_text() == way
        assert value(await tools.read_file(way))["path"] == "real/file"
    assert (root / "one").is_symlink()
    assert value(await tools.exec("pwd", cwd="relative"))["stdout"] == f"{root}/real\n"
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    assert error(await tools.read_file("a")) == "LINK_LOOP"


async def test_a_workspace_that_is_named_through_a_link_is_the_same(root: Path) -> None:
    (root / "real").mkdir()
    (root.parent / "alias").symlink_to(root)
    (root / "by-alias").symlink_to(root.parent / "alias" / "real")
    (root / "by-name").symlink_to(root / "real")
    tools = CodingTools(LocalSandbox(root.parent / "alias"))
    for way in ("by-alias/file", "by-name/file", str(root.parent / "alias" / "real" / "file")):
        value(await tools.write_file(way, way))
        assert (root / "real" / "file").read_text() == way
    assert value(await tools.read_file("real/file"))["path"] == "real/file"


async def test_what_is_no_file_is_neither_read_nor_replaced(tools: CodingTools, root: Path) -> None:
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    for name in ("folder", "pipe", "."):
        assert error(await tools.read_file(name)) == "NOT_A_FILE"
        assert error(await tools.write_file(name, "x")) == "NOT_A_FILE"
    (root / "file").touch()
    assert error(await tools.write_file("file/below", "x")) == "NOT_A_FOLDER"
    assert error(await tools.read_file("missing/below")) == "NOT_FOUND"
    for path in ("", "a\0b", "x/" * 3_000):
        assert error(await tools.read_file(path)) == "INVALID_PATH"


async def test_a_path_that_ends_in_a_slash_is_a_folder(tools: CodingTools, root: Path) -> None:
    """As it is for every program: a model that wants a folder gets no file of its name."""
    (root / "file").write_text("x")
    (root / "folder").mkdir()
    (root / "to-folder").symlink_to("folder")
    (root / "to-file").symlink_to("file")
    for path in ("file/", "to-file/", "new/"):
        assert error(await tools.write_file(path, "y")) == "NOT_A_FOLDER"
        assert error(await tools.read_file(path)) == "NOT_A_FOLDER"
    assert value(await tools.read_file("to-file"))["content"] == "x"
    for path in ("folder/", "to-folder//"):
        assert value(await tools.list(path))["path"] == "folder"
    assert sorted(os.listdir(root)) == ["file", "folder", "to-file", "to-folder"]


async def test_a_fifo_that_takes_a_files_place_is_not_waited_for(root: Path) -> None:
    """Case 41 between the look-up and the reading: a thread that waits there could not even be cancelled."""

    class Planted(LocalSandbox):
        def download(self, path: str) -> AsyncIterator[bytes]:
            os.unlink(path)
            os.mkfifo(path)
            return super().download(path)

    (root / "log").write_text("x")
    reading = asyncio.create_task(CodingTools(Planted(root)).read_file("log"))
    done, _ = await asyncio.wait([reading], timeout=30)
    if not done:
        os.close(os.open(root / "log", os.O_WRONLY))  # a waiting thread goes on
    assert error(await reading) == "SYSTEM"


async def test_the_folder_of_a_running_restore_is_not_there(tools: CodingTools, root: Path) -> None:
    (root / ".snapcore-stage").mkdir()
    (root / ".snapcore-stage/file").write_text("half")
    assert error(await tools.read_file(".snapcore-stage/file")) == "NOT_FOUND"
    assert error(await tools.write_file(".snapcore-stage/mine", "x")) == "NOT_FOUND"
    assert value(await tools.list())["entries"] == []
    shutil.rmtree(root / ".snapcore-stage")


# ------------------------------------------------------------------------------------------------------- commands


async def test_a_command_that_fails_is_a_result(tools: CodingTools, root: Path) -> None:
    done = value(await tools.exec("echo out; echo err >&2; echo made > file; exit 3"))
    assert done == {"exit_code": 3, "stdout": "out\n", "stderr": "err\n"}
    assert (root / "file").read_text() == "made\n"
    assert value(await tools.exec("no-such-command"))["exit_code"] == 127
    for command in ("", "  ", "a\0b", "x" * 70_000):
        assert error(await tools.exec(command)) == "INVALID_ARGUMENTS"
    assert error(await tools.exec("true", timeout_seconds=0)) == "INVALID_ARGUMENTS"
    assert error(await tools.exec("true", cwd="missing")) == "NOT_A_FOLDER"


async def test_long_output_shows_its_beginning_and_its_end(tools: CodingTools) -> None:
    done = value(await tools.exec("seq 1 200000; echo the end"))
    assert done["stdout"].startswith("1\n2\n3\n")
    assert done["stdout"].endswith("200000\nthe end\n")
    assert done["stdout_bytes_left_out"] > 1_000_000
    assert len(done["stdout"]) < MAX_OUTPUT + 100


async def test_a_command_that_takes_too_long_is_stopped_and_what_it_said_is_shown(tools: CodingTools) -> None:
    stopped = await tools.exec("echo begun; exec sleep 1000", timeout_seconds=2)
    assert error(stopped) == "EXEC_TIMEOUT"
    assert stopped.value["stdout"] == "begun\n"
    assert value(await tools.exec("echo still here"))["stdout"] == "still here\n"


async def test_no_command_gets_more_time_than_is_allowed(root: Path) -> None:
    tools = CodingTools(LocalSandbox(root), max_timeout=1)
    assert error(await tools.exec("sleep 1000", timeout_seconds=10**12)) == "EXEC_TIMEOUT"


async def test_lines_are_not_looked_for_without_end(root: Path) -> None:
    with (root / "huge").open("wb") as file:
        file.write(b"x" * 8_192)
        file.truncate(MAX_LOOKED_AT + (8 << 20))
    tools = CodingTools(LocalSandbox(root))
    assert error(await tools.read_file("huge", start_line=2)) == "TOO_LARGE"
    assert value(await tools.read_file("huge"))["lines"] == 0


async def test_calls_that_change_something_are_done_one_after_another(tools: CodingTools, root: Path) -> None:
    (root / "count").write_text("0")
    add = "read n < count || true; sleep 0.05; echo $((n + 1)) > count"
    await asyncio.gather(*(tools.exec(add) for _ in range(5)))
    assert (root / "count").read_text() == "5\n"


# -------------------------------------------------------------------------------------------------------- secrets


async def test_secrets_never_reach_the_model(tools: CodingTools, root: Path) -> None:
    """Case 28: in files, output, errors and names, in any form, and across every place where something is cut."""
    (root / "config").write_text(f"a\nkey={TOKEN}\nhex={TOKEN.encode().hex()}\nb\n")
    seen = [
        await tools.read_file("config"),
        await tools.read_file("config", start_line=2, max_lines=1),
        await tools.exec("cat config; cat config >&2"),
        await tools.read_file(f"missing-{TOKEN}"),
        await tools.edit("config", TOKEN + "x", "y"),
    ]
    (root / f"name-{TOKEN}").touch()
    seen += [await tools.list(), await tools.dispatch("exec", {"command": "true", TOKEN: 1}), await tools.dispatch(TOKEN, {})]
    for offset in range(-len(TOKEN) - 2, 3):
        padding = "x" * (MAX_OUTPUT // 2 + offset)
        (root / "cut").write_text(f"{padding}{TOKEN}{'y' * 100_000}{TOKEN}{padding}")
        seen.append(await tools.exec("cat cut"))
        (root / "line").write_text("x" * (MAX_READ + offset) + TOKEN)
        seen.append(await tools.read_file("line"))
    for result in seen:
        text = result.content
        assert TOKEN not in text
        assert TOKEN.encode().hex() not in text
        assert not any(TOKEN[at : at + 8] in text for at in range(len(TOKEN) - 8)), text[-200:]
    assert value(seen[0])["content"] == "a\nkey={secret:TOKEN}\nhex={secret:TOKEN}\nb\n"


async def test_where_a_long_message_is_cut_no_part_of_a_secret_stays(root: Path) -> None:
    class Gone(LocalSandbox):
        """Its files vanish between the look-up and the reading."""

        async def exec(self, command: Any, **options: Any) -> Any:
            if "exec cat" in str(command):
                os.unlink(name)
            return await super().exec(command, **options)

    for length in (120, 160, 180):
        name = os.fsencode(root) + f"/{TOKEN}".encode() + b"\xff" + b"n" * length
        Path(os.fsdecode(name)).write_text("x")
        shown = await CodingTools(Gone(root), secrets={"TOKEN": TOKEN}).read_file(f"{TOKEN}\\xff{'n' * length}")
        assert error(shown) == "SYSTEM"
        assert "{secret:TOKEN}" in shown.value["message"]
        assert TOKEN[-4:] not in shown.content


async def test_the_placeholder_of_a_secret_is_never_written_over_it(tools: CodingTools, root: Path) -> None:
    (root / "config").write_text(f"key={TOKEN}\nmode=a\n")
    content = value(await tools.read_file("config"))["content"]
    assert error(await tools.write_file("config", content)) == "SECRET_PLACEHOLDER"
    assert error(await tools.edit("config", "mode=a", "mode={secret:TOKEN}")) == "SECRET_PLACEHOLDER"
    value(await tools.edit("config", "mode=a", "mode=b"))
    value(await tools.write_file("other", "{secret:OF_NOBODY}"))
    assert (root / "config").read_text() == f"key={TOKEN}\nmode=b\n"


# ------------------------------------------------------------------------------------------------- what a model sends


BAD_CALLS: list[tuple[str, object]] = [
    ("read_file", "{"),
    ("read_file", "[1]"),
    ("read_file", "null"),
    ("read_file", '"path"'),
    ("read_file", "[" * 100_000),
    ("read_file", '{"path": "\\ud800"}'),
    ("read_file", {"path": "\ud800"}),
    ("read_file", {"path": "\udce9"}),
    ("read_file", {}),
    ("read_file", None),
    ("read_file", {"path": None}),
    ("read_file", {"path": 1}),
    ("read_file", {"path": ["a"]}),
    ("read_file", {"path": "a", "start_line": "2"}),
    ("read_file", {"path": "a", "start_line": True}),
    ("read_file", {"path": "a", "start_line": 1.5}),
    ("read_file", {"path": "a", "max_lines": 10**30}),
    ("read_file", {"path": "a", "start_line": 10**5_000}),
    ("exec", {"command": "ls", "timeout_seconds": -(10**400)}),
    ("exec", f'{{"command": "ls", "timeout_seconds": -{10**400}}}'),
    ("read_file", {"path": "a", "thread_id": "other"}),
    ("read_file", {1: 2}),
    ("read_file", 7),
    ("read_file", b"\xff\xfe"),
    ("write_file", {"path": "a"}),
    ("edit", {"path": "a", "old_text": "x"}),
    ("exec", {"command": ["ls"]}),
    ("exec", {"command": "ls", "environment": {"A": "b"}}),
    ("rm", {"path": "a"}),
    ("", {}),
    ("__init__", {}),
    ("_exec", {"command": "ls"}),
]


@pytest.mark.parametrize(("name", "arguments"), BAD_CALLS)
async def test_whatever_a_model_sends_is_answered(name: str, arguments: object, root: Path) -> None:
    (root / "a").write_text("x")
    result = await CodingTools(LocalSandbox(root)).dispatch(name, arguments)
    assert error(result) in ("INVALID_ARGUMENTS", "UNKNOWN_TOOL")
    assert len(result.content) < 2_000
    assert os.listdir(root) == ["a"]


@pytest.mark.parametrize("name", [["read_file"], {"name": "read_file"}, None, 7])
async def test_a_name_that_is_no_text_is_answered(name: Any, root: Path) -> None:
    assert error(await CodingTools(LocalSandbox(root)).dispatch(name, {})) == "UNKNOWN_TOOL"


async def test_arguments_come_as_text_or_as_an_object(root: Path) -> None:
    (root / "a").write_text("x")
    tools = CodingTools(LocalSandbox(root))
    for arguments in ('{"path": "a", "start_line": null}', b'{"path": "a"}', {"path": "a"}, {"path": "a", "max_lines": None}):
        assert value(await tools.dispatch("read_file", arguments))["content"] == "x"
    nothings: list[object] = [None, "", "{}", {}]
    for nothing in nothings:
        assert value(await tools.dispatch("list", nothing))["path"] == "."


async def test_a_sandbox_that_is_gone_is_told(root: Path) -> None:
    tools = CodingTools(LocalSandbox(root))
    shutil.rmtree(root)
    for result in (await tools.read_file("a"), await tools.write_file("a", "b"), await tools.exec("ls"), await tools.list()):
        assert error(result) == "NO_SANDBOX"


@pytest.mark.parametrize("program", ["stat", "od", "find", "readlink", "tr", "mkdir"])
@pytest.mark.parametrize("says", ["", "a b c d", "8 9", "7" * 5_000], ids=["nothing", "words", "numbers", "much"])
async def test_a_sandbox_whose_programs_lie_gets_an_answer(program: str, says: str, root: Path, tmp_path: Path) -> None:
    """What was installed there may be anything."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / program).write_text(f"#!/bin/sh\nprintf '{says}'\n")
    (tmp_path / "bin" / program).chmod(0o755)
    (root / "a").write_text("x")
    (root / "link").symlink_to("a")
    tools = CodingTools(LocalSandbox(root, environment={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}))
    async with asyncio.timeout(50):  # no script is left to its own time limit
        results = [await tools.list(), await tools.edit("a", "x", "y"), await tools.read_file("link")]
        results.append(await tools.write_file("new/a", "x"))
    assert all(len(result.content) < 10_000 for result in results)
    assert sorted(os.listdir(tmp_path)) == ["bin", "outside.txt", "work space"]


async def test_a_file_that_may_not_be_written_is_told() -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser can become somebody else")
    with tempfile.TemporaryDirectory() as folder:  # below folders that others may enter
        root = Path(folder)
        root.chmod(0o755)
        (root / "locked").mkdir(mode=0o755)
        (root / "locked/secret").touch(mode=0o600)
        tools = CodingTools(await snapcore.connect(f"exec:setpriv --reuid=65534 --regid=65534 --clear-groups {folder}"))
        assert error(await tools.write_file("locked/new", "x")) == "SYSTEM"
        assert error(await tools.write_file("locked/new/deeper", "x")) == "ACCESS_DENIED"
        assert error(await tools.read_file("locked/secret")) == "SYSTEM"
        assert value(await tools.list("locked"))["entries"] == [{"name": "secret", "kind": "file", "size": 0}]


class FilesOnly:
    """A handle that can be captured, and runs no commands."""

    workspace_root = "/workspace"

    def read(self, path: str) -> bytes:
        raise FileNotFoundError(path)

    lstat = list = write = mkdir = remove = read


def test_a_handle_that_runs_no_commands_is_refused() -> None:
    with pytest.raises(SnapshotError, match="FilesOnly"):
        CodingTools(FilesOnly())  # type: ignore[arg-type]  # that is the point


def test_a_thread_needs_a_repository(root: Path) -> None:
    with pytest.raises(SnapshotError):
        CodingTools(LocalSandbox(root), thread_id="t")


# ------------------------------------------------------------------------------------------------ output that is text


@pytest.fixture(scope="module")
def e2b_options() -> Iterator[dict[str, Any]]:
    from snapcore.testing.e2b_server import E2BServer

    importlib.import_module("..providers.e2b_service", __package__).need_server()
    with E2BServer() as server:
        yield dict(server.options)


async def test_a_sandbox_whose_output_is_text_keeps_every_byte(e2b_options: dict[str, Any]) -> None:
    from snapcore.providers.e2b import E2BProvider

    provider = E2BProvider(**e2b_options)
    handle = await provider.create(SandboxSpec(workspace_root="/home/user/work"))
    tools = CodingTools(handle, secrets={"TOKEN": TOKEN})
    value(await tools.write_file("a/é.txt", "één\r\n"))
    value(await tools.edit("a/é.txt", "één", "twee\ndrie"))
    assert value(await tools.read_file("a/é.txt"))["content"] == "twee\r\ndrie\r\n"
    value(await tools.exec("printf 'caf\\351' > \"$(printf 'caf\\351')\"; ln -s / out"))
    assert [each["name"] for each in value(await tools.list())["entries"]] == ["a", "caf\\xe9", "out"]
    assert error(await tools.read_file("out/etc/passwd")) == "OUTSIDE"
    result = await tools.read_file("caf\\xe9")
    assert result.is_error is False or error(result) == "INVALID_PATH"
    await provider.destroy(handle.binding)


def test_results_are_json_values() -> None:
    result = ToolResult("list", {"a": "é"})
    assert msgspec.json.decode(result.content) == {"a": "é"}
