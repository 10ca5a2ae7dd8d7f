"""What of a file or of a command's output a model is shown: a bounded part of it, without secrets.

Secrets are taken out of the whole stream before any of it is cut, so that no cut leaves a piece of one behind.
"""

import codecs
from collections.abc import Sequence
from typing import Final

from snapcore.model import Redaction
from snapcore.redaction import Redactor

__all__ = ["HeadAndTail", "LineWindow", "shown_text"]

_LOOKED_AT: Final = 8_192  # bytes in which a NUL makes a file a binary one


class HeadAndTail:
    """Keeps the first and the last part of a stream, `limit` bytes together."""

    def __init__(self, redactor: Redactor, limit: int) -> None:
        self._stream = redactor.stream(b"")
        self._part = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0
        self._over = False

    def add(self, piece: bytes) -> None:
        """Take the next bytes."""
        self._keep(self._stream.feed(piece))

    def text(self) -> tuple[str, int]:
        """What is shown, and how many bytes in the middle are left out. Ends the stream."""
        if not self._over:
            self._keep(self._stream.finish())
            self._over = True
        records = self._stream.redactions
        start = self._size - len(self._tail)
        left_out = start - len(self._head)
        if not left_out:
            return shown_text(bytes(self._head + self._tail), 0, records), 0
        head = shown_text(bytes(self._head), 0, records, cut=True)
        tail, start = _whole_character(bytes(self._tail), start)
        return f"{head}\n[... {left_out:,} bytes left out ...]\n{shown_text(tail, start, records)}", left_out

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        room = self._part - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-self._part :]
        del self._tail[: -self._part]


class LineWindow:
    """Finds `count` lines from line `first` (from 1) in a file that is fed in order, at most `limit` bytes of them.

    `full` says that no more has to be fed. `binary` is set when there is a NUL near its beginning."""

    def __init__(self, redactor: Redactor, first: int, count: int, limit: int) -> None:
        self._stream = redactor.stream(b"")
        self._first = first
        self._count = count
        self._limit = limit
        self._kept = bytearray()
        self._base = 0  # offset of what is kept
        self._fed = 0
        self._offset = 0
        self._line = 1  # of the next byte
        self.lines = 0  # whole ones, or the last one
        self.full = False
        self.cut = False
        self.binary = False

    def add(self, piece: bytes) -> None:
        """Take the next bytes."""
        self.binary = self.binary or b"\0" in piece[: max(_LOOKED_AT - self._fed, 0)]
        self._fed += len(piece)
        self._take(self._stream.feed(piece))

    def text(self) -> str:
        """The lines. Ends the stream: what was fed is taken for the whole file unless `full`."""
        rest = self._stream.finish()
        if not self.full:
            self._take(rest)
            self.lines += bool(self._kept) and not self._kept.endswith(b"\n") and not self.cut
        return shown_text(bytes(self._kept), self._base, self._stream.redactions, cut=self.cut)

    @property
    def end(self) -> int:
        """The offset in the file after what is shown."""
        return self._base + len(self._kept)

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.full:
            end = data.find(b"\n", at) + 1
            stop = end or len(data)
            if self._line >= self._first:
                self._keep(data[at:stop], self._offset + at, ended=bool(end))
            self._line += bool(end)
            at = stop
        self._offset += len(data)

    def _keep(self, part: bytes, offset: int, *, ended: bool) -> None:
        if not self._kept:
            self._base = offset
        room = self._limit - len(self._kept)
        if len(part) > room:
            self._kept += part[:room]
            self.cut = self.full = True
            return
        self._kept += part
        self.lines += ended
        self.full = self.lines >= self._count


def _whole_character(data: bytes, start: int) -> tuple[bytes, int]:
    """Without the end of a character whose beginning is not there."""
    skip = 0
    while skip < min(3, len(data)) and data[skip] & 0xC0 == 0x80:
        skip += 1
    return data[skip:], start + skip


def shown_text(data: bytes, base: int, records: Sequence[Redaction], *, cut: bool = False) -> str:
    """Bytes as text: `{secret:NAME}` for what was taken out, escapes (`\\xe9`) for what is not UTF-8. `data` begins at `base`;
    with `cut` the beginning of a character at its end is dropped."""
    out: list[str] = []
    at = base
    end = base + len(data)
    for record in records:
        stop = record.offset + record.length
        if stop <= at or record.offset >= end:
            continue
        out += (_decoded(data[at - base : max(record.offset, at) - base]), f"{{secret:{record.name}}}")
        at = min(stop, end)
    rest = data[at - base :]
    out.append(codecs.getincrementaldecoder("utf-8")("backslashreplace").decode(rest, False) if cut else _decoded(rest))
    return "".join(out)


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
