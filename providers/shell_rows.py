"""What a scan of a sandbox has found: kept small, put into walk order, turned into stats."""

import bisect
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import Final

import msgspec

from snapcore.errors import Code, SnapshotError, printable
from snapcore.model import FileStat, Kind, Note, path_key, validate_path
from snapcore.protocols import ScanSelection

from .folders import is_stage_name
from .links import inside, link_leads_out
from .shell_records import KINDS, MARKED, UNREADABLE, Record, decode
from .shell_tools import broken

__all__ = ["Look", "ScanRows", "ScanTree"]

SCAN_BATCH: Final = 2_000
MAX_SCAN: Final = 1 << 30  # bytes of memory for the records of one scan
MAX_ROW: Final = 128 << 10
ROW_OVERHEAD: Final = 48
LONGEST_LISTED: Final = 4096 - 256  # of a folder whose path is longer, tools that go by whole paths cannot list every name
MAX_LOOKS: Final = 40

Look = Callable[[Collection[bytes]], Awaitable[Mapping[bytes, bytes | None]]]
"""Tells of paths what `link_leads_out` asks for: a link's target, empty bytes for anything else, None (or nothing at all) when
nothing is there."""


class ScanRows:
    """The records of a whole scan, each as one byte string that sorts into walk order: the path's key, two NULs, the rest."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.links: dict[bytes, bytes] = {}
        self.unreadable: set[bytes] = set()
        self._size = 0

    def add(self, records: Iterator[Record]) -> None:
        """Keep what the sandbox says. `SnapshotError` `INVALID_PATH` for a path that could lead out of the root."""
        rows, size = self.rows, self._size
        for numbers, target, name in records:
            path = name[2:] if name[:2] == b"./" else b"" if name == b"." else name
            if b"//" in path or path[:1] == b"/" or path[-1:] == b"/" or b"\0" in path:
                validate_path(path)  # raises
            if numbers == UNREADABLE:
                self.unreadable.add(path)
                continue
            if numbers[:1] == UNREADABLE:
                self.unreadable.add(path)
            if numbers[1:2] == b"l":
                self.links[path] = target
            row = path.replace(b"/", b"\0") + b"\0\0" + numbers + b"\0" + target
            if len(row) > MAX_ROW:
                raise broken("a path is longer than it can be")
            size += len(row) + ROW_OVERHEAD
            rows.append(row)
        self._size = size
        if size > MAX_SCAN:
            raise SnapshotError(
                f"The sandbox lists more than {len(rows)} entries, more than fit into memory.",
                code=Code.LIMIT_EXCEEDED,
                hint="Exclude folders by name, so that they are not listed.",
            )

    def shows(self, path: bytes) -> bool:
        """Whether the scan shows what is at `path`, or that nothing is. It does not below a folder of which it shows nothing:
        that may be empty, or left out. Once sorted."""
        while path:
            path = path.rpartition(b"/")[0]
            key = path_key(path)
            if self._starts(key + b"\0\0"):
                return self._starts(key + b"\0" if path else b"", key + b"\0\1")
        return True

    def _starts(self, prefix: bytes, start: bytes = b"") -> bool:
        """Whether the first row from `start` on (the prefix itself, when it is not given) has the prefix."""
        at = bisect.bisect_left(self.rows, start or prefix)
        return at < len(self.rows) and self.rows[at].startswith(prefix)


class _UnknownTargetError(Exception):
    def __init__(self, path: bytes) -> None:
        super().__init__(path)
        self.path = path


class ScanTree:
    """A whole scan as a tree: what the selection leaves out, mount points, where links lead. `roots` are the absolute names of
    the root: as it was asked for, and where it really is."""

    def __init__(
        self,
        rows: ScanRows,
        selection: ScanSelection,
        *,
        cross_mounts: bool,
        mounts: frozenset[bytes],
        roots: tuple[bytes, bytes],
        whole_paths: bool,
    ) -> None:
        self._rows = rows
        self._selection = selection
        self._marked = selection.marked_folders
        self._cross_mounts = cross_mounts
        self._mounts = mounts
        self._roots = roots
        self._whole_paths = whole_paths
        self._targets: dict[bytes, bytes | None] = {}
        self._outside: set[bytes] = set()
        rows.rows.sort()

    async def look_at_links(self, look: Look) -> None:
        """Find out which links lead out. `look` is asked about paths that the scan has left out: many at once, and seldom."""
        pending = list(self._rows.links)
        for _ in range(MAX_LOOKS):
            unknown: set[bytes] = set()
            still: list[bytes] = []
            for path in pending:
                try:
                    if link_leads_out(path, self._shown_target(self._rows.links[path]), self._roots, self._target):
                        self._outside.add(path)
                except _UnknownTargetError as error:
                    unknown.add(error.path)
                    still.append(path)
            if not still:
                return
            found = await look(unknown)
            self._targets.update((path, found.get(path)) for path in unknown)
            pending = still
        self._outside.update(pending)  # they lead on and on through what is not captured

    def batches(self) -> Iterator[list[FileStat]]:
        """The entries in walk order, about 2,000 at once; once. `ProviderError` for what is no tree."""
        batch: list[FileStat] = []
        for entry in self._entries():
            batch.append(entry)
            if len(batch) >= SCAN_BATCH:
                yield batch
                batch = []
        yield batch

    def _entries(self) -> Iterator[FileStat]:
        rows = self._rows.rows
        root = self._root()
        yield root
        folders = [(b"", root.device, False)]  # on the way: how the keys in it begin, its device, whether it is mounted
        below: bytes | None = None  # how the keys begin that are not shown
        at = 1
        while at < len(rows):
            row, rows[at] = rows[at], b""  # let go: what is made of it takes its place
            at += 1
            if below is not None and row.startswith(below):
                continue
            key, _, rest = row.partition(b"\0\0")
            twice = False
            while at < len(rows) and rows[at].startswith(key + b"\0\0"):
                twice = True
                at += 1
            while not key.startswith(folders[-1][0]):
                folders.pop()
            prefix, device, mounted = folders[-1]
            name = key[len(prefix) :]
            if b"\0" in name or not name:
                raise broken("it lists a path without the folder that holds it, or the root twice")
            if mounted and is_stage_name(name):
                below = key + b"\0"
                continue
            path = key.replace(b"\0", b"/")
            validate_path(path)
            entry = self._entry(path, name, rest, device, twice=twice)
            yield entry
            if entry.kind == Kind.DIR and not entry.note:
                folders.append((key + b"\0", entry.device, entry.device != device or path in self._mounts))
            elif entry.kind == Kind.DIR:
                below = key + b"\0"

    def _root(self) -> FileStat:
        key, _, rest = self._rows.rows[0].partition(b"\0\0") if self._rows.rows else (b"?", b"", b"")
        if key or rest[1:2] != b"d":
            raise broken("its list does not begin with the root")
        if b"" in self._rows.unreadable:
            raise SnapshotError(
                f"The workspace {printable(self._roots[0])} may not be listed.",
                code=Code.INVALID_WORKSPACE,
                hint="Give yourself access to it.",
            )
        return decode(rest.partition(b"\0")[0], b"", b"")

    def _entry(self, path: bytes, name: bytes, rest: bytes, device: int, *, twice: bool) -> FileStat:
        kind = KINDS.get(rest[1:2], -1)
        if self._selection.excludes(path, kind):
            return FileStat(path, kind, note=Note.EXCLUDED)
        if rest[:1] == MARKED or (twice and kind == Kind.DIR and name in self._marked):
            return FileStat(path, Kind.DIR, note=Note.EXCLUDED)
        if twice:
            raise broken("it lists a path twice")
        numbers, _, target = rest.partition(b"\0")
        entry = decode(numbers, target, path)
        if kind == Kind.DIR:
            note = self._folder_note(entry, device)
        elif path in self._mounts and not self._cross_mounts:
            note = Note.MOUNT
        elif kind == Kind.LINK:
            target = self._shown_target(target)
            note = Note.OUTSIDE if path in self._outside else Note.NONE
        else:
            return entry
        return msgspec.structs.replace(entry, note=note, target=target) if note or target != entry.target else entry

    def _folder_note(self, entry: FileStat, device: int) -> str:
        if not self._cross_mounts and (entry.device != device or entry.path in self._mounts):
            return Note.MOUNT
        if entry.path in self._rows.unreadable or (self._whole_paths and len(entry.path) > LONGEST_LISTED):
            return Note.UNREADABLE
        return Note.NONE

    def _shown_target(self, target: bytes) -> bytes:
        """A target that names the root by where it really is, as if it had named it as it was asked for."""
        root, real = self._roots
        inner = inside(target, real)
        if inner is None or inside(target, root) is not None:
            return target
        return root.rstrip(b"/") + b"/" + inner if inner else root

    def _target(self, parent: bytes, name: bytes) -> bytes | None:
        path = parent + b"/" + name if parent else name
        target = self._rows.links.get(path)
        if target is not None:
            return target
        if path in self._targets:
            return self._targets[path]
        if self._rows.shows(path):
            return b""  # whether something is there or not: no link is
        raise _UnknownTargetError(path)
