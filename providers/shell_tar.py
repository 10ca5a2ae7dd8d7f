"""Tar streams made on this host for a sandbox's `tar -x`: what GNU tar and busybox both read.

Long names are GNU's (types L and K, which busybox knows too), a fraction of a second is a pax record (which busybox passes
over), and numbers that do not fit, as those of times before 1970, are in base 256.
"""

import stat
from typing import Final

__all__ = ["BLOCK", "END", "FOLDER", "HARD_LINK", "LINK", "REGULAR", "member", "padding"]

BLOCK: Final = 512
END: Final = bytes(2 * BLOCK)
REGULAR: Final = b"0"
HARD_LINK: Final = b"1"
LINK: Final = b"2"
FOLDER: Final = b"5"

_LONG_NAME: Final = b"L"
_LONG_LINK: Final = b"K"
_PAX: Final = b"x"
_SECOND: Final = 1_000_000_000


def member(
    kind: bytes,
    name: bytes,
    *,
    mode: int = 0o600,
    size: int = 0,
    mtime_ns: int = 0,
    target: bytes = b"",
    owner: tuple[int, int] = (0, 0),
) -> bytes:
    """The blocks that come before a member's content. The content, of `size` bytes, is then padded by `padding(size)`."""
    out = b""
    seconds, fraction = divmod(mtime_ns, _SECOND)
    if fraction:
        out += _extra(_PAX, _record(b"mtime", _decimal(mtime_ns)))
    if len(target) > 100:
        out += _extra(_LONG_LINK, target + b"\0")
    if len(name) > 100:
        out += _extra(_LONG_NAME, name + b"\0")
    return out + _header(kind, name, mode, size, seconds, target, owner)


def padding(size: int) -> bytes:
    """What fills the last block of `size` bytes."""
    return bytes(-size % BLOCK)


def _extra(kind: bytes, body: bytes) -> bytes:
    return _header(kind, b"././@LongLink", 0o600, len(body), 0, b"", (0, 0)) + body + padding(len(body))


def _header(kind: bytes, name: bytes, mode: int, size: int, seconds: int, target: bytes, owner: tuple[int, int]) -> bytes:
    head = b"".join(
        (
            name[:100].ljust(100, b"\0"),
            b"%07o\0" % stat.S_IMODE(mode),
            _number(owner[0], 8),
            _number(owner[1], 8),
            _number(size, 12),
            _number(seconds, 12),
            b"        ",
            kind,
            target[:100].ljust(100, b"\0"),
            b"ustar  \0",
        )
    ).ljust(BLOCK, b"\0")
    return head[:148] + b"%06o\0 " % sum(head) + head[156:]


def _number(value: int, width: int) -> bytes:
    if 0 <= value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return bytes([0x80 if value >= 0 else 0xFF]) + value.to_bytes(width - 1, "big", signed=True)


def _decimal(ns: int) -> bytes:
    seconds, fraction = divmod(abs(ns), _SECOND)
    return b"%s%d.%09d" % (b"-" if ns < 0 else b"", seconds, fraction)


def _record(key: bytes, value: bytes) -> bytes:
    """A pax record, which begins with its own length."""
    length = rest = len(key) + len(value) + 3
    while length != rest + len(b"%d" % length):
        length = rest + len(b"%d" % length)
    return b"%d %s=%s\n" % (length, key, value)
