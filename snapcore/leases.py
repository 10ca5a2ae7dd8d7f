"""Holding a thread's writer lease while work goes on."""

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from .engine import Engine, finish, stop
from .errors import (
    CheckpointWriterConflictError,
    CheckpointWriterLostError,
    Code,
    RepositoryError,
    SnapcoreError,
    SnapshotError,
)
from .hosts import current_holder
from .model import WriterLease
from .protocols import Grant

__all__ = ["DEFAULT_TTL", "WriterHold"]

DEFAULT_TTL: Final = 120.0
RENEW_PART: Final = 0.375  # of the ttl: 45 s of 120 s
FIRST_RETRY: Final = 0.05
LONGEST_RETRY: Final = 2.0
ATTEMPTS: Final = 4  # of a store that says that trying again can help


class WriterHold:
    """Takes the lease on entry, renews it in the background, gives it up on exit unless the commit did.

    `wait` seconds bound the time spent waiting for another writer; None does not wait. Losing the lease shows at `check`
    and, for certain, in the commit. Raises `SnapshotError` `INVALID_REQUEST` for a `wait` that makes no sense.
    """

    def __init__(
        self,
        engine: Engine,
        thread_id: str,
        *,
        ttl: float = DEFAULT_TTL,
        wait: float | None = None,
        pack_id: str | None = None,
        sandbox_id: str | None = None,
        roots: Sequence[str] = (),
    ) -> None:
        if wait is not None and not wait >= 0:  # NaN is not, either
            raise SnapshotError("wait is a number of seconds that is not negative.", code=Code.INVALID_REQUEST)
        self._store = engine.checkpoints
        self._unreleased = engine.unreleased
        self._thread_id = thread_id
        self._ttl = ttl
        self._wait = wait
        self._pack_id = pack_id
        self._sandbox_id = sandbox_id
        self._roots = roots
        self._lost: CheckpointWriterLostError | None = None
        self._renewing: asyncio.Task[None] | None = None
        self.released = False
        self.grant: Grant

    @property
    def lease(self) -> WriterLease:
        """The lease as granted; the store knows its renewals by token and fence."""
        return self.grant.lease

    def check(self) -> None:
        """Raise `CheckpointWriterLostError` once a renewal has failed for good."""
        if self._lost is not None:
            raise self._lost

    async def __aenter__(self) -> Self:
        self.grant = await self._acquire()
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._renewing is not None:
                await stop([self._renewing])
        finally:
            if not self.released:
                await self._release(failed=error is not None)

    async def _release(self, *, failed: bool) -> None:
        try:
            await finish(self._store.release_writer(self.lease))
        except CheckpointWriterLostError:
            if not failed and self._lost is None:
                raise
        except SnapcoreError:
            self._unreleased[self._thread_id] = self.lease
            if not failed:  # else the failure that brought us here is the one to report
                raise

    async def _acquire(self) -> Grant:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._wait or 0)
        delay = FIRST_RETRY
        await self._release_old()
        while True:
            try:
                return await finish(self._ask(), undo=self._give_up)
            except CheckpointWriterConflictError:
                left = deadline - loop.time()
                if left <= 0:
                    raise
                await asyncio.sleep(min(delay, left))
                delay = min(delay * 2, LONGEST_RETRY)

    async def _ask(self) -> Grant:
        """Ask for the lease; again when the answer may have been lost, by the same token, so that the thread is not held by
        a lease that nobody knows of."""
        token = secrets.token_hex(16)
        for attempt in range(ATTEMPTS):
            try:
                return await self._store.acquire_writer(
                    self._thread_id,
                    ttl=self._ttl,
                    holder=current_holder(),
                    pack_id=self._pack_id,
                    sandbox_id=self._sandbox_id,
                    roots=self._roots,
                    token=token,
                )
            except RepositoryError as error:
                if not error.retryable or attempt + 1 == ATTEMPTS:
                    raise
                await asyncio.sleep(FIRST_RETRY * 2**attempt)
        raise AssertionError("unreachable")

    async def _give_up(self, grant: Grant) -> None:
        try:
            await self._store.release_writer(grant.lease)
        except SnapcoreError:
            self._unreleased[self._thread_id] = grant.lease

    async def _release_old(self) -> None:
        """Give up what could not be given up before; or let it run out."""
        lease = self._unreleased.pop(self._thread_id, None)
        if lease is not None:
            with contextlib.suppress(SnapcoreError):
                await finish(self._store.release_writer(lease))

    async def _renew(self) -> None:
        pause = self._ttl * RENEW_PART
        while True:
            await asyncio.sleep(pause)
            try:
                await finish(self._store.renew_writer(self.lease))
                pause = self._ttl * RENEW_PART
            except CheckpointWriterLostError as error:
                self._lost = error
                return
            except SnapcoreError:
                pause = min(pause, self._ttl * RENEW_PART / 8)  # out of reach for the moment: the commit decides
