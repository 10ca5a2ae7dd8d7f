"""Who needs what of a repository: the stored bytes that a thread, or a checkpoint, refers to, adds, and alone holds.

Records that many trees share are read once. With each goes the number of the set of checkpoints that need it (`Sharing`), which
pages hand down to the records that they name: what a record's own users are is never listed.
"""

import itertools
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from .engine import Engine
from .errors import Code, SnapshotError
from .idmap import IdMap
from .maintenance import Roots
from .manifest import decode_chunk_list, decode_index, decode_page
from .model import Checkpoint, PackState, Progress, RecordType
from .packcheck import PRESENT
from .protocols import ProgressCallback
from .records import RecordReader, entry_records
from .sharing import Sharing, Users

__all__ = ["CheckpointUsage", "ThreadUsage", "Usage", "usage"]

RECORDS_AT_ONCE: Final = 128  # pages of some 8 KiB, index pages of up to 64 KiB
PLACES_AT_ONCE: Final = 8_192
WINDOW: Final = 65_536  # records that are put in order together
ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class CheckpointUsage:
    """A checkpoint's share, in bytes.

    `logical_bytes` sums its files. `adds_bytes` are the stored bytes of records that no earlier checkpoint of the repository
    needs, by time of creation; `only_bytes` of those that no other one needs, so that they are freed when it alone is deleted.
    """

    thread_id: str
    id: str
    created_at: int  # microseconds since the epoch
    label: str | None
    logical_bytes: int
    adds_bytes: int
    only_bytes: int


