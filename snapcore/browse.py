"""Looking into checkpoints without restoring them: entries, files, conversations, artifacts, differences."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from .engine import Engine
from .errors import Code, SnapshotError, printable
from .manifest import IndexEntry, content_fields, decode_page, page_for
from .model import Checkpoint, ContentRef, Entry, Kind, RecordType, RootState, path_key
from .records import RecordReader
from .scope import Scope

__all__ = [
    "Diff",
    "DiffEntry",
    "NotCompared",
    "chosen_root",
    "diff",
    "entry_at",
    "list_entries",
    "open_file",
    "read_artifact",
    "read_conversation",
    "unknown_path",
]

PAGES_AT_ONCE: Final = 64
CHUNKS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class DiffEntry:
    """One path that differs: its entry before (None: added) and after (None: removed).

    The entry of a live file whose content is not that of the checkpoint has no chunk ids.
    """

    root: str
    path: bytes
    before: Entry | None
    after: Entry | None

    @property
    def what(self) -> tuple[str, ...]:
        """In what the two entries differ: some of `kind`, `content` (a link's target, too), `mode`, `time` and `hard link`.
        Empty when there is only one."""
        a, b = self.before, self.after
        if a is None or b is None:
            return ()
        if a.kind != b.kind:
            return ("kind",)
        content = (a.size, a.chunks, a.chunk_list, a.target, a.in_root) != (b.size, b.chunks, b.chunk_list, b.target, b.in_root)
        found = {
            "content": content,
            "mode": a.mode != b.mode,
            "time": a.kind != Kind.DIR and a.mtime_ns != b.mtime_ns,
            "hard link": a.hardlink != b.hardlink,
        }
        return tuple(name for name, differs in found.items() if differs)


@dataclass(frozen=True, slots=True)
class NotCompared:
    """A path of a live tree, and what is below it, of which nothing can be said, and why."""

    root: str
    path: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Diff:
    """How checkpoint b, or a live tree, differs from a, in walk order. Folder times do not count.

    `skipped` is what of a live tree could not be compared: what cannot be read or kept, and what the capture left out.
    """

    added: tuple[DiffEntry, ...]
    changed: tuple[DiffEntry, ...]
    removed: tuple[DiffEntry, ...]
    skipped: tuple[NotCompared, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.added or self.changed or self.removed)

    @classmethod
    def of(cls, found: Sequence[DiffEntry], skipped: Sequence[NotCompared] = ()) -> "Diff":
        """The differences, each in its place."""
        return cls(
            tuple(d for d in found if d.before is None),
            tuple(d for d in found if d.before is not None and d.after is not None),
            tuple(d for d in found if d.after is None),
            tuple(skipped),
        )


def chosen_root(checkpoint: Checkpoint, name: str | None) -> RootState:
    """The root of that name, or the only one. Raises `SnapshotError` `INVALID_REQUEST`."""
    roots = {r.name: r for r in checkpoint.roots}
    if name is None and len(roots) == 1:
        return checkpoint.roots[0]
    if name is None or name not in roots:
        raise SnapshotError(
            f"Checkpoint {checkpoint.id} has the roots {', '.join(map(printable, sorted(roots))) or 'none'}.",
            code=Code.INVALID_REQUEST,
            hint="Name one of them.",
        )
    return roots[name]


async def _pages(reader: RecordReader, pages: Sequence[IndexEntry]) -> AsyncIterator[list[Entry]]:
    for start in range(0, len(pages), PAGES_AT_ONCE):
        ids = [p.page_id for p in pages[start : start + PAGES_AT_ONCE]]
        raws = await reader.fetch(ids, RecordType.PAGE)
        for page_id in ids:
            yield decode_page(raws[page_id])


async def list_entries(
    engine: Engine, checkpoint: Checkpoint, path: bytes = b"", *, recursive: bool = True, root: str | None = None
) -> AsyncIterator[Entry]:
    """The entry at `path` and what lies below it (only its children unless `recursive`), in walk order.

    Raises `SnapshotError` `INVALID_REQUEST` when the checkpoint has no such path.
    """
    reader = RecordReader(engine)
    path = path.strip(b"/")
    pages, _ = await reader.index(chosen_root(checkpoint, root).manifest)
    first = page_for(pages, path) or 0
    below = path + b"/" if path else b""
    end = path_key(below) + b"\xff" * 8 if path else None
    found = False
    wanted = [p for p in pages[first:] if end is None or path_key(p.first_path) < end]
    async for entries in _pages(reader, wanted):
        for e in entries:
            if e.path == path:
                found = True
                yield e
            elif e.path.startswith(below) and (recursive or b"/" not in e.path[len(below) :]):
                yield e
    if not found:
        raise _absent(checkpoint, path)


def _absent(checkpoint: Checkpoint, path: bytes) -> SnapshotError:
    return SnapshotError(
        f"Checkpoint {checkpoint.id} has no {printable(path) or 'root folder'}.",
        code=Code.INVALID_REQUEST,
        hint=f"'snapcore ls {checkpoint.id}' lists what it holds.",
        paths=[path],
    )


async def entry_at(engine: Engine, checkpoint: Checkpoint, path: bytes, *, root: str | None = None) -> Entry:
    """The entry at `path`. Raises `SnapshotError` `INVALID_REQUEST` when there is none."""
    reader = RecordReader(engine)
    path = path.strip(b"/")
    pages, _ = await reader.index(chosen_root(checkpoint, root).manifest)
    place = page_for(pages, path)
    if place is not None:
        async for entries in _pages(reader, pages[place : place + 1]):
            for e in entries:
                if e.path == path:
                    return e
    raise _absent(checkpoint, path)


async def open_file(engine: Engine, checkpoint: Checkpoint, path: bytes, *, root: str | None = None) -> AsyncIterator[bytes]:
    """A file's bytes in pieces of some MiB, each checked. Links are not followed."""
    entry = await entry_at(engine, checkpoint, path, root=root)
    if entry.kind != Kind.FILE:
        raise SnapshotError(
            f"{printable(path)} is a {Kind.NAMES[entry.kind]}, not a file.",
            code=Code.INVALID_REQUEST,
            hint="Only a file's bytes can be read; 'snapcore ls' shows folders, and where links lead.",
            paths=[path],
        )
    async for piece in _content(engine, entry):
        yield piece


async def _content(engine: Engine, item: Entry | ContentRef) -> AsyncIterator[bytes]:
    reader = RecordReader(engine)
    ids = await reader.chunk_ids(item)
    for start in range(0, len(ids), CHUNKS_AT_ONCE):
        part = ids[start : start + CHUNKS_AT_ONCE]
        raws = await reader.fetch(part, RecordType.CHUNK)
        for i in part:
            yield raws[i]


async def _whole(engine: Engine, ref: ContentRef) -> bytes:
    return b"".join([piece async for piece in _content(engine, ref)])


async def read_conversation(engine: Engine, checkpoint: Checkpoint) -> list[Any]:
    """The conversation saved with a checkpoint; empty when there is none."""
    if not checkpoint.conversation.size:
        return []
    messages: list[Any] = msgspec.json.decode(await _whole(engine, checkpoint.conversation))
    return messages


async def read_artifact(engine: Engine, checkpoint: Checkpoint, name: str) -> bytes:
    """An artifact saved with a checkpoint. Raises `SnapshotError` `INVALID_REQUEST` when there is none of that name."""
    ref = checkpoint.artifacts.get(name)
    if ref is None:
        names = ", ".join(printable(n) for n in sorted(checkpoint.artifacts)) or "none"
        raise SnapshotError(f"Checkpoint {checkpoint.id} has the artifacts: {names}.", code=Code.INVALID_REQUEST)
    return await _whole(engine, ref)


async def diff(engine: Engine, a: Checkpoint | None, b: Checkpoint, paths: Sequence[bytes] | None = None) -> Diff:
    """How `b` differs from `a`, or from nothing; `paths` limits it to files and folders. Pages that both share are not read.

    Raises `SnapshotError` `INVALID_REQUEST` for one of the paths that neither has.
    """
    reader = RecordReader(engine)
    scope = Scope(paths)
    found: list[DiffEntry] = []
    ours = {r.name: r for r in a.roots} if a is not None else {}
    theirs = {r.name: r for r in b.roots}
    for name in sorted(ours.keys() | theirs.keys()):
        found += [d async for d in _diff_root(reader, name, ours.get(name), theirs.get(name)) if scope.holds(d.path)]
    for path in scope.paths:
        if path and not any(Scope([path]).holds(d.path) for d in found):
            states = [(c, r.name) for c in (a, b) if c is not None for r in c.roots]
            if not any([await _has(engine, checkpoint, path, root) for checkpoint, root in states]):
                raise unknown_path(path)
    return Diff.of(found)


def unknown_path(path: bytes) -> SnapshotError:
    """The error for a path to compare that is on neither side: a slip of the pen."""
    return SnapshotError(
        f"{printable(path)} is on neither side.",
        code=Code.INVALID_REQUEST,
        paths=[path],
        hint="'snapcore ls' shows what a checkpoint has.",
    )


async def _has(engine: Engine, checkpoint: Checkpoint, path: bytes, root: str) -> bool:
    try:
        await entry_at(engine, checkpoint, path, root=root)
    except SnapshotError as error:
        if error.code != Code.INVALID_REQUEST:
            raise
        return False
    return True


async def _diff_root(reader: RecordReader, name: str, a: RootState | None, b: RootState | None) -> AsyncIterator[DiffEntry]:
    ours = (await reader.index(a.manifest))[0] if a is not None else []
    theirs = (await reader.index(b.manifest))[0] if b is not None else []
    shared = {p.page_id for p in ours} & {p.page_id for p in theirs}
    before = _entries(reader, [p for p in ours if p.page_id not in shared])
    after = _entries(reader, [p for p in theirs if p.page_id not in shared])
    left, right = await _next(before), await _next(after)
    while left is not None or right is not None:
        key_left = path_key(left.path) if left is not None else None
        key_right = path_key(right.path) if right is not None else None
        if key_right is None or (key_left is not None and key_left < key_right):
            assert left is not None
            yield DiffEntry(name, left.path, left, None)
            left = await _next(before)
        elif key_left is None or key_right < key_left:
            assert right is not None
            yield DiffEntry(name, right.path, None, right)
            right = await _next(after)
        else:
            assert left is not None
            assert right is not None
            if content_fields(left) != content_fields(right):
                yield DiffEntry(name, left.path, left, right)
            left, right = await _next(before), await _next(after)


async def _entries(reader: RecordReader, pages: Sequence[IndexEntry]) -> AsyncIterator[Entry]:
    async for entries in _pages(reader, pages):
        for e in entries:
            yield e


async def _next(entries: AsyncIterator[Entry]) -> Entry | None:
    try:
        return await anext(entries)
    except StopAsyncIteration:
        return None
