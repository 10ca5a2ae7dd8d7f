"""A restore in the making on a local file system: contents staged inside the root, then swapped in under a journal."""

import asyncio
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Sequence
from typing import Final, Literal

from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.protocols import (
    Buffer,
    PlaceStep,
    StageFile,
    StageFolder,
    StageHardLink,
    StageLink,
    StageWrite,
    Step,
    SwapReport,
)

from .folders import FOLDER_FLAGS, FolderCache, open_regular, split
from .journal import Journal, check_step, damaged
from .mounts import is_below_mount, mount_points
from .stage_lock import StageLock, busy, provider_error
from .swap import Swap
from .threads import in_thread
from .tree_lock import BUSY_SECONDS, POLL_SECONDS, TreeLock, being_read

__all__ = ["DirectStage", "open_stage", "recover"]

HOLE: Final = 64 << 10
RECOVER_SECONDS: Final = 2.0  # a capture that is about to find out that there is something to recover holds the tree
SYNC_EACH: Final = 200  # with more files staged than this, one sync of everything is faster than an fsync of each

_WRITE: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND: Final = _WRITE | os.O_CREAT | os.O_EXCL | os.O_APPEND
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_ZEROS: Final = bytes(HOLE)
_SPECIAL_BITS: Final = stat.S_ISUID | stat.S_ISGID


def open_stage(root: str, busy_seconds: float = BUSY_SECONDS) -> "DirectStage":
    """Create the stage in `root`, which is created when it is not there, after recovering what a dead owner left."""
    try:
        os.makedirs(root, exist_ok=True)
        for _ in range(100):
            recover(root)
            root_fd = os.open(root, FOLDER_FLAGS)
            try:
                lock = StageLock.create(root_fd)
            finally:
                os.close(root_fd)
            if lock is not None:
                return _begin(lock, mount_points(os.fsencode(root)), busy_seconds)
    except OSError as error:
        raise provider_error(error, f"A restore cannot be staged in {root}") from error
    raise busy(None)


def _begin(lock: StageLock, mounts: frozenset[bytes], busy_seconds: float) -> "DirectStage":
    """The stage of a new lock. When it cannot be made whole, the lock is given up and nothing of it stays open."""
    with contextlib.ExitStack() as opened:
        opened.callback(_give_up, lock)
        new = opened.enter_context(FolderCache(os.open("new", FOLDER_FLAGS, dir_fd=lock.stage_fd)))
        tree = opened.enter_context(FolderCache(os.dup(lock.root_fd)))
        journal_fd = os.open("journal.part", _APPEND, 0o600, dir_fd=lock.stage_fd)
        opened.pop_all()
    return DirectStage(lock, new, tree, journal_fd, mounts, busy_seconds)


def _give_up(lock: StageLock) -> None:
    try:
        lock.put_root_mode_back()
        with contextlib.suppress(OSError):  # the next restore sweeps it
            lock.dismantle()
    finally:
        lock.release()


