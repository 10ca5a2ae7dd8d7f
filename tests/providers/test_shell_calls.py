"""How many calls of a shell a capture takes, whatever the tools; and what is read of changing files (case 26)."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import snapcore
from snapcore.model import Kind
from snapcore.providers.command_shell import CommandPipe, CommandShell
from snapcore.providers.shell import ShellWorkspace
from snapcore.sandboxes import Shell
from snapcore.selection import FilePolicy
from snapcore.testing.workspace_suite import Selecting, read_all, scan_all

from .shell_kinds import KINDS, make_shell


class Counting:
    """Counts the pipes of a shell."""

    def __init__(self, shell: CommandShell) -> None:
        self.shell = shell
        self.sandbox_id = shell.sandbox_id
        self.pipes = 0

    def pipe(self, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> CommandPipe:
        self.pipes += 1
        return self.shell.pipe(script, stdin)

    def taken(self) -> int:
        pipes, self.pipes = self.pipes, 0
        return pipes


class Sandbox:
    """A handle with nothing but a shell's workspace."""

    def __init__(self, shell: Shell, root: Path) -> None:
        self.sandbox_id = shell.sandbox_id
        self.workspace_root = str(root)
        self._shell = shell

    def workspace(self, root: str | None = None) -> ShellWorkspace:
        return ShellWorkspace(self._shell, root or self.workspace_root)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_capture_takes_two_calls_and_an_unchanged_one_takes_one(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "workspace"
    for number in range(300):
        path = root / f"folder{number % 10}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number))
        os.utime(path, ns=(1_700_000_000_000_000_000, 1_700_000_000_000_000_000))
    shell = Counting(make_shell(kind))
    sandbox = Sandbox(shell, root)
    async with snapcore.open_repository(str(tmp_path / "repository")) as repository:
        report = await repository.capture_with_report(sandbox, thread_id="t")
        assert (report.files_read, shell.taken()) == (300, 2)
        report = await repository.capture_with_report(sandbox, thread_id="t", reread=True)
        assert (report.files_read, shell.taken()) == (300, 2)
        for number in range(0, 300, 20):
            (root / f"folder{number % 10}" / f"f{number}").write_text("changed")
        report = await repository.capture_with_report(sandbox, thread_id="t")
        assert report.files_read >= 15
        assert shell.taken() == 2
        policy = FilePolicy.patterns(exclude=["*.log"])
        await repository.capture_with_report(sandbox, thread_id="t", policy=policy)
        assert shell.taken() <= 2
        await repository.capture_with_report(sandbox, thread_id="t", policy=FilePolicy.everything())
        assert shell.taken() <= 3


async def test_a_clock_in_a_hold_is_of_the_beginning_of_its_scan_and_costs_nothing(tmp_path: Path) -> None:
    shell = Counting(make_shell("gnu"))
    workspace = ShellWorkspace(shell, str(tmp_path))
    before = await workspace.clock()
    assert shell.taken() == 2  # its tools, then the time
    async with workspace.hold():
        began = await workspace.clock()
        assert shell.taken() == 1
        again = await workspace.clock()
        assert shell.taken() == 1
        selection = FilePolicy().compile()
        assert [entry async for batch in workspace.scan(selection) for entry in batch]
        assert shell.taken() == 0
    assert before.now_ns <= began.now_ns <= again.now_ns
    assert workspace.capabilities.time_granularity_ns == began.granularity_ns


async def test_a_scan_of_another_selection_than_was_begun_is_its_own(tmp_path: Path) -> None:
    (tmp_path / ".env").touch()
    workspace = ShellWorkspace(make_shell("gnu"), str(tmp_path))
    async with workspace.hold():
        found = await scan_all(workspace, Selecting())
    assert [entry.note for entry in found] == ["", ""]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_clock_is_of_the_sandbox_and_as_fine_as_its_tools(tmp_path: Path, kind: str) -> None:
    workspace = ShellWorkspace(make_shell(kind), str(tmp_path))
    clock = await workspace.clock()
    (tmp_path / "file").touch()
    st = os.stat(tmp_path / "file")
    assert clock.now_ns - clock.granularity_ns <= st.st_mtime_ns
    assert abs(st.st_mtime_ns - clock.now_ns) < 60_000_000_000
    assert clock.granularity_ns == 20_000_000


@pytest.mark.parametrize("size", [1_000, 6_000_000])
@pytest.mark.parametrize("kind", ["gnu", "bash"])
async def test_files_that_move_while_their_group_is_read(tmp_path: Path, kind: str, size: int) -> None:
    """The sandbox's own `tar` is preceded by what other processes there do meanwhile. (busybox's `sh` runs no other `tar`.)"""
    root = tmp_path / "workspace"
    (root / "sub").mkdir(parents=True)
    for name in ("gone", "grown", "shrunk", "replaced", "fifo", "sub/kept", "zkept"):
        (root / name).write_bytes(b"x" * size)
    tools = tmp_path / "tools"
    tools.mkdir()
    script = """#!/bin/sh
    case " $* " in *" -C "*) exec /usr/bin/tar "$@" ;; esac
    if [ -e gone ]; then
        rm gone; echo more >>grown; : >shrunk; printf y >new; mv new replaced; rm fifo; mkfifo fifo
    fi
    exec /usr/bin/tar "$@"
    """
    (tools / "tar").write_text(script)
    (tools / "tar").chmod(0o755)
    workspace = ShellWorkspace(make_shell(kind, first=tools), str(root))
    files = [entry for entry in await scan_all(workspace) if entry.kind == Kind.FILE]
    read = {file.path: answer for file, answer in zip(files, await read_all(workspace, files), strict=True)}
    assert {path: last.problem for path, (_, last) in read.items() if last.problem} == {
        b"gone": "vanished",
        b"fifo": "not a regular file any more",
    }
    assert read[b"grown"][0] == b"x" * size
    assert read[b"shrunk"][0] == b""
    assert read[b"replaced"][0] == b"y"
    for file in files:
        data, last = read[file.path]
        if file.path in (b"sub/kept", b"zkept"):
            assert (data, last.after) == (b"x" * size, file)
        elif not last.problem:
            assert last.after is not None
            assert last.after != file
