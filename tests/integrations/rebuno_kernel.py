"""A small kernel of Rebuno for the tests: what the package's clients ask of the real one, over HTTP on the loopback.

    with RebunoKernel(folder) as kernel:                   # its state is a file there, so that it can be restarted
        kernel.register("coder", secret, webhook_url)
        execution = kernel.create("coder", {"task": "..."})
        kernel.wait(execution)                             # until it has ended

It keeps executions with their events, steps, resources and checkpoints, asks for signatures and leases, delivers webhooks,
replays, and forks. The rules of resources (generations, what a checkpoint covers, what a fork starts from, what a session takes
over) are those that Rebuno documents (docs.rebuno.io/sdk/python/resources, docs.rebuno.io/architecture). There are no policies
but `hold`, no rate limits and no deadlines, and no lease ends but by `redispatch`.
"""

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import socket
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from .rebuno_kernel_rules import ENDED, Json, Refused, Rules, new_id

DEADLINE: Final = 60.0


class Fault(NamedTuple):
    """What happens to the next request whose `METHOD path` matches: it is `lost` before anything is done, or it is done and
    `unanswered`. The connection breaks either way."""

    pattern: str
    kind: str


class Request(NamedTuple):
    """One request of a client."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Json:
        """Its JSON; nothing is an empty object."""
        found: Json = json.loads(self.raw) if self.raw else {}
        return found


class RebunoKernel(Rules):
    """See the module."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._connections: set[socket.socket] = set()
        self._port = 0
        self.faults: list[Fault] = []
        self.requests: list[str] = []

    # ---- running

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens, also after a restart."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, with the state that is on disk."""
        self.load()
        kernel = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                kernel._connections.add(self.connection)

            def finish(self) -> None:
                kernel._connections.discard(self.connection)
                super().finish()

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:  # the other side, or a fault, has closed the connection
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class calls it so
                pass

            def do_GET(self) -> None:
                kernel._serve(self)

            do_POST = do_PUT = do_GET  # noqa: N815

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and break all connections."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for connection in list(self._connections):
            _break(connection)
        self._server = None

    def restart(self) -> None:
        """What is not on disk is gone."""
        self.stop()
        self.start()

    # ---- what the tests ask for

    def register(self, agent_id: str, secret: str, webhook_url: str) -> None:
        """An agent, or its new address."""
        with self.changed:
            self.agents[agent_id] = {"secret": secret, "url": webhook_url}
            self.store()

    def create(self, agent_id: str, given: Any = None, *, session: str = "") -> str:
        """A new execution, which is delivered at once; its id."""
        return str(self.create_execution({"agent_id": agent_id, "input": given, "session": session})["id"])

    def fork(self, execution_id: str, at_seq: int | None = None) -> str:
        """A new execution with what an event, the last by default, and those before left; its id."""
        return str(self.fork_execution(execution_id, {"at_seq": at_seq or len(self.events(execution_id))})["id"])

    def redispatch(self, execution_id: str, url: str | None = None, *, again: bool = False) -> None:
        """The lease has run out: deliver the execution once more, to another address if one is given. With `again` it is a new
        dispatch, as after an approval."""
        with self.changed:
            execution = self.executions[execution_id]
            execution["status"] = "running"
            old = execution["dispatch"]
            execution["dispatch"] = {"id": new_id(), "attempt": 1} if again else {"id": old["id"], "attempt": old["attempt"] + 1}
            execution["counts"] = {}
            self.store()
            self.deliver(execution, url)

    def approve(self, execution_id: str, target: str) -> None:
        """Steps of this target may go on."""
        self.hold.discard(target)
        self.redispatch(execution_id, again=True)

    def wait(self, execution_id: str, *statuses: str) -> Json:
        """The execution, once it has ended or has one of the statuses."""
        wanted = statuses or ENDED
        self.until(lambda: self.executions[execution_id]["status"] in wanted)
        return self.executions[execution_id]

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something to be so."""
        with self.changed:
            if not self.changed.wait_for(true, DEADLINE):
                raise AssertionError(f"the kernel waited in vain; last requests: {self.requests[-10:]}")

    def events(self, execution_id: str, kind: str = "") -> list[Json]:
        """Its events, or those of a kind."""
        return [event for event in self.executions[execution_id]["events"] if event["type"].startswith(kind)]

    def resource(self, execution_id: str, key: str = "workspace") -> Json:
        """What is known of a resource."""
        found: Json = self.executions[execution_id]["resources"][key]
        return found

    def references(self, execution_id: str, key: str = "workspace") -> list[str]:
        """The checkpoints of a resource, oldest first."""
        return [c["ref"] for c in self.executions[execution_id]["checkpoints"] if c["key"] == key]

    # ---- HTTP

    def deliver(self, execution: Json, url: str | None = None) -> None:
        """By a signed webhook, in a thread."""
        agent = self.agents[execution["agent_id"]]
        lease = execution["dispatch"]
        body = {"execution_id": execution["id"], "dispatch_id": lease["id"], "dispatch_attempt": lease["attempt"]}
        data = json.dumps({**body, "lease_timeout_seconds": 120}).encode()
        signature = hmac.new(agent["secret"].encode(), data, hashlib.sha256).hexdigest()
        headers = {"Content-Type": "application/json", "Rebuno-Signature": f"sha256={signature}"}
        asked = urllib.request.Request(url or agent["url"], data, headers)

        def ask() -> None:
            with contextlib.suppress(OSError):  # an agent that is gone
                urllib.request.urlopen(asked, timeout=DEADLINE).close()

        threading.Thread(target=ask, daemon=True).start()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        request = Request(handler.command, handler.path, headers, raw)
        line = f"{request.method} {request.path}"
        with self.changed:
            self.requests.append(line)
            fault = next((each for each in self.faults if re.search(each.pattern, line)), None)
            if fault is not None:
                self.faults.remove(fault)
                self.changed.notify_all()
        if fault is not None and fault.kind == "lost":
            return _break(handler.connection)
        status, body = self._answer(request)
        if fault is not None:
            return _break(handler.connection)
        data = b"" if body is None else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
        return None

    def _answer(self, request: Request) -> tuple[int, Any]:
        path = request.path.partition("?")[0]
        with self.changed:
            for method, pattern, status, work in self._routes():
                found = re.fullmatch(pattern, path)
                if method == request.method and found:
                    try:
                        body = work(request, *found.groups())
                    except Refused as refused:
                        return refused.status, refused.body
                    return status, None if status == 204 else body
        return 404, {"code": "not_found", "message": f"no {request.method} {path}"}

    def _routes(self) -> list[tuple[str, str, int, Callable[..., Any]]]:
        one = r"/v0/executions/([\w-]+)"
        return [
            ("PUT", r"/v0/agents/([\w-]+)/metadata", 204, lambda r, agent_id: self._signer(r)),
            ("POST", r"/v0/executions", 201, lambda r: self.create_execution(r.body)),
            ("GET", one, 200, lambda r, e: self.view(self.execution(e))),
            ("GET", f"{one}/events", 200, lambda r, e: self.events(e)),
            ("POST", f"{one}/fork", 201, lambda r, e: self.fork_execution(e, r.body)),
            ("GET", f"{one}/previous", 200, lambda r, e: {"state": self.previous(self.execution(e))}),
            ("GET", rf"{one}/steps/(\w+)", 200, lambda r, e, s: self.step(self.execution(e), s)),
            ("POST", f"{one}/steps", 200, lambda r, e: self.submit(self._leased(r, e), r.body)),
            ("POST", rf"{one}/steps/(\w+)/complete", 200, lambda r, e, s: self.settle(self._leased(r, e), s, r.body)),
            ("POST", rf"{one}/steps/(\w+)/fail", 200, lambda r, e, s: self.settle(self._leased(r, e), s, r.body)),
            ("POST", f"{one}/resources", 200, lambda r, e: self.register_resource(self._leased(r, e), r.body)),
            ("POST", rf"{one}/resources/checkpoints", 204, lambda r, e: self.record(self._leased(r, e), r.body)),
            ("POST", rf"{one}/resources/([\w.-]+)/binding", 204, lambda r, e, k: self.bind(self._leased(r, e), k, r.body)),
            ("POST", f"{one}/heartbeat", 204, lambda r, e: self._leased(r, e)),
            ("POST", f"{one}/complete", 204, lambda r, e: self.end(self._leased(r, e), "completed", r.body)),
            ("POST", f"{one}/fail", 204, lambda r, e: self.end(self._leased(r, e), "failed", r.body)),
        ]

    def _signer(self, request: Request) -> str:
        headers = request.headers
        agent_id = headers.get("rebuno-agent-id", "")
        lease = [headers.get("rebuno-dispatch-id", ""), headers.get("rebuno-dispatch-attempt", "")]
        fields = ["rebuno-request-v1", request.method, request.path, headers.get("rebuno-timestamp", ""), *lease]
        secret = self.agents.get(agent_id, {}).get("secret", secrets.token_hex()).encode()
        expected = hmac.new(secret, ("\n".join(fields) + "\n").encode() + request.raw, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(headers.get("rebuno-signature", ""), f"v1={expected}"):
            raise Refused(401, "unauthorized", "the signature does not fit")
        return agent_id

    def _leased(self, request: Request, execution_id: str) -> Json:
        """The execution, when the request is signed and of its present dispatch."""
        execution = self.execution(execution_id)
        if self._signer(request) != execution["agent_id"]:
            raise Refused(403, "forbidden", "the execution is another agent's")
        if execution["status"] in ENDED:
            raise Refused(409, "execution_terminal", f"the execution is {execution['status']}")
        lease = execution["dispatch"]
        given = (request.headers.get("rebuno-dispatch-id"), request.headers.get("rebuno-dispatch-attempt"))
        if given != (lease["id"], str(lease["attempt"])):
            raise Refused(409, "lease_superseded", "a newer attempt has this dispatch")
        return execution


def _break(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is broken already
        connection.shutdown(socket.SHUT_RDWR)
