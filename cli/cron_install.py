"""`snapcore cron install`: have systemd or cron start the jobs of a file."""

import dataclasses
import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from snapcore.errors import printable

from .output import print_json, print_line
from .runtime import Exit, Invocation, UsageError, command, usage_errors

if TYPE_CHECKING:
    from snapcore.cron.entries import Entry
    from snapcore.cron.installing import Installation
    from snapcore.cron.jobs import Plan

__all__ = ["cron_install"]

EXAMPLES: Final = {
    "cron install": (
        "snapcore cron install jobs.toml --all --systemd --dry-run",
        "snapcore cron install jobs.toml --job thread-1 --systemd --user --dry-run",
        "snapcore cron install jobs.toml --daemon --systemd --dry-run",
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """What the options ask for."""

    jobs: list[str]
    daemon: bool
    remove: bool
    systemd: bool
    system: bool
    environment_file: str | None


@command
async def cron_install(
    invocation: Invocation,
    *,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="The file with the jobs; else the snapcore.toml that is found.")
    ] = None,
    job: Annotated[
        list[str] | None, typer.Option("--job", "-j", metavar="NAME", help="This job; gc is one, too. Repeatable.")
    ] = None,
    every_job: Annotated[bool, typer.Option("--all", help="All jobs of the file, and gc where it has a time.")] = False,
    daemon: Annotated[bool, typer.Option("--daemon", help="One service that runs the scheduler, for all jobs.")] = False,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove", help="Take away what was installed for the file, by systemd or by cron as the other options say."
        ),
    ] = False,
    systemd: Annotated[bool, typer.Option("--systemd", help="Timers of systemd; the default where it runs.")] = False,
    crontab: Annotated[bool, typer.Option("--crontab", help="Lines in your crontab; the default elsewhere.")] = False,
    user: Annotated[bool, typer.Option("--user", help="Your own units; the default unless you are root.")] = False,
    system: Annotated[bool, typer.Option("--system", help="The system's units.")] = False,
    environment_file: Annotated[
        str | None,
        typer.Option("--environment-file", metavar="PATH", help="Where the jobs get variables from: NAME=VALUE lines."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be written, and write nothing.")] = False,
) -> int:
    """Have systemd or cron start the jobs of a file at their times.

    What would be written is shown first, and written when you say so; without a terminal it takes --yes, and ends with 2 else.
    Whatever was installed for the same file before is replaced: what you name is all that there is afterwards."""
    if file is not None:
        invocation = invocation.with_config(file)
    wanted = _wanted(job, every_job, daemon, remove, systemd, crontab, user, system, environment_file)
    path, plan = _plan(invocation, wanted)
    notes = [] if plan is None else _notes(invocation, plan, wanted)
    with usage_errors():
        installation = _installation(path, plan, wanted)
    if not installation.changes:
        _tell_result(invocation, installation, notes, done="nothing", ran=True)
        return Exit.DONE
    if not invocation.json:
        _show(installation, notes)
    if dry_run:
        _tell_result(invocation, installation, notes, done="", ran=False)
        return Exit.DONE
    if not yes and not _agreed(invocation):
        _tell_result(invocation, installation, notes, done="", ran=False)
        return Exit.USAGE if not _asks(invocation) else Exit.FAILED
    ran = installation.apply()
    _tell_result(invocation, installation, notes, done="removed" if wanted.remove else "installed", ran=ran)
    return Exit.DONE


def _wanted(
    job: list[str] | None,
    every_job: bool,
    daemon: bool,
    remove: bool,
    systemd: bool,
    crontab: bool,
    user: bool,
    system: bool,
    environment_file: str | None,
) -> _Wanted:
    """The options, where they make sense together."""
    from snapcore.cron.installing import has_systemd

    if [bool(job), every_job, daemon, remove].count(True) != 1:
        raise UsageError("Say what to install: --job NAME, --all or --daemon; or --remove.")
    if systemd and crontab:
        raise UsageError("--systemd and --crontab exclude each other.")
    if user and system:
        raise UsageError("--user and --system exclude each other.")
    by_systemd = systemd or daemon or (not crontab and (user or system or has_systemd()))
    if not by_systemd and (user or system):
        raise UsageError("A crontab is its user's own: --user and --system are for systemd.", hint="Run this as that user.")
    if daemon and crontab:
        raise UsageError("cron starts no service: --daemon is for systemd.")
    if environment_file is not None:
        environment_file = os.path.abspath(os.path.expanduser(environment_file))
        if not os.path.isfile(environment_file):
            raise UsageError(f"There is no file {printable(environment_file)}.", hint="Write it first; mode 0600 keeps it yours.")
    return _Wanted(job or [], daemon, remove, by_systemd, system or (not user and os.geteuid() == 0), environment_file)


def _plan(invocation: Invocation, wanted: _Wanted) -> "tuple[str, Plan | None]":
    """The file's path, and its jobs. To remove what was installed, the file need not be there any more."""
    from snapcore.cron.jobs import make_plan

    named = invocation.flags.get("config")
    if wanted.remove and named is not None:
        return os.path.abspath(os.path.expanduser(named)), None
    if invocation.loaded is None:
        raise UsageError("There is no file with jobs.", hint="Name it: snapcore cron install jobs.toml --all.")
    if wanted.remove:
        return invocation.loaded.path, None
    with usage_errors():
        return invocation.loaded.path, make_plan(invocation.loaded, tuple(wanted.jobs))


def _installation(path: str, plan: "Plan | None", wanted: _Wanted) -> "Installation":
    from snapcore.cron.entries import entries
    from snapcore.cron.installing import CrontabInstallation, SystemdInstallation

    found: list[Entry] = [] if plan is None or wanted.daemon else entries(plan)
    if wanted.systemd:
        return SystemdInstallation(
            path, found, system=wanted.system, daemon=wanted.daemon, environment_file=wanted.environment_file
        )
    return CrontabInstallation(path, found, environment_file=wanted.environment_file)


def _notes(invocation: Invocation, plan: "Plan", wanted: _Wanted) -> list[str]:
    """What the jobs need that they will not find there. Refuses a repository that only this shell knows of."""
    from snapcore.cron.entries import entries, needed_variables

    for key in ("repo", "database"):
        found = invocation.effective(key)
        if found.source == "flag" or (found.source == "environment" and wanted.environment_file is None):
            raise UsageError(
                f"The jobs would not know of the {'repository' if key == 'repo' else key} that {found.name} names.",
                hint=f"Write {key} = ... into the jobs file, or {found.name if found.source == 'environment' else 'it'} "
                "into a file of variables: --environment-file PATH.",
            )
    notes = []
    variables = needed_variables(plan)
    if variables and wanted.environment_file is None:
        notes.append(f"The jobs need {', '.join(variables)}, which they will not have: see --environment-file.")
    if variables and wanted.environment_file is not None:
        notes.append(f"{wanted.environment_file} has to set {', '.join(variables)}.")
    if wanted.environment_file is not None and os.stat(wanted.environment_file).st_mode & 0o077:
        notes.append(f"Others can read {wanted.environment_file}: chmod 600 keeps it yours.")
    if not wanted.systemd and any(entry.jitter for entry in entries(plan)):
        notes.append("cron has no jitter: the jobs start at their times.")
    if wanted.systemd and not wanted.system:
        notes.append("Your units stop when you log out, unless you say: loginctl enable-linger")
    return notes


# ---- what is shown


def _show(installation: "Installation", notes: list[str]) -> None:
    """All that would be written and run."""
    for change in installation.changes:
        if not change.path:
            print_line("# in your crontab:" if change.text is not None else "# the lines of this file leave your crontab")
        else:
            print_line(f"# {change.path}{'' if change.text is not None else ' is removed'}")
        for line in (change.text or "").splitlines():
            print_line(line)
        print_line()
    for words in installation.commands:
        print_line(f"$ {shlex.join(words)}")
    for note in notes:
        print_line(f"note: {note}")


def _asks(invocation: Invocation) -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and not invocation.json


def _agreed(invocation: Invocation) -> bool:
    """Whether the user says yes. Nobody is asked where nobody could see it."""
    from .signals import interruptible

    if not _asks(invocation):
        sys.stderr.write("snapcore: nothing was written: there is no terminal to ask on. Say --yes, or --dry-run.\n")
        return False
    sys.stderr.write("Write this? [y/N] ")
    sys.stderr.flush()
    with interruptible():
        return sys.stdin.readline().strip().lower() in ("y", "yes")


def _tell_result(invocation: Invocation, installation: "Installation", notes: list[str], *, done: str, ran: bool) -> None:
    if invocation.json:
        print_json(_fields(installation, notes, done=done, ran=ran))
        return
    if not invocation.tells or not done:
        return
    if done == "nothing":
        print_line("Nothing has to be changed.")
        return
    print_line(f"{done.capitalize()}.")
    if not ran:
        print_line("systemd does not run here. Where it does, run:")
        for words in installation.commands:
            print_line(f"  {shlex.join(words)}")


def _fields(installation: "Installation", notes: list[str], *, done: str, ran: bool) -> dict[str, Any]:
    return {
        "message_type": "cron install",
        "written": done in ("installed", "removed"),
        "changes": [{"path": change.path or None, "text": change.text} for change in installation.changes],
        "commands": [list(words) for words in installation.commands],
        "commands_run": ran and done in ("installed", "removed"),
        "notes": notes,
    }
