"""The swap of a restore on a local file system: the journal's steps, each safe to repeat.

A step is known to be done by what it leaves: a staged name that is gone was placed, a removal's name in the trash (or its
path gone) was taken out. So a swap that a crash cut short is simply run again. No existing folder is ever renamed, and
every path is reached through folder descriptors: a link in place of a parent makes the step undone, never elsewhere.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import Final, ParamSpec

from snapcore.model import path_key
from snapcore.protocols import PlaceStep, SetMetaStep, SwapReport

from .folders import FILE_FLAGS, FOLDER_FLAGS, FolderCache, split
from .journal import Journal
from .stage_lock import StageLock, mode_to_put_back

__all__ = ["Swap", "Undone"]

P = ParamSpec("P")

_NOT_EMPTY: Final = (errno.ENOTEMPTY, errno.EEXIST)
_SPECIAL_BITS: Final = stat.S_ISUID | stat.S_ISGID
_O_PATH: Final = getattr(os, "O_PATH", 0)


class Undone(Exception):  # noqa: N818 (not an error: the step is reported and the swap goes on)
    """Why a step was not done."""


class Swap:
    """One run of a sealed journal. `trusted` is false for a stage that another user left: then owners and setuid bits,
    which only that user may have meant, are not set."""

    def __init__(self, lock: StageLock, journal: Journal, *, trusted: bool = True) -> None:
        self._lock = lock
        self._journal = journal
        self._trusted = trusted
        self._undone: list[tuple[bytes, str]] = []

    def run(self) -> SwapReport:
        """Do every step that can be done."""
        lock = self._lock
        modes = lock.remembered_modes()
        with (
            WritableFolders(lock, modes) as tree,
            FolderCache(os.open("new", FOLDER_FLAGS, dir_fd=lock.stage_fd)) as new,
            FolderCache(os.open("trash", FOLDER_FLAGS, dir_fd=lock.stage_fd)) as trash,
        ):
            trash_fd = trash.fd(b"")
            for number, path in self._journal.removals():
                self._step(path, _remove, tree, trash_fd, number, path)
            for path in self._journal.folder_removals():
                self._step(path, _remove_folder, tree, path)
            for place in self._journal.placements():
                self._step(place.path, _place, tree, new, place)
            for meta in self._journal.metadata():
                self._step(meta.path, self._set_meta, tree, meta)
            tree.put_modes_back()
        return SwapReport(tuple(self._undone))

    def _step(self, path: bytes, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        self._lock.beat()
        try:
            work(*args, **kwargs)
        except Undone as reason:
            self._undone.append((path, str(reason)))
        except NotADirectoryError:
            self._undone.append((path, "a parent is a link or no folder now"))
        except OSError as error:
            self._undone.append((path, error.strerror or str(error)))

    def _set_meta(self, tree: "WritableFolders", step: SetMetaStep) -> None:
        if not self._trusted:
            mode = step.mode if step.mode is None else step.mode & ~_SPECIAL_BITS
            step = SetMetaStep(step.path, mode, step.mtime_ns)
        if not step.path:
            _set_root_meta(tree.fd(b""), step)
        else:
            parent, name = split(step.path)
            tree.changing(parent, lambda folder: _set_meta_at(folder, name, step))
        if step.mode is not None:
            tree.keep_mode(step.path)


class WritableFolders(FolderCache):
    """The tree's folders, those of this user made writable where a step needs it. Their modes are noted in the stage before
    that, and `put_modes_back` sets them again."""

    def __init__(self, lock: StageLock, modes: dict[bytes, int]) -> None:
        super().__init__(os.dup(lock.root_fd))
        self._lock = lock
        self._modes = modes
        self._unlocking = True

    def enter(self, parent: int, name: bytes, path: bytes) -> int:
        try:
            return super().enter(parent, name, path)
        except PermissionError:
            if not self._unlocking:
                raise
            self._unlock(split(path)[0], parent)
            st = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(st.st_mode) and self._note(path, st):
                set_mode(parent, name, (st.st_mode & 0o7777) | 0o700)
            return super().enter(parent, name, path)

    def changing(self, path: bytes, change: Callable[[int], None]) -> None:
        """Call `change` with a descriptor of the folder; once more, the folder made writable, when that is refused."""
        folder = self.fd(path)
        try:
            change(folder)
        except PermissionError:
            if not self._unlock(path, folder):
                raise
            change(folder)

    def keep_mode(self, path: bytes) -> None:
        """The folder has the mode it is to have."""
        self._modes.pop(path, None)

    def put_modes_back(self) -> None:
        """Give every folder that was made writable its own mode again, the deepest first."""
        self._unlocking = False  # what is behind a closed folder was put back before it
        for path in sorted(self._modes, key=path_key, reverse=True):
            if path:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                    self._put_back(*split(path), self._modes[path])
            else:
                mode = mode_to_put_back(os.fstat(self.fd(b"")).st_mode, self._modes[path])
                if mode is not None:
                    os.fchmod(self.fd(b""), mode)

    def _put_back(self, parent: bytes, name: bytes, noted: int) -> None:
        folder = self.fd(parent)
        st = os.stat(name, dir_fd=folder, follow_symlinks=False)
        mode = mode_to_put_back(st.st_mode, noted)
        if mode is not None and stat.S_ISDIR(st.st_mode):
            set_mode(folder, name, mode)

    def _unlock(self, path: bytes, fd: int) -> bool:
        st = os.fstat(fd)
        if not self._note(path, st):
            return False
        os.fchmod(fd, (st.st_mode & 0o7777) | 0o700)
        return True

    def _note(self, path: bytes, st: os.stat_result) -> bool:
        if st.st_uid != os.geteuid() or st.st_mode & 0o700 == 0o700:
            return False
        if path not in self._modes:
            self._modes[path] = st.st_mode & 0o7777
            self._lock.remember_mode(path, st.st_mode & 0o7777)
        return True


def _stat(name: bytes, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _remove(tree: WritableFolders, trash: int, number: int, path: bytes) -> None:
    parent, name = split(path)
    trashed = b"%d" % number
    if _stat(trashed, trash) is not None:
        return  # what is at the path now came later

    def take(folder: int) -> None:
        st = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(st.st_mode):
            raise Undone("it is a folder now")
        try:
            os.rename(name, trashed, src_dir_fd=folder, dst_dir_fd=trash)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            os.unlink(name, dir_fd=folder)  # the trash is on another file system, or behind another mount

    with contextlib.suppress(FileNotFoundError):
        tree.changing(parent, take)


def _remove_folder(tree: WritableFolders, path: bytes) -> None:
    parent, name = split(path)
    tree.forget(path)
    try:
        tree.changing(parent, lambda folder: os.rmdir(name, dir_fd=folder))
    except (FileNotFoundError, NotADirectoryError):
        return  # gone, or something was placed there already
    except OSError as error:
        if error.errno in _NOT_EMPTY:
            raise Undone("the folder is not empty") from None
        raise


def _place(tree: WritableFolders, new: FolderCache, step: PlaceStep) -> None:
    staged_parent, staged = split(step.staged)
    try:
        source = new.fd(staged_parent)
    except FileNotFoundError:
        return
    st = _stat(staged, source)
    if st is None:
        return
    parent, name = split(step.path)

    def put(folder: int) -> None:
        if stat.S_ISDIR(st.st_mode):
            if _stat(name, folder) is not None:
                raise Undone("something else is there now")  # a rename would replace an empty folder
        elif st.st_nlink > 1:
            there = _stat(name, folder)
            if there is not None and os.path.samestat(there, st):
                os.unlink(staged, dir_fd=source)  # two names of one file: a rename would leave both
                return
        os.rename(staged, name, src_dir_fd=source, dst_dir_fd=folder)

    try:
        tree.changing(parent, put)
    except FileNotFoundError:
        raise Undone("its parent folder is not there") from None
    except IsADirectoryError:
        raise Undone("a folder is there now") from None


def _set_root_meta(fd: int, step: SetMetaStep) -> None:
    if step.owner is not None:
        os.fchown(fd, *step.owner)
    if step.mode is not None:
        os.fchmod(fd, step.mode)
    if step.mtime_ns is not None:
        os.utime(fd, ns=(step.mtime_ns, step.mtime_ns))


def _set_meta_at(folder: int, name: bytes, step: SetMetaStep) -> None:
    st = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not (stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode)):
        raise Undone("it is no file or folder now")
    chown = step.owner is not None and step.owner != (st.st_uid, st.st_gid)
    if step.owner is not None and chown:
        os.chown(name, *step.owner, dir_fd=folder, follow_symlinks=False)
    if step.mode is not None and (chown or step.mode != st.st_mode & 0o7777):
        set_mode(folder, name, step.mode)  # after the owner, whose change clears setuid bits
    if step.mtime_ns is not None and step.mtime_ns != st.st_mtime_ns:
        os.utime(name, ns=(st.st_atime_ns, step.mtime_ns), dir_fd=folder, follow_symlinks=False)


def set_mode(folder: int, name: bytes, mode: int) -> None:
    """chmod of a file or folder whatever its mode is now, never of what a link leads to."""
    try:
        fd = os.open(name, FILE_FLAGS, dir_fd=folder)
    except PermissionError:
        if not _O_PATH:
            os.chmod(name, mode, dir_fd=folder, follow_symlinks=False)
            return
        fd = os.open(name, _O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            if not stat.S_ISLNK(os.fstat(fd).st_mode):
                os.chmod(f"/proc/self/fd/{fd}", mode)  # the descriptor's own file: no name is looked up
        finally:
            os.close(fd)
        return
    try:
        os.fchmod(fd, mode)
    finally:
        os.close(fd)
