"""How sessions begin: in the thread's sandbox, opened again, in a new one, or in a new one that a checkpoint is restored into."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from . import history
from .engine import Engine, finish
from .errors import Code, ProviderError, SnapcoreError, SnapshotError, printable
from .leases import WriterHold
from .ledger import Event, EventKind, Point, SpecRecord
from .model import Checkpoint, validate_thread_id
from .placement import refuse_own_files
from .playback import Playback
from .protocols import Workspace
from .recording import Recorder, claim_thread, new_event_id
from .replay import Ledgers, Line, Replay, describe
from .sandboxes import SandboxHandle, SandboxProvider, SandboxSpec, check_sandbox, run_hooks
from .session import Session
from .session_options import SessionOptions, root_requests, scrubbed
from .session_spec import choose_spec, is_of, refuse_binding, refuse_secrets, spec_record

if TYPE_CHECKING:
    from .restoring import Receipt
    from .sessions import Sessions

__all__ = ["create_session", "fork_session", "open_session", "resume_session"]

SHOWN: Final = 5  # operations in a warning


async def open_session(repository: "Sessions", provider: SandboxProvider, thread_id: str, options: SessionOptions) -> Session:
    """A session in the thread's sandbox, or in a new one; see `Repository.session`."""
    validate_thread_id(thread_id)
    refuse_secrets(options, thread_id)
    engine = repository._engine
    with scrubbed(options.redactor):
        recorder = await _take(engine, thread_id, options)
        ledgers = Ledgers(engine.checkpoints)
        present = await ledgers.sandbox(thread_id)
        if present is not None:
            session = await _reopened(repository, provider, options, recorder, ledgers, present)
            if session is not None:
                return await _begun(session)
        if await engine.checkpoints.head(thread_id) is not None:
            raise ProviderError(
                f"Thread {printable(thread_id)} has checkpoints and no sandbox that could be opened again.",
                code=Code.NO_SANDBOX,
                hint="repo.resume(thread_id) makes a new one and restores a checkpoint into it.",
            )
        return await _created(repository, provider, options, recorder, ledgers)


async def create_session(repository: "Sessions", provider: SandboxProvider, thread_id: str, options: SessionOptions) -> Session:
    """A session in a new sandbox with nothing restored into it, whatever the thread had before."""
    validate_thread_id(thread_id)
    refuse_secrets(options, thread_id)
    with scrubbed(options.redactor):
        recorder = await _take(repository._engine, thread_id, options)
        return await _created(repository, provider, options, recorder, Ledgers(repository._engine.checkpoints))


async def _created(
    repository: "Sessions", provider: SandboxProvider, options: SessionOptions, recorder: Recorder, ledgers: Ledgers
) -> Session:
    spec = options.spec or SandboxSpec()
    record = spec_record(spec, options)
    async with _new_sandbox(provider, spec, options) as (handle, _):
        root_requests(handle, options.files, record.roots)  # refuses what can be no root
        uncertain = await ledgers.uncertain(recorder.claim.thread_id)
        await run_hooks((*options.on_create, *options.on_open), handle, _nothing)
        await recorder.append(_event(EventKind.CREATED, handle, spec=record))
    playback = Playback(None, uncertain, rerun_uncertain=options.rerun_uncertain)
    return await _begun(
        Session(repository, options, provider=provider, recorder=recorder, handle=handle, spec=record, playback=playback, step=0)
    )


async def resume_session(
    repository: "Sessions",
    thread_or_sandbox_id: str,
    label: str | None,
    checkpoint_id: str | None,
    provider: SandboxProvider | None,
    options: SessionOptions,
) -> Session:
    """A session in a new sandbox that a checkpoint is restored into; see `Repository.resume`."""
    engine = repository._engine
    label = None if label is None else options.redactor.scrub_text(label)  # as it is stored
    with scrubbed(options.redactor):
        thread_id = await _thread_of(engine, thread_or_sandbox_id)
        refuse_secrets(options, thread_id)
        await _chosen(engine, thread_id, label, checkpoint_id)  # before the thread is taken from anybody
        recorder = await _take(engine, thread_id, options)
        # the one that had the thread may have captured since
        checkpoint = await _chosen(engine, thread_id, label, checkpoint_id)
        ledgers = Ledgers(engine.checkpoints)
        line = await _line(ledgers, checkpoint, options)
        uncertain = await ledgers.uncertain(thread_id, line)
        made = line.sandbox
        provider = provider or repository._provider(None if made is None or made.binding is None else made.binding.provider)
        warnings: list[str] = []
        spec, record = choose_spec(options, provider, made, warnings)
        snapshot = line.snapshot if made is not None and is_of(made, provider) else None
        async with _new_sandbox(provider, spec, options, snapshot, warnings) as (handle, started_from):
            await run_hooks(options.on_create, handle, _nothing)
            receipt = await _restored(engine, options, handle, checkpoint, record)
            await run_hooks(options.on_open, handle, _nothing)
            replay = Replay(ledgers, line, keeps_outside=started_from is not None)
            warnings += await _may_be_missing(ledgers, line, replay, options)
            event = _event(
                EventKind.RESUMED,
                handle,
                spec=record,
                checkpoint_id=checkpoint.id,
                step=line.step,
                snapshot=started_from,
                continues=line.point,
            )
            await recorder.append(event)
        session = Session(
            repository,
            options,
            provider=provider,
            recorder=recorder,
            handle=handle,
            spec=record,
            playback=_playback(replay, uncertain, options),
            step=line.step,
            warnings=warnings,
        )
        session.restored = receipt
        return await _begun(session)


