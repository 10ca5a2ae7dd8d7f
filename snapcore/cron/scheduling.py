"""APScheduler as this package uses it."""

from datetime import UTC, datetime, timedelta
from typing import Any

from snapcore.errors import Code, RepositoryError

from .schedule import Every, Schedule

__all__ = ["new_scheduler", "trigger"]


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
        def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> Any:
            before = previous_fire_time or last
            if isinstance(schedule, Every):
                period = timedelta(seconds=schedule.seconds)
                return before + max(1, (now - before) // period + 1) * period
            return schedule.next_after(max(before, now))

    return Trigger()
