"""Every order of the steps of small worlds, on the real SQL store: writers, gcs, forks, deletions and leases that run out.

No order may leave a checkpoint or a pin without a record, take a healthy writer's pack, or keep gc from freeing in the end
all that nobody needs (cases 34, 35 and 38). `BROKEN` takes one rule of `sql_packs`, `sql_gc`, `sql_leases` or
`sql_checkpoints` away at a time, and names a world in which some order is then found that breaks. Two can be taken away
without harm to any checkpoint and are tested to be harmless: the fence of gcs, and the rows that a sweep drops.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import delete, false, update

from snapcore.errors import SnapshotError
from snapcore.maintenance import Roots
from snapcore.model import PackState
from snapcore.stores import sql_checkpoints, sql_gc, sql_leases, sql_packs
from snapcore.stores import sql_schema as schema

from .gc_world import SHORT, Actor, Collector, Copier, Deleter, World, Writer, capture, close_world, make_world, run

Setup = Callable[[World], Sequence[Actor]]


def writer(name: str, thread: str, contents: str, **fields: Any) -> Writer:
    return Writer(name, thread=thread, contents=frozenset(contents), **fields)


def found_again(world: World) -> Sequence[Actor]:
    """What a deletion makes garbage is found again by a writer of another thread."""
    capture(world, "first", "one", "a")
    return [writer("w", "two", "a"), Deleter("d", thread="one", checkpoint="first"), Collector("gc")]


def inherited(world: World) -> Sequence[Actor]:
    """A writer keeps contents of another thread's checkpoint, which it never looks for."""
    capture(world, "first", "one", "a")
    return [
        writer("w", "two", "ab", kept=frozenset("a")),
        Deleter("d", thread="one", checkpoint="first"),
        Collector("gc"),
    ]


def stored_twice(world: World) -> Sequence[Actor]:
    """Two writers store the same at once; the lease of one may run out."""
    writers = [writer("w", "two", "c", early=True, ttl=SHORT), writer("v", "three", "c")]
    return [*looked(world, writers), Collector("gc")]


def stored_twice_and_deleted(world: World) -> Sequence[Actor]:
    """Two writers have entered packs with the same content in them, in other trees; their checkpoints are deleted again."""
    writers = [writer("w", "two", "c", early=True), writer("v", "three", "cd", early=True)]
    deleters = [Deleter("d", thread="two", checkpoint="w"), Deleter("e", thread="three", checkpoint="v")]
    return [*looked(world, writers, steps=6), *deleters, Collector("gc")]


def looked(world: World, writers: Sequence[Writer], steps: int = 2) -> Sequence[Actor]:
    """The writers, when each has done its first steps: begun and looked, put and entered a pack, reserved another and put it."""
    for actor in writers:
        world.add(actor)
    for _ in range(steps):
        for actor in writers:
            world.step(actor.name)
    return [world.actors.pop(actor.name) for actor in writers]


def repacked(world: World) -> Sequence[Actor]:
    """A pack is repacked for what is live in it, while a writer finds what is dead in it."""
    capture(world, "first", "one", "ab")
    capture(world, "second", "one", "a")
    world.add(Deleter("x", thread="one", checkpoint="first"))
    for _ in range(3):
        world.step("x")
    return [writer("w", "two", "b"), Deleter("d", thread="one", checkpoint="second"), Collector("gc", repack=True)]


def two_gcs(world: World) -> Sequence[Actor]:
    """Two gcs, one of which goes on though it was superseded."""
    capture(world, "first", "one", "a")
    world.add(Deleter("x", thread="one", checkpoint="first"))
    for _ in range(3):
        world.step("x")
    world.add(Collector("gc"))
    for _ in range(2):
        world.step("gc")
    return [*looked(world, [writer("w", "two", "a")]), world.actors.pop("gc"), Collector("gd", repack=True)]


def forked(world: World) -> Sequence[Actor]:
    """A fork of a checkpoint that is being deleted."""
    capture(world, "first", "one", "a")
    source = run(world.store.head("one"))
    return [Copier("f", thread="two", source=source), Deleter("d", thread="one", checkpoint="first"), Collector("gc")]


