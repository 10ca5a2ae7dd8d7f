"""The contract of runs: what scheduled jobs did, the newest of each, kept beside the checkpoints."""

import re
from typing import Final, Protocol

import msgspec

from .errors import Code, SnapshotError, printable
from .model import validate_id, validate_text, validate_thread_id

__all__ = ["GOOD_OUTCOMES", "MAX_ADDRESS", "MAX_MESSAGE", "RUNS_KEPT", "JobRun", "Outcome", "RunStore", "checked_run"]

RUNS_KEPT: Final = 100
"""How many runs of a job in a thread are kept; older ones go as new ones come."""

MAX_MESSAGE: Final = 500
"""How many characters of a run's message are kept."""

MAX_ADDRESS: Final = 4096
"""How many characters a run's sandbox may have."""

_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
_MAX_NUMBER: Final = 2**63 - 1
_TIMES: Final = ("started_at", "ended_at")
_LAST_TIME: Final = 253_402_300_799_999_999  # of the year 9999: what can be shown
_NUMBERS: Final = ("files_read", "bytes_read", "bytes_stored", "forgotten", "warnings")


class Outcome:
    """How a run ended. Plain texts: they are stored, and printed by `snapcore cron status`."""

    CAPTURED: Final = "captured"
    UNCHANGED: Final = "unchanged"
    LOCKED: Final = "locked"  # another writer held the thread
    COLLECTED: Final = "collected"  # a gc
    FAILED: Final = "failed"
    INTERRUPTED: Final = "interrupted"  # the scheduler was stopped


GOOD_OUTCOMES: Final = (Outcome.CAPTURED, Outcome.UNCHANGED, Outcome.COLLECTED)
"""What a job that does its work ends with."""

_OUTCOMES: Final = frozenset({*GOOD_OUTCOMES, Outcome.LOCKED, Outcome.FAILED, Outcome.INTERRUPTED})


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

    @property
    def good(self) -> bool:
        """Whether the job did its work."""
        return self.outcome in GOOD_OUTCOMES


class RunStore(Protocol):
    """Part of `CheckpointStore`, in the same database. Runs outlive the checkpoints they tell of; only newer runs replace them,
    and gc drops those of more than 400 days ago."""

    async def record_run(self, run: JobRun) -> None:
        """Keep a run as `checked_run` makes it, and the newest `RUNS_KEPT` of that job in that thread; besides those, the newest
        that went well. Repeated with the same run, it changes nothing: an answer lost on the way is found by repeating.

        Raises `SnapshotError` for a run that is not well formed, `CheckpointConflictError` `DUPLICATE_ID` for another run of that
        id.
        """
        ...

    async def runs(self, *, job: str | None = None, thread_id: str | None = None, limit: int = 50) -> list[JobRun]:
        """Up to `limit` runs, of a job and a thread where they are named, newest first: by start, then by id. The thread `""` is
        that of gc. Raises `SnapshotError` `INVALID_REQUEST` for a limit below 1."""
        ...

    async def last_runs(self) -> list[JobRun]:
        """The newest run of each job in each thread, and the newest of each that went well (`GOOD_OUTCOMES`) where that is
        another one; ordered by job, thread, start."""
        ...


def checked_run(run: JobRun) -> JobRun:
    """The run as it is stored: of its message, which may hold whatever a failure brought up, control characters and what is no
    valid text are escaped, and only the first `MAX_MESSAGE` characters are kept.

    Raises `SnapshotError` for a run that is not well formed: `INVALID_ID` for its thread or checkpoint, `INVALID_ENTRY` for an
    id that is not 32 hex digits, a job or a code that is empty, over 512 bytes or no valid text, an address that is over 4096
    characters or no valid text, an unknown outcome, a number that is negative, a time after the year 9999.
    """
    if not isinstance(run.id, str) or not _RUN_ID.fullmatch(run.id):
        raise _invalid("its id must be 32 hex digits")
    validate_text(run.job, "The name of a job", code=Code.INVALID_ENTRY)
    if run.thread_id != "":
        validate_thread_id(run.thread_id)
    if run.checkpoint_id is not None:
        validate_id(run.checkpoint_id)
    if run.error is not None:
        validate_text(run.error, "The code of an error", code=Code.INVALID_ENTRY)
    if run.outcome not in _OUTCOMES:
        raise _invalid(f"the outcome must be one of {', '.join(sorted(_OUTCOMES))}")
    for name in (*_TIMES, *_NUMBERS):
        value: object = getattr(run, name)
        largest = _LAST_TIME if name in _TIMES else _MAX_NUMBER
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
            raise _invalid(f"{name} must be a whole number between 0 and {largest}")
    if not isinstance(run.sandbox, str) or len(run.sandbox) > MAX_ADDRESS or printable(run.sandbox) != run.sandbox:
        raise _invalid(f"the sandbox must be a text of at most {MAX_ADDRESS} printable characters")
    if not isinstance(run.message, str):
        raise _invalid("the message must be a text")
    # cut before as well: what is thrown away anyway is not worth escaping
    message = printable(run.message[:MAX_MESSAGE])
    return msgspec.structs.replace(run, message=message[:MAX_MESSAGE])


def _invalid(what: str) -> SnapshotError:
    return SnapshotError(f"Not a valid entry of a run: {what}.", code=Code.INVALID_ENTRY)
