"""A workspace over any sandbox where `sh` can be run: GNU tools or busybox, bytes in and bytes out, few and large calls."""

import contextlib
import posixpath
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final, Literal

from snapcore.errors import Code, ProviderError, printable
from snapcore.model import Capabilities, FileStat
from snapcore.protocols import ReadBlock, SandboxClock, ScanSelection, Stage
from snapcore.sandboxes import Shell

from .shell_tools import Tools, find_tools

__all__ = ["ShellWorkspace"]

FINE_NS: Final = 20_000_000  # the kernel stamps files by its tick, at most 10 ms behind the clock
COARSE_NS: Final = 3_000_000_000  # whole seconds, cut off, of a file system that may have two of them


class ShellWorkspace:
    """The files under `root` in the sandbox of a shell."""

    def __init__(self, shell: Shell, root: str) -> None:
        self._shell = shell
        self._root = posixpath.normpath(root)
        if not self._root.startswith("/"):
            raise ProviderError(f"The workspace root {printable(root)!r} is not an absolute path.", code=Code.NOT_CAPABLE)
        self._tools: Tools | None = None

    @property
    def root(self) -> str:
        """The root's path in the sandbox."""
        return self._root

    @property
    def sandbox_id(self) -> str:
        """The shell's own."""
        return self._shell.sandbox_id

    @property
    def host_path(self) -> str | None:
        """None: where the sandbox's files are is not known."""
        return None

    @property
    def capabilities(self) -> Capabilities:
        """By the sandbox's tools, once they were asked for; before, the least that they can be."""
        tools = self._tools or Tools()
        return Capabilities(
            time_granularity_ns=FINE_NS if tools.nanoseconds else COARSE_NS,
            stable_inodes=True,
            ctime=tools.nanoseconds,
            atomic_swap=True,
            rename=True,
            symlinks=True,
            hard_links=True,
            modes=True,
            mtimes=True,
            owners=tools.uid == 0,
        )

    async def clock(self) -> SandboxClock:
        """See `Workspace.clock`."""
        return SandboxClock(time.time_ns(), COARSE_NS)

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        """See `Workspace.scan`."""
        raise ProviderError("Not yet.", code=Code.NOT_CAPABLE)
        yield []

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        """See `Workspace.read`."""
        raise ProviderError("Not yet.", code=Code.NOT_CAPABLE)
        yield []

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Only recovers: a lock that a process in the sandbox would have to keep is not worth its calls."""
        await self.recover()
        yield

    async def recover(self) -> Literal["", "swept", "finished"]:
        """See `Workspace.recover`."""
        from .shell_stage import recover

        return await recover(self._shell, self._root, await self._found_tools())

    async def open_stage(self) -> Stage:
        """See `Workspace.open_stage`."""
        from .shell_stage import open_stage

        return await open_stage(self._shell, self._root, await self._found_tools())

    async def _found_tools(self) -> Tools:
        if self._tools is None:
            self._tools = await find_tools(self._shell, self._root)
        return self._tools
