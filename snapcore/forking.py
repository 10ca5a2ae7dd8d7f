"""Fork at a step: which checkpoint that is, and what it lacks of the work up to there."""

import posixpath
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from . import history
from .engine import Engine
from .errors import Code, SnapshotError, printable
from .ledger import Event, EventKind, Operation, Point
from .model import Checkpoint, validate_thread_id
from .replay import Ledgers, Line

if TYPE_CHECKING:
    from .session import ExecOutcome, Session

__all__ = ["ForkReport", "RunAgain", "Uncovered", "fork_with_report"]

_REDACTED: Final = "{secret:"
_NO_TEXT: Final = "\\udc"  # how an operation shows a byte of an argument that is no text


class Uncovered(msgspec.Struct, frozen=True):
    """An operation that the checkpoint of a fork does not cover, by the event that tells of it. `reason` says why it cannot be
    run again from the ledger; empty when it can."""

    event: Event
    reason: str = ""


class RunAgain(msgspec.Struct, frozen=True):
    """What came of running operations again: the outcomes of the first, and those that were left, each with the reason."""

    done: "tuple[ExecOutcome, ...]" = ()
    left: tuple[Uncovered, ...] = ()


@dataclass(frozen=True, slots=True)
class ForkReport:
    """A fork: its first checkpoint, the one that it is a copy of, and which affecting operations between that and the step asked
    for it lacks, in order."""

    checkpoint: Checkpoint
    source: Checkpoint
    at_step: int | None = None
    uncovered: tuple[Uncovered, ...] = ()

    async def run_again(self, session: "Session") -> RunAgain:
        """Run what is not covered in a session of the fork, in order, up to the first that cannot be run again or ends with
        another exit code than it did. What comes after such a one is left: it would meet files that never were.

        Raises what `Session.exec` does: `ReplayDivergedError` in a session that has recorded operations still to come.
        """
        done: list[ExecOutcome] = []
        for place, item in enumerate(self.uncovered):
            if item.reason:
                return RunAgain(tuple(done), self._left(place))
            outcome = await _run(session, item.event)
            done.append(outcome)
            if outcome.exit_code != item.event.exit_code:
                return RunAgain(tuple(done), self._left(place + 1))
        return RunAgain(tuple(done))

    def _left(self, place: int) -> tuple[Uncovered, ...]:
        after = "it comes after one that was not run again, or ended otherwise"
        return tuple(msgspec.structs.replace(item, reason=item.reason or after) for item in self.uncovered[place:])


async def fork_with_report(
    engine: Engine,
    thread_id: str,
    checkpoint_id: str | None,
    to_thread_id: str,
    *,
    at_step: int | None = None,
    new_id: str | None = None,
) -> ForkReport:
    """Start the empty thread `to_thread_id` from a checkpoint; see `Repository.fork_with_report`."""
    if at_step is None:
        return await _forked(engine, thread_id, checkpoint_id, to_thread_id, new_id)
    if checkpoint_id is not None:
        raise SnapshotError("Give either checkpoint_id or at_step.", code=Code.INVALID_REQUEST)
    validate_thread_id(thread_id)
    ledgers = Ledgers(engine.checkpoints)
    line = await _present(ledgers, thread_id)
    source, after = await _source(engine, ledgers, line, thread_id, at_step)
    report = await _forked(engine, thread_id, source.id, to_thread_id, new_id)
    lacking = () if line is None else tuple([item async for item in _uncovered(ledgers, line, thread_id, after, at_step)])
    return ForkReport(report.checkpoint, source, at_step, lacking)


async def _forked(engine: Engine, thread_id: str, checkpoint_id: str | None, to_thread_id: str, new_id: str | None) -> ForkReport:
    root = await history.fork(engine, thread_id, checkpoint_id, to_thread_id, new_id=new_id)
    return ForkReport(root, await _copied(engine, root))


async def _copied(engine: Engine, root: Checkpoint) -> Checkpoint:
    assert root.source_thread_id is not None
    assert root.source_id is not None
    # deleted in this moment: the copy tells the same
    return await engine.checkpoints.get(root.source_thread_id, root.source_id) or root


async def _present(ledgers: Ledgers, thread_id: str) -> Line | None:
    """The thread's present line of work; None when it has no ledger."""
    last = len(await ledgers.trail(thread_id))
    if not last:
        return None
    return await ledgers.present(thread_id, (await ledgers.event(Point(thread_id, last))).sandbox_id)


