"""Export: the tree of a checkpoint as a tar, streamed in walk order, every chunk checked on its way.

The bytes depend on the tree and the options alone, whatever packs its content lies in.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from .browse import chosen_root, entry_at
from .engine import Engine, finish
from .errors import Code, SnapshotError, printable
from .manifest import page_totals
from .model import Checkpoint, Entry, Kind, Progress, RecordType, Totals, is_redacted, validate_path
from .protocols import ProgressCallback
from .records import RecordReader
from .restoring import pinned
from .scope import Scope
from .target import LOAD_PAGES, Target, load_target
from .ticking import ticking
from .transfer_output import FORMATS, ArchiveOutput, ArchiveTarget
from .transfer_tar import IN_ROOT, filled_up, member_header, padding

__all__ = ["ExportReport", "ExportRequest", "export", "member_target"]

FETCH_BYTES: Final = 16 << 20  # of content, fetched together
WRITE_BYTES: Final = 1 << 20  # in one call
TreePath = bytes  # a path relative to its root


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an archive holds, after all of it was written.

    `files`, `folders`, `links` and `bytes` count what is in it, each name of a file once and a hard link's bytes once, without
    the root. `size` is how many bytes were written, `digest` their SHA-256 (`sha256:...`), `diff_id` that of the tar before
    compression, `media_type` what it is. `redacted` are files whose secrets are zeros.
    """

    checkpoint_id: str
    root: str
    format: str
    media_type: str
    files: int
    folders: int
    links: int
    bytes: int
    size: int
    digest: str
    diff_id: str
    redacted: tuple[TreePath, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export and how; see `Repository.export` for each."""

    checkpoint: Checkpoint
    target: Any
    format: str = "tar"
    root: str | None = None
    paths: Sequence[TreePath] | None = None
    prefix: bytes = b""
    owners: bool = False
    on_progress: ProgressCallback | None = None


async def export(engine: Engine, request: ExportRequest) -> ExportReport:
    """Write the archive. A file has its name only once all of it is there, durably."""
    if request.format not in FORMATS:
        raise SnapshotError(
            f"There is no format {printable(request.format)}.", code=Code.INVALID_REQUEST, hint=f"Known: {', '.join(FORMATS)}."
        )
    validate_path(request.prefix)
    work = _Export(engine, request)
    async with pinned(engine, request.checkpoint), ticking(request.on_progress, work.progress):
        tree = await work.prepare()
        target = await finish(engine.run(ArchiveTarget, request.target), undo=lambda made: engine.run(made.close))
        try:
            # a writer of the caller's may stand still for ever: nothing waits for it once the call is cancelled
            output = ArchiveOutput(target.write, FORMATS[request.format].compression)
            report = await work.write(tree, output, waited_for=not hasattr(request.target, "write"))
            await finish(engine.run(target.commit))
        finally:
            await finish(engine.run(target.close))
    return report


class _Export:
    def __init__(self, engine: Engine, request: ExportRequest) -> None:
        self._engine = engine
        self._request = request
        self._reader = RecordReader(engine)
        self._scope = Scope(request.paths)
        self._format = FORMATS[request.format]
        self._state = chosen_root(request.checkpoint, request.root)
        self._met = Totals()
        self._done = Totals()
        self._redacted: list[bytes] = []
        self._groups: Container[bytes] = ()  # the first names of files with several
        self._firsts: dict[bytes, bytes] = {}  # by the path of a hard-link group, its name that is in the archive
        self._parts: list[tuple[bytes, bool]] = []  # to be written next: bytes, or the id of a chunk
        self._waiting = 0  # bytes of content among them

    def progress(self) -> Progress:
        """How far it is."""
        whole = self._state.totals if self._scope.whole else None
        done = self._done
        return Progress("write", done.files, done.bytes, whole.files if whole else None, whole.bytes if whole else None)

    async def prepare(self) -> Target:
        """Check the whole manifest, and that the paths are there, before a byte is written."""
        target = await load_target(self._reader, self._state)
        self._groups = target.groups
        for path in self._scope.paths:
            await entry_at(self._engine, self._request.checkpoint, path, root=self._state.name)
        return target

    async def write(self, target: Target, output: ArchiveOutput, *, waited_for: bool) -> ExportReport:
        """All members, and the end. With `waited_for` no write is still at work when this was cancelled."""
        ids = [page.page_id for page in target.pages]
        for start in range(0, len(ids), LOAD_PAGES):
            part = ids[start : start + LOAD_PAGES]
            found = await target.entries(part)
            for page_id in part:
                self._met = _sum(self._met, page_totals(found[page_id]))
            await self._add([entry for page_id in part for entry in found[page_id]], output, waited_for)
        if self._scope.whole and self._met != self._state.totals:
            raise SnapshotError("The checkpoint does not hold what its record says.", code=Code.INVALID_BLOB)
        await self._run(waited_for, _end, output)
        done = self._done
        return ExportReport(
            checkpoint_id=self._request.checkpoint.id,
            root=self._state.name,
            format=self._request.format,
            media_type=self._format.media_type,
            files=done.files,
            folders=done.folders,
            links=done.links,
            bytes=done.bytes,
            size=output.size,
            digest=output.digest,
            diff_id=output.diff_id,
            redacted=tuple(self._redacted),
        )

    async def _add(self, entries: Sequence[Entry], output: ArchiveOutput, waited_for: bool) -> None:
        """The members of these entries; what waits at the end of it is written too."""
        wanted = [e for e in entries if self._scope.holds(e.path) or self._scope.leads_to(e.path)]
        lists = [e.chunk_list for e in wanted if e.chunk_list]
        expanded = await self._reader.expand(lists) if lists else {}
        contents = [expanded[e.chunk_list] if e.chunk_list else e.chunk_ids() for e in wanted]
        located = await self._reader.locate({i for ids in contents for i in ids})
        for entry, ids in zip(wanted, contents, strict=True):
            size = sum(located[i].raw_size for i in ids)
            if size != entry.size:
                raise SnapshotError(
                    f"{printable(entry.path)} has {entry.size} bytes, but its chunks hold {size}.",
                    code=Code.INVALID_BLOB,
                    paths=[entry.path],
                )
            if not self._begin(entry):
                continue
            for i in ids:
                self._parts.append((i, True))
                self._waiting += located[i].raw_size
                if self._waiting >= FETCH_BYTES:
                    await self._flush(output, waited_for)
            self._parts.append((padding(size), False))
        await self._flush(output, waited_for)

    def _begin(self, entry: Entry) -> bool:
        """The header of a member. Whether its content follows."""
        if not entry.path and self._format.layer and not self._request.prefix:
            return False  # the root of a container is the image's own
        first = self._first(entry)
        r = self._request
        link, comment = b"", b""
        if entry.kind == Kind.LINK:
            link = member_target(entry)
            comment = IN_ROOT + entry.target if entry.in_root else b""
        elif first is not None:
            link = self._name(first)
        header = member_header(
            self._name(entry.path) + (b"/" if entry.kind == Kind.DIR else b""),
            entry.kind,
            mode=entry.mode if r.owners else entry.mode & 0o1777,
            mtime_ns=entry.mtime_ns,
            size=0 if first is not None else entry.size,
            owner=(entry.uid, entry.gid) if r.owners else (0, 0),
            link=link,
            hardlink=first is not None,
            comment=comment,
        )
        self._parts.append((header, False))
        self._count(entry, again=first is not None)
        return entry.kind == Kind.FILE and first is None

    def _first(self, entry: Entry) -> bytes | None:
        """The path whose member the entry is another name of; None when it has to bring its content."""
        if entry.hardlink in self._firsts:
            return self._firsts[entry.hardlink]
        if entry.hardlink or entry.path in self._groups:  # the group's own first may not be among the paths
            self._firsts[entry.hardlink or entry.path] = entry.path
        return None

    def _count(self, entry: Entry, *, again: bool) -> None:
        one = page_totals([entry])
        self._done = _sum(self._done, msgspec.structs.replace(one, bytes=0 if again else entry.size))
        if entry.kind == Kind.FILE and is_redacted(entry):
            self._redacted.append(entry.path)

    def _name(self, path: bytes) -> bytes:
        """A member's name: below the prefix, or below `.`, which keeps a name from being taken for anything else."""
        return b"/".join(part for part in (self._request.prefix or b".", path) if part)

    async def _flush(self, output: ArchiveOutput, waited_for: bool) -> None:
        parts, self._parts, self._waiting = self._parts, [], 0
        ids = {part for part, is_chunk in parts if is_chunk}
        raws = await self._reader.fetch(list(ids), RecordType.CHUNK) if ids else {}
        await self._run(waited_for, _write, output, parts, raws)

    async def _run(self, waited_for: bool, work: Callable[..., None], *args: Any) -> None:
        running = self._engine.run(work, *args)
        await (finish(running) if waited_for else running)


def member_target(entry: Entry) -> bytes:
    """A link's target as an archive has it: one that was absolute into the root is relative to the link."""
    if not entry.in_root:
        return entry.target
    return (b"../" * entry.path.count(b"/") + entry.target.lstrip(b"/")).rstrip(b"/") or b"."


def _write(output: ArchiveOutput, parts: Sequence[tuple[bytes, bool]], raws: Mapping[bytes, bytes]) -> None:
    pieces: list[bytes] = []
    size = 0
    for part, is_chunk in parts:
        piece = raws[part] if is_chunk else part
        pieces.append(piece)
        size += len(piece)
        if size >= WRITE_BYTES:
            output.write(b"".join(pieces))
            pieces, size = [], 0
    output.write(b"".join(pieces))


def _end(output: ArchiveOutput) -> None:
    output.write(filled_up(output.tar_size))
    output.close()


def _sum(a: Totals, b: Totals) -> Totals:
    return Totals(a.files + b.files, a.folders + b.folders, a.links + b.links, a.bytes + b.bytes)
