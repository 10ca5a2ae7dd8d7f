"""Lines of a crontab, in a block of their own for each jobs file. The rules are those of crontab(5) of Vixie cron."""

import os
import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from snapcore.errors import printable

from .entries import Entry, check_text, refused
from .schedule import CronSchedule, Every

__all__ = ["block", "expression", "local_zone", "replaced"]

WHAT: Final = "a crontab"
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # cron's own has /usr/bin and /bin
MAX_COMMAND: Final = 990  # bytes; Vixie cron refuses a thousand
BEGIN: Final = "# BEGIN snapcore: "
END: Final = "# END snapcore: "
MINUTE: Final = 60
HOUR: Final = 3600
DAY: Final = 86_400
COMPARED_DAYS: Final = 3 * 366
# Seconds -> an expression, of all intervals that cron has.
INTERVALS: Final = {
    **{n * MINUTE: "* * * * *" if n == 1 else f"*/{n} * * * *" for n in range(1, 60) if 60 % n == 0},
    **{n * HOUR: "0 * * * *" if n == 1 else f"0 */{n} * * *" for n in range(1, 24) if 24 % n == 0},
    DAY: "0 0 * * *",
    7 * DAY: "0 0 * * 0",
}


def expression(entry: Entry, zone: ZoneInfo) -> str:
    """The five fields for a job, where cron's own clock shows the time of `zone`. Raises `SnapshotError` `INVALID_REQUEST` for
    an interval that cron does not have, and for times of another zone."""
    schedule = entry.schedule
    if isinstance(schedule, Every):
        return _interval(entry.name, schedule.seconds)
    if not _same_times(schedule, zone):
        raise refused(
            f"Job '{printable(entry.name)}' goes by the time of {schedule.zone.key}, and cron by that of this machine.",
            "Write the job's cron and timezone for this machine's time zone, or use --systemd, which knows time zones.",
        )
    return _portable(schedule)


def block(
    entries: Sequence[Entry], commands: Sequence[Sequence[str]], path: str, *, zone: ZoneInfo, environment_file: str | None = None
) -> str:
    """The marked lines that start the jobs of the file at `path`, each by its command."""
    check_text([path], WHAT)
    lines = [BEGIN + path]
    for entry, words in zip(entries, commands, strict=True):
        check_text([entry.name], WHAT)
        lines.append(f"{expression(entry, zone)} {_command(words, environment_file)}")
    return "".join(f"{line}\n" for line in (*lines, END + path))


def replaced(crontab: bytes, path: str, new: str) -> bytes:
    """A crontab with `new`, which may be empty, in place of the block of the file at `path`; at its end where it has none. All
    else stays byte for byte. Raises `SnapshotError` `INVALID_REQUEST` for a block whose end is missing."""
    begin, end = f"{BEGIN}{path}".encode(), f"{END}{path}".encode()
    lines = crontab.splitlines(keepends=True)
    bare = [line.rstrip(b"\r\n") for line in lines]
    if begin not in bare:
        if crontab and not crontab.endswith(b"\n") and new:
            crontab += b"\n"
        return crontab + new.encode()
    first = bare.index(begin)
    if end not in bare[first:] or bare.count(begin) > 1:
        raise refused(
            f"The crontab has no whole block of {printable(path)}: its end is missing, or it begins twice.",
            "Mend it: crontab -e",
        )
    last = bare.index(end, first)
    return b"".join([*lines[:first], new.encode(), *lines[last + 1 :]])


def local_zone(path: str = "/etc/localtime") -> ZoneInfo:
    """The time zone of this machine, by which cron goes whatever `TZ` says here."""
    try:
        with open(path, "rb") as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError):
        return ZoneInfo("UTC")


def _interval(name: str, seconds: float) -> str:
    if seconds in INTERVALS:
        return INTERVALS[int(seconds)]
    shorter = max((each for each in INTERVALS if each < seconds), default=None)
    longer = min((each for each in INTERVALS if each > seconds), default=None)
    nearest = " or ".join(_told(each) for each in (shorter, longer) if each is not None)
    raise refused(
        f"Job '{printable(name)}' runs every {_told(int(seconds))}, which cron cannot do.",
        f"The nearest that it can are {nearest}; or write cron = ..., or use --systemd."
        if " or " in nearest
        else f"The nearest that it can is {nearest}; or write cron = ..., or use --systemd.",
    )


def _told(seconds: int) -> str:
    """A duration as the settings file has it: `1h30min`."""
    parts = []
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (1, "s")):
        number, seconds = divmod(seconds, size)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts)


def _portable(schedule: CronSchedule) -> str:
    """The expression without names and ranges of months and weekdays, which crons take in different ways: `fri-sun`. A field
    that begins with `*` stays, since it counts by that."""
    fields = schedule.expression.split()
    for place, numbers in ((3, schedule.months), (4, schedule.weekdays)):
        if not fields[place].startswith("*"):
            fields[place] = ",".join(str(number) for number in sorted(numbers))
    return " ".join(fields)


def _same_times(schedule: CronSchedule, zone: ZoneInfo) -> bool:
    """Whether the expression means the same moments in both zones, as far as can be told: these years."""
    if schedule.zone.key == zone.key:
        return True
    by_the_hour = len(schedule.hours) == 24 and len(schedule.months) == 12 and not schedule.either_day
    by_the_hour = by_the_hour and len(schedule.days) == 31 and len(schedule.weekdays) == 7
    allowed = timedelta(hours=1) if by_the_hour else timedelta(days=365)  # a multiple of which does not matter
    return all(not (_offset(schedule.zone, moment) - _offset(zone, moment)) % allowed for moment in _moments())


def _offset(zone: ZoneInfo, moment: datetime) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta(0)


def _moments() -> Iterator[datetime]:
    begin = datetime.now(UTC)
    return (begin + timedelta(days=number) for number in range(COMPARED_DAYS))


def _command(words: Sequence[str], environment_file: str | None) -> str:
    """A command for sh, as a line of a crontab has it: there, `%` ends the command unless a backslash stands before it. A
    backslash anywhere else is not taken alike by every cron."""
    check_text(words, WHAT, forbidden="\\")
    start = f"PATH={PATH} {shlex.join(words)}"
    if environment_file is not None:
        check_text([environment_file], WHAT, forbidden="\\")
        start = f"set -a; . {shlex.quote(os.path.abspath(environment_file))}; {start}"
    line = start.replace("%", "\\%")
    if len(line.encode()) > MAX_COMMAND:
        raise refused(f"A command of {len(line.encode())} bytes is too long for cron.", "Use shorter paths, or --systemd.")
    return line
