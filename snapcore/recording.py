"""Writing a thread's ledger: under a claim, each event once, whatever answers are lost on the way."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from .engine import Engine, finish
from .errors import CheckpointWriterLostError, RecordsMissingError, RepositoryError, printable
from .ingest import Ingestor
from .leases import WriterHold
from .ledger import Claim, Event
from .model import WriterLease
from .outputs import inline_output, store_output
from .packwriter import PackWriter, new_pack_id
from .redaction import NO_REDACTION

__all__ = ["Recorder", "claim_thread", "new_event_id"]

T = TypeVar("T")

ATTEMPTS: Final = 4
FIRST_PAUSE: Final = 0.1
PAGE: Final = 500


def new_event_id() -> str:
    """A random 128-bit id, as 32 hex digits."""
    return secrets.token_hex(16)


async def claim_thread(engine: Engine, lease: WriterLease) -> Claim:
    """Take the ledger of the lease's thread; every earlier claim on it ends."""
    token = secrets.token_hex(16)
    return await _surely(lambda: engine.checkpoints.claim_ledger(lease, token))


async def _surely(work: Callable[[], Awaitable[T]]) -> T:
    """Do what may be repeated, again when the store says that this can help."""
    for attempt in range(ATTEMPTS):
        try:
            return await work()
        except RepositoryError as error:
            if not error.retryable or attempt + 1 == ATTEMPTS:
                raise
            await asyncio.sleep(FIRST_PAUSE * 2**attempt)
    raise AssertionError("unreachable")


class Recorder:
    """Appends events to the ledger of one thread. Not to be used concurrently.

    A call that is cancelled ends its work first. Raises `CheckpointWriterLostError` once another worker has taken the thread.
    """

    def __init__(self, engine: Engine, claim: Claim) -> None:
        self._engine = engine
        self.claim = claim
        self._newest_id = ""  # of the events that were written here
        self._last = 0  # sequence of the newest event that is known to be followed by none of another worker
        self._kept: list[tuple[Event, bytes, bytes]] = []
        self._outputs_thread = f"outputs-{secrets.token_hex(16)}"

    async def append(self, event: Event) -> Event:
        """Append an event, after what could not be written before."""
        return await finish(self._append(event))

    async def complete(self, event: Event, stdout: bytes = b"", stderr: bytes = b"") -> Event:
        """Append how an operation ended. It has ended, whatever becomes of this call: when the event cannot be written now, it is
        kept, and written before the next one."""
        self._kept.append((event, stdout, stderr))
        stored = await finish(self.flush())
        assert stored is not None
        return stored

    async def flush(self) -> Event | None:
        """Write what could not be written before; the last of it."""
        stored = None
        while self._kept:
            try:
                stored = self._noted(await self._write(*self._kept[0]))
            except CheckpointWriterLostError:
                self._kept.clear()  # it will never be written
                raise
            del self._kept[0]
        return stored

    async def check(self) -> None:
        """Raise `CheckpointWriterLostError` when another worker has taken the thread and used it."""
        await self.flush()
        claim = self.claim
        while True:
            page = await _surely(lambda: self._engine.checkpoints.events(claim.thread_id, after=self._last, limit=PAGE))
            if any(event.fence > claim.fence for event in page):
                raise CheckpointWriterLostError(
                    f"Another session has taken thread {printable(claim.thread_id)}; nothing was done.",
                    hint="Let the other one go on, or open a new session.",
                )
            if page:
                self._last = page[-1].sequence
            if len(page) < PAGE:
                return

    async def _append(self, event: Event) -> Event:
        await self.flush()
        return self._noted(await _surely(lambda: self._engine.checkpoints.append_event(self.claim, event)))

    def wrote(self, event: Event) -> bool:
        """Whether the event is the newest that was written here, whatever became of the call."""
        return event.id == self._newest_id

    def _noted(self, stored: Event) -> Event:
        self._newest_id = stored.id
        self._last = max(self._last, stored.sequence)
        return stored

    async def _write(self, event: Event, stdout: bytes, stderr: bytes) -> Event:
        out, err = inline_output(stdout), inline_output(stderr)
        if out is None or err is None:
            return await self._write_large(event, stdout, stderr)
        whole = msgspec.structs.replace(event, stdout=out, stderr=err)
        return await _surely(lambda: self._engine.checkpoints.append_event(self.claim, whole))

    async def _write_large(self, event: Event, stdout: bytes, stderr: bytes) -> Event:
        """Put large outputs into packs, which the event's own transaction makes a part of the repository."""
        pack_id = new_pack_id()
        async with WriterHold(self._engine, self._outputs_thread, pack_id=pack_id) as hold:
            writer = PackWriter(self._engine, hold.lease, pack_id, lookups=hold.grant.has_records)
            ingestor = Ingestor(self._engine, writer, NO_REDACTION)
            try:
                for attempt in range(ATTEMPTS):
                    whole = msgspec.structs.replace(
                        event, stdout=await store_output(ingestor, stdout), stderr=await store_output(ingestor, stderr)
                    )
                    commit = await writer.finish()

                    async def enter(entered: Event = whole) -> Event:
                        return await self._engine.checkpoints.append_event(
                            self.claim,
                            entered,
                            lease=hold.lease,
                            commit=commit,  # noqa: B023 (called in this turn)
                        )

                    try:
                        stored = await _surely(enter)
                    except RecordsMissingError:
                        if attempt + 1 == ATTEMPTS:
                            raise
                        await writer.reopen(commit)
                    else:
                        hold.released = True
                        return stored
            finally:
                await writer.abandon()
        raise AssertionError("unreachable")
