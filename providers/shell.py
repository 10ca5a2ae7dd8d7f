"""A workspace over any sandbox where `sh` can be run: GNU tools or busybox, bytes in and bytes out, few and large calls."""

import contextlib
import posixpath
from collections.abc import AsyncIterator, Sequence
from typing import Final, Literal

from snapcore.errors import Code, ProviderError, printable
from snapcore.model import Capabilities, FileStat
from snapcore.protocols import ReadBlock, SandboxClock, ScanSelection, Stage
from snapcore.sandboxes import Shell
from snapcore.selection import FilePolicy

from .shell_read import read_files
from .shell_scan import ShellScan, ask_clock
from .shell_scripts import Pruning
from .shell_tools import Tools, find_tools

__all__ = ["ShellWorkspace"]

FINE_NS: Final = 20_000_000  # the kernel stamps files by its tick, at most 10 ms behind the clock
SECOND_NS: Final = 1_000_000_000
COARSE_NS: Final = 3_000_000_000  # whole seconds, cut off, of a file system that may have two of them


class ShellWorkspace:
    """The files under `root` in the sandbox of a shell."""

    def __init__(self, shell: Shell, root: str) -> None:
        self._shell = shell
        self._root = posixpath.normpath(root)
        if not self._root.startswith("/"):
            raise ProviderError(f"The workspace root {printable(root)!r} is not an absolute path.", code=Code.NOT_CAPABLE)
        self._tools: Tools | None = None
        self._pruning: Pruning | None = None
        self._ahead: ShellScan | None = None
        self._clock_taken = False

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
            time_granularity_ns=_granularity(tools),
            stable_inodes=True,
            ctime=tools.nanoseconds,
            atomic_swap=True,
            rename=True,
            symlinks=True,
            hard_links=True,
            modes=True,
            mtimes=tools.nanoseconds and tools.touch == "ns" and tools.tar == "gnu",
            owners=tools.uid == 0,
        )

    async def clock(self) -> SandboxClock:
        """See `Workspace.clock`. Once in a hold, the time at which its scan began."""
        ahead = self._ahead
        if ahead is not None and not self._clock_taken:
            self._clock_taken = True
            return self._clock(ahead.now_ns)
        return self._clock(await ask_clock(self._shell, await self._found_tools()))

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        """See `Workspace.scan`. One call; another when links lead into what is left out."""
        pruning = Pruning.of(selection, cross_mounts=cross_mounts)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.pruning != pruning:
            await ahead.close()
            ahead = None
        self._pruning = pruning
        scan = ahead or await self._begin_scan(pruning)
        try:
            async for batch in scan.batches(self._shell, selection):
                yield batch
        finally:
            await scan.close()

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        """See `Workspace.read`. One call, and a second one for what changes while it is read."""
        if not files:
            return
        tools = await self._found_tools()
        async with contextlib.aclosing(read_files(self._shell, self._root, tools, files)) as batches:
            async for batch in batches:
                yield batch

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Only recovers: a lock that a process in the sandbox would have to keep is not worth its calls. The scan that is to come
        is begun by the same call, for the selection of the last one, or the default policy's."""
        if self._pruning is None:
            self._pruning = Pruning.of(FilePolicy().compile(), cross_mounts=False)
        scan = await self._begin_scan(self._pruning)
        if scan.staged:
            await scan.close()
            await self.recover()
            scan = await self._begin_scan(self._pruning)
        self._ahead, self._clock_taken = scan, False
        try:
            yield
        finally:
            self._ahead = None
            await scan.close()

    async def recover(self) -> Literal["", "swept", "finished"]:
        """See `Workspace.recover`."""
        from .shell_stage import recover

        return await recover(self._shell, self._root, await self._found_tools())

    async def open_stage(self) -> Stage:
        """See `Workspace.open_stage`."""
        from .shell_stage import open_stage

        return await open_stage(self._shell, self._root, await self._found_tools())

    async def _begin_scan(self, pruning: Pruning) -> ShellScan:
        scan = await ShellScan.open(self._shell, self._root, pruning, self._tools)
        self._tools = scan.tools
        return scan

    def _clock(self, now_ns: int) -> SandboxClock:
        return SandboxClock(now_ns, self.capabilities.time_granularity_ns)

    async def _found_tools(self) -> Tools:
        if self._tools is None:
            self._tools = await find_tools(self._shell, self._root)
        return self._tools


def _granularity(tools: Tools) -> int:
    """How much older than the clock a time has to be for a later change to show. A clock in whole seconds is up to one behind."""
    if not tools.nanoseconds:
        return COARSE_NS
    return FINE_NS if tools.date in ("ns", "proc") else FINE_NS + SECOND_NS
