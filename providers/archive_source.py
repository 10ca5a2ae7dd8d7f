"""Where an archive comes from: a file, or a stream, which is kept in a file without a name and without its compression."""

import asyncio
import contextlib
import io
import os
import select
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import IO, Any, Final

from snapcore.addresses import shown_address
from snapcore.errors import Code, SnapshotError, printable
from snapcore.model import Progress
from snapcore.protocols import ProgressCallback

from .archive import Archive, temporary_room
from .archive_compression import MAGIC_BYTES, compression_of, unpacked
from .archive_tar import BLOCK, looks_like_tar
from .threads import in_thread

__all__ = ["opened_archive"]

READ_PIECE: Final = 1 << 20
COPY_BYTES: Final = 8 << 20  # in one hop to a thread
POLL_MS: Final = 200


@contextlib.asynccontextmanager
async def opened_archive(
    source: Any, max_bytes: int | None = None, on_progress: ProgressCallback | None = None
) -> AsyncIterator[Archive]:
    """The tar in `source`, a path or an object with `read`. A plain file is read where it is; anything else is kept in a file
    without a name, which may take `max_bytes`, by default half of what is free where temporary files go.

    Raises `SnapshotError`: `INVALID_REQUEST` for what cannot be read, `INVALID_ARCHIVE` for what is no tar, `LIMIT_EXCEEDED`.
    """
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
        raise SnapshotError("max_unpacked_bytes must be a whole number above 0.", code=Code.INVALID_REQUEST)
    with contextlib.ExitStack() as files:
        if hasattr(source, "read"):
            stream = source
        else:
            stream = files.enter_context(await in_thread(_open, source))
            if await in_thread(_is_plain, stream):
                archive = Archive(stream, os.fstat(stream.fileno()).st_size, watched=True)
                yield _checked(archive)
                return
        room = max_bytes if max_bytes is not None else shutil.disk_usage(tempfile.gettempdir()).free // 2
        file = files.enter_context(tempfile.TemporaryFile(prefix="snapcore-"))
        yield _checked(Archive(file, await _spool(stream, file, room, on_progress)))


def _open(path: Any) -> IO[bytes]:
    if not isinstance(path, str | bytes | os.PathLike):  # a number would be a descriptor
        raise _unreadable(type(path).__name__, "it is no path")
    try:
        return open(path, "rb", buffering=0)
    except (OSError, ValueError) as error:
        raise _unreadable(os.fsdecode(path), getattr(error, "strerror", None) or "it is no path") from None


def _unreadable(name: str, why: str) -> SnapshotError:
    return SnapshotError(
        f"The archive {printable(shown_address(name))} cannot be read: {why}.",
        code=Code.INVALID_REQUEST,
        hint="Name a tar or a folder, or pass a file that is open for reading bytes.",
    )


def _is_plain(stream: IO[bytes]) -> bool:
    """Whether it is a file that can be read at any place, and not compressed."""
    fd = stream.fileno()
    return stat.S_ISREG(os.fstat(fd).st_mode) and not compression_of(os.pread(fd, MAGIC_BYTES, 0))


def _checked(archive: Archive) -> Archive:
    if not archive.size or not looks_like_tar(archive.read_at(0, BLOCK)):
        raise SnapshotError(
            "This is no tar." if archive.size else "The archive is empty.",
            code=Code.INVALID_ARCHIVE,
            hint="Nothing was saved. A tar is taken plain or compressed by gzip, bzip2, xz or zstd.",
        )
    return archive


async def _spool(stream: Any, file: IO[bytes], room: int, on_progress: ProgressCallback | None) -> int:
    """Copy a stream to its end, without its compression; the size. Raises `SnapshotError` `LIMIT_EXCEEDED`."""
    size = 0
    pieces = _Pieces(stream)
    whole = unpacked(pieces)
    while copied := await _copied(pieces, whole, file, room - size):
        size += copied
        if on_progress is not None:
            on_progress(Progress("unpack", bytes=size))
    return size


async def _copied(pieces: "_Pieces", whole: Iterator[bytes], file: IO[bytes], room: int) -> int:
    """Copy some MiB in a thread, which is waited for when this is cancelled."""
    work = asyncio.get_running_loop().run_in_executor(None, _copy_some, whole, file, room)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        pieces.stop()
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        work.exception()  # marks it as seen
        raise


def _copy_some(whole: Iterator[bytes], file: IO[bytes], room: int) -> int:
    """Copy up to some MiB; 0 at the end."""
    copied = 0
    while copied < COPY_BYTES and (piece := next(whole, None)) is not None:
        copied += len(piece)
        if copied > room:
            raise SnapshotError(
                "The archive is larger than it may be where it is kept meanwhile.",
                code=Code.LIMIT_EXCEEDED,
                hint="Nothing was saved. If it is meant, raise max_unpacked_bytes (--max-unpacked-bytes), or set TMPDIR.",
            )
        with temporary_room():
            file.write(piece)
            file.flush()
    return copied


class _Pieces(Iterator[bytes]):
    """What a stream gives, piece by piece. A pipe is waited for so that `stop`, called from elsewhere, ends it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._stopped = False
        self._poll: select.poll | None = None
        if isinstance(stream, io.RawIOBase):  # of others, some may have been read ahead
            self._poll = select.poll()
            self._poll.register(stream.fileno(), select.POLLIN)

    def stop(self) -> None:
        """Give nothing more."""
        self._stopped = True

    def __next__(self) -> bytes:
        while not self._stopped and self._poll is not None and not self._poll.poll(POLL_MS):
            pass
        if self._stopped:
            raise StopIteration
        piece = self._stream.read(READ_PIECE)
        if not piece:
            raise StopIteration
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise SnapshotError("The archive is a stream of text, not of bytes.", code=Code.INVALID_REQUEST)
        return bytes(piece)
