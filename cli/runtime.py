"""How a command runs: its common options, its event loop, signals, and what becomes of errors."""

import asyncio
import gc
import inspect
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

import typer

from snapcore.errors import CheckpointWriterConflictError, Code, SnapcoreError

from .options import Database, Debug, Json, Quiet, Repo, Verbose
from .output import print_error, print_system_error

if TYPE_CHECKING:
    from snapcore.model import Checkpoint
    from snapcore.repository import Repository

__all__ = ["Exit", "Invocation", "UsageError", "command", "places", "resolve", "run_command", "secrets"]

DEFAULT_REPOSITORY: Final = "~/.snapcore"
GC_THRESHOLD: Final = 20_000  # a command makes many small values and hardly a cycle
M_ARENA_MAX: Final = -8  # of glibc's malloc.h
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


class UsageError(SnapcoreError):
    """The arguments do not make sense together."""

    default_code = Code.INVALID_REQUEST


@dataclass(frozen=True, slots=True)
class Invocation:
    """What every command is told: the repository, and how to print."""

    repo: str
    database: str | None
    json: bool
    quiet: bool
    verbose: bool
    debug: bool

    @asynccontextmanager
    async def repository(self) -> AsyncIterator["Repository"]:
        """The open repository, closed afterwards. A missing one is an error."""
        import snapcore

        _one_heap()
        async with snapcore.open_repository(self.repo, database=self.database, create=False) as repo:
            # The collector was off while modules were loaded; nothing loaded so far will ever be garbage.
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD)
            gc.enable()
            yield repo

    @property
    def tells(self) -> bool:
        """Whether a result for people is wanted."""
        return not self.json and not self.quiet


def _one_heap() -> None:
    """Let glibc keep one heap for all threads. Each thread's own would hold on to what large buffers once took: a capture's
    peak memory falls by a quarter. Before the first thread is started, and nothing where there is no glibc."""
    import ctypes

    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(M_ARENA_MAX, 1)


def command(
    function: Callable[Concatenate[Invocation, P], Awaitable[int]],
) -> Callable[..., None]:
    """Make an async function a command: common options in front, its return value as the exit code."""

    def run(
        *,
        repo: Repo = DEFAULT_REPOSITORY,
        database: Database = None,
        json: Json = False,
        quiet: Quiet = False,
        verbose: Verbose = False,
        debug: Debug = False,
        **own: Any,
    ) -> None:
        invocation = Invocation(repo, database, json, quiet, verbose, debug)
        raise typer.Exit(run_command(invocation, lambda: function(invocation, **own)))  # type: ignore[call-arg]

    mine = list(inspect.signature(function).parameters.values())[1:]
    common = [p for p in inspect.signature(run).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*mine, *common]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def run_command(invocation: Invocation, work: Callable[[], Awaitable[int]]) -> int:
    """The exit code of a command's work, after whatever went wrong was told."""
    try:
        code = asyncio.run(_with_signals(work))
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads any more; what is still buffered goes nowhere, so that the last flush is no error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.SIGNAL + signal.SIGPIPE
    except _SignalError as interrupt:
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
        print_system_error(error, as_json=invocation.json)
        return Exit.FAILED
    return code


def _tell_interruption(invocation: Invocation) -> None:
    if not invocation.quiet:
        with suppress(OSError):  # a terminal that is gone, say
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


class _SignalError(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def _with_signals(work: Callable[[], Awaitable[int]]) -> int:
    """Do the work; SIGINT and SIGTERM cancel it, so that its lease is given up. A second one ends the process at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    caught: list[int] = []

    def stop(number: int) -> None:
        caught.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if caught:
            raise _SignalError(caught[0]) from None
        raise


def secrets(from_environment: list[str] | None, from_files: list[str] | None) -> Mapping[str, bytes] | None:
    """The secrets named on the command line, by name; None when there are none. Values never come from arguments, which
    other users of the machine can see."""
    found: dict[str, bytes] = {}
    for name in from_environment or ():
        value = os.environb.get(os.fsencode(name))
        if value is None:
            raise UsageError(f"The environment variable {name} is not set.", hint="--secret-env takes a variable's name.")
        found[name] = value
    for given in from_files or ():
        name, separator, path = given.partition("=")
        if not (separator and name and path):
            raise UsageError("--secret-file takes NAME=PATH.")
        try:
            with open(path, "rb") as file:
                found[name] = file.read().rstrip(b"\r\n")
        except OSError as error:
            raise UsageError(f"The secret file {path} cannot be read: {error.strerror}.") from None
    for name, value in found.items():
        _check_length(name, value)
    return found or None


def _check_length(name: str, value: bytes) -> None:
    from snapcore.redaction import MIN_SECRET_BYTES

    if len(value.strip()) < MIN_SECRET_BYTES:
        raise UsageError(
            f"The value of secret '{name}' has less than {MIN_SECRET_BYTES} bytes and would be found everywhere.",
            hint="The command has no option to take it nevertheless: leave it out.",
        )


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
    """The checkpoint that `spec` names."""
    if thread is None and (spec == "latest" or spec.startswith("label:")):
        raise UsageError(f"'{spec}' needs a thread.", hint="Add --thread.")
    return await repo.resolve(spec, thread)
