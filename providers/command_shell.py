"""A shell behind a command of this host: `ssh host`, `kubectl exec -i pod --`, `podman exec -i name`, or this host's own."""

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Final

from snapcore.addresses import shown_address
from snapcore.errors import Code, ProviderError, printable
from snapcore.sandboxes import ExecResult

from .shell_exec import Beginning, new_mark, unreachable
from .threads import uncancelled

__all__ = ["CommandPipe", "CommandShell"]

PIECE: Final = 1 << 20  # bytes of output taken at once, at most
STDERR_KEPT: Final = 8 << 10
END_SECONDS: Final = 10.0


class CommandShell:
    """Runs `[*prefix, "sh", "-c", script]` as a process of this host, in a session of its own: it never asks at a terminal.

    `quoted` is for prefixes that join their arguments with spaces and hand them to a remote shell, as ssh does: the whole
    command then goes as one argument, quoted for that shell. A script may hold bytes that are not UTF-8 by surrogate escapes.
    What a login script prints before it is passed over. Every script is sent a line before its input, to see that it is sent any.
    """

    def __init__(self, prefix: Sequence[str], sandbox_id: str, *, quoted: bool = False) -> None:
        self._prefix = tuple(prefix)
        self._id = sandbox_id
        self._quoted = quoted

    @property
    def sandbox_id(self) -> str:
        """As it was given."""
        return self._id

    def pipe(self, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> "CommandPipe":
        """See `Shell.pipe`. `NOT_CAPABLE` when the prefix's own program cannot be run."""
        mark = new_mark()
        command = ["sh", "-c", f"IFS= read -r l || {{ echo {mark}-; exit 125; }}; echo {mark}+\n{script}"]
        if self._quoted:
            command = [shlex.join(command)]
        return CommandPipe([os.fsencode(part) for part in (*self._prefix, *command)], stdin, Beginning(mark), self._id)


class CommandPipe:
    """One process. Written to, read from, and its stderr drained at the same time, so that none of the three blocks another."""

    def __init__(
        self, command: Sequence[bytes], stdin: bytes | AsyncIterator[bytes], beginning: Beginning, sandbox_id: str
    ) -> None:
        self._command = command
        self._shown = printable(shown_address(sandbox_id))
        self._stdin = stdin
        self._beginning = beginning
        self._heard = False
        self._stderr = bytearray()
        self._tasks: list[asyncio.Task[None]] = []
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> "CommandPipe":
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=PIECE,
                start_new_session=True,
            )
        except OSError as error:
            raise ProviderError(
                f"{printable(self._command[0])} cannot be run: {error.strerror or error}.", code=Code.NOT_CAPABLE
            ) from error
        self._tasks = [asyncio.create_task(self._feed()), asyncio.create_task(self._drain())]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await uncancelled(self._end())

    async def stdout(self) -> AsyncIterator[bytes]:
        """See `Pipe.stdout`: pieces of at most 1 MiB. `ProviderError` `NOT_CAPABLE` when it is no shell that answers."""
        assert self._process.stdout is not None
        while piece := await self._process.stdout.read(PIECE):
            if own := self._beginning.passed(piece):
                yield own
            elif self._beginning.noisy:
                raise ProviderError(f"What answers behind {self._shown} is no shell.", code=Code.NOT_CAPABLE)
        self._heard = True

    async def wait(self) -> ExecResult:
        """See `Pipe.wait`. An exit code below 0 is the number of the signal that ended the process. An error of what iterates
        over the input is raised here. `ProviderError` when all output came and the script had not begun."""
        await asyncio.gather(*self._tasks)
        code = await self._process.wait()
        failed = unreachable(self._shown, code, bytes(self._stderr), self._beginning) if self._heard else None
        if failed is not None and not self._beginning.begun:
            raise failed
        return ExecResult(code, stderr=bytes(self._stderr))

    async def _feed(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read all
                stdin.write(b"\n")
                if isinstance(self._stdin, bytes):
                    stdin.write(self._stdin)
                    await stdin.drain()
                else:
                    async for piece in self._stdin:
                        stdin.write(piece)
                        await stdin.drain()
        finally:
            stdin.close()

    async def _drain(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while piece := await stderr.read(STDERR_KEPT):
            self._stderr += piece
            del self._stderr[:-STDERR_KEPT]

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        transport = getattr(self._process, "_transport", None)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or another user's by way of sudo
            os.killpg(self._process.pid, signal.SIGKILL)  # the whole group: what the shell has started too
            # asyncio waits for pipes, which a child that left the group may keep open
            for pipe in () if transport is None else map(transport.get_pipe_transport, range(3)):
                if pipe is not None:
                    pipe.close()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await self._process.wait()
        finally:
            if transport is not None:
                transport.close()  # not before: it would take the exit code that asyncio waits for
