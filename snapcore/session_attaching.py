"""Work by hand: a session in a sandbox that is there already, which is recorded and is no part of what a program replays."""

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from .addresses import shown_address
from .engine import Engine, finish
from .errors import CheckpointWriterConflictError, Code, ProviderError, SnapshotError, printable
from .leases import WriterHold
from .ledger import Claim, Event, EventKind, SpecRecord
from .model import validate_thread_id
from .playback import Playback
from .recording import Recorder, claim_thread, new_event_id
from .replay import Ledgers
from .sandboxes import Abilities, Binding, SandboxHandle, SandboxSpec, check_sandbox, lacks, run_hooks
from .session import Session
from .session_options import SessionOptions, scrubbed
from .session_spec import refuse_binding, refuse_secrets

if TYPE_CHECKING:
    from .sessions import Sessions

__all__ = ["attach_session", "sandbox_of"]


class _Attached:
    """What a session asks of a provider, for a sandbox that is somebody else's to make, pause and destroy."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def abilities(self) -> Abilities:
        return Abilities(exec=True)

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        raise self._lacks("made")

    async def open(self, binding: Binding) -> SandboxHandle:
        raise self._lacks("opened again")

    async def pause(self, handle: SandboxHandle) -> None:
        raise self._lacks("paused")

    async def snapshot(self, handle: SandboxHandle) -> str:
        raise self._lacks("copied")

    async def destroy(self, binding: Binding) -> None:
        raise self._lacks("destroyed")

    def _lacks(self, what: str) -> ProviderError:
        return lacks(self._name, f"be {what} by a session that was attached to one", "Use repo.session(provider, ...).")


async def attach_session(
    repository: "Sessions", handle: SandboxHandle, thread_id: str, options: SessionOptions, *, take_over: bool
) -> Session:
    """A session by hand in an open sandbox; see `Repository.attach`."""
    validate_thread_id(thread_id)
    refuse_secrets(options, thread_id)
    if not all(hasattr(handle, name) for name in ("exec", "binding", "abilities")):
        raise SnapshotError(
            f"{type(handle).__name__} runs no commands.", code=Code.INVALID_REQUEST, hint="Pass an address or a SandboxHandle."
        )
    engine = repository._engine
    with scrubbed(options.redactor):
        refuse_binding(options.redactor, handle.binding)
        async with _taken(engine, thread_id, handle, options, take_over=take_over) as (claim, opened, step):
            record = SpecRecord(workspace_root=handle.workspace_root)
            if opened is not None and opened.spec is not None:
                record = opened.spec
            recorder = Recorder(engine, claim)
            await run_hooks(options.on_open, handle, _nothing)
            event = Event(
                id=new_event_id(),
                kind=EventKind.OPENED,
                sandbox_id=handle.sandbox_id,
                binding=handle.binding,
                spec=record,
                step=step,
            )
            await recorder.append(event)
        return Session(
            repository,
            options,
            provider=_Attached(handle.binding.provider),
            recorder=recorder,
            handle=handle,
            spec=record,
            playback=Playback(None, ()),
            step=step,
            by_hand=True,
        )


async def sandbox_of(repository: "Sessions", thread_id: str) -> SandboxHandle:
    """The thread's sandbox, opened. Raises `ProviderError` `NO_SANDBOX` when the ledger has none."""
    from .registry import open_binding

    validate_thread_id(thread_id)
    event = await Ledgers(repository._engine.checkpoints).sandbox(thread_id)
    if event is None or event.binding is None:
        raise ProviderError(
            f"The ledger of thread {printable(thread_id)} has no sandbox.",
            code=Code.NO_SANDBOX,
            hint="Say which: an address, such as ./folder or docker://container/folder.",
        )
    handle: SandboxHandle = await open_binding(event.binding, repository._provider)
    try:
        check_sandbox(handle, event.sandbox_id, event.binding.provider)
    except BaseException:
        await finish(handle.close())
        raise
    return handle


@contextlib.asynccontextmanager
async def _taken(
    engine: Engine, thread_id: str, handle: SandboxHandle, options: SessionOptions, *, take_over: bool
) -> AsyncIterator[tuple[Claim, Event | None, int]]:
    """The claim on a thread's ledger, the event that last opened its sandbox, and the step that it is at. A thread that is
    somebody else's is left alone."""
    async with WriterHold(engine, thread_id, wait=options.wait) as hold:
        ledgers = Ledgers(engine.checkpoints)
        opened = await ledgers.sandbox(thread_id)
        if opened is not None and opened.sandbox_id != handle.sandbox_id:
            known = printable(shown_address(opened.sandbox_id))
            raise SnapshotError(
                f"The sandbox of thread {printable(thread_id)} is {known}, and not this one.",
                code=Code.INVALID_REQUEST,
                hint="Name another thread; or leave the work here unrecorded (--no-record).",
            )
        if not take_over and await _in_use(ledgers, thread_id):
            raise CheckpointWriterConflictError(
                f"A session has thread {printable(thread_id)}, and has not let go of its sandbox.",
                hint="Wait until it is closed; if its process is gone, take the thread over (take_over=True, --take-over).",
            )
        line = await ledgers.present(thread_id, handle.sandbox_id)
        claim = await claim_thread(engine, hold.lease)
    yield claim, opened, line.step


async def _in_use(ledgers: Ledgers, thread_id: str) -> bool:
    """Whether a session has opened the thread's sandbox and not closed it."""
    trail = await ledgers.trail(thread_id)
    for sequence in range(len(trail), 0, -1):
        kind = trail.kind(sequence)
        if kind in (EventKind.CREATED, EventKind.OPENED, EventKind.RESUMED, EventKind.PAUSED, EventKind.CLOSED):
            return kind != EventKind.CLOSED
    return False


async def _nothing() -> None:
    """The handle is its owner's to close."""
