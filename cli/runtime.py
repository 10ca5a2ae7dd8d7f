"""How a command runs: its common options, its event loop, signals, and what becomes of errors."""

import asyncio
import gc
import inspect
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, get_args

import typer

from snapcore.errors import CheckpointWriterConflictError, Code, SnapcoreError, printable

from .effective import PROGRESS, VARIABLES, Effective, effective, effective_policy, secret_sources
from .options import Config, Database, Debug, Json, NoConfig, Progress, Quiet, Repo, Verbose
from .output import print_error, print_system_error

if TYPE_CHECKING:
    from snapcore.model import Checkpoint
    from snapcore.repository import Repository
    from snapcore.selection import FilePolicy
    from snapcore.settings import SecretSource
    from snapcore.settings_files import Loaded

__all__ = [
    "Exit",
    "Invocation",
    "UsageError",
    "address_errors",
    "command",
    "interruptible",
    "places",
    "resolve",
    "run_command",
    "usage_errors",
]

GC_THRESHOLD: Final = 20_000  # a command makes many small values and hardly a cycle
M_ARENA_MAX: Final = -8  # of glibc's malloc.h
THREAD_HINT: Final = "Name it with --thread, or once and for all: SNAPCORE_THREAD, or thread = ... in snapcore.toml."
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


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """What every command is told: how to print, and what flags, environment variables and the settings file say.

    The settings file is read when something is asked for that it could say; all these raise `UsageError` when it makes no sense.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    flags: Mapping[str, str] = field(
        default_factory=dict
    )  # of repo, database, thread, progress, config: those on the command line
    no_config: bool = False

    @cached_property
    def loaded(self) -> "Loaded | None":
        """The settings file: the one that was named, else the nearest. None when there is none."""
        from snapcore.settings_files import find_settings, load_settings

        named = self.flags.get("config")
        if self.no_config:
            if named is not None:
                raise UsageError("--config and --no-config exclude each other.")
            return None
        named = named or os.environ.get(VARIABLES["config"])
        with usage_errors():
            if named:
                return load_settings(named)
            try:
                return find_settings(os.getcwd())
            except FileNotFoundError:  # the current folder was removed
                return None

    def with_config(self, path: str) -> "Invocation":
        """The same with the settings file at `path`, as if `--config` had named it."""
        if self.no_config or "config" in self.flags:
            raise UsageError("The settings file is named twice.", hint="Leave out --config and --no-config.")
        return replace(self, flags={**self.flags, "config": path})

    def effective(self, key: str) -> Effective:
        """What holds of `repo`, `database`, `thread` or `progress`, and where it comes from."""
        return effective(key, self.flags.get(key), self.loaded)

    @cached_property
    def repo(self) -> str:
        """The repository's address."""
        return self.effective("repo").value or ""

    @cached_property
    def database(self) -> str | None:
        """The URL of the repository's database. None: where the repository has it."""
        return self.effective("database").value

    @cached_property
    def progress(self) -> str:
        """How progress is told: `auto`, `plain` or `none`."""
        found = self.effective("progress")
        if found.value not in PROGRESS:
            raise UsageError(f"{found.name} is none of {', '.join(PROGRESS)}.")
        return str(found.value)

    def thread(self) -> str:
        """The thread that the settings name, or `UsageError`. A command's parameter `thread: Thread` has it already."""
        found = self.effective("thread").value
        if found is None:
            raise UsageError("There is no thread.", hint=THREAD_HINT)
        return found

    def policy(self, **flags: Any) -> "FilePolicy":
        """The file policy that holds: the one of the settings file, and what flags say. `flags` have the names of the fields of
        `PolicySettings`, and None where the command line says nothing:

            policy = invocation.policy(include=include, exclude=exclude, everything=everything, with_git=with_git)

        Exclusions add to the file's, everything else replaces what the file says. Declare the flags as in `options`: `Everything`
        and its like are `bool | None`, None by default.
        """
        with usage_errors():
            return effective_policy(flags, self.loaded).policy()

    def secrets(
        self,
        variables: list[str] | None = None,
        files: list[str] | None = None,
        commands: list[str] | None = None,
        *,
        needed: bool = True,
        put_back: bool = False,
    ) -> Mapping[str, bytes] | None:
        """The secrets' values by name, of the settings file and of the options `SecretEnv`, `SecretFile` and `SecretCommand`, of
        which one with the same name goes before the file's. None when there are none.

        Blocks until they are there, and can be interrupted; call it before the repository is opened. With `needed=False`, what
        the file names and cannot be had is told on stderr and left out. `put_back` says that the values will be written into
        files: none are that a file names which was merely found, since an agent could have named them.
        """
        with usage_errors():
            flags = secret_sources(variables, files, commands)
        written = {} if self.loaded is None else self.loaded.settings.secrets
        written = {name: source for name, source in written.items() if name not in flags}
        if not flags and not written:
            return None
        found: dict[str, bytes] = {}
        with interruptible(), usage_errors():
            if self.loaded is not None and written:
                if put_back and not self.loaded.named:
                    raise UsageError(
                        f"--reinject puts back no secret that a file names which was found: {printable(self.loaded.path)}.",
                        hint=f"If you trust it, name it: --config {printable(self.loaded.path)}. Or leave it out: --no-config.",
                    )
                found.update(self._written_secrets(written, self.loaded, needed=needed))
            found.update(_values(flags, os.curdir, may_run=True))
        return found or None

    def _written_secrets(self, sources: "Mapping[str, SecretSource]", loaded: "Loaded", *, needed: bool) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name, source in sources.items():
            try:
                found.update(_values({name: source}, loaded.folder, may_run=loaded.named))
            except SnapcoreError as error:
                if needed:
                    raise
                if not self.quiet:
                    sys.stderr.write(f"warning: {printable(error.message)} What was redacted of it counts as different.\n")
        return found

    @asynccontextmanager
    async def repository(self) -> AsyncIterator["Repository"]:
        """The open repository, closed afterwards. A missing one is an error, and an address that makes no sense wrong usage."""
        import snapcore

        self._tell_repository()
        _one_heap()
        opening = snapcore.open_repository(self.repo, database=self.database, create=False)
        with address_errors():
            repo = await opening
        try:
            # The collector was off while modules were loaded; nothing loaded so far will ever be garbage.
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD)
            gc.enable()
            yield repo
        finally:
            await repo.close()

    def _tell_repository(self) -> None:
        """Say on a terminal that a file which was merely found leads to another repository: an agent could have written it."""
        keys = [key for key in ("repo", "database") if (found := self.effective(key)).source == "file" and found.value]
        if keys and self.loaded is not None and not self.loaded.named and self.tells and sys.stderr.isatty():
            sys.stderr.write(f"{' and '.join(keys)} as in {printable(self.loaded.path)}\n")

    @property
    def tells(self) -> bool:
        """Whether a result for people is wanted."""
        return not self.json and not self.quiet


