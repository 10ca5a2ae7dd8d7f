"""E2B when things go wrong: connections that drop, answers that are cut short, sandboxes whose time is over, keys that are wrong.

Case 23: an output that was cut short is found out, and is fetched again or is an error, never taken for the whole.
"""

import asyncio
import hashlib
import os
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.providers.e2b import E2BProvider
from snapcore.providers.e2b_handle import E2BSandbox
from snapcore.providers.e2b_shell import E2BShell
from snapcore.sandboxes import Binding, SandboxSpec
from snapcore.testing.e2b_server import E2BServer

from .e2b_service import need_server

DATA = os.urandom(3 << 20)
TOKEN = "a-token-that-nobody-may-see"
PATIENCE = 60.0


@pytest.fixture(scope="module")
def running() -> Iterator[E2BServer]:
    need_server()
    with E2BServer() as server:
        yield server


@pytest.fixture
def server(running: E2BServer) -> Iterator[E2BServer]:
    running.faults.clear()
    running.requests.clear()
    yield running
    running.faults.clear()


def provider_of(server: E2BServer, **more: Any) -> E2BProvider:
    options: dict[str, Any] = {**server.options, "timeout": 600, **more}
    return E2BProvider(**options)


@pytest_asyncio.fixture
async def handle(server: E2BServer) -> AsyncIterator[E2BSandbox]:
    provider = provider_of(server)
    made = await provider.create(SandboxSpec())
    server.requests.clear()
    server.faults.clear()  # numbers of requests are those of the test
    yield made
    server.faults.clear()
    await provider.destroy(made.binding)


@pytest_asyncio.fixture
async def small(server: E2BServer) -> AsyncIterator[E2BSandbox]:
    """A sandbox with busybox alone, whose `bash` the tests replace."""
    made = await provider_of(server).create(SandboxSpec(image="busybox"))
    yield made
    await provider_of(server).destroy(made.binding)


@pytest_asyncio.fixture
async def shell(handle: E2BSandbox, server: E2BServer) -> E2BShell:
    """A shell that has its folder already."""
    shell = E2BShell(handle.connection)
    await shell.folder()
    server.requests.clear()
    server.faults.clear()
    return shell


