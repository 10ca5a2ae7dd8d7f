"""How many requests run at once: a limit that is halved when the service asks for less, and creeps up again."""

import asyncio
import threading
from collections import deque
from dataclasses import dataclass

__all__ = ["AdaptiveLimit", "Turn"]


@dataclass(frozen=True, slots=True)
class Turn:
    """The right to run one request: what it costs in bytes, and how often the limit had been halved when it began."""

    cost: int
    epoch: int


@dataclass(eq=False, slots=True)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    turn: "asyncio.Future[Turn]"
    cost: int


class AdaptiveLimit:
    """At most `most` turns at once, and `most_bytes` of their cost together; a turn that costs more than that runs alone.

    Additive increase, multiplicative decrease: `slowed` halves the number of turns, once for all requests that were under
    way together, and each `succeeded` adds a part of one. Turns are given in the order in which they were asked for. It may
    be used from several event loops, and turns may be given back from any thread, also when their loop is closed.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._limit = float(most)
        self._running = 0
        self._bytes = 0
        self._epoch = 0
        self._waiting: deque[_Waiter] = deque()
        self._lock = threading.Lock()

    @property
    def limit(self) -> int:
        """How many turns are given at once at present."""
        return int(self._limit)

    @property
    def running(self) -> int:
        """How many turns are taken."""
        return self._running

    @property
    def waiting(self) -> int:
        """How many wait for a turn."""
        return len(self._waiting)

    async def acquire(self, cost: int) -> Turn:
        """Wait for a turn. A cancelled wait takes none."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop, loop.create_future(), cost)
        with self._lock:
            self._waiting.append(waiter)
            self._grant()
        try:
            return await waiter.turn
        except asyncio.CancelledError:
            self._forget(waiter)
            raise

    def release(self, turn: Turn) -> None:
        """Give a turn back."""
        with self._lock:
            self._take_back(turn.cost)
            self._grant()

    def succeeded(self) -> None:
        """A request came through: one more at once, after as many as run at once now."""
        with self._lock:
            self._limit = min(float(self._most), self._limit + 1 / self._limit)
            self._grant()

    def slowed(self, turn: Turn) -> None:
        """The service asked for less. Requests that began before the last halving say nothing new."""
        with self._lock:
            if turn.epoch == self._epoch:
                self._epoch += 1
                self._limit = max(1.0, self._limit / 2)

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0].cost):
            waiter = self._waiting.popleft()
            self._running += 1
            self._bytes += waiter.cost
            turn = Turn(waiter.cost, self._epoch)
            try:
                waiter.loop.call_soon_threadsafe(_hand_over, waiter.turn, turn)
            except RuntimeError:  # its loop is closed
                self._take_back(waiter.cost)

    def _fits(self, cost: int) -> bool:
        if self._running == 0:
            return True
        return self._running < int(self._limit) and self._bytes + cost <= self._most_bytes

    def _forget(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:  # the turn was given in the same moment
                self._take_back(waiter.cost)
            self._grant()

    def _take_back(self, cost: int) -> None:
        self._running -= 1
        self._bytes -= cost


def _hand_over(waiting: "asyncio.Future[Turn]", turn: Turn) -> None:
    if not waiting.done():  # a cancelled one gives the turn back itself
        waiting.set_result(turn)
