"""`snapcore cron status`: what the scheduled jobs of a repository did last."""

import datetime
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from snapcore.errors import printable

from .output import moment, print_json, print_line, print_table, size, width
from .runtime import Exit, Invocation, UsageError, command, usage_errors

if TYPE_CHECKING:
    from snapcore.cron.jobs import Plan
    from snapcore.cron.status import JobStatus
    from snapcore.runs import JobRun

__all__ = ["cron_status"]

EXAMPLES: Final = {
    "cron status": (
        "snapcore cron status",
        "snapcore cron status jobs.toml --json",
        "snapcore cron status --runs 20",
    )
}
MOST_RUNS: Final = 2**63 - 1  # what a database can count
_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@command
async def cron_status(
    invocation: Invocation,
    *,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="The jobs file; else the settings file that is found.")
    ] = None,
    job: Annotated[list[str] | None, typer.Option("--job", metavar="NAME", help="Only this job. Repeatable.")] = None,
    runs: Annotated[int | None, typer.Option("--runs", metavar="N", help="List the last N runs instead.")] = None,
) -> int:
    """Show how scheduled jobs are doing: of each job and thread the last run, how it ended, and the last that went well.

    Ends with 3 when the last run of a job failed, or when it has not gone well for longer than its schedule allows, and with 0
    when all is well: a check for monitoring. What is overdue, and what never ran, is known of the jobs in FILE."""
    from snapcore.cron.status import judge

    if runs is not None and runs < 1:
        raise UsageError("--runs takes a number above 0.")
    if file is not None:
        invocation = invocation.with_config(file)
    plan, since = _plan(invocation)
    async with invocation.repository() as repo:
        last = await repo.checkpoints.last_runs()
        listed = None if runs is None else await _newest(repo.checkpoints, job, min(runs, MOST_RUNS))
    now = datetime.datetime.now(datetime.UTC)
    found = judge(last, plan, now=now, since=since)
    if job:
        known = {status.job for status in found}
        unknown = [name for name in job if name not in known]
        if unknown:
            raise UsageError(
                f"There is no job '{printable(unknown[0])}': it has no run, and is in no jobs file.",
                hint=f"There are: {', '.join(map(printable, sorted(known))) or 'none'}.",
            )
        found = [status for status in found if status.job in job]
    if invocation.json:
        fields: dict[str, Any] = {"message_type": "cron status", "jobs": [_status_fields(status) for status in found]}
        print_json(fields if listed is None else {**fields, "runs": [_run_fields(run) for run in listed]})
    elif invocation.tells and listed is not None:
        _tell_runs(listed, now)
    elif invocation.tells:
        _tell(found, now)
    return Exit.WARNINGS if any(status.bad for status in found) else Exit.DONE


def _plan(invocation: Invocation) -> "tuple[Plan | None, datetime.datetime | None]":
    """The jobs of the settings file, and when it was last changed. Nothing of it is run, so that it need not be named."""
    loaded = invocation.loaded
    if loaded is None or not loaded.settings.jobs:
        return None, None
    from snapcore.cron.jobs import make_plan

    changed = datetime.datetime.fromtimestamp(os.stat(loaded.path).st_mtime, datetime.UTC)
    with usage_errors():
        return make_plan(replace(loaded, named=True)), changed


async def _newest(store: Any, jobs: list[str] | None, limit: int) -> "list[JobRun]":
    if not jobs:
        return list(await store.runs(limit=limit))
    found = [run for name in dict.fromkeys(jobs) for run in await store.runs(job=name, limit=limit)]
    return sorted(found, key=lambda run: (run.started_at, run.id), reverse=True)[:limit]


# ---- for people


def _tell(found: "Sequence[JobStatus]", now: datetime.datetime) -> None:
    if not found:
        print_line("No job has run yet.")
        return
    rows = [
        (
            status.state,
            status.job,
            status.thread_id,
            "" if status.last is None else f"{status.last.outcome} {_age(status.last, now)}",
            "never" if status.good is None else _age(status.good, now),
            "" if status.last is None else _took(status.last),
            "" if status.last is None else size(status.last.bytes_stored),
        )
        for status in found
    ]
    print_table(("STATE", "JOB", "THREAD", "LAST RUN", "GOOD", "TOOK", "STORED"), rows, names=(1, 2), right=(5, 6))
    for status in found:
        if status.bad:
            _tell_problem(status, now)


def _tell_problem(status: "JobStatus", now: datetime.datetime) -> None:
    where = status.job if status.thread_id in ("", status.job) else f"{status.job} ({status.thread_id})"
    said = []
    if status.last is not None and status.state == "failed":
        said.append(f"{status.last.error or 'failed'}: {status.last.message or 'nothing is said of it'}")
    if status.due is not None and status.due < now:
        said.append(f"It should have gone well by {_iso(status.due)[:16]}Z.")
    print_line()
    text = textwrap.wrap(printable(f"{where}: {' '.join(said)}"), width(), subsequent_indent="  ", break_on_hyphens=False)
    sys.stdout.write("\n".join(text) + "\n")


def _tell_runs(runs: "Sequence[JobRun]", now: datetime.datetime) -> None:
    if not runs:
        print_line("No job has run yet.")
        return
    rows = [
        (
            _age(run, now),
            run.job,
            run.thread_id,
            run.outcome,
            _took(run),
            size(run.bytes_read),
            size(run.bytes_stored),
            run.error or ("" if not run.warnings else f"{run.warnings} warn."),
        )
        for run in runs
    ]
    print_table(("AGO", "JOB", "THREAD", "OUTCOME", "TOOK", "READ", "STORED", "ERROR"), rows, names=(1, 2, 7), right=(0, 4, 5, 6))


def _age(run: "JobRun", now: datetime.datetime) -> str:
    return _span(now.timestamp() - run.started_at / 1_000_000)


def _took(run: "JobRun") -> str:
    seconds = _seconds(run)
    return f"{seconds:.1f}s" if seconds < 60 else _span(seconds)


def _span(seconds: float) -> str:
    """How long, in its largest unit: `42s`, `5min`, `3h`, `12d`."""
    return next((f"{int(seconds // unit)}{name}" for unit, name in _UNITS if seconds >= unit), "0s")


# ---- for programs


def _status_fields(status: "JobStatus") -> dict[str, Any]:
    return {
        "job": status.job,
        "thread_id": status.thread_id,
        "state": status.state,
        "last_run": None if status.last is None else _run_fields(status.last),
        "last_good_run": None if status.good is None else _run_fields(status.good),
        "due": None if status.due is None else _iso(status.due),
    }


def _run_fields(run: "JobRun") -> dict[str, Any]:
    return {
        "id": run.id,
        "job": run.job,
        "thread_id": run.thread_id,
        "sandbox": run.sandbox,
        "started_at": moment(run.started_at, exact=True),
        "ended_at": moment(run.ended_at, exact=True),
        "seconds": _seconds(run),
        "outcome": run.outcome,
        "checkpoint_id": run.checkpoint_id,
        "files_read": run.files_read,
        "bytes_read": run.bytes_read,
        "bytes_stored": run.bytes_stored,
        "forgotten": run.forgotten,
        "warnings": run.warnings,
        "error": run.error,
        "message": run.message,
    }


def _seconds(run: "JobRun") -> float:
    return max(0, run.ended_at - run.started_at) / 1_000_000


def _iso(when: datetime.datetime) -> str:
    return when.astimezone(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
