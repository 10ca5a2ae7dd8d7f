"""The E2B test server by E2B's own client, unmodified: what the tests of the provider rest on."""

import asyncio
import base64
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import e2b
import pytest
import pytest_asyncio
from e2b import AsyncSandbox

from snapcore.testing.e2b_server import E2BServer

from .e2b_service import need_server

PATIENCE = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[E2BServer]:
    need_server()
    with E2BServer() as server:
        yield server


@pytest_asyncio.fixture
async def sandbox(server: E2BServer) -> AsyncIterator[AsyncSandbox]:
    server.faults.clear()
    made = await AsyncSandbox.create(timeout=600, envs={"GIVEN": "at creation"}, metadata={"kind": "a b"}, **given(server))
    yield made
    await made.kill()


def given(server: E2BServer) -> Any:
    return server.options


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  (what it waits for happens in another process)
            await asyncio.sleep(0.02)


async def test_commands_are_run_by_real_users_in_real_folders(sandbox: AsyncSandbox) -> None:
    result = await sandbox.commands.run("id -u; pwd; echo $GIVEN; echo oops >&2")
    assert (result.stdout, result.stderr) == ("1000\n/home/user\nat creation\n", "oops\n")
    result = await sandbox.commands.run("id -u; pwd; echo $GIVEN", user="root", cwd="/tmp", envs={"GIVEN": "now"})
    assert result.stdout == "0\n/tmp\nnow\n"
    with pytest.raises(e2b.CommandExitException) as caught:
        await sandbox.commands.run("touch /etc/mine || exit 3")
    assert caught.value.exit_code == 3
    with pytest.raises(e2b.AuthenticationException):
        await sandbox.commands.run("true", user="nobody-there")


async def test_a_request_that_is_refused_before_its_body_has_come_leaves_nothing_of_it_behind(
    server: E2BServer, sandbox: AsyncSandbox
) -> None:
    login = base64.b64encode(b"nobody-there:").decode()
    head = (
        "POST /process.Process/Start HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/connect+json\r\n"
        f"E2b-Sandbox-Id: {sandbox.sandbox_id}\r\nAuthorization: Basic {login}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    place = urllib.parse.urlsplit(server.options["sandbox_url"])
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(head.encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"5\r\nhello\r\n0\r\n\r\n")
    rest = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close\r\n" in answer.lower()
    assert json.loads(rest)["code"] == 401  # and no second answer after it


async def test_commands_run_in_the_background_and_read_what_they_are_sent(sandbox: AsyncSandbox) -> None:
    heard: list[str] = []
    handle = await sandbox.commands.run("cat; exit 4", background=True, stdin=True, on_stdout=heard.append)
    assert [found.pid for found in await sandbox.commands.list()] == [handle.pid]
    await sandbox.commands.send_stdin(handle.pid, "first ")
    await until(lambda: "".join(heard) == "first ")
    again = await sandbox.commands.connect(handle.pid)
    async with sandbox.commands.stream_input(handle.pid) as stream:
        await stream.send(b"second ")
        await stream.send("third")
    await handle.close_stdin()
    with pytest.raises(e2b.CommandExitException) as caught:
        await handle.wait()
    assert (caught.value.exit_code, caught.value.stdout) == (4, "first second third")
    with pytest.raises(e2b.CommandExitException) as caught:
        await again.wait()
    assert caught.value.stdout == "second third"
    assert await sandbox.commands.list() == []


async def test_commands_are_killed_and_run_out_of_time(sandbox: AsyncSandbox) -> None:
    handle = await sandbox.commands.run("exec sleep 3000", background=True)
    assert await handle.kill()
    with pytest.raises(e2b.CommandExitException) as caught:
        await handle.wait()
    assert (caught.value.exit_code, caught.value.error) == (-1, "signal: killed")
    assert not await sandbox.commands.kill(handle.pid)
    with pytest.raises(e2b.TimeoutException):
        await sandbox.commands.run("exec sleep 3000", timeout=1)
    await until(lambda: not _sleeping())


def _sleeping() -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes()
            root = os.readlink(f"/proc/{name}/root")
        except OSError:
            continue
        if line == b"sleep\x003000\x00" and "snapcore-e2b-" in root:
            found.append(name)
    return found


async def test_files_go_in_and_out(sandbox: AsyncSandbox, server: E2BServer) -> None:
    data = os.urandom(300_000)

    async def stream() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 70_000):
            yield data[start : start + 70_000]

    await sandbox.files.write("deep/er/file", stream())
    await sandbox.files.write("zipped", data, gzip=True)
    written = await sandbox.files.write_files([{"path": "text", "data": "text"}, {"path": "/tmp/bytes", "data": b"\0\xff"}])
    assert [found.path for found in written] == ["/home/user/text", "/tmp/bytes"]
    for name in ("deep/er/file", "zipped"):
        assert bytes(await sandbox.files.read(name, format="bytes")) == data
        pieces = await sandbox.files.read(name, format="stream")
        assert b"".join([piece async for piece in pieces]) == data
    home = server.folder(sandbox.sandbox_id) / "home/user"
    assert (home / "text").read_text() == "text"
    assert {(home / name).stat().st_uid for name in ("deep", "deep/er", "deep/er/file", "text")} == {1000}
    with pytest.raises(e2b.FileNotFoundException):
        await sandbox.files.read("missing")
    with pytest.raises(e2b.InvalidArgumentException):
        await sandbox.files.read("deep")
    with pytest.raises(e2b.InvalidArgumentException):
        await sandbox.files.write("deep", b"")


