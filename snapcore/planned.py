"""What a restore would do to one path, and why: for those who look before they restore."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from .model import Entry, FileStat, Kind

__all__ = ["PlannedChange", "differences"]


class PlannedChange(msgspec.Struct, frozen=True, gc=False):
    """One path of a plan. `root` is the name of its root. `kind` (of `Kind`) and `size` (a file's, in bytes) are of what would
    be there, or of what would go when `action` is `remove`; `size_before` is of the file that a change replaces. `why` has of a
    change in what the two differ: some of `kind`, `content` (a link's target, too), `mode`, `time`, `owner` and `hard link`."""

    root: str
    path: bytes
    action: Literal["remove", "add", "change"]
    kind: int
    size: int = 0
    size_before: int = 0
    why: tuple[str, ...] = ()


def differences(entry: Entry, stat: FileStat, *, content: bool, mode: bool, time: bool, owner: bool) -> tuple[str, ...]:
    """In what a path differs from its entry. The flags say what is equal; of a link only its target and its time count."""
    if entry.kind != stat.kind:
        return ("kind",)
    return tuple(_differences(entry.kind, content=content, mode=mode, time=time, owner=owner)) or ("hard link",)


def _differences(kind: int, *, content: bool, mode: bool, time: bool, owner: bool) -> Iterator[str]:
    if not content:
        yield "content"
    if not mode and kind != Kind.LINK:
        yield "mode"
    if not time and kind != Kind.DIR:
        yield "time"
    if not owner:
        yield "owner"
