"""What a restore aims at: one root's manifest, loaded and validated before anything is touched."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from .errors import Code, SnapshotError
from .manifest import IndexEntry, decode_entries, decode_page, validate_entries
from .model import Entry, Kind, RecordType, RootState
from .records import RecordReader

__all__ = ["LOAD_PAGES", "Target", "load_target"]

LOAD_PAGES: Final = 64
CACHED_BYTES: Final = 24 << 20  # pages of larger manifests are fetched again for each pass


@dataclass(slots=True)
class Target:
    """One root of a checkpoint: its pages, its folders' entries by path, and how many names each hard-link group has."""

    root: RootState
    pages: list[IndexEntry]
    folders: dict[bytes, Entry] = field(default_factory=dict)
    groups: dict[bytes, int] = field(default_factory=dict)
    _reader: RecordReader = field(kw_only=True)
    _cache: dict[bytes, bytes] = field(default_factory=dict)

    async def entries(self, page_ids: Sequence[bytes]) -> dict[bytes, list[Entry]]:
        """The entries of pages by page id."""
        absent = [i for i in page_ids if i not in self._cache]
        fetched = await self._reader.fetch(absent, RecordType.PAGE) if absent else {}
        # what is in the cache was checked when it was loaded
        return {i: decode_entries(self._cache[i]) if i in self._cache else decode_page(fetched[i]) for i in page_ids}


async def load_target(reader: RecordReader, root: RootState) -> Target:
    """Load a root's manifest and check all of it. Raises `SnapshotError`: `INVALID_PATH`, `INVALID_BLOB`, `MISSING_BLOB`."""
    pages, _ = await reader.index(root.manifest)
    target = Target(root, pages, _reader=reader)
    previous: Entry | None = None
    open_folders: list[bytes] = []
    cached = 0
    for start in range(0, len(pages), LOAD_PAGES):
        part = pages[start : start + LOAD_PAGES]
        raws = await reader.fetch([p.page_id for p in part], RecordType.PAGE)
        for page in part:
            raw = raws[page.page_id]
            entries = decode_page(raw)
            if entries[0].path != page.first_path or len(entries) != page.entries:
                raise SnapshotError("A manifest's index does not match its pages.", code=Code.INVALID_BLOB)
            previous = validate_entries(entries, previous, open_folders)
            _collect(target, entries)
            if cached + len(raw) <= CACHED_BYTES:
                cached += len(raw)
                target._cache[page.page_id] = raw
    return target


def _collect(target: Target, entries: Sequence[Entry]) -> None:
    for e in entries:
        if e.kind == Kind.DIR:
            target.folders[e.path] = e
        elif e.hardlink:
            target.groups[e.hardlink] = target.groups.get(e.hardlink, 1) + 1
