"""A tree as one tar stream showed it, kept on this host: stats in walk order, and the contents of what is kept of it."""

import array
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final

import msgspec

from snapcore.errors import Code, ProviderError, SnapshotError, printable
from snapcore.model import FileStat, Kind, Note, path_key, validate_path
from snapcore.protocols import ScanSelection

from .docker_client import DockerEngine
from .docker_tar import TarMember, TarReader
from .folders import is_stage_name
from .links import link_leads_out

__all__ = ["Spool", "SpoolFiller"]

BATCH: Final = 2_000
SECOND: Final = 1_000_000_000

_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(tuple[int, FileStat])


class Spool:
    """Stats and contents in two unnamed files. Of each entry 8 bytes are in memory, and of each link its path and target."""

    def __init__(self, root: str) -> None:
        self._root = os.fsencode(root)
        self._index: IO[bytes] = tempfile.TemporaryFile(prefix="snapcore-docker-")  # noqa: SIM115 (closed by __del__)
        self._data: IO[bytes] = tempfile.TemporaryFile(prefix="snapcore-docker-")  # noqa: SIM115
        self._starts = array.array("Q", [0])
        self._names: dict[int, int] = {}  # how many names an inode with several has
        self._links: dict[bytes, bytes] = {}
        self._end = 0
        self._late: dict[int, tuple[int, FileStat] | None] = {}

    def __del__(self) -> None:
        self._index.close()
        self._data.close()

    @property
    def next_inode(self) -> int:
        """What the next entry is known by."""
        return len(self._starts)

    def add(self, stat: FileStat, offset: int = 0) -> None:
        """Append an entry; `offset` is where its content begins."""
        record = _encode((offset, stat))
        self._index.write(record)
        self._starts.append(self._starts[-1] + len(record))

    def take_back(self, count: int) -> None:
        """Forget all entries from that place on."""
        del self._starts[count + 1 :]
        self._index.seek(self._starts[count])
        self._index.truncate()
        self._names = {inode: names for inode, names in self._names.items() if inode <= count}

    def put_late(self, number: int, found: tuple[int, FileStat] | None) -> None:
        """What an entry turned out to be, that was not known in its place; None for nothing."""
        self._late[number] = found

    def add_name(self, inode: int) -> None:
        """One more name of an inode."""
        self._names[inode] = self._names.get(inode, 1) + 1

    def add_link(self, path: bytes, target: bytes) -> None:
        """A link, of the tree or left out of it, that others may lead through."""
        self._links[path] = target

    def store(self, pieces: Iterator[bytes]) -> tuple[int, int]:
        """Keep contents: where they begin, and their size."""
        start = self._end
        for piece in pieces:
            self._data.write(piece)
            self._end += len(piece)
        return start, self._end - start

    def finish(self) -> None:
        """All was added."""
        self._index.flush()
        self._data.flush()

    def entry(self, number: int) -> tuple[int, FileStat]:
        """The entry with that place, from 0, and where its content begins."""
        late = self._late.get(number)
        if late is not None:
            return late
        start, end = self._starts[number], self._starts[number + 1]
        return _decoder.decode(os.pread(self._index.fileno(), end - start, start))

    def find(self, file: FileStat) -> int | None:
        """Where the content of a file begins that this spool showed just so; None when it did not."""
        if not 0 < file.inode < len(self._starts):
            return None
        offset, stat = self.entry(file.inode - 1)
        same = (stat.size, stat.mtime_ns // SECOND, stat.kind) == (file.size, file.mtime_ns // SECOND, Kind.FILE)
        named = stat.path == file.path or stat.inode in self._names
        return offset if same and named and not stat.note else None

    def search(self, path: bytes) -> tuple[int, FileStat] | None:
        """The entry of a path, by bisection."""
        self._index.flush()
        key = path_key(path)
        low, high = 0, len(self._starts) - 1
        while low < high:
            middle = (low + high) // 2
            offset, stat = self.entry(middle)
            if stat.path == path:
                return offset, stat
            if path_key(stat.path) < key:
                low = middle + 1
            else:
                high = middle
        return None

    def read(self, offset: int, size: int) -> bytes:
        """Kept bytes."""
        return os.pread(self._data.fileno(), size, offset) if size > 0 else b""

    def batches(self, written: Mapping[bytes, int]) -> Iterator[list[FileStat]]:
        """All entries in walk order. Those whose whole second is that of `written` get that exact time."""
        for start in range(0, len(self._starts) - 1, BATCH):
            end = min(start + BATCH, len(self._starts) - 1)
            base = self._starts[start]
            data = os.pread(self._index.fileno(), self._starts[end] - base, base)
            out: list[FileStat] = []
            for number in range(start, end):
                if number in self._late:
                    late = self._late[number]
                    out += [self._shown(late[1], written)] if late is not None else []
                    continue
                stat = _decoder.decode(data[self._starts[number] - base : self._starts[number + 1] - base])[1]
                out.append(self._shown(stat, written))
            yield out

    def _shown(self, stat: FileStat, written: Mapping[bytes, int]) -> FileStat:
        changes: dict[str, Any] = {}
        if stat.kind == Kind.FILE and stat.inode in self._names:
            changes["nlink"] = self._names[stat.inode]
        exact = written.get(stat.path)
        if exact is not None and exact // SECOND == stat.mtime_ns // SECOND:
            changes["mtime_ns"] = exact
        if stat.kind == Kind.LINK and not stat.note:
            outside = link_leads_out(stat.path, stat.target, (self._root,), self._target)
            changes["note"] = Note.OUTSIDE if outside else Note.NONE
        return msgspec.structs.replace(stat, **changes) if changes else stat

    def _target(self, parent: bytes, name: bytes) -> bytes:
        return self._links.get(parent + b"/" + name if parent else name, b"")


class _Perhaps(msgspec.Struct, frozen=True):
    """A folder that is left out if `marker` comes; `place` is that of its own entry."""

    folder: bytes
    marker: bytes
    place: int


class StoppedError(Exception):
    """The one who wanted the tree was cancelled."""


class SpoolFiller:
    """Reads one tree into a spool, on one thread. `mounts` and those of them that are `hidden` are relative to the root."""

    def __init__(
        self,
        engine: DockerEngine,
        container: str,
        root: str,
        selection: ScanSelection,
        mounts: frozenset[bytes],
        hidden: frozenset[bytes],
        cross_mounts: bool,
        stopped: threading.Event,
    ) -> None:
        self._engine = engine
        self._container = container
        self._root = root
        self._selection = selection
        self._marked = selection.marked_folders
        self._not_entered = hidden if cross_mounts else mounts | hidden
        self._stopped = stopped
        self._left_out = b""  # what lies below this folder is left out
        self._perhaps: list[_Perhaps] = []
        self._later: dict[int, bytes] = {}  # entries whose content came under another name, which was left out

    def run(self) -> Spool:
        """The tree. Raises `SnapshotError` `MISSING_WORKSPACE` or `INVALID_WORKSPACE`, `ProviderError` for a broken stream."""
        spool = Spool(self._root)
        try:
            with self._engine.get_archive(self._container, self._root.rstrip("/") + "/.") as (_, pieces):
                reader = TarReader(self._watched(pieces))
                prefix: bytes | None = None
                last = b""
                for member in reader.members():
                    if prefix is None:
                        prefix = self._take_root(spool, member)
                        continue
                    path = _path_below(member.name, prefix)
                    if path_key(path) <= last:
                        raise ProviderError("The Docker engine's archive is not in order.", code=Code.NOT_CAPABLE)
                    last = path_key(path)
                    self._take(spool, reader, path, member, prefix)
        except FileNotFoundError:
            raise self._no_folder() from None
        # only now: the engine answers nothing about a container while it sends an archive of it
        for number, path in self._later.items():
            spool.put_late(number, self._ask(spool, number, path))
        spool.finish()
        return spool

    def _watched(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            if self._stopped.is_set():
                raise StoppedError
            yield piece

    def _take_root(self, spool: Spool, member: TarMember) -> bytes:
        if member.kind != Kind.DIR:
            raise SnapshotError(f"The workspace {printable(self._root)} is no folder.", code=Code.INVALID_WORKSPACE)
        spool.add(_stat(b"", member, spool.next_inode))
        return member.name.rstrip(b"/")

    def _take(self, spool: Spool, reader: TarReader, path: bytes, member: TarMember, prefix: bytes) -> None:
        if member.kind == Kind.LINK:
            spool.add_link(path, member.link)
        if self._left_out and path.startswith(self._left_out):
            return
        if self._is_marker(spool, path):
            return
        if b"/" not in path and is_stage_name(path):
            self._left_out = path + b"/"
        elif self._selection.excludes(path, member.kind):
            self._leave_out(spool, FileStat(path, member.kind, note=Note.EXCLUDED))
        elif path in self._not_entered:
            self._leave_out(spool, _stat(path, member, 0, Note.MOUNT))
        elif member.hardlink:
            self._take_name(spool, path, member, _path_below(member.link, prefix))
        elif member.kind == Kind.FILE:
            inode = spool.next_inode
            offset, _ = spool.store(reader.content())
            spool.add(_stat(path, member, inode), offset)
        else:
            marker = self._marked.get(path.rpartition(b"/")[2]) if member.kind == Kind.DIR else None
            if marker is not None:
                self._perhaps.append(_Perhaps(path, path + b"/" + marker, spool.next_inode - 1))
            spool.add(_stat(path, member, spool.next_inode))

    def _take_name(self, spool: Spool, path: bytes, member: TarMember, first: bytes) -> None:
        """Another name of a file that came before; when that was left out, its content is asked for by this name."""
        known = spool.search(first)
        if known is not None and known[1].kind == Kind.FILE and not known[1].note:
            offset, stat = known
            spool.add_name(stat.inode)
            spool.add(msgspec.structs.replace(stat, path=path), offset)
            return
        if known is not None and known[1].kind == Kind.LINK:
            spool.add_link(path, known[1].target)
            spool.add(msgspec.structs.replace(known[1], path=path, inode=spool.next_inode))
            return
        self._later[spool.next_inode - 1] = path
        spool.add(_stat(path, member, spool.next_inode))

    def _ask(self, spool: Spool, number: int, path: bytes) -> tuple[int, FileStat] | None:
        where = self._root.rstrip("/") + "/" + path.decode("utf-8", "surrogateescape")
        try:
            with self._engine.get_archive(self._container, where) as (_, pieces):
                reader = TarReader(self._watched(pieces))
                alone = next(reader.members(), None)
                if alone is None or alone.kind != Kind.FILE:
                    return None
                return spool.store(reader.content())[0], _stat(path, alone, number + 1)
        except FileNotFoundError:
            return None

    def _leave_out(self, spool: Spool, stat: FileStat) -> None:
        spool.add(stat)
        self._left_out = stat.path + b"/"

    def _is_marker(self, spool: Spool, path: bytes) -> bool:
        """Whether this is the file that makes a folder one to leave out: what was taken of it is then taken back."""
        while self._perhaps and not path.startswith(self._perhaps[-1].folder + b"/"):
            self._perhaps.pop()
        found = next((each for each in self._perhaps if each.marker == path), None)
        if found is None:
            return False
        spool.take_back(found.place)
        self._later = {number: name for number, name in self._later.items() if number < found.place}
        self._leave_out(spool, FileStat(found.folder, Kind.DIR, note=Note.EXCLUDED))
        return True

    def _no_folder(self) -> SnapshotError:
        there = self._engine.stat(self._container, self._root)
        return SnapshotError(
            f"The workspace {printable(self._root)} is no folder of the container.",
            code=Code.MISSING_WORKSPACE if there is None else Code.INVALID_WORKSPACE,
            hint="Name an existing folder.",
        )


def _path_below(name: bytes, prefix: bytes) -> bytes:
    if not name.startswith(prefix + b"/"):
        raise ProviderError("The Docker engine's archive holds what is not under the root.", code=Code.NOT_CAPABLE)
    path = name[len(prefix) + 1 :].rstrip(b"/")
    validate_path(path)
    if not path:
        raise ProviderError("The Docker engine's archive holds its root twice.", code=Code.NOT_CAPABLE)
    return path


def _stat(path: bytes, member: TarMember, inode: int, note: str = Note.NONE) -> FileStat:
    size = member.size if member.kind == Kind.FILE else 0
    target = member.link if member.kind == Kind.LINK else b""
    return FileStat(path, member.kind, member.mode, size, member.mtime_ns, 0, inode, 1, 1, member.uid, member.gid, target, note)
