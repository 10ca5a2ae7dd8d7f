"""A simple model of sessions beside the ledgers that they would write: each sandbox simply has the list of what was done in it.

`World` takes steps, appends the events of each, and keeps for every sandbox and checkpoint what must be replayed there. The lines
that `snapcore.replay` finds by walking the ledgers back must say the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from snapcore.errors import Code, SnapshotError
from snapcore.ledger import Event, EventKind, Operation, Point
from snapcore.model import Checkpoint
from snapcore.replay import Ledgers, Line, Replay

OPERATIONS = [Operation(kind="exec", command=(name,)) for name in "ab"]


class Book:
    """Ledgers and checkpoints in lists: what a replay asks a store for."""

    def __init__(self) -> None:
        self.threads: dict[str, list[Event]] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.now = 0
        self.pages: list[int] = []

    async def events(self, thread_id: str, *, after: int = 0, limit: int = 500) -> list[Event]:
        page = self.threads.get(thread_id, [])[after : after + limit]
        self.pages.append(len(page))
        return page

    async def get(self, thread_id: str, checkpoint_id: str) -> Checkpoint | None:
        found = self.checkpoints.get(checkpoint_id)
        return found if found is not None and found.thread_id == thread_id else None

    def append(self, thread_id: str, kind: str, **fields: Any) -> Event:
        ledger = self.threads.setdefault(thread_id, [])
        self.now += 1
        number = sum(map(len, self.threads.values()))
        event = Event(id=f"{number:032x}", kind=kind, thread_id=thread_id, sequence=len(ledger) + 1, at=self.now, **fields)
        ledger.append(event)
        return event

    def execute(self, thread_id: str, sandbox_id: str, operation: Operation, *, end: bool = True, **fields: Any) -> Event:
        """An execution; the event of its end, or of its beginning when it was killed."""
        same = {name: value for name, value in fields.items() if name in ("outside", "at_most_once")}
        began = self.append(thread_id, EventKind.EXEC_STARTED, sandbox_id=sandbox_id, operation=operation, **fields)
        if not end:
            return began
        return self.complete(began, **same)

    def complete(self, began: Event, **fields: Any) -> Event:
        return self.append(
            began.thread_id,
            EventKind.EXEC_COMPLETED,
            sandbox_id=began.sandbox_id,
            operation=began.operation,
            started_id=began.id,
            exit_code=0,
            **fields,
        )

    def ledgers(self) -> Ledgers:
        return Ledgers(self)  # type: ignore[arg-type]


@dataclass
class State:
    """What is in a sandbox, or was in one when it was captured."""

    done: list[str] = field(default_factory=list)  # ids of outcomes, in the order of a replay
    shown: set[str] = field(default_factory=set)  # of those, whose effects outside of the roots are there
    pending: set[str] = field(default_factory=set)  # ids of executions that may have left something

    def copy(self) -> "State":
        return State(list(self.done), set(self.shown), set(self.pending))


@dataclass
class Box:
    """A sandbox."""

    name: str
    thread_id: str
    state: State
    destroyed: bool = False


@dataclass
class Saved:
    """A checkpoint. `lost`: it is a copy, and nobody knows of what any more."""

    record: Checkpoint
    state: State
    native: bool = False
    told: bool = False  # a ledger has an event of it


@dataclass(frozen=True)
class Run:
    """An execution, by the event that began it."""

    began: Event
    ended: Event | None


class World:
    """Threads at work. A step is three numbers: which, and two that choose among what there is."""

    STEPS = (
        "execute",
        "write",
        "kill",
        "checkpoint",
        "resume",
        "reopen",
        "replay",
        "diverge",
        "rerun",
        "fork",
        "rewind",
        "capture",
        "again",
        "delete",
        "destroy",
    )

    def __init__(self) -> None:
        self.book = Book()
        self.boxes: list[Box] = []
        self.saved: dict[str, Saved] = {}
        self.runs: list[Run] = []
        self.reruns: dict[str, set[str]] = {}  # by thread: ids of what was rerun in it
        self._names = 0
        self.create("thread")

    async def take(self, step: str, a: int = 0, b: int = 0) -> None:
        await getattr(self, f"do_{step}")(a, b)

    # ---- steps

    def create(self, thread_id: str) -> Box:
        box = Box(self._name("box"), thread_id, State())
        self.book.append(thread_id, EventKind.CREATED, sandbox_id=box.name)
        self.boxes.append(box)
        return box

    async def do_execute(self, a: int, b: int) -> None:
        self._execute(self._box(a), b)

    async def do_write(self, a: int, b: int) -> None:
        box = self._box(a)
        operation = Operation(kind="write", command=(f"/{b % 2}",))
        event = self.book.append(
            box.thread_id, EventKind.FILE_WRITTEN, sandbox_id=box.name, operation=operation, outside=b % 4 == 3
        )
        box.state.done.append(event.id)
        box.state.shown.add(event.id)

    async def do_kill(self, a: int, b: int) -> None:
        box = self._box(a)
        began = self.book.execute(box.thread_id, box.name, OPERATIONS[b % 2], end=False, at_most_once=b % 3 == 1)
        self.runs.append(Run(began, None))
        box.state.pending.add(began.id)

    async def do_checkpoint(self, a: int, b: int) -> None:
        box = self._box(a)
        self._save(box, label=f"label-{b % 2}", automatic=b % 3 == 1, native=b % 4 == 3)

    async def do_resume(self, a: int, b: int) -> None:
        """In the thread of a checkpoint, a new sandbox; what the old ones have is abandoned."""
        saved = self._choose(a)
        if saved is None or self._is_lost(saved):
            return
        line = await self.book.ledgers().line(saved.record)
        native = saved.native and b % 2 == 0
        box = Box(self._name("box"), saved.record.thread_id, saved.state.copy())
        box.state.shown &= box.state.shown if native else set()
        self.book.append(
            box.thread_id,
            EventKind.RESUMED,
            sandbox_id=box.name,
            checkpoint_id=saved.record.id,
            continues=line.point,
            snapshot="native" if native else None,
        )
        self.boxes.append(box)

    async def do_reopen(self, a: int, b: int) -> None:
        """Any of the sandboxes, not only the newest."""
        box = self.boxes[a % len(self.boxes)]
        if not box.destroyed:
            self.book.append(box.thread_id, EventKind.OPENED, sandbox_id=box.name)

    async def do_replay(self, a: int, b: int) -> None:
        """A program does what was recorded, or a part of it: what is not to be seen in the sandbox is run again."""
        await self._replay(self._box(a), b)

    async def do_diverge(self, a: int, b: int) -> None:
        """A program does a part of what was recorded, and then something else."""
        box = self._box(a)
        replay = await self._replay(box, b)
        place = len(box.state.done) - replay.remaining
        left = replay.leave()
        if left is not None:
            kept = [name for name in box.state.done[place:] if self._event(name).kind == EventKind.CHECKPOINT]
            first = box.state.done.index(self._at(left).id)
            assert set(box.state.done[place:first]) <= set(kept), "only checkpoints are passed over"
            del box.state.done[first:]
        self._execute(box, b, drops=left)

    async def do_rerun(self, a: int, b: int) -> None:
        """What nobody knows the end of is run once more."""
        box = self._box(a)
        ledgers = self.book.ledgers()
        uncertain = await ledgers.uncertain(box.thread_id, await ledgers.present(box.thread_id, box.name))
        if uncertain:
            old = uncertain[b % len(uncertain)]
            assert old.operation is not None
            self._run(box, old.operation, end=b % 3 != 2, at_most_once=old.at_most_once, reruns=old.id)

    async def do_fork(self, a: int, b: int) -> None:
        saved = self._choose(a)
        if saved is not None and b % 2 == 0:
            self._copy(saved, self._name("thread"), "fork-root")

    async def do_rewind(self, a: int, b: int) -> None:
        saved = self._choose(a)
        if saved is not None:
            self._copy(saved, saved.record.thread_id, "rewind")

    async def do_capture(self, a: int, b: int) -> None:
        """By hand, without an event, maybe while a command is under way."""
        box = self._last_at_work(self._box(a).thread_id)
        if box.destroyed:
            return
        began = None
        if b % 2:
            began = self.book.execute(box.thread_id, box.name, OPERATIONS[0], end=False)
            box.state.pending.add(began.id)
        self.book.now += b % 3
        record = self._record(box.thread_id)
        self.saved[record.id] = Saved(record, box.state.copy())
        if began is not None:
            self.book.now += 1
            self._ended(box, self.book.complete(began), began)

    async def do_again(self, a: int, b: int) -> None:
        """The thread's last checkpoint is come to once more, since nothing has changed."""
        box = self._box(a)
        told = [s for s in self.saved.values() if s.record.thread_id == box.thread_id and s.told]
        if told:
            self._tell(box, told[-1], native=False)

    async def do_delete(self, a: int, b: int) -> None:
        saved = self._choose(a)
        if saved is not None:
            del self.saved[saved.record.id]
            del self.book.checkpoints[saved.record.id]

    async def do_destroy(self, a: int, b: int) -> None:
        box = self._box(a)
        if len([one for one in self.boxes if not one.destroyed]) > 1:
            box.destroyed = True
            self.book.append(box.thread_id, EventKind.CLOSED, sandbox_id=box.name, destroyed=True)

    # ---- what must be so

    async def check(self) -> None:
        """Every line says what the model says."""
        for saved in self.saved.values():
            ledgers = self.book.ledgers()
            if self._is_lost(saved):
                with pytest.raises(SnapshotError) as caught:
                    await ledgers.line(saved.record)
                assert caught.value.code is Code.MISSING_CHECKPOINT
                continue
            await self._check(ledgers, await ledgers.line(saved.record), saved.record.thread_id, saved.state)
        for box in self.boxes:
            ledgers = self.book.ledgers()
            await self._check(ledgers, await ledgers.present(box.thread_id, box.name), box.thread_id, box.state)

    async def _check(self, ledgers: Ledgers, line: Line, thread_id: str, state: State) -> None:
        events = [self._at(line.point_of(place)) for place in range(len(line))]
        assert [event.id for event in events] == state.done
        assert {e.id for place, e in enumerate(events) if line.is_shown(place)} == state.shown & set(state.done)
        replay = Replay(ledgers, line, keeps_outside=False)
        for event in events:
            assert event.operation is not None
            found = await replay.match(event.operation)
            assert found is not None
            assert (found.event, found.fresh) == (event, event.outside is True and not event.at_most_once)
            replay.consume(found)
        assert [e.id for e in await ledgers.uncertain(thread_id, line)] == self._uncertain(thread_id, state)

    def _uncertain(self, thread_id: str, state: State) -> list[str]:
        own = [
            run.began
            for run in self.runs
            if run.began.thread_id == thread_id
            and (run.ended is None or (run.began.at_most_once and run.ended.id not in state.done))
        ]
        own += [self._event(name) for name in state.pending if self._event(name) not in own]
        rerun = self.reruns.get(thread_id, set())
        chains = {name for run in self.runs for name in self._chain(run) if run.ended and run.ended.id in state.done}
        left = [event for event in own if event.id not in rerun and (event.reruns is None or event.reruns not in chains)]
        return [event.id for event in sorted(left, key=lambda e: (e.thread_id == thread_id, e.thread_id, e.sequence))]

    def _chain(self, run: Run) -> set[str]:
        """The ids of a run and of all that it reruns."""
        found: set[str] = set()
        at: Run | None = run
        while at is not None:
            found |= {at.began.id, *([at.ended.id] if at.ended else [])}
            old = at.began.reruns
            at = next((r for r in self.runs if old in (r.began.id, r.ended and r.ended.id)), None) if old else None
            if old:
                found.add(old)
        return found

    # ---- parts

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{what}-{self._names}"

    def _box(self, a: int) -> Box:
        """One of the sandboxes that are at work; the newest for 0."""
        living = [box for box in self.boxes if not box.destroyed]
        return living[-1 - a % len(living)]

    def _last_at_work(self, thread_id: str) -> Box:
        name = self.book.threads[thread_id][-1].sandbox_id
        return next(box for box in self.boxes if box.name == name)

    def _choose(self, a: int) -> Saved | None:
        saved = list(self.saved.values())
        return saved[-1 - a % len(saved)] if saved else None

    def _event(self, event_id: str) -> Event:
        return next(e for ledger in self.book.threads.values() for e in ledger if e.id == event_id)

    def _at(self, point: Point) -> Event:
        return self.book.threads[point.thread_id][point.sequence - 1]

    def _execute(self, box: Box, b: int, **fields: Any) -> None:
        self._run(box, OPERATIONS[b % 2], outside=(None, True, False)[b % 3], at_most_once=b % 5 == 4, **fields)

    def _run(self, box: Box, operation: Operation, *, end: bool = True, place: int | None = None, **fields: Any) -> None:
        event = self.book.execute(box.thread_id, box.name, operation, end=end, **fields)
        began = self._event(event.started_id) if event.started_id is not None else event
        if began.reruns is not None:
            self._settle(box.thread_id, began.reruns)
        if end:
            self._ended(box, event, began, place)
        else:
            self.runs.append(Run(began, None))
            if place is None:
                box.state.pending.add(began.id)

    def _ended(self, box: Box, event: Event, began: Event, place: int | None = None) -> None:
        self.runs.append(Run(began, event))
        box.state.pending.discard(began.id)
        if place is None:
            box.state.done.append(event.id)
        else:
            box.state.done[place] = event.id
        box.state.shown.add(event.id)

    def _settle(self, thread_id: str, event_id: str) -> None:
        ids = {event_id}
        ids |= {run.began.id for run in self.runs if run.ended is not None and run.ended.id == event_id}
        self.reruns.setdefault(thread_id, set()).update(ids)
        for box in self.boxes:
            if box.thread_id == thread_id:
                box.state.pending -= ids

    async def _replay(self, box: Box, b: int) -> Replay:
        ledgers = self.book.ledgers()
        replay = Replay(ledgers, await ledgers.present(box.thread_id, box.name), keeps_outside=True)
        for place in range(b % (replay.remaining + 1)):
            old = self._event(box.state.done[place])
            assert old.operation is not None
            found = await replay.match(old.operation)
            assert found is not None
            assert found.event == old
            assert found.fresh == (old.outside is True and old.id not in box.state.shown and not old.at_most_once)
            replay.consume(found)
            if not found.fresh:
                continue
            if old.kind == EventKind.FILE_WRITTEN:
                again = self.book.append(
                    box.thread_id,
                    EventKind.FILE_WRITTEN,
                    sandbox_id=box.name,
                    operation=old.operation,
                    outside=True,
                    reruns=old.id,
                )
                box.state.done[place] = again.id
                box.state.shown.add(again.id)
                continue
            self._run(box, old.operation, end=b % 7 != 6, place=place, outside=True, at_most_once=old.at_most_once, reruns=old.id)
        return replay

    def _record(self, thread_id: str, **fields: Any) -> Checkpoint:
        record = Checkpoint(id=self._name("checkpoint"), thread_id=thread_id, created_at=self.book.now, **fields)
        self.book.checkpoints[record.id] = record
        self.book.now += 1
        return record

    def _save(self, box: Box, *, label: str, automatic: bool, native: bool) -> None:
        record = self._record(box.thread_id, label=label)
        saved = self.saved[record.id] = Saved(record, State())
        self._tell(box, saved, automatic=automatic, native=native)

    def _tell(self, box: Box, saved: Saved, *, native: bool, automatic: bool = False) -> None:
        event = self.book.append(
            box.thread_id,
            EventKind.CHECKPOINT,
            sandbox_id=box.name,
            checkpoint_id=saved.record.id,
            operation=Operation(kind="checkpoint", command=(str(saved.record.label),)),
            automatic=automatic,
            snapshot="native" if native else None,
        )
        if not automatic:
            box.state.done.append(event.id)
            box.state.shown.add(event.id)
        saved.state, saved.native, saved.told = box.state.copy(), native, True

    def _copy(self, saved: Saved, thread_id: str, reason: str) -> None:
        source = saved.record
        record = self._record(thread_id, reason=reason, source_thread_id=source.thread_id, source_id=source.id)
        self.saved[record.id] = replace(saved, record=record, state=saved.state.copy(), told=False)

    def _is_lost(self, saved: Saved) -> bool:
        """Whether it is a copy of a copy, and so on, of what has gone without having been told of in a ledger."""
        at: Checkpoint | None = saved.record
        while at is not None and not self._is_told(at.thread_id, at.id):
            if at.source_id is None:
                return False
            thread_id, name = at.source_thread_id, at.source_id
            at = self.book.checkpoints.get(name)
            if at is None:
                return thread_id is None or not self._is_told(thread_id, name)
        return False

    def _is_told(self, thread_id: str, checkpoint_id: str) -> bool:
        ledger = self.book.threads.get(thread_id, ())
        return any(e.kind == EventKind.CHECKPOINT and e.checkpoint_id == checkpoint_id for e in ledger)


async def play(steps: Sequence[tuple[str, int, int]]) -> World:
    """A world after these steps, checked."""
    world = World()
    for step, a, b in steps:
        await world.take(step, a, b)
    await world.check()
    return world
