"""Commands in a Docker container: binary pipes through the attached connection, and an end to what is left."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final

from snapcore.errors import Code, ProviderError
from snapcore.sandboxes import ExecResult

from .docker_client import Connection, DockerEngine
from .threads import uncancelled

__all__ = ["DockerPipe", "DockerShell"]

STDOUT: Final = 1
STDERR: Final = 2
STDERR_KEPT: Final = 8 << 10
FRAME_HEADER: Final = 8
IDLE_SECONDS: Final = 900.0  # without a byte either way the connection is taken for dead
KILL_SECONDS: Final = 20.0
LONG_PAUSE: Final = 0.1  # seconds; the exit code comes sooner than that after the output
SAYS_PID: Final = "echo $$ >&2\n"  # the first line of stderr: a process group of its own, which is how a command is ended
MAX_PID_LINE: Final = 24


class DockerShell:
    """`sh` in a container, as the container's user or as `user`."""

    def __init__(self, engine: DockerEngine, container: str, sandbox_id: str, user: str | None = None) -> None:
        self._engine = engine
        self._container = container
        self._id = sandbox_id
        self._user = user

    @property
    def sandbox_id(self) -> str:
        """`docker://` with the engine's id and the container's."""
        return self._id

    def pipe(self, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> AbstractAsyncContextManager["DockerPipe"]:
        """See `Shell.pipe`: one exec."""
        command = ["sh", "-c", SAYS_PID + script]
        return DockerPipe(self._engine, self._container, command, stdin, user=self._user, says_pid=True)


class DockerPipe:
    """One exec. With `says_pid` its first line on stderr is its process id, which is taken out; without, leaving early cannot
    end a process that does not read its input."""

    def __init__(
        self,
        engine: DockerEngine,
        container: str,
        command: Sequence[str],
        stdin: bytes | AsyncIterator[bytes] = b"",
        *,
        user: str | None = None,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        says_pid: bool = False,
    ) -> None:
        self._engine = engine
        self._container = container
        self._command = list(command)
        self._stdin = stdin
        self._options = {"user": user or "", "workdir": cwd, "environment": dict(environment or {}) or None}
        self._pid_line: bytearray | None = bytearray() if says_pid else None
        self._pid = 0
        self._stderr = bytearray()
        self._exec = ""
        self._connection: Connection | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._ended = False

    async def __aenter__(self) -> "DockerPipe":
        self._connection = await self._engine.run(self._start)
        self._feeding = asyncio.create_task(self._feed(self._connection))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await uncancelled(self._leave())

    async def stdout(self) -> AsyncIterator[bytes]:
        """See `Pipe.stdout`."""
        async for stream, piece in self.output():
            if stream == "stdout":
                yield piece

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """All output as it comes: `"stdout"` or `"stderr"` and a piece of it. Consumed once."""
        frames = _Frames()
        while data := await self._receive():
            for stream, piece in frames.feed(data):
                if stream == STDERR:
                    said = self._without_pid(piece)
                    if said:
                        self._stderr += said
                        del self._stderr[:-STDERR_KEPT]
                        yield "stderr", said
                else:
                    yield "stdout", piece
        if not frames.whole:
            raise _broken()
        self._ended = True

    async def wait(self) -> ExecResult:
        """See `Pipe.wait`. An error of what iterates over the input is raised here."""
        if not self._ended:
            async for _ in self.output():
                pass
        await self._fed()
        code = await self._exit_code()
        if code >= 126:
            await self._check_alive()
        return ExecResult(code, stderr=bytes(self._stderr))

    # ---- the exec

    def _start(self) -> Connection:
        engine = self._engine
        engine.traffic.calls += 1
        stdin = not isinstance(self._stdin, bytes) or bool(self._stdin)
        created = engine.api.exec_create(self._container, self._command, stdin=stdin, **self._options)
        self._exec = str(created["Id"])
        return engine.start_exec(self._exec)

    async def _feed(self, connection: Connection) -> None:
        if isinstance(self._stdin, bytes) and not self._stdin:
            return  # it has no input at all
        with contextlib.suppress(OSError):  # it need not read all; that the connection broke shows where output is read
            if isinstance(self._stdin, bytes):
                await connection.send(self._stdin)
            else:
                async for piece in self._stdin:
                    await connection.send(piece)
        await connection.end_input()

    async def _receive(self) -> bytes:
        assert self._connection is not None
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                return await self._connection.receive()
        except TimeoutError:
            raise ProviderError("A command in the Docker container says nothing any more.", retryable=True) from None
        except OSError:
            raise _broken() from None

    def _without_pid(self, piece: bytes) -> bytes:
        if self._pid_line is None:
            return piece
        self._pid_line += piece
        line, found, rest = bytes(self._pid_line).partition(b"\n")
        if not found and len(line) <= MAX_PID_LINE:
            return b""
        whole, self._pid_line = bytes(self._pid_line), None
        if found and line.isdigit() and len(line) <= MAX_PID_LINE and int(line) > 1:
            self._pid = int(line)
            return rest
        return whole

    async def _fed(self) -> None:
        """Wait until all input is sent, or the command has ended: of what it did not take, the engine takes no more either."""
        feeding = self._feeding
        assert feeding is not None
        pause = 0.005
        while not feeding.done():
            await asyncio.wait([feeding], timeout=pause)
            pause = min(2 * pause, 2.0)
            if not feeding.done() and await self._has_ended():
                feeding.cancel()
                await asyncio.wait([feeding])
        if not feeding.cancelled():
            feeding.result()

    async def _has_ended(self) -> bool:
        try:
            state: dict[str, Any] = await self._engine.run(lambda: self._engine.api.exec_inspect(self._exec))
        except ProviderError:
            return True  # the engine does not know it any more; what became of it is asked for next
        return not state.get("Running") and state.get("ExitCode") is not None

    async def _exit_code(self) -> int:
        pause = 0.005
        for _ in range(60):
            try:
                state: dict[str, Any] = await self._engine.run(lambda: self._engine.api.exec_inspect(self._exec))
            except ProviderError:
                await self._check_alive()  # of a container that is gone, the engine forgets the commands
                raise
            if not state.get("Running") and state.get("ExitCode") is not None:
                return int(state["ExitCode"])
            if pause > LONG_PAUSE:  # of a container that was removed, the engine goes on saying that its commands run
                await self._check_alive()
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)
        raise _broken()

    async def _check_alive(self) -> None:
        """A command that was ended may have been so because its container was."""
        state = (await self._engine.run(lambda: self._engine.api.inspect_container(self._container)))["State"]
        if not state.get("Running"):
            raise ProviderError("The Docker container has ended.", hint="Start it again.")

    # ---- the end

    async def _leave(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)
        if self._connection is None:
            return
        try:
            if not self._ended:
                with contextlib.suppress(ProviderError, TimeoutError):
                    async with asyncio.timeout(KILL_SECONDS):
                        await self._kill()
        finally:
            self._connection.close()

    async def _kill(self) -> None:
        """End what still runs, and what it started in its group; not when it has ended or the engine is gone."""
        assert self._connection is not None
        await self._connection.end_input()
        frames = _Frames()
        while self._pid_line is not None and not self._pid:  # it has hardly begun
            try:
                data = await self._connection.receive()
            except OSError:
                return
            if not data:
                return
            for stream, piece in frames.feed(data):
                if stream == STDERR:
                    self._without_pid(piece)
        if not self._pid:
            return
        command = ["sh", "-c", f"kill -9 -{self._pid}"]

        def kill() -> None:
            created = self._engine.api.exec_create(self._container, command, user="0", stdout=False, stderr=False)
            self._engine.api.exec_start(created["Id"], detach=True)

        await self._engine.run(kill)


