"""From files to chunks: reading in bulk, checking for torn reads, redacting, cutting, hashing, compressing."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

import msgspec

from .chunking import compress_many, cut, cut_stream_piece, record_id
from .engine import Engine, stop
from .manifest import CONTENT_IDS_IN_ENTRY, REDACTIONS_IN_ENTRY, encode_chunk_list
from .model import DIGEST_BYTES, ContentRef, FileStat, Kind, RecordType, Redaction
from .packwriter import NewRecord, PackWriter
from .protocols import Buffer, ReadBlock, Workspace
from .redaction import Redactor
from .redaction_stream import RedactionStream

__all__ = ["Ingestor", "PendingFile"]

READ_ATTEMPTS: Final = 4  # the first and three more
STORE_BYTES: Final = 8 << 20
_encoder: Final = msgspec.msgpack.Encoder()


class PendingFile:
    """A file on its way into the store. `stat` is the scan's, or a later one after a torn read.

    When it is done, `ids`, `chunk_list`, `size` and `redactions` (or, when these are many, `redaction_ids` or
    `redaction_list`) say what was stored; `problem` is a reason why nothing was, `torn` that it kept changing while it was
    read, `grown` that only its scanned prefix was kept.
    """

    __slots__ = (
        "chunk_list",
        "grown",
        "ids",
        "problem",
        "redaction_ids",
        "redaction_list",
        "redactions",
        "size",
        "stat",
        "torn",
    )

    def __init__(self, stat: FileStat) -> None:
        self.stat = stat
        self.clear()

    def clear(self) -> None:
        """Forget a torn attempt."""
        self.ids = b""
        self.chunk_list = b""
        self.size = 0
        self.redactions: tuple[Redaction, ...] = ()
        self.redaction_ids = b""
        self.redaction_list = b""
        self.problem = ""
        self.torn = False
        self.grown = False


class _LargeFile:
    """The running state of a file that comes in several blocks."""

    def __init__(self, stream: RedactionStream | None) -> None:
        self.stream = stream
        self.rest: Buffer = b""
        self.ids = bytearray()


class Ingestor:
    """Stores contents through a `PackWriter`."""

    def __init__(self, engine: Engine, writer: PackWriter, redactor: Redactor) -> None:
        self._engine = engine
        self._writer = writer
        self._redactor = redactor
        self._params = engine.config.chunker
        self.files_read = 0
        self.bytes_read = 0

    async def read(self, workspace: Workspace, files: Sequence[PendingFile]) -> None:
        """Read and store files. One that changed meanwhile is read again, at most three times."""
        pending = [f for f in files if f.stat.size or f.stat.kind != Kind.FILE]
        for attempt in range(READ_ATTEMPTS):
            if not pending:
                return
            if attempt:
                for f in pending:
                    f.clear()
            after = await self._read_once(workspace, pending)
            torn = []
            for f, now in zip(pending, after, strict=True):
                if f.problem or _same(f.stat, now):
                    continue
                if now is None:
                    f.problem = "vanished while it was read"
                elif attempt + 1 < READ_ATTEMPTS:
                    f.stat = now
                    torn.append(f)
                else:
                    f.grown = f.size == f.stat.size and now.size > f.stat.size and now.inode == f.stat.inode
                    f.torn = not f.grown
            pending = torn

    async def store(self, data: Buffer) -> ContentRef:
        """Store bytes that are no file (already scrubbed): a conversation, an artifact."""
        ids = bytearray()
        view = memoryview(data)
        for start in range(0, len(view), STORE_BYTES):
            ids += await self._store_chunks([cut(view[start : start + STORE_BYTES], self._params)])
        chunk_list = await self._chunk_list(bytes(ids))
        return ContentRef(len(data), b"" if chunk_list else bytes(ids), chunk_list)

    async def _read_once(self, workspace: Workspace, files: Sequence[PendingFile]) -> list[FileStat | None]:
        after: list[FileStat | None] = [None] * len(files)
        large: dict[int, _LargeFile] = {}
        blocks_ahead = workspace.read([f.stat for f in files]).__aiter__()
        following: asyncio.Task[Sequence[ReadBlock] | None] = asyncio.create_task(_next(blocks_ahead))
        try:
            while (blocks := await following) is not None:
                following = asyncio.create_task(_next(blocks_ahead))
                await self._take(files, blocks, large, after)
        finally:
            await stop([following])
        return after

    async def _take(
        self,
        files: Sequence[PendingFile],
        blocks: Sequence[ReadBlock],
        large: dict[int, _LargeFile],
        after: list[FileStat | None],
    ) -> None:
        whole: list[tuple[PendingFile, Buffer]] = []
        for b in blocks:
            f = files[b.index]
            f.size += len(b.data)
            self.bytes_read += len(b.data)
            if b.last:
                after[b.index] = b.after
                f.problem = b.problem
                self.files_read += 1
            if b.problem:
                continue
            if b.last and b.offset == 0:
                whole.append((f, b.data))
            else:
                await self._take_piece(f, b, large)
        if whole:
            await self._take_whole(whole)

    async def _take_whole(self, whole: Sequence[tuple[PendingFile, Buffer]]) -> None:
        cuts = await self._engine.run(self._prepare, whole)
        for (f, _), ids in zip(whole, await self._store_many(cuts), strict=True):
            f.chunk_list = await self._chunk_list(ids)
            f.ids = b"" if f.chunk_list else ids
        await self._store_redactions([f for f, _ in whole if len(f.redactions) > REDACTIONS_IN_ENTRY])

    async def _store_redactions(self, files: Sequence[PendingFile]) -> None:
        """Move long lists of redactions out of the entries: a page has to stay small whatever the files hold."""
        if not files:
            return

        def encoded() -> list[list[memoryview]]:
            return [cut(_encoder.encode(f.redactions), self._params) for f in files]

        for f, ids in zip(files, await self._store_many(await self._engine.run(encoded)), strict=True):
            f.redaction_list = await self._chunk_list(ids)
            f.redaction_ids = b"" if f.redaction_list else ids
            f.redactions = ()

    def _prepare(self, whole: Sequence[tuple[PendingFile, Buffer]]) -> list[list[memoryview]]:
        if not self._redactor.active:
            return [cut(data, self._params) for _, data in whole]
        cuts = []
        redacted = self._redactor.redact_many([(f.stat.path, data) for f, data in whole])
        for (f, _), (data, redactions) in zip(whole, redacted, strict=True):
            f.redactions = redactions
            cuts.append(cut(data, self._params))
        return cuts

    async def _take_piece(self, f: PendingFile, b: ReadBlock, large: dict[int, _LargeFile]) -> None:
        state = large.get(b.index)
        if state is None:
            stream = self._redactor.stream(f.stat.path) if self._redactor.active else None
            state = large[b.index] = _LargeFile(stream)
        chunks = await self._engine.run(self._cut_piece, state, b)
        state.ids += await self._store_chunks([chunks])
        if b.last:
            if state.stream is not None:
                f.redactions = tuple(state.stream.redactions)
            f.chunk_list = await self._chunk_list(bytes(state.ids))
            f.ids = b"" if f.chunk_list else bytes(state.ids)
            if len(f.redactions) > REDACTIONS_IN_ENTRY:
                await self._store_redactions([f])
            del large[b.index]

    def _cut_piece(self, state: _LargeFile, b: ReadBlock) -> list[memoryview]:
        data: Buffer = b.data
        if state.stream is not None:
            data = state.stream.feed(data)
            if b.last:
                data += state.stream.finish()
        if len(state.rest):
            data = b"".join((state.rest, data))
        chunks, rest = cut_stream_piece(data, self._params, last=b.last)
        state.rest = bytes(rest)  # a view would keep the whole piece alive
        return chunks

    async def _chunk_list(self, ids: bytes) -> bytes:
        if len(ids) <= CONTENT_IDS_IN_ENTRY * DIGEST_BYTES:
            return b""
        list_id, records = encode_chunk_list(ids)
        await self._writer.add_structure(records, RecordType.CHUNK_LIST)
        return list_id

    async def _store_chunks(self, cuts: Sequence[Sequence[Buffer]]) -> bytes:
        return b"".join(await self._store_many(cuts))

    async def _store_many(self, cuts: Sequence[Sequence[Buffer]]) -> list[bytes]:
        """Store each file's chunks; its concatenated ids."""
        if not self._writer.lookups:
            ids, records = await self._engine.run(self._hash_and_pack, cuts)
        else:
            ids, fresh = await self._engine.run(self._hash, cuts)
            unknown = await self._writer.unknown(list(fresh))
            records = await self._engine.run(_pack, [(i, fresh[i]) for i in unknown])
        await self._writer.add(records)
        return ids

    def _hash(self, cuts: Iterable[Sequence[Buffer]]) -> tuple[list[bytes], dict[bytes, Buffer]]:
        ids: list[bytes] = []
        views: dict[bytes, Buffer] = {}
        for chunks in cuts:
            own = [record_id(RecordType.CHUNK, c) for c in chunks]
            views.update(zip(own, chunks, strict=True))
            ids.append(b"".join(own))
        return ids, {i: views[i] for i in self._writer.claim(views)}

    def _hash_and_pack(self, cuts: Sequence[Sequence[Buffer]]) -> tuple[list[bytes], list[NewRecord]]:
        ids, fresh = self._hash(cuts)
        return ids, _pack(list(fresh.items()))


def _pack(fresh: Sequence[tuple[bytes, Buffer]]) -> list[NewRecord]:
    packed = compress_many([data for _, data in fresh])
    return [
        NewRecord(RecordType.CHUNK, i, len(data), codec, payload)
        for (i, data), (codec, payload) in zip(fresh, packed, strict=True)
    ]


def _same(scanned: FileStat, now: FileStat | None) -> bool:
    return now is scanned or (
        now is not None
        and now.kind == Kind.FILE
        and now.size == scanned.size
        and now.mtime_ns == scanned.mtime_ns
        and now.ctime_ns == scanned.ctime_ns
        and now.inode == scanned.inode
    )


async def _next(blocks: AsyncIterator[Sequence[ReadBlock]]) -> Sequence[ReadBlock] | None:
    try:
        return await blocks.__anext__()
    except StopAsyncIteration:
        return None
