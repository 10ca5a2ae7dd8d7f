"""Where something is mounted below a folder. A bind mount of the same file system shows in no `st_dev`, only here."""

import re
from typing import Final

from .links import inside

__all__ = ["is_below_mount", "mount_points", "unescaped"]

_TABLE: Final = "/proc/self/mountinfo"
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")


def mount_points(real: bytes) -> frozenset[bytes]:
    """The mount points below the folder with the resolved path `real`, relative to it. Empty where the system has no
    `/proc/self/mountinfo`; there `st_dev` has to do."""
    try:
        with open(_TABLE, "rb") as table:
            lines = table.read().splitlines()
    except OSError:
        return frozenset()
    found = (inside(unescaped(line.split(b" ", 5)[4]), real) for line in lines)
    return frozenset(path for path in found if path)


def is_below_mount(path: bytes, mounts: frozenset[bytes]) -> bool:
    """Whether the path is one of the mount points or lies below one."""
    return any(path == mount or path.startswith(mount + b"/") for mount in mounts)


def unescaped(text: bytes) -> bytes:
    """A path of the table, in which blanks and backslashes are written as octal escapes."""
    return _ESCAPE.sub(lambda escape: bytes([int(escape[1], 8) & 0xFF]), text)
