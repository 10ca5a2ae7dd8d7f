"""Containers for tests, on the engine of the run, and a proxy before it that counts and breaks connections."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import pytest

from .. import docker_engine as engines  # noqa: TID252 (tests are no package that could be named)
from .. import services  # noqa: TID252


class MakeContainer(Protocol):
    """Makes and, unless told otherwise, starts a container; its name is returned. `host` is for `create_host_config`."""

    def __call__(
        self, image: str = "busybox", *, start: bool = True, host: dict[str, Any] | None = None, **options: Any
    ) -> str: ...


@pytest.fixture(scope="session")
def docker_engine() -> engines.Engine:
    """The engine of the run."""
    try:
        return engines.docker_engine()
    except engines.NoEngineError as error:
        if os.environ.get(services.REQUIRED):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def docker_host(docker_engine: engines.Engine, monkeypatch: pytest.MonkeyPatch) -> str:
    """DOCKER_HOST is the engine of the run."""
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    return docker_engine.host


@pytest.fixture
def docker_api(docker_engine: engines.Engine) -> Iterator[Any]:
    """The package's own client, to look at containers past what is tested."""
    api = docker_engine.client()
    yield api
    api.close()


@pytest.fixture
def make_container(docker_engine: engines.Engine, docker_api: Any) -> Iterator[MakeContainer]:
    """Containers that are removed in the end."""
    made: list[str] = []

    def make(image: str = "busybox", *, start: bool = True, host: dict[str, Any] | None = None, **options: Any) -> str:
        name = f"snapcore-test-{secrets.token_hex(6)}"
        config = docker_api.create_host_config(**{"network_mode": "none", "init": False, **(host or {})})
        docker_api.create_container(engines.image(docker_engine, image), name=name, host_config=config, **options)
        made.append(name)
        if start:
            docker_api.start(name)
        return name

    yield make
    for name in made:
        with contextlib.suppress(Exception):
            docker_api.remove_container(name, force=True, v=True)


class Proxy:
    """A TCP port that leads to the engine. Counts requests and bytes. `break_after` and `break_after_sent` cut every connection,
    and refuse new ones, once so many bytes came from the engine or went to it; `mend` lets them through again."""

    def __init__(self, host: str) -> None:
        self._path = host.removeprefix("unix://")
        self._server: asyncio.Server
        self._open: set[asyncio.StreamWriter] = set()
        self.requests: list[str] = []
        self.sent = 0
        self.received = 0
        self.break_after: int | None = None
        self.break_after_sent: int | None = None
        self.broken = asyncio.Event()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return f"tcp://127.0.0.1:{port}"

    async def stop(self) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Every connection that is open now breaks."""
        for writer in list(self._open):
            writer.transport.abort()

    def mend(self) -> None:
        """No more breaks."""
        self.break_after = self.break_after_sent = None
        self.broken.clear()

    @property
    def calls(self) -> list[str]:
        """Requests that do work: an exec, or a transfer of files."""
        return [
            line for line in self.requests if line.split("?")[0].endswith(("/exec", "/archive")) and not line.startswith("HEAD")
        ]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.broken.is_set():
            writer.transport.abort()
            return
        there, back = await asyncio.open_unix_connection(self._path)
        self._open |= {writer, back}
        try:
            await asyncio.gather(self._copy(reader, back, up=True), self._copy(there, writer, up=False))
        except OSError:
            pass
        finally:
            self._open -= {writer, back}
            for each in (writer, back):
                each.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, up: bool) -> None:
        while data := await source.read(64 << 10):
            if up:
                first = data.partition(b"\r\n")[0].split(b" ")
                if len(first) == 3 and first[2].startswith(b"HTTP/"):
                    self.requests.append(f"{first[0].decode()} {first[1].decode()}")
                self.sent += len(data)
            else:
                self.received += len(data)
            count, limit = (self.sent, self.break_after_sent) if up else (self.received, self.break_after)
            if limit is not None and count >= limit:
                self.broken.set()
                self.cut()
                raise ConnectionResetError
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()


@pytest.fixture
async def docker_proxy(docker_engine: engines.Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """DOCKER_HOST is a port that leads to the engine of the run."""
    proxy = Proxy(docker_engine.host)
    monkeypatch.setenv("DOCKER_HOST", await proxy.start())
    yield proxy
    await proxy.stop()
