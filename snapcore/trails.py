"""A thread's ledger in memory: not its events but what a walk through them needs, about 60 bytes an event.

Events of one thread may be of several sandboxes, by turns. What was done in one of them, from its making on, is a *stretch*; it
continues another where the sandbox was resumed from a checkpoint.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

import msgspec
from blake3 import blake3

from .errors import Code, RepositoryError
from .ledger import Event, EventKind, Operation, Point

__all__ = ["KEY_BYTES", "Stretch", "Trail", "operation_key"]

KEY_BYTES: Final = 16
_NO_KEY: Final = bytes(KEY_BYTES)
_KINDS: Final = (
    EventKind.CREATED,
    EventKind.OPENED,
    EventKind.RESUMED,
    EventKind.EXEC_STARTED,
    EventKind.EXEC_COMPLETED,
    EventKind.FILE_WRITTEN,
    EventKind.CHECKPOINT,
    EventKind.PAUSED,
    EventKind.CLOSED,
)
_NUMBER: Final = {kind: number for number, kind in enumerate(_KINDS)}
_OTHER: Final = len(_KINDS)  # of a later release
_OUTSIDE: Final = 1
_UNSAID: Final = 2
_AT_MOST_ONCE: Final = 4
_AUTOMATIC: Final = 8

_encoder = msgspec.msgpack.Encoder()


def operation_key(operation: Operation) -> bytes:
    """16 bytes that are equal exactly when the operations are."""
    return blake3(_encoder.encode(operation)).digest(KEY_BYTES)


class Stretch:
    """What was done in one sandbox from its making on: events `start` to `last` of the thread that are of this sandbox.

    `opened` is the newest event that created, opened or resumed it, 0 when none did. `continues` is where the line stands that
    it goes on from; `native`: it started from the provider's own snapshot of that place.
    """

    __slots__ = ("continues", "destroyed", "last", "native", "opened", "sandbox_id", "start")

    def __init__(self, event: Event) -> None:
        self.sandbox_id = event.sandbox_id
        self.start = event.sequence
        self.last = event.sequence
        self.opened = 0
        self.destroyed = False
        self.continues = event.continues if event.kind == EventKind.RESUMED else None
        self.native = event.kind == EventKind.RESUMED and event.snapshot is not None


class _Keys:
    """Keys of 16 bytes, one after the other."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def append(self, key: bytes) -> None:
        self._bytes += key

    def __getitem__(self, place: int) -> bytes:
        return bytes(self._bytes[place * KEY_BYTES : (place + 1) * KEY_BYTES])

    def find(self, key: bytes) -> Iterator[int]:
        """The places of a key, in order."""
        at = self._bytes.find(key)
        while at >= 0:
            if at % KEY_BYTES == 0:
                yield at // KEY_BYTES
            at = self._bytes.find(key, at + 1)