@dataclass(frozen=True, slots=True)
class ThreadUsage:
    """A thread's share, in bytes: `logical_bytes` sums the files of all its checkpoints, `refers_bytes` the stored bytes of all
    records that any of them needs, each once. `only_bytes` are those that no other thread needs: they are freed when the
    thread's checkpoints are deleted. `adds_bytes` sums what its checkpoints add."""

    thread_id: str
    checkpoints: int
    logical_bytes: int
    refers_bytes: int
    adds_bytes: int
    only_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a repository's packs hold, in bytes, as `stored_bytes`: all packs.

    It is the sum of what every checkpoint adds (`needed_bytes`), of `held_bytes` (only outputs in ledgers and running restores
    need them), `unneeded_bytes` (a gc may free them; what a running capture has just written is among them) and `overhead_bytes`
    (headers and footers of packs, and second copies). `raw_bytes` are all records before compression, `content_bytes` after it.

    `threads` are in order of their ids, `checkpoints` in order of creation.
    """

    logical_bytes: int
    raw_bytes: int
    content_bytes: int
    needed_bytes: int
    held_bytes: int
    unneeded_bytes: int
    overhead_bytes: int
    stored_bytes: int
    threads: tuple[ThreadUsage, ...]
    checkpoints: tuple[CheckpointUsage, ...]


async def usage(
    engine: Engine, *, thread_id: str | None = None, checkpoints: bool = False, on_progress: ProgressCallback | None = None
) -> Usage:
    """Look at all checkpoints, and say what is asked: of one thread or of all, with their checkpoints or without. Reads the
    records that describe trees, and no content. Raises `SnapshotError` `MISSING_CHECKPOINT` for a thread without any, and
    `MISSING_BLOB` or `INVALID_BLOB` for what is not there or damaged."""
    for attempt in range(ATTEMPTS):
        count = _Count(engine, on_progress)
        try:
            return await count.run(thread_id, checkpoints)
        except SnapshotError as error:
            # a gc may have taken what was deleted meanwhile
            if error.code != Code.MISSING_BLOB or attempt + 1 == ATTEMPTS or not await count.changed():
                raise
    raise AssertionError("unreachable")


class _Seen(NamedTuple):
    """What stays in memory of a checkpoint."""

    created_at: int
    id: str
    thread_id: str
    label: str | None
    logical: int
    manifests: tuple[bytes, ...]
    lists: tuple[bytes, ...]
    leaves: tuple[bytes, ...]


class _Count:
    """One look at a repository."""

    def __init__(self, engine: Engine, on_progress: ProgressCallback | None) -> None:
        self._engine = engine
        self._reader = RecordReader(engine)
        self._on_progress = on_progress
        self._read = 0
        self._mark = 0
        self._sharing = Sharing()
        self._indexes, self._pages, self._lists, self._leaves = IdMap(), IdMap(), IdMap(), IdMap()

    async def run(self, thread_id: str | None, with_checkpoints: bool) -> Usage:
        roots = await self._engine.checkpoints.roots()  # first: what comes later is no root that nobody accounts for
        self._mark = roots.mark
        seen = await self._checkpoints()
        if thread_id is not None and not any(c.thread_id == thread_id for c in seen):
            from .history import missing

            raise missing(thread_id, None)
        await self._engine.run(self._begin, seen, roots)
        await self._walk()
        sizes = await self._sizes()
        _, raw = await self._engine.checkpoints.record_totals()
        return await self._engine.run(_report, self._sharing, seen, sizes, raw, thread_id, with_checkpoints)

    async def changed(self) -> bool:
        """Whether anything was committed or deleted since it began."""
        return (await self._engine.checkpoints.roots()).mark != self._mark

    async def _checkpoints(self) -> list[_Seen]:
        store = self._engine.checkpoints
        seen = [_seen(c) for thread in await store.threads() for c in await store.checkpoints(thread.thread_id)]
        seen.sort()
        return seen

    def _begin(self, seen: Sequence[_Seen], roots: Roots) -> None:
        """Give the roots of each checkpoint its number; those of none are given the number after all."""
        threads: dict[str, int] = {}
        for place, c in enumerate(seen):
            thread = threads.setdefault(c.thread_id, len(threads))
            number = self._sharing.number(Users(place, place, (thread, thread + 1)))
            self._give(number, c.manifests, c.lists, c.leaves)
        last, thread = len(seen), len(threads)
        held = self._sharing.number(Users(last, last, (thread, thread + 1)))
        manifests = _others(roots.manifests, self._indexes)
        lists = _others(roots.chunk_lists, self._lists)
        self._give(held, manifests, lists, _others(roots.records | roots.chunks, self._leaves))
        if self._sharing.heavy:
            self._compact()

    def _give(self, number: int, manifests: Iterable[bytes], lists: Iterable[bytes], leaves: Iterable[bytes]) -> None:
        merge = self._sharing.merge
        self._indexes.add(manifests, number, merge)
        self._lists.add(lists, number, merge)
        self._leaves.add(leaves, number, merge)

    async def _walk(self) -> None:
        await self._settle(self._indexes, RecordType.INDEX, self._take_indexes)
        async for some in self._batches(self._pages.items()):
            await self._engine.run(self._take_pages, await self._fetch(some, RecordType.PAGE))
            if self._sharing.heavy:
                await self._engine.run(self._compact)
        await self._settle(self._lists, RecordType.CHUNK_LIST, self._take_lists)

    async def _settle(self, ids: IdMap, record_type: int, take: Callable[[dict[bytes, bytes]], None]) -> None:
        """Hand numbers down among records of one type, from level to level, until nothing changes any more."""
        walked = IdMap()
        while pending := [(i, number) for i, number in ids.items() if walked.get(i) != number]:
            # looked at again only if it changes after this: what is given to a record in this turn comes too late for it
            for i, number in pending:
                walked.add([i], number, lambda _, new: new)
            async for some in self._batches((i, self._number(ids, i)) for i, _ in pending):  # by then it may have another
                await self._engine.run(take, await self._fetch(some, record_type))
                if self._sharing.heavy:
                    await self._engine.run(self._compact, walked)

    def _take_indexes(self, raws: dict[bytes, bytes]) -> None:
        for i, raw in raws.items():
            index = decode_index(raw)
            below = self._pages if index.level == 1 else self._indexes
            below.add([entry.page_id for entry in index.entries], self._number(self._indexes, i), self._sharing.merge)

    def _take_pages(self, raws: dict[bytes, bytes]) -> None:
        for i, raw in raws.items():
            chunks: list[bytes] = []
            lists: list[bytes] = []
            for entry in decode_page(raw):
                if len(entry.chunks) == len(i) and not entry.redaction_chunks and not entry.redaction_list:
                    chunks.append(entry.chunks)  # most files by far
                elif entry.chunks or entry.chunk_list or entry.redaction_chunks or entry.redaction_list:
                    own_chunks, own_lists = entry_records(entry)
                    chunks += own_chunks
                    lists += own_lists
            self._give(self._number(self._pages, i), (), lists, chunks)

    def _take_lists(self, raws: dict[bytes, bytes]) -> None:
        for i, raw in raws.items():
            level, ids = decode_chunk_list(raw)
            below = self._lists if level else self._leaves
            below.add(ids, self._number(self._lists, i), self._sharing.merge)

    def _number(self, ids: IdMap, i: bytes) -> int:
        number = ids.get(i)
        assert number is not None
        return number

    def _compact(self, *more: IdMap) -> None:
        def renumber(numbers: Callable[[int], int]) -> None:
            for ids in (self._indexes, self._pages, self._lists, self._leaves, *more):
                ids.renumber(numbers)

        self._sharing.compact(renumber)

    async def _batches(self, ids: Iterator[tuple[bytes, int]]) -> AsyncIterator[list[bytes]]:
        """The ids in batches, in the order in which checkpoints first needed them. So those that lie together are read together,
        and the sets of what they name grow from the front: few sets come up that are used no more."""
        while window := [(self._sharing[number].first, i) for i, number in itertools.islice(ids, WINDOW)]:
            window.sort()
            for start in range(0, len(window), PLACES_AT_ONCE):
                some = window[start : start + PLACES_AT_ONCE]
                places = await self._reader.locate([i for _, i in some])
                some.sort(key=lambda item: (item[0], places[item[1]].pack_id, places[item[1]].offset))
                for at in range(0, len(some), RECORDS_AT_ONCE):
                    yield [i for _, i in some[at : at + RECORDS_AT_ONCE]]

    async def _fetch(self, ids: Sequence[bytes], record_type: int) -> dict[bytes, bytes]:
        raws = await self._reader.fetch(ids, record_type)
        self._read += len(raws)
        if self._on_progress is not None:
            self._on_progress(Progress("stats", self._read, unit="record"))
        return raws

    async def _sizes(self) -> "_Sizes":
        """The packs' bytes by who needs them."""
        sizes = _Sizes()
        after = 0
        while packs := await self._engine.checkpoints.pack_contents(after):
            after = packs[-1].number
            for pack in packs:
                if pack.state in PRESENT:
                    await self._engine.run(self._add_pack, sizes, pack.size, pack.state, pack.records)
        return sizes

    def _add_pack(self, sizes: "_Sizes", size: int, state: str, records: Sequence[tuple[bytes, int, int]]) -> None:
        maps = (self._leaves, self._pages, self._indexes, self._lists)
        content = unneeded = 0
        for i, _, stored in records:
            content += stored
            number = next((number for ids in maps if (number := ids.get(i)) is not None), None)
            if number is None:
                unneeded += stored
            else:
                sizes.by_users[number] = sizes.by_users.get(number, 0) + stored
        sizes.stored += size
        sizes.content += content
        # a condemned pack goes as a whole, or comes back for what is needed of it
        sizes.unneeded += size - content + unneeded if state == PackState.CONDEMNED else unneeded


