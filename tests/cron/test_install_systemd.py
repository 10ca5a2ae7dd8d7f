"""Unit files of systemd: what they say is what systemd understands."""

import os
import random
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from snapcore.cron import systemd
from snapcore.cron.entries import Entry
from snapcore.cron.schedule import CronSchedule, Every, parse_cron
from snapcore.errors import SnapshotError

MANAGER = "/lib/systemd/systemd"
BASE = datetime(2026, 4, 10, 9, 7, 30, tzinfo=UTC)
ELAPSES = 6
NOBODY = 65534

needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (package systemd)")
needs_manager = pytest.mark.skipif(not os.access(MANAGER, os.X_OK), reason="needs systemd")


def schedule(text: str, zone: str = "UTC") -> CronSchedule:
    return parse_cron(text, ZoneInfo(zone), "cron")


# ---- times


def random_expressions(number: int) -> list[CronSchedule]:
    """The same ones each time."""
    chance = random.Random(6)

    def field(low: int, high: int) -> str:
        first, last = sorted(chance.sample(range(low, high + 1), 2))
        choices = [
            "*",
            "*",
            f"*/{chance.randint(2, high)}",
            str(first),
            f"{first}-{last}",
            f"{first},{last}",
            f"{first}-{last}/2",
        ]
        return chance.choice(choices)

    found = []
    for _ in range(number):
        text = " ".join(field(low, high) for low, high in ((0, 59), (0, 23), (1, 28), (1, 12), (0, 6)))
        found.append(schedule(text, chance.choice(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu"])))
    return found


NAMED = [
    "* * * * *",
    "*/15 8-18 * * mon-fri",
    "30 2 1,15 * *",
    "0 0 13 * fri",
    "5 4 * * sun",
    "0 12 29 2 *",
    "@daily",
    "0 0 1 jan *",
]


def elapses(events: Sequence[str]) -> dict[str, list[datetime]]:
    """When systemd itself says that each calendar event elapses after `BASE`."""
    base = BASE.strftime("%Y-%m-%d %H:%M:%S UTC")
    command = ["systemd-analyze", "calendar", f"--iterations={ELAPSES}", f"--base-time={base}", *events]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "TZ": "UTC", "LC_ALL": "C"}
    ).stdout
    parts = re.split(r"\n\n+", said.strip())
    assert len(parts) == len(events)
    when = re.compile(r"(?:Next elapse|Iter\. #\d+|Iteration #\d+): \w+ (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC")
    return {
        event: [datetime.fromisoformat(f"{text}+00:00") for text in when.findall(part)]
        for event, part in zip(events, parts, strict=True)
    }


@needs_analyze
def test_calendar_events_elapse_when_the_expression_says() -> None:
    schedules = [*map(schedule, NAMED), schedule("0 9 * * *", "Europe/Berlin"), *random_expressions(60)]
    said = elapses(list(dict.fromkeys(event for each in schedules for event in systemd.calendars(each))))
    for each in schedules:
        moment, expected = BASE, []
        for _ in range(ELAPSES):
            moment = each.next_after(moment)
            expected.append(moment)
        found = sorted({moment for event in systemd.calendars(each) for moment in said[event]})
        assert found[:ELAPSES] == expected, (each.expression, each.zone.key, systemd.calendars(each))


def test_a_day_that_may_fit_in_two_ways_is_two_events() -> None:
    """cron takes either, systemd would want both at once."""
    assert systemd.calendars(schedule("0 0 13 * fri")) == ["*-*-13 00:00:00 UTC", "Fri *-*-* 00:00:00 UTC"]
    assert systemd.calendars(schedule("0 0 */2 * fri")) == [
        "Fri *-*-01,03,05,07,09,11,13,15,17,19,21,23,25,27,29,31 00:00:00 UTC"
    ]


def test_intervals_go_by_the_last_start_and_expressions_are_made_up_for() -> None:
    _, every = systemd.job_units(Entry("j", Every(5400), 90.5), ["/s"], "/f", system=True)
    assert "OnBootSec=60s\nOnUnitActiveSec=5400s\nRandomizedDelaySec=90.5s\n" in every.text
    assert "Persistent" not in every.text
    _, often = systemd.job_units(Entry("j", Every(10), 0), ["/s"], "/f", system=True)
    assert "OnBootSec=10s\nOnUnitActiveSec=10s\nAccuracySec" in often.text
    _, cron = systemd.job_units(Entry("j", schedule("0 3 * * *", "Europe/Berlin"), 0), ["/s"], "/f", system=True)
    assert "OnCalendar=*-*-* 03:00:00 Europe/Berlin\nPersistent=true\nAccuracySec" in cron.text


# ---- words

HOSTILE = [
    "a b",
    "  ",
    "per%cent %n %%",
    "do$llar ${HOME} $$",
    'quo"te',
    "apo'strophe",
    "back\\slash \\n \\x41",
    ";",
    "-",
    "@",
    "ümläut ✓",
    "#",
    "$MAINPID",
    "%",
    "a=b",
    "\\\\",
]


def understood(folder: Path, *units: systemd.Unit, name: str) -> str:
    """All that systemd has to say of a unit, having read it."""
    units_folder, runtime = folder / "units", folder / "runtime"
    for each in (units_folder, runtime):
        each.mkdir(exist_ok=True)
    for unit in units:
        (units_folder / unit.name).write_text(unit.text + ("[Install]\nWantedBy=default.target\n" if unit.name == name else ""))
    as_nobody = []
    if os.geteuid() == 0:  # it refuses to be tried as root
        as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        os.chown(runtime, NOBODY, NOBODY)
    environment = {
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(runtime),
        "SYSTEMD_UNIT_PATH": f"{units_folder}:",
        "PATH": os.environ["PATH"],
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run(
        [*as_nobody, MANAGER, "--user", "--test", f"--unit={name}"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=60,
    )
    assert f"-> Unit {name}:" in done.stdout, done
    return done.stdout.split(f"-> Unit {name}:")[1].split("-> Unit ")[0]


@pytest.fixture
def visible() -> Iterator[Path]:
    """A folder that every user sees, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="snapcore-units-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@needs_manager
def test_systemd_reads_every_word_as_it_is_meant(visible: Path) -> None:
    words = ["/bin/echo", *HOSTILE]
    service, timer = systemd.job_units(
        Entry("job %n \\", Every(60), 0), words, "/a %h/b", system=False, environment_file="/etc/my %n file.env"
    )
    said = understood(visible, service, timer, name=service.name)
    line = next(line for line in said.splitlines() if "Command Line:" in line)
    read = shlex.split(line.partition("Command Line: ")[2].replace("\\$", "$"))
    assert [word.replace("$$", "$") for word in read] == words, "systemd makes one $ of two when it starts the command"
    assert all(word.count("$") % 2 == 0 for word in read)
    assert "EnvironmentFile: /etc/my %n file.env\n" in said
    assert "Description: snapcore: job job %n \\ of /a %h/b\n" in said
    assert "TimeoutStopSec: 2min\n" in said


@needs_manager
def test_the_scheduler_is_told_to_reload_by_its_process_id(visible: Path) -> None:
    unit = systemd.daemon_unit(["/bin/echo", "$x"], "/f", system=False)
    (visible / "units").mkdir()
    said = understood(visible, systemd.Unit(unit.name, unit.text.partition("[Install]")[0]), name=unit.name)
    assert 'Command Line: /bin/kill -HUP "\\$MAINPID"' in said or "Command Line: /bin/kill -HUP \\$MAINPID" in said
    assert "Restart: on-failure\n" in said


@needs_analyze
@pytest.mark.parametrize("system", [True, False])
def test_systemd_finds_nothing_to_complain_about(tmp_path: Path, system: bool) -> None:
    folder = tmp_path / "a b%c"
    folder.mkdir()
    (folder / "snapcore").write_text("#!/bin/sh\n")
    (folder / "snapcore").chmod(0o755)
    (tmp_path / "env").write_text("")
    command = [str(folder / "snapcore"), "cron", "run", str(folder / 'j "x" $HOME.toml')]
    units = [
        *systemd.job_units(
            Entry("nightly % $ ü", schedule("0 3 13 * fri", "Europe/Berlin"), 60),
            [*command, "--job", "nightly % $ ü", "--once"],
            command[-1],
            system=system,
            environment_file=str(tmp_path / "env"),
        ),
        *systemd.job_units(Entry("often", Every(90), 0), [*command, "--once"], command[-1], system=system),
        systemd.daemon_unit(command, command[-1], system=system),
    ]
    for unit in units:
        (tmp_path / unit.name).write_text(unit.text)
    paths = [str(tmp_path / unit.name) for unit in units]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *paths], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("odd", ["a\nb", "a\rb", "a\0b", "a\x1bb", "a\udce9"])
def test_what_a_unit_cannot_hold_is_refused(odd: str) -> None:
    entry = Entry("j", Every(60), 0)
    makers: list[Callable[[], object]] = [
        lambda: systemd.job_units(Entry(odd, Every(60), 0), ["/s"], "/f", system=True),
        lambda: systemd.job_units(entry, ["/s", odd], "/f", system=True),
        lambda: systemd.job_units(entry, ["/s"], f"/{odd}", system=True),
        lambda: systemd.job_units(entry, ["/s"], "/f", system=True, environment_file=f"/{odd}"),
        lambda: systemd.daemon_unit(["/s"], f"/{odd}", system=True),
    ]
    for make in makers:
        with pytest.raises(SnapshotError) as caught:
            make()
        assert "cannot hold" in str(caught.value)


def test_paths_that_systemd_would_read_otherwise_are_refused() -> None:
    entry = Entry("j", Every(60), 0)
    for program, path, environment_file in (("/a$b/snapcore", "/f", None), ("/s", "/f\\", None), ("/s", "/f", "/e\\")):
        with pytest.raises(SnapshotError):
            systemd.job_units(entry, [program], path, system=True, environment_file=environment_file)


# ---- names


def test_units_are_told_apart_by_file_and_job() -> None:
    names = {
        systemd.job_units(Entry(job, Every(60), 0), ["/s"], path, system=True)[0].name
        for job in ("a", "A", "a b", "a-b", "a/b", "ü", "ö", "..", "a" * 300, "a" * 301, "scheduler")
        for path in ("/f", "/g")
    } | {systemd.daemon_unit(["/s"], path, system=True).name for path in ("/f", "/g")}
    assert len(names) == 24
    assert all(re.fullmatch(r"snapcore-[0-9a-f]{8}-[A-Za-z0-9_.-]+\.service", name) for name in names)
    assert max(map(len, names)) < 200
    assert systemd.job_units(Entry("nightly", Every(60), 0), ["/s"], "/f", system=True)[1].name.endswith("-nightly.timer")
