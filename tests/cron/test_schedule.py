"""When jobs run: cron's meaning of an expression, changes of the clock, what is missed, and how long to wait after failures."""

import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapcore.cron.schedule import CronSchedule, Every, Retries, is_missed, parse_cron, parse_every, parse_zone
from snapcore.cron.scheduling import trigger
from snapcore.errors import Code, SnapshotError

BERLIN = ZoneInfo("Europe/Berlin")
MINUTE = timedelta(minutes=1)
# by change: to summer time, back, by half an hour, over midnight, a whole day left out, none
CHANGES = [
    ("Europe/Berlin", datetime(2026, 3, 29, 1, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2026, 10, 25, 1, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 4, 4, 15, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 10, 3, 15, 30, tzinfo=UTC)),
    ("America/Sao_Paulo", datetime(2018, 2, 18, 2, tzinfo=UTC)),
    ("America/Sao_Paulo", datetime(2018, 11, 4, 3, tzinfo=UTC)),
    ("Pacific/Apia", datetime(2011, 12, 30, 10, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 7, 31, 12, tzinfo=UTC)),
]


def cron(text: str, zone: ZoneInfo = BERLIN) -> CronSchedule:
    return parse_cron(text, zone, "cron")


def runs(text: str, after: datetime, count: int, zone: ZoneInfo = BERLIN) -> list[str]:
    """The next runs, as the clock of the zone shows them."""
    out = []
    for _ in range(count):
        after = cron(text, zone).next_after(after)
        out.append(after.astimezone(zone).strftime("%a %d %H:%M %z"))
    return out


# ------------------------------------------------------------------------------------------------- against an oracle


def wanted(field: str, low: int, high: int) -> set[int]:
    """What a field of numbers stands for, by trying all of them."""
    out = set()
    for item in field.split(","):
        span, _, step = item.partition("/")
        first, last = (low, high) if span == "*" else (int(part) for part in (span.split("-") * 2)[:2])
        out |= {n for n in range(low, high + 1) if first <= n <= last and (n - first) % int(step or 1) == 0}
    return out


def oracle(text: str, zone: ZoneInfo, after: datetime, minutes: int) -> list[datetime]:
    """Minute by minute through the time that passes: when cron, which looks at the clock each minute, would run it."""
    minute, hour, day, month, weekday = text.split()
    sets = [wanted(minute, 0, 59), wanted(hour, 0, 23), wanted(day, 1, 31), wanted(month, 1, 12), wanted(weekday, 0, 7)]
    either = day[0] != "*" and weekday[0] != "*"

    def fits(wall: datetime) -> bool:
        by_month, by_week = wall.day in sets[2], bool({wall.isoweekday(), wall.isoweekday() % 7} & sets[4])
        days = by_month or by_week if either else by_month and by_week
        return wall.minute in sets[0] and wall.hour in sets[1] and wall.month in sets[3] and days

    def wall_at(moment: datetime) -> datetime:
        return moment.astimezone(zone).replace(tzinfo=None)

    out = []
    moment = after.replace(second=0, microsecond=0)
    furthest = max(wall_at(moment - n * MINUTE) for n in range(240))  # what the clock has shown already
    wall = wall_at(moment)
    for _ in range(minutes):
        before, moment = wall, moment + MINUTE
        wall = wall_at(moment)
        left_out = [before + n * MINUTE for n in range(1, round((wall - before) / MINUTE))]
        again = wall <= furthest
        once = (fits(wall) and not again) or any(fits(each) for each in left_out)
        furthest = max(furthest, wall)
        if fits(wall) if hour[0] == "*" else once:
            out.append(moment)
    return out


