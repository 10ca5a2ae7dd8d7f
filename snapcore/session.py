"""A session: a sandbox at work for a thread, where what is done is recorded, and after a resume not done twice."""

import asyncio
import contextlib
import posixpath
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import msgspec

from .addresses import shown_address
from .capturing import CaptureRequest, capture, new_checkpoint_id
from .engine import Engine, finish
from .errors import CheckpointWriterLostError, Code, ProviderError, SnapcoreError, SnapshotError, printable
from .leases import WriterHold
from .ledger import Event, EventKind, Operation, Point, SpecRecord
from .model import Checkpoint, validate_thread_id
from .operations import checkpoint_operation, exec_operation, inner_path, write_operation
from .outputs import Writable, output_callback, read_output, settle_output, without_secrets
from .placement import refuse_own_files
from .playback import Playback
from .protocols import ProgressCallback
from .recording import Recorder, new_event_id
from .replay import Recorded, describe
from .sandboxes import (
    Binding,
    ExecResult,
    OutputCallback,
    SandboxHandle,
    SandboxProvider,
    argument_list,
    check_environment,
    check_path,
    check_place,
    check_result,
    check_sandbox,
    lacks,
    run_hooks,
)
from .session_options import SessionOptions, root_requests, scrubbed
from .session_spec import refuse_secrets

if TYPE_CHECKING:
    from .restoring import Receipt
    from .sessions import Sessions

__all__ = ["ExecOutcome", "Session"]

MAX_OUTPUT: Final = 16 << 20
# after these nothing of the command goes on, or it never began
_ENDED: Final = frozenset((Code.EXEC_TIMEOUT, Code.NOT_CAPABLE, Code.INVALID_REQUEST, Code.MISSING_TOOL))


class ExecOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a command of a session ended. Its outputs are those in the ledger: without secrets, live as replayed. `truncated`:
    they were cut. `sequence` is the event's number in the ledger of the thread."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    replayed: bool = False
    sequence: int = 0


