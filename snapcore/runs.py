"""The contract of runs: what scheduled jobs did, the newest of each, kept beside the checkpoints."""

from typing import Final, Protocol

import msgspec

__all__ = ["RUNS_KEPT", "JobRun", "Outcome", "RunStore"]

RUNS_KEPT: Final = 100
"""How many runs of a job in a thread are kept; older ones go as new ones come."""


class Outcome:
    """How a run ended. Plain texts: they are stored, and printed by `snapcore cron status`."""

    CAPTURED: Final = "captured"
    UNCHANGED: Final = "unchanged"
    LOCKED: Final = "locked"  # another writer held the thread
    COLLECTED: Final = "collected"  # a gc
    FAILED: Final = "failed"
    INTERRUPTED: Final = "interrupted"  # the scheduler was stopped


class JobRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `id` is 32 random hex digits, chosen by the writer. `sandbox` is an address, empty for a gc, as `thread_id` is.
    Times are microseconds since the epoch, by the clock of the machine that ran it. `message` says what failed, without secrets;
    `error` is its code. Sizes are bytes."""

    id: str
    job: str
    sandbox: str = ""
    thread_id: str = ""
    started_at: int
    ended_at: int
    outcome: str
    checkpoint_id: str | None = None
    files_read: int = 0
    bytes_read: int = 0
    bytes_stored: int = 0
    forgotten: int = 0  # checkpoints that the job's retention removed
    warnings: int = 0
    error: str | None = None
    message: str = ""


class RunStore(Protocol):
    """Part of `CheckpointStore`, in the same database."""

    async def record_run(self, run: JobRun) -> None:
        """Keep a run, and the newest `RUNS_KEPT` of that job in that thread. Repeated with the same run, it changes nothing.
        Raises `SnapshotError` `INVALID_ENTRY` for a run that is not well formed."""
        ...

    async def runs(self, *, job: str | None = None, thread_id: str | None = None, limit: int = 50) -> list[JobRun]:
        """Up to `limit` runs, of a job and a thread where they are named, newest first: by start, then by id."""
        ...

    async def last_runs(self) -> list[JobRun]:
        """The newest run of each job in each thread, and the newest of each that captured or found nothing new where that is
        another one; ordered by job, thread, start."""
        ...
