"""Headers of a tar, as POSIX's pax interchange format has them, written for many readers.

https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html describes the format. A value has an extended record only
where the plain header cannot hold it, so that most members take 512 bytes. The bytes depend on the arguments and on nothing else.
"""

from typing import Final

from .model import Kind

__all__ = ["IN_ROOT", "TAR_END", "filled_up", "member_header", "padding"]

BLOCK: Final = 512
RECORD: Final = 10_240  # tar's own: archives are filled up to a multiple of it
TAR_END: Final = bytes(2 * BLOCK)
NS: Final = 1_000_000_000
NAME_BYTES: Final = 100
TYPES: Final = {Kind.FILE: b"0", Kind.DIR: b"5", Kind.LINK: b"2"}
HARD_LINK: Final = b"1"
IN_ROOT: Final = b"snapcore:in-root="
"""Begins the comment of a link that was absolute into the root; its target below the root follows. The link itself is written
relative, so that any program unpacks it right, and comments are what all of them pass over in silence."""


def member_header(
    name: bytes,
    kind: int,
    *,
    mode: int,
    mtime_ns: int,
    size: int = 0,
    owner: tuple[int, int] = (0, 0),
    link: bytes = b"",
    hardlink: bool = False,
    comment: bytes = b"",
) -> bytes:
    """The header blocks of one member; content and `padding` follow those of a file. `link` is the target of a symbolic link, or
    with `hardlink` the name of the member that this is another name of. A folder's name ends with a slash."""
    records = {b"comment": comment} if comment else {}
    texts = {b"path": name, b"linkpath": link}
    records |= {k: text for k, text in texts.items() if len(text) > NAME_BYTES or (not text.isascii() and _is_utf8(text))}
    seconds, fraction = divmod(mtime_ns, NS)
    if fraction or not 0 <= seconds < 8**11:
        records[b"mtime"] = _decimal(mtime_ns)
    numbers = {b"size": (size, 8**11), b"uid": (owner[0], 8**7), b"gid": (owner[1], 8**7)}
    records |= {key: b"%d" % value for key, (value, end) in numbers.items() if value >= end}
    plain = {key: value if value < end else 0 for key, (value, end) in numbers.items()}
    header = _block(
        name[:NAME_BYTES],
        HARD_LINK if hardlink else TYPES[kind],
        mode=mode,
        uid=plain[b"uid"],
        gid=plain[b"gid"],
        size=plain[b"size"],
        seconds=min(max(seconds, 0), 8**11 - 1),
        link=link[:NAME_BYTES],
    )
    return _extended(records) + header if records else header


def padding(size: int) -> bytes:
    """What fills up the last block of `size` bytes of content."""
    return bytes(-size % BLOCK)


def filled_up(size: int) -> bytes:
    """What ends an archive whose members take `size` bytes."""
    end = size + len(TAR_END)
    return TAR_END + bytes(-end % RECORD)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _extended(records: dict[bytes, bytes]) -> bytes:
    if not all(_is_utf8(value) for value in records.values()):
        records = {b"hdrcharset": b"BINARY", **records}  # else their charset is UTF-8
    data = b"".join(_record(key, value) for key, value in records.items())
    header = _block(b"././@PaxHeader", b"x", mode=0o644, uid=0, gid=0, size=len(data), seconds=0, link=b"")
    return header + data + padding(len(data))


def _record(key: bytes, value: bytes) -> bytes:
    """ "length key=value" and a newline; the length counts its own digits too."""
    rest = len(key) + len(value) + 3
    size = rest + len(str(rest))
    size = rest + len(str(size))
    return b"%d %s=%s\n" % (size, key, value)


def _decimal(ns: int) -> bytes:
    seconds, fraction = divmod(abs(ns), NS)
    text = f"{'-' if ns < 0 else ''}{seconds}.{fraction:09d}".rstrip("0").rstrip(".")
    return text.encode()


def _block(name: bytes, kind: bytes, *, mode: int, uid: int, gid: int, size: int, seconds: int, link: bytes) -> bytes:
    parts = (
        name.ljust(NAME_BYTES, b"\0"),
        b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, uid, gid, size, seconds),
        b" " * 8,  # where the sum goes
        kind,
        link.ljust(NAME_BYTES, b"\0"),
        b"ustar\00000",
        bytes(64),  # names of owner and group: numbers alone count
        b"0000000\0" * 2,
        bytes(167),
    )
    header = b"".join(parts)
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]
