"""Repeating what failed: exponential backoff with full jitter, for minutes where a service asks for less."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

__all__ = ["RetryPolicy"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """For how long a request is repeated, and what the waits are.

    `deadline` seconds for a service that throttles or fails, counted from the first failure; `unreachable_deadline` for
    one that cannot be connected to, since its address may be wrong. A wait is a random part of `first` seconds, doubled
    with each failure up to `longest`, and never shorter than what the service asked for, up to `longest`. `sleep`, `clock`
    (seconds) and `part` (a number from 0 to 1) are there for tests.
    """

    deadline: float = 300.0
    unreachable_deadline: float = 30.0
    first: float = 0.5
    longest: float = 20.0
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    part: Callable[[], float] = field(default=random.random, repr=False)

    def wait(self, failures: int, asked: float) -> float:
        """Seconds to wait after so many failures, `asked` being what the service asked for."""
        longest = min(self.longest, self.first * 2.0 ** min(failures - 1, 20))
        return max(self.part() * longest, min(asked, self.longest))
