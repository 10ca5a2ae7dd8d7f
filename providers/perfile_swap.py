"""The swap of a restore through a user's own handle: the same rules as on a local disk, one call at a time.

Parents are checked with `lstat` to be folders and no links. Without `rename`, what is staged is copied into place and then
removed, so that a step cut short is known by what is still staged.
"""

import stat
from collections.abc import Awaitable, Callable
from typing import Any, Final

from snapcore.model import path_key
from snapcore.protocols import PlaceStep, SetMetaStep

from .folders import STAGE_NAME, split
from .handle_files import HandleFiles
from .journal import Journal
from .perfile_lock import PerFileLock
from .swap import Undone

__all__ = ["NEW", "TRASH", "PerFileSwap", "copy_file"]

NEW: Final = STAGE_NAME + b"/new/"
TRASH: Final = STAGE_NAME + b"/trash/"


class PerFileSwap:
    """One run of a sealed journal; `again` when an earlier run may have done some of it."""

    def __init__(self, files: HandleFiles, lock: PerFileLock, journal: Journal, *, again: bool) -> None:
        self._files = files
        self._lock = lock
        self._journal = journal
        self._again = again
        self._undone: list[tuple[bytes, str]] = []
        self._folders = {b""}  # known to be real folders, not links
        self._modes: dict[bytes, int] = {}  # of folders that were made writable

    async def run(self) -> list[tuple[bytes, str]]:
        for number, path in self._journal.removals():
            await self._step(path, self._remove, number, path)
        for path in self._journal.folder_removals():
            await self._step(path, self._remove_folder, path)
        for place in self._journal.placements():
            await self._step(place.path, self._place, place)
        for meta in self._journal.metadata():
            await self._step(meta.path, self._set_meta, meta)
        for path in sorted(self._modes, key=path_key, reverse=True):
            await self._step(path, self._files.set_meta, path, self._modes[path], None)
        return self._undone

    async def _step(self, path: bytes, work: Callable[..., Awaitable[None]], *args: object) -> None:
        await self._lock.beat()
        try:
            await work(*args)
        except Undone as reason:
            self._undone.append((path, str(reason)))
        except OSError as error:
            self._undone.append((path, error.strerror or str(error)))

    async def _parent(self, path: bytes) -> bytes:
        """The parent's path, every component of it checked to be a folder and no link."""
        parent = split(path)[0]
        if parent in self._folders:
            return parent
        end = -1
        while end != len(parent):
            end = parent.find(b"/", end + 1)
            end = len(parent) if end == -1 else end
            here = parent[:end]
            if here not in self._folders:
                st = await self._files.lstat(here)
                if not stat.S_ISDIR(st.st_mode):
                    raise Undone("a parent is a link or no folder now")
                self._folders.add(here)
        return parent

    async def _changing(self, path: bytes, change: Callable[..., Awaitable[None]], *args: object) -> None:
        """Do it; when that is refused, once more with the parent folder made writable."""
        try:
            await change(*args)
        except PermissionError:
            parent = split(path)[0]
            if not self._files.can_chmod or parent in self._modes:
                raise
            mode = (await self._files.lstat(parent)).st_mode & 0o7777
            self._modes[parent] = mode
            await self._files.set_meta(parent, mode | 0o700, None)
            await change(*args)

    async def _remove(self, number: int, path: bytes) -> None:
        trashed = TRASH + b"%d" % number
        await self._parent(trashed)
        if self._again and await self._files.lstat_or_none(trashed) is not None:
            return  # what is at the path now came later
        try:
            await self._parent(path)
        except FileNotFoundError:
            return
        st = await self._files.lstat_or_none(path)
        if st is None:
            return
        if stat.S_ISDIR(st.st_mode):
            raise Undone("it is a folder now")
        if self._files.can_rename:
            await self._changing(path, self._files.rename, path, trashed)
        else:
            await self._changing(path, self._files.remove, path)
            await self._files.write(trashed, b"")  # says so to a later run, when something was placed there

    async def _remove_folder(self, path: bytes) -> None:
        try:
            await self._parent(path)
        except (FileNotFoundError, Undone):
            return
        st = await self._files.lstat_or_none(path)
        if st is None or not stat.S_ISDIR(st.st_mode):
            return  # gone, or something was placed there already
        if await self._files.list(path):
            raise Undone("the folder is not empty")  # looked up, since a handle's remove may take what is in it
        self._folders.discard(path)
        await self._changing(path, self._files.remove, path)

    async def _place(self, step: PlaceStep) -> None:
        files, staged = self._files, NEW + step.staged
        try:
            await self._parent(staged)  # a planted stage may hold links
        except FileNotFoundError:
            return
        st = await files.lstat_or_none(staged)
        if st is None:
            return
        try:
            await self._parent(step.path)
        except FileNotFoundError:
            raise Undone("its parent folder is not there") from None
        there = await files.lstat_or_none(step.path)
        is_folder = stat.S_ISDIR(st.st_mode)
        if there is not None and stat.S_ISDIR(there.st_mode) and not (is_folder and self._copied_before()):
            raise Undone("a folder is there now")
        if there is not None and is_folder and not stat.S_ISDIR(there.st_mode):
            raise Undone("something else is there now")
        if files.can_rename:
            await self._changing(step.path, files.rename, staged, step.path)
        else:
            await self._changing(step.path, self._copy_tree, staged, step.path)

    def _copied_before(self) -> bool:
        """Whether an earlier run may have begun to copy a folder into place."""
        return self._again and not self._files.can_rename

    async def _copy_tree(self, staged: bytes, path: bytes) -> None:
        """Copy into place, then remove what was staged: as long as it is there, the copy is not known to be whole."""
        pending = [b""]
        while pending:
            below = pending.pop()
            source, target = staged + below, path + below
            st = await self._files.lstat(source)
            if stat.S_ISDIR(st.st_mode):
                if await self._files.lstat_or_none(target) is None:
                    await self._files.mkdir(target)
                pending += [below + b"/" + name for name in await self._files.list(source)]
            elif stat.S_ISLNK(st.st_mode):
                if await self._files.lstat_or_none(target) is not None:
                    await self._files.remove(target)
                await self._files.symlink(await self._files.readlink(source), target)
            else:
                there = await self._files.lstat_or_none(target)
                if there is not None:
                    await self._files.remove(target)  # never written through: it may be a link, or have other names
                await copy_file(self._files, source, target)
        await self._files.remove_tree(staged)

    async def _set_meta(self, step: SetMetaStep) -> None:
        if step.path:
            await self._parent(step.path)
        st = await self._files.lstat(step.path)
        if not (stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode)):
            raise Undone("it is no file or folder now")
        await self._files.set_meta(step.path, step.mode, step.mtime_ns)
        if step.mode is not None:
            self._modes.pop(step.path, None)


async def copy_file(files: HandleFiles, source: bytes, target: bytes) -> None:
    """Copy a file with mode and mtime."""
    st: Any = await files.lstat(source)
    mode = st.st_mode & 0o7777
    if not mode & 0o400:
        await files.set_meta(source, mode | 0o400, None)
    await files.write(target, await files.read_whole(source))
    await files.set_meta(target, mode, st.st_mtime_ns)