def recover(root: str) -> Literal["", "swept", "finished"]:
    """Finish the sealed swap of a dead owner, or sweep its unsealed stage. `ProviderError` `WORKSPACE_BUSY` when it lives."""
    try:
        root_fd = os.open(root, FOLDER_FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    try:
        lock = StageLock.take_over(root_fd)
        if lock is None:
            return ""
        try:
            return _clean_up(lock)
        finally:
            lock.release()
    except OSError as error:
        raise provider_error(error, f"The interrupted restore in {root} cannot be cleaned up") from error
    finally:
        os.close(root_fd)


def _clean_up(lock: StageLock) -> Literal["swept", "finished"]:
    try:
        journal_fd = open_regular("journal", os.O_RDONLY, lock.stage_fd)
    except FileNotFoundError:
        lock.put_root_mode_back()
        lock.dismantle()
        return "swept"
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise damaged("its journal is no regular file") from error
        raise
    tree = None
    try:
        tree = TreeLock.take(lock.root_fd, alone=True, seconds=RECOVER_SECONDS)
        if tree is None:
            raise being_read()
        me = os.geteuid()
        trusted = os.fstat(lock.stage_fd).st_uid == me and os.fstat(journal_fd).st_uid == me
        Swap(lock, Journal(journal_fd), trusted=trusted).run()
        lock.dismantle()
    finally:
        os.close(journal_fd)
        if tree is not None:
            tree.release()
    return "finished"


class DirectStage:
    """See `Stage`. Dropped without `swap` or `abort`, it lets go of the lock, and the next `recover` cleans up.

    `seal` waits `busy_seconds` for captures of the tree to end, then raises `ProviderError` `WORKSPACE_BUSY`.
    """

    def __init__(
        self,
        lock: StageLock,
        new: FolderCache,
        tree: FolderCache,
        journal_fd: int,
        mounts: frozenset[bytes],
        busy_seconds: float,
    ) -> None:
        self._lock = lock
        self._busy_seconds = busy_seconds
        self._tree_lock: TreeLock | None = None
        self._mutex = threading.Lock()
        self._state: Literal["open", "sealed", "swapping", "done"] = "open"
        self._new = new
        self._tree = tree
        self._journal_fd = journal_fd
        self._mounts = mounts
        self._device = os.fstat(lock.root_fd).st_dev
        self._same_device: set[bytes] = set()
        self._bare: list[bytes] = []  # staged without their extended attributes
        self._undone: list[tuple[bytes, str]] = []
        self._files: list[bytes] = []  # to be synced one by one, as long as they are few

    def __del__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Let go of every lock and leave the stage as it is, as the end of the process would."""
        self._unlock_tree()
        self._close()

    async def write(self, writes: Sequence[StageWrite]) -> None:
        """See `Stage.write`: the whole batch in one hop to a worker thread."""
        await in_thread(self._write, writes)

    async def log(self, steps: Sequence[Step]) -> None:
        """See `Stage.log`. A placement on another file system than the root's is refused here: `ProviderError` `NOT_CAPABLE`."""
        await in_thread(self._log, steps)

    async def seal(self, *, durable: bool) -> None:
        """See `Stage.seal`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._busy_seconds
        while not await in_thread(self._lock_tree):
            if loop.time() >= deadline:
                raise being_read()
            await asyncio.sleep(POLL_SECONDS)
        await in_thread(self._seal, durable)

    async def swap(self) -> SwapReport:
        """See `Stage.swap`. A cancelled caller waits for it to finish."""
        return await in_thread(self._swap)

    async def abort(self) -> None:
        """See `Stage.abort`. After a swap that was cut short it only lets go: `recover` then finishes it."""
        await in_thread(self._abort)

    # ---- in the worker thread

    def _write(self, writes: Sequence[StageWrite]) -> None:
        with self._mutex:
            self._expect("open")
            self._lock.beat()
            try:
                folder, here = -1, None
                for write in writes:
                    if type(write) is StageFile:
                        parent, name = split(write.staged)
                        if parent != here:  # its descriptor stays open until the cache is asked for another
                            folder, here = self._new.fd(parent), parent
                        self._write_file(write, name, folder)
                    else:
                        self._create(write)
                        here = None
            except OSError as error:
                raise provider_error(error, "The restore cannot be staged") from error

    def _create(self, write: StageWrite) -> None:
        parent, name = split(write.staged)
        folder = self._new.fd(parent)
        if isinstance(write, StageFolder):
            os.mkdir(name, 0o700, dir_fd=folder)
        elif isinstance(write, StageLink):
            os.symlink(write.target, name, dir_fd=folder)
            if write.owner is not None:
                os.chown(name, *write.owner, dir_fd=folder, follow_symlinks=False)
            os.utime(name, ns=(write.mtime_ns, write.mtime_ns), dir_fd=folder, follow_symlinks=False)
        elif isinstance(write, StageHardLink):
            first_parent, first = split(write.first)
            kept = os.dup(folder)  # the cache may close its own when it opens the other
            try:
                os.link(first, name, src_dir_fd=self._new.fd(first_parent), dst_dir_fd=kept, follow_symlinks=False)
            finally:
                os.close(kept)

    def _write_file(self, file: StageFile, name: bytes, folder: int) -> None:
        whole = file.last and len(file.data) == file.size
        # 0600 until it is complete: a later piece must be able to open it whatever its mode will be
        fd = os.open(name, _WRITE | os.O_CREAT | (os.O_EXCL if whole else 0), 0o600, dir_fd=folder)
        try:
            if file.size < HOLE:
                _write_all(fd, file.data, file.offset)
            else:
                _write_sparse(fd, file.data, file.offset)
            if file.last:
                if file.size >= HOLE or not whole:
                    os.ftruncate(fd, file.size)
                if not _finish(fd, file):
                    self._bare.append(file.staged)
                if len(self._files) <= SYNC_EACH:
                    self._files.append(file.staged)
        finally:
            os.close(fd)

    def _log(self, steps: Sequence[Step]) -> None:
        with self._mutex:
            self._expect("open")
            for step in steps:
                check_step(step)
                if isinstance(step, PlaceStep):
                    self._check_device(step.path)
                    self._report_bare(step)
            try:
                _write_all(self._journal_fd, Journal.encode(steps), None)
            except OSError as error:
                raise provider_error(error, "The journal of the restore cannot be written") from error

    def _report_bare(self, step: PlaceStep) -> None:
        for staged in self._bare:
            if staged == step.staged or staged.startswith(step.staged + b"/"):
                self._undone.append((step.path + staged[len(step.staged) :], "this system sets no extended attributes"))

    def _check_device(self, path: bytes) -> None:
        """Refuse what a rename could not do: a place at or below a mount point, or whose nearest existing folder is on another
        file system."""
        parent = split(path)[0]
        if path in self._mounts or is_below_mount(parent, self._mounts):
            raise _behind_a_mount()
        if parent in self._same_device:
            return
        here = parent
        while True:
            try:
                device = os.fstat(self._tree.fd(here)).st_dev
                break
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                here = split(here)[0]
        if device != self._device:
            raise _behind_a_mount()
        self._same_device.add(parent)

    def _lock_tree(self) -> bool:
        with self._mutex:
            self._expect("open")
            if self._tree_lock is None:
                self._tree_lock = TreeLock.take(self._lock.root_fd, alone=True)
            return self._tree_lock is not None

    def _seal(self, durable: bool) -> None:
        with self._mutex:
            self._expect("open")
            self._lock.beat()
            stage_fd = self._lock.stage_fd
            try:
                if durable:
                    self._sync_staged()
                os.fsync(self._journal_fd)
                os.rename("journal.part", "journal", src_dir_fd=stage_fd, dst_dir_fd=stage_fd)
                os.fsync(stage_fd)
                os.fsync(self._lock.root_fd)
            except OSError as error:
                raise provider_error(error, "The journal of the restore cannot be made durable") from error
            self._state = "sealed"

    def _sync_staged(self) -> None:
        if len(self._files) > SYNC_EACH:
            os.sync()
            return
        parents = {b""}
        for path in self._files:
            parent, name = split(path)
            while parent and parent not in parents:
                parents.add(parent)
                parent = split(parent)[0]
            self._sync(name, self._new.fd(split(path)[0]))
        for parent in parents:
            os.fsync(self._new.fd(parent))

    @staticmethod
    def _sync(name: bytes, folder: int) -> None:
        try:
            fd = os.open(name, _READ, dir_fd=folder)
        except PermissionError:
            os.sync()  # a file that its own user may not read
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _swap(self) -> SwapReport:
        with self._mutex:
            self._expect("sealed")
            self._state = "swapping"
            swapped = False
            try:
                fd = os.open("journal", _READ, dir_fd=self._lock.stage_fd)
                try:
                    report = SwapReport((*self._undone, *Swap(self._lock, Journal(fd)).run().undone))
                finally:
                    os.close(fd)
                self._state = "done"
                if self._tree_lock is not None:
                    self._tree_lock.share()
                self._lock.dismantle()
                swapped = True
            except OSError as error:
                raise provider_error(error, "The restore was cut short; the next one finishes it") from error
            finally:
                if not swapped:
                    self._unlock_tree()
                self._close()
            return report

    def _abort(self) -> None:
        with self._mutex:
            if self._state in ("open", "sealed") and self._lock.stage_fd >= 0:
                self._state = "done"
                try:
                    self._unseal()
                    self._lock.put_root_mode_back()
                    self._lock.dismantle()
                except OSError as error:
                    raise provider_error(error, "The stage cannot be removed; the next restore sweeps it") from error
                finally:
                    self._unlock_tree()
                    self._close()
            else:
                self._unlock_tree()
                self._close()

    def _unseal(self) -> None:
        """Take the seal back, durably, before the rest of the stage goes and while the tree is still locked: a crash from here
        on leaves a stage that is swept, never one that is finished. A `seal` that failed may have left one too."""
        stage_fd = self._lock.stage_fd
        try:
            os.rename("journal", "journal.part", src_dir_fd=stage_fd, dst_dir_fd=stage_fd)
        except FileNotFoundError:
            return
        os.fsync(stage_fd)

    def _unlock_tree(self) -> None:
        if self._tree_lock is not None:
            self._tree_lock.release()

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise SnapshotError(f"This restore is {self._state}, not {state}.", code=Code.INVALID_REQUEST)

    def _close(self) -> None:
        self._new.close()
        self._tree.close()
        if self._journal_fd >= 0:
            os.close(self._journal_fd)
            self._journal_fd = -1
        self._lock.release()


def _behind_a_mount() -> ProviderError:
    return ProviderError(
        "The restore reaches into something that is mounted in the workspace.",
        code=Code.NOT_CAPABLE,
        hint="Restore that mount point as a root of its own. The workspace is as it was.",
    )


def _finish(fd: int, file: StageFile) -> bool:
    """Owner, mode, attributes, time: in this order, since each may clear what comes after it. Attributes only with an owner,
    as they may give rights too. False when the system cannot set them."""
    mode = file.mode
    if file.owner is not None:
        os.fchown(fd, *file.owner)
    else:
        mode &= ~_SPECIAL_BITS  # they would give the rights of whoever restores
    if mode != 0o600 or file.owner is not None:
        os.fchmod(fd, mode)
    attributes = file.xattrs if file.owner is not None else {}
    can = not attributes or hasattr(os, "setxattr")
    for name, value in attributes.items() if can else ():
        os.setxattr(fd, name, value)
    os.utime(fd, ns=(file.mtime_ns, file.mtime_ns))
    return can


def _write_all(fd: int, data: Buffer, offset: int | None) -> None:
    """Write everything, at `offset` or where the descriptor is. A short write is no error of its own: the next one tells."""
    view = data
    while size := len(view):
        done = os.write(fd, view) if offset is None else os.pwrite(fd, view, offset)
        if done == size:
            return
        view = memoryview(view)[done:]
        if offset is not None:
            offset += done


def _write_sparse(fd: int, data: Buffer, offset: int) -> None:
    """Write what is not zero, in runs of 64 KiB blocks; the rest of the file stays a hole."""
    view = memoryview(data)
    start = 0
    for at in range(0, len(view), HOLE):
        block = view[at : at + HOLE]
        if not block[0] and not block[-1] and len(block) == HOLE and bytes(block) == _ZEROS:
            if start < at:
                _write_all(fd, view[start:at], offset + start)
            start = at + HOLE
    if start < len(view):
        _write_all(fd, view[start:], offset + start)
