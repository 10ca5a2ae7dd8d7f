"""The handle of a sandbox that is a resource of a Rebuno execution."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from snapcore.protocols import Workspace
from snapcore.sandboxes import Abilities, Binding, ExecResult, OutputCallback, SandboxHandle, SandboxProvider

__all__ = ["RebunoSandbox"]

T = TypeVar("T")


class RebunoSandbox:
    """What `rebuno.resource` returns: a `SandboxHandle` that may also be paused; when it is, or was closed, checkpoints are taken
    of it all the same."""

    def __init__(self, provider: SandboxProvider, handle: SandboxHandle, thread_id: str) -> None:
        self._provider = provider
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._paused = False
        self._closed = False
        self.thread_id = thread_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sandbox_id!r}, thread_id={self.thread_id!r})"

    @property
    def sandbox_id(self) -> str:
        """See `SandboxHandle`."""
        return self._handle.sandbox_id

    @property
    def workspace_root(self) -> str:
        """See `SandboxHandle`."""
        return self._handle.workspace_root

    @property
    def binding(self) -> Binding:
        """See `SandboxHandle`."""
        return self._handle.binding

    @property
    def abilities(self) -> Abilities:
        """See `SandboxHandle`."""
        return self._handle.abilities

    def workspace(self, root: str | None = None) -> Workspace:
        """See `SandboxHandle`."""
        return self._handle.workspace(root)

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
        """See `SandboxHandle`."""
        return await self._handle.exec(
            command,
            stdin=stdin,
            cwd=cwd,
            environment=environment,
            user=user,
            timeout=timeout,
            on_output=on_output,
            max_output=max_output,
        )

    async def upload(self, path: str, data: bytes | AsyncIterator[bytes]) -> None:
        """See `SandboxHandle`."""
        await self._handle.upload(path, data)

    def download(self, path: str) -> AsyncIterator[bytes]:
        """See `SandboxHandle`."""
        return self._handle.download(path)

    async def pause(self) -> None:
        """Pause the sandbox, as while an approval is waited for; the next dispatch opens it again. A checkpoint that is due later
        (on completion) resumes it for as long as the capture takes."""
        await self._provider.pause(self._handle)
        self._paused = self._closed = True

    async def close(self) -> None:
        """Release the connection; the sandbox lives on. Idempotent."""
        self._closed = True
        await self._handle.close()

    async def on_its_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await on the event loop that opened the sandbox, which its connections are bound to: tools may run on another one. When
        that loop has ended, on the present one."""
        if self._loop is asyncio.get_running_loop() or not self._loop.is_running():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[SandboxHandle]:
        """The sandbox to be read. One that was paused or closed is opened for it, and put back into that state; a connection of a
        loop that has ended is of no use any more."""
        if not self._closed and self._loop is asyncio.get_running_loop():
            yield self._handle
            return
        handle = await self._provider.open(self._handle.binding)
        try:
            yield handle
        finally:
            await (self._provider.pause(handle) if self._paused else handle.close())
