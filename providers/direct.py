"""A local folder as a workspace: scan and read straight from the file system, through folder descriptors only."""

import asyncio
import contextlib
import errno
import itertools
import operator
import os
import socket
import stat
import sys
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from snapcore.errors import Code, ProviderError, SnapshotError, printable
from snapcore.model import Capabilities, FileStat, Kind, Note
from snapcore.protocols import ReadBlock, SandboxClock, ScanSelection, Stage

from .folders import FILE_FLAGS, FOLDER_FLAGS, FolderCache, is_stage_name, split
from .links import inside, link_leads_out
from .mounts import mount_points
from .stats import KINDS, NOT_REGULAR, describe, problem
from .threads import in_thread
from .tree_lock import BUSY_SECONDS, POLL_SECONDS, TreeLock, being_read, sealed_stage

if TYPE_CHECKING:
    from _typeshed import StrPath

__all__ = ["DirectWorkspace"]

GRANULARITY_NS: Final = 20_000_000  # the kernel stamps files by its tick, at most 10 ms behind the clock
SCAN_BATCH: Final = 2_000
LARGE_FOLDER: Final = 5_000  # names
READ_FILES: Final = 1_000
READ_BYTES: Final = 8 << 20
READ_BLOCK: Final = 4 << 20

_BY_PATH = operator.attrgetter("path")
_ENCODING: Final = sys.getfilesystemencoding()
_ERRORS: Final = sys.getfilesystemencodeerrors()
_TYPE_BITS: Final = 0o170000


