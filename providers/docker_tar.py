"""Tar as the Docker engine sends and takes it: read as a stream with bounds on all that is kept, and written with exact times."""

import os
import tarfile
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from snapcore.errors import Code, ProviderError
from snapcore.model import Kind

__all__ = ["TAR_END", "BrokenTarError", "TarMember", "TarReader", "header_of", "padding"]

BLOCK: Final = 512
TAR_END: Final = bytes(2 * BLOCK)
MAX_EXTENDED: Final = 1 << 20  # bytes of one extended header
MAX_SIZE: Final = 1 << 62
KINDS: Final = {
    b"0": Kind.FILE,
    b"\0": Kind.FILE,
    b"7": Kind.FILE,
    b"1": Kind.FILE,
    b"2": Kind.LINK,
    b"3": Kind.DEVICE,
    b"4": Kind.DEVICE,
    b"5": Kind.DIR,
    b"6": Kind.FIFO,
}


class BrokenTarError(ProviderError):
    """The stream ended early, or is no tar."""

    def __init__(self) -> None:
        super().__init__(
            "The archive that the Docker engine sent is cut short or damaged.",
            code=Code.SANDBOX_UNAVAILABLE,
            hint="A file that grows or shrinks meanwhile does that too; freeze=True reads a container at rest.",
            retryable=True,
        )


class TarMember(msgspec.Struct, frozen=True):
    """One member. `hardlink` says that it is another name of the member `link`; for a symbolic link that is its target."""

    name: bytes
    kind: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    link: bytes
    hardlink: bool


class TarReader:
    """The members of a tar stream. After each its content is to be read, or is skipped."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._buffer = b""
        self._at = 0
        self._content = 0  # of the present member, left to be read
        self._padding = 0

    def members(self) -> Iterator[TarMember]:
        """In the order of the stream, to its end mark. Raises `BrokenTarError`."""
        while True:
            self._skip()
            extended: dict[bytes, bytes] = {}
            while True:
                header = self._exactly(BLOCK)
                if header.count(0) == BLOCK:
                    return
                kind, size = header[156:157], _checked_number(header)
                if kind in (b"x", b"g", b"L", b"K"):
                    if size > MAX_EXTENDED:
                        raise BrokenTarError
                    data = self._exactly(size)
                    self._exactly(-size % BLOCK)
                    if kind == b"x":
                        extended |= _records(data)
                    elif kind != b"g":
                        extended[b"path" if kind == b"L" else b"linkpath"] = data.rstrip(b"\0")
                    continue
                break
            member = _member(header, extended)
            self._content = member.size
            self._padding = -member.size % BLOCK
            yield member

    def content(self) -> Iterator[bytes]:
        """The present member's content in pieces of at most what the stream gives at once."""
        while self._content:
            piece = self._some(self._content)
            self._content -= len(piece)
            yield piece

    def _skip(self) -> None:
        for _ in self.content():
            pass
        while self._padding:
            self._padding -= len(self._some(self._padding))

    def _some(self, most: int) -> bytes:
        while self._at >= len(self._buffer):
            piece = next(self._pieces, None)
            if piece is None:
                raise BrokenTarError
            self._buffer, self._at = piece, 0
        piece = self._buffer[self._at : self._at + most]
        self._at += len(piece)
        return piece

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            parts.append(self._some(size))
            size -= len(parts[-1])
        return b"".join(parts)


