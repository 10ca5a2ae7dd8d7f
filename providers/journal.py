"""The journal of a restore: its steps in batches, each with its length and BLAKE3, so that a torn one is known.

batch    body length (8 bytes, little endian), BLAKE3 of the body (32 bytes), body: MessagePack list of steps
"""

import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

import blake3
import msgspec

from snapcore.errors import Code, SnapshotError
from snapcore.model import validate_path
from snapcore.protocols import PlaceStep, RemoveStep, SetMetaStep, Step

from .folders import STAGE_NAME, is_stage_name

__all__ = ["Journal", "check_step", "damaged", "frame", "unframe"]

MAX_FRAME: Final = 16 << 20  # bytes of a body

_HEAD: Final = 8 + 32
_MAX_ID: Final = 2**32 - 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Step])


def frame(body: bytes) -> bytes:
    """The body with its length and digest before it."""
    return len(body).to_bytes(8, "little") + blake3.blake3(body).digest() + body


def unframe(fd: int, offset: int) -> tuple[bytes, int] | None:
    """The body at `offset` and where the next frame begins; None when what is there is not a whole frame of at
    most 16 MiB."""
    head = os.pread(fd, _HEAD, offset)
    length = int.from_bytes(head[:8], "little")
    if len(head) < _HEAD or length > MAX_FRAME or length > os.fstat(fd).st_size - offset - _HEAD:
        return None
    body = os.pread(fd, length, offset + _HEAD)
    if len(body) < length or blake3.blake3(body).digest() != head[8:]:
        return None
    return body, offset + _HEAD + length


def check_step(step: Step) -> None:
    """Refuse a step that leads out of the root or into the stage, or sets what is no mode or owner. Raises `SnapshotError`."""
    validate_path(step.path)
    if is_stage_name(step.path.partition(b"/")[0]):
        raise SnapshotError("A step of a restore leads into its stage.", code=Code.INVALID_PATH, paths=[step.path])
    if isinstance(step, PlaceStep):
        validate_path(step.staged)
    elif isinstance(step, SetMetaStep):
        owner = step.owner or (0, 0)
        if not 0 <= (step.mode or 0) <= 0o7777 or not all(0 <= number <= _MAX_ID for number in owner):
            raise SnapshotError("A step of a restore sets no valid mode or owner.", code=Code.INVALID_ENTRY, paths=[step.path])


class Journal:
    """The steps in an open journal file. One batch is in memory at a time; each pass reads the file again.

    Every batch is checked when the journal is opened: `SnapshotError` with `RESTORE_BLOCKED` when one is damaged, or holds a
    step that no restore writes.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._batches: list[tuple[int, int]] = []  # offset of the frame, number of its first step
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode):
            raise damaged("its journal is no regular file")
        offset, number, size = 0, 0, st.st_size
        while offset < size:
            self._batches.append((offset, number))
            steps, offset = self._read(offset)
            number += len(steps)

    @staticmethod
    def encode(steps: Sequence[Step]) -> bytes:
        """A batch as it is appended to the file: as many frames as it needs."""
        body = _encoder.encode(steps)
        if len(body) <= MAX_FRAME:
            return frame(body)
        if len(steps) == 1:
            raise SnapshotError("A path is too long to be restored.", code=Code.INVALID_PATH, paths=[steps[0].path])
        half = len(steps) // 2
        return Journal.encode(steps[:half]) + Journal.encode(steps[half:])

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
            raise damaged("its journal is not what was written")
        try:
            steps = _decoder.decode(whole[0])
            for step in steps:
                check_step(step)
        except (msgspec.DecodeError, SnapshotError) as error:
            raise damaged(f"its journal is not valid: {error}") from error
        return steps, whole[1]


def damaged(why: str) -> SnapshotError:
    """The error for a sealed stage that cannot be used."""
    return SnapshotError(
        f"The interrupted restore in .snapcore-stage cannot be finished: {why}.",
        code=Code.RESTORE_BLOCKED,
        paths=[STAGE_NAME],
        hint="The workspace may be half restored. Remove the folder .snapcore-stage from it, then restore again.",
    )