async def test_signed_addresses_of_files_work_without_headers(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("file", "signed")
    address = sandbox.download_url("file", use_signature_expiration=600)
    assert await asyncio.to_thread(_fetch, address) == (200, b"signed")
    assert (await asyncio.to_thread(_fetch, address.replace("path=file", "path=other")))[0] == 502


def _fetch(address: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(address) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


async def test_folders_are_listed_moved_and_removed(sandbox: AsyncSandbox) -> None:
    assert await sandbox.files.make_dir("a/b")
    assert not await sandbox.files.make_dir("a/b")
    await sandbox.files.write("a/b/file", "12345")
    await sandbox.commands.run("ln -s b a/link; chmod 640 a/b/file")
    found = await sandbox.files.list("a", depth=2)
    assert [(entry.path, entry.type) for entry in found] == [
        ("/home/user/a/b", e2b.FileType.DIR),
        ("/home/user/a/b/file", e2b.FileType.FILE),
        ("/home/user/a/link", e2b.FileType.SYMLINK),
    ]
    assert (found[1].size, found[1].mode, found[1].owner, found[1].permissions) == (5, 0o640, "user", "-rw-r-----")
    assert found[2].symlink_target == "b"
    await sandbox.files.rename("a/b", "c")
    assert await sandbox.files.exists("c/file")
    assert not await sandbox.files.exists("a/b")
    await sandbox.files.remove("c")
    assert not await sandbox.files.exists("c")
    with pytest.raises(e2b.FileNotFoundException):
        await sandbox.files.list("c")


async def test_folders_are_watched(sandbox: AsyncSandbox) -> None:
    await sandbox.files.make_dir("seen/deep")
    events: list[tuple[str, str]] = []
    watch: Any = await sandbox.files.watch_dir(
        "seen", on_event=lambda event: events.append((event.type.value, event.name)), recursive=True, timeout=0
    )
    await sandbox.commands.run("echo x > seen/deep/file")
    await until(lambda: ("create", "deep/file") in events)
    await sandbox.commands.run("chmod 600 seen/deep/file")
    await until(lambda: ("chmod", "deep/file") in events)
    await sandbox.commands.run("rm seen/deep/file")
    await until(lambda: ("remove", "deep/file") in events)
    await watch.stop()


async def test_a_paused_sandbox_stands_still_and_goes_on(sandbox: AsyncSandbox, server: E2BServer) -> None:
    await sandbox.commands.run("while :; do echo x >> /tmp/ticks; sleep 0.02; done", background=True, timeout=0)
    ticks = server.folder(sandbox.sandbox_id) / "tmp/ticks"
    await until(ticks.exists)
    assert await sandbox.pause()
    assert not await sandbox.pause()
    before = ticks.stat().st_size
    with pytest.raises(e2b.SandboxNotRunningException):
        await sandbox.commands.run("true")
    with pytest.raises(e2b.SandboxNotRunningException):
        await sandbox.files.read("/tmp/ticks")
    assert (await sandbox.get_info()).state == e2b.SandboxState.PAUSED
    assert ticks.stat().st_size == before
    again = await AsyncSandbox.connect(sandbox.sandbox_id, **given(server))
    await until(lambda: ticks.stat().st_size > before)
    assert (await again.get_info()).state == e2b.SandboxState.RUNNING


async def test_a_snapshot_starts_other_sandboxes(sandbox: AsyncSandbox, server: E2BServer) -> None:
    await sandbox.files.write("file", "then")
    snapshot = await sandbox.create_snapshot()
    await sandbox.files.write("file", "now")
    other = await AsyncSandbox.create(snapshot.snapshot_id, **given(server))
    assert await other.files.read("file") == "then"
    await other.kill()
    pages = AsyncSandbox.list_snapshots(**given(server))
    assert snapshot.snapshot_id in [found.snapshot_id for found in await pages.next_items()]
    assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id, **given(server))
    assert not await AsyncSandbox.delete_snapshot(snapshot.snapshot_id, **given(server))


async def test_sandboxes_are_listed_by_metadata_and_in_pages(sandbox: AsyncSandbox, server: E2BServer) -> None:
    others = [await AsyncSandbox.create(metadata={"kind": "other"}, **given(server)) for _ in range(3)]
    pages = AsyncSandbox.list(query=e2b.SandboxQuery(metadata={"kind": "other"}), limit=2, **given(server))
    found = []
    while pages.has_next:
        found += [info.sandbox_id for info in await pages.next_items()]
    assert sorted(found) == sorted(other.sandbox_id for other in others)
    pages = AsyncSandbox.list(query=e2b.SandboxQuery(metadata={"kind": "a b"}), **given(server))
    assert [info.sandbox_id for info in await pages.next_items()] == [sandbox.sandbox_id]
    for other in others:
        assert await other.kill()


async def test_time_runs_out_as_it_was_agreed(server: E2BServer) -> None:
    killed = await AsyncSandbox.create(**given(server))
    paused = await AsyncSandbox.create(lifecycle={"on_timeout": "pause"}, **given(server))
    for sandbox in (killed, paused):
        server.expire(sandbox.sandbox_id)
        with pytest.raises(e2b.SandboxNotRunningException):
            await sandbox.commands.run("true")
    with pytest.raises(e2b.SandboxNotFoundException):
        await AsyncSandbox.connect(killed.sandbox_id, **given(server))
    assert not await killed.kill()
    again = await AsyncSandbox.connect(paused.sandbox_id, **given(server))
    await again.commands.run("true")
    assert await again.kill()


async def test_only_those_with_the_key_and_the_token_come_in(sandbox: AsyncSandbox, server: E2BServer) -> None:
    wrong: Any = {**server.options, "api_key": "e2b_" + "f" * 40}
    with pytest.raises(e2b.AuthenticationException):
        await AsyncSandbox.create(**wrong)
    server.control.sandboxes[sandbox.sandbox_id].token = "another"
    with pytest.raises(e2b.AuthenticationException):
        await sandbox.files.read("x")