def _member(header: bytes, extended: dict[bytes, bytes]) -> TarMember:
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else b""
    name = _text(header[:100])
    kind = KINDS.get(header[156:157], Kind.DEVICE)
    hardlink = header[156:157] == b"1"
    size = int(extended[b"size"]) if b"size" in extended else _number(header[124:136])
    if not 0 <= size < MAX_SIZE:
        raise BrokenTarError
    if kind != Kind.FILE or hardlink:
        size = 0
    return TarMember(
        name=extended.get(b"path", prefix + b"/" + name if prefix else name),
        kind=kind,
        mode=_number(header[100:108]) & 0o7777,
        uid=int(extended[b"uid"]) if b"uid" in extended else _number(header[108:116]),
        gid=int(extended[b"gid"]) if b"gid" in extended else _number(header[116:124]),
        size=size,
        mtime_ns=max(-MAX_SIZE, min(_mtime_ns(header, extended), MAX_SIZE)),
        link=extended.get(b"linkpath", _text(header[157:257])),
        hardlink=hardlink,
    )


def _mtime_ns(header: bytes, extended: dict[bytes, bytes]) -> int:
    return _nanoseconds(extended[b"mtime"]) if b"mtime" in extended else _number(header[136:148]) * 1_000_000_000


def _checked_number(header: bytes) -> int:
    """The member's size, once the header's sum was found right."""
    if sum(header[:148]) + 8 * 32 + sum(header[156:]) != _number(header[148:156]):
        raise BrokenTarError
    size = _number(header[124:136])
    if not 0 <= size < MAX_SIZE:
        raise BrokenTarError
    return size


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # two's complement instead of octal digits
        value = int.from_bytes(field, "big")
        bits = 8 * len(field)
        return value - (1 << bits) if field[0] & 0x40 else value - (1 << (bits - 1))
    try:
        return int(_text(field).strip() or b"0", 8)
    except ValueError:
        raise BrokenTarError from None


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _records(data: bytes) -> dict[bytes, bytes]:
    """The records of an extended header: "length key=value" and a newline each. The numbers among them are checked."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        digits, space, _ = data[at : at + 20].partition(b" ")
        if not space or not digits.isdigit():
            raise BrokenTarError
        end = at + int(digits)
        record = data[at + len(digits) + 1 : end]
        key, equals, value = record.partition(b"=")
        if end > len(data) or not record.endswith(b"\n") or not equals:
            raise BrokenTarError
        value = value[:-1]
        if key in (b"size", b"uid", b"gid") and not (value.isdigit() and len(value) < 20):
            raise BrokenTarError
        found[key] = value
        at = end
    return found


def _nanoseconds(text: bytes) -> int:
    whole, _, fraction = text.partition(b".")
    negative = whole.startswith(b"-")
    digits = whole.lstrip(b"-")
    if not digits.isdigit() or len(digits) > 18 or (fraction and not fraction.isdigit()):
        raise BrokenTarError
    value = int(digits) * 1_000_000_000 + int(fraction[:9].ljust(9, b"0") or b"0")
    return -value if negative else value


# ---------------------------------------------------------------------------------------------------------- writing


def header_of(
    name: bytes,
    kind: int,
    *,
    mode: int,
    mtime_ns: int,
    size: int = 0,
    owner: tuple[int, int] | None = None,
    link: bytes = b"",
    hardlink: bool = False,
) -> bytes:
    """The header blocks of one member. Content and `padding` follow those of a file."""
    info = tarfile.TarInfo(os.fsdecode(name))
    info.type = {Kind.FILE: tarfile.REGTYPE, Kind.DIR: tarfile.DIRTYPE, Kind.LINK: tarfile.SYMTYPE}[kind]
    if hardlink:
        info.type = tarfile.LNKTYPE
    info.mode = mode
    info.size = size
    info.linkname = os.fsdecode(link)
    info.uid, info.gid = owner or (0, 0)
    info.mtime = max(0, min(mtime_ns // 1_000_000_000, 0o77777777777))
    seconds, nanoseconds = divmod(abs(mtime_ns), 1_000_000_000)
    info.pax_headers = {"mtime": f"{'-' if mtime_ns < 0 else ''}{seconds}.{nanoseconds:09d}"}
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def padding(size: int) -> bytes:
    """What fills up the last block of `size` bytes of content."""
    return bytes(-size % BLOCK)
