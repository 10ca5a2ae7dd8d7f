"""A clock that tests set by hand."""

__all__ = ["ManualClock"]


class ManualClock:
    """Called, it tells the time in microseconds since the epoch; it moves only when told to.

    Starts years from any real present, so that what reads another clock by mistake is found out.
    """

    def __init__(self, now: int = 1_000_000_000_000_000) -> None:
        self._now = now

    def __call__(self) -> int:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass. A negative number sets the clock back."""
        self._now += round(seconds * 1_000_000)
