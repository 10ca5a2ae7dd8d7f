"""The scan of a sandbox's tree: one script prints all of it through one pipe, pruned where the files are; the host sorts."""

import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from typing import Final, Self

from snapcore.errors import Code, SnapshotError, printable
from snapcore.model import FileStat
from snapcore.protocols import ScanSelection
from snapcore.sandboxes import Pipe, Shell

from .links import inside
from .mounts import unescaped
from .shell_records import make_records
from .shell_rows import ScanRows, ScanTree
from .shell_scripts import Pruning, clock_script, header_script, look_script, tree_script
from .shell_tools import Tools, broken, finished, read_tools, run, unstalled

__all__ = ["ShellScan", "ask_clock"]

MAX_HEADER: Final = 4 << 20
MAX_LOOK: Final = 256 << 20
ENDS: Final = (b"0 0", b"0 123", b"1 0", b"1 123")  # of find and of what it is piped into; 1: something was not there any more
HARMLESS: Final = (b"No such file or directory", b"Not a directory", b"Permission denied", b"ame too long")


def read_clock(now: bytes) -> int:
    """The time in nanoseconds, as `header_script` prints it: nanoseconds, seconds, or the time of a folder as `stat` does."""
    seconds, _, text = now.partition(b" ")
    try:
        if text:
            return int(seconds) * 1_000_000_000 + int(text[20:29])
        return int(seconds) if len(seconds) > 14 else int(seconds) * 1_000_000_000
    except ValueError:
        raise broken("it does not tell the time") from None


def _check_state(state: bytes, root: bytes) -> None:
    if state == b"open":
        return
    if state == b"missing":
        why, code = "is not there", Code.MISSING_WORKSPACE
    elif state == b"other":
        why, code = "is no folder", Code.INVALID_WORKSPACE
    elif state == b"closed":
        why, code = "may not be entered", Code.INVALID_WORKSPACE
    else:
        raise broken("its answer makes no sense")
    raise SnapshotError(f"The workspace {printable(root)} {why} in the sandbox.", code=code, hint="Name an existing folder.")


def _check_end(end: bytes, stderr: bytes) -> None:
    """`ProviderError` unless the tools could list everything. What vanished meanwhile is no failure, nor a folder that may not be
    listed or is too deep: it has a note of its own."""
    if end not in ENDS:
        raise broken(f"its tools ended with {printable(end[:20])}")
    if end == ENDS[0]:
        return
    message = b""
    for line in [*stderr.splitlines(), b"find: "]:
        if line.startswith((b"find: ", b"stat: ")):
            if message and not message.endswith(HARMLESS):
                raise broken(f"not everything could be listed ({printable(message[-200:])})")
            message = line
        elif message:  # of a name with a line break in it; what comes before the first message was cut off
            message += line


class ShellScan:
    """A scan under way. `open` returns once its beginning is known: the tools, the clock at its start, whether a stage is there.
    The tree comes by `batches`, once. To be closed."""

    def __init__(self, root: bytes, pruning: Pruning, token: str) -> None:
        self.pruning = pruning
        self.tools = Tools()
        self.now_ns = 0
        self.staged = False
        self._root = root
        self._real = root
        self._mounts: frozenset[bytes] = frozenset()
        self._token = token
        self._rest = b""
        self._pieces: AsyncGenerator[bytes, None]
        self._pipe: Pipe
        self._held = contextlib.AsyncExitStack()

    @classmethod
    async def open(cls, shell: Shell, root: str, pruning: Pruning, tools: Tools | None) -> Self:
        """Start it, and ask for the tools unless they are known. Raises `SnapshotError` `MISSING_WORKSPACE` or
        `INVALID_WORKSPACE`, `ProviderError` `MISSING_TOOL`."""
        token = secrets.token_hex(16)
        scan = cls(os.fsencode(root), pruning, token)
        script = header_script(os.fsencode(root), token, tools) + tree_script(pruning, token)
        try:
            scan._pipe = await scan._held.enter_async_context(shell.pipe(script))
            scan._pieces = unstalled(scan._pipe.stdout())
            scan._held.push_async_callback(scan._pieces.aclose)
            await scan._begin(tools)
        except BaseException:
            await scan.close()
            raise
        return scan

    async def close(self) -> None:
        """End the pipe. Idempotent."""
        await self._held.aclose()

    async def _begin(self, tools: Tools | None) -> None:
        data, end = b"", b"\0" + self._token.encode() + b"\0"
        while end not in data:
            piece = await anext(self._pieces, b"")
            if not piece:
                await finished(self._pipe)
                raise broken("its answer was cut short")
            data += piece
            if len(data) > MAX_HEADER and end not in data:
                raise broken("it answers with more than there can be")
        header, _, self._rest = data.partition(end)
        words, state, *facts = header.split(b"\0")
        _check_state(state, self._root)
        if len(facts) < 3:
            raise broken("its answer makes no sense")
        self.tools = tools or read_tools(words.splitlines())
        self.tools.require("find", *(("xargs", "stat") if self.tools.find != "printf" else ()))
        self._real, now, staged, *points = facts
        self.now_ns = read_clock(now)
        self.staged = bool(staged)
        mounts = (inside(unescaped(point), self._real) for point in points)
        self._mounts = frozenset(path for path in mounts if path)

    async def batches(self, shell: Shell, selection: ScanSelection) -> AsyncIterator[Sequence[FileStat]]:
        """See `Workspace.scan`. `selection` is the one that the pruning is of."""
        rows = ScanRows()
        records = make_records(self.tools, self._token)
        rows.add(records.feed(self._rest))
        async for piece in self._pieces:
            if records.end is not None:
                raise broken("it goes on after its end")
            rows.add(records.feed(piece))
        result = await finished(self._pipe)
        if records.end is None or records.rest:
            raise broken("its answer was cut short")
        await self.close()
        _check_end(records.end, result.stderr)

        async def look(paths: Collection[bytes]) -> dict[bytes, bytes | None]:
            return await _look(shell, self._root, self.tools, paths)

        tree = ScanTree(
            rows,
            selection,
            cross_mounts=self.pruning.cross_mounts,
            mounts=self._mounts,
            roots=(self._root, self._real),
            whole_paths=self.tools.find != "printf",
        )
        await tree.look_at_links(look)
        for batch in tree.batches():
            yield batch


async def ask_clock(shell: Shell, tools: Tools) -> int:
    """The sandbox's time in nanoseconds."""
    return read_clock((await run(shell, clock_script(tools), max_output=MAX_HEADER)).removesuffix(b"\n"))


async def _look(shell: Shell, root: bytes, tools: Tools, paths: Collection[bytes]) -> dict[bytes, bytes | None]:
    """Of those paths where something is: a link's target, empty bytes for anything else."""
    tools.require("xargs")
    records = make_records(tools, secrets.token_hex(16))
    names = b"".join(b"./" + path + b"\0" for path in paths)
    answer = await run(shell, look_script(root, records), names, max_output=MAX_LOOK)
    found: dict[bytes, bytes | None] = {}
    for numbers, target, path in records.feed(answer):
        found[path.removeprefix(b"./")] = target if numbers[1:2] == b"l" else b""
    if records.end is None:
        raise broken("its answer was cut short")
    return found
