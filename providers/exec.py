"""Any sandbox that a command of this host leads into: `ssh host`, `kubectl exec -i pod --`, `podman exec -i name`.

    await snapcore.connect("ssh://dev@host/srv/project")
    await snapcore.connect("exec:kubectl exec -i my-pod -- /workspace")

Nothing has to run or be installed there but `sh` and what capture and restore need of tools. The command is started once for
each call, by no shell of this host; for ssh, `ControlMaster` in `~/.ssh/config` makes each start cheap.
"""

import asyncio
import errno
import os
import posixpath
import secrets
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from snapcore.addresses import shown_address
from snapcore.errors import Code, ProviderError, SnapcoreError, SnapshotError, printable
from snapcore.protocols import Workspace
from snapcore.sandboxes import (
    Abilities,
    Binding,
    ExecResult,
    Hook,
    OutputCallback,
    SandboxHandle,
    SandboxSpec,
    argument_list,
    check_environment,
    check_path,
    lacks,
    run_hooks,
)

from .command_shell import CommandShell
from .exec_address import Target, parse_address
from .processes import Processes, cannot_start, keeping
from .shell_exec import Beginning, Ending, broken, command_text, loader, new_mark, stop_script, unreachable
from .shell_tools import unstalled, word
from .threads import uncancelled

__all__ = ["CommandSandbox", "ExecProvider", "connect"]

ABILITIES: Final = Abilities(exec=True, binary_pipes=True)
STOP_SECONDS: Final = 20.0
KEPT_STDERR: Final = 8 << 10
# exit codes of the scripts below
IS_FOLDER, MISSING, WRONG_SIZE = 91, 92, 93


class CommandSandbox:
    """A handle on what `target` leads to. Nothing is kept open between calls."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._processes = Processes()
        self._closed = False
        self._shell = CommandShell(target.prefix, target.sandbox_id, quoted=target.quoted)

    @property
    def sandbox_id(self) -> str:
        """The address without the folder; for `exec:` with this host's name."""
        return self._target.sandbox_id

    @property
    def workspace_root(self) -> str:
        """The address's folder."""
        return self._target.root

    @property
    def binding(self) -> Binding:
        """The address, in `details`."""
        target = self._target
        return Binding(target.scheme, target.sandbox_id, target.root, {"address": target.address})

    @property
    def abilities(self) -> Abilities:
        """Commands with binary pipes; they always run as whom the address leads to."""
        return ABILITIES

    def workspace(self, root: str | None = None) -> Workspace:
        """The bulk view of `root`; a relative one is taken from the address's folder."""
        from .shell import ShellWorkspace

        return ShellWorkspace(self._shell, posixpath.join(self._target.root, root) if root else self._target.root)

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
        """See `SandboxHandle.exec`. A command that is stopped is killed with all that it started, as far as that has kept its
        environment."""
        words = argument_list(command)
        check_environment(environment or {})
        self._check_open()
        if user is not None:
            raise lacks(self._target.scheme, "run commands as another user", "The address says who runs them.")
        root = self._target.root
        mark = new_mark()
        head = command_text(mark, words, cwd=cwd, root=root, environment=environment)
        kept, keep = keeping(max_output, on_output)
        beginning, ending = Beginning(mark), Ending(mark)
        stderr = bytearray()

        def sink(stream: str, piece: bytes) -> None:
            own = ending.passed(piece) if stream == "stderr" else beginning.passed(piece)
            if stream == "stderr":
                stderr.extend(own)
                del stderr[:-KEPT_STDERR]
            if own:
                keep(stream, own)

        try:
            code = await self._processes.run(self._command(loader(mark)), head + stdin, sink, timeout=timeout)
        except OSError as error:
            raise cannot_start(self._target.prefix[0], error) from error
        except BaseException as error:
            if beginning.begun and isinstance(error, ProviderError | asyncio.CancelledError):
                await uncancelled(self._stop(mark))
            raise
        self._check_open()
        if not ending.told:
            raise unreachable(self._shown, code, bytes(stderr), beginning) or broken(self._shown, bytes(stderr))
        return kept.result(code)

    async def upload(self, path: str, data: bytes | AsyncIterator[bytes]) -> None:
        """See `SandboxHandle.upload`: the file is replaced only once all data is there and counted. Its folder has to exist."""
        target = check_path(path)
        self._check_open()
        draft = f"{posixpath.dirname(target).rstrip('/')}/.snapcore-upload.{secrets.token_hex(8)}"
        name, temporary = word(target), word(draft)
        counted = _Counted(data)
        try:
            await self._run(
                f"[ -d {name} ] && exit {IS_FOLDER}\n[ -d {word(posixpath.dirname(target))} ] || exit {MISSING}\n"
                f"cat > {temporary}",
                target,
                counted.pieces(),
            )
            await self._run(
                f"[ $(($(wc -c < {temporary}))) -eq {counted.size} ] || exit {WRONG_SIZE}\nmv -f {temporary} {name}", target
            )
        except BaseException:
            await uncancelled(self._forgive(f"rm -f {temporary}"))
            raise

    async def download(self, path: str) -> AsyncIterator[bytes]:
        """See `SandboxHandle.download`: pieces of at most 1 MiB."""
        name = word(check_path(path))
        self._check_open()
        script = f"[ -f {name} ] || {{ [ -e {name} ] && exit {IS_FOLDER}; exit {MISSING}; }}\nexec cat < {name}"
        async for piece in self._output(script, path):
            yield piece

    async def close(self) -> None:
        """End the commands that still run. Idempotent."""
        self._closed = True
        self._processes.end()

    @property
    def _shown(self) -> str:
        return printable(shown_address(self._target.address))

    def _command(self, script: str) -> list[bytes]:
        words = ["sh", "-c", script]
        if self._target.quoted:
            words = [shlex.join(words)]
        return [os.fsencode(word) for word in (*self._target.prefix, *words)]

    def _check_open(self) -> None:
        if self._closed:
            raise ProviderError("The sandbox handle is closed.", code=Code.SANDBOX_UNAVAILABLE, hint="Open the sandbox again.")

    async def _run(self, script: str, path: str, stdin: bytes | AsyncIterator[bytes] = b"") -> None:
        async for _ in self._output(script, path, stdin):
            pass

    async def _output(self, script: str, path: str, stdin: bytes | AsyncIterator[bytes] = b"") -> AsyncIterator[bytes]:
        """What a script about a file prints; its exit code as an error."""
        mark = new_mark()
        beginning = Beginning(mark)
        async with self._shell.pipe(f"echo {mark}+\n{script}", stdin) as pipe:
            async for piece in unstalled(pipe.stdout()):
                if own := beginning.passed(piece):
                    yield own
            result = await pipe.wait()
        failed = unreachable(self._shown, result.exit_code, result.stderr, beginning)
        if failed is not None:
            raise failed
        if result.exit_code:
            raise _file_error(result, path)

    async def _stop(self, mark: str) -> None:
        await self._forgive(stop_script(mark))

    async def _forgive(self, script: str) -> None:
        """Tidy up as far as that is possible."""
        try:
            await self._processes.run(self._command(script), b"", lambda *_: None, timeout=STOP_SECONDS)
        except (SnapcoreError, OSError):
            return


