"""How a command runs: its common options, its event loop, signals, and what becomes of errors."""

import asyncio
import inspect
import os
import select
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, get_args

import typer

from snapcore.errors import CheckpointWriterConflictError, Code, SnapcoreError, SnapshotError

from .effective import PROGRESS
from .invocation import THREAD_HINT, Invocation, UsageError, address_errors, usage_errors
from .options import Config, Database, Debug, Json, NoConfig, Progress, Quiet, Repo, Verbose
from .output import print_error, print_system_error
from .signals import SignalError, interruptible, with_signals

if TYPE_CHECKING:
    from snapcore.model import Checkpoint
    from snapcore.repository import Repository

__all__ = [
    "Exit",
    "Invocation",
    "UsageError",
    "address_errors",
    "check_wait",
    "command",
    "interruptible",
    "places",
    "resolve",
    "run_command",
    "usage_errors",
]

P = ParamSpec("P")


class Exit:
    """Exit codes; see docs/cli.md."""

    DONE: Final = 0
    FAILED: Final = 1
    USAGE: Final = 2
    WARNINGS: Final = 3
    NO_REPOSITORY: Final = 10
    WRITER_HELD: Final = 11
    SIGNAL: Final = 128  # plus the signal's number: 130 interrupted, 141 broken pipe, 143 terminated


_current: Final[ContextVar[Invocation]] = ContextVar("invocation")


def command(
    function: Callable[Concatenate[Invocation, P], Awaitable[int]],
) -> Callable[..., None]:
    """Make an async function a command: common options behind its own, its return value as the exit code.

    A parameter `thread` without a default need not be given on the command line: it is the thread that the settings name then.
    """
    own_parameters = list(inspect.signature(function).parameters.values())[1:]
    needs_thread = any(_is_needed_thread(parameter) for parameter in own_parameters)
    mine = [_optional(parameter) if _is_needed_thread(parameter) else parameter for parameter in own_parameters]

    def run(
        *,
        ctx: typer.Context,
        repo: Repo = None,
        database: Database = None,
        config: Config = None,
        no_config: NoConfig = False,
        progress: Progress = None,
        json: Json = False,
        quiet: Quiet = False,
        verbose: Verbose = False,
        debug: Debug = False,
        **own: Any,
    ) -> None:
        if progress is not None and progress not in PROGRESS:
            raise typer.BadParameter(f"it is one of {', '.join(PROGRESS)}.", ctx=ctx, param_hint="--progress")
        # What came from a variable is looked up again, so that it is known to be from there.
        if "thread" in own and _is_from_environment(ctx, "thread"):
            own["thread"] = None
        given = {"repo": repo, "database": database, "config": config, "progress": progress, "thread": own.get("thread")}
        flags = {name: each for name, each in given.items() if isinstance(each, str) and not _is_from_environment(ctx, name)}
        invocation = Invocation(json=json, quiet=quiet, verbose=verbose, debug=debug, flags=flags, no_config=no_config)

        ended: list[int] = []

        async def work() -> int:
            _current.set(invocation)
            if needs_thread:
                own["thread"] = invocation.thread()
            ended.append(await function(invocation, **own))  # type: ignore[call-arg]
            return ended[0]

        code = run_command(invocation, work)
        if own.get("exit_code") and code == Exit.FAILED and code not in ended:
            code = Exit.USAGE  # `diff --exit-code`: that something differs is told from trouble, as `diff` and `grep` tell it
        raise typer.Exit(code)

    common = [p for p in inspect.signature(run).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*mine, *common]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _is_needed_thread(parameter: inspect.Parameter) -> bool:
    return parameter.name == "thread" and parameter.default is inspect.Parameter.empty


def _optional(parameter: inspect.Parameter) -> inspect.Parameter:
    """The same parameter for the command line, where it may be left out."""
    kind, *details = get_args(parameter.annotation)
    return parameter.replace(default=None, annotation=Annotated[(kind | None, *details)])


def _is_from_environment(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


def run_command(invocation: Invocation, work: Callable[[], Awaitable[int]]) -> int:
    """The exit code of a command's work, after whatever went wrong was told."""
    try:
        code = asyncio.run(with_signals(work))
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads any more; what is still buffered goes nowhere, so that the last flush is no error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.SIGNAL + signal.SIGPIPE
    except SignalError as interrupt:
        _tell_interruption(invocation)
        return Exit.SIGNAL + interrupt.number
    except KeyboardInterrupt:
        _tell_interruption(invocation)
        return Exit.SIGNAL + signal.SIGINT
    except SnapcoreError as error:
        if invocation.debug:
            traceback.print_exc()
        print_error(error, as_json=invocation.json)
        return _exit_code(error)
    except OSError as error:
        # Of this machine, not of a store or a sandbox, which have errors of their own: stdout on a full disk, say.
        if invocation.debug:
            traceback.print_exc()
        if isinstance(error, FileNotFoundError) and _is_current_folder_gone():
            gone = SnapshotError("The current folder is gone.", code=Code.MISSING_WORKSPACE, hint="Change to one that exists.")
            print_error(gone, as_json=invocation.json)
        else:
            print_system_error(error, as_json=invocation.json)
        return Exit.FAILED
    return code


def _is_current_folder_gone() -> bool:
    """Whether there is nothing that a relative path could start at."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _tell_interruption(invocation: Invocation) -> None:
    if not invocation.quiet:
        with suppress(OSError, ValueError):  # a terminal that is gone, say
            if select.select([], [sys.stderr], [], 0)[1]:  # else it is a pipe that nobody empties
                sys.stderr.write("interrupted\n")
                sys.stderr.flush()


def _exit_code(error: SnapcoreError) -> int:
    if isinstance(error, UsageError) or error.code is Code.INVALID_ID:
        return Exit.USAGE
    if error.code is Code.NO_REPOSITORY:
        return Exit.NO_REPOSITORY
    if isinstance(error, CheckpointWriterConflictError):
        return Exit.WRITER_HELD
    return Exit.FAILED


def check_wait(wait: float | None) -> None:
    """Refuse a `--wait` that is no time to wait."""
    if wait is not None and not wait >= 0:  # NaN is not, either
        raise UsageError("--wait takes a number of seconds that is not negative.")


def places(directory: str | None, roots: list[str] | None) -> tuple[str, dict[str, str] | None]:
    """The sandbox's address, and where each root is when there are several, from DIR and `--root NAME=DIR`.

    Several roots are folders of this host.
    """
    if not roots:
        if directory is None:
            raise UsageError("There is no folder.", hint="Name it, or give --root NAME=DIR.")
        return directory, None
    if directory is not None:
        raise UsageError("DIR and --root exclude each other.")
    named: dict[str, str] = {}
    for given in roots:
        name, separator, path = given.partition("=")
        if not (separator and name and path):
            raise UsageError("--root takes NAME=DIR.")
        if name in named:
            raise UsageError(f"--root names '{name}' twice.", hint="Give each folder a name of its own.")
        named[name] = os.path.abspath(path)
    return os.getcwd(), named


async def resolve(repo: "Repository", spec: str, thread: str | None) -> "Checkpoint":
    """The checkpoint that `spec` names; `latest` and `label:L` are of the thread that the settings name, when none is given."""
    if thread is None and (spec == "latest" or spec.startswith("label:")):
        thread = _current.get().effective("thread").value
        if thread is None:
            raise UsageError(f"'{spec}' needs a thread.", hint=THREAD_HINT)
    with usage_errors():
        return await repo.resolve(spec, thread)
