"""A scan and a manifest side by side: both are in walk order, so the scan is cut where the manifest's pages begin."""

import bisect
from collections.abc import AsyncIterator, Sequence

from .manifest import IndexEntry
from .model import FileStat, path_key

__all__ = ["slice_scan"]


async def slice_scan(
    scan: AsyncIterator[Sequence[FileStat]], pages: Sequence[IndexEntry]
) -> AsyncIterator[tuple[IndexEntry, list[FileStat]]]:
    """Each page of a manifest in turn, with the scanned paths that fall into it. Holds a page and a batch at a time."""
    borders = [path_key(p.first_path) for p in pages[1:]]
    buffer: list[FileStat] = []
    place = 0
    async for batch in scan:
        buffer += batch
        start = 0
        while place < len(borders):
            end = _border(buffer, start, borders[place], pages[place].entries)
            if end is None:
                break
            yield pages[place], buffer[start:end]
            start, place = end, place + 1
        del buffer[:start]
    start = 0
    for page, border in zip(pages[place:-1], borders[place:], strict=True):
        end = bisect.bisect_left(buffer, border, lo=start, key=_key)
        yield page, buffer[start:end]
        start = end
    yield pages[-1], buffer[start:]


def _key(s: FileStat) -> bytes:
    return path_key(s.path)


def _border(buffer: Sequence[FileStat], start: int, border: bytes, guess: int) -> int | None:
    """Where in `buffer` the first path at or after `border` is; None when the buffer ends before it."""
    at = start + guess
    if at < len(buffer) and _key(buffer[at]) >= border and (at == start or _key(buffer[at - 1]) < border):
        return at
    at = bisect.bisect_left(buffer, border, lo=start, key=_key)
    return at if at < len(buffer) else None
