"""A map from record ids to small numbers that stays small in memory: a million ids take some 50 MB instead of 150."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from .model import DIGEST_BYTES

__all__ = ["IdMap"]

SMALL: Final = 50_000
PREFIX: Final = 2
REST: Final = DIGEST_BYTES - PREFIX
VALUE: Final = 4
WIDTH: Final = REST + VALUE


class IdMap:
    """Numbers from 0 to 2**32 - 1 by ids of 32 bytes. Not to be used from several threads at once.

    Up to `SMALL` ids are a plain dict. Beyond, they are kept by their first two bytes, the rest of each and its number
    concatenated: since ids are hashes, finding 30 given bytes anywhere in such a run means that the id is there.
    """

    def __init__(self) -> None:
        self._few: dict[bytes, int] = {}
        self._runs: dict[bytes, bytearray] = {}

    def __len__(self) -> int:
        return len(self._few) + sum(len(run) for run in self._runs.values()) // WIDTH

    def get(self, record_id: bytes) -> int | None:
        """The id's number, None for an id that is not there."""
        value = self._few.get(record_id)
        if value is not None or not self._runs:
            return value
        run = self._runs.get(record_id[:PREFIX])
        at = -1 if run is None else run.find(record_id[PREFIX:])
        return None if run is None or at < 0 else int.from_bytes(run[at + REST : at + WIDTH], "little")

    def add(self, ids: Iterable[bytes], value: int, merge: Callable[[int, int], int]) -> None:
        """Give ids a number; those that have another already get `merge(theirs, value)`."""
        few, runs = self._few, self._runs
        for i in ids:
            old = few.get(i)
            if old is not None:
                if old != value:
                    few[i] = merge(old, value)
                continue
            if runs:
                run = runs.get(i[:PREFIX])
                at = -1 if run is None else run.find(i[PREFIX:])
                if run is not None and at >= 0:
                    old = int.from_bytes(run[at + REST : at + WIDTH], "little")
                    if old != value:
                        run[at + REST : at + WIDTH] = merge(old, value).to_bytes(VALUE, "little")
                    continue
            few[i] = value
        if len(few) > SMALL:
            self._pack()

    def items(self) -> Iterator[tuple[bytes, int]]:
        """All ids with their numbers, in no order. Nothing may be added meanwhile."""
        yield from self._few.items()
        for prefix, run in self._runs.items():
            for at in range(0, len(run), WIDTH):
                yield prefix + run[at : at + REST], int.from_bytes(run[at + REST : at + WIDTH], "little")

    def renumber(self, numbers: Callable[[int], int]) -> None:
        """Give each id the number that `numbers` has for its present one."""
        for i, value in self._few.items():
            self._few[i] = numbers(value)
        for run in self._runs.values():
            for at in range(REST, len(run), WIDTH):
                value = int.from_bytes(run[at : at + VALUE], "little")
                run[at : at + VALUE] = numbers(value).to_bytes(VALUE, "little")

    def _pack(self) -> None:
        for i, value in self._few.items():
            self._runs.setdefault(i[:PREFIX], bytearray()).extend(i[PREFIX:] + value.to_bytes(VALUE, "little"))
        self._few.clear()
