"""APScheduler as this package uses it."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from snapcore.errors import Code, RepositoryError
from snapcore.runs import JobRun

from .schedule import CronSchedule, Every, Key, Schedule, is_missed

__all__ = ["began", "entry_id", "follow_clock", "is_due", "new_scheduler", "retry_id", "trigger"]

CLOCK_SECONDS: Final = 5.0  # between two looks at the clock
SMALLEST_JUMP: Final = 1.0


def new_scheduler() -> Any:
    """A scheduler in the running event loop. Late is better than never, and once is enough. Raises `RepositoryError`
    `MISSING_EXTRA` without the package."""
    try:
        from apscheduler.schedulers.asyncio import AsyncIOScheduler
    except ImportError as error:
        raise RepositoryError(
            "The scheduler needs the package 'apscheduler'.",
            code=Code.MISSING_EXTRA,
            hint="Install it: pip install 'snapcore[cron]'.",
        ) from error
    return AsyncIOScheduler(timezone=UTC, job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None})


def trigger(schedule: Schedule, last: datetime) -> Any:
    """The times of a schedule after a run at `last`. After a long sleep of the machine there is one run, not one for each that
    was missed: the scheduler would go through them all to find that out."""
    from apscheduler.triggers.base import BaseTrigger

    class Trigger(BaseTrigger):  # type: ignore[misc]  # the package has no types
        def __init__(self) -> None:
            self.schedule = schedule

        def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> Any:
            before = previous_fire_time or last
            if isinstance(schedule, Every):
                period = timedelta(seconds=schedule.seconds)
                return before + max(1, (now - before) // period + 1) * period
            return schedule.next_after(max(before, now))

    return Trigger()


def _clock_offset() -> float:
    return time.time() - time.monotonic()


async def follow_clock(
    scheduler: Any,
    set_back: Callable[[float], None],
    *,
    offset: Callable[[], float] = _clock_offset,
    pause: float = CLOCK_SECONDS,
) -> None:
    """See to it, until cancelled, that what is scheduled follows a clock that is set anew; `set_back` is told by how many seconds
    it was. What the clock has jumped over is run now. When it was set back, intervals go on as if it had not been: to wait for
    the times that were would be to wait for as long as it was set back. `offset` is how far the clock is before one that is
    never set."""
    before = offset()
    while True:
        await asyncio.sleep(pause)
        now = offset()
        jump, before = now - before, now
        if jump <= -SMALLEST_JUMP:
            for entry in scheduler.get_jobs():
                scheduler.modify_job(entry.id, next_run_time=_moved(entry, jump))
            set_back(-jump)
        elif jump >= SMALLEST_JUMP:  # or the machine has slept
            scheduler.wakeup()


def _moved(entry: Any, jump: float) -> datetime:
    schedule = getattr(entry.trigger, "schedule", None)
    if isinstance(schedule, CronSchedule):
        return schedule.next_after(datetime.now(UTC))
    moved: datetime = entry.next_run_time + timedelta(seconds=jump)
    return moved


def entry_id(job: str) -> str:
    """What the times of a job are called in the scheduler."""
    return f"job:{job}"


def retry_id(key: Key) -> str:
    """What the next try of a thread is called."""
    return f"retry:{key[0]}\0{key[1]}"


def is_due(schedule: Schedule, runs: list[JobRun]) -> bool:
    """Whether a run was missed. What never ran is due where it runs at intervals; at a fixed time only after it has failed."""
    good = [began(run) for run in runs if run.good]
    if not good:
        return bool(runs) or isinstance(schedule, Every)
    return is_missed(schedule, max(good), datetime.now(UTC))


def began(run: JobRun) -> datetime:
    """When a run began."""
    return datetime.fromtimestamp(run.started_at / 1e6, UTC)
