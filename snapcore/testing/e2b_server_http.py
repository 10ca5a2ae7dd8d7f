"""The HTTP side of the E2B test server: requests to the API and to the agents of sandboxes, Connect's JSON flavour included."""

import hashlib
import json
import socket
import struct
import threading
import time
import urllib.parse
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol

from .e2b_server_api import ApiError, ControlPlane, ServedSandbox, api_call_name
from .e2b_server_chroot import USERS, SandboxUser
from .e2b_server_faults import E2BStrike
from .e2b_server_processes import Message, RpcError

__all__ = ["E2BHttpServer"]

_PIECE: Final = 64 << 10
_STATUS: Final = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "not_found": 404,
    "already_exists": 409,
    "resource_exhausted": 507,
    "internal": 500,
    "unimplemented": 501,
}


class _Owner(Protocol):
    """What answers come from."""

    control: ControlPlane

    def began(self, name: str) -> E2BStrike: ...


class E2BHttpServer(ThreadingHTTPServer):
    """Serves one control plane on a port of this host."""

    daemon_threads = False  # `server_close` waits for them
    request_queue_size = 128

    def __init__(self, owner: _Owner) -> None:
        self.owner = owner
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Break off what is open, so that its thread ends."""
        with self._guard:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # it is closed already

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are no error."""


