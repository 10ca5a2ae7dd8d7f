"""A sandbox of deepagents as a handle of snapcore."""

import posixpath
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from snapcore.errors import Code, ProviderError, SnapcoreError
from snapcore.providers.e2b_handle import GET, PUT, check_transfer
from snapcore.providers.local import LocalSandbox
from snapcore.providers.processes import keeping
from snapcore.providers.shell import ShellWorkspace
from snapcore.providers.shell_tools import starting, word
from snapcore.sandboxes import (
    Abilities,
    Binding,
    ExecResult,
    OutputCallback,
    SandboxHandle,
    argument_list,
    check_environment,
    check_path,
    lacks,
)

from .deepagents_backend import HandleBackend
from .deepagents_shell import BackendShell

try:
    from deepagents.backends import FilesystemBackend
    from deepagents.backends.protocol import BackendProtocol, SandboxBackendProtocol
except ImportError as error:
    raise SnapcoreError(
        "deepagents is not installed.", code=Code.MISSING_EXTRA, hint="Install it: pip install 'snapcore[deepagents]'."
    ) from error

__all__ = ["BackendSandbox", "sandbox_of"]

NAME: Final = "deepagents"
ABILITIES: Final = Abilities(exec=True)


class BackendSandbox:
    """See `SandboxHandle`. Over any backend with `execute`, `upload_files` and `download_files`, whose transfers reach
    the very files that its commands see. `exec` shows output when the command has ended."""

    def __init__(self, backend: SandboxBackendProtocol, root: str = "/workspace") -> None:
        self._root = check_path(root)
        self._shell = BackendShell(backend)

    def __repr__(self) -> str:
        return f"BackendSandbox({self.sandbox_id!r}, {self._root!r})"

    @property
    def sandbox_id(self) -> str:
        """`deepagents://`, the backend's class and its id."""
        return self._shell.sandbox_id

    @property
    def workspace_root(self) -> str:
        """See `SandboxHandle`."""
        return self._root

    @property
    def binding(self) -> Binding:
        """Names the sandbox; whoever has made the backend has to make it again."""
        return Binding(NAME, self.sandbox_id, self._root)

    @property
    def abilities(self) -> Abilities:
        """Only commands."""
        return ABILITIES

    def workspace(self, root: str | None = None) -> ShellWorkspace:
        """The files under `root`; a relative one is taken from the workspace root. `ProviderError` `NOT_CAPABLE` for a root that
        holds /tmp, where the temporary files are."""
        path = check_path(posixpath.join(self._root, root) if root else self._root)
        if path in ("/", "/tmp"):  # noqa: S108 (in the sandbox)
            raise lacks(NAME, f"be captured at {path}", "Temporary files are in /tmp. Take a folder.")
        return ShellWorkspace(self._shell, path)

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
        """See `SandboxHandle.exec`. Output comes byte for byte."""
        if user is not None:
            raise lacks(NAME, "run commands as another user")
        script = _script(command, environment or {}, cwd, self._root)
        kept, sink = keeping(max_output, on_output)
        async with self._shell.pipe(script, stdin, seconds=timeout) as pipe:
            async for piece in pipe.stdout():
                sink("stdout", piece)
            async for piece in pipe.stderr():
                sink("stderr", piece)
            return kept.result((await pipe.wait()).exit_code)

    async def upload(self, path: str, data: bytes | AsyncIterator[bytes]) -> None:
        """See `SandboxHandle.upload`. All of it is sent before the file is replaced."""
        target = check_path(path)
        async with self._shell.pipe(PUT.format(path=word(target), folder=word(posixpath.dirname(target))), data) as pipe:
            check_transfer(await pipe.wait(), path)

    async def download(self, path: str) -> AsyncIterator[bytes]:
        """See `SandboxHandle.download`."""
        async with self._shell.pipe(GET.format(path=word(check_path(path)))) as pipe:
            check_transfer(await pipe.wait(), path)
            async for piece in pipe.stdout():
                yield piece

    async def close(self) -> None:
        """See `SandboxHandle.close`. The backend is its owner's."""
        self._shell.closed = True


def sandbox_of(backend: Any, root: str | None = None) -> SandboxHandle:
    """The handle for the files of a backend, and the folder in its sandbox that is the workspace.

    Of deepagents' own local backends it is the folder that they work in, without detours; of a composite, that of its default;
    of one that snapcore made, the handle that it was made of. Others work in `root`, `/workspace` if there is none. Raises
    `ProviderError` `NOT_CAPABLE` for a backend that has no commands.
    """
    while isinstance(wrapped := getattr(backend, "inner", getattr(backend, "default", None)), BackendProtocol):
        backend = wrapped
    if isinstance(backend, FilesystemBackend):
        return LocalSandbox(root or backend.cwd)
    if isinstance(backend, HandleBackend) and root in (None, backend.handle.workspace_root):
        return backend.handle
    if isinstance(backend, SandboxBackendProtocol):
        return BackendSandbox(backend, root or "/workspace")
    raise ProviderError(
        f"{type(backend).__name__} has no sandbox whose files could be captured.",
        code=Code.NOT_CAPABLE,
        hint="Files in a graph's state or store are saved by the graph itself.",
    )


def _script(command: Sequence[str] | str, environment: Mapping[str, str], cwd: str | None, root: str) -> str:
    """The command as a script. Raises `SnapshotError` `INVALID_REQUEST` for what cannot be run."""
    words = argument_list(command)
    check_environment(environment)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join(["unset SNAPCORE_PIPE", starting(cwd, root), *exports, f"exec {shlex.join(words)}"])
