"""A user's own sandbox handle (`FileHandle`), its plain and async methods called alike."""

import asyncio
import inspect
import os
from collections.abc import AsyncGenerator
from typing import Any

from snapcore.protocols import FileHandle

from .threads import in_thread

__all__ = ["HandleFiles"]


class HandleFiles:
    """The handle's operations on paths relative to `root`, as coroutines.

    Async methods may run side by side. Plain ones run in a worker thread, one at a time: a handle need not be safe for
    threads. What the handle lacks is told by the `can_` attributes.
    """

    def __init__(self, handle: FileHandle, root: str) -> None:
        self._handle: Any = handle
        self._base = root.rstrip("/")
        self._plain = asyncio.Lock()
        self.can_rename = hasattr(handle, "rename")
        self.can_symlink = hasattr(handle, "symlink") and hasattr(handle, "readlink")
        self.can_readlink = hasattr(handle, "readlink")
        self.can_link = hasattr(handle, "link") and self.can_rename  # a copy in place of a rename would part them
        self.can_chmod = hasattr(handle, "chmod")
        self.can_utime = hasattr(handle, "utime")

    def full(self, path: bytes) -> str:
        """The absolute path."""
        return f"{self._base}/{os.fsdecode(path)}" if path else self._base or "/"

    async def lstat(self, path: bytes) -> Any:
        return await self._call("lstat", self.full(path))

    async def lstat_or_none(self, path: bytes) -> Any:
        """The stat, or None when there is nothing at the path."""
        try:
            return await self.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    async def list(self, path: bytes) -> list[bytes]:
        """The names in a folder, sorted."""
        return sorted(os.fsencode(name) for name in await self._call("list", self.full(path)))

    async def read(self, path: bytes) -> AsyncGenerator[bytes, None]:
        """The file's bytes in pieces."""
        found = await self._call("read", self.full(path))
        if isinstance(found, bytes | bytearray | memoryview):
            yield bytes(found)
        elif hasattr(found, "__aiter__"):
            async for piece in found:
                yield piece
        else:
            pieces = iter(found)
            while (piece := await self._in_thread(next, pieces, None)) is not None:
                yield piece

    async def read_whole(self, path: bytes) -> bytes:
        return b"".join([piece async for piece in self.read(path)])

    async def write(self, path: bytes, data: bytes) -> None:
        await self._call("write", self.full(path), data)

    async def mkdir(self, path: bytes) -> None:
        await self._call("mkdir", self.full(path))

    async def mkdir_parents(self) -> None:
        """Create the root and its parents, as far as they are not there."""
        parts = self._base.split("/")
        for end in range(2, len(parts) + 1):
            path = "/".join(parts[:end])
            try:
                await self._call("lstat", path)
            except FileNotFoundError:
                await self._call("mkdir", path)

    async def remove(self, path: bytes) -> None:
        await self._call("remove", self.full(path))

    async def rename(self, old: bytes, new: bytes) -> None:
        """Rename, also over a file. For handles that refuse the latter, the file is removed first."""
        try:
            await self._call("rename", self.full(old), self.full(new))
        except FileExistsError:
            await self.remove(new)
            await self._call("rename", self.full(old), self.full(new))

    async def symlink(self, target: bytes, path: bytes) -> None:
        await self._call("symlink", os.fsdecode(target), self.full(path))

    async def readlink(self, path: bytes) -> bytes:
        return os.fsencode(await self._call("readlink", self.full(path)))

    async def link(self, first: bytes, path: bytes) -> None:
        await self._call("link", self.full(first), self.full(path))

    async def set_meta(self, path: bytes, mode: int | None, mtime_ns: int | None) -> None:
        """Mode and mtime, as far as the handle can set them."""
        if mode is not None and self.can_chmod:
            await self._call("chmod", self.full(path), mode)
        if mtime_ns is not None and self.can_utime:
            await self._call("utime", self.full(path), mtime_ns)

    async def remove_tree(self, path: bytes) -> None:
        """Remove a folder and what is in it. What vanishes meanwhile is no error."""
        pending, found = [path], []
        while pending:
            here = pending.pop()
            st = await self.lstat_or_none(here)
            if st is None:
                continue
            found.append(here)
            if st.st_mode & 0o170000 == 0o040000:
                pending += [here + b"/" + name for name in await self.list(here)]
        for here in reversed(found):
            try:
                await self.remove(here)
            except FileNotFoundError:
                continue

    async def _call(self, name: str, *args: object) -> Any:
        method = getattr(self._handle, name)
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            result = method(*args)
        else:
            result = await self._in_thread(method, *args)
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, method: Any, *args: object) -> Any:
        async with self._plain:
            return await in_thread(method, *args)
