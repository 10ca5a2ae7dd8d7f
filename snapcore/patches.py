"""Differences as text: unified diffs in git's extended format, one file after another, with bounded memory.

What git has no words for (folders, times, permissions other than the owner's execute bit, hard links) is in no patch.
The format is that of git-diff's documentation ("generating patch text with -p") and of GNU diffutils ("unified format").
"""

import hashlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from .browse import Diff, DiffEntry
from .engine import Engine
from .linediff import Block, changed_blocks
from .model import Checkpoint, Entry, FileStat, Kind, RecordType, is_redacted, path_key
from .protocols import ReadBlock, Workspace
from .records import RecordReader
from .redaction import Redactor
from .restoreplan import link_target

__all__ = ["FilePatch", "LiveSide", "PatchRequest", "StoredSide", "make_patches", "quoted_name"]

MAX_TEXT_BYTES: Final = 4 << 20  # a larger file is only told to differ
MAX_TEXT_LINES: Final = 100_000
BATCH_BYTES: Final = 16 << 20  # of content, read together on each side
BATCH_FILES: Final = 512
BINARY_LOOK: Final = 8_000  # bytes at the beginning in which a NUL means that a file is no text, as git has it
MAX_PLACES: Final = 64  # redacted lines that are looked for one by one
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


class Wanted(NamedTuple):
    """A file to be read: its root and entry, and what the other side holds in its place, when that is known."""

    root: str
    entry: Entry
    other: Content | None = None


class Side(Protocol):
    """One side of a comparison."""

    def root(self, name: str) -> bytes:
        """The path of a root."""
        ...

    async def read(self, wanted: Sequence[Wanted]) -> list[Content]:
        """The contents of files of at most `MAX_TEXT_BYTES` each, in order, without secrets."""
        ...


@dataclass(frozen=True, slots=True)
class PatchRequest:
    """What to write: the differences, the two sides they are between, and how many lines around each change."""

    found: Diff
    before: Side
    after: Side
    context: int = 3


class StoredSide:
    """A checkpoint, or nothing."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint | None) -> None:
        self._reader = RecordReader(engine)
        self._roots = {r.name: r.path for r in checkpoint.roots} if checkpoint is not None else {}

    def root(self, name: str) -> bytes:
        """See `Side`."""
        return _path(self._roots.get(name, ""))

    async def read(self, wanted: Sequence[Wanted]) -> list[Content]:
        """See `Side`."""
        lists = [w.entry.chunk_list for w in wanted if w.entry.chunk_list]
        expanded = await self._reader.expand(lists) if lists else {}
        ids = [expanded[w.entry.chunk_list] if w.entry.chunk_list else w.entry.chunk_ids() for w in wanted]
        raws = await self._reader.fetch([i for own in ids for i in own], RecordType.CHUNK)
        out = []
        for w, own in zip(wanted, ids, strict=True):
            redactions = await self._reader.redactions(w.entry) if is_redacted(w.entry) else ()
            out.append(Content(b"".join([raws[i] for i in own]), [(r.offset, r.length) for r in redactions]))
        return out


class LiveSide:
    """The live roots of a sandbox, redacted as a capture would do it."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, roots: Mapping[str, Workspace], redactor: Redactor) -> None:
        self._engine = engine
        self._checkpoint = checkpoint
        self._roots = roots
        self._redactor = redactor
        self._same_secrets: bool | None = None

    def root(self, name: str) -> bytes:
        """See `Side`."""
        return _path(self._roots[name].root)

    async def read(self, wanted: Sequence[Wanted]) -> list[Content]:
        """See `Side`. A recorded secret is looked for where it stood, unless all that was redacted then is redacted now."""
        if self._same_secrets is None:
            salt = bytes.fromhex(self._engine.config.salt)
            now = await self._engine.run(self._redactor.fingerprint, salt) if self._checkpoint.redaction else b""
            self._same_secrets = now == self._checkpoint.redaction
        out: list[Content] = [Content()] * len(wanted)
        for name, workspace in self._roots.items():
            mine = [i for i, w in enumerate(wanted) if w.root == name]
            read = await _read_live(self._engine, workspace, [wanted[i].entry for i in mine]) if mine else []
            for i, content in zip(mine, read, strict=True):
                out[i] = await self._engine.run(self._clean, wanted[i], content)
        return out

    def _clean(self, wanted: Wanted, content: Content) -> Content:
        if content.problem:
            return Content(problem=self._redactor.scrub_text(content.problem))
        data, redactions = self._redactor.redact(wanted.entry.path, content.data)
        clean, hidden = bytes(data), [(r.offset, r.length) for r in redactions]
        if wanted.other is not None and wanted.other.hidden and not self._same_secrets:
            places = _hidden_again(wanted.other, clean)
            if places is None:
                return Content(problem=REDACTED)
            for offset, length in places:
                clean = clean[:offset] + bytes(length) + clean[offset + length :]
            hidden += places
        return Content(clean, hidden)


