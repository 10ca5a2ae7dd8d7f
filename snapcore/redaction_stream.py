"""Redaction of a file that comes in pieces: the same result for any cut, with bounded memory.

Secrets: a match is decided once all bytes that it and its neighbours could take have arrived. Hooks and patterns see
windows at fixed offsets of the file, each a core and a margin on both sides; what they find counts when it touches the core.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from .model import Redaction
from .protocols import Buffer
from .redaction_match import Cover, Matcher, Span, join_records, zero

__all__ = ["WINDOW", "Detector", "RedactionStream", "find_spans", "redact_whole"]

WINDOW: Final = 256 * 1024
"""Bytes in the core of a window."""
_STEP: Final = 64 * 1024  # small pieces are gathered up to this
_PIECE: Final = 256 * 1024  # large ones are cut: it bounds the list of matches when a secret is a run of one byte

Detector = Callable[[bytes], Iterable[Span]]
"""Given the bytes of a window, the ranges in it that hooks and patterns name."""


def _touching(spans: Iterable[Span], core: int, start: int) -> list[Span]:
    """The spans of a window that begins at `start` which touch its core, as offsets in the file."""
    first, last = core - start, core - start + WINDOW
    return [(s + start, e + start, name, form) for s, e, name, form in spans if s < last and e > first]


def find_spans(data: Buffer, detect: Detector, margin: int) -> list[Span]:
    """What the hooks and patterns find in the windows of a whole file."""
    spans: list[Span] = []
    for core in range(0, len(data), WINDOW):
        start = max(core - margin, 0)
        spans += _touching(detect(bytes(data[start : core + WINDOW + margin])), core, start)
    return spans


class RedactionStream:
    """Redacts one file fed in order. `redactions` is complete after `finish`. At most some hundred KiB are held back."""

    __slots__ = (
        "_base",
        "_buffer",
        "_core",
        "_cover",
        "_detect",
        "_margin",
        "_matched",
        "_matcher",
        "_pending",
        "_records",
        "_released",
        "_spans",
    )

    def __init__(self, matcher: Matcher | None, detect: Detector | None, margin: int) -> None:
        self._matcher = matcher
        self._detect = detect
        self._margin = margin
        self._buffer = bytearray()  # of the file as it is, from offset `_base`
        self._base = 0
        self._released = 0  # all before has been returned
        self._matched = 0  # all matches that begin before are known
        self._core = 0  # where the core of the next window begins
        self._pending: list[tuple[int, int]] = []  # ranges to zero that reach beyond what was returned
        self._cover = Cover()
        self._spans: list[Span] = []
        self._records: tuple[Redaction, ...] | None = None

    @property
    def redactions(self) -> tuple[Redaction, ...]:
        """What was taken out, by offset. Complete after `finish`, empty before."""
        return self._records or ()

    def feed(self, data: Buffer) -> bytes:
        """Take the next bytes of the file; returns those that are decided, redacted."""
        if self._matcher is None and self._detect is None:
            return bytes(data)
        if len(data) <= _PIECE:
            return self._take(data)
        with memoryview(data) as view:
            return b"".join([self._take(view[at : at + _PIECE]) for at in range(0, len(view), _PIECE)])

    def _take(self, data: Buffer) -> bytes:
        self._buffer += data
        if self._base + len(self._buffer) - self._released < _STEP:
            return b""
        return self._advance(final=False)

    def finish(self) -> bytes:
        """The file is over: returns the rest."""
        rest = self._advance(final=True)
        self._records = join_records(self._cover.finish(), self._spans)
        return rest

    def _advance(self, *, final: bool) -> bytes:
        end = self._base + len(self._buffer)
        self._match(end if final else end - (self._matcher.reach if self._matcher else 0))
        self._look(end, final=final)
        # A span of the next window may reach back by the margin.
        decided = end if final else min(self._matched, self._core - self._margin if self._detect else end)
        if decided <= self._released:
            return b""
        with memoryview(self._buffer) as whole:
            out = bytes(whole[self._released - self._base : decided - self._base])
        if self._pending:
            clean = bytearray(out)
            zero(clean, self._released, self._pending)
            out = bytes(clean)
            self._pending = [piece for piece in self._pending if piece[1] > decided]
        self._released = decided
        # One byte before the next match: its left border.
        needed = min(decided, self._matched - 1, self._core - self._margin if self._detect else decided)
        if needed > self._base:
            del self._buffer[: needed - self._base]
            self._base = needed
        return out

    def _match(self, limit: int) -> None:
        """Find the matches that begin before `limit`."""
        if limit <= self._matched:
            return
        if self._matcher is not None:
            origin = max(self._base, self._matched - 1)
            with memoryview(self._buffer) as whole, whole[origin - self._base :] as view:
                matches = self._matcher.find(view)
            for start, end, name, form in matches:
                if self._matched <= start + origin < limit:
                    self._cover.add((start + origin, end + origin, name, form))
                    self._mark(start + origin, end + origin)
        self._matched = limit

    def _look(self, end: int, *, final: bool) -> None:
        """Run the hooks and patterns on the windows that are complete."""
        if self._detect is None:
            return
        while self._core < end and (final or self._core + WINDOW + self._margin <= end):
            start = max(self._core - self._margin, 0)
            block = bytes(self._buffer[start - self._base : self._core + WINDOW + self._margin - self._base])
            for span in _touching(self._detect(block), self._core, start):
                self._spans.append(span)
                self._mark(span[0], span[1])
            self._core += WINDOW

    def _mark(self, start: int, end: int) -> None:
        if self._pending and self._pending[-1][0] <= start <= self._pending[-1][1]:
            self._pending[-1] = (self._pending[-1][0], max(end, self._pending[-1][1]))
        else:
            self._pending.append((start, end))


def redact_whole(
    data: Buffer, matcher: Matcher | None, detect: Detector | None, margin: int
) -> tuple[Buffer, Sequence[Redaction]]:
    """The same for a file that is at hand whole. Returns `data` itself when there is nothing to take out."""
    if len(data) > _PIECE:
        stream = RedactionStream(matcher, detect, margin)
        clean = stream.feed(data) + stream.finish()
        return (clean, stream.redactions) if stream.redactions else (data, ())
    matches = matcher.find(data) if matcher is not None else []
    spans: list[Span] = []
    if detect is not None:
        spans = find_spans(data, detect, margin)
    if not matches and not spans:
        return data, ()
    cover = Cover()
    for match in matches:
        cover.add(match)
    out = bytearray(data)
    records = join_records(cover.finish(), spans)
    zero(out, 0, ((record.offset, record.offset + record.length) for record in records))
    return out, records
