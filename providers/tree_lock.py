"""What keeps captures and swaps of one local tree apart: an flock on the root folder itself, so that nothing is written.

A capture holds it shared while it scans and reads; a restore takes it alone before it seals its journal, and keeps it until
the swap is done. So a sealed journal whose owner lives is never seen by a holder, and one whose owner is dead is finished
before anything is read. The kernel frees the lock of a process that dies. On file systems without such locks (NFS refuses
one of its own kind on a folder) there is no protection.
"""

import errno
import fcntl
import os
import time
from typing import Final

from snapcore.errors import Code, ProviderError, SnapshotError

from .folders import FOLDER_FLAGS, STAGE_NAME

__all__ = ["BUSY_SECONDS", "POLL_SECONDS", "TreeLock", "being_read", "sealed_stage"]

BUSY_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.02

_HELD: Final = (errno.EWOULDBLOCK, errno.EACCES)


class TreeLock:
    """A lock on the folder behind `root_fd`, until `release` or until it is dropped."""

    def __init__(self, root_fd: int) -> None:
        self._fd = -1
        try:
            self._fd = os.open(".", FOLDER_FLAGS, dir_fd=root_fd)  # a description of its own: locks belong to those
        except PermissionError as error:
            raise SnapshotError(
                "The workspace's folder may not be entered.", code=Code.INVALID_WORKSPACE, hint="Give yourself access to it."
            ) from error

    def __del__(self) -> None:
        self.release()

    @classmethod
    def take(cls, root_fd: int, *, alone: bool, seconds: float = 0.0) -> "TreeLock | None":
        """Lock the folder, shared or alone. None when others still hold it after so many seconds, in which the thread sleeps."""
        deadline = time.monotonic() + seconds
        lock = cls(root_fd)
        while not lock._try(fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                lock.release()
                return None
            time.sleep(POLL_SECONDS)
        return lock

    def share(self) -> None:
        """Let others read. For the holder of the stage: since no other can swap, the change cannot be refused."""
        self._try(fcntl.LOCK_SH)

    def release(self) -> None:
        """Let go. Idempotent."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _HELD
        return True


def sealed_stage(root_fd: int) -> bool:
    """Whether a sealed journal waits in the root: of a restore that died, if the tree is locked."""
    try:
        os.stat(STAGE_NAME + b"/journal", dir_fd=root_fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def being_read() -> ProviderError:
    """The error for a tree that others hold."""
    return ProviderError(
        "The workspace is being captured, or locked by another program.",
        code=Code.WORKSPACE_BUSY,
        hint="Wait for it to end. The workspace is as it was.",
        retryable=True,
    )
