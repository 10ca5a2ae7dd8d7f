"""What is scheduled follows a clock that is set anew."""

import asyncio
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from snapcore.cron.schedule import Every, parse_cron
from snapcore.cron.scheduling import follow_clock, new_scheduler, trigger

HOUR = timedelta(hours=1)


async def nothing() -> None:
    pass


@pytest.mark.parametrize(("jump", "times"), [(-7200.0, 1), (-0.5, 0), (7200.0, 0)], ids=["back", "a little", "forward"])
async def test_a_clock_that_is_set_back_makes_nobody_wait_for_the_times_that_were(jump: float, times: int) -> None:
    scheduler, now = new_scheduler(), datetime.now(UTC)
    cron = parse_cron("@hourly", ZoneInfo("UTC"), "cron")
    scheduler.start(paused=True)
    later = now - timedelta(seconds=min(jump, 0))  # what the clock showed before
    interval = scheduler.add_job(nothing, trigger(Every(3600), later))
    fixed = scheduler.add_job(nothing, trigger(cron, later))
    again = scheduler.add_job(nothing, "date", run_date=later + HOUR / 2)
    offsets, told = iter([0.0, jump, jump]), list[float]()
    following = asyncio.create_task(follow_clock(scheduler, told.append, offset=lambda: next(offsets), pause=0))
    with pytest.raises(RuntimeError, match="StopIteration"):  # three looks at the clock
        await following
    assert told == [-jump] * times
    moved = timedelta(seconds=jump) if times else timedelta()
    assert interval.next_run_time == later + HOUR + moved
    assert again.next_run_time == later + HOUR / 2 + moved
    assert fixed.next_run_time in (cron.next_after(later + moved), cron.next_after(later + moved + timedelta(seconds=60)))
    scheduler.shutdown(wait=False)
