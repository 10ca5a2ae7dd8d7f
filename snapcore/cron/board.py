"""Everything that tells how the scheduler is: log, health file, HTTP pages, metrics."""

import asyncio
import json
import logging
from collections.abc import Callable, Collection
from datetime import UTC, datetime

from snapcore.errors import SnapcoreError, printable
from snapcore.runs import JobRun

from .health import Health, write_atomically
from .jobs import GC, Plan
from .logs import Events, Scrubber
from .metrics import CONTENT_TYPE, Metrics
from .server import Answer, HttpServer
from .targets import Target

__all__ = ["Board"]


class Board:
    """An `Observer` that keeps health and metrics up to date. `next_run` tells when a job runs next, or tries a thread again."""

    def __init__(self, events: Events, scrubber: Scrubber, next_run: Callable[[str, str], datetime | None]) -> None:
        self._health_file: str | None = None
        self._events = events
        self._scrubber = scrubber
        self._next_run = next_run
        self._metrics = Metrics()
        self._health = Health(datetime.now(UTC))
        self._server: HttpServer | None = None
        self._publishing = False
        self._next_write = 0.0  # by the event loop's clock

    def plan(self, plan: Plan) -> None:
        """What is planned from now on."""
        self._health_file = plan.health_file
        self._health.jobs = (*plan.jobs, *([GC] if plan.gc.schedule is not None else []))
        self.publish()

    # ---- runs

    def begun(self, target: Target) -> None:
        """See `Observer`."""
        self._events.begun(target.job.name, target.sandbox, target.thread_id)
        self._metrics.begun()

    def ended(self) -> None:
        """See `Observer`."""
        self._metrics.ended()

    def ran(self, run: JobRun) -> None:
        """See `Observer`."""
        self._health.ran(run)
        self._metrics.ran(run, self._health.failures(run.job, run.thread_id))
        self._events.ran(run)
        self.publish()

    def recorded(self, error: SnapcoreError | None) -> None:
        """See `Observer`."""
        if error is None:
            self.repository(None)
            return
        self._metrics.unrecorded()
        self.repository(error)
        self._events.unrecorded(error)

    def seed(self, run: JobRun) -> None:
        """What a run did before this process began."""
        self._health.ran(run)
        self._metrics.seed(run)
        self.publish()

    def skipped(self, job: str, sandbox: str, thread_id: str) -> None:
        """A run was left out, because the one before still goes on."""
        self._metrics.skipped(job)
        self._events.skipped(job, sandbox, thread_id)

    def retain(self, job: str, threads: Collection[str]) -> None:
        """Forget what a job did in other threads."""
        for thread_id in self._health.retain(job, threads):
            self._metrics.drop(job, thread_id)
            self.publish()

    # ---- the rest

    def repository(self, error: SnapcoreError | None) -> None:
        """Whether the repository works."""
        self._metrics.repository(error is None)
        self._fault("repository", error)

    def configuration(self, error: SnapcoreError | None) -> None:
        """Whether the file that was read last is valid."""
        self._metrics.configuration(error is None)
        self._fault("configuration", error)

    def _fault(self, what: str, error: SnapcoreError | None) -> None:
        self._health.fault(what, None if error is None else self._scrubber.scrub(str(error)))
        self.publish()

    async def listen(self, place: tuple[str, int] | None) -> None:
        """Serve at another place, or nowhere. Raises `SnapshotError` `INVALID_REQUEST` when that one cannot be used; all is as
        before then."""
        server = None
        if place is not None:
            server = HttpServer({"/health": self._answer_health, "/live": _alive, "/metrics": self._answer_metrics})
            await server.start(*place)
        if self._server is not None:
            await self._server.close()
        self._server = server

    def stopping(self) -> None:
        """No run begins any more: say so in the health file."""
        self._health.running = False
        self.publish()

    async def close(self) -> None:
        """The scheduler has ended: write the health file a last time, and serve no more."""
        self._write()
        await self.listen(None)

    def publish(self) -> None:
        """Write the health file, once for all that happens at the same time. With thousands of sandboxes that takes long: it
        gets a tenth of the time."""
        if not self._publishing:
            self._publishing = True
            asyncio.get_running_loop().call_at(self._next_write, self._write)

    def _write(self) -> None:
        self._publishing = False
        if self._health_file is None:
            return
        now = asyncio.get_running_loop().time
        began = now()
        try:
            write_atomically(self._health_file, self._health.document(self._next_run))
        except OSError as error:
            message = f"{printable(self._health_file)}: {error.strerror}."
            self._events.tell("health-file-failed", message, level=logging.WARNING)
        self._next_write = now() + 9 * (now() - began)

    def _answer_health(self) -> Answer:
        document = self._health.document(self._next_run)
        return 200 if self._health.ok else 503, "application/json", json.dumps(document, indent=1).encode("ascii") + b"\n"

    def _answer_metrics(self) -> Answer:
        return 200, CONTENT_TYPE, self._metrics.text()


def _alive() -> Answer:
    return 200, "text/plain", b"alive\n"
