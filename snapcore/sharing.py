"""Sets of checkpoints that need the same records, numbered, and of each only what is asked: its first and its last checkpoint,
and its threads."""

from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["Sharing", "Users", "union"]

COMPACT_AT: Final = 1 << 18  # borders of spans, of all sets together, and pairs that were merged

Spans = tuple[int, ...]  # start, end, start, end, ...: ranges of numbers, in order, with gaps between them


class Users(NamedTuple):
    """Who needs a record: the first and the last of the checkpoints that do, by their places in order, and the threads' numbers,
    as spans."""

    first: int
    last: int
    threads: Spans


def union(a: Spans, b: Spans) -> Spans:
    """The numbers of both."""
    if a == b:
        return a
    if b[-2] < a[-2]:
        a, b = b, a
    if len(b) == 2 and b[0] >= a[-2]:  # one that comes after all the others
        return (*a[:-1], max(a[-1], b[1])) if b[0] <= a[-1] else a + b
    merged: list[int] = []
    for start, end in sorted(zip((*a[::2], *b[::2]), (*a[1::2], *b[1::2]), strict=True)):
        if merged and start <= merged[-1]:
            merged[-1] = max(merged[-1], end)
        else:
            merged += (start, end)
    return tuple(merged)


class Sharing:
    """The sets, by number. Those that came up on the way and are used no more are dropped by `compact`."""

    def __init__(self) -> None:
        self._users: list[Users] = []
        self._numbers: dict[Users, int] = {}
        self._merged: dict[tuple[int, int], int] = {}
        self._weight = 0
        self._limit = COMPACT_AT

    def __getitem__(self, number: int) -> Users:
        return self._users[number]

    def number(self, users: Users) -> int:
        """The number of a set."""
        found = self._numbers.get(users)
        if found is None:
            found = self._numbers[users] = len(self._users)
            self._users.append(users)
            self._weight += len(users.threads)
        return found

    def merge(self, a: int, b: int) -> int:
        """The number of the union of two sets."""
        key = (a, b) if a < b else (b, a)
        found = self._merged.get(key)
        if found is None:
            x, y = self._users[a], self._users[b]
            both = Users(min(x.first, y.first), max(x.last, y.last), union(x.threads, y.threads))
            found = self._merged[key] = self.number(both)
        return found

    @property
    def heavy(self) -> bool:
        """Whether it is time to `compact`."""
        return self._weight + len(self._merged) > self._limit

    def compact(self, renumber: Callable[[Callable[[int], int]], None]) -> None:
        """Drop the sets that nobody names. `renumber` is called with a function, and gives it each number that it keeps: what
        comes back is the number from now on."""
        old = self._users
        self._users, self._numbers, self._merged, self._weight = [], {}, {}, 0
        renumber(lambda number: self.number(old[number]))
        self._limit = max(COMPACT_AT, 2 * self._weight)