async def _source(engine: Engine, ledgers: Ledgers, line: Line | None, thread_id: str, at_step: int) -> tuple[Checkpoint, int]:
    """The newest checkpoint at or before a step of the present line of work, and the event of the thread up to which it covers
    all. Checkpoints of a line that was abandoned do not count; those that no ledger tells of do, by the step they were given."""
    trail = await ledgers.trail(thread_id)
    kept = await engine.checkpoints.checkpoints(thread_id)
    found: list[tuple[int, int, Checkpoint]] = [
        (c.created_at, trail.last_until(c.created_at), c)
        for c in kept
        if c.step is not None and c.step <= at_step and not trail.of_checkpoint(c.id)
    ]
    by_id = {c.id: c for c in kept}
    for sequence in _checkpoint_events(line, thread_id):
        step = trail.step(sequence)
        if step is None or step > at_step:
            continue
        event = await ledgers.event(Point(thread_id, sequence))
        if event.checkpoint_id in by_id:
            found.append((event.at, sequence, by_id[event.checkpoint_id]))
            break
    if not found:
        raise SnapshotError(
            f"Thread {printable(thread_id)} has no checkpoint at or before step {at_step}.",
            code=Code.MISSING_CHECKPOINT,
            hint=f"'snapcore log {printable(thread_id)}' shows the steps of its checkpoints.",
        )
    _, sequence, source = max(found, key=lambda item: item[:2])
    return source, sequence


def _checkpoint_events(line: Line | None, thread_id: str) -> list[int]:
    """The checkpoint events of the thread on the line, newest first."""
    return [
        sequence
        for part in reversed(line.parts if line is not None else [])
        if part.trail.thread_id == thread_id
        for sequence in reversed(list(part.trail.events_of(part.owner, part.until)))
        if part.trail.kind(sequence) == EventKind.CHECKPOINT
    ]


async def _uncovered(ledgers: Ledgers, line: Line, thread_id: str, after: int, at_step: int) -> AsyncIterator[Uncovered]:
    """The affecting operations of the line after an event of the thread, up to a step."""
    trail = await ledgers.trail(thread_id)
    ended = [point.sequence for point in map(line.point_of, range(len(line))) if point.thread_id == thread_id]
    begun = [
        sequence
        for part in line.parts
        if part.trail is trail
        for sequence in part.trail.events_of(part.owner, part.until)
        if trail.kind(sequence) == EventKind.EXEC_STARTED and not trail.partner(sequence)
    ]
    for sequence in sorted(ended + begun):
        began = trail.partner(sequence)
        step = trail.step(sequence) or 0
        unended = trail.kind(sequence) == EventKind.EXEC_STARTED
        if sequence <= after or step + unended > at_step or trail.kind(sequence) == EventKind.CHECKPOINT:
            continue
        if began and trail.step(began) == step:
            continue  # it was said to affect nothing
        event = await ledgers.event(Point(thread_id, sequence))
        yield Uncovered(event, _why_not(event, event.operation or Operation(kind="")))


def _why_not(event: Event, operation: Operation) -> str:
    """Why an operation cannot be run again from what the ledger has of it; empty when it can."""
    if event.kind == EventKind.EXEC_STARTED:
        return "nobody knows whether it was run"
    if event.kind == EventKind.FILE_WRITTEN:
        return "what was written is not in the ledger"
    if event.at_most_once:
        return "it is to be run at most once"
    if event.exit_code is None:
        return "it did not come to its end"
    if operation.input:
        return "its input is not in the ledger"
    if operation.environment:
        return f"the values of its environment are not in the ledger: {', '.join(operation.environment)}"
    words = (*operation.command, operation.cwd or "", operation.user or "")
    if any(_REDACTED in word for word in words):
        return "a secret was taken out of it"
    if any(_NO_TEXT in word for word in words):
        return "its arguments are no text"
    return ""


async def _run(session: "Session", event: Event) -> "ExecOutcome":
    operation = event.operation
    assert operation is not None
    cwd = None if operation.cwd is None else posixpath.join(session.binding.workspace_root, operation.cwd)
    return await session.exec(operation.command, cwd=cwd, user=operation.user, outside=event.outside, rerun=True)
