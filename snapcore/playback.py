"""What a session does with its recorded past: operations that come back, and those of which nobody knows the end."""

from collections.abc import Iterable

from .errors import Code, ReplayDivergedError
from .ledger import Event, Operation, Point
from .replay import Recorded, Replay, describe

__all__ = ["Playback"]


class Playback:
    """The replay of a session, if there is one, and its uncertain operations. `strict` raises when another operation comes than
    the recorded one; otherwise the rest of the list is left then, and all is live."""

    def __init__(
        self, replay: Replay | None, uncertain: Iterable[Event], *, strict: bool = True, rerun_uncertain: bool = False
    ) -> None:
        self._replay = replay
        self._uncertain = {event.id: event for event in uncertain}
        self._strict = strict
        self._rerun_uncertain = rerun_uncertain
        self._begun: set[str] = set()  # by this session
        self._untold: Event | None = None  # the last operation, while its program does not know what it came to
        self._undone = False  # it was recorded, and not begun
        self._left: Point | None = None

    @property
    def remaining(self) -> int:
        """How many recorded operations are still to come."""
        return self._replay.remaining if self._replay is not None else 0

    @property
    def uncertain(self) -> tuple[Event, ...]:
        """Operations that began, and of which nobody knows how they ended."""
        return tuple(self._uncertain.values())

    async def match(self, operation: Operation) -> Recorded | None:
        """What is recorded of an operation, when it comes next; None when work is live. Raises `ReplayDivergedError`, and
        consumes nothing, when another operation is recorded here."""
        if self._replay is None:
            return None
        try:
            return await self._replay.match(operation)
        except ReplayDivergedError:
            if self._strict:
                raise
            return None

    def consume(self, recorded: Recorded) -> None:
        """An operation that `match` returned has been replayed, or is run again."""
        assert self._replay is not None
        self._replay.consume(recorded)

    def leave(self) -> Point | None:
        """Work is live from here: where it left the recorded past, for the ledger, until `left` says that it is there."""
        if self._replay is not None and self._replay.remaining:
            self._left = self._replay.leave()
        return self._left

    def left(self) -> None:
        """The ledger has what `leave` returned."""
        self._left = None

    def permit(self, operation: Operation, *, rerun: bool) -> str | None:
        """The id of the uncertain operation that would be run once more; None when there is none. Raises `ReplayDivergedError`
        `OPERATION_UNCERTAIN` when that is not allowed."""
        same = [event for event in self._uncertain.values() if event.operation == operation]
        if self._untold is not None and self._untold.operation == operation:
            same.append(self._untold)  # a program that asks again at once: what it sees then is what counts
        if not same:
            return None
        event = same[-1]
        # what this session began itself, its program saw being cut short
        allowed = event.id in self._begun or self._rerun_uncertain
        undone = event is self._untold and self._undone
        if rerun or undone or (allowed and not event.at_most_once):
            return event.id
        raise ReplayDivergedError(
            f"Nobody knows whether this has been done already: {describe(operation)} (number {event.sequence} of thread"
            f" {event.thread_id}).",
            code=Code.OPERATION_UNCERTAIN,
            hint="Look whether it has, then run it with rerun=True"
            + (": it is to be done at most once." if event.at_most_once else ", or open the session with rerun_uncertain=True."),
        )

    def begin(self, started: Event) -> None:
        """A command is about to be run."""
        self._note(started)
        self._uncertain[started.id] = started

    def end(self, started: Event) -> None:
        """It has ended."""
        del self._uncertain[started.id]

    def cancelled(self, started: Event) -> None:
        """A command was recorded, and then not run."""
        self._note(started)
        self._undone = True

    def written(self, event: Event) -> None:
        """A file was written, and is about to be recorded."""
        self._note(event)

    def told(self) -> None:
        """The program knows what the operation came to."""
        self._untold = None

    def _note(self, event: Event) -> None:
        if event.reruns is not None:
            self._uncertain.pop(event.reruns, None)
        self._begun.add(event.id)
        self._untold = event
        self._undone = False
