"""When jobs run: intervals, cron expressions in a time zone, and how long to wait after a failure. Nothing here sleeps.

Expressions have cron's five fields and cron's meaning:

- Sunday is 0 and 7. When neither the day of the month nor the day of the week begins with `*`, a day is right that fits either.
- A time that the clock skips (a change to summer time) is run once, at the moment when the clock goes on. A time that the
  clock shows twice is run the first time. When the hour begins with `*`, runs go by the time that passes: none is added for
  the hour that is skipped, and the hour that comes twice has its runs twice. Debian's cron does it so.
"""

import calendar
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from snapcore.durations import parse_duration
from snapcore.errors import Code, SnapshotError, printable

__all__ = ["CronSchedule", "Every", "Key", "Retries", "Schedule", "is_missed", "parse_cron", "parse_every", "parse_zone"]

FIRST_RETRY: Final = 10.0  # seconds
LONGEST_RETRY: Final = 3600.0
RETRY_SPREAD: Final = 0.2  # of the delay, taken off at random
LONGEST_SEARCH: Final = 366 * 41  # days: a 29th of February on a given weekday comes at least every 40 years
_ONE_DAY: Final = timedelta(days=1)
_MONTHS: Final = tuple(name.lower() for name in calendar.month_abbr)  # from 1
_WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_NICKNAMES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_LONGEST_MONTH: Final = (0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True, slots=True)
class Every:
    """Again and again after so many seconds."""

    seconds: float

    def next_after(self, moment: datetime) -> datetime:
        """The next run after one at `moment`."""
        return moment + timedelta(seconds=self.seconds)

    def interval(self, moment: datetime) -> float:
        """Seconds between two runs."""
        return self.seconds


