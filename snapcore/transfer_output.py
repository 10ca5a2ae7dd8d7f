"""Where an archive goes: compressed, hashed, and into a file that has its name only once it is whole."""

import contextlib
import hashlib
import os
import secrets
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Final, Protocol

from .addresses import shown_address
from .errors import Code, SnapshotError, printable

__all__ = ["FORMATS", "ArchiveFormat", "ArchiveOutput", "ArchiveTarget"]

GZIP_LEVEL: Final = 6
ZSTD_LEVEL: Final = 3
GZIP_FRAME: Final = 31  # of zlib: a window of 32 KiB, with gzip's header, in which no name and no time is
LAYER: Final = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True, slots=True)
class ArchiveFormat:
    """What a format's name stands for. `layer` says that it is a layer of a container image."""

    media_type: str
    compression: str = ""
    layer: bool = False


FORMATS: Final = {
    "tar": ArchiveFormat("application/x-tar"),
    "tar.gz": ArchiveFormat("application/gzip", "gzip"),
    "tar.zst": ArchiveFormat("application/zstd", "zstd"),
    "oci-layer": ArchiveFormat(f"{LAYER}+gzip", "gzip", layer=True),
    "oci-layer-zstd": ArchiveFormat(f"{LAYER}+zstd", "zstd", layer=True),
}

Write = Callable[[bytes], object]


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class _Plain:
    def compress(self, data: bytes, /) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


def _compressor(name: str) -> _Compressor:
    if name == "gzip":
        return zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_FRAME)
    if name == "zstd":
        import zstandard

        return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compressobj()
    return _Plain()


class ArchiveOutput:
    """Takes the bytes of a tar and writes those of the archive. `tar_size` and `size` count them, `diff_id` and `digest` name
    them: of the tar, and of what was written. For one thread at a time."""

    def __init__(self, write: Write, compression: str) -> None:
        self._write_on = write
        self._compressor = _compressor(compression)
        self._tar = hashlib.sha256()
        self._written = hashlib.sha256() if compression else self._tar
        self.tar_size = 0
        self.size = 0

    def write(self, data: bytes) -> None:
        """Add to the tar."""
        self._tar.update(data)
        self.tar_size += len(data)
        self._pass_on(self._compressor.compress(data))

    def close(self) -> None:
        """Write what is left. Once."""
        self._pass_on(self._compressor.flush())

    @property
    def diff_id(self) -> str:
        """Of the tar, as a container image's configuration names a layer."""
        return f"sha256:{self._tar.hexdigest()}"

    @property
    def digest(self) -> str:
        """Of what was written, as a manifest names a layer."""
        return f"sha256:{self._written.hexdigest()}"

    def _pass_on(self, data: bytes) -> None:
        if data:
            if self._written is not self._tar:
                self._written.update(data)
            self.size += len(data)
            _write_all(self._write_on, data)


def _write_all(write: Write, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = write(view)  # type: ignore[arg-type]  # whatever takes bytes takes a view of them
        if not isinstance(written, int) or written >= len(view):  # some say nothing, and have taken all
            return
        view = view[written:]


class ArchiveTarget:
    """Where the bytes go: an object of the caller's with `write`, or a path.

    A file is written beside its place under another name until `commit` syncs and renames it; `close` before that removes it.
    What is there and is no regular file, such as a pipe or a device, is written to as it is.
    """

    def __init__(self, target: Any) -> None:
        self._file: IO[bytes] | None = None
        self._beside = self._path = b""
        if hasattr(target, "write"):
            self.write: Write = target.write
            return
        if not isinstance(target, str | bytes | os.PathLike):
            raise SnapshotError(
                f"An archive cannot be written to {type(target).__name__}.",
                code=Code.INVALID_REQUEST,
                hint="Pass a path, or a file that is open for writing bytes.",
            )
        self._path = os.path.realpath(os.fsencode(target))
        try:
            self._file = self._opened()
        except OSError as error:
            raise SnapshotError(
                f"The archive cannot be written to {printable(shown_address(os.fsdecode(target)))}: {error.strerror}.",
                code=Code.INVALID_REQUEST,
                hint="Name a file in a folder that is there and that you may write to.",
            ) from None
        self.write = self._file.write

    def _opened(self) -> IO[bytes]:
        if _is_special(self._path):
            return open(self._path, "wb", buffering=0)
        beside = os.path.join(os.path.dirname(self._path), b".snapcore-export-" + secrets.token_hex(8).encode())
        file = open(beside, "xb", buffering=0)  # noqa: SIM115  # closed by `close`
        self._beside = beside
        return file

    def commit(self) -> None:
        """All is written: give the file its name, durably."""
        if not self._beside or self._file is None:
            return
        os.fsync(self._file.fileno())
        os.replace(self._beside, self._path)
        self._beside = b""
        folder = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close what was opened here; a file that was not committed is gone. Idempotent."""
        if self._file is not None:
            self._file.close()
        if self._beside:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._beside)
            self._beside = b""


def _is_special(path: bytes) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
