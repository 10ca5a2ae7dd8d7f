"""One difference as text, in git's extended format.

What git has no words for (folders, times, permissions other than the owner's execute bit, hard links) is in no patch.
The format is that of git-diff's documentation ("generating patch text with -p") and of GNU diffutils ("unified format").
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from .browse import DiffEntry
from .linediff import Block, changed_blocks
from .model import Entry, Kind
from .restoreplan import link_target

__all__ = ["BINARY", "REDACTED", "TOO_LARGE", "Content", "FilePatch", "PatchWriter", "quoted_name"]

MAX_TEXT_LINES: Final = 100_000
BINARY_LOOK: Final = 8_000  # bytes at the beginning in which a NUL means that a file is no text, as git has it
ID_DIGITS: Final = 7
NO_NEWLINE: Final = b"\n\\ No newline at end of file\n"
ESCAPES: Final = {7: b"\\a", 8: b"\\b", 9: b"\\t", 10: b"\\n", 11: b"\\v", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}

BINARY: Final = "binary"
TOO_LARGE: Final = "too large"
REDACTED: Final = "redacted"


@dataclass(frozen=True, slots=True)
class FilePatch:
    """One difference as text.

    `data` is empty where git has no words for it. `added` and `removed` are numbers of lines, None when the content is not shown
    as text; `why` then says why: `binary`, `too large`, `redacted` (it may hold secrets that were not given), or what went
    wrong when the live file was read.
    """

    entry: DiffEntry
    data: bytes
    added: int | None
    removed: int | None
    why: str = ""


class Content(NamedTuple):
    """A file's bytes, and which of them, as (offset, length), are zeros in the place of secrets; or why there are none."""

    data: bytes = b""
    hidden: Sequence[tuple[int, int]] = ()
    problem: str = ""


def quoted_name(name: bytes) -> bytes:
    """A name as git writes it: in double quotes, with escapes, when it holds a quote, a backslash, or what is not printable
    ASCII."""
    if all(0x20 <= c < 0x7F and c not in b'"\\' for c in name):
        return name
    return b'"' + b"".join(ESCAPES.get(c) or (bytes([c]) if 0x20 <= c < 0x7F else b"\\%03o" % c) for c in name) + b'"'


class PatchWriter:
    """Writes one difference. `root` is the path of the later root; the root's name stands in paths when there are `several`."""

    def __init__(self, d: DiffEntry, root: bytes, several: bool, context: int) -> None:
        self._d = d
        self._root = root
        self._context = context
        path = d.root.encode("utf-8", "surrogateescape") + b"/" + d.path if several else d.path
        self._a, self._b = quoted_name(b"a/" + path), quoted_name(b"b/" + path)
        self._added: int | None = 0
        self._removed: int | None = 0
        self._why = ""

    def patch(self, old: Content | None, new: Content | None) -> FilePatch:
        """The patch, given what was read of either side."""
        a, b = self._d.before, self._d.after
        a = a if a is not None and a.kind != Kind.DIR else None
        b = b if b is not None and b.kind != Kind.DIR else None
        if a is not None and b is not None and a.kind != b.kind:
            data = self._one(a, None, old, None) + self._one(None, b, None, new)
        else:
            data = self._one(a, b, old, new)
        return FilePatch(self._d, data, self._added, self._removed, self._why)

    def _one(self, a: Entry | None, b: Entry | None, old: Content | None, new: Content | None) -> bytes:
        if a is None and b is None:
            return b""
        head = b"diff --git " + self._a + b" " + self._b + b"\n"
        modes = b""
        if a is None and b is not None:
            modes = b"new file mode %s\n" % _mode(b)
        elif b is None and a is not None:
            modes = b"deleted file mode %s\n" % _mode(a)
        elif a is not None and b is not None and _mode(a) != _mode(b):
            modes = b"old mode %s\nnew mode %s\n" % (_mode(a), _mode(b))
        differs = a is None or b is None or "content" in self._d.what
        body = self._body(a, b, old, new) if differs else b""
        return head + modes + body if modes or body else b""

    def _body(self, a: Entry | None, b: Entry | None, old: Content | None, new: Content | None) -> bytes:
        before, after = self._content(a, old), self._content(b, new)
        name_a, name_b = (self._a if a is not None else b"/dev/null"), (self._b if b is not None else b"/dev/null")
        why = before.problem or after.problem or (BINARY if _is_binary(before) or _is_binary(after) else "")
        if not why and max(before.data.count(b"\n"), after.data.count(b"\n")) > MAX_TEXT_LINES:
            why = TOO_LARGE
        if why:
            self._added = self._removed = None
            self._why = why
        if why and why != BINARY:
            return b"Files %s%s and %s%s differ\n" % (name_a, _size(a), name_b, _size(b))
        if why:
            return b"Binary files %s and %s differ\n" % (name_a, name_b)
        index = b""
        # without it, `patch` takes links for files, and what is empty for what is not there
        if any(e is not None and (e.kind == Kind.LINK or e.size == 0) for e in (a, b)):
            index = b"index %s..%s%s\n" % (_blob_id(a, before), _blob_id(b, after), _kept_mode(a, b))
        hunks = self._hunks(_lines(before.data), _lines(after.data))
        if not hunks:
            return index if a is None or b is None else b""
        return index + b"--- %s\n+++ %s\n%s" % (_told(name_a), _told(name_b), hunks)

    def _content(self, entry: Entry | None, read: Content | None) -> Content:
        if entry is None or (entry.kind == Kind.FILE and entry.size == 0):
            return Content()
        if entry.kind == Kind.LINK:
            return Content(link_target(entry, self._root))
        return read if read is not None else Content(problem=TOO_LARGE)

    def _hunks(self, a: list[bytes], b: list[bytes]) -> bytes:
        out = []
        for group in _groups(changed_blocks(a, b), self._context):
            first, last = group[0], group[-1]
            a1, b1 = max(first.a1 - self._context, 0), max(first.b1 - self._context, 0)
            a2, b2 = min(last.a2 + self._context, len(a)), min(last.b2 + self._context, len(b))
            out.append(b"@@ -%s +%s @@\n" % (_range(a1, a2), _range(b1, b2)))
            at = a1
            for block in group:
                out += [_line(b" ", line) for line in a[at : block.a1]]
                out += [_line(b"-", line) for line in a[block.a1 : block.a2]]
                out += [_line(b"+", line) for line in b[block.b1 : block.b2]]
                at = block.a2
                self._removed = (self._removed or 0) + block.a2 - block.a1
                self._added = (self._added or 0) + block.b2 - block.b1
            out += [_line(b" ", line) for line in a[at:a2]]
        return b"".join(out)


