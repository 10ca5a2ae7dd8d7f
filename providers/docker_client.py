"""The Docker engine as snapcore talks to it: the package `docker` for addresses, TLS and requests, on threads of its own."""

import asyncio
import base64
import contextlib
import dataclasses
import socket
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

import msgspec

from snapcore.errors import Code, ProviderError, RepositoryError, SnapcoreError, printable

from .threads import uncancelled

__all__ = ["Connection", "DockerEngine", "PathStat", "Traffic"]

P = ParamSpec("P")
T = TypeVar("T")

OLDEST_API: Final = "1.41"
REQUEST_SECONDS: Final = 60.0
CHUNK: Final = 1 << 20
MAX_HEADER: Final = 64 << 10
_GO_DIR: Final = 1 << 31
_GO_LINK: Final = 1 << 27


@dataclasses.dataclass(slots=True)
class Traffic:
    """What went over the wire: `calls` counts what the user would call one (an exec, a transfer, an inspection), `sent` and
    `received` the bytes of contents."""

    calls: int = 0
    sent: int = 0
    received: int = 0


class PathStat(msgspec.Struct, frozen=True):
    """What the engine says of one path in a container. `mode` is Go's; `linkTarget` is the resolved target of a link."""

    name: str = ""
    size: int = 0
    mode: int = 0
    mtime: str = ""
    linkTarget: str = ""  # noqa: N815 (the engine's name)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return bool(self.mode & _GO_DIR)

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return bool(self.mode & _GO_LINK)


