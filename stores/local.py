"""Blobs as files in a local folder.

A blob is written under a temporary name in `.tmp`, synced, renamed to its own name, and the folders on the way are
synced: so a name always leads to the whole of a blob, also after a power cut. Each call is one blocking function in a
worker thread (`aiofiles`), so that a cancelled call still cleans up after itself.
"""

import errno
import fcntl
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Final

from aiofiles.os import wrap

from snapcore.addresses import shown_address
from snapcore.errors import Code, RepositoryError, SnapcoreError, SnapshotError, printable
from snapcore.protocols import BlobInfo, Buffer

from .keys import validate_key, validate_prefix, validate_range

__all__ = ["LocalBlobStore", "open_local"]

_TEMPORARY: Final = ".tmp"  # no key has a part that starts with a dot
_STALE_SECONDS: Final = 24 * 3600  # no put takes a day: what is older was left by a process that ended
_LISTED_AT_ONCE: Final = 1000

_CODES: Final = {
    errno.ENOSPC: (Code.STORE_FULL, "Make room, then try again."),
    errno.EDQUOT: (Code.STORE_FULL, "Make room, then try again."),
    errno.EFBIG: (Code.STORE_FULL, "Raise the limit on the size of files."),
    errno.EROFS: (Code.READ_ONLY, "Make the folder writable, or only read."),
    errno.EACCES: (Code.ACCESS_DENIED, "Check the permissions of the folder."),
    errno.EPERM: (Code.ACCESS_DENIED, "Check the permissions of the folder."),
}


