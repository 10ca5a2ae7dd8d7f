"""Time that passes when a test says so, for what waits between automatic checkpoints."""

import asyncio

PATIENCE = 60.0  # seconds of the real clock, for a machine that is busy: nothing waits for them to pass


class ManualSleep:
    """Stands in for `asyncio.sleep`. `asked` are the seconds of each wait so far."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._sleeping: asyncio.Future[None] | None = None
        self._changed = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        self._sleeping = asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            await self._sleeping
        finally:
            self._sleeping = None

    async def asleep(self) -> float:
        """Once somebody waits: the seconds that it waits for."""
        while self._sleeping is None:
            await self.changes()
        return self.asked[-1]

    async def changes(self) -> None:
        """Until somebody begins to wait."""
        self._changed.clear()
        await asyncio.wait_for(self._changed.wait(), PATIENCE)

    async def wake(self) -> None:
        """Let the time pass that is waited for, and no more."""
        await self.asleep()
        assert self._sleeping is not None
        self._sleeping.set_result(None)
        self._sleeping = None

    async def turn(self) -> float:
        """Let the time pass, and what comes of it: returns the seconds of the next wait."""
        await self.wake()
        return await self.asleep()

    async def last(self) -> None:
        """Let the time pass, until nobody waits any more and the loop has nothing left to do at once."""
        await self.wake()
        for _ in range(50):
            await asyncio.sleep(0)

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return self._sleeping is None
