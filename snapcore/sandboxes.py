"""The contracts of sandboxes: where they come from, and what can be done in one. Suites for both are in `snapcore.testing`.

A provider makes, opens, pauses and destroys sandboxes; a handle is an open connection to one. What a provider or a handle
cannot do is declared in its abilities and raises `ProviderError` `NOT_CAPABLE` before anything is touched. The functions below
the contracts are for those who write one.
"""

import posixpath
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import msgspec

from .errors import Code, ProviderError, SnapcoreError, SnapshotError, printable

if TYPE_CHECKING:
    from .protocols import Workspace

__all__ = [
    "Abilities",
    "Binding",
    "ExecResult",
    "Hook",
    "OutputCallback",
    "Pipe",
    "SandboxHandle",
    "SandboxProvider",
    "SandboxSpec",
    "Shell",
    "argument_list",
    "check_environment",
    "check_path",
    "check_place",
    "check_result",
    "check_sandbox",
    "lacks",
    "refuse_options",
    "run_hooks",
]

_MOST: Final = (1 << 63) - 1
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

OutputCallback = Callable[[str, bytes], None]
"""Called with `"stdout"` or `"stderr"` and a piece of it, as it comes."""


class Abilities(msgspec.Struct, frozen=True):
    """What a provider can do with its sandboxes beyond opening them, and what their handles can.

    `binary_pipes`: bytes go in and out of a process unchanged, as streams, so that no temporary files are needed.
    """

    create: bool = False
    destroy: bool = False
    pause: bool = False
    snapshot: bool = False
    exec: bool = False
    binary_pipes: bool = False


class Binding(msgspec.Struct, frozen=True):
    """How to find a sandbox again: JSON, written once, without credentials. `details` are the provider's own, strings only."""

    provider: str
    sandbox_id: str
    workspace_root: str
    details: dict[str, str] = {}


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox to be made. `snapshot` is a native snapshot to start from instead of `image`; `options` are handed to the
    provider as they are. Environment values may be secrets: no repr shows them, and no binding holds them."""

    image: str | None = None
    name: str | None = None
    snapshot: str | None = None
    workspace_root: str = "/workspace"
    user: str | None = None
    environment: Mapping[str, str] = {}
    cpus: float | None = None
    memory_bytes: int | None = None
    labels: Mapping[str, str] = {}
    timeout: float | None = None  # seconds until the provider ends it, where it does that
    options: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        return f"SandboxSpec(image={self.image!r}, name={self.name!r}, snapshot={self.snapshot!r})"


class ExecResult(msgspec.Struct, frozen=True):
    """How a command ended. `truncated` says that the provider, or `max_output`, cut its output."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False


class Pipe(Protocol):
    """A process with binary pipes, inside `async with`; leaving early ends it."""

    def stdout(self) -> AsyncIterator[bytes]:
        """Its output in pieces of at most some MiB, to the end. Consumed once."""
        ...

    async def wait(self) -> ExecResult:
        """After the output: the exit code and the last few KiB of stderr. `stdout` is empty here."""
        ...


