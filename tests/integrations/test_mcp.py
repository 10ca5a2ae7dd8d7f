"""The MCP server as a process, with the official client, and with a client that behaves badly.

Cases 5 and 28 through the protocol. Case 44: a client that goes away in the middle of a save leaves no lease and no head moved.
"""

import contextlib
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client

import snapcore
from snapcore.errors import Code
from snapcore.integrations.coding_tools import CodingTools
from snapcore.integrations.mcp_server import make_server
from snapcore.providers.local import LocalSandbox

TOKEN = "token-0123456789abcdef"  # of no service
DEADLINE = 60  # seconds for what takes a fraction of one


@pytest.fixture
async def repo(tmp_path: Path) -> Path:
    """A repository with a thread of somebody else's."""
    path = tmp_path / "repo"
    (tmp_path / "other").mkdir()
    async with snapcore.open_repository(path) as opened:
        await opened.capture(str(tmp_path / "other"), thread_id="theirs", label="theirs", checkpoint_id="their-id")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a").write_text("a1")
    return folder


def arguments(repo: Path, *more: str, thread: str = "mine") -> list[str]:
    return ["-m", "snapcore.cli", "mcp", "--repo", str(repo), "--thread", thread, *more]


@contextlib.asynccontextmanager
async def client_of(
    repo: Path, *more: str, mode: Any = "legacy", environment: dict[str, str] | None = None
) -> AsyncIterator[Client]:
    """The official client, and a server of its own."""
    server = StdioServerParameters(command=sys.executable, args=arguments(repo, *more), env=environment)
    async with Client(stdio_client(server), mode=mode, read_timeout_seconds=DEADLINE) as client:
        yield client


