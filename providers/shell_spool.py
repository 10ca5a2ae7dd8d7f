"""What is on its way into a stage of a sandbox: tar members in memory, large contents in one temporary file of this host."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from snapcore.protocols import Buffer

from .shell_tar import END, padding

__all__ = ["PIECE", "Batch", "Spool", "Waiting"]

PIECE: Final = 1 << 20
_Region = tuple[int, int]  # offset and length in the spool


class Spool:
    """Contents that come in pieces, in any order, each file in a region of one temporary file."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._end = 0
        self._open: dict[bytes, _Region] = {}

    def put(self, name: bytes, offset: int, data: Buffer, size: int) -> None:
        """Keep a piece of the file `name` of `size` bytes. `ValueError` for one that lies outside of it."""
        if name not in self._open:
            self._open[name] = (self._end, size)
            self._end += size
        start, length = self._open[name]
        if length != size or offset < 0 or offset + len(data) > size:
            raise ValueError("a piece lies outside its file")
        self._file.seek(start + offset)
        self._file.write(data)

    def take(self, name: bytes, size: int) -> _Region:
        """Where a complete file is; from now on it is not known any more by its name."""
        return self._open.pop(name, (self._end, size))

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of a region; zeros where none were put."""
        self._file.flush()
        self._file.seek(offset)
        return self._file.read(length).ljust(length, b"\0")

    def reset(self) -> None:
        """Give back the space, once no file is incomplete and every region that was taken has been read."""
        if not self._open and self._end:
            self._file.seek(0)
            self._file.truncate()
            self._end = 0

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


@dataclass(slots=True)
class Batch:
    """The members of one tar stream, extracted in the folder `base` of the stage."""

    base: bytes
    parts: list[Buffer | _Region] = field(default_factory=list)

    def add(self, header: bytes, content: Buffer | _Region = b"") -> None:
        """Append a member."""
        length = content[1] if isinstance(content, tuple) else len(content)
        self.parts += (header, content, padding(length))

    def pieces(self, spool: Spool) -> Iterator[bytes]:
        """The stream, in pieces of about 1 MiB. It may be asked for again."""
        waiting: list[Buffer] = []
        held = 0
        for part in (*self.parts, END):
            if isinstance(part, tuple):
                if held:
                    yield b"".join(waiting)
                waiting, held = [], 0
                offset, left = part
                while left:
                    piece = spool.read(offset, min(left, PIECE))
                    yield piece
                    offset += len(piece)
                    left -= len(piece)
                continue
            waiting.append(part)
            held += len(part)
            if held >= PIECE:
                yield b"".join(waiting)
                waiting, held = [], 0
        yield b"".join(waiting)


@dataclass(slots=True)
class Waiting:
    """The batches gathered for the next pipes, `memory` of their `size` bytes on the heap; whether owners are meant."""

    batches: list[Batch] = field(default_factory=list)
    memory: int = 0
    size: int = 0
    owners: bool = False

    def add(self, base: bytes, header: bytes, content: Buffer | _Region = b"") -> None:
        """Append a member to the last batch, or to a new one when it goes elsewhere."""
        if not self.batches or self.batches[-1].base != base:
            self.batches.append(Batch(base))
        self.batches[-1].add(header, content)
        length = content[1] if isinstance(content, tuple) else len(content)
        self.size += len(header) + length
        self.memory += len(header) + (0 if isinstance(content, tuple) else length)