def fields(low: int, high: int) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    span = st.tuples(number, number).map(lambda ends: f"{min(ends)}-{max(ends)}")
    stepped = st.tuples(st.one_of(st.just("*"), span), st.integers(1, max(1, high // 2))).map(lambda each: f"{each[0]}/{each[1]}")
    one = st.one_of(number.map(str), span, stepped)
    return st.one_of(st.just("*"), st.just("*"), one, st.lists(one, min_size=1, max_size=3).map(",".join))


@settings(deadline=None, max_examples=40)
@given(
    st.tuples(fields(0, 59), fields(0, 23), fields(1, 31), st.just("*"), fields(0, 7)).map(" ".join),
    st.sampled_from(CHANGES),
    st.integers(-90, 60),
)
def test_runs_are_those_of_a_cron_that_looks_at_the_clock_each_minute(
    text: str, change: tuple[str, datetime], offset: int
) -> None:
    zone, after = ZoneInfo(change[0]), change[1] + offset * MINUTE
    expected = oracle(text, zone, after, 2000)
    found = [after]
    for _ in range(min(len(expected), 8)):
        found.append(cron(text, zone).next_after(found[-1]))
    assert found[1:] == expected[:8]


@pytest.mark.parametrize("number", range(8))
def test_weekdays_are_counted_from_sunday(number: int) -> None:
    name = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")[number]
    after = datetime(2026, 6, 3, tzinfo=UTC)
    by_number, by_name = runs(f"0 12 * * {number}", after, 3), runs(f"0 12 * * {name.upper()}", after, 3)
    assert by_number == by_name
    assert {each[:3].lower() for each in by_number} == {name}


@pytest.mark.parametrize(
    ("field", "days"),
    [("5-7", "Fri Sat Sun"), ("fri-sun", "Fri Sat Sun"), ("1-5", "Mon Tue Wed Thu Fri"), ("*/2", "Sun Tue Thu Sat")],
)
def test_ranges_of_weekdays_reach_over_sunday(field: str, days: str) -> None:
    found = {each[:3] for each in runs(f"0 12 * * {field}", datetime(2026, 6, 3, tzinfo=UTC), 7)}
    assert found == set(days.split())


def test_with_both_days_restricted_either_will_do() -> None:
    assert runs("0 0 13 * 5", datetime(2026, 2, 1, tzinfo=UTC), 4) == [
        "Fri 06 00:00 +0100",
        "Fri 13 00:00 +0100",
        "Fri 20 00:00 +0100",
        "Fri 27 00:00 +0100",
    ]
    assert runs("0 0 1 * 5", datetime(2026, 2, 27, tzinfo=UTC), 2) == ["Sun 01 00:00 +0100", "Fri 06 00:00 +0100"]


def test_a_step_of_days_is_no_restriction() -> None:
    """As in cron: a field that begins with * has to fit together with the other."""
    assert runs("0 0 */13 * 1", datetime(2026, 6, 1, tzinfo=UTC), 2) == ["Mon 27 00:00 +0200", "Mon 14 00:00 +0200"]


# ------------------------------------------------------------------------------------------------ changes of the clock


def test_what_the_clock_skips_is_run_once_when_it_goes_on() -> None:
    before = datetime(2026, 3, 28, 12, tzinfo=UTC)
    assert runs("30 2 * * *", before, 2) == ["Sun 29 03:00 +0200", "Mon 30 02:30 +0200"]
    assert runs("*/20 2 * * *", before, 2) == ["Sun 29 03:00 +0200", "Mon 30 02:00 +0200"]


def test_what_the_clock_shows_twice_is_run_the_first_time() -> None:
    assert runs("30 2 * * *", datetime(2026, 10, 24, 12, tzinfo=UTC), 2) == ["Sun 25 02:30 +0200", "Mon 26 02:30 +0100"]


def test_what_runs_every_hour_goes_by_the_time_that_passes() -> None:
    forward = runs("30 * * * *", datetime(2026, 3, 29, 0, tzinfo=UTC), 3)
    assert forward == ["Sun 29 01:30 +0100", "Sun 29 03:30 +0200", "Sun 29 04:30 +0200"]
    back = runs("30 * * * *", datetime(2026, 10, 24, 23, 45, tzinfo=UTC), 3)
    assert back == ["Sun 25 02:30 +0200", "Sun 25 02:30 +0100", "Sun 25 03:30 +0100"]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * sun"),
        ("@monthly", "0 0 1 * *"),
        ("@Yearly", "0 0 1 jan *"),
        ("@annually", "0 0 1 1 *"),
    ],
)
def test_short_names(short: str, long: str) -> None:
    after = datetime(2026, 6, 3, 5, tzinfo=UTC)
    assert runs(short, after, 3) == runs(long, after, 3)


def test_a_leap_day_on_a_given_weekday_is_found_however_far_it_is() -> None:
    found = cron("0 0 29 2 */7").next_after(datetime(2088, 3, 1, tzinfo=UTC))
    assert found.astimezone(BERLIN).date().isoformat() == "2128-02-29"


# ------------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    "text",
    [
        "", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *", "* * * 13 *", "* * * * 8",
        "a * * * *", "5-1 * * * *", "*/0 * * * *", "5/10 * * * *",
        "1,,2 * * * *", "* * L * *", "* * * * 5#2", "* * ? * *", "0 0 31 2,4 *",
        "0 0 30 2 *", "-1 * * * *", "* * * * mon-", "٣ * * * *", "@reboot", "1_0 * * * *", f"{'9' * 5000} * * * *",
    ],
)  # fmt: skip
def test_what_is_no_cron_expression_is_refused(text: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_cron(text, BERLIN, "jobs.toml: [jobs.a]: cron")
    assert caught.value.code == Code.INVALID_REQUEST
    assert caught.value.message.startswith("jobs.toml: [jobs.a]: cron is ")


@pytest.mark.parametrize("name", ["Mars/Olympus", "", "/etc/passwd", "../UTC", "Europe", "a\0b", "Europe/Berlin\n"])
def test_what_is_no_time_zone_is_refused(name: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_zone(name, "timezone")
    assert caught.value.code == Code.INVALID_REQUEST


# --------------------------------------------------------------------------------------- what was missed, and retries


def test_a_run_is_missed_once_its_time_is_over() -> None:
    last = datetime(2026, 6, 3, 3, 0, 1, tzinfo=UTC)
    daily, hourly = cron("0 3 * * *", ZoneInfo("UTC")), parse_every("1h", "every")
    assert not is_missed(daily, last, last + timedelta(hours=23))
    assert is_missed(daily, last, last + timedelta(hours=24))
    assert not is_missed(hourly, last, last + timedelta(minutes=59))
    assert is_missed(hourly, last, last + timedelta(minutes=60))


def test_a_run_that_lies_ahead_tells_nothing() -> None:
    now = datetime(2026, 6, 3, tzinfo=UTC)
    assert is_missed(Every(3600), now + timedelta(days=1), now)


def test_after_a_long_sleep_there_is_one_run_and_the_old_rhythm() -> None:
    start = datetime(2026, 6, 3, tzinfo=UTC)
    every = trigger(Every(600), start)
    assert every.get_next_fire_time(None, start) == start + timedelta(seconds=600)
    assert every.get_next_fire_time(start, start + timedelta(days=30, seconds=5)) == start + timedelta(days=30, seconds=600)
    daily = trigger(cron("0 3 * * *", ZoneInfo("UTC")), start)
    woken = start + timedelta(days=30, hours=12)
    assert daily.get_next_fire_time(start, woken) == start + timedelta(days=31, hours=3)


def test_retries_wait_twice_as_long_each_time_up_to_an_hour() -> None:
    now = datetime(2026, 6, 3, tzinfo=UTC)
    retries = Retries(random.Random(1))
    waits = []
    for _ in range(12):
        at = retries.again(("job", "thread"), Every(86_400), now)
        waits.append((at - now).total_seconds())
        now = at
    for wait, longest in zip(waits, [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600, 3600], strict=True):
        assert 0.8 * longest <= wait <= longest
    assert len({round(wait / longest, 6) for wait, longest in zip(waits[-3:], [3600] * 3, strict=True)}) == 3  # at random


def test_retries_come_no_later_than_the_schedule() -> None:
    now = datetime(2026, 6, 3, tzinfo=UTC)
    retries = Retries(random.Random(1))
    for _ in range(5):
        assert retries.again(("job", "t"), Every(15), now) <= now + timedelta(seconds=15)
    daily = cron("0 0 * * *", ZoneInfo("UTC"))
    assert retries.again(("job", "u"), daily, now) <= now + timedelta(seconds=10)


def test_success_ends_the_waiting_of_that_thread_alone() -> None:
    now = datetime(2026, 6, 3, tzinfo=UTC)
    retries = Retries(random.Random(1))
    for key in (("job", "a"), ("job", "b")) * 4:
        retries.again(key, Every(86_400), now)
    retries.settle(("job", "a"))
    assert retries.again(("job", "a"), Every(86_400), now) <= now + timedelta(seconds=10)
    assert retries.again(("job", "b"), Every(86_400), now) >= now + timedelta(seconds=128)
