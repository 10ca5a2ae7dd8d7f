"""Processes of this host, run to their end: binary input and output, bounded, in a process group of their own."""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Final

from snapcore.errors import Code, ProviderError, SnapshotError, printable
from snapcore.sandboxes import ExecResult, OutputCallback

from .threads import uncancelled

__all__ = ["Kept", "Processes", "Sink", "cannot_start", "keeping"]

PIECE: Final = 64 << 10
INPUT_PIECE: Final = 1 << 20

Sink = Callable[[str, bytes], None]


class Kept:
    """The first `limit` bytes of stdout and of stderr."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._sizes = {"stdout": 0, "stderr": 0}
        self.truncated = False

    def add(self, stream: str, piece: bytes) -> None:
        room = self._limit - self._sizes[stream]
        if len(piece) > room:
            piece = piece[: max(room, 0)]
            self.truncated = True
        self._parts[stream].append(piece)
        self._sizes[stream] += len(piece)

    def result(self, exit_code: int) -> ExecResult:
        return ExecResult(exit_code, b"".join(self._parts["stdout"]), b"".join(self._parts["stderr"]), self.truncated)


def keeping(max_output: int, on_output: OutputCallback | None) -> tuple[Kept, Sink]:
    """Where output goes: what is kept of it, and a function that keeps a piece and hands it on."""
    kept = Kept(max_output)

    def sink(stream: str, piece: bytes) -> None:
        kept.add(stream, piece)
        if on_output is not None:
            on_output(stream, piece)

    return kept, sink


class Processes:
    """Those of one handle that are running, so that closing it ends them."""

    def __init__(self) -> None:
        self._groups: set[int] = set()

    def end(self) -> None:
        """Kill all of them, and what they started."""
        for group in list(self._groups):
            _kill(group)

    async def run(
        self, command: Sequence[str | bytes], stdin: bytes, sink: Sink, *, timeout: float | None = None, **options: Any
    ) -> int:
        """The exit code of a command, 128 and a signal's number when that ended it, once its output has ended. `options` go to
        `subprocess.Popen`.

        `ProviderError` `EXEC_TIMEOUT` after `timeout` seconds. Then, and when the caller is cancelled, the process and what it
        started in its group are killed. Raises `OSError` when it cannot be started.
        """
        running: list[asyncio.subprocess.Process] = []

        async def start() -> None:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                **options,
            )
            running.append(process)
            self._groups.add(process.pid)

        try:
            # asyncio, cancelled in there, would kill the command alone and wait for what it started
            await uncancelled(start())
            (process,) = running
            async with asyncio.timeout(timeout):
                await _talk(process, stdin, sink)
                code = await process.wait()
        except BaseException as error:
            for process in running:
                _kill(process.pid)  # the group: the command itself may have ended before what it started
            if isinstance(error, TimeoutError) and timeout is not None:
                raise _timed_out(timeout) from None
            raise
        finally:
            for process in running:
                self._groups.discard(process.pid)
                await uncancelled(_buried(process))
        return code if code >= 0 else 128 - code


def _timed_out(timeout: float) -> ProviderError:
    return ProviderError(f"The command did not end within {timeout:g} seconds and was stopped.", code=Code.EXEC_TIMEOUT)


async def _talk(process: asyncio.subprocess.Process, stdin: bytes, sink: Sink) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_feed(process.stdin, stdin))
            tasks.create_task(_drain(process.stdout, "stdout", sink))
            tasks.create_task(_drain(process.stderr, "stderr", sink))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # what a caller's `on_output` raised


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    # a command need not read what it is given
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for start in range(0, len(data), INPUT_PIECE):
            pipe.write(data[start : start + INPUT_PIECE])
            await pipe.drain()
    pipe.close()


async def _drain(pipe: asyncio.StreamReader, stream: str, sink: Sink) -> None:
    while piece := await pipe.read(PIECE):
        sink(stream, piece)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


async def _buried(process: asyncio.subprocess.Process) -> None:
    """Wait for the process, and let go of pipes that what it left behind may hold open."""
    transport: asyncio.SubprocessTransport = process._transport  # type: ignore[attr-defined]  # the one way to its pipes
    for number in range(3):
        pipe = transport.get_pipe_transport(number)
        if pipe is not None:
            pipe.close()
    await process.wait()
    transport.close()  # not before: it would take the exit code that asyncio waits for


def cannot_start(program: str, error: OSError) -> ProviderError | SnapshotError:
    """The error of a program of this host that cannot be run."""
    if error.errno == errno.E2BIG:
        return SnapshotError(
            f"The command for {printable(program)} and its environment are longer than this host permits.",
            code=Code.INVALID_REQUEST,
            hint="Pass what is long on stdin or in a file.",
        )
    return ProviderError(
        f"{printable(program)} cannot be run on this host: {error.strerror}.",
        code=Code.MISSING_TOOL,
        hint="Install it, or put its folder on PATH.",
    )
