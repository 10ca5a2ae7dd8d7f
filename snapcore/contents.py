"""Contents on their way out: comparing live files with entries, and fetching what has to be written."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .chunking import ChunkerParams, cut_stream_piece, decode_many, record_id
from .engine import WORKERS, Engine, each
from .errors import Code, SnapshotError, printable
from .model import Entry, FileStat, Kind, Location, RecordType, Redaction
from .protocols import Buffer, ReadBlock, Stage, StageFile, Workspace
from .records import PackRange, RecordReader, join_ranges
from .redaction import Redactor, zeroed

__all__ = ["ContentStager", "ContentVerdict", "FileTask", "compare_contents", "same_contents"]

PIECE_BYTES: Final = 8 << 20


@dataclass(slots=True)
class FileTask:
    """A file to be staged at `staged` with the content and metadata of `entry`."""

    staged: bytes
    entry: Entry
    left: int = 0
    redactions: Sequence[Redaction] = ()


@dataclass(slots=True)
class ContentVerdict:
    """Whether a live file holds its entry's content. `problem` says why it could not be read; `after` is its stat once it had
    been read, None when it is gone; `steady` whether that is still as it was scanned."""

    same: bool = False
    problem: str = ""
    after: FileStat | None = None
    steady: bool = True


class _Comparison:
    """A live file being cut and hashed beside its entry's chunk ids."""

    def __init__(self, redactions: Sequence[Redaction], ids: Sequence[bytes], params: ChunkerParams) -> None:
        self._redactions = redactions
        self._ids = ids
        self._params = params
        self._rest: Buffer = b""
        self._met = 0
        self.same = True

    def take(self, offset: int, data: Buffer, *, last: bool) -> None:
        """Compare the next piece. Recorded redactions count as equal to what they hide."""
        if not self.same:
            return
        if self._redactions:
            data = zeroed(data, offset, self._redactions)
        if len(self._rest):
            data = b"".join((self._rest, data))
        chunks, rest = cut_stream_piece(data, self._params, last=last)
        self._rest = bytes(rest)
        for chunk in chunks:
            if self._met >= len(self._ids) or record_id(RecordType.CHUNK, chunk) != self._ids[self._met]:
                self.same = False
                return
            self._met += 1
        if last and self._met != len(self._ids):
            self.same = False


async def same_contents(
    engine: Engine, reader: RecordReader, workspace: Workspace, pairs: Sequence[tuple[FileStat, Entry]]
) -> list[bool]:
    """Whether each live file, as scanned, holds its entry's content. Sizes are equal. A file that changes meanwhile is not
    the same."""
    return [v.same and v.steady for v in await compare_contents(engine, reader, workspace, pairs)]


async def compare_contents(
    engine: Engine, reader: RecordReader, workspace: Workspace, pairs: Sequence[tuple[FileStat, Entry]]
) -> list[ContentVerdict]:
    """What can be said of each live file beside its entry, of the same size. Recorded redactions count as equal to what they
    hide."""
    lists = [e.chunk_list for _, e in pairs if e.chunk_list]
    expanded = await reader.expand(lists) if lists else {}
    comparisons = []
    for _, e in pairs:
        redactions = await reader.redactions(e) if _has_many(e) else e.redactions
        ids = expanded[e.chunk_list] if e.chunk_list else e.chunk_ids()
        comparisons.append(_Comparison(redactions, ids, engine.config.chunker))

    stats = [s for s, _ in pairs]
    verdicts = [ContentVerdict() for _ in pairs]

    def take(blocks: Sequence[ReadBlock]) -> None:
        for b in blocks:
            verdict = verdicts[b.index]
            if b.problem:
                verdict.problem = b.problem
                continue
            comparisons[b.index].take(b.offset, b.data, last=b.last)
            if b.last:
                verdict.same, verdict.after = comparisons[b.index].same, b.after
                verdict.steady = _steady(stats[b.index], b.after)

    async for blocks in workspace.read(stats):
        await engine.run(take, blocks)
    return verdicts


def _has_many(entry: Entry) -> bool:
    """Whether an entry's redactions are stored apart."""
    return bool(entry.redaction_chunks or entry.redaction_list)


def _steady(scanned: FileStat, after: FileStat | None) -> bool:
    return (
        after is not None
        and after.kind == Kind.FILE
        and (after.size, after.mtime_ns, after.ctime_ns) == (scanned.size, scanned.mtime_ns, scanned.ctime_ns)
    )


