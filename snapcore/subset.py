"""Which packs a verification reads when it reads a part of the data: `x%`, a size, or the n-th of t parts."""

import math
import random
import re
from collections.abc import Sequence
from typing import Final

from .errors import Code, SnapshotError, printable
from .protocols import PackInfo

__all__ = ["Subset", "parse_subset"]

_PART: Final = re.compile(r"([0-9]{1,9})/([0-9]{1,9})", re.ASCII)
_PERCENT: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)%", re.ASCII)
_SIZE: Final = re.compile(r"([0-9]{1,12})([KMGT])", re.ASCII)
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Subset:
    """A part of the packs. With `parts`, the one numbered `part` of so many, by the packs' ids: reading each once reads every
    pack once. Else chosen at random: `share` of the packs (0 to 1), or packs of `size` bytes together."""

    def __init__(self, *, part: int = 0, parts: int = 0, share: float = 0.0, size: int = 0) -> None:
        self._part = part
        self._parts = parts
        self._share = share
        self._size = size

    def choose(self, packs: Sequence[PackInfo]) -> set[str]:
        """The ids of the packs to read; never none of some, but for a part that holds none."""
        if self._parts:
            return {p.pack_id for p in packs if int(p.pack_id, 16) % self._parts == self._part - 1}
        shuffled = random.sample(packs, len(packs))
        if self._share:
            return {p.pack_id for p in shuffled[: math.ceil(len(packs) * self._share)]}
        chosen: set[str] = set()
        left = self._size
        for p in shuffled:
            if left <= 0:
                break
            chosen.add(p.pack_id)
            left -= p.size
        return chosen


def parse_subset(text: str) -> Subset:
    """What `5%`, `2/7` or `500M` means. Raises `SnapshotError` `INVALID_REQUEST` for all else, 0 and more than all included."""
    if match := _PART.fullmatch(text):
        part, parts = int(match[1]), int(match[2])
        if 1 <= part <= parts:
            return Subset(part=part, parts=parts)
    elif match := _PERCENT.fullmatch(text):
        percent = float(match[1])
        if 0 < percent <= 100:
            return Subset(share=percent / 100)
    elif (match := _SIZE.fullmatch(text)) and int(match[1]):
        return Subset(size=int(match[1]) * _UNITS[match[2]])
    raise SnapshotError(
        f"'{printable(text)}' is no part of the data.",
        code=Code.INVALID_REQUEST,
        hint="Give a share (5%), a part (2/7 is the second of seven), or a size (500M).",
    )