class _GoneError(Exception):
    """The connection is to be closed without an answer, or was closed by the client."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer leaves in one piece
    left: int | None  # bytes of the body that are to come; None: in chunks

    def do_GET(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Tests print nothing."""

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:
            self.rfile.close()  # what was left to be sent kept it from being closed

    def _serve(self) -> None:
        assert isinstance(self.server, E2BHttpServer)
        self._owner = self.server.owner
        parts = urllib.parse.urlsplit(self.path)
        self._route = parts.path
        self._query: dict[str, str] = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        self._heads = {name.lower(): value for name, value in self.headers.items()}
        self.left = None if "chunked" in self._heads.get("transfer-encoding", "") else int(self._heads.get("content-length", 0))
        self._body = self._pieces()
        name = self._name()
        strike = self._owner.began(name)
        try:
            time.sleep(strike.seconds)
            if strike.drop:
                raise _GoneError
            if strike.status:
                self._refuse(strike)
            else:
                self._work(name, strike)
        except _GoneError:
            self.close_connection = True
        except ConnectionError:
            self.close_connection = True

    def _name(self) -> str:
        if self._route == "/files":
            return "read" if self.command == "GET" else "write"
        if self._route.startswith(("/process.Process/", "/filesystem.Filesystem/")):
            return self._route.rpartition("/")[2]
        if self._route in ("/health", "/metrics"):
            return self._route[1:]
        return api_call_name(self.command, self._route)

    def _work(self, name: str, strike: E2BStrike) -> None:
        agent = self._route in ("/files", "/health", "/metrics") or "." in self._route.split("/")[1]
        try:
            if not agent:
                body = json.loads(b"".join(self._body) or b"{}")
                status, answer, headers = self._owner.control.call(self.command, self._route, self._query, self._heads, body)
                self._send(status, answer, strike, headers)
                return
            sandbox = self._sandbox()
            if sandbox is None:
                self._send_missing(strike)
            elif self._route == "/files":
                self._files(sandbox, strike)
            elif self._route in ("/health", "/metrics"):
                self._send(204 if self._route == "/health" else 200, None if self._route == "/health" else {}, strike)
            else:
                self._procedure(name, sandbox, strike)
        except ApiError as error:
            self._send(error.status, {"code": error.status, "message": error.message}, strike)
        except RpcError as error:
            status = _STATUS.get(error.code, 500)
            code: str | int = status if self._route == "/files" else error.code
            self._send(status, {"code": code, "message": error.message}, strike)

    # ---- who asks

    def _sandbox(self) -> ServedSandbox | None:
        control = self._owner.control
        if "signature" in self._query:
            return control.signed_for(self._signed)
        sandbox = control.running(self._heads.get("e2b-sandbox-id", ""))
        if sandbox is not None and self._route != "/health" and self._heads.get("x-access-token") != sandbox.token:
            raise ApiError(401, "invalid access token")
        return sandbox

    def _signed(self, token: str) -> bool:
        query = self._query
        operation = "read" if self.command == "GET" else "write"
        parts = [query.get("path", ""), operation, query.get("username", ""), token]
        if ends := query.get("signature_expiration"):
            if int(ends) < time.time():
                return False
            parts.append(ends)
        digest = hashlib.sha256(":".join(parts).encode()).digest()
        return query["signature"] == "v1_" + b64encode(digest).rstrip(b"=").decode()

    def _user(self) -> SandboxUser:
        name = self._query.get("username", "user")
        given = self._heads.get("authorization", "")
        if given.startswith("Basic "):
            name = b64decode(given[6:]).decode().partition(":")[0]
        if name not in USERS:
            raise RpcError("unauthenticated", f"invalid username: '{name}'")
        return USERS[name]

    # ---- bodies that come in

    def _pieces(self) -> Iterator[bytes]:
        if self.left is not None:
            while self.left:
                data = self.rfile.read1(min(self.left, _PIECE))
                if not data:
                    raise _GoneError
                self.left -= len(data)
                yield data
            return
        while size := int(self.rfile.readline(64).split(b";")[0] or b"x", 16):
            while size:
                data = self.rfile.read1(min(size, _PIECE))
                if not data:
                    raise _GoneError
                size -= len(data)
                yield data
            self.rfile.readline(8)
        self.rfile.readline(8)
        self.left = 0

    def _uploaded(self, strike: E2BStrike) -> Iterator[bytes]:
        gzip = zlib.decompressobj(zlib.MAX_WBITS | 16) if self._heads.get("content-encoding") == "gzip" else None
        seen = 0
        try:
            for piece in self._body:
                data = gzip.decompress(piece) if gzip else piece
                most = strike.cut if strike.cut is not None else strike.keep
                yield data if most is None else data[: max(0, most - seen)]
                seen += len(data)
                if strike.cut is not None and seen >= strike.cut:
                    raise _GoneError
        except ValueError as error:
            raise _GoneError from error  # a connection that broke between two chunks

    def _framed(self) -> Iterator[Message]:
        waiting = b""
        for piece in self._body:
            waiting += piece
            while len(waiting) >= 5 and len(waiting) >= 5 + struct.unpack_from(">I", waiting, 1)[0]:
                size = struct.unpack_from(">I", waiting, 1)[0]
                yield json.loads(waiting[5 : 5 + size] or b"{}")
                waiting = waiting[5 + size :]

    # ---- the agent

    def _procedure(self, name: str, sandbox: ServedSandbox, strike: E2BStrike) -> None:
        streamed = self._heads.get("content-type", "").startswith("application/connect+json")
        if not streamed and not self._heads.get("content-type", "").startswith("application/json"):
            raise ApiError(415, "The test server speaks JSON only.")
        user = self._user()
        if name == "StreamInput":
            self._stream(iter([sandbox.processes.stream_input(self._framed())]), sandbox, strike)
        elif streamed:
            request, *_ = self._framed()
            milliseconds = int(self._heads.get("connect-timeout-ms", 0))
            self._stream(self._events(name, request, user, sandbox, milliseconds / 1000 or None), sandbox, strike)
        else:
            self._send(200, self._unary(name, json.loads(b"".join(self._body) or b"{}"), user, sandbox), strike)

    def _unary(self, name: str, request: Message, user: SandboxUser, sandbox: ServedSandbox) -> Message:
        if self._route.startswith("/filesystem."):
            return sandbox.files.call(name, request, user)
        processes = sandbox.processes
        calls = {"SendInput": processes.send_input, "SendSignal": processes.send_signal, "CloseStdin": processes.close_stdin}
        if name == "List":
            return processes.list()
        if name not in calls:
            raise RpcError("unimplemented", name)
        return calls[name](request)

    @staticmethod
    def _events(
        name: str, request: Message, user: SandboxUser, sandbox: ServedSandbox, seconds: float | None
    ) -> Iterator[Message | None]:
        if name == "Start":
            return sandbox.processes.start(request, user, seconds)
        if name == "Connect":
            return sandbox.processes.connect(request)
        if name == "WatchDir":
            return sandbox.files.watch(request, user)
        raise RpcError("unimplemented", name)

    def _stream(self, events: Iterator[Message | None], sandbox: ServedSandbox, strike: E2BStrike) -> None:
        """Send events as they come, until they end, the client goes, or the sandbox does."""
        self.send_response_only(200)
        self.send_header("Content-Type", "application/connect+json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        most = strike.cut if strike.cut is not None else strike.keep
        seen = 0
        end: Message = {}
        try:
            for event in events:
                if self._owner.control.running(sandbox.id) is None or (event is None and self._is_alone()):
                    raise _GoneError
                if event is None:
                    continue
                shown, size = (event, 0) if most is None else _shortened(event, max(0, most - seen))
                seen += size
                self._frame(0, shown)
                if strike.cut is not None and seen >= strike.cut:
                    raise _GoneError
        except RpcError as error:
            end = {"error": {"code": error.code, "message": error.message}}
        if strike.lose:
            raise _GoneError
        self._frame(2, end)
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _frame(self, flags: int, message: Message) -> None:
        data = json.dumps(message).encode()
        self.wfile.write(b"%x\r\n" % (len(data) + 5) + struct.pack(">BI", flags, len(data)) + data + b"\r\n")
        self.wfile.flush()

    def _is_alone(self) -> bool:
        """Whether the client has closed the connection."""
        self.connection.setblocking(False)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.connection.setblocking(True)

    def _files(self, sandbox: ServedSandbox, strike: E2BStrike) -> None:
        user = self._user()
        if self.command == "GET":
            with sandbox.files.open(self._query.get("path", ""), user) as source:
                self._send_file(source, strike)
            return
        kind = self._heads.get("content-type", "")
        if kind.startswith("multipart/form-data"):
            stored = [sandbox.files.store(path, user, iter([data])) for path, data in self._parts(kind)]
        else:
            stored = [sandbox.files.store(self._query.get("path", ""), user, self._uploaded(strike))]
        self._send(200, stored, strike)

    def _parts(self, kind: str) -> Iterator[tuple[str, bytes]]:
        whole = b"Content-Type: " + kind.encode() + b"\r\n\r\n" + b"".join(self._body)
        message = BytesParser(EmailMessage, policy=HTTP).parsebytes(whole)
        for part in message.iter_parts():
            data = part.get_payload(decode=True)
            assert isinstance(data, bytes)
            yield self._query.get("path") or part.get_filename() or "", data

    # ---- answers

    def _send_file(self, source: Any, strike: E2BStrike) -> None:
        size = source.seek(0, 2) if strike.keep is None else strike.keep
        source.seek(0)
        self.send_response_only(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(size))
        self.end_headers()
        left = size if strike.cut is None else min(size, strike.cut)
        while left and (data := source.read(min(left, _PIECE))):
            self.wfile.write(data)
            left -= len(data)
        self.wfile.flush()
        if strike.cut is not None or left:
            raise _GoneError

    def _send_missing(self, strike: E2BStrike) -> None:
        """What the proxy in front of the agents answers when there is no such sandbox, or none that runs."""
        for _ in self._body:
            pass
        name = self._heads.get("e2b-sandbox-id", "")
        self._send(502, {"sandboxId": name, "message": "The sandbox was not found", "code": 502}, strike)

    def _refuse(self, strike: E2BStrike) -> None:
        for _ in self._body:
            pass
        if strike.page:
            page = f"<html><body><h1>{strike.message}</h1></body></html>".encode()
            self._send_bytes(strike.status, page, "text/html")
        else:
            self._send(strike.status, {"code": strike.status, "message": strike.message}, E2BStrike())

    def _send(self, status: int, answer: Any, strike: E2BStrike, headers: dict[str, str] | None = None) -> None:
        if strike.lose:
            raise _GoneError
        if self.left != 0:
            self.close_connection = True  # an error that was found before the body had come: the rest of it is no request
        self._send_bytes(status, b"" if answer is None else json.dumps(answer).encode(), "application/json", headers)

    def _send_bytes(self, status: int, data: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")  # or the client might send its next request here
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()


def _shortened(event: Message, most: int) -> tuple[Message, int]:
    """An event with at most so many bytes of output, and how many it has."""
    data = event.get("event", {}).get("data")
    if not data:
        return event, 0
    name, text = next(iter(data.items()))
    kept = b64decode(text)[:most]
    return {"event": {"data": {name: b64encode(kept).decode()}}}, len(kept)
