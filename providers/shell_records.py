"""What a sandbox's `find` or `stat` says of a path: asked for in one of two forms, checked, kept small, decoded late.

A record is (numbers, target, path). The numbers are a flag and the kind's letter, mode, size, mtime, ctime, inode, device,
names, uid and gid, as text with spaces between: a fraction of the memory of what they are decoded to.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

from snapcore.model import FileStat, Kind, Note

from .shell_tools import Tools, broken

__all__ = ["PLAIN", "UNREADABLE", "PrintfRecords", "Record", "Records", "StatRecords", "decode", "make_records"]

PLAIN: Final = b"n"
MARKED: Final = b"m"
UNREADABLE: Final = b"u"

MAX_RECORD: Final = 256 << 10
MAX_NUMBERS: Final = 200
KINDS: Final = {
    b"f": Kind.FILE,
    b"d": Kind.DIR,
    b"l": Kind.LINK,
    b"p": Kind.FIFO,
    b"s": Kind.SOCKET,
    b"b": Kind.DEVICE,
    b"c": Kind.DEVICE,
}
LETTERS: Final = {8: b"f", 4: b"d", 10: b"l", 1: b"p", 12: b"s", 6: b"b", 2: b"c"}  # by the upper bits of a mode

_SECOND: Final = 1_000_000_000
_LIMIT: Final = 2**63

Record = tuple[bytes, bytes, bytes]
"""(numbers, link target, path as the tool printed it)."""


class Records(ABC):
    """One form of asking and answering. `end` is the word printed at the end of all, None until it came; `rest` is what was
    fed and does not belong to a whole record."""

    def __init__(self, token: str) -> None:
        self.end: bytes | None = None
        self.rest = b""
        self.token = token.encode()

    @abstractmethod
    def stat_command(self) -> str:
        """A command that prints a record of each of the script's arguments that is there, following no link. The names have
        to be `.` or to begin with `./`."""

    @abstractmethod
    def end_command(self, word: str) -> str:
        """A command that prints the end. In the word the shell's variables are filled in."""

    @abstractmethod
    def _split(self, data: bytes) -> Iterator[Record]:
        """Yield the records that `data` begins with, and set `rest`, and `end` when it is reached."""

    def feed(self, piece: bytes) -> Iterator[Record]:
        """The records that are complete with this piece of output. `ProviderError` for what is no record."""
        yield from self._split(self.rest + piece)
        if self.end is None and len(self.rest) > MAX_RECORD:
            raise broken("a record does not end")


class PrintfRecords(Records):
    """By `find -printf`: three fields a record, each ended by a NUL."""

    @staticmethod
    def action(flag: bytes, name: str = "%P") -> str:
        """The action of `find` that prints a record."""
        return f"-printf '{flag.decode()}%y %m %s %T@ %C@ %i %D %n %U %G\\0%l\\0{name}\\0'"

    def stat_command(self) -> str:
        """See `Records.stat_command`."""
        return f'find "$@" -prune {self.action(PLAIN, "%p")}'

    def end_command(self, word: str) -> str:
        """See `Records.end_command`."""
        return f"printf '%s\\0%s\\0\\0' {self.token.decode()} \"{word}\""

    def _split(self, data: bytes) -> Iterator[Record]:
        fields = data.split(b"\0")
        whole = (len(fields) - 1) // 3 * 3
        for at in range(0, whole, 3):
            numbers = fields[at]
            if numbers == self.token:
                self.end = fields[at + 1]
                whole = at + 3
                break
            if len(numbers) > MAX_NUMBERS:
                raise broken("a record is longer than it can be")
            yield numbers, fields[at + 1], fields[at + 2]
        self.rest = b"\0".join(fields[whole:])


