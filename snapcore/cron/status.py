"""How the jobs of a repository are doing: what the store says of their runs, beside what a settings file says of their times."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from snapcore.runs import JobRun, Outcome

from .jobs import GC, sandbox_name

if TYPE_CHECKING:
    from .jobs import Plan
    from .schedule import Schedule

__all__ = ["JobStatus", "State", "judge"]

LEAST_DELAY: Final = timedelta(minutes=2)  # timers of systemd may be a minute late
PART_OF_INTERVAL: Final = 10
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


class State:
    """What there is to say of a job in a thread."""

    OK: Final = "ok"
    FAILED: Final = "failed"  # the last run did
    OVERDUE: Final = "overdue"  # it has not gone well for longer than its schedule allows
    WAITING: Final = "waiting"  # it has not run yet, and need not have
    PAST: Final = "past"  # the settings do not have it, or its sandbox is not selected any more


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job in a thread. `last` is its newest run, `good` the newest that went well, `due` when the next one that goes well was
    or is expected at the latest; None where there is none, or nothing says."""

    job: str
    thread_id: str
    state: str
    last: JobRun | None = None
    good: JobRun | None = None
    due: datetime | None = None

    @property
    def bad(self) -> bool:
        """Whether somebody should look after it."""
        return self.state in (State.FAILED, State.OVERDUE)


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the settings say of one job. `thread_id` is None for a selector."""

    schedule: "Schedule"
    jitter: float
    thread_id: str | None


@dataclass(frozen=True, slots=True)
class _Line:
    """The runs of a job in a thread that `RunStore.last_runs` has."""

    last: JobRun
    good: JobRun | None


def judge(
    last_runs: Iterable[JobRun], plan: "Plan | None" = None, *, now: datetime, since: datetime | None = None
) -> list[JobStatus]:
    """The status of each job in each thread, ordered by both. `last_runs` is what the store's method of that name returns; `plan`
    what a settings file says, and `since` when that was last changed: a job that never ran is not overdue before its first time
    after that.

    A run is late that went well more than a tenth of the schedule's interval (two minutes at least) after its time; the job's
    jitter and what its last good run took come on top. Of a selector's sandboxes those are past that had no run for so long while
    others had one. Without a plan nothing is overdue.
    """
    jobs: dict[str, dict[str, _Line]] = defaultdict(dict)
    for run in last_runs:
        before = jobs[run.job].get(run.thread_id)
        good = run if run.good else None if before is None else before.good
        jobs[run.job][run.thread_id] = _Line(run, good)
    expected = {} if plan is None else _expected(plan)
    found: list[JobStatus] = []
    for name in sorted({*jobs, *expected}):
        threads = jobs.get(name, {})
        if plan is not None and name not in expected:
            found += [JobStatus(name, thread, State.PAST, line.last, line.good) for thread, line in threads.items()]
        elif name in expected and expected[name].thread_id is None:
            found += _selected(name, threads, expected[name], now, since)
        else:
            found += _single(name, threads, expected.get(name), now, since)
    return sorted(found, key=lambda status: (status.job, status.thread_id))


def _expected(plan: "Plan") -> dict[str, _Expected]:
    found = {
        job.name: _Expected(job.schedule, job.jitter, None if job.sandbox is None else job.thread_id(sandbox_name(job.sandbox)))
        for job in plan.jobs.values()
    }
    if plan.gc.schedule is not None:
        found[GC] = _Expected(plan.gc.schedule, 0.0, "")
    return found


def _single(
    name: str, threads: dict[str, _Line], expected: _Expected | None, now: datetime, since: datetime | None
) -> list[JobStatus]:
    """A job of one sandbox, or one of which nothing is known: its threads, one by one."""
    newest = max((line.last.started_at for thread, line in threads.items() if thread), default=0)
    found = []
    for thread, line in threads.items():
        # a run that failed before it came to a thread says something until one came to it
        superseded = thread == "" and line.last.started_at < newest
        elsewhere = expected is not None and thread not in ("", expected.thread_id)
        if superseded or elsewhere:
            found.append(JobStatus(name, thread, State.PAST, line.last, line.good))
        else:
            found.append(_judged(name, thread, line, expected, now, since))
    if expected is not None and expected.thread_id not in threads and not any(status.bad for status in found):
        found.append(_judged(name, expected.thread_id or "", None, expected, now, since))
    return found


def _selected(
    name: str, threads: dict[str, _Line], expected: _Expected, now: datetime, since: datetime | None
) -> list[JobStatus]:
    """A job of a selector: a sandbox that has gone is not missed as long as the job itself runs."""
    if not threads:
        return [_judged(name, "", None, expected, now, since)]
    newest = max(line.last.started_at for line in threads.values())
    found = []
    for thread, line in threads.items():
        begun = line.last.started_at
        was_lookup = thread == "" and not line.last.sandbox  # else it is a sandbox whose name makes no thread
        superseded = begun < newest and (was_lookup or _latest(expected, line.last) < _moment(newest))
        if superseded:
            found.append(JobStatus(name, thread, State.PAST, line.last, line.good))
        else:
            found.append(_judged(name, thread, line, expected, now, since))
    return found


def _judged(
    name: str, thread: str, line: _Line | None, expected: _Expected | None, now: datetime, since: datetime | None
) -> JobStatus:
    last, good = (None, None) if line is None else (line.last, line.good)
    due = None
    if expected is not None and (good is not None or since is not None):
        due = _latest(expected, good) if good is not None else _latest_after(expected, since or now, 0.0)
    if last is not None and last.outcome == Outcome.FAILED:
        state = State.FAILED
    elif due is not None and due < now:
        state = State.OVERDUE
    else:
        state = State.WAITING if last is None else State.OK
    return JobStatus(name, thread, state, last, good, due)


def _latest(expected: _Expected, run: JobRun) -> datetime:
    """By when the next run after this one should have gone well."""
    return _latest_after(expected, _moment(run.started_at), max(0, run.ended_at - run.started_at) / 1_000_000)


def _latest_after(expected: _Expected, moment: datetime, seconds: float) -> datetime:
    schedule = expected.schedule
    delay = max(LEAST_DELAY, timedelta(seconds=schedule.interval(moment)) / PART_OF_INTERVAL)
    return schedule.next_after(moment) + delay + timedelta(seconds=expected.jitter + seconds)


def _moment(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)
