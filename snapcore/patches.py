"""Differences as patches: what is read of both sides, in which order, with bounded memory. `patchtext` has the format."""

import re
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from .browse import Diff, DiffEntry
from .engine import Engine
from .model import Checkpoint, Entry, FileStat, Kind, RecordType, is_redacted, path_key
from .patchtext import REDACTED, Content, FilePatch, PatchWriter
from .protocols import ReadBlock, Workspace
from .records import RecordReader
from .redaction import MIN_SECRET_BYTES, Redactor

__all__ = ["LiveSide", "PatchRequest", "StoredSide", "make_patches"]

MAX_TEXT_BYTES: Final = 4 << 20  # a larger file is only told to differ
BATCH_BYTES: Final = 16 << 20  # of content, read together on each side
BATCH_FILES: Final = 512
MAX_PLACES: Final = 64  # redacted parts that are looked for one by one


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
    wherever they stand now, and whatever else has the values that are found there. None when a line is not found, or fewer times
    than before: its secret may be anywhere."""
    hidden = list(_united(stored.hidden))
    if len(hidden) > MAX_PLACES:
        return None
    places: set[tuple[int, int]] = set()
    for pattern in {_around(stored.data, hidden, number) for number in range(len(hidden))}:
        expression = re.compile(b"(?m)^(?=%s)" % pattern)
        found = list(expression.finditer(live))
        if len(found) < max(1, sum(1 for _ in expression.finditer(stored.data))):
            return None
        places.update((m.start(g), m.end(g) - m.start(g)) for m in found for g in range(1, expression.groups + 1))
    values = {live[offset : offset + length] for offset, length in places}
    if len(values) > MAX_PLACES:
        return None
    for value in values:
        # A shorter one would be found everywhere; one that the stored text shows is no secret.
        if len(value) >= MIN_SECRET_BYTES and value not in stored.data:
            places.update((m.start(), len(value)) for m in re.finditer(b"(?=%s)" % re.escape(value), live))
    return sorted(places)


def _around(data: bytes, hidden: Sequence[tuple[int, int]], number: int) -> bytes:
    """A pattern for the lines that a redacted part is in, with a group for each redacted part of them. Where nothing else stands
    in them, lines before and after belong to it, since any line of that length would do otherwise."""
    start, end = hidden[number][0], sum(hidden[number])
    while True:
        start = data.rfind(b"\n", 0, start) + 1
        end = data.find(b"\n", end)
        end = len(data) if end < 0 else end
        parts = hidden[bisect_left(hidden, (start, 0)) : bisect_left(hidden, (end, 0))]
        ends = [start, *map(sum, parts)]
        shown = [data[a:b] for a, b in zip(ends, [*(offset for offset, _ in parts), end], strict=True)]
        if any(map(bytes.strip, shown)):
            break
        if start == 0 and end == len(data):
            return rb"\A%s\Z" % _joined(shown, parts)
        start, end = max(start - 1, 0), min(end + 1, len(data))
    return b"%s$" % _joined(shown, parts)


def _joined(shown: Sequence[bytes], parts: Sequence[tuple[int, int]]) -> bytes:
    groups = [b"((?s:.{%d}))" % length for _, length in parts]
    return b"".join(re.escape(text) + group for text, group in zip(shown, [*groups, b""], strict=True))


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
        yield await engine.run(PatchWriter(d, root, several, request.context).patch, old.get(key), new.get(key))


def _path(root: str) -> bytes:
    return root.rstrip("/").encode("utf-8", "surrogateescape") or b"/"