class Trail:
    """The columns of a thread's events; each is asked for by its sequence number, from 1."""

    def __init__(self, thread_id: str) -> None:
        self.thread_id = thread_id
        self.stretches: list[Stretch] = []
        self.reruns: dict[int, bytes] = {}  # an operation that is done once more: what it reruns, by id
        self.drops: dict[int, Point] = {}
        self._present: dict[str, int] = {}  # the stretch of each sandbox that new events belong to
        self._running: dict[str, int] = {}  # executions without an end, by id
        self._owners = array("L")
        self._times = array("q")
        self._steps = array("q")
        self._partners = array("L")
        self._kinds = bytearray()
        self._flags = bytearray()
        self._keys = _Keys()
        self._ids = _Keys()
        self._checkpoints = _Keys()
        self._checkpoint_places = array("L")

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, event: Event) -> None:
        """Take the next event. Raises `RepositoryError` `DAMAGED` when it is not the next."""
        sequence = event.sequence
        if sequence != len(self) + 1:
            raise RepositoryError(
                f"The ledger of thread {self.thread_id!r} has a gap before event {sequence}.", code=Code.DAMAGED
            )
        owner = self._owner_of(event)
        stretch = self.stretches[owner]
        stretch.last = sequence
        if event.kind in (EventKind.CREATED, EventKind.OPENED, EventKind.RESUMED):
            stretch.opened = sequence
            stretch.destroyed = False
        elif event.kind == EventKind.CLOSED:
            stretch.destroyed = event.destroyed
        self._owners.append(owner)
        self._times.append(event.at)
        self._steps.append(-1 if event.step is None else event.step)
        self._kinds.append(_NUMBER.get(event.kind, _OTHER))
        self._flags.append(
            (_OUTSIDE if event.outside else 0)
            | (_UNSAID if event.outside is None else 0)
            | (_AT_MOST_ONCE if event.at_most_once else 0)
            | (_AUTOMATIC if event.automatic else 0)
        )
        self._keys.append(_NO_KEY if event.operation is None else operation_key(event.operation))
        self._ids.append(bytes.fromhex(event.id))
        self._add_links(event)

    def kind(self, sequence: int) -> str:
        """One of `EventKind`, empty for a kind that this release does not know."""
        number = self._kinds[sequence - 1]
        return "" if number == _OTHER else _KINDS[number]

    def key(self, sequence: int) -> bytes:
        """`operation_key` of the event's operation."""
        return self._keys[sequence - 1]

    def event_id(self, sequence: int) -> bytes:
        """The event's id, 16 bytes."""
        return self._ids[sequence - 1]

    def partner(self, sequence: int) -> int:
        """Of an execution that began: the event of its end; of the end: that of its beginning. 0 when there is none."""
        return self._partners[sequence - 1]

    def step(self, sequence: int) -> int | None:
        """The event's step."""
        step = self._steps[sequence - 1]
        return None if step < 0 else step

    def time(self, sequence: int) -> int:
        """When it was appended, microseconds since the epoch."""
        return self._times[sequence - 1]

    def outside(self, sequence: int) -> bool | None:
        """Whether the operation reaches outside of the captured roots; None when nobody said."""
        flags = self._flags[sequence - 1]
        return None if flags & _UNSAID else bool(flags & _OUTSIDE)

    def at_most_once(self, sequence: int) -> bool:
        """Whether the operation must not be done twice."""
        return bool(self._flags[sequence - 1] & _AT_MOST_ONCE)

    def is_replayed(self, sequence: int) -> bool:
        """Whether the event is the outcome of an operation that a program asked for."""
        if self.is_automatic(sequence):
            return False
        return self.kind(sequence) in (EventKind.CHECKPOINT, EventKind.EXEC_COMPLETED, EventKind.FILE_WRITTEN)

    def is_automatic(self, sequence: int) -> bool:
        """Whether no program asked for it: a checkpoint by itself, an operation by hand."""
        return bool(self._flags[sequence - 1] & _AUTOMATIC)

    def owner(self, sequence: int) -> int:
        """The number of the event's stretch."""
        return self._owners[sequence - 1]

    def events_of(self, owner: int, until: int) -> Iterator[int]:
        """The events of a stretch up to `until`."""
        start = self.stretches[owner].start
        return (sequence for sequence in range(start, until + 1) if self._owners[sequence - 1] == owner)

    def find(self, event_id: bytes) -> int:
        """The event of this id, 0 when there is none."""
        return next(self._ids.find(event_id), -1) + 1

    def of_checkpoint(self, checkpoint_id: str) -> list[int]:
        """The events that made this checkpoint or came to it again."""
        return [self._checkpoint_places[place] for place in self._checkpoints.find(_name_key(checkpoint_id))]

    def last_until(self, time: int) -> int:
        """The last event that was appended by then, 0 when there is none."""
        return bisect_right(self._times, time)

    def _owner_of(self, event: Event) -> int:
        owner = self._present.get(event.sandbox_id)
        if owner is None or event.kind in (EventKind.CREATED, EventKind.RESUMED):
            owner = self._present[event.sandbox_id] = len(self.stretches)
            self.stretches.append(Stretch(event))
        return owner

    def _add_links(self, event: Event) -> None:
        partner = 0
        if event.kind == EventKind.EXEC_STARTED:
            self._running[event.id] = event.sequence
        elif event.kind == EventKind.EXEC_COMPLETED and event.started_id is not None:
            partner = self._running.pop(event.started_id, 0)
            if partner:
                self._partners[partner - 1] = event.sequence
        elif event.kind == EventKind.CHECKPOINT and event.checkpoint_id is not None:
            self._checkpoints.append(_name_key(event.checkpoint_id))
            self._checkpoint_places.append(event.sequence)
        self._partners.append(partner)
        if event.reruns is not None:
            self.reruns[event.sequence] = bytes.fromhex(event.reruns)
        if event.drops is not None:
            self.drops[event.sequence] = event.drops


def _name_key(name: str) -> bytes:
    return blake3(name.encode()).digest(KEY_BYTES)
