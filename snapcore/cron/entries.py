"""What the system's own schedulers are told of a job: its schedule, and the command that runs it once."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapcore.errors import Code, SnapshotError, printable

from .jobs import GC

if TYPE_CHECKING:
    from .jobs import Plan
    from .schedule import Schedule

__all__ = ["Entry", "check_text", "entries", "needed_variables", "own_command", "refused"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One job that is to be started at its times. `jitter` is in seconds."""

    name: str
    schedule: "Schedule"
    jitter: float


def entries(plan: "Plan") -> list[Entry]:
    """The jobs of a plan, and gc where the plan has a time for it."""
    found = [Entry(job.name, job.schedule, job.jitter) for job in plan.jobs.values()]
    if plan.gc.schedule is not None:
        found.append(Entry(GC, plan.gc.schedule, 0.0))
    return found


def own_command() -> list[str]:
    """The words, the first of them an absolute path, that start this very snapcore wherever one is."""
    script = os.path.join(os.path.dirname(sys.executable), "snapcore")
    return [script] if os.access(script, os.X_OK) else [sys.executable, "-m", "snapcore.cli"]


def needed_variables(plan: "Plan") -> list[str]:
    """The environment variables that the jobs' secrets come from."""
    sources = [source for job in plan.jobs.values() for source in job.secrets.values()]
    return sorted({source.env for source in sources if source.env is not None})


def check_text(words: Sequence[str], what: str, forbidden: str = "") -> None:
    """Refuse what a unit file or a crontab cannot hold: line breaks and other control characters, and what is no UTF-8."""
    for word in words:
        found = [ch for ch in word if ch in forbidden or ch < " " or ch == "\x7f" or "\ud800" <= ch <= "\udfff"]
        if found:
            raise refused(
                f"'{printable(word)}' holds '{printable(found[0])}', which {what} cannot hold.",
                "Rename the file or the job, or put snapcore elsewhere.",
            )


def refused(message: str, hint: str) -> SnapshotError:
    """The error for what cannot be installed."""
    return SnapshotError(message, code=Code.INVALID_REQUEST, hint=hint)
