"""Any sandbox handle with six file operations as a workspace: one call a file, so the slowest kind, and never half done."""

import asyncio
import contextlib
import os
import posixpath
import stat
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final, Literal

import msgspec

from snapcore.errors import Code, ProviderError, SnapshotError, printable
from snapcore.model import Capabilities, FileStat, Kind, Note
from snapcore.protocols import FileHandle, ReadBlock, SandboxClock, ScanSelection, Stage

from .folders import is_stage_name, split
from .handle_files import HandleFiles
from .links import link_leads_out
from .stats import NOT_REGULAR, describe, problem
from .threads import together

__all__ = ["PerFileWorkspace"]

GRANULARITY_NS: Final = 2_000_000_000  # whole seconds, and some room for a clock that is not this host's
SIDE_BY_SIDE: Final = 16
SCAN_BATCH: Final = 2_000
READ_BYTES: Final = 8 << 20
READ_BLOCK: Final = 4 << 20


class PerFileWorkspace:
    """The files under `root` of a user's own handle (see `FileHandle`), whose methods may be plain or async.

    `sandbox_id` is the handle's own, when it has one; without, it is empty, so that stats kept for one sandbox are never
    taken for another's. With `rename` a restore is staged and journaled as on a local disk; without,
    `swap` copies staged files into place, so that a reader may see one half written (`atomic_swap` is false).

    Limits of such a handle: it is trusted not to follow a link in the last component, except where `lstat` says that
    there is none; a link that is planted between that check and the operation is not seen. A file is written from one
    bytes object, so it has to fit into memory. Links do not get their mtime.
    """

    def __init__(self, handle: FileHandle, root: str) -> None:
        self._root = posixpath.normpath(root)
        if not self._root.startswith("/"):
            raise ProviderError(f"The workspace root {printable(root)!r} is not an absolute path.", code=Code.NOT_CAPABLE)
        self._files = HandleFiles(handle, self._root)
        self._id = str(getattr(handle, "sandbox_id", None) or "")
        self._ctime = False

    @property
    def root(self) -> str:
        """The root's path in the sandbox."""
        return self._root

    @property
    def sandbox_id(self) -> str:
        """The handle's own, or empty."""
        return self._id

    @property
    def host_path(self) -> str | None:
        """None: where the handle's files are is not known."""
        return None

    @property
    def capabilities(self) -> Capabilities:
        """By the methods that the handle has. `ctime` is known once a scan has seen one."""
        files = self._files
        return Capabilities(
            time_granularity_ns=GRANULARITY_NS,
            ctime=self._ctime,
            atomic_swap=files.can_rename,
            rename=files.can_rename,
            symlinks=files.can_symlink,
            hard_links=files.can_link,
            modes=files.can_chmod,
            mtimes=files.can_utime,
        )

    async def clock(self) -> SandboxClock:
        """This host's clock: asking the sandbox's own would mean to write a file."""
        return SandboxClock(time.time_ns(), GRANULARITY_NS)

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        """See `Workspace.scan`. Files of a folder are stat'ed up to 16 side by side."""
        walk = _Scan(self._files, selection, cross_mounts, os.fsencode(self._root))
        batch: list[FileStat] = []
        try:
            async for found in walk.entries():
                batch.append(found)
                if len(batch) >= SCAN_BATCH:
                    yield batch
                    batch = []
        except OSError as error:
            raise self._unavailable(error) from error
        self._ctime = walk.seen_ctime
        if batch:
            yield batch

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        """See `Workspace.read`. Small files are read up to 16 side by side, about 8 MiB a batch; large ones as a stream."""
        start, folders = 0, {b""}
        while start < len(files):
            if files[start].size > READ_BYTES:
                async for block in self._read_one(start, files[start], folders):
                    yield [block]
                start += 1
                continue
            end, size = start, 0
            while end < min(len(files), start + SIDE_BY_SIDE) and size + files[end].size <= READ_BYTES:
                size += files[end].size
                end += 1
            parts = await together(self._read_all(index, files[index], folders) for index in range(start, end))
            yield [block for part in parts for block in part]
            start = end

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Only recovers: a handle has no lock that would keep another host's restore from swapping."""
        await self.recover()
        yield

    async def recover(self) -> Literal["", "swept", "finished"]:
        """See `Workspace.recover`. A stage of another host is taken for dead after 10 minutes without a heartbeat."""
        from .perfile_stage import recover

        try:
            return await recover(self._files)
        except OSError as error:
            raise self._unavailable(error) from error

    async def open_stage(self) -> Stage:
        """See `Workspace.open_stage`. As exclusive as the handle's `mkdir` is."""
        from .perfile_stage import open_stage

        try:
            return await open_stage(self._files)
        except OSError as error:
            raise self._unavailable(error) from error

    async def _read_all(self, index: int, file: FileStat, folders: set[bytes]) -> list[ReadBlock]:
        return [block async for block in self._read_one(index, file, folders)]

    async def _read_one(self, index: int, file: FileStat, folders: set[bytes]) -> AsyncIterator[ReadBlock]:
        try:
            before = await self._files.lstat(file.path)
            if not stat.S_ISREG(before.st_mode) or await self._below_a_link(file.path, folders):
                yield ReadBlock(index, 0, b"", last=True, problem=NOT_REGULAR)
                return
            offset = 0
            async with contextlib.aclosing(self._blocks(file)) as blocks:
                async for data in blocks:
                    yield ReadBlock(index, offset, data)
                    offset += len(data)
            after = await self._files.lstat_or_none(file.path)
        except OSError as error:
            yield ReadBlock(index, 0, b"", last=True, problem=problem(error))
            return
        yield ReadBlock(index, offset, b"", True, describe(file.path, after) if after is not None else None)

    async def _blocks(self, file: FileStat) -> AsyncGenerator[bytes, None]:
        """The file's bytes up to its scanned size, in blocks of at most 4 MiB."""
        left = file.size
        if not left:
            return
        async with contextlib.aclosing(self._files.read(file.path)) as pieces:
            async for piece in pieces:
                for at in range(0, min(len(piece), left), READ_BLOCK):
                    yield piece[at : min(at + READ_BLOCK, left)]
                left -= len(piece)
                if left <= 0:
                    return

    async def _below_a_link(self, path: bytes, folders: set[bytes]) -> bool:
        """Whether a parent is no folder but a link; `folders` are those that were looked at already."""
        parent, passed = split(path)[0], []
        while parent not in folders:
            st = await self._files.lstat(parent)
            if not stat.S_ISDIR(st.st_mode):
                return True
            passed.append(parent)
            parent = split(parent)[0]
        folders.update(passed)
        return False

    def _unavailable(self, error: OSError) -> ProviderError:
        return ProviderError(
            f"The sandbox's files under {printable(self._root)} cannot be used: {error.strerror or error}.",
            code=Code.NOT_CAPABLE if isinstance(error, PermissionError) else Code.SANDBOX_UNAVAILABLE,
        )