class ExecProvider:
    """Opens sandboxes by the address in their bindings; `scheme` is `exec` or `ssh`. What makes and ends them is elsewhere,
    so `on_create` hooks are never called."""

    def __init__(self, scheme: str = "exec", *, on_create: Sequence[Hook] = (), on_open: Sequence[Hook] = ()) -> None:
        self._scheme = scheme
        self._on_open = tuple(on_open)

    @property
    def name(self) -> str:
        """The scheme."""
        return self._scheme

    @property
    def abilities(self) -> Abilities:
        """Commands with binary pipes."""
        return ABILITIES

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Not possible."""
        raise lacks(self._scheme, "be created", "Make it by its own tools, and connect to its address.")

    async def open(self, binding: Binding) -> SandboxHandle:
        """Connect once, to see that there is a shell."""
        target = parse_address(binding.details.get("address", ""))
        if target.scheme != self._scheme or binding.provider != self._scheme:
            raise SnapshotError(f"This is no binding of {self._scheme}: sandboxes.", code=Code.INVALID_REQUEST)
        handle = CommandSandbox(target)
        await handle.exec(["true"])
        await run_hooks(self._on_open, handle, handle.close)
        return handle

    async def pause(self, handle: SandboxHandle) -> None:
        """Not possible."""
        raise lacks(self._scheme, "be paused")

    async def snapshot(self, handle: SandboxHandle) -> str:
        """Not possible."""
        raise lacks(self._scheme, "take native snapshots", "Capture it: repo.capture(handle, thread_id=...).")

    async def destroy(self, binding: Binding) -> None:
        """Not possible."""
        raise lacks(self._scheme, "be destroyed", "End it by its own tools.")


async def connect(address: str) -> CommandSandbox:
    """The sandbox at an `exec:` or `ssh:` address; nothing is started yet."""
    return CommandSandbox(parse_address(address))


class _Counted:
    """Counts the bytes of an upload on their way."""

    def __init__(self, data: bytes | AsyncIterator[bytes]) -> None:
        self._data = data
        self.size = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        if isinstance(self._data, bytes | bytearray | memoryview):
            self.size = len(self._data)
            yield bytes(self._data)
            return
        async for piece in self._data:
            self.size += len(piece)
            yield piece


def _file_error(result: ExecResult, path: str) -> Exception:
    if result.exit_code == MISSING:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if result.exit_code == IS_FOLDER:
        return IsADirectoryError(errno.EISDIR, "Not a regular file", path)
    if result.exit_code == WRONG_SIZE:
        return ProviderError(f"{printable(path)} did not arrive whole.", code=Code.SANDBOX_UNAVAILABLE, retryable=True)
    said = printable(result.stderr.strip()[-300:])
    return OSError(errno.EIO, f"Exit code {result.exit_code}: {said}", path)
