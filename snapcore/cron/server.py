"""A small HTTP server for `/health`, `/live` and `/metrics`, in the event loop of the captures, and in nobody's way: each
connection gets one answer, has little time and little room, and there are only so many at once."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from snapcore.errors import Code, SnapshotError, printable

__all__ = ["Answer", "HttpServer"]

CONNECTIONS: Final = 32
SECONDS: Final = 5.0
MAX_HEAD: Final = 16 << 10
_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}

Answer = tuple[int, str, bytes]
"""Status, content type, body."""


class HttpServer:
    """Answers GET and HEAD of the paths in `pages`."""

    def __init__(self, pages: dict[str, Callable[[], Answer]]) -> None:
        self._pages = pages
        self._open: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises `SnapshotError` `INVALID_REQUEST` when that address is in use or is none of this machine."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD)
        except (OSError, UnicodeError) as error:  # the latter for what can be no name of a host
            reason = (error.strerror if isinstance(error, OSError) else "") or "it is no address"
            raise SnapshotError(
                f"listen: the address {printable(host)}:{port} cannot be used: {reason}.",
                code=Code.INVALID_REQUEST,
                hint="Choose another port, or end what listens there.",
            ) from None

    @property
    def port(self) -> int | None:
        """Where it listens; None when it does not."""
        return None if self._server is None else int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, and cut what is open. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for writer in list(self._open):
                writer.transport.abort()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= CONNECTIONS:  # whoever asks properly is answered before this many others come
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asks badly gets no answer
        finally:
            self._open.pop(writer, None)
            with contextlib.suppress(OSError):
                writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            status, kind, body = 400, "text/plain", b"bad request\n"
        elif words[0] not in (b"GET", b"HEAD"):
            status, kind, body = 405, "text/plain", b"only GET\n"
        else:
            page = self._pages.get(words[1].split(b"?")[0].decode("latin-1"))
            status, kind, body = (404, "text/plain", b"not found\n") if page is None else page()
        header = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
        )
        return header.encode("latin-1") + (b"" if words[0] == b"HEAD" else body)
