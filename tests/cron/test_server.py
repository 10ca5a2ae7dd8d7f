"""The small HTTP server: right answers to right questions, and nobody's way blocked by the others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from snapcore.cron import server as serving
from snapcore.cron.server import HttpServer
from snapcore.errors import Code, SnapshotError


@asynccontextmanager
async def served(body: bytes = b"all is well\n") -> AsyncIterator[int]:
    """The port of a server with one page."""
    server = HttpServer({"/health": lambda: (200, "text/plain", body)})
    await server.start("127.0.0.1", 0)
    assert server.port is not None
    try:
        yield server.port
    finally:
        await server.close()


async def ask(port: int, request: bytes) -> bytes:
    """All that the server answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def ask_until_answered(port: int) -> bytes:
    """The answer, once the server has room for one more connection."""
    for _ in range(1000):
        if answer := await ask(port, b"GET /health HTTP/1.1\r\n\r\n"):
            return answer
        await asyncio.sleep(0.02)
    raise AssertionError("the server is full for ever")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"GET /health?a=b HTTP/1.0\r\n\r\n", b"200"),
        (b"HEAD /health HTTP/1.1\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /../health HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /health HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"\xff\xfe\r\n\r\n", b"400"),
    ],
)
async def test_answers(request_: bytes, status: bytes) -> None:
    async with served() as port:
        answer = await ask(port, request_)
    assert answer.startswith(b"HTTP/1.1 " + status + b" ")
    assert answer.endswith(b"all is well\n") == (status == b"200" and not request_.startswith(b"HEAD"))


async def test_a_head_without_end_gets_no_answer() -> None:
    async with served() as port:
        assert await ask(port, b"GET /health HTTP/1.1\r\nX: " + b"x" * (1 << 20)) == b""


async def test_slow_clients_are_cut_off_and_block_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SECONDS", 0.5)
    async with served() as port:
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(serving.CONNECTIONS - 1)]
        for _, writer in slow:
            writer.write(b"GET /health HT")
        assert (await ask(port, b"GET /health HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        async with asyncio.timeout(20):
            for reader, writer in slow:
                assert await reader.read() == b""  # waits until it is cut off
                writer.transport.abort()


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SECONDS", 0.5)
    monkeypatch.setattr(serving, "CONNECTIONS", 1)
    async with served(bytes(64 << 20)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        await ask_until_answered(port)  # that one is over then
        received = 0
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):  # noqa: PT012
            while True:
                received += len(await reader.readexactly(1 << 16))
        assert received < 64 << 20
        writer.transport.abort()


async def test_connections_that_are_held_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS", 2)
    monkeypatch.setattr(serving, "SECONDS", 3600.0)  # it is not the time that cuts them off
    async with served() as port, asyncio.timeout(60):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for _ in range(3):
            assert (await ask(port, b"GET /health HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        for reader, writer in held[:3]:  # the oldest make room
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.transport.abort()
        for _, writer in held[3:]:
            writer.transport.abort()


async def test_a_port_that_is_in_use_is_a_typed_error() -> None:
    async with served() as port:
        with pytest.raises(SnapshotError) as caught:
            await HttpServer({}).start("127.0.0.1", port)
    assert caught.value.code == Code.INVALID_REQUEST
    assert str(port) in caught.value.message


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".invalid", "\x1b[31mx"])
async def test_a_host_that_can_be_none_is_a_typed_error_without_control_characters(host: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        await HttpServer({}).start(host, 0)
    assert caught.value.code == Code.INVALID_REQUEST
    assert caught.value.message.isprintable()