@dataclass(frozen=True, slots=True)
class CronSchedule:
    """Whenever the clock of a time zone shows what the fields say. Made by `parse_cron`."""

    expression: str
    zone: ZoneInfo
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]  # 0 is Sunday
    any_hour: bool  # runs go by the time that passes
    either_day: bool

    def next_after(self, moment: datetime) -> datetime:
        """The first time after `moment`, in UTC."""
        day = moment.astimezone(self.zone).date() - _ONE_DAY  # the zone may have gone back over midnight
        for _ in range(LONGEST_SEARCH):
            if self._fits(day):
                later = [found for found in self._moments(day) if found > moment]
                if later:
                    return min(later)
            day += _ONE_DAY
        raise AssertionError("unreachable")  # parse_cron refuses days that never come

    def interval(self, moment: datetime) -> float:
        """Seconds between the next two runs after `moment`."""
        first = self.next_after(moment)
        return (self.next_after(first) - first).total_seconds()

    def _fits(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_month, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_month or by_week if self.either_day else by_month and by_week

    def _moments(self, day: date) -> Iterator[datetime]:
        for hour in self.hours:
            for minute in self.minutes:
                yield from self._instants(datetime(day.year, day.month, day.day, hour, minute, tzinfo=self.zone))

    def _instants(self, wall: datetime) -> Iterator[datetime]:
        """When the clock shows that: once, never, or twice."""
        first, second = wall.astimezone(UTC), wall.replace(fold=1).astimezone(UTC)
        if first == second:
            yield first
        elif second < first:  # the clock skips it
            if not self.any_hour:
                yield _goes_on(self.zone, second, first)
        else:
            yield first
            if self.any_hour:
                yield second


Schedule = Every | CronSchedule
Key = tuple[str, str]  # job and thread; the thread is empty for what concerns the whole job


def _goes_on(zone: ZoneInfo, before: datetime, after: datetime) -> datetime:
    """The moment between two when the zone's clock jumps, to the second."""
    old = before.astimezone(zone).utcoffset()
    while after - before > timedelta(seconds=1):
        middle = before + timedelta(seconds=(after - before) // timedelta(seconds=2))
        if middle.astimezone(zone).utcoffset() == old:
            before = middle
        else:
            after = middle
    return after


def parse_zone(name: str, what: str) -> ZoneInfo:
    """The time zone of an IANA name. `what` begins the message of an error. Raises `SnapshotError` `INVALID_REQUEST`."""
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError):  # unknown, the name of a folder, no name at all
        raise SnapshotError(
            f"{what} is '{printable(name)}', which is no time zone that this machine knows.",
            code=Code.INVALID_REQUEST,
            hint="Write an IANA name such as Europe/Berlin or UTC; machines without time zones need the package tzdata.",
        ) from None


def parse_cron(text: str, zone: ZoneInfo, what: str) -> CronSchedule:
    """A cron expression of five fields, or one of `@hourly`, `@daily`, `@midnight`, `@weekly`, `@monthly`, `@yearly`,
    `@annually`. `what` begins the message of an error. Raises `SnapshotError` `INVALID_REQUEST`."""
    fields = _NICKNAMES.get(text.strip().lower(), text).lower().split()
    if len(fields) != 5:
        raise _refused(what, text, "it has five fields: minute, hour, day of month, month, day of week.")
    try:
        minutes = _numbers(fields[0], 0, 59)
        hours = _numbers(fields[1], 0, 23)
        days = _numbers(fields[2], 1, 31)
        months = _numbers(fields[3], 1, 12, _MONTHS)
        weekdays = {number % 7 for number in _numbers(fields[4], 0, 7, _WEEKDAYS)}
    except ValueError as error:
        raise _refused(what, text, str(error)) from None
    either = not fields[2].startswith("*") and not fields[4].startswith("*")
    if not either and min(days) > max(_LONGEST_MONTH[month] for month in months):
        raise _refused(what, text, "no such day ever comes.")
    return CronSchedule(
        expression=" ".join(fields),
        zone=zone,
        minutes=tuple(sorted(minutes)),
        hours=tuple(sorted(hours)),
        days=frozenset(days),
        months=frozenset(months),
        weekdays=frozenset(weekdays),
        any_hour=fields[1].startswith("*"),
        either_day=either,
    )


def _numbers(field: str, low: int, high: int, names: tuple[str, ...] = ()) -> set[int]:
    """The numbers of a field: `*`, `3`, `1-5`, names, each range with a step, separated by commas."""
    out: set[int] = set()
    for item in field.split(","):
        span, slash, step_text = item.partition("/")
        step = _number(step_text, 1, high, ()) if slash else 1
        first_text, dash, last_text = span.partition("-")
        if span == "*":
            first, last = low, high
        elif dash:
            first, last = _number(first_text, low, high, names), _number(last_text, low, high, names)
            if names is _WEEKDAYS and last == 0 and first > 0:
                last = 7  # fri-sun, 5-0
            if first > last:
                raise ValueError(f"the range {span} ends before it begins.")
        elif slash:
            raise ValueError(f"the step of {item} has no range: write */{step_text} or {span}-{high}/{step_text}.")
        else:
            first = last = _number(span, low, high, names)
        out.update(range(first, last + 1, step))
    return out


def _number(text: str, low: int, high: int, names: tuple[str, ...]) -> int:
    if text and text in names:
        return names.index(text)
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise ValueError(f"{text!r} is not between {low} and {high}.")
    return int(text)


def _refused(what: str, text: str, why: str) -> SnapshotError:
    return SnapshotError(
        f"{what} is '{printable(text)}', which is no cron expression: {printable(why)}",
        code=Code.INVALID_REQUEST,
        hint="Such as '*/15 8-18 * * mon-fri' or @daily; L, W, # and ? are not part of cron.",
    )


def parse_every(text: str, what: str) -> Every:
    """An interval. Raises `SnapshotError` `INVALID_REQUEST`."""
    return Every(parse_duration(text, what))


def is_missed(schedule: Schedule, last: datetime, now: datetime) -> bool:
    """Whether a run was due since the one at `last`; also when that lies ahead, because the clock was set back."""
    return last > now or schedule.next_after(last) <= now


class Retries:
    """How long to wait after failures in a row: 10, 20, 40, ... seconds, but no longer than the schedule's interval or an hour;
    less a random part, so that many jobs that failed together do not come back together."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._tries: dict[Key, int] = {}

    def again(self, key: Key, schedule: Schedule, now: datetime) -> datetime:
        """When to try again after one more failure of what `key` names."""
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        longest = min(schedule.interval(now), LONGEST_RETRY)
        delay = min(FIRST_RETRY * float(2 ** min(tries - 1, 20)), longest)
        return now + timedelta(seconds=delay * (1 - RETRY_SPREAD * self._chance.random()))

    def settle(self, key: Key) -> None:
        """It went well, or trying again does not help: the next failure is a first one."""
        self._tries.pop(key, None)

    def of_job(self, job: str) -> list[Key]:
        """What failed last, of a job."""
        return [key for key in self._tries if key[0] == job]
