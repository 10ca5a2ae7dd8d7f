"""Headers of a tar, read strictly: what is cut short, damaged or hostile is an error and never a shorter tree.

The formats are ustar, pax and GNU, as https://www.gnu.org/software/tar/manual/html_node/Standard.html and POSIX's pax describe
them. Python's own `tarfile` is not used for reading: it takes a damaged header in the middle for the end of the archive.
"""

import re
from collections.abc import Callable, Iterator
from decimal import ROUND_FLOOR, Decimal
from typing import Final

import msgspec

from snapcore.errors import Code, SnapshotError, printable
from snapcore.model import Kind
from snapcore.transfer_tar import IN_ROOT

__all__ = ["BLOCK", "TarMember", "broken", "looks_like_tar", "plain_path", "read_members"]

BLOCK: Final = 512
MAX_EXTENDED: Final = 1 << 20  # bytes of one extended header
MAX_PATH: Final = 32 << 10  # bytes; far beyond what any kernel opens at once
MAX_NUMBER: Final = 1 << 62
TAIL_PIECE: Final = 1 << 20
NS: Final = 1_000_000_000
EXTENDED: Final = (b"x", b"g", b"L", b"K")
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
WITHOUT_CONTENT: Final = (b"1", b"2", b"3", b"4", b"5", b"6")
_TIME: Final = re.compile(rb"-?\d{1,18}(\.\d{0,30})?([eE][+-]?\d{1,2})?")

ReadAt = Callable[[int, int], bytes]
"""(offset, length) to the bytes that are there, fewer only at the end."""


class TarMember(msgspec.Struct, frozen=True):
    """One member. `path` is relative to the archive's root, `at` where its content begins. `hardlink` says that it is another
    name of the member `link`; for a symbolic link that is its target."""

    path: bytes
    kind: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    link: bytes
    hardlink: bool
    at: int


def broken(why: str) -> SnapshotError:
    """The error for an archive that is no whole tar."""
    return SnapshotError(
        f"The archive is cut short or damaged: {why}.",
        code=Code.INVALID_ARCHIVE,
        hint="Nothing was saved. Make the archive anew, and hand it over whole.",
    )


def looks_like_tar(head: bytes) -> bool:
    """Whether an archive that begins so is, or was before it was cut or damaged, a tar; else it is a provider's own reference."""
    first = head[:BLOCK]
    if first[257:262] == b"ustar" or (len(first) == BLOCK and not any(first)):
        return True
    if len(first) == BLOCK:
        return _sum_is_right(first)
    # the beginning of a header: a name filled up with NULs, then octal digits
    return not first or (
        b"\0" in first[:100] and not first[:100].rpartition(b"\0")[2] and not first[100:107].strip(b"01234567 \0")
    )


def plain_path(name: bytes) -> bytes:
    """A member's path relative to the archive's root, which is `b""`. Raises `SnapshotError` `INVALID_PATH` for one that is
    absolute or leads up, and for what no file system has."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    path = b"/".join(parts)
    if name.startswith(b"/") or b".." in parts or b"\0" in name or not name or len(path) > MAX_PATH:
        raise SnapshotError(
            f"The archive has a member that cannot lie in a workspace: {printable(name[:200])}.",
            code=Code.INVALID_PATH,
            paths=[name[:MAX_PATH]],
            hint="Nothing was saved: an archive of a folder never holds such a path.",
        )
    return path


def read_members(read_at: ReadAt, end: int, root: bytes | None = None) -> Iterator[TarMember]:
    """The members of the tar in `[0, end)`, in its order. `root` is what its root was called, where that is known: a link that
    was absolute into it, as an export notes, is absolute again. Raises `SnapshotError`: `INVALID_ARCHIVE`, `INVALID_PATH`, and
    `UNSUPPORTED_ENTRY` for GNU's sparse files, whose content is not as it lies there."""
    at = 0
    defaults: dict[bytes, bytes] = {}
    while True:
        extended = dict(defaults)
        while True:
            header = _block(read_at, at)
            at += BLOCK
            if not any(header):
                if extended != defaults:
                    raise broken("it ends after an extended header")
                _check_tail(read_at, at, end)
                return
            size = _checked_size(header)
            kind = header[156:157]
            if kind == b"V":  # a volume's label
                continue
            if kind not in EXTENDED:
                break
            if size > MAX_EXTENDED or at + size > end:
                raise broken("an extended header is too long")
            data = read_at(at, size)
            at += _padded(size)
            if kind == b"x":
                extended |= _records(data)
            elif kind == b"g":
                defaults |= _records(data)
                extended = defaults | extended
            else:
                extended[b"path" if kind == b"L" else b"linkpath"] = data.rstrip(b"\0")
        member = _member(header, extended, at, root)
        if at + _padded(member.size) > end:
            raise broken(f"it ends inside {printable(member.path)}")
        at += _padded(member.size)
        yield member


