"""The control plane of the E2B test server: sandboxes and snapshots, and what its HTTP API does with them."""

import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from .e2b_server_chroot import Chroot
from .e2b_server_files import Files
from .e2b_server_processes import Processes

__all__ = ["ApiAnswer", "ApiError", "ControlPlane", "ServedSandbox", "api_call_name"]

_ENVD_VERSION: Final = "0.6.7"
_DEFAULT_TIMEOUT: Final = 15  # seconds, as the service has it when the client gives none
_SANDBOX: Final = re.compile(r"(?:/v2)?/sandboxes/([^/]+)(?:/(\w+))?")
_TEMPLATES: Final = ("base", "busybox")
_NAMES: Final = {
    ("DELETE", ""): "kill",
    ("GET", ""): "info",
    ("POST", "timeout"): "timeout",
    ("POST", "pause"): "pause",
    ("POST", "connect"): "connect",
    ("POST", "snapshots"): "snapshot",
    ("PUT", "network"): "network",
}

ApiAnswer = tuple[int, Any, dict[str, str]]
"""Status, body as JSON or None, headers."""


class ApiError(Exception):
    """An error answer of the API."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def _not_found(sandbox_id: str) -> ApiError:
    return ApiError(404, f"Sandbox {sandbox_id} not found")


@dataclass
class ServedSandbox:
    """A sandbox of the test server. `state` is `running`, `paused` or `gone`; `ends` is by the monotonic clock."""

    id: str
    chroot: Chroot
    template: str
    timeout: float
    auto_pause: bool
    metadata: dict[str, str]
    environment: dict[str, str]
    network: dict[str, Any]
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    state: str = "running"
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    ends: float = 0.0

    def __post_init__(self) -> None:
        self.ends = time.monotonic() + self.timeout
        self.processes = Processes(self.chroot, self.environment)
        self.files = Files(self.chroot)

    @property
    def folder(self) -> Path:
        """Where its files lie on this host."""
        return self.chroot.folder

    def described(self) -> dict[str, Any]:
        """What the API tells of it."""
        return {
            "sandboxID": self.id,
            "templateID": self.template,
            "clientID": "test",
            "envdVersion": _ENVD_VERSION,
            "envdAccessToken": self.token,
            "domain": None,
            "alias": self.template,
            "startedAt": self.started.isoformat(),
            "endAt": (datetime.now(UTC) + timedelta(seconds=self.ends - time.monotonic())).isoformat(),
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 1024,
            "state": self.state,
            "metadata": self.metadata,
            "network": {name: value for name, value in self.network.items() if name != "allow_internet_access"},
            "lifecycle": {"autoResume": False, "onTimeout": "pause" if self.auto_pause else "kill"},
        }


class ControlPlane:
    """All sandboxes and snapshots of a server, in a temporary folder.

    There are two templates: `base` has this host's tools, `busybox` busybox and nothing else."""

    def __init__(self, api_key: str) -> None:
        self.api_key = api_key
        self.most_sandboxes = 100
        self.sandboxes: dict[str, ServedSandbox] = {}
        self.snapshots: dict[str, tuple[Chroot, str]] = {}
        self._created: dict[str, str] = {}  # sandboxes by idempotency key
        self._place = Path(tempfile.mkdtemp(prefix="snapcore-e2b-"))
        self._place.chmod(0o755)
        self._lock = threading.RLock()

    def close(self) -> None:
        """End every sandbox and delete all files."""
        with self._lock:
            for sandbox in list(self.sandboxes.values()):
                self._end(sandbox)
            shutil.rmtree(self._place)

    def running(self, sandbox_id: str, *, token: str | None = None) -> ServedSandbox | None:
        """The sandbox that requests to its agent reach, or None: paused ones and those whose time is over are not reached."""
        sandbox = self._find(sandbox_id)
        return sandbox if sandbox is not None and sandbox.state == "running" else None

    def expire(self, sandbox_id: str) -> None:
        """Its time is over, now."""
        with self._lock:
            self.sandboxes[sandbox_id].ends = 0.0
            self._find(sandbox_id)

    def signed_for(self, accepted: Any) -> ServedSandbox | None:
        """The running sandbox whose token a signed request was made with: `accepted` says it of a token."""
        for sandbox in list(self.sandboxes.values()):
            if sandbox.state == "running" and accepted(sandbox.token):
                return sandbox
        return None

    def call(self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: Any) -> ApiAnswer:
        """Do what a request asks for. Raises `ApiError`."""
        if headers.get("x-api-key") != self.api_key:
            raise ApiError(401, "Invalid API key, please visit https://e2b.dev/docs/quickstart/api-key")
        name = api_call_name(method, path)
        with self._lock:
            if name == "create":
                return self._create(body, headers.get("idempotency-key"))
            if name == "list":
                return self._list(query)
            if name == "snapshots":
                return 200, [{"snapshotID": found, "names": [found]} for found in self.snapshots], {}
            if name == "forget":
                return self._forget(urllib.parse.unquote(path.rpartition("/")[2]))
            match = _SANDBOX.fullmatch(path)
            if name == "unknown" or match is None:
                raise ApiError(404, f"no such route: {method} {path}")
            sandbox = self._find(match[1])
            if sandbox is None:
                raise _not_found(match[1])
            answer: ApiAnswer = getattr(self, f"_{name}")(sandbox, body)
            return answer

    # ---- requests

    def _create(self, body: dict[str, Any], key: str | None) -> ApiAnswer:
        if key in self._created:
            return 201, self.sandboxes[self._created[key]].described(), {}
        if sum(sandbox.state == "running" for sandbox in self.sandboxes.values()) >= self.most_sandboxes:
            raise ApiError(429, "You have reached the maximum number of concurrent E2B sandboxes.")
        template = body["templateID"]
        sandbox_id = "i" + secrets.token_hex(10)
        if template in self.snapshots:
            chroot = self.snapshots[template][0].copy(self._place / sandbox_id)
        elif template in _TEMPLATES:
            chroot = Chroot.make(self._place / sandbox_id, busybox=template == "busybox")
        else:
            raise ApiError(404, f"template '{template}' not found")
        self.sandboxes[sandbox_id] = sandbox = ServedSandbox(
            sandbox_id,
            chroot,
            template,
            body.get("timeout", _DEFAULT_TIMEOUT),
            body.get("autoPause", False),
            body.get("metadata", {}),
            body.get("envVars", {}),
            body.get("network", {}),
        )
        if key is not None:
            self._created[key] = sandbox_id
        return 201, sandbox.described(), {}

    def _list(self, query: dict[str, str]) -> ApiAnswer:
        wanted = dict(urllib.parse.parse_qsl(urllib.parse.unquote(query.get("metadata", ""))))
        states = query.get("state", "running,paused").split(",")
        found = [
            sandbox.described()
            for sandbox in (self._find(name) for name in sorted(self.sandboxes))
            if sandbox is not None and sandbox.state in states and wanted.items() <= sandbox.metadata.items()
        ]
        start, limit = int(query.get("nextToken") or 0), int(query.get("limit") or 100)
        more = {"x-next-token": str(start + limit)} if start + limit < len(found) else {}
        return 200, found[start : start + limit], more

    def _info(self, sandbox: ServedSandbox, body: Any) -> ApiAnswer:
        return 200, sandbox.described(), {}

    def _kill(self, sandbox: ServedSandbox, body: Any) -> ApiAnswer:
        self._end(sandbox)
        return 204, None, {}

    def _timeout(self, sandbox: ServedSandbox, body: Any) -> ApiAnswer:
        if sandbox.state != "running":
            raise _not_found(sandbox.id)
        sandbox.ends = time.monotonic() + body["timeout"]
        return 204, None, {}

    def _pause(self, sandbox: ServedSandbox, body: Any) -> ApiAnswer:
        if sandbox.state == "paused":
            raise ApiError(409, f"Sandbox {sandbox.id} is already paused")
        self._freeze(sandbox)
        return 204, None, {}

    def _connect(self, sandbox: ServedSandbox, body: Any) -> ApiAnswer:
        timeout = body.get("timeout", _DEFAULT_TIMEOUT)
        if sandbox.state == "paused":
            sandbox.chroot.signal_all(signal.SIGCONT)
            sandbox.state = "running"
            sandbox.ends = time.monotonic() + timeout
            return 201, sandbox.described(), {}
        sandbox.ends = max(sandbox.ends, time.monotonic() + timeout)
        return 200, sandbox.described(), {}

    def _snapshot(self, sandbox: ServedSandbox, body: Any) -> ApiAnswer:
        if sandbox.state != "running":
            raise _not_found(sandbox.id)
        name = f"snapshot-{secrets.token_hex(8)}:default"
        sandbox.chroot.signal_all(signal.SIGSTOP)
        self.snapshots[name] = (sandbox.chroot.copy(self._place / name), sandbox.id)
        sandbox.chroot.signal_all(signal.SIGCONT)
        return 201, {"snapshotID": name, "names": [name]}, {}

    def _network(self, sandbox: ServedSandbox, body: Any) -> ApiAnswer:
        sandbox.network = body
        return 204, None, {}

    def _forget(self, name: str) -> ApiAnswer:
        if name not in self.snapshots:
            raise ApiError(404, f"template '{name}' not found")
        self.snapshots.pop(name)[0].remove()
        return 204, None, {}

    # ---- states

    def _find(self, sandbox_id: str) -> ServedSandbox | None:
        with self._lock:
            sandbox = self.sandboxes.get(sandbox_id)
            if sandbox is not None and sandbox.state == "running" and time.monotonic() >= sandbox.ends:
                if sandbox.auto_pause:
                    self._freeze(sandbox)
                else:
                    self._end(sandbox)
                    return None
            return sandbox

    def _freeze(self, sandbox: ServedSandbox) -> None:
        sandbox.state = "paused"
        sandbox.chroot.signal_all(signal.SIGSTOP)

    def _end(self, sandbox: ServedSandbox) -> None:
        sandbox.state = "gone"
        del self.sandboxes[sandbox.id]
        sandbox.chroot.remove()


def api_call_name(method: str, path: str) -> str:
    """What a request to the API is called in counts and faults."""
    if path == "/v2/sandboxes":
        return "create" if method == "POST" else "list"
    if path == "/snapshots":
        return "snapshots"
    if path.startswith("/templates/") and method == "DELETE":
        return "forget"
    match = _SANDBOX.fullmatch(path)
    return _NAMES.get((method, match[2] or ""), "unknown") if match else "unknown"