class DirectWorkspace:
    """The files under a local folder. The folder itself may be named through a link, which is resolved here, once.

    File times are taken to have at most 20 ms of granularity, as every current Linux and macOS file system with
    nanosecond times has. A link whose absolute target names the root by its resolved path is shown as if it had named
    it by `root`. Captures and swaps wait `busy_seconds` for each other.

    With `below`, a folder above `root`, no link on the way from there to the root is followed, also none that is laid there
    later: the workspace cannot be opened then. Such a workspace is for captures alone.
    """

    def __init__(self, root: "StrPath", *, busy_seconds: float = BUSY_SECONDS, below: "StrPath | None" = None) -> None:
        self._busy_seconds = busy_seconds
        self._root = os.path.abspath(os.fspath(root))
        self._top = os.path.realpath(self._root if below is None else below)
        self._way = "" if below is None else os.path.relpath(self._root, os.path.abspath(os.fspath(below)))
        self._real = os.path.normpath(os.path.join(self._top, self._way))

    @property
    def root(self) -> str:
        """The absolute path of the folder, as it was given."""
        return self._root

    @property
    def sandbox_id(self) -> str:
        """`file://` with the host's name and the resolved path."""
        return f"file://{socket.gethostname()}{urllib.parse.quote(os.fsencode(self._real))}"

    @property
    def host_path(self) -> str | None:
        """The resolved path of the folder."""
        return self._real

    @property
    def capabilities(self) -> Capabilities:
        """Everything; `owners` only for the superuser."""
        return Capabilities(
            time_granularity_ns=GRANULARITY_NS,
            stable_inodes=True,
            ctime=True,
            atomic_swap=True,
            rename=True,
            symlinks=True,
            hard_links=True,
            modes=True,
            mtimes=True,
            owners=os.geteuid() == 0,
            sparse=True,
            holds=True,
        )

    async def clock(self) -> SandboxClock:
        """This host's clock, which stamps the files."""
        return SandboxClock(time.time_ns(), GRANULARITY_NS)

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        """See `Workspace.scan`: batches of 2,000, each made in one hop to a worker thread. What `selection` leaves out comes
        with path, kind and note only."""
        with self._folders() as folders:
            walk = _Scan(folders, selection, cross_mounts, os.fsencode(self._root), os.fsencode(self._real)).batches()
            while batch := await in_thread(next, walk, None):
                yield batch

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        """See `Workspace.read`: about 8 MiB or 1,000 files a batch, each read in one hop; blocks of at most 4 MiB."""
        with self._folders() as folders, contextlib.closing(_Reader(folders, files)) as reader:
            while batch := await in_thread(reader.next_batch):
                yield batch

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """See `Workspace.hold`: a shared lock on the root folder, which no swap of this host gets past."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._busy_seconds
        while True:
            try:
                self._folders().close()  # before anything is looked at by its path; tells why it cannot be
                await self.recover()
                lock = await in_thread(self._lock_shared)
                break
            except ProviderError as error:
                if error.code != Code.WORKSPACE_BUSY or loop.time() >= deadline:
                    raise
            await asyncio.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            lock.release()

    async def recover(self) -> Literal["", "swept", "finished"]:
        """See `Workspace.recover`."""
        from .direct_stage import recover

        return await in_thread(recover, self._real)

    async def open_stage(self) -> Stage:
        """See `Workspace.open_stage`."""
        from .direct_stage import open_stage

        return await in_thread(open_stage, self._real, self._busy_seconds)

    def _lock_shared(self) -> TreeLock:
        with self._folders() as folders:
            lock = TreeLock.take(folders.fd(b""), alone=False)
            if lock is None:
                raise being_read()
            if sealed_stage(folders.fd(b"")):  # of a restore that died since: the tree may be half swapped
                lock.release()
                raise being_read()
            return lock

    def _folders(self) -> FolderCache:
        try:
            opened = FolderCache(os.open(self._top, FOLDER_FLAGS))
            if not self._way:
                return opened
            with opened:
                return FolderCache(os.dup(opened.fd(os.fsencode(self._way))))
        except OSError as error:
            raise SnapshotError(
                f"The workspace {printable(self._root)} cannot be opened as a folder: {error.strerror}.",
                code=Code.MISSING_WORKSPACE if error.errno == errno.ENOENT else Code.INVALID_WORKSPACE,
                hint="Make it readable, or name another." if error.errno == errno.EACCES else "Name an existing folder.",
            ) from error


class _Scan:
    """One walk of the tree. Holds the listings of the folders on the way to where it is, and nothing else."""

    def __init__(self, folders: FolderCache, selection: ScanSelection, cross_mounts: bool, root: bytes, real: bytes) -> None:
        self._folders = folders
        self._selection = selection
        self._marked = selection.marked_folders
        self._cross_mounts = cross_mounts
        self._roots = (root, real)
        self._mounts: frozenset[bytes] = frozenset()

    def batches(self) -> Iterator[list[FileStat]]:
        excludes = self._selection.excludes
        self._mounts = mount_points(self._roots[1])
        not_entered = frozenset[bytes]() if self._cross_mounts else self._mounts
        root = os.fstat(self._folders.fd(b""))
        try:
            listed = self._list(b"", self._folders.fd(b""), hide_stage=True)
        except OSError as error:
            raise SnapshotError(
                f"The workspace {printable(self._roots[0])} cannot be listed: {error.strerror}.",
                code=Code.INVALID_WORKSPACE,
            ) from error
        batch = [describe(b"", root)]
        stack = [(listed, root.st_dev)]
        while stack:
            children, device = stack[-1]
            for entry in children:
                kind = entry.kind
                if excludes(entry.path, kind):
                    batch.append(FileStat(entry.path, kind, note=Note.EXCLUDED))
                elif kind == Kind.DIR:
                    folder, entered = self._enter(entry.path, device)
                    if folder is not None:
                        batch.append(folder)
                    if entered is not None:
                        stack.append(entered)
                        break
                elif entry.path in not_entered:
                    batch.append(msgspec.structs.replace(entry, note=Note.MOUNT))
                elif kind == Kind.LINK and not entry.note:
                    batch.append(self._link(entry))
                else:
                    batch.append(entry)
                if len(batch) >= SCAN_BATCH:
                    yield batch
                    batch = []
            else:
                stack.pop()
        yield batch

    def _enter(self, path: bytes, device: int) -> tuple[FileStat | None, tuple[Iterator[FileStat], int] | None]:
        """Open a folder: its stat, None when it has vanished, and what goes on the stack when it is part of the tree."""
        try:
            fd = self._folders.fd(path)
            st = os.fstat(fd)
            mounted = st.st_dev != device or path in self._mounts
            if mounted and not self._cross_mounts:
                return describe(path, st, note=Note.MOUNT), None
            marker = self._marked.get(split(path)[1])
            if marker is not None and _exists(marker, fd):
                return FileStat(path, Kind.DIR, note=Note.EXCLUDED), None
            listed = self._list(path, fd, hide_stage=mounted)
        except (FileNotFoundError, NotADirectoryError):
            return None, None  # or something else by now
        except OSError:
            return self._unreadable(path), None
        return describe(path, st), (listed, st.st_dev)

    def _list(self, path: bytes, fd: int, *, hide_stage: bool) -> Iterator[FileStat]:
        """What a folder holds, sorted. Of a large one only the names are kept, and stat'ed as the walk gets there."""
        prefix = path + b"/" if path else b""
        with os.scandir(fd) as entries:
            first = list(itertools.islice(entries, LARGE_FOLDER))
            if len(first) < LARGE_FOLDER:
                return iter(_stat_all(prefix, fd, first, hide_stage=hide_stage))
            names, kinds = _names(itertools.chain(first, entries), hide_stage=hide_stage)
        return self._stat_later(path, prefix, names, kinds)

    def _stat_later(self, path: bytes, prefix: bytes, names: list[bytes], kinds: dict[bytes, int]) -> Iterator[FileStat]:
        for start in range(0, len(names), SCAN_BATCH):
            found: list[FileStat | None] = []
            part = [(name, kinds.get(name, Kind.FILE)) for name in names[start : start + SCAN_BATCH]]
            try:
                fd = self._folders.fd(path)  # it may have been closed meanwhile
                found = [_stat_name(prefix + name, name, fd, kind) for name, kind in part]
            except (FileNotFoundError, NotADirectoryError):
                return
            except OSError:
                found = [FileStat(prefix + name, kind, note=Note.UNREADABLE) for name, kind in part]
            yield from (entry for entry in found if entry is not None)

    def _unreadable(self, path: bytes) -> FileStat:
        parent, name = split(path)
        try:
            st = os.stat(name, dir_fd=self._folders.fd(parent), follow_symlinks=False)
        except OSError:
            return FileStat(path, Kind.DIR, note=Note.UNREADABLE)
        return describe(path, st, note=Note.UNREADABLE)

    def _link(self, entry: FileStat) -> FileStat:
        root, real = self._roots
        target = entry.target
        inner = inside(target, real)
        if inner is not None and inside(target, root) is None:
            target = root.rstrip(b"/") + b"/" + inner if inner else root
        note = Note.OUTSIDE if link_leads_out(entry.path, target, self._roots, self._target) else Note.NONE
        return msgspec.structs.replace(entry, target=target, note=note)

    def _target(self, parent: bytes, name: bytes) -> bytes | None:
        try:
            return os.readlink(name, dir_fd=self._folders.fd(parent))
        except OSError as error:
            return b"" if error.errno == errno.EINVAL else None