class Shell(Protocol):
    """The least that `ShellWorkspace` needs: `sh` in the sandbox, with bytes in and bytes out. Each call is one round trip where
    the provider has binary pipes, and a transfer in, a command and a transfer out where it has not."""

    @property
    def sandbox_id(self) -> str:
        """A stable name of the sandbox for the stat cache, with the provider's scheme and without credentials."""
        ...

    def pipe(self, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> AbstractAsyncContextManager[Pipe]:
        """Run `sh -c script` as the handle's user. `ProviderError` `SANDBOX_UNAVAILABLE` when the connection fails (retryable),
        or when the sandbox is there and does not run (not retryable: it has to be started); `NO_SANDBOX` when it is gone for
        good; `NOT_CAPABLE` when there is no `sh`."""
        ...


@runtime_checkable
class SandboxHandle(Protocol):
    """An open sandbox. Methods may be called concurrently. Handles without `workspace` are wrapped; see `snapcore.connect`."""

    @property
    def sandbox_id(self) -> str:
        """A stable name of the sandbox, without credentials."""
        ...

    @property
    def workspace_root(self) -> str:
        """The folder that is captured unless another is asked for."""
        ...

    @property
    def binding(self) -> Binding:
        """What `SandboxProvider.open` takes to find this sandbox again."""
        ...

    @property
    def abilities(self) -> Abilities:
        """What can be done here."""
        ...

    def workspace(self, root: str | None = None) -> "Workspace":
        """The bulk view of the files under `root`."""
        ...

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        on_output: OutputCallback | None = None,
        max_output: int = 16 << 20,
    ) -> ExecResult:
        """Run a command (a text: by `sh -c`) to its end; a non-zero exit is a result, no error: 126 or 127 when it cannot be run
        or is not there. `cwd` is taken from `workspace_root`, and is that folder by default; while there is no such folder, a
        command without `cwd` starts where the sandbox starts them by itself, and can make it. `timeout` seconds end it, and what
        it started, with `ProviderError` `EXEC_TIMEOUT`. Output beyond `max_output` bytes (of stdout and of stderr) is dropped and
        `truncated` set; `on_output` sees all. A command, folder or environment that no system takes raises `SnapshotError`
        `INVALID_REQUEST`; see `argument_list`."""
        ...

    async def upload(self, path: str, data: bytes | AsyncIterator[bytes]) -> None:
        """Create or replace the file at an absolute path."""
        ...

    def download(self, path: str) -> AsyncIterator[bytes]:
        """The bytes of a file, in pieces, all of them or an error. `SnapshotError` `MISSING_WORKSPACE` is not raised here: a
        missing file is a `FileNotFoundError`."""
        ...

    async def close(self) -> None:
        """Release the connection; the sandbox lives on. Idempotent. Whatever is asked of a closed handle is a `ProviderError`."""
        ...


Hook = Callable[[SandboxHandle], Awaitable[None]]
"""Called with an open handle: to check out a branch, to set an egress rule with a token the worker holds now."""


class SandboxProvider(Protocol):
    """Where sandboxes come from. `on_create` hooks run once a sandbox was made, `on_open` hooks after them and on every later
    open, each kind in the order given; when one fails, `create` destroys the sandbox and `open` closes the handle, and the hook's
    error is raised (`run_hooks`)."""

    @property
    def name(self) -> str:
        """The scheme of its addresses and `Binding.provider`."""
        ...

    @property
    def abilities(self) -> Abilities:
        """What it can do."""
        ...

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Make a sandbox, with its `workspace_root` there, and open it. What the spec asks for and the provider cannot give is
        `ProviderError` `NOT_CAPABLE` (`refuse_options`)."""
        ...

    async def open(self, binding: Binding) -> SandboxHandle:
        """Connect to a sandbox; a paused one is resumed. `ProviderError` `NO_SANDBOX` when there is none."""
        ...

    async def pause(self, handle: SandboxHandle) -> None:
        """Stop its processes, keeping files (and memory where the provider does); the handle is closed."""
        ...

    async def snapshot(self, handle: SandboxHandle) -> str:
        """Take the provider's own snapshot; its reference, for `SandboxSpec.snapshot`."""
        ...

    async def destroy(self, binding: Binding) -> None:
        """End a sandbox and remove all of it. Idempotent."""
        ...


def lacks(provider: str, what: str, hint: str = "") -> ProviderError:
    """The error for what a provider cannot do: "docker sandboxes cannot be paused"."""
    return ProviderError(f"{provider} sandboxes cannot {what}.", code=Code.NOT_CAPABLE, hint=hint)


