"""Whether all is well, for a file that is rewritten after each run and for `/health`."""

import contextlib
import json
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from snapcore.runs import JobRun, Outcome

__all__ = ["Health", "write_atomically"]

NextRun = Callable[[str, str], datetime | None]


@dataclass(slots=True)
class _State:
    """What is known of a job in a thread."""

    last: JobRun
    success: JobRun | None = None
    failures: int = 0  # in a row


class Health:
    """What each job did last in each thread, and what is wrong besides."""

    def __init__(self, started: datetime) -> None:
        self.running = True
        self.jobs: tuple[str, ...] = ()  # those of the file
        self._started = started
        self._states: dict[tuple[str, str], _State] = {}
        self._faults: dict[str, str] = {"repository": "It was not opened yet."}

    def ran(self, run: JobRun) -> None:
        """A run has ended, now or before this process began."""
        state = self._states.get((run.job, run.thread_id))
        if state is None:
            state = self._states[run.job, run.thread_id] = _State(run)
        state.last = run
        if run.good:
            state.success, state.failures = run, 0
        elif run.outcome == Outcome.FAILED:
            state.failures += 1

    def retain(self, job: str, threads: Collection[str]) -> list[str]:
        """Forget what a job did in other threads; which those were."""
        gone = [thread_id for name, thread_id in self._states if name == job and thread_id not in threads]
        for thread_id in gone:
            del self._states[job, thread_id]
        return gone

    def failures(self, job: str, thread_id: str) -> int:
        """How many runs have failed since the last that went well."""
        state = self._states.get((job, thread_id))
        return 0 if state is None else state.failures

    def fault(self, what: str, message: str | None) -> None:
        """Something that no single job is to blame for (`repository`, `configuration`), or None once it is well again."""
        if message is None:
            self._faults.pop(what, None)
        else:
            self._faults[what] = message

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self._faults and not any(state.failures for state in self._states.values())

    def document(self, next_run: NextRun) -> dict[str, Any]:
        """All of it, as JSON has it."""
        names = sorted({*self.jobs, *(job for job, _ in self._states)})
        jobs: dict[str, Any] = {job: {"next_run": _time(next_run(job, "")), "threads": {}} for job in names}
        for (job, thread_id), state in sorted(self._states.items()):
            jobs[job]["threads"][thread_id] = {
                "sandbox": state.last.sandbox,
                "last_run": _moment(state.last.ended_at),
                "last_outcome": state.last.outcome,
                "last_success": None if state.success is None else _moment(state.success.ended_at),
                "next_run": _time(next_run(job, thread_id)),
                "consecutive_failures": state.failures,
                "error": state.last.error,
                "message": state.last.message,
            }
        return {
            "status": "ok" if self.ok else "degraded",
            "running": self.running,
            "started": _time(self._started),
            "written": _time(datetime.now(UTC)),
            "faults": dict(self._faults),
            "jobs": jobs,
        }


def write_atomically(path: str, document: dict[str, Any]) -> None:
    """Put a JSON file in the place of another: who reads it sees the one or the other. Raises `OSError`."""
    fresh = f"{path}.{os.getpid()}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)  # of a process that had this number; or a link that somebody laid there
    try:
        with open(fresh, "x", encoding="ascii") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _moment(microseconds: int) -> str | None:
    return _time(datetime.fromtimestamp(microseconds / 1e6, UTC))
