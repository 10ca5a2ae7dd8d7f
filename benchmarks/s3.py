"""snapcore and restic against one S3 server with 20 ms of latency in each request: requests, seconds, bytes.

    python benchmarks/run.py --s3

The server is the strict one of snapcore.testing, made lenient where restic needs it; it runs in a process of its own.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tools import SNAPCORE, measure

from snapcore.testing import StrictS3Server

LATENCY: Final = 0.02
CAPTURES: Final = 1_000
WRITTEN: Final = "Mon, 02 Jan 2006 15:04:05 GMT"  # restic wants to know, and does not care
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}

Table = dict[str, dict[str, dict[str, float]]]


class LenientServer(StrictS3Server):
    """Takes what restic sends: bodies in signed pieces, and questions about the bucket."""

    def work(self, request: Any) -> Any:
        """Answer a request."""
        if request.headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            headers = {
                name: value for name, value in request.headers.items() if name not in ("x-amz-content-sha256", "content-encoding")
            }
            request = dataclasses.replace(request, body=_joined(request.body), headers=headers)
        answer = super().work(request)
        return dataclasses.replace(answer, headers={"ETag": '"0"', "Last-Modified": WRITTEN, **(answer.headers or {})})


def _joined(body: bytes) -> bytes:
    """A body that came in pieces `<hex size>;chunk-signature=...`."""
    parts = []
    at = 0
    while at < len(body):
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
        if not size:
            break
    return b"".join(parts)


def serve() -> None:
    """Run the server: prints its URL, then for each line on stdin the requests since the last."""
    with LenientServer() as server:
        server.faults.delay("*", LATENCY)
        print(server.url, flush=True)
        for _ in sys.stdin:
            print(json.dumps(server.requests), flush=True)
            server.requests.clear()


class _Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
        )
        self.url = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def requests(self) -> dict[str, int]:
        """What came in since this was asked last."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, int] = json.loads(self._line())
        return found

    def stop(self) -> None:
        """End it."""
        self._process.communicate()


def s3(work: Path, make: Callable[[Path], None], step: Callable[[Path, int], None], captures: int = CAPTURES) -> Table:
    """Measure; `make` makes a tree, `step` changes 15 files of it."""
    os.environ.update(CREDENTIALS)
    tree, out = work / "tree", work / "out"
    make(tree)
    server = _Server()
    try:
        return _Run(server, work, tree, out).run(step, captures)
    finally:
        server.stop()


class _Run:
    def __init__(self, server: _Server, work: Path, tree: Path, out: Path) -> None:
        self._server = server
        self._tree = tree
        self._out = out
        address = f"s3://bucket/snapcore?endpoint={server.url}"
        where = ["--repo", address, "--database", f"sqlite:///{work}/snapcore.db"]
        own = [*where, "--thread", "bench", "-q"]
        self._init = {
            "snapcore": [SNAPCORE, "init", *where],
            "restic": ["restic", "-q", "-r", f"s3:{server.url}/bucket/restic", "init"],
        }
        self._capture = {
            "snapcore": [SNAPCORE, "capture", str(tree), *own],
            "restic": ["restic", "-q", "-r", f"s3:{server.url}/bucket/restic", "backup", str(tree)],
        }
        self._restore = {
            "snapcore": [SNAPCORE, "restore", str(out), *own],
            "restic": ["restic", "-q", "-r", f"s3:{server.url}/bucket/restic", "restore", "latest", "--target", str(out)],
        }
        self._fill = [sys.executable, str(Path(__file__).with_name("fill.py")), address]
        self._database = f"sqlite:///{work}/snapcore.db"
        self.table: Table = {}

    def run(self, step: Callable[[Path, int], None], captures: int) -> Table:
        tools = [name for name in self._init if name == "snapcore" or shutil.which(name)]
        for name in tools:
            measure(self._init[name])
        for name in tools:
            self._note("first capture to S3", name, self._capture[name])
        step(self._tree, 1)
        for name in tools:
            self._note("capture to S3, 15 files changed", name, self._capture[name])
        for name in tools:
            self._restored("restore from S3, empty folder", name)
        self._many(step, captures)
        return self.table

    def _many(self, step: Callable[[Path, int], None], captures: int) -> None:
        fill = [*self._fill, str(self._tree), "checkpoints", "0", str(captures), self._database]
        subprocess.run(fill, check=True, stdout=subprocess.DEVNULL)
        step(self._tree, 2)
        self._note(f"the same after {captures:,} captures", "snapcore", self._capture["snapcore"])
        self._restored(f"restore after {captures:,} captures", "snapcore")
        measure([SNAPCORE, "gc", "--grace", "0", *self._init["snapcore"][2:], "-q"])
        self._restored(f"restore after {captures:,} captures and gc", "snapcore")

    def _restored(self, work: str, name: str) -> None:
        shutil.rmtree(self._out, ignore_errors=True)
        self._out.mkdir()
        self._note(work, name, self._restore[name])
        shutil.rmtree(self._out)

    def _note(self, work: str, name: str, command: Sequence[str]) -> None:
        print(work, name, file=sys.stderr, flush=True)
        self._server.requests()
        found = measure(command)
        requests = self._server.requests()
        self.table.setdefault(work, {})[name] = {
            "seconds": round(found.seconds, 2),
            "peak_mb": round(found.peak_mb, 1),
            **{verb: requests.get(verb, 0) for verb in ("PUT", "GET", "HEAD", "LIST")},
        }


if __name__ == "__main__":
    serve()
