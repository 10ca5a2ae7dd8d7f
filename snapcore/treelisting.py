"""The entries of a checkpoint for whoever draws them as a tree, with bounded memory.

A line of a drawn tree shows whether more of the same folder follows, which for a folder comes only after all that is in it. That
is looked up in the manifest's index, so that nothing has to be read ahead.
"""

import bisect
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Final

from .browse import chosen_root, list_entries
from .engine import Engine
from .manifest import IndexEntry, decode_page
from .model import Checkpoint, Entry, Kind, RecordType, path_key
from .records import RecordReader

__all__ = ["list_tree"]

KEPT_PAGES: Final = 16


async def list_tree(
    engine: Engine, checkpoint: Checkpoint, path: bytes = b"", *, root: str | None = None
) -> AsyncIterator[tuple[Entry, bool]]:
    """The entry at `path` and all below it, in walk order, each with whether it is the last of its folder; the first always is.

    Raises `SnapshotError` `INVALID_REQUEST` when the checkpoint has no such path.
    """
    reader = RecordReader(engine)
    pages, _ = await reader.index(chosen_root(checkpoint, root).manifest)
    look = _Lookup(reader, pages)
    top = path.strip(b"/")
    waiting: Entry | None = None
    async for entry in list_entries(engine, checkpoint, path, root=root):
        if waiting is not None:
            yield waiting, waiting.path == top or await _is_last(waiting, entry.path, look)
        waiting = entry
    if waiting is not None:
        yield waiting, True


async def _is_last(entry: Entry, following: bytes, look: "_Lookup") -> bool:
    parent = entry.path.rpartition(b"/")[0]
    if entry.kind == Kind.DIR and following.startswith(entry.path + b"/"):
        after = await look.first_after(entry.path)
        return after is None or after.rpartition(b"/")[0] != parent
    return following.rpartition(b"/")[0] != parent


class _Lookup:
    """Finds paths by the index, with the pages that were used last at hand."""

    def __init__(self, reader: RecordReader, pages: Sequence[IndexEntry]) -> None:
        self._reader = reader
        self._pages = pages
        self._keys = [path_key(p.first_path) for p in pages]
        self._kept: OrderedDict[bytes, list[bytes]] = OrderedDict()

    async def first_after(self, folder: bytes) -> bytes | None:
        """The first path after all that is in a folder."""
        key = path_key(folder) + b"\x01"  # above every key that goes on with a separator, and below every other
        place = bisect.bisect_right(self._keys, key) - 1
        paths = await self._paths(self._pages[place].page_id)
        at = bisect.bisect_left(paths, key, key=path_key)
        if at < len(paths):
            return paths[at]
        return self._pages[place + 1].first_path if place + 1 < len(self._pages) else None

    async def _paths(self, page_id: bytes) -> list[bytes]:
        paths = self._kept.pop(page_id, None)
        if paths is None:
            paths = [e.path for e in decode_page((await self._reader.fetch([page_id], RecordType.PAGE))[page_id])]
        self._kept[page_id] = paths
        if len(self._kept) > KEPT_PAGES:
            self._kept.popitem(last=False)
        return paths