def rewound(world: World) -> Sequence[Actor]:
    """A rewind to a checkpoint that another process deletes once the lease has run out."""
    capture(world, "first", "one", "a")
    capture(world, "second", "two", "b")
    source = run(world.store.head("one"))
    return [
        Copier("r", kind="rewind", thread="two", source=source),
        Deleter("d", thread="one", checkpoint="first"),
        Collector("gc"),
    ]


def pinned(world: World) -> Sequence[Actor]:
    """A reader holds what is deleted and collected."""
    capture(world, "first", "one", "a")
    source = run(world.store.head("one"))
    assert source is not None
    world.pin(source, SHORT)
    return [Deleter("d", thread="one", checkpoint="first"), Collector("gc", repack=True)]


def relabelled(world: World) -> Sequence[Actor]:
    """A checkpoint gets a label, and with it another record."""
    capture(world, "first", "one", "a")
    return [Copier("l", kind="label", thread="one", source=run(world.store.head("one"))), Collector("gc", repack=True)]


WORLDS = (
    found_again,
    inherited,
    stored_twice,
    stored_twice_and_deleted,
    repacked,
    two_gcs,
    forked,
    rewound,
    pinned,
    relabelled,
)


class Orders:
    """All orders of the steps of a world, as a search through its states, nearest first. `states` counts them."""

    def __init__(self, setup: Setup) -> None:
        self.world = make_world()
        for actor in setup(self.world):
            self.world.add(actor)
        self.world.coarse = True
        self.leases = any(getattr(a, "ttl", None) == SHORT for a in self.world.actors.values()) or bool(self.world.pins)
        self.states = 0

    def explore(self) -> None:
        """Check each state; raises `AssertionError` with the way to the first that is broken."""
        world = self.world
        seen = {world.key()}
        queue: deque[tuple[Any, tuple[str, ...]]] = deque([(world.save(), ())])
        while queue:
            saved, way = queue.popleft()
            self.states += 1
            world.load(saved)
            steps = [*world.actors, *(["time"] if self.leases and "time" not in way else [])]
            if not steps:
                self._check(way, world.end)
            for step in steps:
                world.load(saved)
                if step == "time":
                    world.expire()
                else:
                    world.step(step)
                self._check((*way, step), world.check)
                key = world.key()
                if key not in seen:
                    seen.add(key)
                    queue.append((world.save(), (*way, step)))

    def _check(self, way: tuple[str, ...], check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            raise AssertionError(f"after {', '.join(way)}: {error}") from error


@contextmanager
def orders(setup: Setup) -> Iterator[Orders]:
    found = Orders(setup)
    try:
        yield found
    finally:
        close_world(found.world)


@pytest.mark.parametrize("setup", WORLDS)
def test_no_order_of_steps_loses_a_record_or_keeps_garbage(setup: Setup) -> None:
    """Cases 34, 35 and 38: gc, other writers, deletions and the end of a lease, between any two steps."""
    with orders(setup) as found:
        found.explore()
        assert found.states > 20


# ---- one rule taken away at a time


def _no_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql_gc, "_still", lambda mark: schema.packs.c.state == PackState.LIVE)


def _no_new_number(patch: pytest.MonkeyPatch) -> None:
    move = sql_gc.move_records

    def broken(tx: Any, run: Any, mark: int, pack: Any, sources: Any) -> list[str]:
        free = move(tx, run, mark, pack, sources)
        tx.connection.execute(update(schema.packs).where(schema.packs.c.pack_id == pack.pack_id).values(commit_seq=0))
        return free

    patch.setattr(sql_gc, "move_records", broken)
    _no_fence(patch)  # which hides it: a gc that has an older mark was superseded by the repack's


def _no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql_gc, "check", lambda tx, run: None)


def _all_sources(patch: pytest.MonkeyPatch) -> None:
    move = sql_gc.move_records
    patch.setattr(sql_gc, "move_records", lambda tx, run, mark, pack, sources: move(tx, run, tx.seq, pack, sources))


def _refs_not_stamped(patch: pytest.MonkeyPatch) -> None:
    settle = sql_packs.settle

    def broken(tx: Any, lease: Any, commit: Any, needed: Any) -> None:
        settle(tx, lease, type(commit)(packs=commit.packs, own=commit.own), [])

    patch.setattr(sql_packs, "settle", broken)


def _spares_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql_packs, "_settle_spares", lambda tx, own: set())


