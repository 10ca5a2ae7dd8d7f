"""Archives as they come: plain or compressed, unpacked in pieces of bounded size, and never shorter for being damaged."""

import bz2
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import zstandard

from snapcore.errors import Code, SnapshotError

__all__ = ["compression_of", "unpacked"]

STEP: Final = 1 << 20  # bytes unpacked in one go
GZIP_FRAME: Final = 31  # of zlib: a window of 32 KiB, with gzip's header
MEMORY: Final = 256 << 20  # what a stream may ask a decoder to hold
ZSTD_INPUT: Final = 2 << 10  # its decoder unpacks all that it is given; a byte of that may be 32 KiB
MAGIC_BYTES: Final = 6
_Errors: Final = (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, ValueError, EOFError)


class _Frame(Protocol):
    """One compressed stream; several may follow one another."""

    ended: bool
    unused: bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What `data` unpacks to. `ended` says that the stream is over, `unused` what came after it."""
        ...


class _Gzip:
    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(GZIP_FRAME)
        self.ended = False
        self.unused = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        while not self._decoder.eof:
            piece = self._decoder.decompress(data, STEP)
            data = self._decoder.unconsumed_tail
            yield piece
            if not data and len(piece) < STEP:
                break
        self.ended, self.unused = self._decoder.eof, self._decoder.unused_data


class _Stepping:
    def __init__(self, decoder: "bz2.BZ2Decompressor | lzma.LZMADecompressor") -> None:
        self._decoder = decoder
        self.ended = False
        self.unused = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        while not self._decoder.eof:
            yield self._decoder.decompress(data, STEP)
            data = b""
            if self._decoder.needs_input:
                break
        self.ended, self.unused = self._decoder.eof, self._decoder.unused_data


class _Zstd:
    def __init__(self) -> None:
        self._decoder = zstandard.ZstdDecompressor(max_window_size=MEMORY).decompressobj()
        self.ended = False
        self.unused = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), ZSTD_INPUT):
            yield self._decoder.decompress(data[start : start + ZSTD_INPUT])
            if self._decoder.eof:
                self.ended = True
                self.unused = self._decoder.unused_data + data[start + ZSTD_INPUT :]
                return


_KINDS: Final[tuple[tuple[str, tuple[bytes, ...], Callable[[], _Frame]], ...]] = (
    ("gzip", (b"\x1f\x8b",), _Gzip),
    ("bzip2", (b"BZh",), lambda: _Stepping(bz2.BZ2Decompressor())),
    ("xz", (b"\xfd7zXZ\0",), lambda: _Stepping(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY))),
    ("zstd", (b"\x28\xb5\x2f\xfd", *(bytes([byte]) + b"\x2a\x4d\x18" for byte in range(0x50, 0x60))), _Zstd),
)


def compression_of(head: bytes) -> str:
    """What a stream that begins so is compressed by, empty when it is not."""
    return next((name for name, magics, _ in _KINDS if head.startswith(magics)), "")


def unpacked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The stream without its compression. Raises `SnapshotError` `INVALID_ARCHIVE` when it is damaged or ends early."""
    head = b""
    while len(head) < MAGIC_BYTES and (piece := next(pieces, b"")):
        head += piece
    pieces = itertools.chain([head], pieces)
    name = compression_of(head)
    make = next((make for own, _, make in _KINDS if own == name), None)
    return pieces if make is None else _unpacked(pieces, name, make)


def _unpacked(pieces: Iterator[bytes], name: str, make: Callable[[], _Frame]) -> Iterator[bytes]:
    frame: _Frame | None = make()
    for piece in pieces:
        rest = piece
        while rest:
            if frame is None:
                rest = rest.lstrip(b"\0")  # what fills up a tape, or the end of an xz file
                if not rest:
                    break
                frame = make()
            try:
                yield from frame.feed(rest)
            except _Errors as error:
                raise _damaged(name, "cannot be unpacked") from error
            rest = frame.unused
            if frame.ended:
                frame = None
    if frame is not None:
        raise _damaged(name, "ends early")


def _damaged(name: str, what: str) -> SnapshotError:
    return SnapshotError(
        f"The archive is cut short or damaged: what {name} made of it {what}.",
        code=Code.INVALID_ARCHIVE,
        hint="Nothing was saved. Make the archive anew, and hand it over whole.",
    )
