"""What led to a checkpoint, or to a sandbox as it is: the operations to be replayed, found by walking a ledger back.

A walk begins at an event and takes what was done in that event's sandbox before. Where the sandbox was resumed from a
checkpoint, it goes on from the place that the event names, in another sandbox and maybe another thread; where the sandbox
was created, it ends. So a chain of resumes comes to all that led here, and to nothing that was abandoned.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import msgspec

from .errors import Code, ReplayDivergedError, RepositoryError, SnapshotError, printable
from .ledger import Event, EventKind, Operation, Point
from .model import Checkpoint
from .protocols import CheckpointStore
from .trails import Trail, operation_key

__all__ = ["Ledgers", "Line", "Recorded", "Replay", "describe"]

_PAGE: Final = 256  # events read at once
_AHEAD: Final = 64  # of a replay; they are kept
_SHOWN: Final = 200  # characters of a command in a message


def describe(operation: Operation) -> str:
    """An operation as a message shows it."""
    words = operation.command[2:] if operation.command[:2] == ("sh", "-c") else operation.command
    text = printable(" ".join(words))
    return f"{operation.kind} {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}".strip()


class _Part(msgspec.Struct, frozen=True):
    """A part of a line: one stretch up to an event. `shown`: the sandbox at the line's end has all that this one had."""

    trail: Trail
    owner: int
    until: int
    shown: bool


class Line:
    """The operations that led to a place in a ledger, in order. `point` is the place.

    `step` counts the affecting operations up to there; `sandbox` is the event that last opened the sandbox there (its binding
    and spec), `snapshot` the provider's own snapshot that was taken beside the checkpoint there.
    """

    def __init__(self, point: Point, parts: list[_Part]) -> None:
        self.point = point
        self.step = 0
        self.sandbox: Event | None = None
        self.snapshot: str | None = None
        self.parts = parts
        self._owners = array("L")  # which part an operation's event is of
        self._events = array("L")
        self._places: dict[tuple[str, int], int] = {}  # of operations that were rerun, by the event of any of their runs
        for number, part in enumerate(parts):
            for sequence in part.trail.events_of(part.owner, part.until):
                self._add(number, sequence)

    def __len__(self) -> int:
        return len(self._events)

    def point_of(self, place: int) -> Point:
        """Where the operation at a place was recorded."""
        return Point(self._trail(place).thread_id, self._events[place])

    def key(self, place: int) -> bytes:
        """`operation_key` of the operation at a place."""
        return self._trail(place).key(self._events[place])

    def is_checkpoint(self, place: int) -> bool:
        """Whether it is a checkpoint that was asked for."""
        return self._trail(place).kind(self._events[place]) == EventKind.CHECKPOINT

    def outside(self, place: int) -> bool | None:
        """Whether it reaches outside of the captured roots; None when nobody said."""
        return self._trail(place).outside(self._events[place])

    def at_most_once(self, place: int) -> bool:
        """Whether it must not be done twice."""
        return self._trail(place).at_most_once(self._events[place])

    def is_shown(self, place: int) -> bool:
        """Whether the sandbox at the line's end has what the operation did outside of the captured roots."""
        return self.parts[self._owners[place]].shown

    def place_of(self, trail: Trail, event_id: bytes) -> int | None:
        """The place of the operation that has an event of this id, in any of its runs; None when it is not on the line."""
        for candidate in {id(one): one for one in (trail, *(part.trail for part in self.parts))}.values():
            if sequence := candidate.find(event_id):
                ids = {sequence, candidate.partner(sequence)} - {0}
                known = (self._places.get((candidate.thread_id, one)) for one in ids)
                found = next((place for place in known if place is not None), None)
                return found if found is not None else self._search(candidate, ids)
        return None

    def held(self) -> dict[str, bytearray]:
        """For each thread on the line, a byte for each event: 1 for those that are replayed."""
        marks = {part.trail.thread_id: bytearray(len(part.trail)) for part in self.parts}
        for place, sequence in enumerate(self._events):
            marks[self._trail(place).thread_id][sequence - 1] = 1
        return marks

    def _trail(self, place: int) -> Trail:
        return self.parts[self._owners[place]].trail

    def _add(self, number: int, sequence: int) -> None:
        trail = self.parts[number].trail
        if (dropped := trail.drops.get(sequence)) is not None:
            self._drop(dropped)
        step = trail.step(sequence)
        self.step = self.step if step is None else step
        if not trail.is_replayed(sequence):
            return
        first = trail.partner(sequence) or sequence  # a rerun is told by the event that began it
        again = trail.reruns.get(first)
        place = None if again is None else self.place_of(trail, again)
        if place is None:
            self._owners.append(number)
            self._events.append(sequence)
            return
        # in place of what it reran, with the outcome that the program saw last
        before = self._trail(place)
        old = self._events[place]
        for one in {old, before.partner(old)} - {0}:
            self._places[before.thread_id, one] = place
        for one in {sequence, first}:
            self._places[trail.thread_id, one] = place
        self._owners[place] = number
        self._events[place] = sequence

    def _drop(self, first: Point) -> None:
        """Give up what was recorded from there on."""
        for place in range(len(self)):
            if self._events[place] == first.sequence and self._trail(place).thread_id == first.thread_id:
                del self._events[place:], self._owners[place:]
                self._places = {key: other for key, other in self._places.items() if other < place}
                return

    def _search(self, trail: Trail, ids: set[int]) -> int | None:
        return next(
            (place for place, event in enumerate(self._events) if event in ids and self._trail(place) is trail),
            None,
        )


