"""Lines of a crontab."""

import json
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from snapcore.cron import crontab
from snapcore.cron.entries import Entry
from snapcore.cron.schedule import Every, parse_cron
from snapcore.errors import SnapshotError

UTC = ZoneInfo("UTC")
BERLIN = ZoneInfo("Europe/Berlin")


def cron(text: str, zone: ZoneInfo = UTC) -> Entry:
    return Entry("j", parse_cron(text, zone, "cron"), 0)


def has_dry_run() -> bool:
    """Whether this machine's crontab looks at a file without installing it, as Debian's does."""
    if shutil.which("crontab") is None:
        return False
    return "dry run" in subprocess.run(["crontab", "-h"], capture_output=True, text=True, check=False).stderr


needs_dry_run = pytest.mark.skipif(not has_dry_run(), reason="needs a crontab with -n (Debian's package cron)")


# ---- times


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("*/15 8-18 * * mon-fri", "*/15 8-18 * * 1,2,3,4,5"),
        ("0 3 1 jan,jul *", "0 3 1 1,7 *"),
        ("0 0 13 * fri-sun", "0 0 13 * 0,5,6"),
        ("0 0 */2 */3 */2", "0 0 */2 */3 */2"),
        ("@weekly", "0 0 * * 0"),
    ],
)
def test_an_expression_stays_what_it_is(text: str, fields: str) -> None:
    assert crontab.expression(cron(text), UTC) == fields
    assert parse_cron(fields, UTC, "cron").expression == fields


@pytest.mark.parametrize(
    ("seconds", "fields"),
    [
        (60, "* * * * *"),
        (300, "*/5 * * * *"),
        (1800, "*/30 * * * *"),
        (3600, "0 * * * *"),
        (8 * 3600, "0 */8 * * *"),
        (86_400, "0 0 * * *"),
        (7 * 86_400, "0 0 * * 0"),
    ],
)
def test_intervals_that_cron_has(seconds: float, fields: str) -> None:
    entry = Entry("j", Every(seconds), 0)
    assert crontab.expression(entry, UTC) == fields
    schedule = parse_cron(fields, UTC, "cron")
    moment = datetime(2026, 5, 1, 7, 3, tzinfo=UTC)
    assert {schedule.interval(moment)} == {seconds}


@pytest.mark.parametrize(
    ("seconds", "told", "nearest"),
    [
        (30, "30s", "is 1min"),
        (90, "1min30s", "are 1min or 2min"),
        (45 * 60, "45min", "are 30min or 1h"),
        (5 * 3600, "5h", "are 4h or 6h"),
        (2 * 86_400, "2d", "are 1d or 7d"),
        (30 * 86_400, "30d", "is 7d"),
    ],
)
def test_other_intervals_are_refused_with_the_nearest_ones(seconds: float, told: str, nearest: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        crontab.expression(Entry("j", Every(seconds), 0), UTC)
    assert f"every {told}, which cron cannot do" in caught.value.message
    assert f"The nearest that it can {nearest};" in caught.value.hint


def test_times_of_another_zone_are_refused() -> None:
    assert crontab.expression(cron("0 9 * * *", BERLIN), ZoneInfo("Europe/Berlin")) == "0 9 * * *"
    for text, there, here in (
        ("0 9 * * *", BERLIN, UTC),
        ("0 9 * * *", UTC, BERLIN),
        ("* * * * mon", BERLIN, UTC),
        ("*/30 * * * *", UTC, ZoneInfo("Asia/Kathmandu")),
        ("0 9 * * *", ZoneInfo("Europe/London"), UTC),
    ):
        with pytest.raises(SnapshotError) as caught:
            crontab.expression(cron(text, there), here)
        assert there.key in caught.value.message


def test_zones_that_do_not_matter_do_not() -> None:
    assert crontab.expression(cron("*/30 * * * *", BERLIN), UTC) == "*/30 * * * *"
    assert crontab.expression(cron("0 9 * * *", ZoneInfo("Europe/Vienna")), BERLIN) == "0 9 * * *"


def test_the_machine_s_zone_is_that_of_the_system_not_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert crontab.local_zone(str(tmp_path / "none")).key == "UTC"
    (tmp_path / "localtime").write_text("no zone")
    assert crontab.local_zone(str(tmp_path / "localtime")).key == "UTC"
    local = Path("/usr/share/zoneinfo/Europe/Berlin")
    if local.exists():
        assert crontab.expression(cron("0 9 * * *", BERLIN), crontab.local_zone(str(local))) == "0 9 * * *"


# ---- commands

HOSTILE = [
    *("a b", "  ", "100%", "%% %d", "do$llar $HOME `id` $(id)", 'quo"te', "apo'strophe"),
    *(";", "&& x", "ümläut ✓", "#", "*", "~", "!"),
]


def as_cron_runs_it(command: str) -> str:
    """What the shell gets: the text up to a `%`, and each `\\%` as `%`."""
    shown, place = "", 0
    while place < len(command) and command[place] != "%":
        if command.startswith("\\%", place):
            place += 1
        shown, place = shown + command[place], place + 1
    return shown


def test_the_program_gets_the_words_as_they_are(tmp_path: Path) -> None:
    script = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('PATH'), os.environ.get('KEY')]))"
    environment_file = tmp_path / "my 50% 'file'.env"
    environment_file.write_text("KEY=value\n")
    words = [sys.executable, "-c", script, *HOSTILE]
    text = crontab.block([cron("0 0 * * *")], [words], "/f", zone=UTC, environment_file=str(environment_file))
    line = text.splitlines()[1]
    assert line.startswith("0 0 * * * ")
    shell = as_cron_runs_it(line.removeprefix("0 0 * * * "))
    done = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=True, env={"HOME": str(tmp_path)})
    assert json.loads(done.stdout) == [HOSTILE, crontab.PATH, "value"]