class Connection:
    """The raw connection of an exec, after the engine has switched to it. Non-blocking; for one event loop."""

    def __init__(self, sock: socket.socket, first: bytes, traffic: Traffic) -> None:
        self._socket = sock
        self._first = first
        self._traffic = traffic
        sock.setblocking(False)

    async def receive(self) -> bytes:
        """What has come, at most 256 KiB; empty at the end. Raises `OSError`."""
        if self._first:
            first, self._first = self._first, b""
            return first
        while True:
            try:
                data = self._socket.recv(256 << 10)
            except (BlockingIOError, ssl.SSLWantReadError):
                await self._ready(write=False)
            except ssl.SSLWantWriteError:
                await self._ready(write=True)
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return b""
            else:
                self._traffic.received += len(data)
                return data

    async def send(self, data: bytes | memoryview) -> None:
        """All of it. Raises `OSError`."""
        left = memoryview(data)
        while left:
            try:
                sent = self._socket.send(left[: 256 << 10])
            except (BlockingIOError, ssl.SSLWantWriteError):
                await self._ready(write=True)
            except ssl.SSLWantReadError:
                await self._ready(write=False)
            else:
                self._traffic.sent += sent
                left = left[sent:]

    async def end_input(self) -> None:
        """Nothing more is sent: the process sees the end of its input, and what it writes still comes."""
        if isinstance(self._socket, ssl.SSLSocket):
            # sends the alert that ends this direction, and cannot wait for the other's
            with contextlib.suppress(ssl.SSLError, OSError):
                self._socket.unwrap()
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Cut it. Idempotent."""
        self._socket.close()

    async def _ready(self, *, write: bool) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        fd = self._socket.fileno()
        if fd < 0:
            raise ConnectionError("closed")

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        (loop.add_writer if write else loop.add_reader)(fd, wake)
        try:
            await ready
        finally:
            (loop.remove_writer if write else loop.remove_reader)(fd)


class DockerEngine:
    """A client of one engine. Every method that blocks runs on this object's own threads; `close` ends them.

    `ProviderError`: `SANDBOX_UNAVAILABLE` (retryable) when the engine cannot be reached, `NO_SANDBOX` for a container that is
    not there. `RepositoryError` codes are used for what is no sandbox's fault: `MISSING_EXTRA`, `ACCESS_DENIED`.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment) if environment is not None else None
        self._pool = ThreadPoolExecutor(max_workers=32, thread_name_prefix="snapcore-docker")
        self._api: Any = None
        self._opening = asyncio.Lock()
        self._closed = False
        self.id = ""
        self.traffic = Traffic()

    async def open(self) -> None:
        """Find the engine, by DOCKER_HOST or the present context, and ask it for its id. Once."""
        async with self._opening:
            if self._api is None:
                api = await self.run(self._connect)
                self.id = str((await self.run(api.info)).get("ID") or "")
                self._api = api

    @property
    def api(self) -> Any:
        """The package's low-level client, to be called on this object's threads."""
        if self._closed or self._api is None:
            raise ProviderError("The connection to the Docker engine is closed.", code=Code.SANDBOX_UNAVAILABLE)
        return self._api

    async def close(self) -> None:
        """Release connections and threads. Idempotent."""
        self._closed = True
        api, self._api = self._api, None
        if api is not None:
            api.close()
        self._pool.shutdown(wait=False)

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking `work` on a thread. A cancelled caller waits for its end. What the engine answers is a typed error."""
        if self._closed:
            raise ProviderError("The connection to the Docker engine is closed.", code=Code.SANDBOX_UNAVAILABLE)

        async def ended() -> T:
            return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: guarded(work, *args, **kwargs))

        return await uncancelled(ended())

    # ---- requests that the package has no method for. All of these block.

    def request(self, method: str, path: str, **options: Any) -> Any:
        """One request, its response checked. `path` starts at the API's version."""
        options.setdefault("timeout", REQUEST_SECONDS)
        response = self.api.request(method, f"{self.api.base_url}/v{self.api.api_version}{path}", **options)
        if response.status_code >= 400:
            raise answered(response.status_code, _message(response))
        return response

    def stat(self, container: str, path: str) -> PathStat | None:
        """What is at a path of a container; None when there is nothing."""
        where = f"{self.api.base_url}/v{self.api.api_version}/containers/{container}/archive"
        params = {"path": _encoded(path)}
        response = self.api.request("HEAD", where, params=params, timeout=REQUEST_SECONDS)
        if response.status_code < 400:
            return _path_stat(response)
        with contextlib.suppress(_NoPathError):  # it has no text: what is missing, the path or the container, a GET tells
            self.request("GET", f"/containers/{container}/archive", params=params, stream=True).close()
        return None

    @contextlib.contextmanager
    def get_archive(self, container: str, path: str) -> Iterator[tuple[PathStat, Iterator[bytes]]]:
        """A tar stream of what is at a path, and its stat. `FileNotFoundError` when there is nothing."""
        self.traffic.calls += 1
        try:
            response = self.request(
                "GET",
                f"/containers/{container}/archive",
                params={"path": _encoded(path)},
                stream=True,
                headers={"Accept-Encoding": "identity"},
            )
        except _NoPathError:
            raise FileNotFoundError(path) from None
        with contextlib.closing(response):
            yield _path_stat(response), self._counted(response.iter_content(CHUNK))

    @contextlib.asynccontextmanager
    async def archive(self, container: str, path: str) -> AsyncIterator[tuple[PathStat, Iterator[bytes]]]:
        """`get_archive` for a caller on the event loop; the pieces are to be taken on this object's threads."""
        with contextlib.ExitStack() as stack:
            yield await self.run(stack.enter_context, self.get_archive(container, path))

    def put_archive(self, container: str, path: str, data: Iterable[bytes]) -> None:
        """Extract a tar stream into a folder. No folder is replaced by a file."""
        self.traffic.calls += 1

        def counted() -> Iterator[bytes]:
            for piece in data:
                self.traffic.sent += len(piece)
                yield piece

        params = {"path": _encoded(path), "noOverwriteDirNonDir": "1"}
        headers = {"Content-Type": "application/x-tar"}
        try:
            self.request("PUT", f"/containers/{container}/archive", params=params, data=counted(), headers=headers, timeout=600)
        except _NoPathError:
            raise FileNotFoundError(path) from None

    def start_exec(self, exec_id: str) -> Connection:
        """Start an exec that was created, on a connection of its own."""
        sock = self._dial()
        try:
            body = b'{"Detach":false,"Tty":false}'
            sock.sendall(
                f"POST /v{self.api.api_version}/exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\nUser-Agent: snapcore\r\n"
                f"Content-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            status, rest = _read_header(sock)
            if status not in (101, 200):
                sock.settimeout(5)
                raise answered(status, _text(rest))
        except BaseException:
            sock.close()
            raise
        return Connection(sock, rest, self.traffic)

    def _dial(self) -> socket.socket:
        """A connection to where the package's client connects to."""
        parts = urllib.parse.urlsplit(self.api.base_url)
        if parts.scheme == "http+docker":
            path = getattr(self.api.get_adapter(self.api.base_url), "socket_path", None)
            if path is None:
                raise ProviderError(
                    "Commands in containers of an engine behind ssh:// are not supported.",
                    code=Code.NOT_CAPABLE,
                    hint="Forward its socket: ssh -L /tmp/docker.sock:/var/run/docker.sock, and set DOCKER_HOST=unix:///tmp/docker.sock.",
                )
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(REQUEST_SECONDS)
            try:
                sock.connect(path)
            except OSError:
                sock.close()
                raise
            return sock
        secure = parts.scheme == "https"
        plain = socket.create_connection((parts.hostname or "", parts.port or (2376 if secure else 2375)), REQUEST_SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._secured(plain, parts.hostname or "") if secure else plain

    def _secured(self, plain: socket.socket, host: str) -> socket.socket:
        verify, cert = self.api.verify, self.api.cert
        context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
        if not verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if cert:
            context.load_cert_chain(*cert) if isinstance(cert, tuple) else context.load_cert_chain(cert)
        try:
            return context.wrap_socket(plain, server_hostname=host)
        except OSError:
            plain.close()
            raise

    def _connect(self) -> Any:
        try:
            import docker
        except ImportError as error:
            raise RepositoryError(
                "Docker sandboxes need the package 'docker'.",
                code=Code.MISSING_EXTRA,
                hint="Install it: pip install 'snapcore[docker]'.",
            ) from error

        def client(version: str) -> Any:
            options: dict[str, Any] = {} if self._environment is None else {"environment": self._environment}
            api = docker.from_env(version=version, timeout=int(REQUEST_SECONDS), max_pool_size=32, **options).api
            api.trust_env = False  # or a CA bundle for the web would be taken for the engine's
            return api

        first = client(OLDEST_API)
        with contextlib.closing(first):
            version = str(first.version(api_version=False)["ApiVersion"])
        return client(version)

    def _counted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.traffic.received += len(piece)
            yield piece


# ------------------------------------------------------------------------------------------------------------ errors


class _NoPathError(Exception):
    """The container is there, the path is not."""


def guarded(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`; what the package and its connections raise becomes a typed error without the original's text of requests."""
    try:
        return work(*args, **kwargs)
    except (SnapcoreError, FileNotFoundError, IsADirectoryError):
        raise
    except Exception as error:
        typed = _typed(error)
        if typed is None:
            raise
        raise typed from None


def _typed(error: Exception) -> Exception | None:
    """What an error of the package, of its connections or of ours means here; None for one of neither."""
    from docker.errors import APIError, DockerException

    if isinstance(error, _NoPathError):
        return FileNotFoundError(str(error))
    if isinstance(error, APIError):  # requests' errors, and so these, are OSErrors
        found = answered(error.status_code or 500, str(error.explanation or ""))
        return FileNotFoundError(str(found)) if isinstance(found, _NoPathError) else found
    if isinstance(error, DockerException | OSError) or type(error).__module__.startswith("urllib3."):
        return _unreachable(error)
    return None


def answered(status: int, message: str) -> Exception:
    """The error for what an engine answered."""
    text = printable(message.strip())[:500]
    low = text.lower()
    if status == 404 and ("could not find the file" in low or "no such file" in low or "no such path" in low):
        return _NoPathError(text)
    if "not a directory" in low and "lstat" in low:
        return _NoPathError(text)
    if status == 404 and "no such exec" in low:
        return ProviderError("The Docker engine has forgotten the command that ran.", retryable=True)
    if status == 404 and "image" in low:
        return ProviderError(f"The Docker engine has no such image: {text}.", code=Code.NO_SANDBOX)
    if status == 404:
        return ProviderError(
            f"There is no such Docker container: {text.removeprefix('No such container: ')}.", code=Code.NO_SANDBOX
        )
    if "no space left" in low or "disk quota exceeded" in low:
        return ProviderError("The Docker engine has no room left.", code=Code.SANDBOX_FULL)
    if status == 409 and "is paused" in low:
        return ProviderError("The Docker container is paused.", hint="Unpause it, or open it by its provider, which does.")
    if status == 409 and "not running" in low:
        return ProviderError(
            "The Docker container is not running.", hint="Start it; or connect again to reach the files of a stopped one."
        )
    if "read-only" in low or "read only" in low:
        return ProviderError(f"The Docker container cannot be written to: {text}.", code=Code.NOT_CAPABLE)
    if status in (401, 403):
        return RepositoryError(f"The Docker engine refuses this: {text}.", code=Code.ACCESS_DENIED)
    return ProviderError(f"The Docker engine refused this (status {status}): {text}.", retryable=status >= 500)


def _unreachable(error: BaseException) -> SnapcoreError:
    seen: BaseException | None = error
    causes: list[BaseException] = []
    while seen is not None and len(causes) < 20 and seen not in causes:
        causes.append(seen)
        inner = next((argument for argument in seen.args if isinstance(argument, BaseException)), None)
        reason = getattr(seen, "reason", None)
        seen = inner or (reason if isinstance(reason, BaseException) else None) or seen.__cause__ or seen.__context__
    if any(isinstance(cause, PermissionError) for cause in causes):
        return RepositoryError(
            "The Docker engine's socket may not be used by this user.",
            code=Code.ACCESS_DENIED,
            hint="Add the user to the group docker, or set DOCKER_HOST to an engine of its own.",
        )
    kind = next((type(cause).__name__ for cause in reversed(causes) if isinstance(cause, OSError)), type(error).__name__)
    return ProviderError(
        f"The Docker engine cannot be reached ({kind}).",
        hint="Is dockerd running, and DOCKER_HOST right?",
        retryable=True,
    )


def _encoded(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _message(response: Any) -> str:
    try:
        return _text(next(response.iter_content(4096), b""))
    finally:
        response.close()


def _text(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body[:500].decode("utf-8", "replace")


def _path_stat(response: Any) -> PathStat:
    header = response.headers.get("X-Docker-Container-Path-Stat", "")
    try:
        return msgspec.json.decode(base64.b64decode(header), type=PathStat)
    except (ValueError, msgspec.MsgspecError):
        raise ProviderError("The Docker engine's answer about a path makes no sense.") from None


def _read_header(sock: socket.socket) -> tuple[int, bytes]:
    """The status of an HTTP response, and what came after its header."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = sock.recv(32 << 10)
        if not piece or len(received) > MAX_HEADER:
            raise ConnectionError("the engine's answer is cut short")
        received += piece
    header, _, rest = received.partition(b"\r\n\r\n")
    words = header.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise ConnectionError("the engine's answer is no HTTP")
    return int(words[1]), rest
