"""A server for tests that speaks E2B's HTTP API and the protocol of its agent, envd, to E2B's own SDK.

Each sandbox is a chroot: its paths, users, permissions and processes are real, its folder can be looked at from outside. The
template `base` has this host's tools, `busybox` has busybox alone. What the server can be told to do wrong is in `E2BFaults`.
Not there: terminals, volumes, forks, TLS and HTTP/2, builds of templates, resuming by traffic; memory is not part of a snapshot.

    with E2BServer() as server:
        sandbox = await AsyncSandbox.create(**server.options)
        server.folder(sandbox.sandbox_id)  # its root, on this host
"""

import threading
from collections import Counter
from pathlib import Path
from types import TracebackType

from .e2b_server_api import ControlPlane
from .e2b_server_chroot import missing
from .e2b_server_faults import E2BFaults, E2BStrike
from .e2b_server_http import E2BHttpServer

__all__ = ["E2BServer"]


class E2BServer:
    """The server, running from `start` (or `with`) to `stop`. `requests` counts what came in, by the names of `E2BFaults`.

    `why_not` says why there can be none here: the sandboxes need root on Linux, and busybox.
    """

    def __init__(self, *, api_key: str = "e2b_0123456789abcdef0123456789abcdef01234567") -> None:
        self.control = ControlPlane(api_key)
        self.faults = E2BFaults()
        self.requests: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._server = E2BHttpServer(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="e2b-server", daemon=True)

    @staticmethod
    def why_not() -> str:
        """Why such a server cannot run here, or nothing."""
        return missing()

    @property
    def url(self) -> str:
        """Where the API is, and the agents of all sandboxes."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def options(self) -> dict[str, str]:
        """Connection options for the SDK."""
        return {"api_key": self.control.api_key, "api_url": self.url, "sandbox_url": self.url}

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables."""
        return {"E2B_API_KEY": self.control.api_key, "E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url}

    def folder(self, sandbox_id: str) -> Path:
        """The root of a sandbox on this host."""
        return self.control.sandboxes[sandbox_id].folder

    def expire(self, sandbox_id: str) -> None:
        """Let a sandbox's time be over: it is killed, or paused when it was created so."""
        self.control.expire(sandbox_id)

    def start(self) -> None:
        """Serve on a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End all sandboxes and connections, and wait for all threads."""
        self._server.shutdown()
        self._thread.join()
        self.control.close()
        self._server.close_connections()
        self._server.server_close()

    def __enter__(self) -> "E2BServer":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def began(self, name: str) -> E2BStrike:
        """A request came in: it is counted, and what is to happen to it decided."""
        with self._lock:
            self.requests[name] += 1
        return self.faults.strike(name)
