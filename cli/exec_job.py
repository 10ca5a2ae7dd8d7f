"""What `exec` does around its command: it opens the sandbox, restores, takes checkpoints, and hands output on."""

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from snapcore.errors import Code, SnapcoreError, SnapshotError, printable

from .progress import progress
from .runtime import Invocation, UsageError, interruptible, resolve

if TYPE_CHECKING:
    from snapcore.model import Checkpoint
    from snapcore.protocols import ProgressCallback
    from snapcore.repository import Repository
    from snapcore.sandboxes import ExecResult, SandboxHandle
    from snapcore.selection import FilePolicy
    from snapcore.session import ExecOutcome, Session

__all__ = ["Job"]


class _Place(Protocol):
    """An open sandbox, where a command is run and checkpoints are made."""

    @property
    def handle(self) -> "SandboxHandle": ...

    async def exec(self, *words: Any, **options: Any) -> "ExecResult | ExecOutcome": ...

    async def checkpoint(
        self, label: str | None, *, skip_unchanged: bool, on_progress: "ProgressCallback | None"
    ) -> "Checkpoint": ...


class _Unrecorded:
    """Without a session: no ledger has what is done. `capture` are options for checkpoints."""

    def __init__(self, handle: Any, repo: "Repository | None" = None, **capture: Any) -> None:
        if not hasattr(handle, "exec"):
            raise SnapshotError("This sandbox runs no commands.", code=Code.NOT_CAPABLE)
        self.handle = handle
        self._repo = repo
        self._capture = capture

    async def exec(self, words: Sequence[str], **options: Any) -> "ExecResult":
        """See `SandboxHandle.exec`; nothing of the output is kept."""
        result: ExecResult = await self.handle.exec(words, max_output=0, **options)
        return result

    async def checkpoint(
        self, label: str | None, *, skip_unchanged: bool, on_progress: "ProgressCallback | None"
    ) -> "Checkpoint":
        """Capture the sandbox; with `skip_unchanged` the head is returned when it is the same."""
        assert self._repo is not None
        how = {**self._capture, "label": label, "skip_unchanged": skip_unchanged, "on_progress": on_progress}
        return await self._repo.capture(self.handle, **how)