class StatRecords(Records):
    """By `stat -c`, which cannot print a NUL: two fields a record, each ended by the token. The end has another one, that stands
    out even after half a record."""

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self._end_token = self.token[::-1]

    def stat_command(self) -> str:
        """See `Records.stat_command`. `%Y` is in whole seconds, rounded down; `%y` has the nanoseconds, if anything has."""
        token = self.token.decode()
        return f"stat -c '%f %s %Y %Z %i %d %h %u %g %y/%z/%n{token}%N{token}' \"$@\""

    def unreadable_command(self, word: str) -> str:
        """A command that prints a record which only says of a name that it is a folder that may not be listed."""
        token = self.token.decode()
        return f"printf '{UNREADABLE.decode()}//%s{token}{token}' \"{word}\""

    def end_command(self, word: str) -> str:
        """See `Records.end_command`."""
        token = self._end_token.decode()
        return f"printf '{token}%s{token}' \"{word}\""

    def _split(self, data: bytes) -> Iterator[Record]:
        body, ended, end = data.partition(self._end_token)
        fields = body.split(self.token)
        whole = (len(fields) - 1) // 2 * 2
        for at in range(0, whole, 2):
            parts = fields[at].removeprefix(b"\n").split(b"/", 2)  # `stat` ends each with a line break
            if len(parts) != 3:
                raise broken("a record makes no sense")
            if parts[0] == UNREADABLE:
                yield UNREADABLE, b"", parts[2]
                continue
            numbers = _numbers(parts[0].split(b" "), parts[1].split(b" "))
            target = _target(fields[at + 1], parts[2]) if numbers[1:2] == b"l" else b""
            if target is not None:
                yield numbers, target, parts[2]
        self.rest = self.token.join(fields[whole:])
        if ended:
            word, whole_end, rest = end.partition(self._end_token)
            if self.rest.strip(b"\n"):
                raise broken("its answer was cut short")
            if whole_end:
                self.end, self.rest = word, rest
            else:
                self.rest = self._end_token + end


def make_records(tools: Tools, token: str) -> Records:
    """The form that these tools can do. `token` is random, so that no name in the sandbox holds it."""
    return PrintfRecords(token) if tools.find == "printf" else StatRecords(token)


def _numbers(fields: list[bytes], changed: list[bytes]) -> bytes:
    """What `stat` said, in the form of `find`: `fields` are nine numbers and the mtime as text, `changed` the ctime as text."""
    try:
        mode = int(fields[0], 16)
        letter = LETTERS[mode >> 12]
        _, size, mtime, ctime, inode, device, nlink, uid, gid, _, modified = fields[:11]
        mtime_text, ctime_text = mtime + b"." + modified[9:18], ctime + b"." + changed[1][9:18]
    except (ValueError, KeyError, IndexError):
        raise broken("a record makes no sense") from None
    numbers = (PLAIN + letter, b"%o" % (mode & 0o7777), size, mtime_text, ctime_text, inode, device, nlink, uid, gid)
    return b" ".join(numbers)


def _target(named: bytes, path: bytes) -> bytes | None:
    """The target in `%N`, which is the path, an arrow and the target, in quotes or without. None: it is no link any more."""
    for before, after in ((b"'" + path + b"' -> '", b"'"), (path + b" -> ", b"")):
        if named.startswith(before) and named.endswith(after) and len(named) >= len(before) + len(after):
            return named[len(before) : len(named) - len(after)]
    if named in (path, b"'" + path + b"'"):
        return None
    raise broken("it tells the target of a link in a way that is not known")


def decode(numbers: bytes, target: bytes, path: bytes, note: str = Note.NONE) -> FileStat:
    """The stat that a record tells. `ProviderError` for numbers that make no sense, or that no file system can have."""
    try:
        kind_, mode_, size_, mtime_, ctime_, inode_, device_, nlink_, uid_, gid_ = numbers.split(b" ")
        kind = KINDS[kind_[1:]]
        mode = int(mode_, 8)
        size, inode, device, nlink, uid, gid = int(size_), int(inode_), int(device_), int(nlink_), int(uid_), int(gid_)
        mtime, ctime = _nanoseconds(mtime_), _nanoseconds(ctime_)
    except (ValueError, KeyError):
        raise broken("a record makes no sense") from None
    if not (0 <= mode <= 0o7777 and 0 <= size < _LIMIT and 0 <= nlink < _LIMIT and 0 <= uid < 1 << 32 and 0 <= gid < 1 << 32) or (
        not (0 <= inode < 1 << 64 and 0 <= device < 1 << 64)
    ):
        raise broken("a record has numbers that no file system has")
    if kind != Kind.FILE:
        size = 0
    return FileStat(path, kind, mode, size, mtime, ctime, inode, device, nlink, uid, gid, target, note)


def _nanoseconds(time: bytes) -> int:
    """A time as seconds, rounded down, a point and a fraction, which may be missing."""
    seconds, _, fraction = time.partition(b".")
    return int(seconds) * _SECOND + int((fraction + b"000000000")[:9])
