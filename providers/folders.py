"""Descriptors of the folders under a root, opened component by component, none of them through a link.

Every access to a local tree goes through such a descriptor and one plain name. So a link planted in place of a parent
folder cannot lead outside, and a path may be longer than PATH_MAX.
"""

import contextlib
import errno
import os
import re
import stat
from collections import OrderedDict
from types import TracebackType
from typing import Final, Self

__all__ = ["FILE_FLAGS", "FOLDER_FLAGS", "STAGE_NAME", "FolderCache", "is_stage_name", "open_regular", "remove_tree", "split"]

STAGE_NAME: Final = b".snapcore-stage"  # a restore's own folder in the root, never scanned
FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_NO_NAMES: Final = (b"", b".", b"..")
_IN_THE_MAKING: Final = re.compile(re.escape(STAGE_NAME) + rb"\.[0-9a-f]{16}")


def is_stage_name(name: bytes) -> bool:
    """Whether a name in the root is that of a stage, or of one in the making."""
    return name.startswith(STAGE_NAME) and (name == STAGE_NAME or _IN_THE_MAKING.fullmatch(name) is not None)


def open_regular(name: str, flags: int, folder: int) -> int:
    """Open a regular file of the stage, made with mode 0600 when `flags` say so. `OSError` `ELOOP` for anything else that a
    hostile folder may hold under that name: a link, and a FIFO, which is never waited for."""
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ELOOP, "not a regular file", name)
    return fd


def split(path: bytes) -> tuple[bytes, bytes]:
    """The parent's path and the name. The root has none."""
    parent, _, name = path.rpartition(b"/")
    return parent, name


class FolderCache:
    """The least recently used descriptors of folders below `root_fd`, which the cache owns. For one thread at a time.

    A descriptor stays open until `limit` others were asked for, counting each missing ancestor. `limit` is at least 2.
    """

    def __init__(self, root_fd: int, limit: int = 128) -> None:
        self._root = root_fd
        self._limit = limit
        self._open: OrderedDict[bytes, int] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def fd(self, path: bytes) -> int:
        """A descriptor of the folder. Raises `OSError`: `NotADirectoryError` (or `ELOOP`) when a component is a link or no
        folder, `FileNotFoundError` when one is not there."""
        if not path:
            return self._root
        opened = self._open
        known = opened.get(path)
        if known is not None:
            opened.move_to_end(path)
            return known
        folder, start = self._root, 0
        cut = path.rfind(b"/")
        while cut != -1:
            known = opened.get(path[:cut])
            if known is not None:
                opened.move_to_end(path[:cut])
                folder, start = known, cut + 1
                break
            cut = path.rfind(b"/", 0, cut)
        while True:
            end = path.find(b"/", start)
            here = path if end == -1 else path[:end]
            name = here[start:]
            if name in _NO_NAMES:
                raise NotADirectoryError(errno.ENOTDIR, "not a plain relative path", path)
            folder = self.enter(folder, name, here)
            opened[here] = folder
            if len(opened) > self._limit:
                os.close(opened.popitem(last=False)[1])
            if end == -1:
                return folder
            start = end + 1

    def enter(self, parent: int, name: bytes, path: bytes) -> int:
        """Open the folder `name` in `parent`; its path is for those who override this."""
        return os.open(name, FOLDER_FLAGS, dir_fd=parent)

    def forget(self, path: bytes) -> None:
        """Close the descriptor of a folder that was removed."""
        known = self._open.pop(path, None)
        if known is not None:
            os.close(known)

    def clear(self) -> None:
        """Close every descriptor but the root's: folders were moved."""
        while self._open:
            os.close(self._open.popitem()[1])

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.clear()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1


def remove_tree(folders: FolderCache, path: bytes) -> None:
    """Remove a folder and what is in it, of any depth. What vanishes meanwhile is no error."""
    pending, found = [path], []
    while pending:
        here = pending.pop()
        try:
            fd = folders.fd(here)
        except (FileNotFoundError, NotADirectoryError):
            continue
        found.append(here)
        with os.scandir(fd) as entries:
            names = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in names:
            if is_folder:
                pending.append(here + b"/" + name)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
    for here in reversed(found):
        parent, name = split(here)
        folders.forget(here)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=folders.fd(parent))