async def fork_session(session: Session, checkpoint: Checkpoint, to_thread_id: str, provider: SandboxProvider) -> Session:
    """A second sandbox, for a new thread that begins with a checkpoint of the session's. It goes on from there: nothing is
    replayed."""
    repository, options = session._repository, session._options
    await history.fork(repository._engine, session.thread_id, checkpoint.id, to_thread_id)
    spec = options.spec if options.spec is not None and provider is session._provider else None
    own = dataclasses.replace(
        options, replay="off", spec=None if spec is None else msgspec.structs.replace(spec, name=None, snapshot=None)
    )
    return await resume_session(repository, to_thread_id, None, None, provider, own)


# ------------------------------------------------------------------------------------------------------------- parts


async def _take(engine: Engine, thread_id: str, options: SessionOptions) -> Recorder:
    """Take the thread from whoever has it, unless that one is in the middle of a capture or a pause."""
    async with WriterHold(engine, thread_id, wait=options.wait) as hold:
        return Recorder(engine, await claim_thread(engine, hold.lease))


async def _line(ledgers: Ledgers, checkpoint: Checkpoint, options: SessionOptions) -> Line:
    """What led to the checkpoint; nothing, when nobody knows and nothing is to be replayed."""
    try:
        return await ledgers.line(checkpoint)
    except SnapshotError as error:
        if error.code != Code.MISSING_CHECKPOINT or options.replay != "off":
            raise
        return Line(Point(checkpoint.thread_id, 0), [])


async def _begun(session: Session) -> Session:
    """The session, once what captures by itself has begun."""
    if session._options.auto is not None:
        try:
            await session._options.auto.started(session)
        except BaseException:
            await finish(session.close())
            raise
    return session


async def _reopened(
    repository: "Sessions",
    provider: SandboxProvider,
    options: SessionOptions,
    recorder: Recorder,
    ledgers: Ledgers,
    present: Event,
) -> Session | None:
    """A session in the thread's sandbox; None when it is gone, and the ledger says so now."""
    assert present.binding is not None
    if present.binding.provider != provider.name:
        raise ProviderError(
            f"The sandbox of thread {printable(recorder.claim.thread_id)} is one of {printable(present.binding.provider)}.",
            code=Code.NO_SANDBOX,
            hint="Pass that provider, or move on to this one: repo.resume(thread_id, provider=...).",
        )
    try:
        handle = await finish(provider.open(present.binding), undo=_close)
    except ProviderError as error:
        if error.code != Code.NO_SANDBOX:
            raise
        gone = Event(id=new_event_id(), kind=EventKind.CLOSED, sandbox_id=present.sandbox_id, destroyed=True)
        await recorder.append(gone)
        return None
    record = present.spec or SpecRecord()
    if options.roots is not None:
        record = msgspec.structs.replace(record, roots=dict(options.roots))
    try:
        check_sandbox(handle, present.sandbox_id, provider.name)
        line = await ledgers.present(recorder.claim.thread_id, present.sandbox_id)
        uncertain = await ledgers.uncertain(recorder.claim.thread_id, line)
        await run_hooks(options.on_open, handle, _nothing)
        await recorder.append(_event(EventKind.OPENED, handle, spec=record, step=line.step))
    except BaseException:
        await finish(handle.close())
        raise
    return Session(
        repository,
        options,
        provider=provider,
        recorder=recorder,
        handle=handle,
        spec=record,
        playback=_playback(Replay(ledgers, line, keeps_outside=True), uncertain, options),
        step=line.step,
    )