class ContentStager:
    """Writes files into a stage, reading packs in long ranges whatever file a chunk belongs to. Memory is bounded."""

    def __init__(self, engine: Engine, reader: RecordReader, stage: Stage, *, owners: bool, reinject: Redactor | None) -> None:
        self._engine = engine
        self._reader = reader
        self._stage = stage
        self._owners = owners
        self._reinject = reinject
        self.files_written = 0
        self.bytes_written = 0
        self.still_redacted: set[bytes] = set()

    async def write(self, tasks: Sequence[FileTask]) -> None:
        """Stage the files. Raises `SnapshotError` `MISSING_BLOB` or `INVALID_BLOB` for content that is not there or damaged."""
        places, located = await self._plan(tasks)
        empty = [self._finished(t, b"", 0) for t in tasks if t.left == 0]
        if empty:
            await self._stage.write(empty)
        ranges = join_ranges((i, located[i]) for i in places)
        await self._run(ranges, places)
        large = [self._finished(t, b"", t.entry.size) for t in tasks if t.left > 1]
        if large:
            await self._stage.write(large)
        self.files_written += len(tasks)

    async def _plan(self, tasks: Sequence[FileTask]) -> tuple[dict[bytes, list[tuple[FileTask, int]]], dict[bytes, Location]]:
        lists = [t.entry.chunk_list for t in tasks if t.entry.chunk_list]
        expanded = await self._reader.expand(lists) if lists else {}
        ids = [expanded[t.entry.chunk_list] if t.entry.chunk_list else t.entry.chunk_ids() for t in tasks]
        located = await self._reader.locate({i for own in ids for i in own})
        places: dict[bytes, list[tuple[FileTask, int]]] = {}
        for task, own in zip(tasks, ids, strict=True):
            if self._reinject is not None:
                task.redactions = await self._reader.redactions(task.entry) if _has_many(task.entry) else task.entry.redactions
            offset = 0
            for i in own:
                places.setdefault(i, []).append((task, offset))
                offset += located[i].raw_size
            task.left = len(own)
            if offset != task.entry.size:
                raise SnapshotError(
                    f"{printable(task.entry.path)} has {task.entry.size} bytes, but its chunks hold {offset}.",
                    code=Code.INVALID_BLOB,
                    paths=[task.entry.path],
                )
        return places, located

    async def _run(self, ranges: Sequence[PackRange], places: Mapping[bytes, Sequence[tuple[FileTask, int]]]) -> None:
        await each(ranges, lambda piece: self._write_range(piece, places), at_once=min(WORKERS + 1, len(ranges)))

    async def _write_range(self, piece: PackRange, places: Mapping[bytes, Sequence[tuple[FileTask, int]]]) -> None:
        try:
            data = memoryview(await self._reader.read_range(piece))
        except SnapshotError as error:
            moved = await self._moved(piece, error)
            for part in moved:
                await self._write_range(part, places)
            return
        for records in _parts(piece):
            writes = await self._engine.run(self._decode, data, piece.offset, records, places)
            await self._stage.write(writes)
            self.bytes_written += sum(len(w.data) for w in writes)

    async def _moved(self, piece: PackRange, error: SnapshotError) -> list[PackRange]:
        """Where the records of a range are now. Raises `error` when they are where they were: then gc has not moved them."""
        if error.code not in (Code.MISSING_BLOB, Code.INVALID_BLOB):
            raise error
        located = await self._reader.locate([record_id for record_id, _ in piece.records])
        if any(at.pack_id == piece.pack_id for at in located.values()):
            raise error
        return join_ranges(located.items())

    def _decode(
        self,
        data: memoryview,
        base: int,
        part: Sequence[tuple[bytes, Location]],
        places: Mapping[bytes, Sequence[tuple[FileTask, int]]],
    ) -> list[StageFile]:
        payloads = []
        for chunk_id, at in part:
            start = at.offset - base
            payloads.append((data[start : start + at.stored_size], at.codec, at.raw_size, chunk_id))
        writes = []
        for (chunk_id, _), raw in zip(part, decode_many(payloads, RecordType.CHUNK), strict=True):
            for task, offset in places[chunk_id]:
                content = self._put_back(task, offset, raw)
                if task.left == 1:
                    writes.append(self._finished(task, content, 0))
                else:
                    writes.append(StageFile(task.staged, offset, content, task.entry.size, last=False))
        return writes

    def _put_back(self, task: FileTask, offset: int, raw: Buffer) -> Buffer:
        entry = task.entry
        if self._reinject is None:
            if entry.redactions or _has_many(entry):
                self.still_redacted.add(entry.path)
            return raw
        if not task.redactions:
            return raw
        content, left = self._reinject.reinject(task.redactions, offset, raw)
        if left:
            self.still_redacted.add(entry.path)
        return content

    def _finished(self, task: FileTask, data: Buffer, offset: int) -> StageFile:
        e = task.entry
        return StageFile(
            task.staged,
            offset,
            data,
            e.size,
            last=True,
            mode=e.mode if self._owners else e.mode & 0o1777,
            mtime_ns=e.mtime_ns,
            owner=(e.uid, e.gid) if self._owners else None,
            xattrs=e.xattrs,
        )


def _parts(piece: PackRange) -> Iterator[Sequence[tuple[bytes, Location]]]:
    """The records of a range in groups of some MiB of raw content: a small range may hold very much of it."""
    part: list[tuple[bytes, Location]] = []
    size = 0
    for record in piece.records:
        part.append(record)
        size += record[1].raw_size
        if size >= PIECE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