def _broken() -> ProviderError:
    return ProviderError(
        "The connection to the Docker engine broke while a command ran.", code=Code.SANDBOX_UNAVAILABLE, retryable=True
    )


class _Frames:
    """The engine's stream taken apart: frames of stdout and stderr, each after a header of 8 bytes. It keeps no more than one."""

    def __init__(self) -> None:
        self._header = b""
        self._stream = 0
        self._left = 0
        self._plain = False

    @property
    def whole(self) -> bool:
        """Whether the stream may end here."""
        return self._left == 0 and not self._header

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """(stream, bytes) of what `data` completes or goes on with."""
        out: list[tuple[int, bytes]] = []
        at = 0
        while at < len(data):
            if self._plain:
                out.append((STDERR, data[at:]))
                break
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                out.append((self._stream, piece))
                continue
            taken = data[at : at + FRAME_HEADER - len(self._header)]
            at += len(taken)
            self._header += taken
            if len(self._header) < FRAME_HEADER:
                continue
            header, self._header = self._header, b""
            if header[0] > STDERR or header[1:4] != b"\0\0\0":
                # not frames: the engine says in plain text why it could not start the command
                self._plain = True
                out.append((STDERR, header))
                continue
            self._stream, self._left = header[0], int.from_bytes(header[4:], "big")
        return out
