"""Members of a tar archive that a sandbox's `tar -c` wrote: GNU's and busybox's, which both write long names in GNU's way."""

from typing import Final

import msgspec

__all__ = ["BLOCK", "Member", "next_member", "tar_room"]

BLOCK: Final = 512
MAX_NAME: Final = 64 << 10
RECORD: Final = 20 << 10  # what an archive is filled up to a multiple of, and some room

_REGULAR: Final = (b"0", b"\0", b"7")
_LONG_NAME: Final = b"L"
_EXTRA: Final = (b"L", b"K", b"x", b"g")


class Member(msgspec.Struct, frozen=True):
    """A member: its name, whether it is a regular file, where its content begins in the buffer and how long it is."""

    name: bytes
    regular: bool
    start: int
    size: int

    @property
    def end(self) -> int:
        """Where the next member begins."""
        return self.start + -(-self.size // BLOCK) * BLOCK


def next_member(data: bytes, at: int) -> Member | None:
    """The member whose headers begin at `at`. None when they are not all there, at the archive's end, and for what is no tar."""
    name = b""
    while True:
        header = data[at : at + BLOCK]
        if len(header) < BLOCK or header[257:262] != b"ustar":
            return None
        kind = header[156:157]
        size = _number(header[124:136])
        if size is None:
            return None
        start = at + BLOCK
        if kind not in _EXTRA:
            return Member(name or header[:100].partition(b"\0")[0], kind in _REGULAR, start, size if kind in _REGULAR else 0)
        if size > MAX_NAME or start + size > len(data):
            return None
        if kind == _LONG_NAME:
            name = data[start : start + size].partition(b"\0")[0]
        at = start + -(-size // BLOCK) * BLOCK


def tar_room(name_bytes: int, size: int) -> int:
    """The most bytes that a member takes in an archive: the headers of a long name, its own, and its content."""
    return 4 * BLOCK + name_bytes + size


def _number(field: bytes) -> int | None:
    if field[0] & 0x80:  # base 256, for what has too many octal digits
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return None
