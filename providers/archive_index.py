"""The tree that a tar's members make, in walk order: on disk, since an archive may have a million of them in any order."""

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Final

from snapcore.errors import Code, SnapshotError, printable
from snapcore.model import FileStat, Kind, Note, path_key
from snapcore.protocols import ScanSelection

from .archive_tar import TarMember, plain_path
from .folders import is_stage_name
from .links import link_leads_out

__all__ = ["TarIndex"]

BATCH: Final = 2_000
CACHE_KIB: Final = 16 << 10
MAX_MADE: Final = 16 << 20  # bytes of paths of folders that the archive only implies
FOLDER_MODE: Final = 0o755
LOST: Final = 0  # where the content of a name begins whose file is not in the archive
_ALL: Final = "SELECT path, kind, mode, size, mtime, uid, gid, target, start FROM members ORDER BY key"
_ONE: Final = "SELECT path, kind, mode, size, mtime, uid, gid, target, start FROM members WHERE key = ?"
_PUT: Final = (
    "INSERT INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET mode = excluded.mode,"
    " mtime = excluded.mtime, uid = excluded.uid, gid = excluded.gid WHERE kind = ?11 AND excluded.kind = ?11"
)
_Row = tuple[bytes, int, int, int, int, int, int, bytes, int]


class TarIndex:
    """Members by path. Not safe for use by two threads at once. A file's `inode` is where its content begins in the archive, so
    that the names of one file share it."""

    def __init__(self) -> None:
        # a private file of SQLite's, which is gone with the connection
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KIB}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute(
            "CREATE TABLE members (key BLOB PRIMARY KEY, path BLOB, kind INTEGER, mode INTEGER, size INTEGER, mtime INTEGER,"
            " uid INTEGER, gid INTEGER, target BLOB, start INTEGER) WITHOUT ROWID"
        )
        self._database.execute("BEGIN")
        self._names: dict[int, int] = {}  # of files with several names, how many

    def close(self) -> None:
        """Give up the file. Idempotent."""
        self._database.close()

    def add(self, members: Iterable[TarMember]) -> None:
        """Enter members in the archive's order. Raises `SnapshotError` `INVALID_PATH` for a path that comes twice, unless it is a
        folder both times: the later one counts then."""
        for m in members:
            row: _Row = (m.path, m.kind, m.mode, m.size, m.mtime_ns, m.uid, m.gid, m.link, m.at)
            if m.hardlink:
                row = self._linked(m)
            if not m.path and m.kind != Kind.DIR:
                raise _impossible(m.path, "its root is no folder")
            self._put(row)

    def complete(self) -> None:
        """After the last member: enter the folders that are only implied, and refuse what lies below what is no folder."""
        made: list[_Row] = []
        size = 0
        above = [b""]
        if self._row(b"") is None:
            made.append((b"", Kind.DIR, FOLDER_MODE, 0, 0, 0, 0, b"", 0))
        for path, kind, mtime in self._database.execute("SELECT path, kind, mtime FROM members ORDER BY key"):
            if not path:
                continue
            parent = path.rpartition(b"/")[0]
            while above[-1] and parent != above[-1] and not parent.startswith(above[-1] + b"/"):
                above.pop()
            while above[-1] != parent:
                start = len(above[-1]) + 1 if above[-1] else 0
                folder = (parent + b"/")[: (parent + b"/").index(b"/", start)]
                if self._row(folder) is not None:
                    raise _impossible(path, f"{printable(folder)} is no folder")
                size += len(folder)
                if size > MAX_MADE:
                    raise SnapshotError("The archive has too many paths whose folders are not in it.", code=Code.LIMIT_EXCEEDED)
                made.append((folder, Kind.DIR, FOLDER_MODE, 0, mtime, 0, 0, b"", 0))
                above.append(folder)
            if kind == Kind.DIR:
                above.append(path)
        for row in made:
            self._put(row)

    def batches(self, selection: ScanSelection, root: bytes | None) -> Iterator[list[FileStat]]:
        """Stats in walk order, as `Workspace.scan` gives them. `root` is the workspace's own path in its sandbox where that is
        known: links may name it."""
        batch: list[FileStat] = []
        left_out: bytes | None = None
        for row in self._database.execute(_ALL):
            path: bytes = row[0]
            if left_out is not None and path.startswith(left_out):
                continue
            if b"/" not in path and is_stage_name(path):  # a journal of whoever made the archive must never be done
                left_out = path + b"/"
                continue
            stat = self._stat(row, root)
            if path and self._is_excluded(stat, selection):
                stat = FileStat(path, stat.kind, note=Note.EXCLUDED)
                left_out = path + b"/"
            batch.append(stat)
            if len(batch) >= BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    def _is_excluded(self, stat: FileStat, selection: ScanSelection) -> bool:
        if selection.excludes(stat.path, stat.kind):
            return True
        marker = selection.marked_folders.get(stat.path.rpartition(b"/")[2]) if stat.kind == Kind.DIR else None
        return marker is not None and self._row(stat.path + b"/" + marker) is not None

    def _stat(self, row: _Row, root: bytes | None) -> FileStat:
        path, kind, mode, size, mtime, uid, gid, target, start = row
        note = Note.NONE
        if kind == Kind.FILE and start == LOST:
            note = Note.UNREADABLE
        elif kind == Kind.LINK and link_leads_out(path, target, () if root is None else (root,), self._target_of):
            note = Note.OUTSIDE
        inode = start if kind == Kind.FILE else 0
        return FileStat(path, kind, mode, size, mtime, 0, inode, 1, self._names.get(inode, 1), uid, gid, target, note)

    def _target_of(self, parent: bytes, name: bytes) -> bytes | None:
        row = self._row(parent + b"/" + name if parent else name)
        if row is None:
            return None
        return row[7] if row[1] == Kind.LINK else b""

    def _linked(self, member: TarMember) -> _Row:
        """The row of another name of what an earlier member is. Without that member the name is there and its content is not."""
        first = self._row(plain_path(member.link))
        if first is None:
            return (member.path, Kind.FILE, member.mode, 0, member.mtime_ns, member.uid, member.gid, b"", LOST)
        if first[1] == Kind.DIR:
            raise _impossible(member.path, "it is another name of a folder")
        if first[1] == Kind.FILE and first[8] != LOST:
            self._names[first[8]] = self._names.get(first[8], 1) + 1
        return (member.path, *first[1:])

    def _row(self, path: bytes) -> _Row | None:
        found: _Row | None = self._database.execute(_ONE, (path_key(path),)).fetchone()
        return found

    def _put(self, row: _Row) -> None:
        done = self._database.execute(_PUT, (path_key(row[0]), *row, Kind.DIR))
        if not done.rowcount:
            raise _impossible(row[0], "it comes twice")


def _impossible(path: bytes, why: str) -> SnapshotError:
    return SnapshotError(
        f"The archive cannot be of a folder: of {printable(path) or 'its root'}, {why}.",
        code=Code.INVALID_PATH,
        paths=[path],
        hint="Nothing was saved.",
    )