def refuse_options(spec: SandboxSpec, provider: str, *able: str) -> None:
    """Raise `ProviderError` `NOT_CAPABLE` naming what a spec asks for besides `workspace_root` and the fields in `able`."""
    asked = [
        field.name
        for field in msgspec.structs.fields(SandboxSpec)
        if field.name not in ("workspace_root", *able) and getattr(spec, field.name) not in (None, {})
    ]
    if asked:
        raise lacks(provider, f"be made with {' or '.join(asked)}", "Leave it out, or take another provider.")


async def run_hooks(hooks: Iterable[Hook], handle: SandboxHandle, undo: Callable[[], Awaitable[None]]) -> None:
    """Call hooks one after another. When one fails, or the caller is cancelled, `undo` is awaited before that error goes on."""
    try:
        for hook in hooks:
            await hook(handle)
    except BaseException as error:
        try:
            await undo()
        except SnapcoreError as second:
            error.add_note(f"Afterwards: {second}")
        raise


def argument_list(command: Sequence[str] | str) -> list[str]:
    """The arguments of a command, a text as `sh -c` takes it. Raises `SnapshotError` `INVALID_REQUEST` for an empty command, and
    for what no system can pass on: a NUL, a lone surrogate that stands for no byte."""
    words = ["sh", "-c", command] if isinstance(command, str) else list(command)
    if not words or not words[0] or command == "":
        raise SnapshotError("There is no command to run.", code=Code.INVALID_REQUEST)
    if not all(_can_be_passed(word) for word in words):
        raise SnapshotError("A command holds a NUL or a lone surrogate.", code=Code.INVALID_REQUEST)
    return words


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse names that a shell cannot export, and values that no system can pass on. The values are never shown."""
    for name, value in environment.items():
        if not _NAME.fullmatch(name) or not _can_be_passed(value):
            raise SnapshotError(
                f"The environment variable '{printable(name)}' has a name or a value that cannot be passed on.",
                code=Code.INVALID_REQUEST,
            )


def check_place(cwd: str | None, user: str | None) -> None:
    """Refuse a folder and a user that no system can have."""
    for name, value in (("cwd", cwd), ("user", user)):
        if value is not None and not _can_be_passed(value):
            raise SnapshotError(f"{name} holds a NUL or a lone surrogate.", code=Code.INVALID_REQUEST)


def check_path(path: str) -> str:
    """An absolute path inside a sandbox, without `.`, `..` and double slashes. Raises `SnapshotError` `INVALID_REQUEST`."""
    if not path.startswith("/") or not _can_be_passed(path):
        raise SnapshotError(f"'{printable(path)}' is not an absolute path.", code=Code.INVALID_REQUEST)
    return "/" + posixpath.normpath(path).lstrip("/")


def check_result(result: ExecResult, provider: str) -> ExecResult:
    """What a handle said of how a command ended, with bytes that nobody changes. Raises `ProviderError` for what is no result."""
    code: object = result.exit_code
    if not isinstance(code, int) or not -_MOST <= code <= _MOST:
        raise ProviderError(f"{provider} gave no exit code of the command.", hint="Nobody knows how it ended.")
    if not all(isinstance(data, bytes | bytearray | memoryview) for data in (result.stdout, result.stderr)):
        raise ProviderError(f"{provider} gave no bytes as the output of the command.", hint="Nobody knows how it ended.")
    return ExecResult(int(code), bytes(result.stdout), bytes(result.stderr), bool(result.truncated))


def check_sandbox(handle: SandboxHandle, sandbox_id: str, provider: str) -> None:
    """Raise `ProviderError` when what was opened is another sandbox than was asked for."""
    if handle.sandbox_id != sandbox_id:
        from .addresses import shown_address

        asked, opened = (printable(shown_address(each)) for each in (sandbox_id, handle.sandbox_id))
        raise ProviderError(f"Asked for {asked}, {provider} opened {opened}; nothing was done in it.")


def _can_be_passed(text: str) -> bool:
    """Whether a text can be an argument, a variable's value or a path: bytes without NUL."""
    try:
        return b"\0" not in text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