async def _read_live(engine: Engine, workspace: Workspace, entries: Sequence[Entry]) -> list[Content]:
    pieces: list[list[bytes]] = [[] for _ in entries]
    problems = [""] * len(entries)

    def take(blocks: Sequence[ReadBlock]) -> None:
        for b in blocks:
            pieces[b.index].append(bytes(b.data))
            problems[b.index] = problems[b.index] or b.problem

    async for blocks in workspace.read([FileStat(e.path, Kind.FILE, e.mode, e.size, e.mtime_ns) for e in entries]):
        await engine.run(take, blocks)
    return [Content(b"".join(own), problem=problem) for own, problem in zip(pieces, problems, strict=True)]


def _hidden_again(stored: Content, live: bytes) -> list[tuple[int, int]] | None:
    """Where the live text holds what was redacted in the stored one: lines that are as they were around the redacted part,
    wherever they stand now. None when one of them is not found: its secret may be anywhere."""
    lines: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for offset, length in stored.hidden:
        start = stored.data.rfind(b"\n", 0, offset) + 1
        end = stored.data.find(b"\n", offset + length)
        lines.setdefault((start, len(stored.data) if end < 0 else end), []).append((offset, length))
    if len(lines) > MAX_PLACES:
        return None
    places: list[tuple[int, int]] = []
    for (start, end), parts in lines.items():
        pattern, at = b"(?m)^", start
        for offset, length in _united(parts):
            pattern += re.escape(stored.data[at:offset]) + b"((?s:.{%d}))" % length
            at = offset + length
        found = list(re.finditer(pattern + re.escape(stored.data[at:end]) + b"$", live))
        if not found:
            return None
        places += [(m.start(g), m.end(g) - m.start(g)) for m in found for g in range(1, (m.lastindex or 0) + 1)]
    return places


def _united(parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges by offset, those that overlap as one."""
    start = end = -1
    for offset, length in sorted(parts):
        if start >= 0 and offset > end:
            yield start, end - start
            start = -1
        start, end = (offset, offset + length) if start < 0 else (start, max(end, offset + length))
    if start >= 0:
        yield start, end - start


# ------------------------------------------------------------------------------------------------------- the order


async def make_patches(engine: Engine, request: PatchRequest) -> AsyncIterator[FilePatch]:
    """Each difference as text, in walk order; but a file or link that takes a folder's place comes after what was in the
    folder."""
    several = len({d.root for d in _all(request.found)}) > 1
    batch: list[DiffEntry] = []
    size = 0
    for d in sorted(_all(request.found), key=_order):
        batch.append(d)
        size += max((e.size for e in (d.before, d.after) if e is not None and _is_shown(d)), default=0)
        if size >= BATCH_BYTES or len(batch) >= BATCH_FILES:
            async for patch in _patch_batch(engine, request, batch, several):
                yield patch
            batch, size = [], 0
    async for patch in _patch_batch(engine, request, batch, several):
        yield patch


def _all(found: Diff) -> Sequence[DiffEntry]:
    return (*found.removed, *found.changed, *found.added)


def _order(d: DiffEntry) -> tuple[str, bytes]:
    was_folder = d.before is not None and d.before.kind == Kind.DIR and d.after is not None and d.after.kind != Kind.DIR
    return d.root, path_key(d.path) + (b"\x01" if was_folder else b"")


def _is_shown(d: DiffEntry) -> bool:
    """Whether there is content to be read."""
    sizes = [e.size for e in (d.before, d.after) if e is not None and e.kind == Kind.FILE]
    return bool(sizes) and max(sizes) <= MAX_TEXT_BYTES and (not d.what or "kind" in d.what or "content" in d.what)


async def _patch_batch(
    engine: Engine, request: PatchRequest, batch: Sequence[DiffEntry], several: bool
) -> AsyncIterator[FilePatch]:
    shown = [d for d in batch if _is_shown(d)]
    before = [Wanted(d.root, d.before) for d in shown if d.before is not None and d.before.kind == Kind.FILE]
    old = {(w.root, w.entry.path): c for w, c in zip(before, await request.before.read(before), strict=True)}
    after = [
        Wanted(d.root, d.after, old.get((d.root, d.path))) for d in shown if d.after is not None and d.after.kind == Kind.FILE
    ]
    new = {(w.root, w.entry.path): c for w, c in zip(after, await request.after.read(after), strict=True)}
    for d in batch:
        key = (d.root, d.path)
        root = request.after.root(d.root)
        yield await engine.run(_Writer(d, root, several, request.context).patch, old.get(key), new.get(key))


def _path(root: str) -> bytes:
    return root.rstrip("/").encode("utf-8", "surrogateescape") or b"/"


# ------------------------------------------------------------------------------------------------------- the format


def quoted_name(name: bytes) -> bytes:
    """A name as git writes it: in double quotes, with escapes, when it holds a quote, a backslash, or what is not printable
    ASCII."""
    if all(0x20 <= c < 0x7F and c not in b'"\\' for c in name):
        return name
    return b'"' + b"".join(ESCAPES.get(c) or (bytes([c]) if 0x20 <= c < 0x7F else b"\\%03o" % c) for c in name) + b'"'


class _Writer:
    """Writes one difference."""

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
