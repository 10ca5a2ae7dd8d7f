"""What the E2B test server can be told to do wrong.

Requests are named by what they do: `create`, `list`, `info`, `kill`, `timeout`, `pause`, `connect`, `snapshot`, `snapshots`,
`forget` and `network` at the API; in a sandbox `health`, `metrics`, `read`, `write` and the remote procedures by their own
names (`Start`, `Stat`, `ListDir`, ...). They are numbered from 1, by name. `None` means each.
"""

import threading
from collections import Counter
from dataclasses import dataclass

__all__ = ["E2BFaults", "E2BStrike"]


@dataclass(slots=True)
class E2BStrike:
    """What happens to one request. `cut` and `keep` count bytes of file contents, or of a command's output."""

    seconds: float = 0.0
    status: int = 0
    message: str = ""
    page: bool = False
    drop: bool = False
    lose: bool = False
    cut: int | None = None
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class _Planned:
    name: str
    call: int | None
    strike: E2BStrike


class E2BFaults:
    """A plan of faults; safe to change while the server runs."""

    def __init__(self) -> None:
        self._planned: list[_Planned] = []
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def refuse(self, name: str, call: int | None = 1, *, status: int, message: str, page: bool = False) -> None:
        """Answer with an error instead of doing the work; with `page`, as HTML, like a gateway that lost its service."""
        self._plan(name, call, E2BStrike(status=status, message=message, page=page))

    def drop(self, name: str, call: int | None = 1) -> None:
        """Close the connection instead of doing the work."""
        self._plan(name, call, E2BStrike(drop=True))

    def lose_answer(self, name: str, call: int | None = 1) -> None:
        """Do the work, then close the connection. A command goes on."""
        self._plan(name, call, E2BStrike(lose=True))

    def cut(self, name: str, after: int, call: int | None = 1) -> None:
        """Close the connection in the middle: after so many bytes of a file that is sent or received, or of output."""
        self._plan(name, call, E2BStrike(cut=after))

    def truncate(self, name: str, keep: int, call: int | None = 1) -> None:
        """Answer as if all were well, with only the first `keep` bytes of the file or of the output."""
        self._plan(name, call, E2BStrike(keep=keep))

    def delay(self, name: str, seconds: float, call: int | None = None) -> None:
        """Wait before the work."""
        self._plan(name, call, E2BStrike(seconds=seconds))

    def clear(self) -> None:
        """Forget planned faults and start counting anew."""
        with self._lock:
            self._planned.clear()
            self._counts.clear()

    def strike(self, name: str) -> E2BStrike:
        """For the server: what happens to the request that has just come in."""
        merged = E2BStrike()
        with self._lock:
            self._counts[name] += 1
            met = [one.strike for one in self._planned if one.name == name and one.call in (None, self._counts[name])]
        for one in met:
            merged.seconds += one.seconds
            merged.drop |= one.drop
            merged.lose |= one.lose
            if one.status:
                merged.status, merged.message, merged.page = one.status, one.message, one.page
            merged.cut = one.cut if merged.cut is None else merged.cut
            merged.keep = one.keep if merged.keep is None else merged.keep
        return merged

    def _plan(self, name: str, call: int | None, strike: E2BStrike) -> None:
        with self._lock:
            self._planned.append(_Planned(name, call, strike))