def _stat_all(prefix: bytes, fd: int, entries: Iterable[os.DirEntry[str]], *, hide_stage: bool) -> list[FileStat]:
    """The entries of a folder, sorted. Everything but folders is stat'ed at once, while the descriptor is sure to be open."""
    listed: list[FileStat] = []
    for entry in entries:
        name = entry.name.encode(_ENCODING, _ERRORS)
        if hide_stage and is_stage_name(name):
            continue
        target = b""
        try:
            if entry.is_dir(follow_symlinks=False):
                listed.append(FileStat(prefix + name, Kind.DIR))
                continue
            st = entry.stat(follow_symlinks=False)
            mode = st.st_mode
            kind = KINDS.get(mode & _TYPE_BITS, Kind.DEVICE)
            if kind == Kind.LINK:
                target = os.readlink(name, dir_fd=fd)
        except FileNotFoundError:
            continue
        except OSError:
            kind = Kind.LINK if entry.is_symlink() else Kind.FILE
            listed.append(FileStat(prefix + name, kind, note=Note.UNREADABLE))
            continue
        # written out: a call of describe() for each file would cost a tenth of the scan
        listed.append(
            FileStat(
                prefix + name,
                kind,
                mode & 0o7777,
                st.st_size if kind == Kind.FILE else 0,
                st.st_mtime_ns,
                st.st_ctime_ns,
                st.st_ino,
                st.st_dev,
                st.st_nlink,
                st.st_uid,
                st.st_gid,
                target,
            )
        )
    listed.sort(key=_BY_PATH)
    return listed


