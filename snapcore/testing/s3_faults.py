"""What a strict S3 server can be told to do wrong. Requests are named GET, HEAD, PUT, DELETE, LIST and POST (a batch delete);
`"*"` stands for all of them. They are numbered from 1, by name; `"*"` by all together. `None` means each."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Refusal", "S3Faults", "Strike"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer: HTTP status, S3 error code, and further headers."""

    status: int
    code: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Strike:
    """What happens to one request: it waits, is refused, dropped, loses its answer, or gets a part of its body only."""

    seconds: float = 0.0
    refusal: Refusal | None = None
    drop: bool = False
    lose: bool = False
    keep: int | None = None
    as_page: bool = False


@dataclass(frozen=True, slots=True)
class _Planned:
    verb: str
    call: int | None
    every: int
    strike: Strike

    def meets(self, verb: str, number: int, total: int) -> bool:
        if self.verb not in ("*", verb):
            return False
        counted = total if self.verb == "*" else number
        return counted % self.every == 0 if self.every else self.call in (None, counted)


class S3Faults:
    """A plan of faults; safe to change while the server runs.

    Lies of a listing are plain attributes: `page_size`, `repeat_tokens` (the first token again and again), `stuck_pages` (the
    first page again and again), `duplicates` (each key twice), `first_version_only` (`"ignored"`: a request of the second
    version is answered as one of the first; `"refused"`: with 501), `hidden` (keys that listings lack), `foreign` (keys
    outside the prefix that they hold). `write_interval` is how many seconds must lie between two writes of one key, as R2
    has it: sooner ones get 429. `ignore_ranges` sends the whole object whatever range was asked for.
    """

    def __init__(self) -> None:
        self.page_size = 1000
        self.repeat_tokens = False
        self.stuck_pages = False
        self.duplicates = False
        self.first_version_only = ""
        self.hidden: set[str] = set()
        self.foreign: list[str] = []
        self.write_interval = 0.0
        self.ignore_ranges = False
        self._planned: list[_Planned] = []
        self._counts: Counter[str] = Counter()
        self._written: dict[str, float] = {}
        self._lock = threading.Lock()

    def refuse(
        self,
        verb: str,
        call: int | None = 1,
        *,
        status: int = 503,
        code: str = "SlowDown",
        every: int = 0,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Answer with an error instead of doing the work; with `every`, each so many requests."""
        self._plan(verb, call, Strike(refusal=Refusal(status, code, headers or {})), every)

    def drop(self, verb: str, call: int | None = 1) -> None:
        """Close the connection instead of doing the work."""
        self._plan(verb, call, Strike(drop=True))

    def lose_response(self, verb: str, call: int | None = 1) -> None:
        """Do the work, then close the connection."""
        self._plan(verb, call, Strike(lose=True))

    def cut_body(self, verb: str, keep: int, call: int | None = 1) -> None:
        """Promise the whole body, send the first `keep` bytes of it, and close the connection."""
        self._plan(verb, call, Strike(keep=keep))

    def answer_with_a_page(self, verb: str, call: int | None = 1) -> None:
        """Answer 404 with an HTML page, as a proxy does that has lost its service."""
        self._plan(verb, call, Strike(as_page=True))

    def delay(self, verb: str, seconds: float, call: int | None = None) -> None:
        """Wait before the work."""
        self._plan(verb, call, Strike(seconds=seconds))

    def clear(self) -> None:
        """Forget planned faults and start counting anew; the lies of listings stay."""
        with self._lock:
            self._planned.clear()
            self._counts.clear()

    def strike(self, verb: str) -> Strike:
        """For the server: what happens to the request that has just come in."""
        merged = Strike()
        with self._lock:
            self._counts[verb] += 1
            total = self._counts.total()
            met = [planned.strike for planned in self._planned if planned.meets(verb, self._counts[verb], total)]
        for one in met:
            merged.seconds += one.seconds
            merged.refusal = merged.refusal or one.refusal
            merged.drop |= one.drop
            merged.lose |= one.lose
            merged.as_page |= one.as_page
            merged.keep = one.keep if merged.keep is None else merged.keep
        return merged

    def writes_too_often(self, name: str) -> bool:
        """For the server: whether a write of this key comes too soon after the one before."""
        if not self.write_interval:
            return False
        with self._lock:
            now = time.monotonic()
            too_soon = now - self._written.get(name, -self.write_interval) < self.write_interval
            if not too_soon:
                self._written[name] = now
            return too_soon

    def _plan(self, verb: str, call: int | None, strike: Strike, every: int = 0) -> None:
        with self._lock:
            self._planned.append(_Planned(verb, call, every, strike))