@contextlib.asynccontextmanager
async def _new_sandbox(
    provider: SandboxProvider,
    spec: SandboxSpec,
    options: SessionOptions,
    snapshot: str | None = None,
    warnings: list[str] | None = None,
) -> AsyncIterator[tuple[SandboxHandle, str | None]]:
    """A sandbox that is destroyed when the block fails, and `snapshot` when it started from that."""

    async def remove(handle: SandboxHandle) -> None:
        await handle.close()
        await provider.destroy(handle.binding)

    handle = None
    if snapshot is not None and spec.snapshot is None:
        try:
            handle = await finish(provider.create(msgspec.structs.replace(spec, snapshot=snapshot)), undo=remove)
        except ProviderError as error:
            if error.code != Code.NO_SANDBOX or warnings is None:
                raise
            warnings.append(f"The native snapshot {printable(snapshot)} is gone; the sandbox was made from its image.")
            snapshot = None
    if handle is None:
        snapshot = None  # one that the spec names is of another place
        handle = await finish(provider.create(spec), undo=remove)
    try:
        refuse_binding(options.redactor, handle.binding)
        yield handle, snapshot
    except BaseException as error:
        try:
            await finish(remove(handle))
        except SnapcoreError as second:
            error.add_note(f"Afterwards: {second}")
        raise


def _playback(replay: Replay, uncertain: Iterable[Event], options: SessionOptions) -> Playback:
    return Playback(
        replay if options.replay != "off" else None,
        uncertain,
        strict=options.replay == "strict",
        rerun_uncertain=options.rerun_uncertain,
    )


async def _restored(
    engine: Engine, options: SessionOptions, handle: SandboxHandle, checkpoint: Checkpoint, record: SpecRecord
) -> "Receipt":
    """Restore a checkpoint into a sandbox that is new, so that nothing there needs to be spared."""
    from .restoring import RestoreRequest, restore

    places = _places(handle, checkpoint, record.roots)
    refuse_own_files(engine.blobs, engine.checkpoints, places.values())
    portable = all(root.policy.portable for root in checkpoint.roots)
    request = RestoreRequest(
        checkpoint=checkpoint,
        roots=places,
        redactor=options.redactor,
        policy=None if portable else options.policy,
        reinject=options.reinject,
        allow_empty=True,
        allow_any_root=options.allow_any_root,
    )
    return await restore(engine, request)


async def _may_be_missing(ledgers: Ledgers, line: Line, replay: Replay, options: SessionOptions) -> list[str]:
    """What a sandbox that was made anew lacks, or may lack, of what was done before."""
    told = []
    if options.replay == "off":
        fresh = [await ledgers.event(line.point_of(place)) for place in replay.places() if replay.is_fresh(place)]
        if fresh:
            told.append(f"These operations reach outside of the captured roots, and are not run again: {_listed(fresh)}.")
    if unsaid := await replay.unsaid(SHOWN + 1):
        told.append(
            f"What these operations changed outside of the captured roots, if anything, is not here: {_listed(unsaid)}."
            " Say outside=True or outside=False, or take checkpoints with native=True."
        )
    return told


def _listed(events: Sequence[Event]) -> str:
    shown = ", ".join(describe(event.operation) for event in events[:SHOWN] if event.operation is not None)
    return f"{shown}, ..." if len(events) > SHOWN else shown


def _places(handle: SandboxHandle, checkpoint: Checkpoint, roots: Mapping[str, str]) -> dict[str, Workspace]:
    """Where each root goes: as declared; the only one there is, without a declaration, to the workspace root."""
    if len(checkpoint.roots) == 1:
        name = checkpoint.roots[0].name
        return {name: handle.workspace(roots.get(name))}
    lacking = sorted(root.name for root in checkpoint.roots if root.name not in roots)
    if lacking:
        raise SnapshotError(
            f"The checkpoint has several roots, and nobody says where {printable(', '.join(lacking))} goes.",
            code=Code.INVALID_REQUEST,
            hint="Say where each goes: roots={name: path}.",
        )
    return {root.name: handle.workspace(roots[root.name]) for root in checkpoint.roots}


async def _thread_of(engine: Engine, name: str) -> str:
    """The thread of that id, or the one that had a sandbox of that id."""
    validate_thread_id(name)
    store = engine.checkpoints
    if await store.head(name) is None and not await store.events(name, limit=1):
        return await store.sandbox_thread(name) or name
    return name


async def _chosen(engine: Engine, thread_id: str, label: str | None, checkpoint_id: str | None) -> Checkpoint:
    if label is not None and checkpoint_id is not None:
        raise SnapshotError("Give either label or checkpoint_id.", code=Code.INVALID_REQUEST)
    store = engine.checkpoints
    if checkpoint_id is not None:
        found = await store.get(thread_id, checkpoint_id)
    elif label is not None:
        found = await store.by_label(thread_id, label)
    else:
        found = await store.head(thread_id)
    if found is None:
        raise history.missing(thread_id, checkpoint_id or (f"label:{label}" if label is not None else None))
    return found


def _event(kind: str, handle: SandboxHandle, **fields: Any) -> Event:
    return Event(id=new_event_id(), kind=kind, sandbox_id=handle.sandbox_id, binding=handle.binding, **fields)


async def _close(handle: SandboxHandle) -> None:
    await handle.close()


async def _nothing() -> None:
    """Nothing to undo here: whoever called does that."""