_current: Final[ContextVar[Invocation]] = ContextVar("invocation")


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
        # What came from a variable is looked up again, so that it is known to be from there.
        own = {name: None if _is_from_environment(ctx, name) else value for name, value in own.items()}
        given = {"repo": repo, "database": database, "config": config, "progress": progress, "thread": own.get("thread")}
        flags = {name: each for name, each in given.items() if isinstance(each, str) and not _is_from_environment(ctx, name)}
        invocation = Invocation(json=json, quiet=quiet, verbose=verbose, debug=debug, flags=flags, no_config=no_config)

        async def work() -> int:
            _current.set(invocation)
            if needs_thread:
                own["thread"] = invocation.thread()
            return await function(invocation, **own)  # type: ignore[call-arg]

        raise typer.Exit(run_command(invocation, work))

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


@contextmanager
def usage_errors() -> Iterator[None]:
    """What the engine refuses of options and settings is wrong usage."""
    try:
        yield
    except SnapcoreError as error:
        if isinstance(error, UsageError) or error.code is not Code.INVALID_REQUEST:
            raise
        raise UsageError(error.message, hint=error.hint) from None


@contextmanager
def address_errors() -> Iterator[None]:
    """An address of a repository or a database that leads nowhere, because nobody could understand it, is wrong usage."""
    try:
        yield
    except SnapcoreError as error:
        if error.code not in (Code.UNKNOWN_SCHEME, Code.INVALID_REQUEST):
            raise
        raise UsageError(error.message, code=error.code, hint=error.hint) from None


def _values(sources: "Mapping[str, SecretSource]", folder: str, *, may_run: bool) -> dict[str, bytes]:
    from snapcore.secret_sources import secret_values

    return secret_values(sources, folder=folder, may_run=may_run)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal end what blocks, such as a command that gives a secret, or a pipe that nobody writes into: the event loop,
    which waits for it, hears of no signal meanwhile."""

    def stop(number: int, _: object) -> None:
        raise _SignalError(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    return await repo.resolve(spec, thread)