class Ledgers:
    """Reads ledgers by pages, each once: what is appended later is not seen. For one session's beginning."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._trails: dict[str, Trail] = {}
        self._kept: OrderedDict[Point, Event] = OrderedDict()

    async def trail(self, thread_id: str) -> Trail:
        """A thread's ledger as it was when it was first asked for."""
        if thread_id not in self._trails:
            trail = Trail(thread_id)
            while page := await self._store.events(thread_id, after=len(trail), limit=_PAGE):
                for event in page:
                    trail.add(event)
            self._trails[thread_id] = trail
        return self._trails[thread_id]

    async def event(self, point: Point) -> Event:
        """The event at a place. Some that follow are read with it, and kept for a while."""
        found = self._kept.get(point)
        if found is None:
            for event in await self._store.events(point.thread_id, after=point.sequence - 1, limit=_AHEAD):
                self._kept[Point(point.thread_id, event.sequence)] = event
            while len(self._kept) > 2 * _AHEAD:
                self._kept.popitem(last=False)
            found = self._kept.get(point)
        if found is None:
            raise RepositoryError(f"The ledger of thread {point.thread_id!r} has no event {point.sequence}.", code=Code.DAMAGED)
        return found

    async def sandbox(self, thread_id: str) -> Event | None:
        """The event that last opened the thread's newest sandbox; None when there is none, or it was destroyed."""
        trail = await self.trail(thread_id)
        newest = max(trail.stretches, key=lambda stretch: stretch.opened, default=None)
        if newest is None or newest.destroyed or not newest.opened:
            return None
        return await self.event(Point(thread_id, newest.opened))

    async def present(self, thread_id: str, sandbox_id: str) -> Line:
        """What was done in a sandbox of the thread, and what led to it."""
        trail = await self.trail(thread_id)
        last = max((stretch.last for stretch in trail.stretches if stretch.sandbox_id == sandbox_id), default=0)
        return await self._walk(Point(thread_id, last))

    async def line(self, checkpoint: Checkpoint) -> Line:
        """What led to a checkpoint.

        It is found by the newest event that tells of the checkpoint; for a copy (a fork's root, a rewind) without one, by that of
        its source, as it was when the copy was made; else by time: what had ended when the checkpoint was made. Raises
        `SnapshotError` `MISSING_CHECKPOINT` for a copy whose source was deleted and is in no ledger.
        """
        return await self._walk(await self._point_of(checkpoint))

    async def uncertain(self, thread_id: str, line: Line | None = None) -> tuple[Event, ...]:
        """Executions that may have done something that the line does not tell, by their `exec.started`, oldest first.

        Those of the thread that have no end, or have one that is not on the line although they must not be done twice; and those
        on the line that were under way at its end or where it was forked. But none that was rerun since, nor one
        that was a rerun of an operation on the line.
        """
        trail = await self.trail(thread_id)
        own = {trail.thread_id: set(_unsettled(trail, line))}
        trails = {trail.thread_id: trail}
        rerun = set(trail.reruns.values())
        for part in line.parts if line is not None else ():
            other = part.trail
            trails[other.thread_id] = other
            began = (s for s in other.events_of(part.owner, part.until) if other.kind(s) == EventKind.EXEC_STARTED)
            open_ = (s for s in began if not 0 < other.partner(s) <= part.until and not other.is_automatic(s))
            own.setdefault(other.thread_id, set()).update(open_)
            if other is not trail:
                rerun.update(what for when, what in other.reruns.items() if when <= part.until)
        found = [
            Point(name, sequence)
            for name in sorted(own, key=lambda name: name == thread_id)
            for sequence in sorted(own[name])
            if not _is_settled(trails[name], sequence, rerun, line)
        ]
        return tuple([await self.event(point) for point in found])

    async def _point_of(self, checkpoint: Checkpoint) -> Point:
        until: int | None = None
        seen = set()
        copy = checkpoint
        thread_id, checkpoint_id = copy.thread_id, copy.id
        while True:
            trail = await self.trail(thread_id)
            if places := trail.of_checkpoint(checkpoint_id):
                early = [place for place in places if until is None or trail.time(place) <= until]
                return Point(thread_id, early[-1] if early else places[0])
            found = copy if copy.id == checkpoint_id else await self._store.get(thread_id, checkpoint_id)
            if found is None or checkpoint_id in seen:
                raise SnapshotError(
                    f"Checkpoint {checkpoint.id!r} is a copy of {checkpoint_id!r} of thread {thread_id!r}, which was deleted;"
                    " what led to it is not known.",
                    code=Code.MISSING_CHECKPOINT,
                    hint='Resume without a replay: replay="off".',
                )
            seen.add(checkpoint_id)
            if found.source_id is None or found.source_thread_id is None:
                return Point(thread_id, trail.last_until(found.created_at))
            until = found.created_at if until is None else min(until, found.created_at)
            copy, thread_id, checkpoint_id = found, found.source_thread_id, found.source_id

    async def _walk(self, point: Point) -> Line:
        parts: list[_Part] = []
        seen = set()
        shown = True
        at: Point | None = point
        while at is not None and at.sequence > 0:
            trail = await self.trail(at.thread_id)
            if at.sequence > len(trail) or at in seen:
                raise RepositoryError(f"The ledger of thread {at.thread_id!r} does not hold what led here.", code=Code.DAMAGED)
            seen.add(at)
            owner = trail.owner(at.sequence)
            parts.append(_Part(trail, owner, at.sequence, shown))
            stretch = trail.stretches[owner]
            shown = shown and stretch.native
            at = stretch.continues
        line = Line(point, parts[::-1])
        if parts:
            opened = max(
                (s for s in parts[0].trail.events_of(parts[0].owner, point.sequence) if _opens(parts[0].trail.kind(s))), default=0
            )
            line.sandbox = await self.event(Point(point.thread_id, opened)) if opened else None
            if parts[0].trail.kind(point.sequence) == EventKind.CHECKPOINT:
                line.snapshot = (await self.event(point)).snapshot
        return line