async def answer(client: Client, name: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """The value of a call that worked: the text and the structured content say the same."""
    result = await client.call_tool(name, given or {})
    assert not result.is_error, result
    (block,) = result.content
    assert block.type == "text"
    found: dict[str, Any] = json.loads(block.text)
    assert found == result.structured_content
    return found


async def refusal(client: Client, name: str, given: dict[str, Any] | None = None) -> str:
    result = await client.call_tool(name, given or {})
    assert result.is_error, result
    return str(result.structured_content["error"])


def leases(repo: Path) -> int:
    """How many writer leases there are; one that was given up has no row."""
    with contextlib.closing(sqlite3.connect(repo / "snapcore.db")) as database:
        return int(database.execute("SELECT count(*) FROM writer_leases").fetchone()[0])


def checkpoints(repo: Path, thread: str) -> int:
    with contextlib.closing(sqlite3.connect(repo / "snapcore.db")) as database:
        return int(database.execute("SELECT count(*) FROM checkpoints WHERE thread_id = ?", (thread,)).fetchone()[0])


# ------------------------------------------------------------------------------------------- with the official client


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_client_sees_the_tools_and_calls_each(repo: Path, root: Path, mode: str) -> None:
    async with client_of(repo, "--sandbox", str(root), "--coding", "--allow-restore", "--every", "100", mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert sorted(tools) == [
            "checkpoint_diff",
            "checkpoint_fork",
            "checkpoint_list",
            "checkpoint_read_artifact",
            "checkpoint_restore",
            "checkpoint_restore_preview",
            "checkpoint_save",
            "edit",
            "exec",
            "list",
            "read_file",
            "write_file",
        ]
        assert tools["read_file"].input_schema["required"] == ["path"]
        hints = {name: tool.annotations.read_only_hint for name, tool in tools.items() if tool.annotations is not None}
        assert [name for name, reads in hints.items() if not reads] == [
            "checkpoint_save",
            "checkpoint_fork",
            "checkpoint_restore",
            "write_file",
            "edit",
            "exec",
        ]
        first = await answer(client, "checkpoint_save", {"label": "start", "artifacts": [{"name": "plan", "text": "go"}]})
        assert (await answer(client, "checkpoint_read_artifact", {"checkpoint": "start", "name": "plan"}))["text"] == "go"
        await answer(client, "write_file", {"path": "b", "content": "b1\n"})
        await answer(client, "edit", {"path": "b", "old_text": "b1", "new_text": "b2"})
        assert (await answer(client, "exec", {"command": "cat b; cat"}))["stdout"] == "b2\n"  # stdin is not the client's
        assert (await answer(client, "read_file", {"path": "b"}))["content"] == "b2\n"
        assert [each["name"] for each in (await answer(client, "list"))["entries"]] == ["a", "b"]
        preview = await answer(client, "checkpoint_restore_preview", {"checkpoint": "start"})
        assert preview["removes"] == {"count": 1, "shown": ["b"]}
        second = await answer(client, "checkpoint_save")
        difference = await answer(client, "checkpoint_diff", {"before": "start", "after": second["checkpoint"]["id"]})
        assert difference["added"] == {"count": 1, "shown": ["b"]}
        fork = await answer(client, "checkpoint_fork", {"checkpoint": "start"})
        assert fork["thread"].startswith("mine-fork-")
        await answer(client, "checkpoint_restore", {"checkpoint": "start"})
        assert os.listdir(root) == ["a"]
        listed = await answer(client, "checkpoint_list")
        assert first["checkpoint"]["id"] in [each["id"] for each in listed["checkpoints"]]
    assert leases(repo) == 0


async def test_without_a_sandbox_there_is_only_history(repo: Path, root: Path) -> None:
    async with client_of(repo) as client:
        assert [tool.name.removeprefix("checkpoint_") for tool in (await client.list_tools()).tools] == [
            "list",
            "diff",
            "read_artifact",
            "fork",
        ]
        assert await answer(client, "checkpoint_list") == {"count": 0, "checkpoints": []}
        for which in ("their-id", "theirs", "nobodys"):
            assert await refusal(client, "checkpoint_fork", {"checkpoint": which}) == "NOT_FOUND"


async def test_bad_input_is_an_answer_and_the_server_goes_on(repo: Path, root: Path) -> None:
    async with client_of(repo, "--sandbox", str(root), "--coding") as client:
        for name, given in (
            ("exec", {"command": 5}),
            ("exec", {}),
            ("read_file", {"path": "a", "thread_id": "theirs"}),
            ("checkpoint_save", {"label": "a\nb"}),
        ):
            assert await refusal(client, name, given) == "INVALID_ARGUMENTS"
        assert await refusal(client, "read_file", {"path": "../repo/snapcore.json"}) == "OUTSIDE"
        with pytest.raises(MCPError, match="There is no tool 'rm'"):
            await client.call_tool("rm", {"path": "a"})
        assert (await answer(client, "read_file", {"path": "a"}))["content"] == "a1"


async def test_a_call_that_is_cancelled_ends_and_the_server_goes_on(repo: Path, root: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    async with client_of(repo, "--sandbox", str(root), "--coding") as client:
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "exec", {"command": f"echo $$ > {tmp_path}/begun; exec sleep 1000"})
            process = int(await anyio.to_thread.run_sync((tmp_path / "begun").read_text))
            group.cancel_scope.cancel()
        # waits for the one before, which has ended and given up what it held
        await answer(client, "exec", {"command": "echo after > b"})
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
        await answer(client, "checkpoint_save")
    assert leases(repo) == 0


async def test_secrets_named_on_the_command_line_are_hidden(repo: Path, root: Path) -> None:
    """Case 28."""
    (root / "config").write_text(f"key={TOKEN}\n")
    options = ("--sandbox", str(root), "--coding", "--secret-env", "MY_TOKEN")
    async with client_of(repo, *options, environment={"MY_TOKEN": TOKEN}) as client:
        assert (await answer(client, "read_file", {"path": "config"}))["content"] == "key={secret:MY_TOKEN}\n"
        assert (await answer(client, "exec", {"command": "cat config"}))["stdout"] == "key={secret:MY_TOKEN}\n"
        await answer(client, "checkpoint_save", {"label": "x"})
    async with snapcore.open_repository(repo) as opened:
        made = await opened.list("mine")
        assert "x" in [checkpoint.label for checkpoint in made]
        for checkpoint in made:
            assert TOKEN.encode() not in await opened.read_file(checkpoint, b"config")


async def test_the_policy_and_the_secrets_of_a_settings_file_hold(repo: Path, root: Path, tmp_path: Path) -> None:
    (root / "config").write_text(f"key={TOKEN}\n")
    (root / "run.log").write_text("noise")
    (tmp_path / "token").write_text(TOKEN)
    settings = tmp_path / "settings.toml"
    settings.write_text("[policy]\nexclude = ['*.log']\n[secrets]\nMY_TOKEN = { command = 'cat token' }\n")
    async with client_of(repo, "--sandbox", str(root), "--coding", "--config", str(settings)) as client:
        assert (await answer(client, "exec", {"command": "cat config"}))["stdout"] == "key={secret:MY_TOKEN}\n"
        await answer(client, "checkpoint_save", {"label": "x"})
    async with snapcore.open_repository(repo) as opened:
        for checkpoint in await opened.list("mine"):
            assert [entry.path async for entry in opened.ls(checkpoint)] == [b"", b"a", b"config"]
            assert TOKEN.encode() not in await opened.read_file(checkpoint, b"config")


async def test_what_the_coding_tools_did_last_is_saved_when_the_client_leaves(repo: Path, root: Path) -> None:
    async with client_of(repo, "--sandbox", str(root), "--coding") as client:
        await answer(client, "write_file", {"path": "b", "content": "last"})
        assert checkpoints(repo, "mine") == 1
    async with snapcore.open_repository(repo) as opened:
        checkpoint = await opened.get("mine")
        assert checkpoint is not None
        assert await opened.read_file(checkpoint, b"b") == b"last"


# ----------------------------------------------------------------------------------------------- message by message


class Raw:
    """A client that writes and reads lines by itself."""

    def __init__(self, args: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.lines: list[bytes] = []

    def send(self, *messages: object) -> None:
        assert self.process.stdin is not None
        for message in messages:
            line = message if isinstance(message, bytes) else json.dumps(message).encode()
            self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.lines.append(line)
        found: dict[str, Any] = json.loads(line)
        assert found["jsonrpc"] == "2.0"
        return found

    def initialize(self) -> None:
        parameters = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "0"}}
        self.send({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": parameters})
        assert self.receive()["result"]["serverInfo"]["name"] == "snapcore"
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def call(self, number: int, name: str, given: object) -> None:
        self.send({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": {"name": name, "arguments": given}})

    def end(self) -> tuple[int, bytes, str]:
        """Exit code, what else came, stderr. Stdin is closed first, if it is not."""
        out, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, err.decode()


@contextlib.contextmanager
def raw_client(repo: Path, *more: str) -> Iterator[Raw]:
    raw = Raw(arguments(repo, *more))
    try:
        yield raw
    finally:
        raw.process.kill()
        raw.process.wait()
        for stream in (raw.process.stdin, raw.process.stdout, raw.process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@pytest.fixture
def blocking(root: Path, tmp_path: Path) -> str:
    """The address of a sandbox in which every command waits until somebody writes to the FIFO `gate`."""
    os.mkfifo(tmp_path / "gate")
    program = tmp_path / "enter"
    program.write_text(f'#!/bin/sh\nread -r go < {tmp_path}/gate\nexec "$@"\n')
    program.chmod(0o755)
    return f"exec:{program} {root}"


def wait_for_capture(repo: Path, tmp_path: Path) -> int:
    """Returns, with the open gate, once a capture has its lease and looks at the sandbox."""
    gate = os.open(tmp_path / "gate", os.O_WRONLY)
    assert leases(repo) == 1
    return gate


def test_nothing_but_the_protocol_is_on_stdout(repo: Path, root: Path) -> None:
    with raw_client(repo, "--sandbox", str(root), "--coding", "-v") as raw:
        raw.initialize()
        raw.send(b"this is no JSON", b"", b'{"jsonrpc": "2.0"}', b"\xff\xfe", {"jsonrpc": "2.0", "id": 1, "method": "ping"})
        while raw.receive().get("id") != 1:
            pass
        raw.call(2, "exec", {"command": "echo out; echo err >&2"})
        result = raw.receive()
        assert (result["id"], result["result"]["structuredContent"]["stdout"]) == (2, "out\n")
        code, rest, told = raw.end()
    assert code == 0
    assert rest == b""
    assert "checkpoint saved: " in told
    assert "Traceback" not in told


def test_quiet_says_nothing(repo: Path, root: Path) -> None:
    with raw_client(repo, "--sandbox", str(root), "--coding", "-q") as raw:
        raw.initialize()
        raw.call(1, "write_file", {"path": "b", "content": "b"})
        raw.receive()
        assert raw.end() == (0, b"", "")


def test_a_client_that_closes_stderr_loses_no_call(repo: Path, root: Path) -> None:
    with raw_client(repo, "--sandbox", str(root), "--coding", "--every", "1") as raw:
        assert raw.process.stderr is not None
        assert raw.process.stdin is not None
        raw.process.stderr.close()
        raw.initialize()
        raw.call(1, "write_file", {"path": "b", "content": "b1"})
        assert raw.receive()["result"]["structuredContent"]["checkpoint"]["outcome"] == "saved"
        raw.process.stdin.close()
        assert raw.process.wait(DEADLINE) == 0
    assert (root / "b").read_text() == "b1"
    assert checkpoints(repo, "mine") == 2


def test_a_client_that_goes_away_ends_the_server_and_its_commands(repo: Path, root: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    with raw_client(repo, "--sandbox", str(root), "--coding") as raw:
        raw.initialize()
        raw.call(1, "exec", {"command": f"echo half > b; echo $$ > {tmp_path}/begun; exec sleep 1000"})
        process = int((tmp_path / "begun").read_text())
        code, _, told = raw.end()
    assert (code, "Traceback" in told) == (0, False)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert leases(repo) == 0
    assert checkpoints(repo, "mine") == 2  # the baseline, and what the command left


def test_a_client_that_goes_away_in_the_middle_of_a_save_leaves_no_lease(repo: Path, blocking: str, tmp_path: Path) -> None:
    """Case 44."""
    with raw_client(repo, "--sandbox", blocking) as raw:
        raw.initialize()
        raw.call(1, "checkpoint_save", {"label": "x"})
        gate = wait_for_capture(repo, tmp_path)
        code, _, told = raw.end()
        os.close(gate)
    assert (code, "Traceback" in told) == (0, False)
    assert leases(repo) == 0
    assert checkpoints(repo, "mine") == 0


def test_a_save_that_is_cancelled_leaves_no_lease(repo: Path, blocking: str, tmp_path: Path) -> None:
    with raw_client(repo, "--sandbox", blocking) as raw:
        raw.initialize()
        raw.call(1, "checkpoint_save", {"label": "x"})
        gate = wait_for_capture(repo, tmp_path)
        raw.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})
        raw.call(2, "checkpoint_fork", {"checkpoint": "latest"})  # waits for the one before
        assert raw.receive()["id"] == 2
        assert leases(repo) == 0
        os.close(gate)
        assert raw.end()[0] == 0
    assert checkpoints(repo, "mine") == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_an_idle_server_although_the_client_is_there(repo: Path, root: Path, number: int, code: int) -> None:
    with raw_client(repo, "--sandbox", str(root), "--coding") as raw:
        raw.initialize()
        raw.process.send_signal(number)
        assert raw.process.wait(DEADLINE) == code
        assert raw.end()[2] == "interrupted\n"


def test_a_signal_in_the_middle_of_a_save_leaves_no_lease(repo: Path, blocking: str, tmp_path: Path) -> None:
    with raw_client(repo, "--sandbox", blocking) as raw:
        raw.initialize()
        raw.call(1, "checkpoint_save", {})
        gate = wait_for_capture(repo, tmp_path)
        raw.process.send_signal(signal.SIGTERM)
        assert raw.process.wait(DEADLINE) == 143
        os.close(gate)
    assert leases(repo) == 0


def test_a_client_that_no_longer_reads_ends_the_server(repo: Path, root: Path) -> None:
    with raw_client(repo, "--sandbox", str(root)) as raw:
        raw.initialize()
        assert raw.process.stdout is not None
        raw.process.stdout.close()
        raw.call(1, "checkpoint_list", {})
        assert raw.process.wait(DEADLINE) == 0
        assert raw.process.stderr is not None
        assert b"Traceback" not in raw.process.stderr.read()


def test_a_client_that_never_says_anything_is_waited_for_and_may_leave(repo: Path) -> None:
    with raw_client(repo) as raw:
        assert raw.end() == (0, b"", "")


# ------------------------------------------------------------------------------------------------------ starting it


def run(*args: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args] if code else [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE, check=False)


def test_who_starts_it_by_hand_is_told_what_it_waits_for(repo: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "snapcore.cli", "mcp", "--repo", str(repo), "--thread", "thread-1"]
    server = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    os.write(ours, b"\x04")
    stdout, stderr = server.communicate(timeout=60)
    os.close(ours)
    assert (server.returncode, stdout) == (0, "")
    assert "waiting for an MCP client" in stderr


def test_what_makes_no_sense_is_refused_before_anything_is_served(repo: Path, root: Path, tmp_path: Path) -> None:
    assert run(*arguments(repo, "--coding")).returncode == 2
    assert run(*arguments(repo, "--allow-restore")).returncode == 2
    assert run(*arguments(repo, "--sandbox", str(root), "--coding", "--every", "0")).returncode == 2
    assert run(*arguments(repo, "--fork-prefix", "a\nb")).returncode == 2
    assert run("-m", "snapcore.cli", "mcp", "--repo", str(repo)).returncode == 2
    assert run(*arguments(tmp_path / "none")).returncode == 10
    for done in (run(*arguments(repo, "--sandbox", "nothing://x")), run(*arguments(repo, "--json", "--sandbox", "nothing://x"))):
        assert (done.returncode, done.stdout) == (1, "")
        assert "UNKNOWN_SCHEME" in done.stderr


def test_without_the_package_the_error_says_what_to_install(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.modules['mcp'] = None; from snapcore.cli.main import run; run()"
    done = run(*arguments(repo)[2:], code=code)
    assert (done.returncode, done.stdout) == (1, "")
    assert "[MISSING_EXTRA]" in done.stderr
    assert "pip install 'snapcore[mcp]'" in done.stderr
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(snapcore.SnapcoreError) as caught:
        make_server([])
    assert caught.value.code == Code.MISSING_EXTRA


def test_the_package_is_loaded_only_to_serve() -> None:
    code = "import sys, snapcore.integrations.mcp_server, snapcore.cli.mcp; sys.exit('pydantic' in sys.modules)"
    assert run(code=code).returncode == 0


async def test_a_server_can_be_made_of_ones_own_tools(root: Path) -> None:
    async with Client(make_server([CodingTools(LocalSandbox(root))])) as client:
        assert (await answer(client, "read_file", {"path": "a"}))["content"] == "a1"
        assert len((await client.list_tools()).tools) == 5
