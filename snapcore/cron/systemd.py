"""Unit files of systemd: a service and a timer for each job, or one service for the scheduler.

The rules are those of systemd.unit(5), systemd.service(5), systemd.timer(5) and systemd.time(7).
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from .entries import Entry, check_text, refused
from .schedule import CronSchedule, Every

__all__ = ["Unit", "calendars", "daemon_unit", "job_units", "prefix", "quoted"]

WHAT: Final = "a unit file"
WEEKDAYS: Final = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
FIRST_AFTER_BOOT: Final = 60  # seconds
STOP_SECONDS: Final = 120  # a capture that is cancelled gives up its lease and ends within seconds
LONGEST_SLUG: Final = 80
WELL: Final = "3 11 143"  # warnings, another writer holds the thread, terminated: nothing to raise an alarm for
CUT_OFF: Final = "143"  # the scheduler was told to stop, and something did not answer
NO_USE: Final = "2 10"  # a file that makes no sense, no repository: starting again does not help
# What a system's service can do without. Not more: the commands of `exec:` addresses run in it too, and containers of podman
# need their control groups, sudo its privileges.
HARDENING: Final = (
    "ProtectSystem=full",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectHostname=yes",
    "LockPersonality=yes",
    "RestrictRealtime=yes",
)
_ODD: Final = re.compile(r"[^A-Za-z0-9_.]+")
_SAFE: Final = re.compile(r"[A-Za-z0-9_./:=+,@-]+")


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit file. `enabled` says that it is this one which is enabled and started."""

    name: str
    text: str
    enabled: bool = False


def prefix(path: str) -> str:
    """What the names of all units of a jobs file begin with."""
    return f"snapcore-{_digest(path)}-"


def job_units(
    entry: Entry, command: Sequence[str], path: str, *, system: bool, environment_file: str | None = None
) -> tuple[Unit, Unit]:
    """The service that runs a job of the file at `path` once, and the timer that starts it. `command` begins with an absolute
    path. Raises `SnapshotError` `INVALID_REQUEST` for what a unit cannot hold."""
    name = prefix(path) + _slug(entry.name)
    check_text([entry.name, path], WHAT)
    service = _sections(
        Unit=[f"Description={_plain(f'snapcore: job {entry.name} of {path}')}", *_network(system)],
        Service=[
            "Type=oneshot",
            f"ExecStart={_command(command)}",
            f"SuccessExitStatus={WELL}",
            *_surroundings(system, environment_file),
        ],
    )
    timer = _sections(
        Unit=[f"Description={_plain(f'Times of snapcore: job {entry.name} of {path}')}"],
        Timer=[*_times(entry), "AccuracySec=1s", f"Unit={name}.service"],
        Install=["WantedBy=timers.target"],
    )
    return Unit(f"{name}.service", service), Unit(f"{name}.timer", timer, enabled=True)


def daemon_unit(command: Sequence[str], path: str, *, system: bool, environment_file: str | None = None) -> Unit:
    """The service of the scheduler for all jobs of the file at `path`."""
    check_text([path], WHAT)
    text = _sections(
        Unit=[f"Description={_plain(f'snapcore: all jobs of {path}')}", *_network(system)],
        Service=[
            "Type=simple",
            f"ExecStart={_command(command)}",
            "ExecReload=/bin/kill -HUP $MAINPID",
            "Restart=on-failure",
            "RestartSec=10",
            f"SuccessExitStatus={CUT_OFF}",
            f"RestartPreventExitStatus={NO_USE}",
            *_surroundings(system, environment_file),
        ],
        Install=[f"WantedBy={'multi-user' if system else 'default'}.target"],
    )
    return Unit(f"{prefix(path)}scheduler.service", text, enabled=True)


def quoted(word: str) -> str:
    """A word of a command line: `%` begins what systemd replaces, `$` a variable, a backslash an escape."""
    check_text([word], WHAT)
    if _SAFE.fullmatch(word):
        return word
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"'


def calendars(schedule: CronSchedule) -> list[str]:
    """Calendar events that together are the times of a cron expression."""
    months, days = _list(schedule.months, 1, 12), _list(schedule.days, 1, 31)
    weekdays = "" if len(schedule.weekdays) == 7 else ",".join(WEEKDAYS[day] for day in sorted(schedule.weekdays)) + " "
    time = f"{_list(schedule.hours, 0, 23)}:{_list(schedule.minutes, 0, 59)}:00 {schedule.zone.key}"
    if schedule.either_day:  # systemd wants both to be right: two events, one for each
        return [f"*-{months}-{days} {time}", f"{weekdays}*-{months}-* {time}"]
    return [f"{weekdays}*-{months}-{days} {time}"]


def _times(entry: Entry) -> list[str]:
    schedule = entry.schedule
    delay = [f"RandomizedDelaySec={_seconds(entry.jitter)}"] if entry.jitter else []
    if isinstance(schedule, Every):
        first = min(FIRST_AFTER_BOOT, schedule.seconds)
        return [f"OnBootSec={_seconds(first)}", f"OnUnitActiveSec={_seconds(schedule.seconds)}", *delay]
    return [*(f"OnCalendar={event}" for event in calendars(schedule)), "Persistent=true", *delay]


def _command(words: Sequence[str]) -> str:
    """A command line. systemd replaces no variable in the path of the program, and so cannot be told of a `$` there."""
    if "$" in words[0]:
        raise refused(f"The path {words[0]!r} holds '$', which {WHAT} cannot hold.", "Install snapcore in another folder.")
    return " ".join(map(quoted, words))


def _surroundings(system: bool, environment_file: str | None) -> list[str]:
    # mixed: snapcore alone is told to stop, so that it sees to the commands that it has started
    lines = ["KillMode=mixed", f"TimeoutStopSec={STOP_SECONDS}", "Nice=10", "IOSchedulingPriority=7", "UMask=0077"]
    if environment_file is not None:
        check_text([environment_file], WHAT)
        lines.append(f"EnvironmentFile={_plain(environment_file)}")
    return [*lines, *(("Environment=HOME=%h", *HARDENING) if system else ())]


def _network(system: bool) -> list[str]:
    """Where there is one to wait for: a user's own manager has no such target."""
    return ["Wants=network-online.target", "After=network-online.target"] if system else []


def _sections(**sections: Iterable[str]) -> str:
    return "\n".join(f"[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items())


def _plain(text: str) -> str:
    """A value that is taken as it is but for `%`, and a backslash at its end, after which the next line would be a part of it."""
    if text.endswith("\\"):
        raise refused(f"{text!r} ends with a backslash, which {WHAT} cannot hold.", "Rename the file.")
    return text.replace("%", "%%")


def _list(numbers: Iterable[int], low: int, high: int) -> str:
    ordered = sorted(numbers)
    return "*" if ordered == list(range(low, high + 1)) else ",".join(f"{number:02}" for number in ordered)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _slug(name: str) -> str:
    """The job's name as a part of a unit's. What had to be replaced is told apart by a digest."""
    slug = _ODD.sub("-", name).strip("-")[:LONGEST_SLUG]
    return slug if slug == name and slug != "scheduler" else f"{slug}-{_digest(name)}".lstrip("-")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
