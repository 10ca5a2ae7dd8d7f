"""Walking a ledger back, and replaying what is found (case 37), beside a model that keeps a list for each sandbox."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapcore.errors import Code, ReplayDivergedError, RepositoryError, SnapshotError
from snapcore.ledger import Event, EventKind, Operation, Point
from snapcore.model import Checkpoint
from snapcore.replay import Ledgers, Line, Replay, describe
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing.entries import IDENTITY, acquire
from snapcore.trails import Trail

from .replay_model import Book, World, play

STEPS = st.tuples(st.sampled_from(World.STEPS), st.integers(0, 5), st.integers(0, 59))


def exec_of(name: str) -> Operation:
    return Operation(kind="exec", command=(name,))


def checkpoint_of(label: str) -> Operation:
    return Operation(kind="checkpoint", command=(label,))


class Writer(Book):
    """A book that is written by hand. Sandboxes are called by one letter."""

    def create(self, box: str, thread_id: str = "thread") -> Event:
        return self.append(thread_id, EventKind.CREATED, sandbox_id=box)

    def done(self, box: str, *names: str, thread_id: str = "thread", **fields: Any) -> list[Event]:
        return [self.execute(thread_id, box, exec_of(name), **fields) for name in names]

    def save(self, box: str, name: str, *, thread_id: str = "thread", **fields: Any) -> Checkpoint:
        saved = self.checkpoints[name] = Checkpoint(id=name, thread_id=thread_id, created_at=self.now)
        self.append(thread_id, EventKind.CHECKPOINT, sandbox_id=box, checkpoint_id=name, operation=checkpoint_of(name), **fields)
        return saved

    async def resume(self, box: str, saved: Checkpoint, *, snapshot: str | None = None) -> Line:
        line = await self.ledgers().line(saved)
        self.append(
            saved.thread_id,
            EventKind.RESUMED,
            sandbox_id=box,
            checkpoint_id=saved.id,
            continues=line.point,
            snapshot=snapshot,
        )
        return line

    def copy(self, name: str, source: Checkpoint, thread_id: str) -> Checkpoint:
        self.now += 1
        made = self.checkpoints[name] = Checkpoint(
            id=name, thread_id=thread_id, created_at=self.now, source_thread_id=source.thread_id, source_id=source.id
        )
        self.now += 1
        return made

    async def names(self, line: Line) -> str:
        """What a line says, a word each."""
        events = [await self.ledgers().event(line.point_of(place)) for place in range(len(line))]
        return " ".join(event.operation.command[0] for event in events if event.operation is not None)

    async def present(self, box: str, thread_id: str = "thread") -> str:
        return await self.names(await self.ledgers().present(thread_id, box))

    async def uncertain(self, saved: Checkpoint) -> list[Event]:
        ledgers = self.ledgers()
        return list(await ledgers.uncertain(saved.thread_id, await ledgers.line(saved)))


@pytest.fixture
def book() -> Writer:
    return Writer()


async def replay_of(book: Writer, saved: Checkpoint, *, keeps_outside: bool = False) -> Replay:
    ledgers = book.ledgers()
    return Replay(ledgers, await ledgers.line(saved), keeps_outside=keeps_outside)


# ---- against the model


@given(st.lists(STEPS, min_size=1, max_size=30))
@settings(max_examples=400, deadline=None)
def test_any_history_is_replayed_as_it_was(steps: list[tuple[str, int, int]]) -> None:
    """Sessions, kills, resumes, abandoned lines, several sandboxes by turns, forks, rewinds, deletions, in any order."""
    asyncio.run(play(steps))


@pytest.mark.parametrize("first", World.STEPS)
def test_every_short_history_is_replayed_as_it_was(first: str) -> None:
    async def all_of_them() -> None:
        before = [("execute", 0, 1), ("checkpoint", 0, 3), ("resume", 0, 1)]
        for second, third in itertools.product(World.STEPS, repeat=2):
            for b in (2, 13):
                await play([*before, (first, 0, b), (second, 0, b + 1), (third, 1, b)])

    asyncio.run(all_of_them())


# ---- lines


async def test_what_was_done_after_a_checkpoint_is_abandoned_by_a_resume(book: Writer) -> None:
    book.create("A")
    book.done("A", "a")
    first = book.save("A", "first")
    book.done("A", "lost")
    await book.resume("B", first)
    book.done("B", "b")
    second = book.save("B", "second")
    assert await book.names(await book.ledgers().line(second)) == "a first b second"
    assert await book.names(await book.ledgers().line(first)) == "a first"


async def test_a_chain_of_resumes_comes_to_all_that_led_here(book: Writer) -> None:
    book.create("0")
    saved = book.save("0", "start")
    for number in range(1, 300):
        await book.resume(str(number), saved)
        book.done(str(number), f"op-{number}")
        if number % 3 == 0:
            saved = book.save(str(number), f"c-{number}", automatic=True)
    expected = ["start", *(f"op-{number}" for number in range(3, 298, 3))]
    last = book.checkpoints["c-297"]
    assert await book.names(await book.ledgers().line(last)) == " ".join([*expected])
    assert await book.present("299") == " ".join([*expected, "op-299"])


async def test_sandboxes_of_one_thread_are_told_apart(book: Writer) -> None:
    book.create("A")
    first = book.save("A", "first")
    await book.resume("B", first)
    book.done("B", "b")
    book.append("thread", EventKind.OPENED, sandbox_id="A")
    book.done("A", "a")
    book.done("B", "b2")
    assert await book.present("A") == "first a"
    assert await book.present("B") == "first b b2"


async def test_a_sandbox_made_anew_under_the_same_name_has_nothing_of_the_old(book: Writer) -> None:
    book.create("A")
    book.done("A", "old")
    book.append("thread", EventKind.CLOSED, sandbox_id="A", destroyed=True)
    book.create("A")
    book.done("A", "new")
    assert await book.present("A") == "new"


async def test_a_line_outlives_every_checkpoint_on_it(book: Writer) -> None:
    book.create("A")
    book.done("A", "a")
    forked = book.copy("forked", book.save("A", "first"), "other")
    await book.resume("B", forked)
    book.done("B", "b", thread_id="other")
    last = book.save("B", "last", thread_id="other")
    book.checkpoints = {"last": last}
    assert await book.names(await book.ledgers().line(last)) == "a first b last"


async def test_a_fork_begins_where_its_source_stood_then(book: Writer) -> None:
    book.create("A")
    book.done("A", "a")
    first = book.save("A", "first")
    forked = book.copy("forked", first, "other")
    book.done("A", "later")
    book.append("thread", EventKind.CHECKPOINT, sandbox_id="A", checkpoint_id="first", automatic=True)
    assert await book.names(await book.ledgers().line(forked)) == "a first"
    assert await book.names(await book.ledgers().line(first)) == "a first later"


async def test_a_copy_of_what_nobody_knows_any_more_is_refused(book: Writer) -> None:
    plain = book.copy("second", book.copy("first", Checkpoint(id="gone", thread_id="thread"), "thread"), "other")
    with pytest.raises(SnapshotError, match="'gone' of thread 'thread'") as caught:
        await book.ledgers().line(plain)
    assert caught.value.code is Code.MISSING_CHECKPOINT


async def test_copies_of_each_other_are_refused(book: Writer) -> None:
    first = book.copy("first", Checkpoint(id="second", thread_id="thread"), "thread")
    book.copy("second", first, "thread")
    with pytest.raises(SnapshotError):
        await book.ledgers().line(first)


async def test_a_plain_capture_has_what_had_ended_when_it_was_made(book: Writer) -> None:
    book.create("A")
    book.done("A", "a")
    [began] = book.done("A", "under way", end=False)
    plain = Checkpoint(id="plain", thread_id="thread", created_at=book.now)
    book.complete(began)
    book.done("A", "later")
    assert await book.names(await book.ledgers().line(plain)) == "a"
    assert await book.uncertain(plain) == [began]
    early = Checkpoint(id="early", thread_id="thread", created_at=0)
    assert (await book.ledgers().line(early)).point == Point("thread", 0)


async def test_a_line_tells_its_step_its_sandbox_and_the_snapshot_beside_it(book: Writer) -> None:
    made = book.create("A")
    book.done("A", "a", step=4)
    first = book.save("A", "first", snapshot="native-1")
    opened = book.append("thread", EventKind.OPENED, sandbox_id="A")
    book.done("A", "b", step=5)
    second = book.save("A", "second")
    lines = [await book.ledgers().line(saved) for saved in (first, second)]
    assert [(line.step, line.sandbox, line.snapshot) for line in lines] == [(4, made, "native-1"), (5, opened, None)]


async def test_the_newest_sandbox_is_the_one_to_be_opened_again(book: Writer) -> None:
    assert await book.ledgers().sandbox("thread") is None
    made = book.create("A")
    book.done("A", "a")
    assert await book.ledgers().sandbox("thread") == made
    saved = book.save("A", "first")
    await book.resume("B", saved)
    opened = book.append("thread", EventKind.OPENED, sandbox_id="A")
    assert await book.ledgers().sandbox("thread") == opened
    book.append("thread", EventKind.CLOSED, sandbox_id="A")
    assert await book.ledgers().sandbox("thread") == opened
    book.append("thread", EventKind.CLOSED, sandbox_id="A", destroyed=True)
    assert await book.ledgers().sandbox("thread") is None, "not an older one, which is behind it"


# ---- replaying


async def test_another_command_at_that_place_is_an_error_and_consumes_nothing(book: Writer) -> None:
    """Case 37."""
    book.create("A")
    book.done("A", "a", "b")
    replay = await replay_of(book, book.save("A", "first"))
    for wrong in (exec_of("b"), exec_of("c"), checkpoint_of("first"), Operation(kind="write", command=("a",))):
        with pytest.raises(ReplayDivergedError, match=r"exec a: event 3 of thread 'thread'"):
            await replay.match(wrong)
        assert replay.remaining == 3
    for name in ("a", "b"):
        found = await replay.match(exec_of(name))
        assert found is not None
        assert (found.event.operation, found.event.kind) == (exec_of(name), EventKind.EXEC_COMPLETED)
        again = await replay.match(exec_of(name))
        assert again == found, "finding does not consume"
        replay.consume(found)
    assert replay.remaining == 1


@pytest.mark.parametrize(
    "change",
    [
        {"command": ("a", "")},
        {"command": ("a b",)},
        {"cwd": "/"},
        {"user": "root"},
        {"environment": ("A",)},
        {"input": b"x" * 32},
        {"kind": "write"},
    ],
)
async def test_each_part_of_an_operation_tells_it_from_others(book: Writer, change: dict[str, Any]) -> None:
    """Case 37."""
    book.create("A")
    fields: dict[str, Any] = {"kind": "exec", "command": ("a", "b"), "cwd": None}
    book.execute("thread", "A", Operation(**fields))
    replay = await replay_of(book, book.save("A", "first"))
    with pytest.raises(ReplayDivergedError):
        await replay.match(Operation(**(fields | change)))
    assert await replay.match(Operation(**fields)) is not None


async def test_checkpoints_may_be_passed_over_and_other_operations_not(book: Writer) -> None:
    book.create("A")
    book.save("A", "zero")
    book.save("A", "one")
    book.done("A", "a")
    replay = await replay_of(book, book.save("A", "two"))
    with pytest.raises(ReplayDivergedError, match="exec a"):
        await replay.match(checkpoint_of("two"))
    one = await replay.match(checkpoint_of("one"))
    a = await replay.match(exec_of("a"))
    assert one is not None
    assert a is not None
    assert (one.event.checkpoint_id, a.event.operation) == ("one", exec_of("a"))
    replay.consume(a)
    assert replay.remaining == 1
    assert await replay.match(exec_of("live")) is None
    assert await replay.match(checkpoint_of("another")) is None
    assert (await replay.match(checkpoint_of("two"))) is not None
    assert replay.leave() is None
    assert replay.remaining == 0
    assert await replay.match(checkpoint_of("two")) is None, "something else was done since"


async def test_automatic_checkpoints_are_no_operations(book: Writer) -> None:
    book.create("A")
    book.save("A", "automatic", automatic=True)
    book.done("A", "a")
    assert await book.names(await book.ledgers().line(book.save("A", "last", automatic=True))) == "a"


async def test_what_was_given_up_is_not_replayed_again(book: Writer) -> None:
    book.create("A")
    book.done("A", "a", "b", "c")
    saved = book.save("A", "first")
    await book.resume("B", saved)
    replay = await replay_of(book, saved)
    found = await replay.match(exec_of("a"))
    assert found is not None
    replay.consume(found)
    left = replay.leave()
    assert left == Point("thread", 5)
    book.done("B", "d", drops=left)
    assert await book.names(await book.ledgers().line(book.save("B", "second"))) == "a d second"
    assert await book.names(await book.ledgers().line(saved)) == "a b c first"


async def test_a_rerun_takes_the_place_of_what_it_reran(book: Writer) -> None:
    book.create("A")
    [old] = book.done("A", "install", outside=True)
    book.done("A", "a")
    saved = book.save("A", "first")
    for box in "BC":
        await book.resume(box, saved)
        replay = await replay_of(book, saved)
        found = await replay.match(exec_of("install"))
        assert found is not None
        assert found.fresh
        [old] = book.done(box, "install", outside=True, reruns=found.event.id)
        saved = book.save(box, f"saved-{box}", automatic=True)
    line = await book.ledgers().line(saved)
    assert await book.names(line) == "install a first"
    assert line.point_of(0) == Point("thread", old.sequence)


async def test_a_native_snapshot_shows_what_was_done_outside_and_a_restored_sandbox_does_not(book: Writer) -> None:
    book.create("A")
    book.done("A", "a", outside=True)
    first = book.save("A", "first", snapshot="one")
    await book.resume("B", first, snapshot="one")
    book.done("B", "b", outside=True)
    second = book.save("B", "second", snapshot="two")
    for keeps, fresh in ((True, []), (False, ["a", "b"])):
        replay = await replay_of(book, second, keeps_outside=keeps)
        assert [name for name in ("a", "b") if await is_fresh(replay, name)] == fresh
    await book.resume("C", second)
    book.done("C", "c", outside=True)
    replay = await replay_of(book, book.save("C", "third"), keeps_outside=True)
    assert [name for name in ("a", "b", "c") if await is_fresh(replay, name)] == ["a", "b"]


async def is_fresh(replay: Replay, name: str) -> bool:
    """Whether the next operation, which is consumed, must be run again."""
    found = await replay.match(exec_of(name))
    if found is None:
        found = await replay.match(checkpoint_of(name))
    assert found is not None
    replay.consume(found)
    return found.fresh


async def test_what_nobody_said_reaches_outside_is_told_of(book: Writer) -> None:
    book.create("A")
    book.done("A", "a", "b")
    book.done("A", "inside", outside=False)
    book.done("A", "outside", outside=True)
    saved = book.save("A", "first")
    replay = await replay_of(book, saved)
    assert [event.operation for event in await replay.unsaid(10)] == [exec_of("a"), exec_of("b")]
    assert len(await replay.unsaid(1)) == 1
    assert await (await replay_of(book, saved, keeps_outside=True)).unsaid(10) == []


async def test_what_must_not_be_done_twice_is_not_run_again_for_what_it_did_outside(book: Writer) -> None:
    book.create("A")
    [paid] = book.done("A", "pay", outside=True, at_most_once=True)
    replay = await replay_of(book, book.save("A", "first"))
    assert await replay.unsaid(10) == [paid]
    assert not await is_fresh(replay, "pay")


# ---- what nobody knows the end of


async def test_an_execution_without_an_end_is_uncertain_until_it_is_rerun(book: Writer) -> None:
    book.create("A")
    saved = book.save("A", "first")
    [began] = book.done("A", "a", end=False)
    assert await book.uncertain(saved) == [began]
    [again] = book.done("A", "a", end=False, reruns=began.id)
    assert await book.uncertain(saved) == [again]
    book.done("A", "a", reruns=again.id)
    assert await book.uncertain(saved) == []


async def test_what_must_not_be_done_twice_stays_done_on_an_abandoned_line(book: Writer) -> None:
    book.create("A")
    first = book.save("A", "first")
    [paid] = book.done("A", "pay", at_most_once=True)
    book.done("A", "other")
    second = book.save("A", "second")
    assert [event.id for event in await book.uncertain(first)] == [paid.started_id]
    assert await book.uncertain(second) == []


async def test_an_interrupted_rerun_of_what_is_replayed_is_not_uncertain(book: Writer) -> None:
    """It is run again at its place anyway; the rerun that was given up with its list is."""
    book.create("A")
    [old] = book.done("A", "install", outside=True)
    saved = book.save("A", "first")
    await book.resume("B", saved)
    [cut] = book.done("B", "install", outside=True, reruns=old.id, end=False)
    await book.resume("C", saved)
    book.done("C", "install", outside=True, reruns=old.id)
    third = book.save("C", "third")
    assert await book.uncertain(saved) == await book.uncertain(third) == []
    book.done("C", "a", drops=(await book.ledgers().line(third)).point_of(0))
    book.done("C", "b", "c", "d")
    assert await book.uncertain(book.save("C", "fourth")) == [cut]


async def test_a_fork_inherits_what_may_have_been_done_to_its_files_and_nothing_done_later(book: Writer) -> None:
    book.create("A")
    [began] = book.done("A", "a", end=False)
    forked = book.copy("forked", book.save("A", "first"), "other")
    book.done("A", "later", end=False)
    book.done("A", "pay", at_most_once=True)
    book.done("A", "a", reruns=began.id)
    await book.resume("B", forked)
    assert await book.uncertain(forked) == [began]
    book.done("B", "a", thread_id="other", reruns=began.id)
    assert await book.uncertain(forked) == []


# ---- ledgers


async def test_a_long_ledger_is_read_once_and_by_pages(book: Writer) -> None:
    book.create("A")
    for number in range(5_000):
        book.done("A", f"op-{number}")
    saved = book.save("A", "first")
    ledgers = book.ledgers()
    replay = Replay(ledgers, await ledgers.line(saved), keeps_outside=False)
    assert await ledgers.uncertain("thread") == ()
    read = sum(book.pages)
    assert 10_002 <= read <= 10_002 + 128
    for number in range(5_000):
        found = await replay.match(exec_of(f"op-{number}"))
        assert found is not None
        replay.consume(found)
    assert max(book.pages) <= 256
    assert sum(book.pages) - read <= 1.1 * 10_002
    assert len(ledgers._kept) <= 128


@pytest.mark.parametrize("place", [3, 2**40])
async def test_a_ledger_that_does_not_hold_what_led_here_is_damaged(book: Writer, place: int) -> None:
    book.create("A")
    saved = book.save("A", "first")
    book.append("thread", EventKind.RESUMED, sandbox_id="B", checkpoint_id="first", continues=Point("thread", place))
    for ask in (book.ledgers().present("thread", "B"), book.ledgers().event(Point("thread", 17))):
        with pytest.raises(RepositoryError) as caught:
            await ask
        assert caught.value.code is Code.DAMAGED
    assert await book.names(await book.ledgers().line(saved)) == "first"


def test_a_gap_in_a_ledger_is_damage(book: Writer) -> None:
    trail = Trail("thread")
    trail.add(book.create("A"))
    book.create("A")
    with pytest.raises(RepositoryError, match="gap") as caught:
        trail.add(book.create("A"))
    assert caught.value.code is Code.DAMAGED


def test_messages_show_commands_as_they_are_typed_and_not_for_ever() -> None:
    assert describe(Operation(kind="exec", command=("sh", "-c", "ls\n| wc"))) == r"exec ls\n| wc"
    assert describe(Operation(kind="checkpoint")) == "checkpoint"
    assert len(describe(exec_of("x" * 5000))) < 250


@pytest.fixture
async def store() -> AsyncIterator[SqlCheckpointStore]:
    store = SqlCheckpointStore("sqlite://")
    await store.initialize(IDENTITY)
    yield store
    await store.close()


async def test_a_line_is_found_in_a_real_store(book: Writer, store: SqlCheckpointStore) -> None:
    book.create("A")
    book.done("A", *(f"op-{number}" for number in range(200)))
    saved = book.save("A", "first")
    await book.resume("B", saved)
    book.done("B", "b")
    lease, _ = await acquire(store, "thread")
    claim = await store.claim_ledger(lease, "0" * 32)
    for event in book.threads["thread"]:
        await store.append_event(claim, event)
    ledgers = Ledgers(store)
    line = await ledgers.present("thread", "B")
    assert await book.names(line) == " ".join([*(f"op-{number}" for number in range(200)), "first", "b"])
    replay = Replay(ledgers, line, keeps_outside=False)
    for number in range(200):
        found = await replay.match(exec_of(f"op-{number}"))
        assert found is not None
        replay.consume(found)
    assert await ledgers.uncertain("thread", line) == ()
