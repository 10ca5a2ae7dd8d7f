"""Finding every form of every secret in one pass, and turning overlapping matches into the ranges to cover.

The automaton (Aho and Corasick, 1975) holds an anchor of at most 16 bytes from the middle of each form and the rest is
compared on a hit: so it stays small, whatever the length of the secrets, and beginnings that many values share cost nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from .model import Redaction
from .protocols import Buffer
from .redaction_forms import Borders, forms_of

__all__ = ["Cover", "Match", "Matcher", "Span", "find_first", "join_records", "zero"]

Match = tuple[int, int, str, str]
"""Start, end, name of the secret, form."""
Span = tuple[int, int, str, str]
"""The same of a hook or a pattern; there is no value to put back."""

_ANCHOR: Final = 16
_DFA_LIMIT: Final = 200_000  # bytes of anchors; beyond, a slower automaton saves hundreds of MiB


class _Needle:
    """One form of one secret, and where its anchor lies in it."""

    __slots__ = ("anchored_whole", "borders", "data", "form", "name", "skip")

    def __init__(self, name: str, form: str, data: bytes, borders: Borders | None) -> None:
        self.name = name
        self.form = form
        self.data = data
        self.borders = borders
        self.skip = max(0, (len(data) - _ANCHOR) // 2)
        self.anchored_whole = len(data) <= _ANCHOR

    @property
    def anchor(self) -> bytes:
        return self.data[self.skip : self.skip + _ANCHOR]


class Matcher:
    """Finds all forms of the given secrets (name, value). `reach` is the most bytes that one match and its context take."""

    __slots__ = ("_automaton", "_needles", "reach")

    def __init__(self, secrets: Iterable[tuple[str, bytes]]) -> None:
        by_data: dict[bytes, _Needle] = {}
        for name, value in secrets:
            for form, data in forms_of(value).items():
                encoding, _, alignment = form.partition("/")
                borders = Borders(value, int(alignment)) if encoding.startswith("base64") else None
                by_data.setdefault(data, _Needle(name, form, data, borders))
        anchored: dict[bytes, list[_Needle]] = {}
        for needle in by_data.values():
            anchored.setdefault(needle.anchor, []).append(needle)
        self._needles = list(anchored.values())
        self.reach = max(map(len, by_data)) + 2

        from ahocorasick_rs import BytesAhoCorasick, Implementation

        small = sum(map(len, anchored)) <= _DFA_LIMIT
        implementation = Implementation.DFA if small else Implementation.ContiguousNFA
        self._automaton = BytesAhoCorasick(list(anchored), implementation=implementation)

    def find(self, data: Buffer) -> list[Match]:
        """Every match in `data`, overlapping ones too, by start and then the longest first. As long as their number."""
        found: list[Match] = []
        for index, at, _ in self._automaton.find_matches_as_indexes(data, overlapping=True):
            for needle in self._needles[index]:
                start = at - needle.skip
                end = start + len(needle.data)
                if needle.anchored_whole or (start >= 0 and data[start:end] == needle.data):
                    found.append(
                        _bordered(data, start, end, needle) if needle.borders else (start, end, needle.name, needle.form)
                    )
        found.sort(key=_order)
        return found


def _order(match: Match) -> tuple[int, int, str, str]:
    return match[0], -match[1], match[2], match[3]


def _bordered(data: Buffer, start: int, end: int, needle: _Needle) -> Match:
    borders = needle.borders
    assert borders is not None
    left = borders.left_bits(data[start - 1]) if start else None
    right = borders.right_bits(data[end]) if end < len(data) else None
    start -= left is not None
    end += right is not None
    return start, end, needle.name, borders.form(bytes(data[start:end]), left, right)


class Cover:
    """The fewest matches that together cover all that were found: what is recorded, and enough to put all back.

    Matches come in the order of `Matcher.find`, in any number of calls. A match within another is not recorded. Matches of
    one form that follow each other without a gap become one record of several lengths (unless `runs` is false), so that a
    long run of one byte does not become a record a byte.
    """

    __slots__ = ("_best", "_end", "_records", "_runs", "_unit")

    def __init__(self, *, runs: bool = True) -> None:
        self._records: list[Redaction] = []
        self._best: Match | None = None  # reaches furthest of those that begin within what is covered
        self._end = -1
        self._unit = 0
        self._runs = runs

    def add(self, match: Match) -> None:
        """Take the next match."""
        start, end, _, _ = match
        if start > self._end and self._best is not None:
            self._keep(self._best)
        if start > self._end:
            self._keep(match)
        elif end > self._end and (self._best is None or end > self._best[1]):
            self._best = match

    def finish(self) -> list[Redaction]:
        """The records, by offset; each overlaps at most the next one."""
        if self._best is not None:
            self._keep(self._best)
        return self._records

    def _keep(self, match: Match) -> None:
        start, end, name, form = match
        previous = self._records[-1] if self._records else None
        if previous is not None and start < self._end and ("/l" in form or "/r" in previous.form):
            # The border character is shared: the bits beside one secret are those of the other, and are not kept.
            form = _hidden(form)
            self._records[-1] = Redaction(previous.offset, previous.length, previous.name, _hidden(previous.form))
        if (
            previous is not None
            and self._runs
            and start == self._end
            and (name, form, end - start) == (previous.name, previous.form, self._unit)
        ):
            self._records[-1] = Redaction(previous.offset, end - previous.offset, name, form)
        else:
            self._records.append(Redaction(start, end - start, name, form))
            self._unit = end - start
        self._end = end
        self._best = None


def _hidden(form: str) -> str:
    encoding, _, rest = form.partition("/")
    return f"{encoding}/{rest[:1]}/x" if encoding.startswith("base64") else form


def join_records(exact: Sequence[Redaction], spans: Iterable[Span]) -> tuple[Redaction, ...]:
    """Records of secrets, and of what hooks and patterns cover beyond them, by offset."""
    pieces: list[Redaction] = []
    position = 0
    following = 0
    for start, end, name, form in sorted(spans):
        cursor = max(start, position)
        while following < len(exact) and exact[following].offset + exact[following].length <= cursor:
            following += 1
        index = following
        while cursor < end:
            stop = min(end, exact[index].offset) if index < len(exact) else end
            if cursor < stop:
                pieces.append(Redaction(cursor, stop - cursor, name, form))
            cursor = max(cursor, stop)
            if cursor < end:
                cursor = max(cursor, exact[index].offset + exact[index].length)
                index += 1
        position = max(position, end)
    if not pieces:
        return tuple(exact)
    return tuple(sorted((*exact, *pieces), key=lambda record: record.offset))


def zero(data: bytearray, offset: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Zero the (start, end) ranges of a file in `data`, which begins at `offset` of it."""
    size = len(data)
    for start, end in ranges:
        first, last = max(start - offset, 0), min(end - offset, size)
        if first < last:
            data[first:last] = bytes(last - first)


def find_first(matcher: Matcher, names: Sequence[bytes]) -> dict[int, str]:
    """For each of the NUL-free names that holds a secret: its index, and the name of the first secret in it."""
    joined = b"\0".join(names)
    found: dict[int, str] = {}
    for start, end, secret, _ in matcher.find(joined):
        if b"\0" not in joined[start:end]:
            found.setdefault(joined.count(b"\0", 0, start), secret)
    return found