class _UnknownTargetError(Exception):
    def __init__(self, path: bytes) -> None:
        super().__init__(path)
        self.path = path


class _Scan:
    """One walk, with the listings of the folders on the way to where it is."""

    def __init__(self, files: HandleFiles, selection: ScanSelection, cross_mounts: bool, root: bytes) -> None:
        self._files = files
        self._selection = selection
        self._marked = selection.marked_folders
        self._cross_mounts = cross_mounts
        self._root = root
        self._side_by_side = asyncio.Semaphore(SIDE_BY_SIDE)
        self._targets: dict[bytes, bytes | None] = {}
        self.seen_ctime = False

    async def entries(self) -> AsyncIterator[FileStat]:
        st = await self._files.lstat_or_none(b"")
        if st is None or not stat.S_ISDIR(st.st_mode):
            raise SnapshotError(
                f"The workspace {printable(self._root)} is no folder of the sandbox.",
                code=Code.MISSING_WORKSPACE if st is None else Code.INVALID_WORKSPACE,
                hint="Name an existing folder.",
            )
        root = describe(b"", st)
        self.seen_ctime = root.ctime_ns != 0
        yield root
        stack = [(iter(await self._list(b"", at_mount=True)), root.device)]
        while stack:
            children, device = stack[-1]
            for entry in children:
                if self._selection.excludes(entry.path, entry.kind):
                    yield FileStat(entry.path, entry.kind, note=Note.EXCLUDED)
                elif entry.kind == Kind.DIR:
                    folder, listed = await self._enter(entry, device)
                    if folder is not None:
                        yield folder
                    if listed is not None:
                        stack.append((iter(listed), entry.device))
                        break
                elif entry.kind == Kind.LINK and not entry.note:
                    yield await self._link(entry)
                else:
                    yield entry
            else:
                stack.pop()

    async def _enter(self, entry: FileStat, device: int) -> tuple[FileStat | None, list[FileStat] | None]:
        """What to show of a folder, None when it has vanished, and its listing when it is part of the tree."""
        other = entry.device != device
        if other and not self._cross_mounts:
            return _noted(entry, Note.MOUNT), None
        marker = self._marked.get(entry.path.rpartition(b"/")[2])
        try:
            if marker is not None and await self._files.lstat_or_none(entry.path + b"/" + marker) is not None:
                return FileStat(entry.path, Kind.DIR, note=Note.EXCLUDED), None
            return entry, await self._list(entry.path, at_mount=other)
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except PermissionError:
            return _noted(entry, Note.UNREADABLE), None

    async def _list(self, path: bytes, *, at_mount: bool) -> list[FileStat]:
        prefix = path + b"/" if path else b""
        names = [name for name in await self._files.list(path) if not (at_mount and is_stage_name(name))]
        listed: list[FileStat] = []
        for start in range(0, len(names), SCAN_BATCH):
            part = names[start : start + SCAN_BATCH]
            found = await together(self._stat(prefix + name) for name in part)
            listed += [entry for entry in found if entry is not None]
        return listed

    async def _stat(self, path: bytes) -> FileStat | None:
        async with self._side_by_side:
            try:
                st = await self._files.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except PermissionError:
                return FileStat(path, Kind.FILE, note=Note.UNREADABLE)
        return describe(path, st)

    async def _link(self, entry: FileStat) -> FileStat:
        if not self._files.can_readlink:
            return _noted(entry, Note.UNREADABLE)
        try:
            target = await self._files.readlink(entry.path)
        except OSError:
            return _noted(entry, Note.UNREADABLE)
        self._targets[entry.path] = target
        while True:
            try:
                leads_out = link_leads_out(entry.path, target, (self._root,), self._target)
            except _UnknownTargetError as unknown:
                self._targets[unknown.path] = await self._look(unknown.path)
                continue
            return _noted(entry, Note.OUTSIDE if leads_out else Note.NONE, target)

    def _target(self, parent: bytes, name: bytes) -> bytes | None:
        path = parent + b"/" + name if parent else name
        try:
            return self._targets[path]
        except KeyError:
            raise _UnknownTargetError(path) from None

    async def _look(self, path: bytes) -> bytes | None:
        try:
            st = await self._files.lstat(path)
            return await self._files.readlink(path) if stat.S_ISLNK(st.st_mode) else b""
        except OSError:
            return None


def _noted(entry: FileStat, note: str, target: bytes = b"") -> FileStat:
    return msgspec.structs.replace(entry, note=note, target=target)
