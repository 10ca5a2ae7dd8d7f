"""The scheduler's metrics, in a registry of their own, as Prometheus reads them."""

import contextlib
from typing import Any, Final

from snapcore.errors import Code, RepositoryError
from snapcore.runs import GOOD_OUTCOMES, JobRun, Outcome

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
_PREFIX: Final = "snapcore_cron_"
_THREAD: Final = ("job", "thread")


class Metrics:
    """All metrics. Those of a thread go when its sandbox does, so that an alert on old successes does not stay for ever.

    Raises `RepositoryError` `MISSING_EXTRA` without the package `prometheus-client`.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError as error:
            raise RepositoryError(
                "The scheduler needs the package 'prometheus-client'.",
                code=Code.MISSING_EXTRA,
                hint="Install it: pip install 'snapcore[cron]'.",
            ) from error
        self._registry = CollectorRegistry()

        def made(kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **options: Any) -> Any:
            return kind(_PREFIX + name, text, labels, registry=self._registry, **options)

        self._last_success = made(
            Gauge, "last_success_timestamp_seconds", "When the last run ended that went well, since the epoch.", _THREAD
        )
        self._last_duration = made(Gauge, "last_duration_seconds", "How long the last run took.", _THREAD)
        self._in_a_row = made(Gauge, "consecutive_failures", "Failed runs since the last that went well.", _THREAD)
        self._durations = made(Histogram, "run_duration_seconds", "How long runs took.", ("job",), buckets=_BUCKETS)
        self._read = made(Counter, "read_bytes", "Bytes that were read from sandboxes.", ("job",))
        self._stored = made(Counter, "stored_bytes", "Bytes that were written to the repository.", ("job",))
        self._runs = made(Counter, "runs", "Runs by outcome; skipped are those that would have overlapped.", ("job", "outcome"))
        self._failures = made(Counter, "failures", "Failed runs by error code.", ("job", "code"))
        self._forgotten = made(Counter, "forgotten_checkpoints", "Checkpoints that retention removed.", ("job",))
        self._running = made(Gauge, "captures_running", "Captures that run now.")
        self._repository = made(Gauge, "repository_up", "Whether the repository could be written to last (1) or not (0).")
        self._reloaded = made(Gauge, "configuration_ok", "Whether the jobs file was valid when it was last read (1) or not (0).")
        self._unrecorded = made(Counter, "unrecorded_runs", "Runs that could not be recorded in the repository.")
        self._reloaded.set(1)

    def begun(self) -> None:
        """A capture begins."""
        self._running.inc()

    def ended(self) -> None:
        """A capture is over."""
        self._running.dec()

    def seed(self, run: JobRun) -> None:
        """What a run before this process did."""
        if run.outcome in GOOD_OUTCOMES:
            self._last_success.labels(run.job, run.thread_id).set(run.ended_at / 1e6)

    def ran(self, run: JobRun, failures: int) -> None:
        """What a run did; `failures` are those in a row now."""
        seconds = (run.ended_at - run.started_at) / 1e6
        self._runs.labels(run.job, run.outcome).inc()
        self._last_duration.labels(run.job, run.thread_id).set(seconds)
        self._in_a_row.labels(run.job, run.thread_id).set(failures)
        self._durations.labels(run.job).observe(seconds)
        self._read.labels(run.job).inc(run.bytes_read)
        self._stored.labels(run.job).inc(run.bytes_stored)
        self._forgotten.labels(run.job).inc(run.forgotten)
        if run.outcome == Outcome.FAILED:
            self._failures.labels(run.job, run.error or "").inc()
        self.seed(run)

    def skipped(self, job: str) -> None:
        """A run was left out, because the one before still goes on."""
        self._runs.labels(job, "skipped").inc()

    def drop(self, job: str, thread_id: str) -> None:
        """That thread is not captured any more."""
        for metric in (self._last_success, self._last_duration, self._in_a_row):
            with contextlib.suppress(KeyError):  # it has no value yet
                metric.remove(job, thread_id)

    def repository(self, up: bool) -> None:
        """Whether the repository works."""
        self._repository.set(up)

    def unrecorded(self) -> None:
        """A run could not be recorded."""
        self._unrecorded.inc()

    def configuration(self, ok: bool) -> None:
        """Whether the file that was read last is valid."""
        self._reloaded.set(ok)

    def text(self) -> bytes:
        """All metrics in the text format."""
        from prometheus_client.exposition import generate_latest

        return generate_latest(self._registry)
