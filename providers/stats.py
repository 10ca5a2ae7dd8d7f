"""What a stat and a failed read mean, for every workspace alike."""

import errno
import stat
from typing import Any, Final

from snapcore.model import FileStat, Kind, Note

__all__ = ["KINDS", "NOT_REGULAR", "VANISHED", "describe", "problem"]

NOT_REGULAR: Final = "not a regular file any more"
VANISHED: Final = "vanished"
KINDS: Final = {
    stat.S_IFREG: Kind.FILE,
    stat.S_IFDIR: Kind.DIR,
    stat.S_IFLNK: Kind.LINK,
    stat.S_IFIFO: Kind.FIFO,
    stat.S_IFSOCK: Kind.SOCKET,
}


def describe(path: bytes, st: Any, note: str = Note.NONE) -> FileStat:
    """What `os.stat` or a handle's `lstat` gave as a `FileStat`. Only files have a size; what the handle does not know is 0,
    and 1 for the number of names."""
    kind = KINDS.get(stat.S_IFMT(st.st_mode), Kind.DEVICE)
    return FileStat(
        path,
        kind,
        st.st_mode & 0o7777,
        st.st_size if kind == Kind.FILE else 0,
        st.st_mtime_ns,
        getattr(st, "st_ctime_ns", 0),
        getattr(st, "st_ino", 0),
        getattr(st, "st_dev", 0),
        getattr(st, "st_nlink", 1),
        getattr(st, "st_uid", 0),
        getattr(st, "st_gid", 0),
        b"",
        note,
    )


def problem(error: OSError) -> str:
    """Why a file could not be read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return VANISHED
    if isinstance(error, PermissionError):
        return "unreadable"
    if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR) or isinstance(error, IsADirectoryError):
        return NOT_REGULAR
    return error.strerror or "cannot be read"
