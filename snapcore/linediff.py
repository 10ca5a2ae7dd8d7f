"""Which lines of two texts differ, with bounded work.

Myers' greedy algorithm (E. W. Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1, 1986) finds the fewest
changed lines, at a cost that grows with the square of their number. Where it would have to look at too much, the text is first
divided at lines that both sides have exactly once, in the same order (Bram Cohen's "patience diff"); where there is none, or all
the work that is allowed is used up, the whole stretch counts as changed. The result is right in any case, and at worst long.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

__all__ = ["Block", "changed_blocks"]

MAX_EDITS: Final = 500  # lines that Myers' algorithm may find changed in one stretch
WORK: Final = 3_000_000  # steps for all: a second or two


class Block(NamedTuple):
    """Lines `[a1, a2)` of the first text are `[b1, b2)` in the second. All outside of blocks is equal."""

    a1: int
    a2: int
    b1: int
    b2: int


def changed_blocks(a: Sequence[bytes], b: Sequence[bytes]) -> list[Block]:
    """The stretches in which two texts, as lines, differ, in order."""
    numbers: dict[bytes, int] = {}
    x = [numbers.setdefault(line, len(numbers)) for line in a]
    y = [numbers.setdefault(line, len(numbers)) for line in b]
    return _joined(_Differ(x, y).blocks())


def _joined(blocks: Iterator[Block]) -> list[Block]:
    out: list[Block] = []
    for block in blocks:
        last = out[-1] if out else None
        if last is not None and (last.a2, last.b2) == (block.a1, block.b1):
            out[-1] = Block(last.a1, block.a2, last.b1, block.b2)
        else:
            out.append(block)
    return out


class _Differ:
    def __init__(self, x: Sequence[int], y: Sequence[int]) -> None:
        self._x = x
        self._y = y
        self._work = WORK

    def blocks(self) -> Iterator[Block]:
        left = [Block(0, len(self._x), 0, len(self._y))]
        while left:
            part = self._trimmed(left.pop())
            if part.a1 == part.a2 or part.b1 == part.b2:
                if part.a1 != part.a2 or part.b1 != part.b2:
                    yield part
                continue
            found = self._myers(part) if self._work > 0 else [part]
            if found is None:
                parts = self._divided(part)
                left += reversed(parts)
                found = [] if parts else [part]
            yield from found

    def _trimmed(self, part: Block) -> Block:
        """Without the lines that are equal at both ends."""
        x, y = self._x, self._y
        a1, a2, b1, b2 = part
        while a1 < a2 and b1 < b2 and x[a1] == y[b1]:
            a1, b1 = a1 + 1, b1 + 1
        while a1 < a2 and b1 < b2 and x[a2 - 1] == y[b2 - 1]:
            a2, b2 = a2 - 1, b2 - 1
        return Block(a1, a2, b1, b2)

    def _divided(self, part: Block) -> list[Block]:
        """The stretches between the lines that occur once on both sides; nothing when there is none."""
        self._work -= part.a2 - part.a1 + part.b2 - part.b1
        a_once, b_once = _once(self._x, part.a1, part.a2), _once(self._y, part.b1, part.b2)
        pairs = sorted((at, b_once[line]) for line, at in a_once.items() if line in b_once)
        out = []
        a, b = part.a1, part.b1
        for at, bt in _rising(pairs):
            out.append(Block(a, at, b, bt))
            a, b = at + 1, bt + 1
        return [*out, Block(a, part.a2, b, part.b2)] if out else []

    def _myers(self, part: Block) -> list[Block] | None:
        """The fewest changes of a stretch, in order; None when they cannot be found with the work that is allowed."""
        x, y = self._x, self._y
        n, m = part.a2 - part.a1, part.b2 - part.b1
        furthest = {1: 0}
        trace: list[dict[int, int]] = []
        for edits in range(min(MAX_EDITS, n + m) + 1):
            reached: dict[int, int] = {}
            for k in range(-edits + 2 * max(0, edits - m), edits - 2 * max(0, edits - n) + 1, 2):
                down = k == -edits or (k != edits and furthest.get(k - 1, -1) < furthest.get(k + 1, -1))
                i = furthest[k + 1] if down else furthest[k - 1] + 1
                start = i
                while i < n and i - k < m and x[part.a1 + i] == y[part.b1 + i - k]:
                    i += 1
                self._work -= i - start + 1
                reached[k] = i
                if i >= n and i - k >= m:
                    return _walked_back(part, [*trace, reached], n, m)
            if self._work <= 0:
                return None
            trace.append(reached)
            furthest = reached
        return None


def _walked_back(part: Block, trace: Sequence[dict[int, int]], n: int, m: int) -> list[Block]:
    """The changed lines on the way that was found, from its end."""
    out = []
    i, j = n, m
    for edits in range(len(trace) - 1, 0, -1):
        k = i - j
        before = trace[edits - 1]
        down = k == -edits or (k != edits and before.get(k - 1, -1) < before.get(k + 1, -1))
        i = before[k + 1] if down else before[k - 1]
        j = i - (k + 1) if down else i - (k - 1)
        a, b = part.a1 + i, part.b1 + j
        out.append(Block(a, a, b, b + 1) if down else Block(a, a + 1, b, b))
    return out[::-1]


def _once(lines: Sequence[int], start: int, end: int) -> dict[int, int]:
    """Where the lines that occur once in a stretch are."""
    places: dict[int, int] = {}
    for at in range(start, end):
        places[lines[at]] = -1 if lines[at] in places else at
    return {line: at for line, at in places.items() if at >= 0}


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest run of pairs, which are ordered by their first number, whose second numbers rise too."""
    ends: list[int] = []  # the smallest second number that a run of each length can end with
    chosen: list[int] = []  # and the pair that it ends with
    previous: list[int] = []
    for index, (_, bt) in enumerate(pairs):
        length = bisect.bisect_left(ends, bt)
        previous.append(chosen[length - 1] if length else -1)
        ends[length : length + 1] = [bt]
        chosen[length : length + 1] = [index]
    out = []
    at = chosen[-1] if chosen else -1
    while at >= 0:
        out.append(pairs[at])
        at = previous[at]
    return out[::-1]
