"""All records that roots lead to: what gc must keep, each found once and however many checkpoints share it."""

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from typing import Final

from .engine import Engine
from .errors import SnapshotError
from .idset import IdSet
from .maintenance import Roots
from .manifest import IndexPage, decode_index, decode_page
from .model import RecordType
from .records import RecordReader, entry_records

__all__ = ["Reachability", "UnreadableError"]

RECORDS_AT_ONCE: Final = 128  # pages of some 8 KiB, index pages of up to 64 KiB
LISTS_AT_ONCE: Final = 8  # a list may lead to millions of ids
PLACES_AT_ONCE: Final = 8_192


class UnreadableError(Exception):
    """A record on the way could not be read; `cause` says which and why."""

    def __init__(self, cause: SnapshotError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class Reachability:
    """Walks from roots to all that they lead to. `live` gathers every id met, those of earlier walks too.

    A record of which the walk stopped half way is not in `live`: walking again goes on there. `told` is called with the number
    of records read so far.
    """

    def __init__(self, engine: Engine, told: Callable[[int], None] = lambda _: None) -> None:
        self._engine = engine
        self._reader = RecordReader(engine)
        self._told = told
        self._read = 0
        self._walked = IdSet()
        self.live = IdSet()

    async def walk(self, roots: Roots) -> None:
        """Walk from all roots. Raises `UnreadableError` for a record that is missing or damaged."""
        try:
            self.live.add_new(roots.records)
            await self._contents(roots.chunks, roots.chunk_lists)
            await self._indexes(sorted(roots.manifests))
        except SnapshotError as error:
            raise UnreadableError(error) from error

    async def _indexes(self, ids: Sequence[bytes]) -> None:
        """Walk index records level by level, over all trees at once."""
        async for some in self._in_order(self._unwalked(ids)):
            raws = await self._fetch(some, RecordType.INDEX)
            lower: list[bytes] = []
            pages: list[bytes] = []
            for index in await self._engine.run(_decode_indexes, list(raws.values())):
                (pages if index.level == 1 else lower).extend(entry.page_id for entry in index.entries)
            await self._pages(pages)
            await self._indexes(lower)
            self._walked.add_new(some)

    async def _pages(self, ids: Sequence[bytes]) -> None:
        async for some in self._in_order(self._unwalked(ids)):
            raws = await self._fetch(some, RecordType.PAGE)
            chunks, lists = await self._engine.run(_page_records, list(raws.values()))
            await self._contents(chunks, lists)
            self._walked.add_new(some)

    async def _contents(self, chunks: Collection[bytes], lists: Collection[bytes]) -> None:
        self.live.add_new(chunks)
        for some in _batches(self._unwalked(sorted(lists)), LISTS_AT_ONCE):
            met: set[bytes] = set()
            for ids in (await self._reader.expand(some, met)).values():
                self.live.add_new(ids)
            self.live.add_new(met)
            self._walked.add_new(some)

    def _unwalked(self, ids: Collection[bytes]) -> list[bytes]:
        return [i for i in dict.fromkeys(ids) if i not in self._walked]

    async def _in_order(self, ids: Sequence[bytes]) -> AsyncIterator[list[bytes]]:
        """The ids in batches, those that lie together in one: a read then brings many at once."""
        for window in _batches(ids, PLACES_AT_ONCE):
            places = await self._reader.locate(window)
            for some in _batches(sorted(window, key=lambda i: (places[i].pack_id, places[i].offset)), RECORDS_AT_ONCE):
                yield some

    async def _fetch(self, ids: Sequence[bytes], record_type: int) -> dict[bytes, bytes]:
        raws = await self._reader.fetch(ids, record_type)
        self.live.add_new(ids)
        self._read += len(raws)
        self._told(self._read)
        return raws


def _decode_indexes(records: Sequence[bytes]) -> list[IndexPage]:
    return [decode_index(raw) for raw in records]


def _page_records(pages: Sequence[bytes]) -> tuple[set[bytes], set[bytes]]:
    chunks: set[bytes] = set()
    lists: set[bytes] = set()
    for raw in pages:
        for entry in decode_page(raw):
            own_chunks, own_lists = entry_records(entry)
            chunks.update(own_chunks)
            lists.update(own_lists)
    return chunks, lists


def _batches(ids: Sequence[bytes], size: int) -> Iterator[list[bytes]]:
    for start in range(0, len(ids), size):
        yield list(ids[start : start + size])