def _mode(entry: Entry) -> bytes:
    if entry.kind == Kind.LINK:
        return b"120000"
    return b"100755" if entry.mode & 0o100 else b"100644"


def _blob_id(entry: Entry | None, content: Content) -> bytes:
    """What git calls the content, shortened. `patch` tells from it that a file is empty."""
    if entry is None:
        return b"0" * ID_DIGITS
    return hashlib.sha1(b"blob %d\0" % len(content.data) + content.data, usedforsecurity=False).hexdigest()[:ID_DIGITS].encode()


def _kept_mode(a: Entry | None, b: Entry | None) -> bytes:
    return b" " + _mode(b) if a is not None and b is not None and _mode(a) == _mode(b) else b""


def _size(entry: Entry | None) -> bytes:
    return b" (%d bytes)" % entry.size if entry is not None else b""


def _told(name: bytes) -> bytes:
    """A name in a line that could go on with a time: a tab ends one that holds a space."""
    return name + b"\t" if b" " in name and not name.startswith(b'"') else name


def _is_binary(content: Content) -> bool:
    head = content.data[:BINARY_LOOK]
    zeros = head.count(b"\0")
    if zeros and content.hidden:  # zeros in the place of a secret do not count
        shown = bytearray(head)
        for offset, length in content.hidden:
            shown[offset : offset + length] = b"*" * len(shown[offset : offset + length])
        zeros = shown.count(b"\0")
    return zeros > 0


def _lines(data: bytes) -> list[bytes]:
    """Lines with their ends; only a line feed ends one."""
    parts = data.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    return [*lines, parts[-1]] if parts[-1] else lines


def _line(sign: bytes, line: bytes) -> bytes:
    return sign + line if line.endswith(b"\n") else sign + line + NO_NEWLINE


def _range(start: int, end: int) -> bytes:
    size = end - start
    if size == 1:
        return b"%d" % (start + 1)
    return b"%d,%d" % (start + 1 if size else start, size)


def _groups(blocks: Sequence[Block], context: int) -> Iterator[list[Block]]:
    """Changes that share lines around them, together."""
    group: list[Block] = []
    for block in blocks:
        if group and block.a1 - group[-1].a2 > 2 * context:
            yield group
            group = []
        group.append(block)
    if group:
        yield group