async def piped(shell: E2BShell, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> bytes:
    async with shell.pipe(script, stdin) as pipe:
        out = b"".join([piece async for piece in pipe.stdout()])
        assert (await pipe.wait()).exit_code == 0
    return out


def folder_of(server: E2BServer, handle: E2BSandbox) -> Path:
    return server.folder(handle.binding.sandbox_id)


def pipes_left(server: E2BServer, handle: E2BSandbox) -> list[str]:
    return os.listdir(folder_of(server, handle) / "tmp/.snapcore-pipes-1000")


# ---- pipes


async def test_a_pipe_takes_one_request_for_each_thing_it_does(shell: E2BShell, server: E2BServer) -> None:
    assert await piped(shell, "cat", DATA) == DATA
    assert dict(server.requests) == {"write": 1, "Start": 1, "read": 1, "Remove": 1}
    server.requests.clear()
    assert await piped(shell, "true") == b""
    assert dict(server.requests) == {"Start": 1, "Remove": 1}


async def test_large_input_goes_in_parts_of_bounded_size(shell: E2BShell, server: E2BServer) -> None:
    async def stream() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield DATA

    async with shell.pipe("sha256sum", stream()) as pipe:
        out = b"".join([piece async for piece in pipe.stdout()])
    assert out.split()[0].decode() == hashlib.sha256(DATA * 9).hexdigest()
    assert server.requests["write"] == 3  # of 8 MiB and the piece that goes beyond


async def test_long_scripts_and_bytes_that_are_no_text_arrive(shell: E2BShell) -> None:
    assert await piped(shell, f": {'x' * 200_000}\nprintf '%s' {'y' * 100_000}") == b"y" * 100_000
    assert await piped(shell, b"printf '%s' '\xff\xfe'".decode("utf-8", "surrogateescape")) == b"\xff\xfe"


@pytest.mark.parametrize("name", ["write", "Start", "read", "Remove"])
async def test_a_dropped_connection_is_opened_again(shell: E2BShell, server: E2BServer, handle: E2BSandbox, name: str) -> None:
    server.faults.drop(name)
    assert await piped(shell, "cat", DATA) == DATA
    assert server.requests[name] == 2
    assert pipes_left(server, handle) == []


@pytest.mark.parametrize("name", ["write", "Start", "Remove"])
async def test_a_lost_answer_is_asked_for_again(shell: E2BShell, server: E2BServer, handle: E2BSandbox, name: str) -> None:
    server.faults.lose_answer(name)
    assert await piped(shell, "echo ran >> /tmp/runs; cat", DATA) == DATA
    assert server.requests[name] == 2
    assert (folder_of(server, handle) / "tmp/runs").read_text() == "ran\n"


async def test_a_script_runs_once_however_often_its_connection_breaks(
    shell: E2BShell, server: E2BServer, handle: E2BSandbox
) -> None:
    server.faults.cut("Start", 0, 1)
    server.faults.cut("Start", 0, 2)
    go = folder_of(server, handle) / "tmp/go"
    running = asyncio.create_task(piped(shell, "echo ran >> /tmp/runs; until [ -e /tmp/go ]; do sleep 0.1; done; echo done"))
    async with asyncio.timeout(PATIENCE):
        while server.requests["Start"] < 3:  # noqa: ASYNC110  (the server is on another thread)
            await asyncio.sleep(0.02)
    go.touch()
    assert await running == b"done\n"
    assert (folder_of(server, handle) / "tmp/runs").read_text() == "ran\n"


async def test_a_download_goes_on_where_it_broke_off(shell: E2BShell, server: E2BServer) -> None:
    for call in range(1, 8):
        server.faults.cut("read", call * 300_000, call)
    assert await piped(shell, "cat", DATA) == DATA


async def test_an_output_that_is_cut_short_is_not_taken_for_the_whole(shell: E2BShell, server: E2BServer) -> None:
    """Case 23: a download that says it is whole and is not."""
    server.faults.truncate("read", 1_000_000)
    assert await piped(shell, "cat", DATA) == DATA
    server.faults.clear()
    server.faults.truncate("read", 1_000_000, None)
    with pytest.raises(ProviderError, match="cut short") as caught:
        await piped(shell, "cat", DATA)
    assert (caught.value.code, caught.value.retryable) == (Code.SANDBOX_UNAVAILABLE, True)


async def test_input_that_does_not_arrive_whole_is_not_worked_with(
    shell: E2BShell, server: E2BServer, handle: E2BSandbox
) -> None:
    server.faults.truncate("write", 1_000_000)
    with pytest.raises(ProviderError, match="did not arrive whole") as caught:
        await piped(shell, "touch /tmp/ran; cat", DATA)
    assert caught.value.code == Code.SANDBOX_UNAVAILABLE
    assert not (folder_of(server, handle) / "tmp/ran").exists()
    assert pipes_left(server, handle) == []


async def test_what_a_command_says_of_itself_is_cut_and_that_is_noticed(shell: E2BShell, server: E2BServer) -> None:
    server.faults.truncate("Start", 5)
    with pytest.raises(ProviderError, match="did not say what became of it"):
        await piped(shell, "echo x")


async def test_a_command_that_was_killed_is_not_run_again(shell: E2BShell, server: E2BServer, handle: E2BSandbox) -> None:
    server.faults.cut("Start", 0)
    with pytest.raises(ProviderError, match="whether it did all its work is not known"):
        await piped(shell, "echo ran >> /tmp/runs; kill -9 $(cat $SNAPCORE_PIPE/run/pid); exec sleep 3000")
    assert (folder_of(server, handle) / "tmp/runs").read_text() == "ran\n"


async def test_a_connection_that_never_comes_back_is_an_error(shell: E2BShell, server: E2BServer) -> None:
    server.faults.drop("Start", None)
    server.faults.drop("health", None)
    with pytest.raises(ProviderError) as caught:
        await piped(shell, "true")
    assert (caught.value.code, caught.value.retryable) == (Code.SANDBOX_UNAVAILABLE, True)


async def test_a_sandbox_that_never_stops_talking_is_left(small: E2BSandbox, server: E2BServer) -> None:
    bash = folder_of(server, small) / "bin/bash"
    bash.write_text("#!/bin/sh\nexec yes 0123456789012345678901234567890123456789\n")
    with pytest.raises(ProviderError, match="more than there can be to say"):
        await piped(E2BShell(small.connection), "true")


async def test_a_sandbox_that_lies_about_its_output_is_found_out(small: E2BSandbox, server: E2BServer) -> None:
    shell = E2BShell(small.connection)
    await shell.folder()
    bash = folder_of(server, small) / "bin/bash"
    for size, words in ((4, "longer than it said"), (1 << 40, "cut short")):
        bash.write_text(
            "#!/bin/sh\ncase $3 in *sizes=*) d=${3#d=}; d=${d%% *}; mkdir -p $d; "
            f"echo too long >$d/out; echo; echo snapcore 0 {size};; esac\n"
        )
        with pytest.raises(ProviderError, match=words):
            await piped(shell, "true")


async def test_pipes_of_the_dead_are_swept_and_those_of_the_living_are_not(handle: E2BSandbox, server: E2BServer) -> None:
    left = folder_of(server, handle) / "tmp/.snapcore-pipes-1000"
    await piped(E2BShell(handle.connection), "true")
    for name, pid in (("dead", "99999999"), ("unsent", ""), ("fresh", "99999999")):
        (left / name / "run").mkdir(parents=True)
        (left / name / "out").write_bytes(b"left behind")
        (left / name / "run/pid").write_text(pid)
    for place in left.rglob("*"):
        os.chown(place, 1000, 1000)
        if "fresh" not in place.parts:
            os.utime(place, (1_000_000_000, 1_000_000_000))
    await piped(E2BShell(handle.connection), "true")
    assert sorted(os.listdir(left)) == ["fresh"]
    assert (left.stat().st_mode & 0o7777, left.stat().st_uid) == (0o700, 1000)


@pytest.mark.parametrize("target", ["/etc", "/home/user"])
async def test_a_planted_place_for_temporary_files_is_refused(handle: E2BSandbox, server: E2BServer, target: str) -> None:
    place = folder_of(server, handle) / "tmp/.snapcore-pipes-1000"
    await piped(E2BShell(handle.connection), "true")
    place.rmdir()
    place.symlink_to(target)
    with pytest.raises(ProviderError) as caught:
        await piped(E2BShell(handle.connection), "true")
    assert caught.value.code == Code.NOT_CAPABLE


async def test_a_pipe_that_is_left_while_its_script_runs_ends_it(shell: E2BShell, handle: E2BSandbox, server: E2BServer) -> None:
    pid_file = folder_of(server, handle) / "tmp/pid"
    running = asyncio.create_task(piped(shell, "echo $$ > /tmp/new; mv /tmp/new /tmp/pid; exec sleep 3000"))
    async with asyncio.timeout(PATIENCE):
        while not pid_file.exists():  # noqa: ASYNC110  (it is written by another process)
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(PATIENCE):
        while (Path("/proc") / pid_file.read_text().strip() / "root").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert pipes_left(server, handle) == []


# ---- the service refuses


async def test_an_expired_sandbox_is_gone_and_says_what_to_do(handle: E2BSandbox, server: E2BServer) -> None:
    server.expire(handle.binding.sandbox_id)
    attempts: list[Callable[[], Awaitable[Any]]] = [
        lambda: handle.exec("true"),
        lambda: handle.upload("/tmp/x", b"x"),
        lambda: piped(E2BShell(handle.connection), "true"),
        lambda: provider_of(server).open(handle.binding),
        lambda: provider_of(server).snapshot(handle),
    ]
    for attempt in attempts:
        with pytest.raises(ProviderError) as caught:
            await attempt()
        assert (caught.value.code, caught.value.retryable) == (Code.NO_SANDBOX, False)
        assert "timeout" in str(caught.value)


async def test_a_sandbox_that_expires_under_a_command_is_gone(handle: E2BSandbox, server: E2BServer) -> None:
    started = asyncio.Event()
    running = asyncio.create_task(handle.exec("echo x; exec sleep 3000", on_output=lambda stream, piece: started.set()))
    await asyncio.wait_for(started.wait(), PATIENCE)
    server.expire(handle.binding.sandbox_id)
    with pytest.raises(ProviderError) as caught:
        await running
    assert caught.value.code == Code.NO_SANDBOX


async def test_a_sandbox_that_is_paused_when_its_time_is_over_can_be_opened_again(server: E2BServer) -> None:
    provider = provider_of(server, on_timeout="pause")
    handle = await provider.create(SandboxSpec())
    await handle.upload("/workspace/file", b"kept")
    server.expire(handle.binding.sandbox_id)
    with pytest.raises(ProviderError) as caught:
        await handle.exec("true")
    assert caught.value.code == Code.NO_SANDBOX
    again = await provider.open(handle.binding)
    assert b"".join([piece async for piece in again.download("/workspace/file")]) == b"kept"
    await provider.destroy(again.binding)


async def test_a_command_whose_connection_breaks_is_neither_run_again_nor_left(handle: E2BSandbox, server: E2BServer) -> None:
    server.faults.cut("Start", 1)
    with pytest.raises(ProviderError, match="whether the command did its work is not known") as caught:
        await handle.exec("echo ran >> /tmp/runs; echo $$ > /tmp/pid; echo out; exec sleep 3000")
    assert not caught.value.retryable
    assert (folder_of(server, handle) / "tmp/runs").read_text() == "ran\n"
    pid = (folder_of(server, handle) / "tmp/pid").read_text().strip()
    async with asyncio.timeout(PATIENCE):
        while (Path("/proc") / pid / "root").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_sandbox_is_made_once_though_the_answer_was_lost(server: E2BServer) -> None:
    server.faults.lose_answer("create")
    before = len(server.control.sandboxes)
    handle = await provider_of(server).create(SandboxSpec())
    assert (server.requests["create"], len(server.control.sandboxes)) == (2, before + 1)
    await provider_of(server).destroy(handle.binding)


async def test_rate_limits_are_waited_out_and_quotas_are_told(server: E2BServer) -> None:
    server.faults.refuse("create", status=429, message="slow down")
    handle = await provider_of(server).create(SandboxSpec())
    server.control.most_sandboxes = 0
    with pytest.raises(ProviderError, match="maximum number of concurrent") as caught:
        await provider_of(server).create(SandboxSpec())
    server.control.most_sandboxes = 100
    assert (caught.value.code, caught.value.retryable) == (Code.SANDBOX_UNAVAILABLE, True)
    await provider_of(server).destroy(handle.binding)


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_service_that_is_down_is_an_error_to_try_again(server: E2BServer, status: int) -> None:
    server.faults.refuse("connect", None, status=status, message="upstream is gone", page=True)
    with pytest.raises(ProviderError) as caught:
        await provider_of(server).open(Binding("e2b", "i0123456789", "/workspace"))
    assert (caught.value.code, caught.value.retryable) == (Code.SANDBOX_UNAVAILABLE, True)


async def test_what_the_service_does_not_know_is_told(server: E2BServer) -> None:
    with pytest.raises(ProviderError, match="template 'nope' not found") as caught:
        await provider_of(server).create(SandboxSpec(image="nope"))
    assert caught.value.code == Code.NO_SANDBOX
    for name in ("../sandboxes", "a/b", "", "x" * 65, "i?x=1"):
        with pytest.raises(ProviderError) as caught:
            await provider_of(server).open(Binding("e2b", name, "/workspace"))
        assert caught.value.code == Code.NO_SANDBOX
    assert dict(server.requests) == {"create": 1}


async def test_a_full_disk_is_told(handle: E2BSandbox, server: E2BServer) -> None:
    server.faults.refuse("write", None, status=507, message="not enough disk space available")
    with pytest.raises(ProviderError) as caught:
        await handle.upload("/workspace/file", b"x")
    assert caught.value.code == Code.SANDBOX_FULL


async def test_what_a_template_decides_is_refused_before_anything_is_made(server: E2BServer) -> None:
    for spec in (SandboxSpec(cpus=2), SandboxSpec(memory_bytes=1 << 30), SandboxSpec(options={"image_pull": "always"})):
        with pytest.raises(ProviderError) as caught:
            await provider_of(server).create(spec)
        assert caught.value.code == Code.NOT_CAPABLE
    with pytest.raises(SnapshotError):
        provider_of(server, on_timeout="forget")
    assert server.requests == {}


# ---- secrets


async def test_no_key_token_or_value_is_in_any_error(server: E2BServer) -> None:
    wrong = "e2b_" + "0f" * 20
    values = {"A": "value-of-a-variable"}
    network = {"rules": {"api.example.com": [{"transform": {"headers": {"Authorization": TOKEN}}}]}}
    provider = provider_of(server, network=network)
    handle = await provider.create(SandboxSpec(environment=values))
    served = server.control.sandboxes[handle.binding.sandbox_id]
    echo = f"{server.control.api_key} {wrong} {TOKEN} {values['A']}"
    attempts: list[Callable[[], Awaitable[Any]]] = [
        lambda: provider_of(server, api_key=wrong).create(SandboxSpec()),
        lambda: provider.create(SandboxSpec(environment=values)),
        lambda: provider.open(handle.binding),
        lambda: handle.exec("true"),
        lambda: piped(E2BShell(handle.connection), "true"),
    ]
    shown = [repr(provider), repr(handle), repr(handle.binding), repr(handle.connection)]
    for number, attempt in enumerate(attempts):
        for name in ("create", "connect", "Start") if number else ():
            server.faults.refuse(name, None, status=400, message=echo.replace(wrong, served.token))
        with pytest.raises(ProviderError) as caught:
            await attempt()
        assert caught.value.code == (Code.NOT_CAPABLE if number else Code.ACCESS_DENIED)
        shown.append("".join(traceback.format_exception(caught.value)))
    server.faults.clear()
    assert [text for text in shown for secret in (server.control.api_key, wrong, TOKEN) if secret in text] == []
    for secret, told_to in ((served.token, shown[:4] + shown[7:]), (values["A"], shown[:6] + shown[7:])):
        assert [text for text in told_to if secret in text] == []
    await provider.destroy(handle.binding)


async def test_network_rules_are_set_at_each_opening_and_never_reach_the_sandbox(server: E2BServer) -> None:
    asked = 0

    def rules() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {
            "allow_out": ["api.example.com"],
            "rules": {"api.example.com": [{"transform": {"headers": {"Authorization": f"{TOKEN}-{asked}"}}}]},
        }

    provider = provider_of(server, network=rules)
    handle = await provider.create(SandboxSpec())
    served = server.control.sandboxes[handle.binding.sandbox_id]
    assert f"{TOKEN}-1" in str(served.network)
    await provider.pause(handle)
    again = await provider.open(handle.binding)
    assert f"{TOKEN}-2" in str(served.network)
    assert "api.example.com" in str(served.network["allowOut"])
    assert TOKEN not in (await again.exec("env; set; cat /proc/self/environ /etc/* 2>/dev/null")).stdout.decode()
    assert TOKEN not in str(again.binding)
    await provider.destroy(handle.binding)
