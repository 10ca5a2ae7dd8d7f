"""The stage folder of a local workspace, which is also the lock on it.

    .snapcore-stage/    mode 0700; whoever holds the flock on `owner` holds the workspace
        owner           JSON: the process that restores; its mtime is a heartbeat for other hosts
        new/  trash/    what is staged; what was taken out
        journal         the steps, once sealed (`journal.part` before)
        modes           modes of folders that were made writable for the time being

A stage is made under a temporary name, with `owner` in it and locked, and renamed to its own: that rename succeeds for one
only, since a folder with something in it is never replaced. The owner file is the last thing that goes. So at any
moment a stage either has an owner whose lock can be tried, or is empty.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import time
from typing import Final

import msgspec

from snapcore.errors import Code, ProviderError, SnapshotError, printable
from snapcore.hosts import current_holder, is_gone
from snapcore.model import Holder, validate_path

from .folders import FOLDER_FLAGS, STAGE_NAME, FolderCache, is_stage_name, open_regular, remove_tree

__all__ = ["StageLock", "busy", "mode_to_put_back", "provider_error"]

BEAT_SECONDS: Final = 30.0
DEAD_SECONDS: Final = 600.0  # without a heartbeat, for an owner on another host
STRAY_SECONDS: Final = 60.0  # a temporary stage without an owner is younger while it is being made

_TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


class StageLock:
    """A stage folder whose owner lock this process holds, until `release` or `dismantle`."""

    def __init__(self, root_fd: int, stage_fd: int, owner_fd: int) -> None:
        self.root_fd = root_fd
        self.stage_fd = stage_fd
        self._owner_fd = owner_fd
        self._beaten = time.monotonic()

    @staticmethod
    def create(root_fd: int) -> "StageLock | None":
        """Make a stage in the root, or None when there is one. `root_fd` is duplicated. The root keeps its mtime."""
        root = os.fstat(root_fd)
        name = STAGE_NAME + b"." + secrets.token_hex(8).encode()
        root_mode = _make_folder(root_fd, name)
        lock = None
        try:
            lock = _take(root_fd, name, os.O_EXCL)
            if lock is None:
                return None
            os.ftruncate(lock._owner_fd, 0)
            os.pwrite(lock._owner_fd, msgspec.json.encode(current_holder()), 0)
            os.mkdir("new", 0o700, dir_fd=lock.stage_fd)
            os.mkdir("trash", 0o700, dir_fd=lock.stage_fd)
            if root_mode is not None:
                lock.remember_mode(b"", root_mode)
            os.rename(name, STAGE_NAME, src_dir_fd=root_fd, dst_dir_fd=root_fd)
            _put_time_back(root_fd, root)
        except OSError as error:
            if lock is not None:
                lock.release()
            _remove(root_fd, name)
            if root_mode is not None:
                os.fchmod(root_fd, root_mode)
            _put_time_back(root_fd, root)
            if error.errno in _TAKEN or isinstance(error, FileNotFoundError):
                return None  # another was first, or took this for a stray
            raise
        return lock

    @staticmethod
    def take_over(root_fd: int) -> "StageLock | None":
        """Lock the stage that a dead owner left, or None when there is no stage. `ProviderError` `WORKSPACE_BUSY` when the
        owner lives."""
        _sweep_strays(root_fd)
        while True:
            try:
                lock = _take(root_fd, STAGE_NAME, 0)
            except FileNotFoundError:
                if not _present(root_fd):
                    return None
                continue
            except OSError as error:
                raise SnapshotError(
                    f"A restore left .snapcore-stage in this workspace, and it cannot be opened: {error.strerror}.",
                    code=Code.RESTORE_BLOCKED,
                    paths=[STAGE_NAME],
                    hint="Run this as the user who restored, or remove it and restore again.",
                ) from error
            if lock is None:
                raise busy(_holder_at(root_fd))
            if not lock._is_current():
                lock.release()  # it was dismantled while its lock was being tried
                continue
            holder = lock._holder()
            if holder is not None and lock._lives_elsewhere(holder):
                lock.release()
                raise busy(holder)
            return lock

    def _is_current(self) -> bool:
        try:
            stage = os.stat(STAGE_NAME, dir_fd=self.root_fd, follow_symlinks=False)
            owner = os.stat("owner", dir_fd=self.stage_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(stage, os.fstat(self.stage_fd)) and os.path.samestat(owner, os.fstat(self._owner_fd))

    def _holder(self) -> Holder | None:
        return _decode_holder(os.pread(self._owner_fd, 65536, 0))

    def _lives_elsewhere(self, holder: Holder) -> bool:
        """The flock was free. For a process under this kernel that settles it, in whichever container it ran; a lock of
        another host may not show here, so there its heartbeat decides."""
        if is_gone(holder) or _kernel(holder) == _kernel(current_holder()):
            return False
        return time.time() - os.fstat(self._owner_fd).st_mtime < DEAD_SECONDS

    def beat(self) -> None:
        """Show other hosts that this owner lives."""
        now = time.monotonic()
        if now - self._beaten > BEAT_SECONDS:
            self._beaten = now
            os.utime(self._owner_fd)

    def remember_mode(self, path: bytes, mode: int) -> None:
        """Note a folder's mode before it is made writable, so that a crash does not leave it so."""
        from .journal import frame

        fd = open_regular("modes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, self.stage_fd)
        try:
            os.write(fd, frame(msgspec.msgpack.encode((path, mode))))
        finally:
            os.close(fd)

    def remembered_modes(self) -> dict[bytes, int]:
        """What was noted, by path; the first mode of each is its own. Nothing from another user's stage, and nothing from the
        first note on that is not whole or not such as `remember_mode` writes."""
        from .journal import unframe

        modes: dict[bytes, int] = {}
        if os.fstat(self.stage_fd).st_uid != os.geteuid():
            return modes
        try:
            fd = open_regular("modes", os.O_RDONLY, self.stage_fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                return modes
            raise
        try:
            offset = 0
            while (whole := unframe(fd, offset)) is not None:
                body, offset = whole
                path, mode = msgspec.msgpack.decode(body, type=tuple[bytes, int])
                validate_path(path)
                if not 0 <= mode <= 0o7777:
                    break
                modes.setdefault(path, mode)
        except (msgspec.DecodeError, SnapshotError):
            return modes
        finally:
            os.close(fd)
        return modes

    def put_root_mode_back(self) -> None:
        """Give the root its own mode again, when it was made writable to hold the stage."""
        noted = self.remembered_modes().get(b"")
        if noted is None:
            return
        mode = mode_to_put_back(os.fstat(self.root_fd).st_mode, noted)
        if mode is not None:
            os.fchmod(self.root_fd, mode)

    def dismantle(self) -> None:
        """Remove the stage, the journal first and the owner last, and let go. The root keeps its mode and mtime."""
        for name in ("journal", "modes", "journal.part"):
            try:
                os.unlink(name, dir_fd=self.stage_fd)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EISDIR, errno.EPERM):
                    raise
        with FolderCache(os.dup(self.stage_fd)) as folders:
            for entry in os.listdir(self.stage_fd):
                if entry == "owner":
                    continue
                try:
                    os.unlink(entry, dir_fd=self.stage_fd)
                except OSError as error:
                    if error.errno not in (errno.EISDIR, errno.EPERM):
                        raise
                    remove_tree(folders, os.fsencode(entry))
        root = os.fstat(self.root_fd)
        os.unlink("owner", dir_fd=self.stage_fd)
        try:
            _remove_empty(self.root_fd, root.st_mode & 0o7777)
            os.utime(self.root_fd, ns=(root.st_atime_ns, root.st_mtime_ns))
        except OSError as error:
            if error.errno not in (*_TAKEN, errno.ENOENT, errno.EPERM):
                raise  # taken over already by another, or the root is another user's
        self.release()

    def release(self) -> None:
        """Let go of the lock and leave the stage as it is. Idempotent."""
        for fd in (self._owner_fd, self.stage_fd, self.root_fd):
            if fd >= 0:
                os.close(fd)
        self._owner_fd = self.stage_fd = self.root_fd = -1


def mode_to_put_back(now: int, before: int) -> int | None:
    """The mode of a folder that was made writable for its owner, None when `now` is not what that leaves of `before`. It
    never gives a right that the folder does not give already, whatever a planted stage says."""
    return before & (0o777 | now) if now & 0o777 == (before & 0o777) | 0o700 else None


def _put_time_back(root_fd: int, before: os.stat_result) -> None:
    with contextlib.suppress(PermissionError):  # the root is another user's
        os.utime(root_fd, ns=(before.st_atime_ns, before.st_mtime_ns))


def _kernel(holder: Holder) -> str:
    """The boot without the process namespace, which `hosts` puts last."""
    return holder.boot_id.rpartition("/")[0]


def _take(root_fd: int, name: bytes, exclusive: int) -> StageLock | None:
    """Open the stage folder `name` and lock its owner file, which is made when it is not there. None when it is locked."""
    with contextlib.ExitStack() as opened:
        stage_fd = os.open(name, FOLDER_FLAGS, dir_fd=root_fd)
        opened.callback(os.close, stage_fd)
        owner_fd = open_regular("owner", os.O_RDWR | os.O_CREAT | exclusive, stage_fd)
        opened.callback(os.close, owner_fd)
        try:
            fcntl.flock(owner_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        lock = StageLock(os.dup(root_fd), stage_fd, owner_fd)
        opened.pop_all()
    return lock


def _make_folder(root_fd: int, name: bytes) -> int | None:
    """Create the folder. When the root is its owner's but read-only, make it writable and return the mode it had."""
    try:
        os.mkdir(name, 0o700, dir_fd=root_fd)
    except PermissionError:
        root = os.fstat(root_fd)
        mode = root.st_mode & 0o7777
        if root.st_uid != os.geteuid() or mode & 0o300 == 0o300:
            raise
        os.fchmod(root_fd, mode | 0o700)
        try:
            os.mkdir(name, 0o700, dir_fd=root_fd)
        except OSError:
            os.fchmod(root_fd, mode)
            raise
        return mode
    return None


def _remove_empty(root_fd: int, mode: int) -> None:
    try:
        os.rmdir(STAGE_NAME, dir_fd=root_fd)
    except PermissionError:
        os.fchmod(root_fd, mode | 0o700)
        try:
            os.rmdir(STAGE_NAME, dir_fd=root_fd)
        finally:
            os.fchmod(root_fd, mode)


def _sweep_strays(root_fd: int) -> None:
    """Remove temporary stages whose makers died before they renamed them."""
    for text in os.listdir(root_fd):
        name = os.fsencode(text)
        if name == STAGE_NAME or not is_stage_name(name):
            continue
        with contextlib.suppress(OSError):
            if _has_owner(root_fd, name) or time.time() - _mtime(root_fd, name) > STRAY_SECONDS:
                lock = _take(root_fd, name, 0)
                if lock is not None:
                    try:
                        lock.put_root_mode_back()
                        _remove(root_fd, name)
                    finally:
                        lock.release()


def _has_owner(root_fd: int, name: bytes) -> bool:
    fd = os.open(name, FOLDER_FLAGS, dir_fd=root_fd)
    try:
        return "owner" in os.listdir(fd)
    finally:
        os.close(fd)


def _mtime(root_fd: int, name: bytes) -> float:
    return os.stat(name, dir_fd=root_fd, follow_symlinks=False).st_mtime


def _remove(root_fd: int, name: bytes) -> None:
    with contextlib.suppress(OSError), FolderCache(os.dup(root_fd)) as folders:
        remove_tree(folders, name)


def _present(root_fd: int) -> bool:
    try:
        os.stat(STAGE_NAME, dir_fd=root_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _holder_at(root_fd: int) -> Holder | None:
    try:
        stage_fd = os.open(STAGE_NAME, FOLDER_FLAGS, dir_fd=root_fd)
        try:
            fd = open_regular("owner", os.O_RDONLY, stage_fd)
        finally:
            os.close(stage_fd)
    except OSError:
        return None
    try:
        return _decode_holder(os.pread(fd, 65536, 0))
    finally:
        os.close(fd)


def _decode_holder(data: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(data, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def busy(holder: Holder | None) -> ProviderError:
    """The error for a workspace that another restore holds."""
    who = holder.describe() if holder is not None else "another writer"
    return ProviderError(
        f"A restore of this workspace is running: {who} holds it.",
        code=Code.WORKSPACE_BUSY,
        hint="Wait for it to end.",
        retryable=True,
    )


def provider_error(error: OSError, what: str) -> ProviderError:
    """A failed file operation as an error with a code: no room, not allowed, or the file system itself."""
    reason = error.strerror or str(error)
    name = f" ({printable(error.filename)})" if isinstance(error.filename, bytes | str) else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        code, hint = Code.SANDBOX_FULL, "Free some space there. The workspace is as it was."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV, errno.ENOTSUP, errno.ENOSYS):
        code, hint = Code.NOT_CAPABLE, "The workspace is as it was."
    else:
        code, hint = Code.SANDBOX_UNAVAILABLE, ""
    return ProviderError(f"{what}: {reason}{name}.", code=code, hint=hint)