def _names(entries: Iterable[os.DirEntry[str]], *, hide_stage: bool) -> tuple[list[bytes], dict[bytes, int]]:
    """The names in a folder, sorted, and the kinds of those that are folders or links, as the folder tells them."""
    names: list[bytes] = []
    kinds: dict[bytes, int] = {}
    for entry in entries:
        name = entry.name.encode(_ENCODING, _ERRORS)
        if hide_stage and is_stage_name(name):
            continue
        names.append(name)
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                kinds[name] = Kind.DIR
            elif entry.is_symlink():
                kinds[name] = Kind.LINK
    names.sort()
    return names, kinds


def _stat_name(path: bytes, name: bytes, fd: int, kind: int) -> FileStat | None:
    """As `_stat_all` for one name; None when it has vanished."""
    if kind == Kind.DIR:
        return FileStat(path, kind)
    try:
        found = describe(path, os.stat(name, dir_fd=fd, follow_symlinks=False))
        if found.kind == Kind.DIR:
            return FileStat(path, Kind.DIR)
        return msgspec.structs.replace(found, target=os.readlink(name, dir_fd=fd)) if found.kind == Kind.LINK else found
    except FileNotFoundError:
        return None
    except OSError:
        return FileStat(path, kind, note=Note.UNREADABLE)


def _exists(name: bytes, fd: int) -> bool:
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return False
    return True


class _Reader:
    """Reads files one after the other; a large one over several batches, its descriptor staying open in between."""

    def __init__(self, folders: FolderCache, files: Sequence[FileStat]) -> None:
        self._folders = folders
        self._files = files
        self._next = 0
        self._fd = -1  # of the file being read, when it did not fit into one batch
        self._offset = 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def next_batch(self) -> list[ReadBlock]:
        blocks: list[ReadBlock] = []
        room, last = READ_BYTES, min(len(self._files), self._next + READ_FILES)
        while room > 0 and self._next < last:
            index = self._next
            try:
                room -= self._read(index, room, blocks)
            except OSError as error:
                self.close()
                del blocks[_first_of(blocks, index) :]
                blocks.append(ReadBlock(index, 0, b"", last=True, problem=problem(error)))
                self._finish_file()
        return blocks

    def _finish_file(self) -> None:
        self._next += 1
        self._offset = 0

    def _read(self, index: int, room: int, blocks: list[ReadBlock]) -> int:
        """Read some of the file, at most `room` rounded up to a block, and return how much."""
        file = self._files[index]
        fd = self._fd
        if fd < 0:
            parent, name = split(file.path)
            fd = os.open(name, FILE_FLAGS, dir_fd=self._folders.fd(parent))
            self._fd = fd
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.ELOOP, NOT_REGULAR)
        taken = 0
        while True:
            want = min(file.size - self._offset, READ_BLOCK)
            data = os.read(fd, want) if want else b""
            offset = self._offset
            taken += len(data)
            self._offset += len(data)
            if not data or self._offset == file.size:
                blocks.append(ReadBlock(index, offset, data, True, _after(file, os.fstat(fd))))
                self.close()
                self._finish_file()
                return taken
            blocks.append(ReadBlock(index, offset, data))
            if taken >= room:
                return taken


def _after(file: FileStat, st: os.stat_result) -> FileStat:
    """The stat of a file that was read: the very same value when nothing about it has changed."""
    same = (
        st.st_mtime_ns == file.mtime_ns
        and st.st_ctime_ns == file.ctime_ns
        and st.st_size == file.size
        and st.st_ino == file.inode
        and st.st_dev == file.device
        and st.st_mode == stat.S_IFREG | file.mode
    )
    return file if same else describe(file.path, st)


def _first_of(blocks: list[ReadBlock], index: int) -> int:
    at = len(blocks)
    while at and blocks[at - 1].index == index:
        at -= 1
    return at
