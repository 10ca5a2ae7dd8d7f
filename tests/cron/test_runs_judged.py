"""What the runs in a store and the schedules in a file say together about how jobs are doing."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from snapcore.cron.jobs import Plan, make_plan
from snapcore.cron.status import JobStatus, State, judge
from snapcore.runs import JobRun, Outcome
from snapcore.settings_files import load_settings
from snapcore.testing.run_suite import new_run

NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)


def ago(*, job: str = "job", thread: str = "job", outcome: str = Outcome.UNCHANGED, took: float = 0, **span: float) -> JobRun:
    """A run that began so long ago."""
    began = round((NOW - timedelta(**span)).timestamp() * 1_000_000)
    return new_run(began, job, thread, outcome=outcome, ended_at=began + round(took * 1_000_000))


def plan_of(folder: Path, text: str) -> Plan:
    path = folder / "jobs.toml"
    path.write_text(text)
    return make_plan(load_settings(str(path)))


@pytest.fixture
def hourly(tmp_path: Path) -> Plan:
    return plan_of(tmp_path, '[jobs.job]\nsandbox = "w"\nevery = "1h"\n')


def judged(runs: list[JobRun], plan: Plan | None = None, **options: datetime) -> dict[tuple[str, str], str]:
    in_order = sorted(runs, key=lambda run: (run.job, run.thread_id, run.started_at))
    return {(s.job, s.thread_id): s.state for s in judge(in_order, plan, now=NOW, **options)}


def only(found: list[JobStatus]) -> JobStatus:
    (status,) = found
    return status


# ---- without a file


def test_without_a_file_only_what_failed_last_is_bad() -> None:
    runs = [
        ago(days=300),
        ago(job="b", days=2),
        ago(job="b", days=1, outcome=Outcome.FAILED),
        ago(job="c", days=1, outcome=Outcome.LOCKED),
        ago(job="d", days=1, outcome=Outcome.INTERRUPTED),
        ago(job="gc", thread="", days=1, outcome=Outcome.COLLECTED),
    ]
    assert judged(runs) == {
        ("job", "job"): State.OK,
        ("b", "job"): State.FAILED,
        ("c", "job"): State.OK,
        ("d", "job"): State.OK,
        ("gc", ""): State.OK,
    }
    assert [status.job for status in judge(runs, now=NOW) if status.bad] == ["b"]


def test_no_runs_and_no_file_say_nothing() -> None:
    assert judge([], now=NOW) == []


def test_the_last_run_and_the_last_good_one_are_told_apart() -> None:
    good, bad = ago(hours=2), ago(hours=1, outcome=Outcome.FAILED)
    status = only(judge([good, bad], now=NOW))
    assert (status.last, status.good) == (bad, good)
    assert only(judge([good], now=NOW)).last == good
    assert only(judge([bad], now=NOW)).good is None


def test_a_failure_before_there_was_a_thread_counts_until_a_thread_is_reached() -> None:
    nowhere = ago(thread="", hours=2, outcome=Outcome.FAILED)
    assert judged([nowhere, ago(hours=3)]) == {("job", ""): State.FAILED, ("job", "job"): State.OK}
    assert judged([nowhere, ago(hours=1)]) == {("job", ""): State.PAST, ("job", "job"): State.OK}


# ---- with a file


@pytest.mark.parametrize(
    ("minutes", "state"), [(0, State.OK), (60, State.OK), (65, State.OK), (67, State.OVERDUE), (60 * 24 * 365, State.OVERDUE)]
)
def test_what_did_not_go_well_in_time_is_overdue(hourly: Plan, minutes: float, state: str) -> None:
    """A tenth of the interval is allowed for."""
    assert judged([ago(minutes=minutes)], hourly) == {("job", "job"): state}


@pytest.mark.parametrize("outcome", [Outcome.LOCKED, Outcome.INTERRUPTED, Outcome.FAILED])
def test_only_runs_that_went_well_count(hourly: Plan, outcome: str) -> None:
    state = State.FAILED if outcome == Outcome.FAILED else State.OVERDUE
    assert judged([ago(hours=3), ago(minutes=1, outcome=outcome)], hourly) == {("job", "job"): state}


def test_jitter_and_what_a_run_takes_are_allowed_for(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, '[jobs.job]\nsandbox = "w"\nevery = "1h"\njitter = "30min"\n')
    assert judged([ago(minutes=95)], plan) == {("job", "job"): State.OK}
    assert judged([ago(minutes=97)], plan) == {("job", "job"): State.OVERDUE}
    assert judged([ago(minutes=97, took=300)], plan) == {("job", "job"): State.OK}


def test_short_intervals_are_allowed_two_minutes(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, '[jobs.job]\nsandbox = "w"\nevery = "10s"\n')
    assert judged([ago(seconds=129)], plan) == {("job", "job"): State.OK}
    assert judged([ago(seconds=131)], plan) == {("job", "job"): State.OVERDUE}


def test_an_expression_is_judged_in_its_time_zone(tmp_path: Path) -> None:
    """Noon UTC is 13:00 in Berlin in March: a run at 12:30 there is due since half an hour; an interval is a day."""
    text = '[jobs.job]\nsandbox = "w"\ncron = "{} * * *"\ntimezone = "Europe/Berlin"\n'
    assert judged([ago(hours=24, minutes=30)], plan_of(tmp_path, text.format("30 12"))) == {("job", "job"): State.OK}
    assert judged([ago(hours=27, minutes=30)], plan_of(tmp_path, text.format("30 9"))) == {("job", "job"): State.OVERDUE}
    assert only(judge([ago(hours=30)], plan_of(tmp_path, text.format("0 9")), now=NOW)).due == NOW - timedelta(hours=25.6)


def test_a_job_that_never_ran_waits_for_its_first_time(hourly: Plan) -> None:
    assert judged([], hourly) == {("job", "job"): State.WAITING}
    assert judged([], hourly, since=NOW - timedelta(minutes=65)) == {("job", "job"): State.WAITING}
    assert judged([], hourly, since=NOW - timedelta(minutes=67)) == {("job", "job"): State.OVERDUE}


def test_a_job_that_only_failed_and_one_that_only_was_locked(hourly: Plan) -> None:
    since = NOW - timedelta(days=1)
    assert judged([ago(hours=3, outcome=Outcome.FAILED)], hourly, since=since) == {("job", "job"): State.FAILED}
    assert judged([ago(hours=3, outcome=Outcome.LOCKED)], hourly, since=since) == {("job", "job"): State.OVERDUE}


def test_what_the_file_does_not_have_is_past(hourly: Plan) -> None:
    runs = [
        ago(minutes=1),
        ago(thread="former", minutes=5, outcome=Outcome.FAILED),
        ago(job="removed", days=9, outcome=Outcome.FAILED),
        ago(job="gc", thread="", days=9, outcome=Outcome.FAILED),
    ]
    assert judged(runs, hourly) == {
        ("gc", ""): State.PAST,
        ("job", "former"): State.PAST,
        ("job", "job"): State.OK,
        ("removed", "job"): State.PAST,
    }


def test_a_job_that_failed_before_its_first_thread_is_told_once(hourly: Plan) -> None:
    assert judged([ago(thread="", minutes=5, outcome=Outcome.FAILED)], hourly) == {("job", ""): State.FAILED}


def test_gc_is_a_job_of_the_file(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, '[cron.gc]\nevery = "1d"\n[jobs.job]\nsandbox = "w"\nevery = "1h"\n')
    collected = ago(job="gc", thread="", hours=27, outcome=Outcome.COLLECTED)
    assert judged([collected, ago(minutes=1)], plan) == {("gc", ""): State.OVERDUE, ("job", "job"): State.OK}


# ---- selectors


@pytest.fixture
def selecting(tmp_path: Path) -> Plan:
    return plan_of(tmp_path, '[jobs.job]\nselect = "folders:boxes/*"\nthread = "{name}"\nevery = "1h"\n')


def test_a_sandbox_that_has_gone_is_not_missed(selecting: Plan) -> None:
    runs = [ago(thread="a", minutes=1), ago(thread="b", hours=3), ago(thread="c", hours=3, outcome=Outcome.FAILED)]
    assert judged(runs, selecting) == {("job", "a"): State.OK, ("job", "b"): State.PAST, ("job", "c"): State.PAST}


def test_sandboxes_that_fail_are_told_as_long_as_they_are_there(selecting: Plan) -> None:
    runs = [ago(thread="a", minutes=1), ago(thread="b", minutes=2, outcome=Outcome.FAILED)]
    assert judged(runs, selecting) == {("job", "a"): State.OK, ("job", "b"): State.FAILED}
    locked = [ago(thread="a", minutes=1), ago(thread="b", hours=5), ago(thread="b", minutes=2, outcome=Outcome.LOCKED)]
    assert judged(locked, selecting) == {("job", "a"): State.OK, ("job", "b"): State.OVERDUE}


def test_a_selector_whose_sandboxes_all_have_no_run_is_overdue(selecting: Plan) -> None:
    runs = [ago(thread="a", hours=3), ago(thread="b", hours=3, seconds=5), ago(thread="c", hours=9)]
    found = judged(runs, selecting)
    assert found == {("job", "a"): State.OVERDUE, ("job", "b"): State.OVERDUE, ("job", "c"): State.PAST}


def test_a_selector_that_cannot_be_asked_has_failed(selecting: Plan) -> None:
    down = ago(thread="", minutes=1, outcome=Outcome.FAILED)
    assert judged([ago(thread="a", minutes=50), down], selecting) == {("job", ""): State.FAILED, ("job", "a"): State.OK}
    assert judged([ago(thread="a", seconds=5), down], selecting) == {("job", ""): State.PAST, ("job", "a"): State.OK}


def test_a_sandbox_whose_name_makes_no_thread_has_failed_as_long_as_it_is_there(selecting: Plan) -> None:
    refused = msgspec.structs.replace(ago(thread="", minutes=1, outcome=Outcome.FAILED), sandbox="/boxes/\\n")
    assert judged([ago(thread="a", seconds=5), refused], selecting) == {("job", ""): State.FAILED, ("job", "a"): State.OK}
    renamed = msgspec.structs.replace(ago(thread="", hours=3, outcome=Outcome.FAILED), sandbox="/boxes/\\n")
    assert judged([ago(thread="a", seconds=5), renamed], selecting) == {("job", ""): State.PAST, ("job", "a"): State.OK}


def test_a_selector_that_never_ran_waits(selecting: Plan) -> None:
    assert judged([], selecting) == {("job", ""): State.WAITING}
    assert judged([], selecting, since=NOW - timedelta(days=1)) == {("job", ""): State.OVERDUE}
