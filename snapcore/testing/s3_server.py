"""A strict S3 server for tests: a real HTTP server that holds its buckets in memory and accepts little.

It refuses what services other than AWS refuse (streamed bodies, checksum headers, multipart uploads, batch deletes without
Content-MD5), ignores If-None-Match, and can be told to throttle, to break off, to forget its answer and to lie in listings:
see `S3Faults`. Signatures are not checked, only that there is one, of the right access key and region where those are given.

    with StrictS3Server() as server:
        store = S3BlobStore(server.address("bucket/prefix"), credentials=S3Credentials("key", "secret"))
"""

import hashlib
import re
import socket
import threading
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final
from xml.sax.saxutils import escape

from .s3_faults import Refusal, S3Faults, Strike

__all__ = ["StrictS3Server"]

_SCOPE: Final = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d{8}/([^/]+)/s3/aws4_request")
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")
_REFUSED_QUERIES: Final = ("uploads", "uploadId", "partNumber")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] | None = None
    length: int | None = None  # Content-Length of an answer to HEAD


class _RefusedError(Exception):
    def __init__(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(code)
        self.refusal = Refusal(status, code, headers or {})


class StrictS3Server:
    """The server, running from `start` (or `with`) to `stop`.

    `buckets` holds the objects: bytes by key by bucket; there is one called `bucket`. `requests` counts what came in, by
    name; `most_at_once` is how many requests were under way together. `access_key` and `region`, when set, must be those
    that requests are signed with. `clock_offset` is by how many seconds the server's clock is fast.
    """

    def __init__(self, *, access_key: str = "", region: str = "") -> None:
        self.buckets: dict[str, dict[str, bytes]] = {"bucket": {}}
        self.faults = S3Faults()
        self.requests: Counter[str] = Counter()
        self.most_at_once = 0
        self.clock_offset = 0.0
        self.access_key = access_key
        self.region = region
        self._at_once = 0
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="strict-s3", daemon=True)

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def address(self, place: str = "bucket", **query: str) -> str:
        """The address of a store in this server: `place` is a bucket, or bucket/prefix."""
        return f"s3://{place}?" + urllib.parse.urlencode({"endpoint": self.url, **query}, safe=":/")

    def start(self) -> None:
        """Serve on a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Close every connection and wait for all threads."""
        self._server.shutdown()
        self._thread.join()
        self._server.close_connections()
        self._server.server_close()

    def __enter__(self) -> "StrictS3Server":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def began(self, verb: str) -> Strike:
        """A request came in: it is counted, and what is to happen to it decided."""
        with self._lock:
            self.requests[verb] += 1
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        return self.faults.strike(verb)

    def ended(self) -> None:
        """A request is over."""
        with self._lock:
            self._at_once -= 1

    # ---- what requests do

    def work(self, request: "_Request") -> _Answer:
        """Do what a request asks for, or raise what it is refused with."""
        self._check_signature(request)
        _check_headers(request)
        objects = self.buckets.get(request.bucket)
        if objects is None:
            raise _RefusedError(404, "NoSuchBucket")
        if request.verb == "LIST":
            return self._list(request, objects)
        if request.verb == "POST":
            return self._delete_many(request, objects)
        if request.verb == "PUT":
            return self._put(request, objects)
        if request.verb == "DELETE":
            with self._lock:
                objects.pop(request.key, None)
            return _Answer(204)
        return self._read(request, objects)

    def _check_signature(self, request: "_Request") -> None:
        match = _SCOPE.match(request.headers.get("authorization", ""))
        if match is None:
            raise _RefusedError(403, "AccessDenied")
        if self.access_key and match[1] != self.access_key:
            raise _RefusedError(403, "InvalidAccessKeyId")
        if self.region and match[2] != self.region:
            raise _RefusedError(400, "AuthorizationHeaderMalformed")

    def _put(self, request: "_Request", objects: dict[str, bytes]) -> _Answer:
        if self.faults.writes_too_often(request.key):
            raise _RefusedError(429, "TooManyRequests")
        with self._lock:
            objects[request.key] = request.body
        return _Answer(200, headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})

    def _read(self, request: "_Request", objects: dict[str, bytes]) -> _Answer:
        data = objects.get(request.key)
        if data is None:
            raise _RefusedError(404, "NoSuchKey")
        if request.verb == "HEAD":
            return _Answer(200, length=len(data))
        match = _RANGE.fullmatch(request.headers.get("range", ""))
        if match is None or self.faults.ignore_ranges:
            return _Answer(200, data)
        first, last = int(match[1]), min(int(match[2] or len(data) - 1), len(data) - 1)
        if first > last:
            raise _RefusedError(416, "InvalidRange")
        return _Answer(206, data[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _delete_many(self, request: "_Request", objects: dict[str, bytes]) -> _Answer:
        if "delete" not in request.query:
            raise _RefusedError(501, "NotImplemented")
        if "content-md5" not in request.headers:
            raise _RefusedError(400, "InvalidRequest")
        for key in re.findall(r"<Key>([^<]*)</Key>", request.body.decode()):
            objects.pop(key, None)
        return _Answer(200, b'<?xml version="1.0" encoding="UTF-8"?><DeleteResult></DeleteResult>')

    def _list(self, request: "_Request", objects: dict[str, bytes]) -> _Answer:
        query, faults = request.query, self.faults
        second = query.get("list-type") == "2" and faults.first_version_only != "ignored"
        if query.get("list-type") == "2" and faults.first_version_only == "refused":
            raise _RefusedError(501, "NotImplemented")
        after = (query.get("continuation-token") or query.get("start-after", "")) if second else query.get("marker", "")
        if faults.stuck_pages:
            after = ""
        with self._lock:
            sizes = {key: len(data) for key, data in objects.items() if key.startswith(query.get("prefix", ""))}
        keys = sorted(key for key in sizes if key > after and key not in faults.hidden)
        page = keys[: min(faults.page_size, int(query.get("max-keys", "1000")))]
        truncated = len(page) < len(keys)
        token = min(sizes) if faults.repeat_tokens and sizes else (page[-1] if page else "")
        listed = sorted([*page, *faults.foreign] * (2 if faults.duplicates else 1))
        parts = [f"<Name>{request.bucket}</Name>", f"<IsTruncated>{str(truncated).lower()}</IsTruncated>"]
        if second:
            parts.append(f"<KeyCount>{len(listed)}</KeyCount>")
            parts += [f"<NextContinuationToken>{escape(token)}</NextContinuationToken>"] if truncated else []
        if query.get("encoding-type") == "url":
            parts.append("<EncodingType>url</EncodingType>")
            listed = [urllib.parse.quote(key) for key in listed]
        for key in listed:
            size = sizes.get(urllib.parse.unquote(key), 0)
            parts.append(f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size></Contents>")
        body = f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>{"".join(parts)}</ListBucketResult>'
        return _Answer(200, body.encode())


def _check_headers(request: "_Request") -> None:
    """Refuse what R2, GCS, Ceph or older MinIO refuse."""
    for name, value in request.headers.items():
        if name.startswith("x-amz-checksum-") or name in ("x-amz-sdk-checksum-algorithm", "x-amz-trailer"):
            raise _RefusedError(501, "NotImplemented")
        if name == "content-encoding" and "aws-chunked" in value:
            raise _RefusedError(501, "NotImplemented")
        if name == "transfer-encoding":
            raise _RefusedError(411, "MissingContentLength")
    if any(name in request.query for name in _REFUSED_QUERIES):
        raise _RefusedError(501, "NotImplemented")
    digest = request.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
    if digest.startswith("STREAMING-"):
        raise _RefusedError(501, "NotImplemented")
    if digest != "UNSIGNED-PAYLOAD" and digest != hashlib.sha256(request.body).hexdigest():
        raise _RefusedError(400, "XAmzContentSHA256Mismatch")


@dataclass(frozen=True, slots=True)
class _Request:
    verb: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # `server_close` waits for them
    request_queue_size = 128

    def __init__(self, owner: StrictS3Server) -> None:
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


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer leaves in one piece

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Tests print nothing."""

    def _serve(self) -> None:
        owner = self._owner()
        parts = urllib.parse.urlsplit(self.path)
        bucket, _, key = urllib.parse.unquote(parts.path).lstrip("/").partition("/")
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        verb = "LIST" if self.command == "GET" and not key else self.command
        strike = owner.began(verb)
        try:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self._answer(owner, _Request(verb, bucket, key, query, headers, body), strike)
        finally:
            owner.ended()

    def _answer(self, owner: StrictS3Server, request: _Request, strike: Strike) -> None:
        time.sleep(strike.seconds)
        if strike.drop:
            self.close_connection = True
            return
        try:
            if strike.refusal is not None:
                raise _RefusedError(strike.refusal.status, strike.refusal.code, strike.refusal.headers)
            if strike.as_page:
                answer = _Answer(404, b"<html><body><h1>Not found</h1></body></html>", {"Content-Type": "text/html"})
            else:
                answer = owner.work(request)
        except _RefusedError as error:
            answer = _error(error.refusal, request)
        if strike.lose:
            self.close_connection = True
            return
        self._send(answer, strike.keep)

    def _owner(self) -> StrictS3Server:
        assert isinstance(self.server, _Server)
        return self.server.owner

    def _now(self) -> str:
        return formatdate(time.time() + self._owner().clock_offset, usegmt=True)

    def _send(self, answer: _Answer, keep: int | None) -> None:
        self.send_response_only(answer.status)
        headers = {"Content-Type": "application/xml", **(answer.headers or {}), "Date": self._now()}
        for name, value in headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body) if answer.length is None else answer.length))
        self.end_headers()
        self.wfile.write(answer.body if keep is None else answer.body[:keep])
        self.wfile.flush()
        if keep is not None:
            self.close_connection = True


def _error(refusal: Refusal, request: _Request) -> _Answer:
    """An error answer. As some services do, it repeats what the request was signed with."""
    if request.verb == "HEAD":
        return _Answer(refusal.status, headers=refusal.headers)
    message = escape(request.headers.get("authorization", ""))
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{refusal.code}</Code><Message>{message}</Message></Error>'
    return _Answer(refusal.status, body.encode(), refusal.headers)
