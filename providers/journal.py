"""The journal of a restore: its steps in batches, each with its length and BLAKE3, so that a torn one is known.

batch    body length (8 bytes, little endian), BLAKE3 of the body (32 bytes), body: MessagePack list of steps
"""

import os
from collections.abc import Iterator, Sequence
from typing import Final

import blake3
import msgspec

from snapcore.errors import Code, SnapshotError
from snapcore.model import validate_path
from snapcore.protocols import PlaceStep, RemoveStep, SetMetaStep, Step

__all__ = ["Journal", "frame", "unframe"]

_HEAD: Final = 8 + 32
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Step])


def frame(body: bytes) -> bytes:
    """The body with its length and digest before it."""
    return len(body).to_bytes(8, "little") + blake3.blake3(body).digest() + body


def unframe(fd: int, offset: int) -> tuple[bytes, int] | None:
    """The body at `offset` and where the next frame begins; None when what is there is not a whole frame."""
    head = os.pread(fd, _HEAD, offset)
    length = int.from_bytes(head[:8], "little")
    if len(head) < _HEAD or length > os.fstat(fd).st_size - offset - _HEAD:
        return None
    body = os.pread(fd, length, offset + _HEAD)
    if len(body) < length or blake3.blake3(body).digest() != head[8:]:
        return None
    return body, offset + _HEAD + length


class Journal:
    """The steps in an open journal file. One batch is in memory at a time; each pass reads the file again.

    Every batch is checked when the journal is opened: `SnapshotError` with `RESTORE_BLOCKED` when one is damaged.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._batches: list[tuple[int, int]] = []  # offset of the frame, number of its first step
        offset, number, size = 0, 0, os.fstat(fd).st_size
        while offset < size:
            self._batches.append((offset, number))
            steps, offset = self._read(offset)
            number += len(steps)

    @staticmethod
    def encode(steps: Sequence[Step]) -> bytes:
        """A batch as it is appended to the file."""
        return frame(_encoder.encode(steps))

    def removals(self) -> Iterator[tuple[int, bytes]]:
        """Number and path of what is taken out and is no folder, in order."""
        for number, step in self._steps():
            if isinstance(step, RemoveStep) and not step.folder:
                yield number, step.path

    def folder_removals(self) -> Iterator[bytes]:
        """Folders that are taken out, last first."""
        for _, step in self._steps(backwards=True):
            if isinstance(step, RemoveStep) and step.folder:
                yield step.path

    def placements(self) -> Iterator[PlaceStep]:
        """What is placed, in order."""
        for _, step in self._steps():
            if isinstance(step, PlaceStep):
                yield step

    def metadata(self) -> Iterator[SetMetaStep]:
        """What is set, last first."""
        for _, step in self._steps(backwards=True):
            if isinstance(step, SetMetaStep):
                yield step

    def _steps(self, *, backwards: bool = False) -> Iterator[tuple[int, Step]]:
        for offset, first in reversed(self._batches) if backwards else self._batches:
            numbered = list(enumerate(self._read(offset)[0], first))
            yield from reversed(numbered) if backwards else numbered

    def _read(self, offset: int) -> tuple[list[Step], int]:
        whole = unframe(self._fd, offset)
        if whole is None:
            raise _damaged("its bytes are not what was written")
        try:
            steps = _decoder.decode(whole[0])
            for step in steps:
                validate_path(step.path)
                if isinstance(step, PlaceStep):
                    validate_path(step.staged)
        except (msgspec.DecodeError, SnapshotError) as error:
            raise _damaged(str(error)) from error
        return steps, whole[1]


def _damaged(why: str) -> SnapshotError:
    return SnapshotError(
        f"The journal of an interrupted restore in .snapcore-stage cannot be read: {why}.",
        code=Code.RESTORE_BLOCKED,
        paths=[b".snapcore-stage/journal"],
        hint="The workspace may be half restored. Remove the folder .snapcore-stage from it, then restore again.",
    )
