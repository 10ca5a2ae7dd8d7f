"""Random long work on the real SQL store: writers, copiers, deletions, readers and gcs take steps in any order (case 34).

After each step every record of every checkpoint and of every pin in force lies where its row says, in a pack that stays; no
healthy writer has lost its pack; and when all is over, two gcs leave what is needed and nothing else. The world and its
checks are those of `test_gc_orders`, which shows that they find a rule that is broken.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import false

from snapcore.model import Checkpoint
from snapcore.stores import sql_gc

from .gc_world import LONG, SHORT, Actor, Collector, Copier, Deleter, Writer, close_world, make_world, run

THREADS = st.sampled_from(["one", "two", "three"])
CONTENTS = st.frozensets(st.sampled_from("abcd"), min_size=1)
LASTS = st.sampled_from([SHORT, LONG])
PICK = st.integers(0, 1000)
STEPS = st.sampled_from([0, 2, 3, 5, 99])  # that are taken at once
AT_ONCE = 6
SETTINGS = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    database=None,
)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = make_world()
        self.named = 0

    def name(self) -> str:
        self.named += 1
        return f"n{self.named}"

    def some(self, pick: int) -> Checkpoint | None:
        """One of all checkpoints."""
        world = self.world
        places = [(thread, i) for thread, ids in sorted(world.threads.items()) for i in ids]
        return run(world.store.get(*places[pick % len(places)])) if places else None

    def begin(self, actor: Actor, steps: int) -> None:
        self.world.add(actor)
        self.go_on(actor.name, steps)

    def go_on(self, name: str, steps: int) -> None:
        for _ in range(steps):
            if name in self.world.actors:
                self.world.step(name)
                self.world.check()

    def has_room(self) -> bool:
        return len(self.world.actors) < AT_ONCE

    def has_checkpoint(self) -> bool:
        return any(self.world.threads.values())

    @precondition(has_room)
    @rule(thread=THREADS, contents=CONTENTS, base=PICK, kept=CONTENTS, ttl=LASTS, early=st.booleans(), steps=STEPS)
    def a_capture_begins(
        self, thread: str, contents: frozenset[str], base: int, kept: frozenset[str], ttl: float, early: bool, steps: int
    ) -> None:
        source = self.some(base)
        inherited = self.world.trees[source.roots[0].manifest] & kept if source is not None else frozenset()
        writer = Writer(self.name(), thread=thread, contents=contents | inherited, kept=inherited, ttl=ttl, early=early)
        self.begin(writer, steps)

    @precondition(lambda self: self.has_room() and self.has_checkpoint())
    @rule(kind=st.sampled_from(["fork", "rewind", "label"]), pick=PICK, thread=THREADS, steps=STEPS)
    def a_copy_begins(self, kind: str, pick: int, thread: str, steps: int) -> None:
        source = self.some(pick)
        assert source is not None
        place = source.thread_id if kind == "label" else thread
        if kind != "fork" or place != source.thread_id:
            self.begin(Copier(self.name(), kind=kind, source=source, thread=place), steps)

    @precondition(lambda self: self.has_room() and self.has_checkpoint())
    @rule(pick=PICK, steps=STEPS)
    def a_deletion_begins(self, pick: int, steps: int) -> None:
        source = self.some(pick)
        assert source is not None
        self.begin(Deleter(self.name(), thread=source.thread_id, checkpoint=source.id), steps)

    @precondition(has_room)
    @rule(repack=st.booleans(), steps=STEPS)
    def a_gc_begins(self, repack: bool, steps: int) -> None:
        self.begin(Collector(self.name(), repack=repack), steps)

    @precondition(lambda self: self.world.actors)
    @rule(pick=PICK, steps=STEPS)
    def someone_goes_on(self, pick: int, steps: int) -> None:
        self.go_on(sorted(self.world.actors)[pick % len(self.world.actors)], steps + 1)

    @precondition(lambda self: self.world.actors)
    @rule(pick=PICK)
    def someone_stops_for_ever(self, pick: int) -> None:
        self.world.give_up(sorted(self.world.actors)[pick % len(self.world.actors)])

    @precondition(has_checkpoint)
    @rule(pick=PICK, ttl=LASTS)
    def a_restore_pins(self, pick: int, ttl: float) -> None:
        source = self.some(pick)
        assert source is not None
        self.world.pin(source, ttl)

    @precondition(lambda self: self.world.pins)
    @rule(pick=PICK)
    def a_restore_ends(self, pick: int) -> None:
        self.world.unpin(sorted(self.world.pins)[pick % len(self.world.pins)])

    @rule()
    def time_passes(self) -> None:
        self.world.expire()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        try:
            self.world.end()
        finally:
            close_world(self.world)


def test_whatever_happens_beside_gc_nothing_is_lost_and_garbage_goes() -> None:
    """Case 34: a blob is never deleted while it is, or may come to be, referred to."""
    run_state_machine_as_test(Machine, settings=SETTINGS)


def test_the_machine_finds_a_gc_that_gives_healthy_writers_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_gc, "owned", lambda tx: false())
    quick = settings(SETTINGS, max_examples=400, phases=[Phase.generate], verbosity=Verbosity.quiet, report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=quick)