def _block(read_at: ReadAt, at: int) -> bytes:
    header = read_at(at, BLOCK)
    if len(header) < BLOCK:
        raise broken("it has no end mark")
    return header


def _check_tail(read_at: ReadAt, at: int, end: int) -> None:
    """After the end mark nothing but zeros: what looks like it may be a header that was overwritten."""
    while at < end:
        piece = read_at(at, TAIL_PIECE)
        if not piece or any(piece):
            raise broken("there is more after its end mark")
        at += len(piece)


def _padded(size: int) -> int:
    return size + -size % BLOCK


def _member(header: bytes, extended: dict[bytes, bytes], at: int, root: bytes | None) -> TarMember:
    kind = header[156:157]
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else b""
    name = _text(header[:100])
    name = extended.get(b"path") or (prefix + b"/" + name if prefix else name)
    path = plain_path(name)
    if kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in extended):
        raise SnapshotError(
            f"The archive holds {printable(path)} as a sparse file of GNU tar, which cannot be read.",
            code=Code.UNSUPPORTED_ENTRY,
            paths=[path],
            hint="Make the archive without --sparse.",
        )
    mtime_ns = _nanoseconds(extended[b"mtime"]) if b"mtime" in extended else _number(header[136:148]) * NS
    link = extended.get(b"linkpath") or _text(header[157:257])
    comment = extended.get(b"comment", b"")
    if kind == b"2" and root is not None and comment.startswith(IN_ROOT):
        inner = comment.removeprefix(IN_ROOT)
        link = root.rstrip(b"/") + b"/" + inner if inner else root
    size = _value(extended, b"size", header[124:136])
    uid, gid = _value(extended, b"uid", header[108:116]), _value(extended, b"gid", header[116:124])
    if abs(mtime_ns) >= 2 * MAX_NUMBER or not all(0 <= value < MAX_NUMBER for value in (size, uid, gid)):
        raise broken(f"a number of {printable(path)} is out of range")
    if kind == b"2" and (not link or b"\0" in link):
        raise broken(f"the link {printable(path)} has no target")
    known = KINDS.get(kind, Kind.DEVICE)
    if kind == b"\0" and name.endswith(b"/"):  # as it was before there was a type for folders
        known, size = Kind.DIR, 0
    return TarMember(
        path=path,
        kind=known,
        mode=_number(header[100:108]) & 0o7777,
        uid=uid,
        gid=gid,
        size=0 if kind in WITHOUT_CONTENT else size,
        mtime_ns=mtime_ns,
        link=link if kind in (b"1", b"2") else b"",
        hardlink=kind == b"1",
        at=at,
    )


def _sum_is_right(header: bytes) -> bool:
    """Whether a header's sum is that of its bytes, taken as unsigned or, as some old programs did, as signed."""
    try:
        told = _number(header[148:156])
    except SnapshotError:
        return False
    body = header[:148] + header[156:]
    unsigned = sum(body) + 8 * 32
    return told == unsigned or told == unsigned - 256 * sum(byte > 127 for byte in body)


def _checked_size(header: bytes) -> int:
    if not _sum_is_right(header):
        raise broken("a header's sum is wrong")
    size = _number(header[124:136])
    if not 0 <= size < MAX_NUMBER:
        raise broken("a size is out of range")
    return size


def _value(extended: dict[bytes, bytes], key: bytes, field: bytes) -> int:
    found = extended.get(key)
    if not found:
        return _number(field)
    if not found.isdigit() or len(found) > 19:
        raise broken("a number of an extended header is none")
    return int(found)


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # two's complement instead of octal digits
        value = int.from_bytes(field, "big")
        bits = 8 * len(field)
        return value - (1 << bits) if field[0] & 0x40 else value - (1 << (bits - 1))
    digits = _text(field).strip(b" ")
    if digits.strip(b"01234567"):
        raise broken("a number of a header is none")
    return int(digits or b"0", 8)


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _records(data: bytes) -> dict[bytes, bytes]:
    """The records of an extended header: "length key=value" and a newline each."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        digits, space, _ = data[at : at + 20].partition(b" ")
        if not space or not digits.isdigit():
            raise broken("an extended header cannot be read")
        end = at + int(digits)
        record = data[at + len(digits) + 1 : end]
        key, equals, value = record.partition(b"=")
        if end > len(data) or not record.endswith(b"\n") or not equals:
            raise broken("an extended header cannot be read")
        found[key] = value[:-1]
        at = end
    return found


def _nanoseconds(text: bytes) -> int:
    if not _TIME.fullmatch(text):
        raise broken("a time of an extended header is none")
    return int((Decimal(text.decode()) * NS).to_integral_value(ROUND_FLOOR))