class LocalBlobStore:
    """A `BlobStore` in the folder `root`, which the first `put` creates. Folders get mode 0700, files 0600."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.path.expanduser(os.fspath(root)))
        self._swept = False

    @property
    def url(self) -> str:
        """The address of this store."""
        return f"file://{self._root}"

    @property
    def uploads_at_once(self) -> int:
        """One: a second put at the same time would only take memory and turns on the disk."""
        return 1

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a range of a blob; see `BlobStore`."""
        validate_key(key)
        validate_range(offset, length)
        return await wrap(self._get)(key, offset, length)

    async def head(self, key: str) -> BlobInfo | None:
        """Key and size, or None."""
        validate_key(key)
        return await wrap(self._head)(key)

    async def put(self, key: str, data: Buffer) -> None:
        """Store `data` durably; on any failure the key is as it was and no file is left behind."""
        validate_key(key)
        await wrap(self._put)(key, data)

    async def delete(self, key: str) -> None:
        """Remove the blob if it is there."""
        validate_key(key)
        await wrap(self._delete)(key)

    async def list(self, prefix: str = "") -> AsyncIterator[BlobInfo]:
        """All blobs whose key starts with `prefix`. Temporary files are never listed."""
        validate_prefix(prefix)
        found = self._walk(prefix)
        while batch := await wrap(_take)(found):
            for info in batch:
                yield info

    async def close(self) -> None:
        """Nothing to release."""

    # ---- in worker threads

    def _get(self, key: str, offset: int, length: int | None) -> bytes:
        try:
            # whatever else lies there, such as a FIFO, is no reason to wait
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise SnapshotError(f"There is no blob {key!r} in {self.url}.", code=Code.MISSING_BLOB) from None
        except OSError as error:
            raise self._failure(f"The blob {key!r} cannot be opened", error) from error
        try:
            size = os.fstat(descriptor).st_size
            end = size if length is None else offset + length
            if end > size or offset > size:
                raise SnapshotError(f"The blob {key!r} ends at byte {size}, before {max(end, offset)}.", code=Code.INVALID_BLOB)
            return _read_range(descriptor, offset, end)
        except IsADirectoryError:
            raise SnapshotError(f"There is no blob {key!r} in {self.url}.", code=Code.MISSING_BLOB) from None
        except OSError as error:
            raise self._failure(f"The blob {key!r} cannot be read", error) from error
        finally:
            os.close(descriptor)

    def _head(self, key: str) -> BlobInfo | None:
        path = self._path(key)
        try:
            if os.path.isdir(path):
                return None
            return BlobInfo(key, os.stat(path).st_size)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._failure(f"The blob {key!r} cannot be looked at", error) from error

    def _put(self, key: str, data: Buffer) -> None:
        path = self._path(key)
        temporary = os.path.join(self._root, _TEMPORARY, secrets.token_hex(16))
        try:
            self._make_folder(os.path.dirname(temporary))
            self._make_folder(os.path.dirname(path))
            self._sweep()
            try:
                _write_file(temporary, data)
                os.replace(temporary, path)
            except BaseException:
                _remove(temporary)
                raise
            _sync_folder(os.path.dirname(path))
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            if not os.path.isdir(self._root):
                raise SnapshotError(
                    f"{self.url} is no folder, and cannot become one.", code=Code.INVALID_REQUEST, hint="Name a folder."
                ) from error
            raise SnapshotError(f"The key {key!r} is, or lies under, another blob's key.", code=Code.INVALID_REQUEST) from error
        except OSError as error:
            raise self._failure(f"The blob {key!r} cannot be stored", error) from error

    def _delete(self, key: str) -> None:
        path = self._path(key)
        try:
            if os.path.isdir(path):
                return
            os.unlink(path)
            _sync_folder(os.path.dirname(path))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._failure(f"The blob {key!r} cannot be deleted", error) from error

    def _walk(self, prefix: str) -> Iterator[BlobInfo]:
        folder = prefix.rpartition("/")[0]
        pending = [folder]
        while pending:
            folder = pending.pop()
            try:
                with os.scandir(self._path(folder)) as entries:
                    for entry in entries:
                        key = f"{folder}/{entry.name}" if folder else entry.name
                        if entry.name.startswith("."):
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            if f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/"):
                                pending.append(key)
                        elif key.startswith(prefix):
                            yield from _info(key, entry)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._failure(f"The folder {folder!r} cannot be listed", error) from error

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    def _make_folder(self, path: str) -> None:
        """Create a folder and those above it, each made durable in the one above."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        self._make_folder(parent)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        _sync_folder(parent)  # also when another process made it: it may not have come to that yet

    def _sweep(self) -> None:
        """Once a process: remove temporary files that processes which ended have left."""
        if self._swept:
            return
        self._swept = True
        oldest = time.time() - _STALE_SECONDS
        with os.scandir(os.path.join(self._root, _TEMPORARY)) as entries:
            for entry in entries:
                try:
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)
                except FileNotFoundError:
                    continue  # its writer was not so dead, or another process sweeps too

    def _failure(self, what: str, error: OSError) -> SnapcoreError:
        code, hint = _CODES.get(error.errno or 0, (Code.STORE_UNAVAILABLE, "Try again later."))
        return RepositoryError(
            f"{what} in {self.url}: {error.strerror}.",
            code=code,
            hint=hint,
            retryable=code in (Code.STORE_UNAVAILABLE, Code.STORE_FULL),
        )


def open_local(address: str) -> LocalBlobStore:
    """The store in a folder, named by its path or as `file://` and its absolute path. Raises `SnapshotError` `INVALID_REQUEST`
    when that is none: `file://` is followed by the name of a host elsewhere."""
    path = address.removeprefix("file://")
    if path != address and not path.startswith(("/", "~")):
        raise SnapshotError(
            f"{printable(shown_address(address))} names no absolute path.",
            code=Code.INVALID_REQUEST,
            hint="Write file:///folder, or ./folder.",
        )
    return LocalBlobStore(path)


def _take(found: Iterator[BlobInfo]) -> list[BlobInfo]:
    return list(itertools.islice(found, _LISTED_AT_ONCE))


def _info(key: str, entry: os.DirEntry[str]) -> Iterator[BlobInfo]:
    try:
        yield BlobInfo(key, entry.stat(follow_symlinks=False).st_size)
    except FileNotFoundError:
        return  # deleted meanwhile


def _read_range(descriptor: int, offset: int, end: int) -> bytes:
    data = os.pread(descriptor, end - offset, offset)
    if len(data) == end - offset:
        return data
    parts = [data]
    place = offset + len(data)
    while place < end:
        part = os.pread(descriptor, end - place, place)
        if not part:
            raise SnapshotError(f"A blob ends at byte {place}, before {end}.", code=Code.INVALID_BLOB)
        parts.append(part)
        place += len(part)
    return b"".join(parts)


def _write_file(path: str, data: Buffer) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with memoryview(data).cast("B") as view:
            written = 0
            while written < len(view):
                written += os.write(descriptor, view[written:])
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    """Make a file or folder durable. macOS only hands it to the drive's cache unless asked for more."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(descriptor, full)
        except OSError:
            os.fsync(descriptor)  # a file system that does not know it
        return
    os.fsync(descriptor)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