@dataclass(slots=True)
class Job:
    """One command. `options` are those of `SandboxHandle.exec`; `after` says that a checkpoint is made afterwards."""

    invocation: Invocation
    sandbox: str | None
    thread: str | None
    words: Sequence[str]
    options: Mapping[str, Any]
    secrets: Mapping[str, bytes] | None
    restore: str | None
    before: bool
    after: bool
    label: str | None
    always: bool
    step: int | None
    record: bool
    take_over: bool
    wait: float | None
    _told: dict[str, Any] = field(default_factory=dict)
    _unfinished: bool = False  # the command wrote to a terminal, and no line break in the end

    async def run(self) -> int:
        """Do it all; the command's exit code."""
        started = time.monotonic()
        async with self._place() as (place, repo):
            if repo is not None:
                await self._prepare(place, repo)
            code = await self._command(place)
        if self.invocation.json:
            fields = {"message_type": "exec", "thread_id": self.thread, "exit_code": code, **self._told}
            self._say(json.dumps({**fields, "seconds": round(time.monotonic() - started, 3)}))
        return code if 0 <= code <= 255 else code & 255 or 1

    @contextlib.asynccontextmanager
    async def _place(self) -> "AsyncIterator[tuple[_Place, Repository | None]]":
        """The open sandbox, and the repository when there is anything to do with it."""
        stores = self.before or self.after
        if self.thread is None or not (self.record or stores or self.restore is not None):
            async with _connected(self.sandbox) as handle:
                yield _Unrecorded(handle), None
            return
        async with self.invocation.repository() as repo:
            policy = await self._policy(repo, self.thread) if stores else None
            if self.record:
                async with await self._session(repo, self.thread, policy) as session:
                    yield session, repo
                return
            capture = {"thread_id": self.thread, "policy": policy, "secrets": self.secrets, "step": self.step, "wait": self.wait}
            async with _connected(self.sandbox) as handle:
                yield _Unrecorded(handle, repo, **capture), repo

    async def _session(self, repo: "Repository", thread: str, policy: "FilePolicy | None") -> "Session":
        session = await repo.attach(
            self.sandbox, thread_id=thread, take_over=self.take_over, policy=policy, secrets=self.secrets, wait=self.wait
        )
        if self.step is not None:
            session.step = self.step
        return session

    async def _policy(self, repo: "Repository", thread: str) -> "FilePolicy":
        """Which files the checkpoints hold: those that the thread's newest one does; in a new thread, as in `capture`."""
        from snapcore.selection import FilePolicy

        head = await repo.get(thread)
        if head is None:
            return self.invocation.policy()
        if len(head.roots) != 1:
            raise UsageError(
                f"The checkpoints of thread {printable(thread)} hold several folders.",
                hint="Use 'snapcore restore' and 'snapcore capture' with --root before and after.",
            )
        return FilePolicy.from_record(head.roots[0].policy)

    async def _prepare(self, place: _Place, repo: "Repository") -> None:
        if self.before:
            await self._checkpoint(place, "before_id", None, skip_unchanged=True)
        if self.restore is not None:
            assert self.thread is not None
            found = await resolve(repo, self.restore, self.thread)
            with progress(self.invocation, "restore") as on_progress:
                await repo.restore(place.handle, thread_id=self.thread, checkpoint_id=found.id, on_progress=on_progress)
            self._told["restored_id"] = found.id

    async def _command(self, place: _Place) -> int:
        try:
            result = await place.exec(self.words, on_output=self._hand_on, **self.options)
        except _OutputError as error:
            raise error.cause from None
        except SnapcoreError as error:
            if error.code is Code.EXEC_TIMEOUT and self.always:
                await self._checkpoint(place, "checkpoint_id", self.label)
            raise
        sequence = getattr(result, "sequence", None)
        if sequence:
            self._told["sequence"] = sequence
        if self.after and (self.always or not result.exit_code):
            await self._checkpoint(place, "checkpoint_id", self.label)
        return result.exit_code

    async def _checkpoint(self, place: _Place, key: str, label: str | None, *, skip_unchanged: bool = False) -> None:
        with progress(self.invocation, "checkpoint", first=self._finish_line) as on_progress:
            made = await place.checkpoint(label, skip_unchanged=skip_unchanged, on_progress=on_progress)
        self._told[key] = made.id
        if self.invocation.tells:
            when = "before" if key == "before_id" else "after"
            self._say(f"snapcore: checkpoint {made.id} holds what was there {when} the command")

    def _say(self, line: str) -> None:
        """A line on stderr: stdout is the command's."""
        self._finish_line()
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def _hand_on(self, stream: str, piece: bytes) -> None:
        """Output as it comes, byte for byte. When nobody reads it any more, or a signal comes while it is read slowly, the
        command is ended."""
        target = sys.stdout if stream == "stdout" else sys.stderr
        try:
            with interruptible():
                target.flush()
                _write(target, piece)
        except OSError as error:
            raise _OutputError(error) from error
        if piece and target.isatty():
            self._unfinished = not piece.endswith(b"\n")

    def _finish_line(self) -> None:
        """Before anything else is told on a terminal: end the line that the command left there."""
        if self._unfinished and sys.stderr.isatty():
            sys.stderr.write("\n")
        self._unfinished = False


@contextlib.asynccontextmanager
async def _connected(address: str | None) -> AsyncIterator[Any]:
    import snapcore

    assert address is not None  # without a session, a sandbox was named
    handle = await snapcore.connect(address)
    try:
        yield handle
    finally:
        await handle.close()


class _OutputError(Exception):
    """This process's own output failed, for which a provider must not take the blame."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _write(target: TextIO, piece: bytes) -> None:
    """Write past Python's buffer: what could not be written would stay in there, and block the process when it ends."""
    try:
        fd = target.fileno()
    except (OSError, ValueError):  # no file
        target.buffer.write(piece)
        return
    rest = memoryview(piece)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # whoever shares it made it so
            select.select([], [fd], [])