class Session:
    """Made by `Repository.session` and `Repository.resume`; close it, or use it with `async with`. Operations run one at a time.

    Each method raises `CheckpointWriterLostError` once another session has taken the thread, `ReplayDivergedError` for what is
    not the operation recorded at this place, and what the sandbox and the stores raise. A session that raised goes on.
    """

    def __init__(
        self,
        repository: "Sessions",
        options: SessionOptions,
        *,
        provider: SandboxProvider,
        recorder: Recorder,
        handle: SandboxHandle,
        spec: SpecRecord,
        playback: Playback,
        step: int,
        warnings: Sequence[str] = (),
        by_hand: bool = False,
    ) -> None:
        self._repository = repository
        self._engine: Engine = repository._engine
        self._options = options
        self._provider = provider
        self._recorder = recorder
        self._handle: SandboxHandle | None = handle
        self._binding = handle.binding
        self._sandbox_id = handle.sandbox_id
        self._spec = spec
        self._playback = playback
        self._by_hand = by_hand  # what is done is recorded, and neither counted as a step nor replayed
        self._lock = asyncio.Lock()
        self._state: Literal["open", "closed", "destroyed"] = "open"
        self._ending = False
        self._told = False  # the ledger knows that the session is over
        self.thread_id = recorder.claim.thread_id
        self.step = step
        self.warnings = list(warnings)
        self.failures: list[SnapcoreError] = []
        self.restored: Receipt | None = None
        self._saved: tuple[int, str] | None = None  # step and id of this session's newest checkpoint

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Session of {self.thread_id!r} in {shown_address(self._sandbox_id)!r}: {self._state}>"

    @property
    def handle(self) -> SandboxHandle:
        """The open sandbox; what is done with it directly is not recorded. Raises `ProviderError` when it is paused or closed."""
        self._check_open()
        if self._handle is None:
            raise ProviderError("The sandbox is paused.", hint="The session's next operation opens it again.")
        return self._handle

    @property
    def sandbox_id(self) -> str:
        """The sandbox's stable name, which `Repository.resume` takes too."""
        return self._sandbox_id

    @property
    def binding(self) -> Binding:
        """How to find the sandbox again without a session."""
        return self._binding

    @property
    def replaying(self) -> int:
        """How many recorded operations are still to come before work goes on live."""
        return self._playback.remaining

    @property
    def uncertain(self) -> tuple[Event, ...]:
        """Operations that began and of which nobody knows whether they ended: run again only with `rerun`."""
        return self._playback.uncertain

    # ---- operations

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        on_output: "OutputCallback | Writable | None" = None,
        max_output: int = MAX_OUTPUT,
        affects: bool = True,
        outside: bool | None = None,
        at_most_once: bool = False,
        rerun: bool = False,
    ) -> ExecOutcome:
        """Run a command (a text: by `sh -c`) to its end, or return how it ended when it is recorded at this place.

        It runs in the workspace root, from where `cwd` is taken too. `on_output` is called with `"stdout"` or `"stderr"` and a
        piece of output as it comes, or is something to write the bytes to. `affects=False` says that the command changes nothing
        worth a checkpoint. `outside=True` says that it changes what lies outside of the captured roots: it is run again in a
        sandbox that was made anew; `False` that it does not.
        `at_most_once` keeps it from being run again, also when nobody knows whether it was run; `rerun` permits the latter.

        Raises what `SandboxHandle.exec` does, `EXEC_TIMEOUT` also when that is recorded; `ReplayDivergedError`
        `OPERATION_UNCERTAIN` for an operation that may have been run and is not permitted to be run again.
        """
        async with self._working():
            argument_list(command)
            check_environment(environment or {})
            check_place(cwd, user)
            sink = output_callback(on_output)
            operation = await self._engine.run(
                exec_operation,
                self._options.redactor,
                command,
                root=self._binding.workspace_root,
                stdin=stdin,
                cwd=cwd,
                environment=environment,
                user=user,
            )
            recorded = await self._playback.match(operation)
            if recorded is not None and not recorded.fresh:
                return await self._replayed(recorded, sink)
            reruns = recorded.event.id if recorded is not None else self._playback.permit(operation, rerun=rerun)
            handle = await self._live()
            # what is done once more in its place has been counted
            affects = affects and recorded is None and not self._by_hand
            started = await self._begin(operation, recorded, reruns=reruns, outside=outside, at_most_once=at_most_once)
            try:
                given = await handle.exec(
                    command,
                    stdin=stdin,
                    cwd=cwd,
                    environment=environment,
                    user=user,
                    timeout=timeout,
                    on_output=sink,
                    max_output=max_output + self._options.redactor.reach,
                )
                result = check_result(given, self._provider.name)
            except SnapcoreError as error:
                if error.code in _ENDED:
                    self._passed(recorded)
                    await self._complete(started, ExecResult(-1), error=str(error.code), affects=affects)
                    self._playback.told()
                raise
            clean = await self._engine.run(without_secrets, self._options.redactor, result, max_output)
            outcome = await self._ended(started, recorded, clean, affects=affects)
            await settle_output(on_output)
            await self._stepped(affects=affects)
            self._playback.told()
            return outcome

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Create or replace a file, and the folders that lead to it; `path` is absolute, or taken from the workspace root."""
        content = _content(data)
        async with self._working():
            root = self._binding.workspace_root
            target = check_path(posixpath.join(root, path))
            operation = await self._engine.run(write_operation, self._options.redactor, path, content, root=root)
            recorded = await self._playback.match(operation)
            if recorded is not None and not recorded.fresh:
                self._playback.consume(recorded)
                return
            handle = await self._live()
            await self._recorder.check()
            await _make_parents(handle, target)
            await handle.upload(target, content)
            affects = recorded is None and not self._by_hand
            self.step += affects
            written = self._event(
                EventKind.FILE_WRITTEN,
                operation=operation,
                outside=not self._in_roots(target),
                reruns=recorded.event.id if recorded is not None else self._playback.permit(operation, rerun=True),
                drops=None if recorded is not None else self._leave(operation),
            )
            self._passed(recorded)
            self._playback.written(written)
            await self._recorder.complete(written)
            self._playback.left()
            await self._stepped(affects=affects)
            self._playback.told()

    async def checkpoint(
        self,
        label: str | None = None,
        *,
        native: bool = False,
        conversation: Any = None,
        artifacts: Mapping[str, bytes] | None = None,
        run_id: str | None = None,
        skip_unchanged: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> Checkpoint:
        """Capture the sandbox as the next checkpoint of the thread; at its recorded place, return the one that was made then.

        `native` takes the provider's own snapshot too, from which a resume on that provider starts: it holds what lies outside of
        the captured roots. `conversation`, `artifacts` and `run_id` are saved with the checkpoint, as by `Repository.capture`.
        `skip_unchanged` returns the thread's newest checkpoint when its content is the same. `on_progress` is told how far the
        capture is.
        """
        async with self._working():
            operation = checkpoint_operation(self._options.redactor, label)
            recorded = await self._playback.match(operation)
            if recorded is not None and (kept := await self._recorded_checkpoint(recorded)) is not None:
                return kept
            return await self._checkpoint_locked(
                label,
                automatic=self._by_hand,
                native=native,
                conversation=conversation,
                artifacts=artifacts,
                run_id=run_id,
                skip_unchanged=skip_unchanged,
                on_progress=on_progress,
            )

    async def list_checkpoints(self) -> list[Checkpoint]:
        """The thread's checkpoints, oldest first."""
        return await self._engine.checkpoints.checkpoints(self.thread_id)

    async def fork(
        self,
        to_thread_id: str,
        *,
        provider: SandboxProvider | None = None,
        label: str | None = None,
        native: bool = False,
    ) -> "Session":
        """Capture the sandbox, and start the empty thread `to_thread_id` from there in a sandbox of its own, by `provider` if it
        is to be another. The two know nothing of each other. `native` as for `checkpoint`. When that sandbox cannot be made, the
        thread is there all the same: `Repository.resume` makes another."""
        from .session_opening import fork_session

        validate_thread_id(to_thread_id)
        async with self._working():
            refuse_secrets(self._options, to_thread_id)
            checkpoint = await self._checkpoint_locked(label, automatic=True, native=native)
            return await fork_session(self, checkpoint, to_thread_id, provider or self._provider)

    # ---- the sandbox

    async def pause(self) -> None:
        """Stop the sandbox, keeping its files; the next operation opens it again. Raises `ProviderError` `NOT_CAPABLE`."""
        async with self._working():
            if not self._provider.abilities.pause:
                raise lacks(self._provider.name, "be paused", "close() leaves the sandbox as it is.")
            await finish(self._pause_locked())

    async def close(self) -> None:
        """Let go of the sandbox, which lives on: `Repository.session` opens it again. Idempotent."""
        await self._end(destroy=False)

    async def destroy(self) -> None:
        """Close the session and end the sandbox. What no checkpoint holds is lost. Idempotent."""
        await self._end(destroy=True)

    # ---- parts

    @contextlib.asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        with scrubbed(self._options.redactor):
            async with self._lock:
                self._check_open()
                yield

    def _check_open(self) -> None:
        if self._state != "open":
            raise ProviderError(
                f"The session of thread {self.thread_id} is closed.",
                code=Code.SANDBOX_UNAVAILABLE,
                hint="Open another: repo.session(...), or repo.resume(...).",
            )

    def _event(self, kind: str, **fields: Any) -> Event:
        fields.setdefault("automatic", self._by_hand and "operation" in fields)
        return Event(id=new_event_id(), kind=kind, sandbox_id=self._sandbox_id, step=self.step, **fields)

    def _leave(self, operation: Operation) -> Point | None:
        """Where work that is live from here leaves what is recorded, if it does."""
        before = self._playback.remaining
        left = self._playback.leave()
        if left is not None and before:
            self.warnings.append(f"{describe(operation)} is not what was recorded here: the rest, {before}, is not replayed.")
        return left

    def _passed(self, recorded: Recorded | None) -> None:
        """A recorded operation that was run live has ended: not before, so that one that failed can be tried again."""
        if recorded is not None:
            self._playback.consume(recorded)

    async def _replayed(self, recorded: Recorded, target: OutputCallback | None) -> ExecOutcome:
        """What a recorded command came to."""
        event = recorded.event
        stdout = await read_output(self._engine, event.stdout)
        stderr = await read_output(self._engine, event.stderr)
        self._playback.consume(recorded)
        if target is not None:
            for stream, data in (("stdout", stdout), ("stderr", stderr)):
                if data:
                    target(stream, data)
        if event.exit_code is None:
            code = Code.__members__.get(event.error or "", Code.SANDBOX_UNAVAILABLE)
            kind = SnapshotError if code == Code.INVALID_REQUEST else ProviderError
            raise kind("The command did not come to its end when it was run; this is recorded.", code=code)
        return ExecOutcome(
            exit_code=event.exit_code,
            stdout=stdout,
            stderr=stderr,
            truncated=event.truncated,
            replayed=True,
            sequence=event.sequence,
        )

    async def _recorded_checkpoint(self, recorded: Recorded) -> Checkpoint | None:
        """The checkpoint that was made at this place. When it was deleted since, the newest before it, since the sandbox may be
        ahead of this place already; None when it is not: nothing more is to be replayed."""
        store, event = self._engine.checkpoints, recorded.event
        found = await store.get(event.thread_id, event.checkpoint_id or "")
        kept = await store.checkpoints(event.thread_id) if found is None else []
        self._playback.consume(recorded)
        if found is not None:
            return found
        self.warnings.append(f"Checkpoint {event.checkpoint_id}, made at this place, was deleted since.")
        if not self._playback.remaining:
            return None
        return next((c for c in reversed(kept) if c.created_at <= event.at), None) or await store.head(self.thread_id)

    async def _begin(
        self, operation: Operation, recorded: Recorded | None, *, reruns: str | None, outside: bool | None, at_most_once: bool
    ) -> Event:
        """Record that a command is about to be run."""
        starting = self._event(
            EventKind.EXEC_STARTED,
            operation=operation,
            outside=outside,
            at_most_once=at_most_once,
            reruns=reruns,
            drops=None if recorded is not None else self._leave(operation),
        )
        try:
            started = await self._recorder.append(starting)
        except asyncio.CancelledError:
            if self._recorder.wrote(starting):
                self._playback.cancelled(starting)
            raise
        self._playback.begin(started)
        if recorded is None:
            self._playback.left()
        return started

    async def _ended(self, started: Event, recorded: Recorded | None, result: ExecResult, *, affects: bool) -> ExecOutcome:
        """Record that a command came to its end, and how."""
        self._passed(recorded)
        ended = await self._complete(started, result, error=None, affects=affects)
        if recorded is not None and recorded.event.exit_code != result.exit_code:
            assert started.operation is not None
            self.warnings.append(
                f"Run again, {describe(started.operation)} ended with {result.exit_code}, otherwise than it did before."
            )
        return ExecOutcome(
            exit_code=result.exit_code,
            stdout=result.stdout,
            stderr=result.stderr,
            truncated=result.truncated,
            sequence=ended.sequence,
        )

    async def _complete(self, started: Event, result: ExecResult, *, error: str | None, affects: bool) -> Event:
        """Record how a command ended."""
        self.step += affects
        self._playback.end(started)
        return await self._recorder.complete(
            self._event(
                EventKind.EXEC_COMPLETED,
                operation=started.operation,
                outside=started.outside,
                at_most_once=started.at_most_once,
                started_id=started.id,
                exit_code=None if error is not None else result.exit_code,
                truncated=result.truncated,
                error=error,
            ),
            result.stdout,
            result.stderr,
        )

    async def _stepped(self, *, affects: bool) -> None:
        if affects and self._options.auto is not None:
            await self._options.auto.stepped(self)

    async def _live(self) -> SandboxHandle:
        """The open sandbox; a paused one is opened again."""
        if self._handle is None:
            # first: a worker that was superseded must not wake it
            await self._recorder.append(self._event(EventKind.OPENED, binding=self._binding, spec=self._spec))
            handle = await finish(self._provider.open(self._binding), undo=_close)
            await run_hooks((self._same, *self._options.on_open), handle, handle.close)
            self._handle = handle
        return self._handle

    async def _same(self, handle: SandboxHandle) -> None:
        check_sandbox(handle, self._sandbox_id, self._provider.name)

    async def _pause_locked(self) -> None:
        if self._handle is None:
            return
        # whoever takes the thread over needs its lease too, and so comes before the event or after the pause
        async with WriterHold(self._engine, self.thread_id, wait=self._options.wait) as hold:
            await self._recorder.append(self._event(EventKind.PAUSED, binding=self._binding))
            await self._engine.checkpoints.renew_writer(hold.lease)
            await self._provider.pause(self._handle)
            self._handle = None

    async def _checkpoint_locked(
        self,
        label: str | None,
        *,
        automatic: bool,
        native: bool = False,
        conversation: Any = None,
        artifacts: Mapping[str, bytes] | None = None,
        run_id: str | None = None,
        wait: float | None = None,
        skip_unchanged: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> Checkpoint:
        """Capture; a sandbox that is paused is opened for it, and paused again. The ledger says so in the same transaction.

        With `skip_unchanged`, the head is returned when it has the same content; the ledger then says that this place came to it
        again, so that a resume replays up to here.
        """
        paused = self._handle is None
        handle = await self._live()
        try:
            snapshot = await self._native_snapshot(handle) if native else None
            checkpoint_id = new_checkpoint_id()
            operation = None if automatic else checkpoint_operation(self._options.redactor, label)
            event = self._event(
                EventKind.CHECKPOINT,
                operation=operation,
                checkpoint_id=checkpoint_id,
                automatic=automatic,
                snapshot=snapshot,
                drops=None if operation is None else self._leave(operation),
            )
            roots = root_requests(handle, self._options.files, self._spec.roots)
            refuse_own_files(self._engine.blobs, self._engine.checkpoints, [root.workspace for root in roots])
            request = CaptureRequest(
                thread_id=self.thread_id,
                roots=roots,
                redactor=self._options.redactor,
                label=label,
                conversation=conversation,
                artifacts=artifacts or {},
                run_id=run_id,
                step=self.step,
                skip_unchanged=skip_unchanged,
                wait=self._options.wait if wait is None else wait,
                checkpoint_id=checkpoint_id,
                allow_any_root=self._options.allow_any_root,
                event=(self._recorder.claim, event),
                on_progress=on_progress,
            )
            report = await capture(self._engine, request)
            place = self.step, report.checkpoint.id
            if not report.created and self._saved != place:
                await self._recorder.append(msgspec.structs.replace(event, checkpoint_id=report.checkpoint.id))
            self._saved = place
            if not automatic:
                self._playback.left()
            return report.checkpoint
        finally:
            if paused:
                await finish(self._pause_locked())

    async def _native_snapshot(self, handle: SandboxHandle) -> str:
        await self._recorder.check()  # of a sandbox that is another's by now there is none to be taken
        return await self._provider.snapshot(handle)

    def _in_roots(self, path: str) -> bool:
        """Whether a file is part of what is captured, as far as its place tells."""
        root = self._binding.workspace_root
        folders = [posixpath.normpath(posixpath.join(root, folder)) for folder in self._spec.roots.values()] or [root]
        return any(not inner_path(path, folder).startswith("/") for folder in folders)

    async def _end(self, *, destroy: bool) -> None:
        with scrubbed(self._options.redactor):
            if self._state == "open" and not self._ending and self._options.auto is not None:
                self._ending = True
                await self._options.auto.ended(self)
            async with self._lock:
                await finish(self._destroy_locked() if destroy else self._close_locked())

    async def _close_locked(self) -> None:
        if self._told:
            return
        self._state = "closed"
        handle, self._handle = self._handle, None
        try:
            await self._recorder.append(self._event(EventKind.CLOSED))
        except CheckpointWriterLostError:
            # the sandbox is another's by now, and there is nothing to let go of
            self.warnings.append("Another session has taken the thread: what this one did last is not in the ledger.")
        finally:
            if handle is not None:
                await handle.close()
        self._told = True

    async def _destroy_locked(self) -> None:
        if self._state == "destroyed":
            return
        if not self._provider.abilities.destroy:  # before the ledger says that it is gone
            raise lacks(self._provider.name, "be destroyed", "close() leaves the sandbox as it is.")
        async with WriterHold(self._engine, self.thread_id, wait=self._options.wait) as hold:
            await self._recorder.append(self._event(EventKind.CLOSED, destroyed=True))
            await self._engine.checkpoints.renew_writer(hold.lease)
            await self._provider.destroy(self._binding)
        self._state = "destroyed"
        self._told = True
        handle, self._handle = self._handle, None
        if handle is not None:
            await handle.close()


def _content(data: bytes | str) -> bytes:
    try:
        return data.encode() if isinstance(data, str) else bytes(memoryview(data))
    except UnicodeEncodeError as error:
        raise SnapshotError(
            "The text of the file holds a lone surrogate.", code=Code.INVALID_REQUEST, hint="Encode it: data=text.encode(...)."
        ) from error


async def _make_parents(handle: SandboxHandle, path: str) -> None:
    """Make the folders that lead to a file."""
    folder = posixpath.dirname(path)
    if folder == posixpath.normpath(handle.workspace_root) or folder == "/":
        return
    made = await handle.exec(["mkdir", "-p", "--", folder])
    if made.exit_code:
        raise ProviderError(
            f"The folder {printable(folder)} cannot be made in the sandbox (mkdir: {made.exit_code}).", code=Code.NOT_CAPABLE
        )


async def _close(handle: SandboxHandle) -> None:
    await handle.close()
