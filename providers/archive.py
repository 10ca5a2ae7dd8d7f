"""A tar as a `Workspace`: in a file of this host, scanned and read there, never unpacked."""

import contextlib
import errno
import io
import itertools
import os
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import IO, Final, Literal

from snapcore.errors import Code, ProviderError, RepositoryError, SnapshotError
from snapcore.model import Capabilities, FileStat
from snapcore.protocols import ReadBlock, SandboxClock, ScanSelection, Stage

from .archive_index import TarIndex
from .archive_tar import BLOCK, TarMember, broken, looks_like_tar, read_members
from .threads import in_thread

__all__ = ["Archive", "TarWorkspace", "spooled", "temporary_room"]

COPY_BYTES: Final = 8 << 20  # in one hop to a thread
COPY_PIECE: Final = 1 << 20
MEMBERS: Final = 2_000  # in one hop to a thread
READ_BYTES: Final = 8 << 20
READ_BLOCK: Final = 4 << 20
GRANULARITY_NS: Final = 1_000_000_000
NOWHERE: Final = "/workspace"  # what a root is called whose path is not known


class Archive:
    """An archive in a file. With `watched` it is somebody else's, and must not change meanwhile."""

    def __init__(self, file: IO[bytes], size: int, *, watched: bool = False) -> None:
        self._file = file
        self._first = _state_of(file) if watched else None
        self.size = size

    def check(self) -> None:
        """Raise `SnapshotError` `INVALID_ARCHIVE` when the file is no more what it was."""
        if self._first is not None and self._first != _state_of(self._file):
            raise broken("it changed while it was read")

    def read_at(self, offset: int, length: int) -> bytes:
        """Bytes from `offset`, fewer only at the end."""
        parts: list[bytes] = []
        while length and (piece := os.pread(self._file.fileno(), length, offset)):
            parts.append(piece)
            offset += len(piece)
            length -= len(piece)
        return b"".join(parts)

    def is_tar(self) -> bool:
        """Whether it is a tar, perhaps a damaged one; else it is a reference that only its provider understands."""
        return looks_like_tar(self.read_at(0, BLOCK))


def _state_of(file: IO[bytes]) -> tuple[int, int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextlib.asynccontextmanager
async def spooled(data: io.IOBase) -> AsyncIterator[Archive]:
    """Keep a stream until this is left. It is read in a thread, to its end; a cancelled caller waits for the piece being read."""
    with tempfile.TemporaryFile(prefix="snapcore-") as file:
        size = 0
        while copied := await in_thread(_copy_some, data, file):
            size += copied
        yield Archive(file, size)


def _copy_some(data: io.IOBase, file: IO[bytes]) -> int:
    """Copy up to some MiB; 0 at the end."""
    copied = 0
    while copied < COPY_BYTES:
        piece = data.read(COPY_PIECE)
        if not piece:
            break
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise SnapshotError("The archive is a stream of text, not of bytes.", code=Code.INVALID_REQUEST)
        with temporary_room():
            file.write(piece)
            file.flush()
        copied += len(piece)
    return copied


@contextlib.contextmanager
def temporary_room() -> Iterator[None]:
    """Raise `RepositoryError` `STORE_FULL` when this host has no room for a temporary file."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        number = error.sqlite_errorcode if isinstance(error, sqlite3.Error) else error.errno
        if number not in ((sqlite3.SQLITE_FULL,) if isinstance(error, sqlite3.Error) else (errno.ENOSPC, errno.EDQUOT)):
            raise
        raise RepositoryError(
            "This host has no room for the temporary files that an archive takes.",
            code=Code.STORE_FULL,
            hint="Make room, or name another folder in TMPDIR and SQLITE_TMPDIR.",
            retryable=True,
        ) from error


class TarWorkspace:
    """The tree in a tar. It has no sandbox id: each archive is a file of its own, and no time in it tells what changed."""

    def __init__(self, archive: Archive, index: TarIndex, root: str | None) -> None:
        self._archive = archive
        self._index = index
        self._named = None if root is None else os.fsencode(root)
        self._root = root or NOWHERE

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, archive: Archive, root: str | None) -> AsyncIterator["TarWorkspace"]:
        """Read all headers. `root` is the workspace's path in its sandbox, where that is known. Raises what `read_members` and
        `TarIndex` raise."""
        index = TarIndex()
        try:
            members = read_members(archive.read_at, archive.size, None if root is None else os.fsencode(root))
            with temporary_room():
                while await in_thread(_index_some, index, members):
                    pass
                await in_thread(index.complete)
            archive.check()
            yield cls(archive, index, root)
        finally:
            index.close()

    @classmethod
    @contextlib.asynccontextmanager
    async def empty(cls, archive: Archive) -> AsyncIterator["TarWorkspace"]:
        """A tree with nothing in it, for an archive that is no tar."""
        index = TarIndex()
        try:
            index.complete()
            yield cls(archive, index, None)
        finally:
            index.close()

    @property
    def root(self) -> str:
        """The workspace's path in its sandbox."""
        return self._root

    @property
    def sandbox_id(self) -> str:
        """None, so an empty text."""
        return ""

    @property
    def host_path(self) -> str | None:
        """None: it is in no file system."""
        return None

    @property
    def capabilities(self) -> Capabilities:
        """All that a tar can hold; nothing can be written."""
        return Capabilities(
            time_granularity_ns=GRANULARITY_NS, symlinks=True, hard_links=True, modes=True, mtimes=True, owners=True
        )

    async def clock(self) -> SandboxClock:
        """This host's."""
        return SandboxClock(time.time_ns(), GRANULARITY_NS)

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        """See `Workspace.scan`."""
        batches = self._index.batches(selection, self._named)
        while batch := await in_thread(next, batches, None):
            yield batch

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        """See `Workspace.read`. `files` are stats of this workspace's own scans."""
        blocks = self._blocks(files)
        while batch := await in_thread(_some_blocks, blocks):
            yield batch

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Nothing changes an archive."""
        yield

    async def recover(self) -> Literal["", "swept", "finished"]:
        """Nothing was ever restored into an archive."""
        return ""

    async def open_stage(self) -> Stage:
        """Always `NOT_CAPABLE`."""
        raise ProviderError("An archive cannot be restored into.", code=Code.NOT_CAPABLE)

    def _blocks(self, files: Sequence[FileStat]) -> Iterator[ReadBlock]:
        for index, file in enumerate(files):
            done, last = 0, False
            while not last:
                data = self._archive.read_at(file.inode + done, min(READ_BLOCK, file.size - done))
                last = done + len(data) >= file.size or not data
                if last:
                    self._archive.check()
                yield ReadBlock(index, done, data, last, file if last else None)
                done += len(data)


def _index_some(index: TarIndex, members: Iterator[TarMember]) -> bool:
    some = list(itertools.islice(members, MEMBERS))
    index.add(some)
    return bool(some)


def _some_blocks(blocks: Iterator[ReadBlock]) -> list[ReadBlock]:
    batch: list[ReadBlock] = []
    size = 0
    for block in blocks:
        batch.append(block)
        size += len(block.data)
        if size >= READ_BYTES or len(batch) >= MEMBERS:
            break
    return batch