def _spares_not_stamped(patch: pytest.MonkeyPatch) -> None:
    settle = sql_packs._settle_spares

    def broken(tx: Any, own: set[int]) -> set[int]:
        settle(tx, own)
        return set()

    patch.setattr(sql_packs, "_settle_spares", broken)


def _spares_not_left(patch: pytest.MonkeyPatch) -> None:
    adopt = sql_packs._adopt

    def broken(tx: Any, spares: Any) -> None:
        adopt(tx, spares)
        tx.connection.execute(delete(schema.spares).where(schema.spares.c.id.in_(list(spares))))

    patch.setattr(sql_packs, "_adopt", broken)


def _spares_of_condemned_packs_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql_gc, "delete", lambda table: delete(table).where(false()) if table is schema.spares else delete(table))


def _strangers_packs_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql_packs, "_KEPT", (PackState.LIVE, PackState.CONDEMNED, PackState.WRITING))


def _all_writers_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql_gc, "owned", lambda tx: false())


def _leases_unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql_leases, "check", lambda tx, lease: None)


def _pins_ignored(patch: pytest.MonkeyPatch) -> None:
    whole = sql_gc.roots

    def broken(tx: Any) -> Roots:
        tx.connection.execute(delete(schema.pins))
        return whole(tx)

    patch.setattr(sql_gc, "roots", broken)


def _late_mark(patch: pytest.MonkeyPatch) -> None:
    whole = sql_gc.roots

    def broken(tx: Any) -> Roots:
        roots = whole(tx)
        return Roots(roots.mark + 5, roots.now, roots.records, roots.manifests, roots.chunks, roots.chunk_lists)

    patch.setattr(sql_gc, "roots", broken)


def _source_not_locked(patch: pytest.MonkeyPatch) -> None:
    require, seq = sql_checkpoints.require, sql_checkpoints._seq

    def broken(tx: Any, thread_id: str, checkpoint_id: str) -> Any:
        with suppress(SnapshotError):
            return require(tx, thread_id, checkpoint_id)

    patch.setattr(sql_checkpoints, "require", broken)
    patch.setattr(sql_checkpoints, "_seq", lambda tx, i: seq(tx, i) if sql_checkpoints.find(tx, i, None) else 0)


def _condemned_not_revived(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql_packs, "PackState", _Live)


class _Live(PackState):
    LIVE = PackState.CONDEMNED  # type: ignore[misc]


BROKEN = {
    "a pack is condemned though referred to since the mark": (_no_number, found_again),
    "a repacked pack gets no new number, and there is no fence": (_no_new_number, two_gcs),
    "sources referred to since the mark are condemned": (_all_sources, repacked),
    "packs of what was found are not stamped": (_refs_not_stamped, found_again),
    "packs of what was inherited are not stamped": (_refs_not_stamped, inherited),
    "spares are ignored": (_spares_ignored, stored_twice),
    "the pack that has a spare's row is not stamped": (_spares_not_stamped, stored_twice_and_deleted),
    "no spare is left to the other writer": (_spares_not_left, stored_twice_and_deleted),
    "spares of condemned packs are kept": (_spares_of_condemned_packs_kept, stored_twice),
    "a pack that another is writing is relied on": (_strangers_packs_trusted, stored_twice),
    "packs of healthy writers are given up": (_all_writers_given_up, stored_twice),
    "leases are not checked": (_leases_unchecked, stored_twice),
    "pins are no roots": (_pins_ignored, pinned),
    "the mark is later than the roots": (_late_mark, found_again),
    "a fork's source is not locked": (_source_not_locked, forked),
    "a rewind's source is not locked": (_source_not_locked, rewound),
    "a stamp does not revive what was condemned": (_condemned_not_revived, found_again),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_with_a_rule_broken_some_order_of_steps_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, setup = BROKEN[rule]
    with orders(setup) as found:
        break_it(monkeypatch)
        with pytest.raises(AssertionError, match=r"^after "):
            found.explore()


@pytest.mark.parametrize("setup", [two_gcs, repacked])
def test_without_the_fence_of_gcs_no_checkpoint_is_hurt(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_fence(monkeypatch)
    with orders(setup) as found:
        found.explore()


def test_rows_that_outlive_a_sweep_hurt_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_gc, "delete", lambda table: delete(table).where(false()) if table is schema.chunks else delete(table))
    with orders(found_again) as found, pytest.raises(AssertionError, match="rows lead to packs that are gone"):
        found.explore()