class Recorded(msgspec.Struct, frozen=True):
    """An operation as it was recorded. `fresh`: what it did outside of the captured roots is not in the present sandbox, so it is
    to be run again in its place."""

    event: Event
    fresh: bool
    place: int


class Replay:
    """What a program does again, operation by operation. `keeps_outside`: the present sandbox is that of the line's end, or
    started from its native snapshot."""

    def __init__(self, ledgers: Ledgers, line: Line, *, keeps_outside: bool) -> None:
        self._ledgers = ledgers
        self._line = line
        self._keeps_outside = keeps_outside
        self._next = 0

    @property
    def remaining(self) -> int:
        """How many recorded operations are still to come."""
        return len(self._line) - self._next

    async def match(self, operation: Operation) -> Recorded | None:
        """The recorded operation that comes next, when it is this one; None when all that comes next is live.

        Checkpoints may be passed over, other operations not. Nothing is consumed, and `ReplayDivergedError` says when another
        operation was recorded here.
        """
        key = operation_key(operation)
        for place in range(self._next, len(self._line)):
            if self._line.key(place) == key:
                event = await self._ledgers.event(self._line.point_of(place))
                return Recorded(event, self.is_fresh(place), place)
            if not self._line.is_checkpoint(place):
                raise await self._diverged(operation, place)
        return None

    def consume(self, recorded: Recorded) -> None:
        """What `match` found has been replayed, or was begun anew."""
        self._next = recorded.place + 1

    def leave(self) -> Point | None:
        """All is live from here: give up what was recorded. The place of the first operation that is given up, for `Event.drops`
        of what is done next; None when there are only checkpoints, which are passed over anyway."""
        given_up = (place for place in self.places() if not self._line.is_checkpoint(place))
        first = next(given_up, None)
        self._next = len(self._line)
        return None if first is None else self._line.point_of(first)

    def places(self) -> Iterator[int]:
        """The places on the line that are still to come."""
        return iter(range(self._next, len(self._line)))

    def is_fresh(self, place: int) -> bool:
        """Whether the operation has to be run again: it reaches outside, the present sandbox does not show it, and it may be done
        twice."""
        return self._line.outside(place) is True and not self._is_shown(place) and not self._line.at_most_once(place)

    async def unsaid(self, limit: int) -> list[Event]:
        """Commands and writes still to come that may have done something outside which the present sandbox does not show, and
        which are not run again: nobody said whether they reach outside, or they must not be done twice. At most `limit`."""
        found: list[Event] = []
        for place in self.places():
            if len(found) == limit:
                break
            reaches = self._line.outside(place) is not False and not self._line.is_checkpoint(place)
            if reaches and not self.is_fresh(place) and not self._is_shown(place):
                found.append(await self._ledgers.event(self._line.point_of(place)))
        return found

    def _is_shown(self, place: int) -> bool:
        return self._keeps_outside and self._line.is_shown(place)

    async def _diverged(self, operation: Operation, place: int) -> ReplayDivergedError:
        point = self._line.point_of(place)
        recorded = (await self._ledgers.event(point)).operation
        what = "something else" if recorded is None else describe(recorded)
        return ReplayDivergedError(
            f"The operation asked for ({describe(operation)}) is not the one recorded at this place ({what}: event"
            f" {point.sequence} of thread {point.thread_id!r}); nothing was done.",
            hint='Do what was done then, or resume with replay="live" to go on from here.',
        )


def _opens(kind: str) -> bool:
    return kind in (EventKind.CREATED, EventKind.OPENED, EventKind.RESUMED)


def _unsettled(trail: Trail, line: Line | None) -> Iterator[int]:
    """Executions of a thread without an end, and those that must not be done twice and are not on the line."""
    held = {} if line is None else line.held()
    on_line = held.get(trail.thread_id)
    for sequence in range(1, len(trail) + 1):
        if trail.kind(sequence) == EventKind.EXEC_STARTED and not trail.is_automatic(sequence):
            ended = trail.partner(sequence)
            if not ended or (trail.at_most_once(sequence) and not (on_line is not None and on_line[ended - 1])):
                yield sequence


def _is_settled(trail: Trail, sequence: int, rerun: set[bytes], line: Line | None) -> bool:
    """Whether an execution was rerun, or was itself a rerun of what is on the line."""
    ended = trail.partner(sequence)
    if trail.event_id(sequence) in rerun or (ended and trail.event_id(ended) in rerun):
        return True
    again = trail.reruns.get(sequence)
    return again is not None and line is not None and line.place_of(trail, again) is not None
