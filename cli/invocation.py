"""What a command is told: common options, and what environment variables and the settings file say."""

import gc
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from snapcore.errors import Code, SnapcoreError, printable

from .effective import VARIABLES, Effective, effective, effective_policy, secret_sources
from .signals import interruptible

if TYPE_CHECKING:
    from snapcore.repository import Repository
    from snapcore.selection import FilePolicy
    from snapcore.settings import SecretSource
    from snapcore.settings_files import Loaded

__all__ = ["THREAD_HINT", "Invocation", "UsageError", "address_errors", "usage_errors"]

GC_THRESHOLD: Final = 20_000  # a command makes many small values and hardly a cycle
M_ARENA_MAX: Final = -8  # of glibc's malloc.h
THREAD_HINT: Final = "Name it with --thread, or once and for all: SNAPCORE_THREAD, or thread = ... in snapcore.toml."


class UsageError(SnapcoreError):
    """The arguments do not make sense together."""

    default_code = Code.INVALID_REQUEST


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


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """What every command is told: how to print, and what flags, environment variables and the settings file say.

    The settings file is read when something is asked for that it could say; all these raise `UsageError` when it makes no sense.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)  # repo, database, thread, progress, config on the command line
    no_config: bool = False

    @cached_property
    def loaded(self) -> "Loaded | None":
        """The settings file: the one that was named, else the nearest. None when there is none."""
        named = self.flags.get("config")
        if self.no_config:
            if named is not None:
                raise UsageError("--config and --no-config exclude each other.")
            return None
        named = named or os.environ.get(VARIABLES["config"])
        if not named and not _is_any_above():
            return None
        from snapcore.settings_files import find_settings, load_settings

        with usage_errors():
            return load_settings(named) if named else find_settings(os.curdir)

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
        return self.effective("progress").value or ""

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
        if self.loaded is None and all(value is None for value in flags.values()):
            from snapcore.selection import FilePolicy

            return FilePolicy()  # the same as below, without what reads settings
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
                        f"--reinject puts back no secret of a settings file that was found, not named: {', '.join(written)}.",
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

        self.tell_repository()
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

    def tell_repository(self) -> None:
        """Say on a terminal that a file which was merely found leads to another repository: an agent could have written it."""
        keys = [key for key in ("repo", "database") if (found := self.effective(key)).source == "file" and found.value]
        if keys and self.loaded is not None and not self.loaded.named and self.tells and sys.stderr.isatty():
            sys.stderr.write(f"{' and '.join(keys)} as in {printable(self.loaded.path)}\n")

    @property
    def tells(self) -> bool:
        """Whether a result for people is wanted."""
        return not self.json and not self.quiet

    def warn(self, line: str) -> None:
        """Tell why the exit code is 3: with the result for people, or on stderr when none is wanted. JSON has it already."""
        if not self.json:
            (sys.stderr if self.quiet else sys.stdout).write(f"{printable(line)}\n")


def _is_any_above() -> bool:
    """Whether there is a settings file to be read; what reads it is not loaded before."""
    from snapcore.settings_search import settings_candidates

    try:
        return any(True for _ in settings_candidates(os.curdir))
    except FileNotFoundError:  # the current folder was removed
        return False


def _values(sources: "Mapping[str, SecretSource]", folder: str, *, may_run: bool) -> dict[str, bytes]:
    from snapcore.secret_sources import secret_values

    return secret_values(sources, folder=folder, may_run=may_run)


def _one_heap() -> None:
    """Let glibc keep one heap for all threads. Each thread's own would hold on to what large buffers once took: a capture's
    peak memory falls by a quarter. Before the first thread is started, and nothing where there is no glibc."""
    import ctypes

    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(M_ARENA_MAX, 1)