class _Sizes:
    """Bytes of packs: as they are, of their records, of those that nobody needs, and of the others by who needs them."""

    def __init__(self) -> None:
        self.stored = self.content = self.unneeded = 0
        self.by_users: dict[int, int] = {}


def _seen(c: Checkpoint) -> _Seen:
    contents = (c.conversation, *c.artifacts.values())
    chunks = [ref.chunks[at : at + 32] for ref in contents for at in range(0, len(ref.chunks), 32)]
    return _Seen(
        c.created_at,
        c.id,
        c.thread_id,
        c.label,
        c.totals.bytes,
        tuple(root.manifest for root in c.roots),
        tuple(ref.chunk_list for ref in contents if ref.chunk_list),
        (*chunks, c.record_id) if c.record_id else tuple(chunks),
    )


def _others(ids: Iterable[bytes], known: IdMap) -> list[bytes]:
    return [i for i in ids if known.get(i) is None]


def _report(
    sharing: Sharing, seen: Sequence[_Seen], sizes: _Sizes, raw: int, thread_id: str | None, with_checkpoints: bool
) -> Usage:
    names = list(dict.fromkeys(c.thread_id for c in seen))
    adds, alone = array("q", bytes(8 * (len(seen) + 1))), array("q", bytes(8 * (len(seen) + 1)))
    refers, own = _Spread(len(names) + 1), array("q", bytes(8 * (len(names) + 1)))
    for number, size in sizes.by_users.items():
        users = sharing[number]
        adds[users.first] += size
        if users.first == users.last:
            alone[users.first] += size
        refers.add(users.threads, size)
        if users.threads[1] - users.threads[0] == 1 and len(users.threads) == 2:
            own[users.threads[0]] += size
    held = adds[-1]
    needed = sum(adds) - held
    threads = {name: _Thread() for name in names}
    for place, c in enumerate(seen):
        threads[c.thread_id].add(c.logical, adds[place])
    return Usage(
        logical_bytes=sum(c.logical for c in seen),
        raw_bytes=raw,
        content_bytes=sizes.content,
        needed_bytes=needed,
        held_bytes=held,
        unneeded_bytes=sizes.unneeded,
        overhead_bytes=sizes.stored - needed - held - sizes.unneeded,
        stored_bytes=sizes.stored,
        threads=tuple(
            ThreadUsage(name, t.checkpoints, t.logical, referred, t.adds, only)
            for (name, t), referred, only in sorted(zip(threads.items(), refers.totals(), own, strict=False))
            if thread_id in (None, name)
        ),
        checkpoints=tuple(
            CheckpointUsage(c.thread_id, c.id, c.created_at, c.label, c.logical, adds[place], alone[place])
            for place, c in enumerate(seen)
            if with_checkpoints and thread_id in (None, c.thread_id)
        ),
    )


class _Thread:
    def __init__(self) -> None:
        self.checkpoints = self.logical = self.adds = 0

    def add(self, logical: int, adds: int) -> None:
        self.checkpoints += 1
        self.logical += logical
        self.adds += adds


class _Spread:
    """Sums by number, of what is added to spans of numbers."""

    def __init__(self, count: int) -> None:
        self._steps = array("q", bytes(8 * (count + 1)))

    def add(self, spans: Sequence[int], size: int) -> None:
        for start, end in zip(spans[::2], spans[1::2], strict=True):
            self._steps[start] += size
            self._steps[end] -= size

    def totals(self) -> Iterator[int]:
        total = 0
        for step in self._steps[:-1]:
            total += step
            yield total