@needs_dry_run
def test_cron_takes_the_lines(tmp_path: Path) -> None:
    entries = [cron("*/15 8-18 13 jan-jun mon-fri"), Entry("k", Every(300), 0)]
    text = crontab.block(entries, [["/s", *HOSTILE], ["/s", "x" * 900]], "/a b.toml", zone=UTC)
    (tmp_path / "crontab").write_text(text)
    done = subprocess.run(["crontab", "-n", str(tmp_path / "crontab")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done


@pytest.mark.parametrize("odd", ["a\nb", "a\rb", "a\0b", "a\tb", "a\\b", "a\udce9"])
def test_what_a_crontab_cannot_hold_is_refused(odd: str) -> None:
    with pytest.raises(SnapshotError):
        crontab.block([cron("0 0 * * *")], [["/s", odd]], "/f", zone=UTC)
    with pytest.raises(SnapshotError):
        crontab.block([cron("0 0 * * *")], [["/s"]], "/f", zone=UTC, environment_file=f"/{odd}")
    if "\\" not in odd:
        with pytest.raises(SnapshotError):
            crontab.block([cron("0 0 * * *")], [["/s"]], f"/{odd}", zone=UTC)


def test_a_command_that_is_too_long_for_cron_is_refused() -> None:
    with pytest.raises(SnapshotError, match="too long"):
        crontab.block([cron("0 0 * * *")], [["/s", "x" * 1000]], "/f", zone=UTC)


# ---- the block among other lines

OTHERS = b"# mine\nMAILTO=me\n\n\t0 5 * * *  /bin/back%up \xff\xfe\n@reboot x"
NEW = "# BEGIN snapcore: /f\n0 0 * * * a\n# END snapcore: /f\n"
OLD = b"# BEGIN snapcore: /f\n1 1 1 1 1 b\n2 2 2 2 2 c\n# END snapcore: /f\n"
OTHER_FILE = b"# BEGIN snapcore: /g\n1 1 1 1 1 b\n# END snapcore: /g\n"


def test_a_block_is_added_at_the_end() -> None:
    assert crontab.replaced(b"", "/f", NEW) == NEW.encode()
    assert crontab.replaced(OTHERS, "/f", NEW) == OTHERS + b"\n" + NEW.encode()
    assert crontab.replaced(OTHERS + b"\n" + OTHER_FILE, "/f", NEW) == OTHERS + b"\n" + OTHER_FILE + NEW.encode()


def test_a_block_is_replaced_where_it_is_and_all_else_stays() -> None:
    before = b"x\r\n" + OLD + OTHER_FILE + OTHERS
    assert crontab.replaced(before, "/f", NEW) == b"x\r\n" + NEW.encode() + OTHER_FILE + OTHERS
    assert crontab.replaced(before, "/f", "") == b"x\r\n" + OTHER_FILE + OTHERS
    again = crontab.replaced(before, "/f", NEW)
    assert crontab.replaced(again, "/f", NEW) == again


def test_what_is_not_there_is_not_removed() -> None:
    for before in (b"", OTHERS, OTHER_FILE):
        assert crontab.replaced(before, "/f", "") == before


@pytest.mark.parametrize("broken", [OLD[:30], OLD + OLD, b"# END snapcore: /f\n# BEGIN snapcore: /f\n"])
def test_a_block_that_is_not_whole_is_refused(broken: bytes) -> None:
    with pytest.raises(SnapshotError, match="no whole block"):
        crontab.replaced(broken, "/f", NEW)
