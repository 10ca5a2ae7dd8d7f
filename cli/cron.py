"""Checkpoints on a schedule: the jobs of a settings file, run by a scheduler of their own or by the system's."""

import contextlib
import dataclasses
import logging
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .output import print_json
from .runtime import Exit, Invocation, UsageError, command, usage_errors

if TYPE_CHECKING:
    from snapcore.cron.jobs import Plan
    from snapcore.cron.logs import Events, Scrubber
    from snapcore.runs import JobRun

__all__ = ["EXAMPLES", "cron_run"]

EXAMPLES: Final = {
    "cron run": (
        "snapcore cron run jobs.toml",
        "snapcore cron run jobs.toml --once",
        "snapcore cron run jobs.toml --once --job thread-1",
        "snapcore cron run jobs.toml --log-format json",
    )
}


@command
async def cron_run(
    invocation: Invocation,
    *,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="The file with the jobs; else the snapcore.toml that is found.")
    ] = None,
    job: Annotated[
        list[str] | None, typer.Option("--job", "-j", metavar="NAME", help="Only this job; gc is one, too. Repeatable.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Run the jobs now, once, and end.")] = False,
    log_format: Annotated[
        str | None, typer.Option("--log-format", metavar="json|text", help="How events are written; text on a terminal.")
    ] = None,
) -> int:
    """Capture sandboxes as the jobs of a file say, on schedule.

    It runs until SIGTERM or SIGINT, and reads the file again on SIGHUP. What it does is logged on stderr, a line an event. What
    should have been captured while it was not running is captured when it starts.

    With --once it runs all jobs, or those that are named, and ends with 0; with 3 when there were warnings, 11 when other writers
    held all threads, 1 when anything failed. That is for crontab, systemd timers and Kubernetes. gc runs only if --job names it.
    """
    if file is not None:
        invocation = invocation.with_config(file)
    with _hang_ups_wait(not once):
        return await _run(invocation, job, once, log_format)


async def _run(invocation: Invocation, job: list[str] | None, once: bool, log_format: str | None) -> int:
    from snapcore.cron.logs import Events, Scrubber, logging_to

    plan = _plan(invocation, job)
    form = log_format or ("text" if sys.stderr.isatty() and not invocation.json else "json")
    if form not in ("json", "text"):
        raise UsageError("--log-format is json or text.")
    level = logging.DEBUG if invocation.verbose else logging.WARNING if invocation.quiet else logging.INFO
    events, scrubber = Events(), Scrubber()
    with logging_to(sys.stderr, "text" if form == "text" else "json", level, scrubber):
        if once:
            return await _once(invocation, plan, events, scrubber, job or [])
        return await _daemon(invocation, plan, events, scrubber, job)


@contextlib.contextmanager
def _hang_ups_wait(wait: bool) -> Iterator[None]:
    """With `wait`, SIGHUP does not end the process before the scheduler can hear it; what it asks for is done then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK if wait else signal.SIG_UNBLOCK, (signal.SIGHUP,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _plan(invocation: Invocation, job: list[str] | None) -> "Plan":
    """What the file says now."""
    from snapcore.cron.jobs import make_plan

    fresh = dataclasses.replace(invocation)  # which reads the file again
    if fresh.loaded is None:
        raise UsageError("There is no file with jobs.", hint="Name it: snapcore cron run jobs.toml.")
    with usage_errors():
        return make_plan(fresh.loaded, tuple(job or ()), repo=fresh.repo, database=fresh.database)


async def _daemon(invocation: Invocation, plan: "Plan", events: "Events", scrubber: "Scrubber", job: list[str] | None) -> int:
    from snapcore.cron.daemon import Daemon

    daemon = Daemon(plan, lambda: _plan(invocation, job), invocation.repository, events, scrubber)
    number = await daemon.run()
    return Exit.SIGNAL + number if number == signal.SIGINT else Exit.DONE


async def _once(invocation: Invocation, plan: "Plan", events: "Events", scrubber: "Scrubber", names: list[str]) -> int:
    import msgspec

    from snapcore.cron.jobs import GC
    from snapcore.cron.running import Logged, Runner, run_once

    logged = Logged(events)
    async with invocation.repository() as repo:
        runner = Runner(repo, logged, scrubber, folder=plan.folder, may_run=plan.may_run)
        runs = await run_once(plan, runner, events, gc=GC in names)
    if invocation.json:
        print_json({"message_type": "cron run", "runs": [msgspec.to_builtins(run) for run in runs]})
    return _exit_code(runs, unrecorded=logged.unrecorded)


def _exit_code(runs: "list[JobRun]", *, unrecorded: bool) -> int:
    from snapcore.runs import Outcome

    if any(run.outcome == Outcome.FAILED for run in runs):
        return Exit.FAILED
    if unrecorded or any(run.warnings for run in runs):
        return Exit.WARNINGS
    if runs and all(run.outcome == Outcome.LOCKED for run in runs):
        return Exit.WRITER_HELD
    return Exit.DONE
