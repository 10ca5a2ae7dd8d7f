"""An open E2B sandbox."""

import asyncio
import contextlib
import posixpath
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from snapcore.errors import Code, ProviderError, SnapcoreError, SnapshotError, printable
from snapcore.sandboxes import Abilities, Binding, ExecResult, OutputCallback, argument_list, check_environment, check_path

from .e2b_errors import e2b_module, lost, of_the_client, translated
from .e2b_shell import E2BConnection, E2BShell
from .processes import keeping
from .shell import ShellWorkspace
from .shell_tools import starting, word
from .threads import uncancelled

__all__ = ["ABILITIES", "E2BSandbox"]

ABILITIES: Final = Abilities(create=True, destroy=True, pause=True, snapshot=True, exec=True, binary_pipes=False)

INPUT_PIECE: Final = 256 << 10
REQUEST_SECONDS: Final = 120.0
GRACE: Final = 30.0  # how much later than we the service ends a command, should we be gone
SIGNALS: Final = {"signal: killed": 137, "signal: terminated": 143}  # what the agent says of a process without an exit code

PUT: Final = """
[ -d {path} ] && exit 21
mkdir -p -- {folder} && cat >"$SNAPCORE_PIPE/file" && mv -f -- "$SNAPCORE_PIPE/file" {path}
"""
GET: Final = """
[ -d {path} ] && exit 21
[ -e {path} ] || exit 20
cat <{path}
"""


def check_transfer(result: ExecResult, path: str) -> None:
    """Raise what the end of `PUT` or `GET` means."""
    if result.exit_code == 20:
        raise FileNotFoundError(2, "No such file", path)
    if result.exit_code == 21:
        raise IsADirectoryError(21, "Is a directory", path)
    if result.exit_code:
        words = printable(result.stderr.strip()[-300:])
        code = Code.SANDBOX_FULL if b"No space left" in result.stderr else Code.NOT_CAPABLE
        raise ProviderError(f"{printable(path)} could not be transferred: {words}", code=code)


class E2BSandbox:
    """See `SandboxHandle`. Output of `exec` is text: bytes that are not UTF-8 come as U+FFFD. Files are not concerned."""

    def __init__(self, connection: E2BConnection, binding: Binding) -> None:
        self._connection = connection
        self._binding = binding
        self._shell = E2BShell(connection)

    def __repr__(self) -> str:
        return f"E2BSandbox({self._binding.sandbox_id!r}, {self._binding.workspace_root!r})"

    @property
    def sandbox_id(self) -> str:
        """`e2b://` and the sandbox's id."""
        return self._shell.sandbox_id

    @property
    def workspace_root(self) -> str:
        """See `SandboxHandle`."""
        return self._binding.workspace_root

    @property
    def binding(self) -> Binding:
        """See `SandboxHandle`."""
        return self._binding

    @property
    def abilities(self) -> Abilities:
        """See `SandboxHandle`."""
        return ABILITIES

    @property
    def connection(self) -> E2BConnection:
        """What the provider needs of an open sandbox; `connection.sandbox` is the client's own object."""
        return self._connection

    def workspace(self, root: str | None = None) -> ShellWorkspace:
        """The files under `root`; a relative one is taken from the workspace root."""
        base = self._binding.workspace_root
        return ShellWorkspace(self._shell, posixpath.join(base, root) if root else base)

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
        """See `SandboxHandle.exec`."""
        line = _line(command, environment or {}, cwd, self.workspace_root)
        kept, sink = keeping(max_output, on_output)
        who = user or self._connection.user
        handle: Any = None
        ended = False
        try:
            async with asyncio.timeout(timeout):
                handle = await self._connection.live().commands.run(
                    line,
                    background=True,
                    envs=dict(environment or {}),
                    user=who,
                    stdin=bool(stdin),
                    timeout=0 if timeout is None else timeout + GRACE,
                    request_timeout=REQUEST_SECONDS,
                    retain_output=False,
                    on_stdout=lambda text: sink("stdout", text.encode()),
                    on_stderr=lambda text: sink("stderr", text.encode()),
                )
                feeding = asyncio.create_task(self._feed(handle, stdin))
                try:
                    code = await _exit_code(handle)
                finally:
                    feeding.cancel()
                    await asyncio.gather(feeding, return_exceptions=True)
            ended = True
            return kept.result(code)
        except TimeoutError:
            if timeout is None:
                raise
            raise ProviderError(
                f"The command did not end within {timeout:g} seconds and was stopped.", code=Code.EXEC_TIMEOUT
            ) from None
        except Exception as error:
            if isinstance(error, SnapcoreError) or not of_the_client(error):
                raise  # what `on_output` raised
            said = translated(error, self._connection.id, self._connection.hidden)
            if said.retryable and handle is not None:
                said = lost("the connection broke, and whether the command did its work is not known", retryable=False)
            raise said from None
        finally:
            if handle is not None and not ended:
                await uncancelled(_let_go(self._connection, handle, who))

    async def upload(self, path: str, data: bytes | AsyncIterator[bytes]) -> None:
        """See `SandboxHandle.upload`. All of it is sent before the file is replaced."""
        target = check_path(path)
        put = PUT.format(path=word(target), folder=word(posixpath.dirname(target)))
        async with self._shell.pipe(put, data) as pipe:
            result = await pipe.wait()
        check_transfer(result, path)

    async def download(self, path: str) -> AsyncIterator[bytes]:
        """See `SandboxHandle.download`."""
        async with self._shell.pipe(GET.format(path=word(check_path(path)))) as pipe:
            check_transfer(await pipe.wait(), path)
            async for piece in pipe.stdout():
                yield piece

    async def close(self) -> None:
        """See `SandboxHandle.close`. The client keeps its connections for other sandboxes."""
        self._connection.closed = True

    async def _feed(self, handle: Any, stdin: bytes) -> None:
        """Send a command its input. A command that does not read it, or has ended, is no error."""
        e2b = e2b_module()
        if not stdin:
            return
        with contextlib.suppress(e2b.SandboxException):
            for start in range(0, len(stdin), INPUT_PIECE):
                await handle.send_stdin(stdin[start : start + INPUT_PIECE])
            await handle.close_stdin()


async def _exit_code(handle: Any) -> int:
    try:
        return int((await handle.wait()).exit_code)
    except e2b_module().CommandExitException as error:
        return int(error.exit_code) if error.exit_code >= 0 else SIGNALS.get(error.error or "", 255)


async def _let_go(connection: E2BConnection, handle: Any, user: str | None) -> None:
    """End a command whose end nobody waits for any more, and what it started."""
    if not connection.closed:
        await connection.end_tree(str(handle.pid), user)
    await handle.disconnect()


def _line(command: Sequence[str] | str, environment: Mapping[str, str], cwd: str | None, root: str) -> str:
    """The command as a line for a shell. Raises `SnapshotError` `INVALID_REQUEST` for what cannot be run."""
    words = argument_list(command)
    check_environment(environment)
    line = f"{starting(cwd, root)}\nexec {shlex.join(words)}"
    if any("\ud800" <= ch <= "\udfff" for text in (line, *environment.values()) for ch in text):
        raise SnapshotError("A command of E2B cannot hold bytes that are not UTF-8.", code=Code.INVALID_REQUEST)
    return line
