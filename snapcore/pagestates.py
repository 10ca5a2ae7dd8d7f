"""A tree beside a manifest: which of its files hold what the manifest says, by the stat cache where it tells, else by reading."""

from collections.abc import Sequence
from typing import NamedTuple

from .engine import Engine
from .model import Entry, FileStat, Kind, PolicyRecord, StatPage
from .protocols import Workspace
from .statcache import digest_salt, page_digest, read_stat_page, stat_root

__all__ = ["PagePair", "PageStates"]


class PagePair(NamedTuple):
    """A manifest page: its id, its entries, and what a scan found in its part of the tree."""

    page_id: bytes
    entries: Sequence[Entry]
    stats: Sequence[FileStat]


class PageStates:
    """The stat cache of one root, which was filled when the tree was last in line with a checkpoint."""

    def __init__(self, engine: Engine, workspace: Workspace, sandbox_id: str, policy: PolicyRecord) -> None:
        self._store = engine.checkpoints
        self._root = stat_root(workspace)
        self._sandbox_id = sandbox_id
        self._salt = digest_salt(policy)
        self._digests: dict[bytes, bytes] = {}

    async def load(self) -> None:
        """Look up what is remembered of this sandbox and root, if anything."""
        if self._sandbox_id:
            self._digests = await self._store.stat_digests(self._sandbox_id, self._root)

    def unchanged(self, page_id: bytes, entries: int, stats: Sequence[FileStat]) -> bool:
        """Whether a page of so many entries is certainly as it was: nothing of it has to be looked at then."""
        digest = self._digests.get(page_id)
        if not digest:
            return False
        plain = [s for s in stats if not s.note and s.kind <= Kind.LINK]
        return len(plain) == entries and page_digest(plain, self._salt) == digest

    async def tell(self, pages: Sequence[PagePair]) -> tuple[set[bytes], list[tuple[FileStat, Entry]]]:
        """Of changed pages: the paths of the files that certainly hold their entry's content, and the files whose content has to
        be read to know. A file of another size is in neither."""
        remembered = {p.page_id for p in pages} & self._digests.keys()
        rows: dict[bytes, StatPage] = {}
        if remembered:
            rows = await self._store.stat_pages(self._sandbox_id, self._root, remembered)
        same: set[bytes] = set()
        doubtful: list[tuple[FileStat, Entry]] = []
        for page in pages:
            doubtful += _doubtful(page, rows.get(page.page_id), same)
        return same, doubtful


def _doubtful(page: PagePair, row: StatPage | None, same: set[bytes]) -> list[tuple[FileStat, Entry]]:
    cached = read_stat_page(row) if row is not None else []
    times = dict(zip((e.path for e in page.entries), cached, strict=True)) if len(cached) == len(page.entries) else {}
    current = {s.path: s for s in page.stats if not s.note and s.kind == Kind.FILE}
    out = []
    for e in page.entries:
        s = current.get(e.path)
        if s is None or e.kind != Kind.FILE or s.size != e.size:
            continue
        if not e.size or (s.mtime_ns == e.mtime_ns and times.get(e.path) == (s.ctime_ns, s.inode)):
            same.add(e.path)
        else:
            out.append((s, e))
    return out
