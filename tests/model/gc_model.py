"""A model of what commits, gc and readers do to packs, small enough that every order of their steps can be tried.

Each step is one transaction of the checkpoint store, or one request to the blob store. There are no clocks: a grace may be
over at once, and whoever has begun may stop for ever after any step or go on much later. With `leases="free"` a lease
protects nothing: gc may take any pack that is being written for abandoned, and a writer commits all the same, as long as
its pack is still its own. With `leases="checked"` they are as the stores have them.

The world has three records. `a` and `b` lie in pack 0 from the start, in the heads 0 and 1 of the threads 0 and 1; `c` is
content that nobody has stored yet. Writer 0 makes checkpoint 2 on thread 0 and stores into pack 1, writer 1 makes
checkpoint 3 on thread 1 and stores into pack 2; the repacker makes pack 3; a fork makes checkpoint 9 on thread 2.

What must hold in every state: each record of each checkpoint, and of each pin in force, has a row that leads to a pack which
is live or condemned; and no writer whose lease is in force loses its pack.

`FIXED` are the rules of the stores. Changing one gives a variant, whose shortest way to a broken checkpoint is printed by

    python tests/model/gc_model.py            # all runs but the large ones
    python tests/model/gc_model.py NAME ...   # those whose name begins so, large ones too (minutes to hours)
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T")

RECORDS: Final = (0, 1, 2)
NAMES: Final = "abc"
UNUSED, WRITING, LIVE, CONDEMNED, GONE = range(5)  # GONE: its rows are dropped and its blob may vanish at any time
KEPT: Final = (LIVE, CONDEMNED)
NOWHERE: Final = 9
NOBODY: Final = 99
REPACKED: Final = 3  # the number of the repacker's pack
IDLE, LOOKING, RESERVED, STORED, ENTERED, COMMITTING, REWINDING, DONE = range(8)
MARKED, LISTED, JUDGED = 11, 12, 13  # what a collector has done


class Pack(NamedTuple):
    """`seq` is the number of the newest commit that stamped it."""

    state: int = UNUSED
    seq: int = 0


class Writer(NamedTuple):
    """Sets of records are bits. `kept` come from `base` unseen, `found` were met in the store, `stored` are in its own pack."""

    at: int = IDLE
    kept: int = 0
    parent: int = NOBODY
    wanted: int = 0
    found: int = 0
    seen_in: tuple[int, ...] = ()  # packs in which they were found
    stored: int = 0
    alive: bool = True
    number: int = 0  # a sequence number taken before the commit
    source: int = NOBODY  # of a rewind


class Collector(NamedTuple):
    """A gc: its mark, what was live then, and the packs that had nothing of it."""

    at: int = IDLE
    mark: int = 0
    live: int = 0
    garbage: int = 0
    listed: int = 0  # threads read so far, where that takes several statements


class Repacker(NamedTuple):
    at: int = IDLE
    mark: int = 0
    live: int = 0
    sources: tuple[int, ...] = ()
    records: int = 0


class State(NamedTuple):
    seq: int
    packs: tuple[Pack, ...]
    rows: tuple[int, ...]  # of each record: the pack that its row leads to
    spares: tuple[int, ...]  # of each pack: records whose row leads elsewhere
    checkpoints: tuple[tuple[int, int, int], ...]  # id, thread, records
    writers: tuple[Writer, ...]
    collectors: tuple[Collector, ...]
    repacker: Repacker
    pin: tuple[int, int, int]  # state of the reader, checkpoint, records
    forking: tuple[int, int]  # state of the fork, records
    deletes: int  # that may still happen
    fence: int  # who began gc last
    robbed: bool = False  # a writer lost its pack though its lease was in force


@dataclass(frozen=True)
class Rules:
    """Each default is the stores' rule; the comments name the alternatives."""

    leases: str = "free"  # checked
    numbers: str = "locked"  # early: taken from a sequence, before the commit is visible
    mark: str = "one"  # late: after the live set; paged: mark and roots in one statement each
    stamps: str = "head"  # base: what is inherited is not stamped
    any_base: bool = True  # False: only the head is ever a base
    check_head: bool = True
    resolve: str = "commit"  # look-up: the pack in which a record was found is stamped, wherever its row leads now
    spares: str = "settled"  # ignored; unstamped: the pack that has the row is not stamped; taken: none is left to the other
    sweep: str = "state"  # list: does not look again; rows: leaves the rows
    condemn: str = "number"  # list: does not look at the number again
    moved: str = "stamped"  # unstamped: a repacked pack keeps number 0
    sources: str = "checked"  # unchecked: condemned though referred to since the mark
    fork: str = "one"  # two: reads its source, then inserts
    rewind: str = "checked"  # unchecked: whether its source is still there
    pin: str = "roots"  # id: of a checkpoint only
    fenced: bool = False  # True: only who began last goes on
    renewals: str = "alive"  # dead: a lease that has run out may be renewed


FIXED: Final = Rules()


@dataclass(frozen=True)
class Run:
    """A world to be tried: who is in it, and by which rules."""

    name: str
    writers: int = 0
    collectors: int = 0
    deletes: int = 2
    repacker: bool = False
    reader: bool = False
    fork: bool = False
    rules: Rules = FIXED
    large: bool = False
    wants: tuple[int, ...] = (0, 1, 2, 4)  # sets of records that a writer may want beside what it keeps
    keeps: bool = True  # whether writers keep anything of a base


@dataclass(frozen=True)
class Result:
    """`broken` says what went wrong and after which steps; None when nothing can."""

    states: int
    broken: str | None
    steps: tuple[str, ...] = ()


Step = tuple[str, State]


def bits(records: int) -> list[int]:
    return [record for record in RECORDS if records >> record & 1]


def show(records: int) -> str:
    return "".join(NAMES[record] for record in bits(records)) or "nothing"


def put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


class Model:
    """One run: its first state, the steps from each state, and the search."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rules = run.rules
        self.first = State(
            seq=1,
            packs=(Pack(LIVE, 1), Pack(), Pack(), Pack()),
            rows=(0, 0, NOWHERE),
            spares=(0, 0, 0, 0),
            checkpoints=((0, 0, 1), (1, 1, 2)),
            writers=(Writer(),) * run.writers,
            collectors=(Collector(),) * run.collectors,
            repacker=Repacker(),
            pin=(0, 0, 0),
            forking=(0, 0),
            deletes=run.deletes,
            fence=NOBODY,
        )

    # ---- what is so in a state

    def head(self, s: State, thread: int) -> tuple[int, int]:
        """Id and records of the thread's newest checkpoint."""
        return max(((c, records) for c, of, records in s.checkpoints if of == thread), default=(NOBODY, 0))

    def live(self, s: State, threads: tuple[int, ...] = (0, 1, 2)) -> int:
        live = 0
        for _, thread, records in s.checkpoints:
            if thread in threads:
                live |= records
        if s.pin[0] == 1:
            by_id = {c: records for c, _, records in s.checkpoints}
            live |= s.pin[2] if self.rules.pin == "roots" else by_id.get(s.pin[1], 0)
        return live

    def broken(self, s: State) -> str | None:
        needed = [(f"checkpoint {c}", records) for c, _, records in s.checkpoints]
        if s.pin[0] == 1:
            needed.append(("a pin in force", s.pin[2]))
        for what, records in needed:
            for record in bits(records):
                pack = s.rows[record]
                if pack == NOWHERE or s.packs[pack].state not in KEPT:
                    return f"{what} needs {NAMES[record]}, which is gone"
        return "a writer lost its pack though its lease was in force" if s.robbed else None

    # ---- steps

    def steps(self, s: State) -> Iterator[Step]:
        if s.deletes:
            for c in s.checkpoints:
                left = tuple(other for other in s.checkpoints if other != c)
                yield f"delete checkpoint {c[0]}", s._replace(checkpoints=left, deletes=s.deletes - 1)
        for who, w in enumerate(s.writers):
            yield from self._writer(s, who, w)
        for who, g in enumerate(s.collectors):
            if g.at and self.rules.fenced and s.fence != who:
                continue
            yield from self._collector(s, who, g)
        if any(g.at == JUDGED for g in s.collectors) or s.repacker.at == DONE:
            yield from self._sweep(s)
        if self.run.repacker and not (s.repacker.at and self.rules.fenced and s.fence != REPACKED):
            yield from self._repack(s, s.repacker)
        if self.run.fork:
            yield from self._fork(s)
        if self.run.reader:
            yield from self._read(s)

    def _writer(self, s: State, who: int, w: Writer) -> Iterator[Step]:
        name, own = f"writer {who}", who + 1

        def become(state: State = s, **changes: Any) -> State:
            return state._replace(writers=put(state.writers, who, state.writers[who]._replace(**changes)))

        if self.rules.leases == "checked" and w.at not in (IDLE, DONE):
            if w.alive:
                yield f"{name}'s lease runs out", become(alive=False)
            elif self.rules.renewals == "dead":
                yield f"{name} renews its lease", become(alive=True)
        if w.at == IDLE:
            yield from self._begin(s, who, become)
        elif w.at == LOOKING:
            found = sum(1 << r for r in bits(w.wanted) if s.rows[r] != NOWHERE and self._is_known(s, s.rows[r]))
            seen_in = tuple(sorted({s.rows[r] for r in bits(found)}))
            if found == w.wanted:
                yield f"{name} finds {show(found)}", become(at=COMMITTING, found=found, seen_in=seen_in)
            elif s.packs[own].state == UNUSED:
                after = s._replace(packs=put(s.packs, own, Pack(WRITING)))
                yield (
                    f"{name} finds {show(found)} and reserves pack {own}",
                    become(after, at=RESERVED, found=found, seen_in=seen_in, stored=w.wanted & ~found),
                )
        elif w.at == RESERVED:
            yield f"{name} puts pack {own} with {show(w.stored)}", become(at=STORED)
        elif w.at == STORED and self._may_write(s, w, own):
            yield f"{name} enters pack {own}", become(self._enter(s, own, w.stored), at=ENTERED)
        if w.at in (STORED, ENTERED, COMMITTING):
            yield from self._commit(s, who, w, become)
        elif w.at == REWINDING and (self.rules.leases == "free" or w.alive):
            there = any(c == w.source for c, _, _ in s.checkpoints)
            if self.head(s, who)[0] == w.parent and (there or self.rules.rewind == "unchecked"):
                made = tuple(sorted((*s.checkpoints, (2 + who, who, w.kept))))
                yield f"{name} commits its rewind to {w.source}", become(s._replace(checkpoints=made, seq=s.seq + 1), at=DONE)

    def _is_known(self, s: State, pack: int) -> bool:
        return s.packs[pack].state in KEPT or (self.rules.sweep == "rows" and s.packs[pack].state == GONE)

    def _may_write(self, s: State, w: Writer, own: int) -> bool:
        return s.packs[own].state == WRITING and (self.rules.leases == "free" or w.alive)

    def _begin(self, s: State, who: int, become: Callable[..., State]) -> Iterator[Step]:
        head, head_records = self.head(s, who)
        bases = {head_records: head}
        if self.rules.any_base:
            for c, _, records in s.checkpoints:
                bases.setdefault(records, c)
        for records, base in bases.items():
            for kept in {records, 0} if self.run.keeps else {0}:
                for wanted in self.run.wants:
                    if kept & wanted or not kept | wanted:
                        continue
                    at = LOOKING if wanted else COMMITTING
                    yield (
                        f"writer {who} begins after {head}: keeps {show(kept)} of {base}, wants {show(wanted)}",
                        become(at=at, kept=kept, parent=head, wanted=wanted),
                    )
        for c, _, records in s.checkpoints if self.run.keeps else ():
            yield f"writer {who} will rewind to {c}", become(at=REWINDING, kept=records, parent=head, source=c)

    def _enter(self, s: State, own: int, stored: int) -> State:
        """Rows for records that have none; spares for the others."""
        rows, spare = list(s.rows), 0
        for record in bits(stored):
            if rows[record] == NOWHERE:
                rows[record] = own
            elif rows[record] != own:
                spare |= 1 << record
        return s._replace(rows=tuple(rows), spares=put(s.spares, own, spare))

    def _commit(self, s: State, who: int, w: Writer, become: Callable[..., State]) -> Iterator[Step]:
        name, own = f"writer {who}", who + 1
        if self.rules.numbers == "early" and not w.number:
            yield f"{name} takes number {s.seq + 1}", become(s._replace(seq=s.seq + 1), number=s.seq + 1)
            return
        if self.rules.leases == "checked" and not w.alive:
            return
        head, head_records = self.head(s, who)
        if self.rules.check_head and head != w.parent:
            return
        if w.stored and s.packs[own].state != WRITING:
            if self.rules.leases == "checked":
                yield f"{name} has lost its pack", become(s._replace(robbed=True), at=DONE)
            return
        after = self._enter(s, own, w.stored) if w.at == STORED else s
        stamped, after = self._settle_spares(after, own)
        if w.stored:
            stamped.add(own)
        referred = w.found | (w.kept & ~head_records if self.rules.stamps == "head" else 0)
        for record in bits(referred):
            pack = after.rows[record]
            if self.rules.resolve == "look-up" and w.found >> record & 1:
                continue
            if pack != NOWHERE and (after.packs[pack].state in KEPT or pack == own):
                stamped.add(pack)
            elif w.found >> record & 1 and not w.stored:
                yield f"{name}'s commit is refused, it looks again", become(at=LOOKING, found=0, seen_in=(), number=0)
                return
            else:
                return  # reads its files once more: as another writer would
        if self.rules.resolve == "look-up":
            if any(after.packs[pack].state not in KEPT for pack in w.seen_in):
                return
            stamped |= set(w.seen_in)
        seq = w.number or after.seq + 1
        packs = tuple(Pack(LIVE, seq) if n in stamped else pack for n, pack in enumerate(after.packs))
        made = tuple(sorted((*after.checkpoints, (2 + who, who, w.kept | w.wanted))))
        after = after._replace(packs=packs, checkpoints=made, seq=max(seq, after.seq))
        yield (
            f"{name} commits {show(w.kept | w.wanted)} with number {seq}, stamps packs {sorted(stamped)}",
            become(after, at=DONE),
        )

    def _settle_spares(self, s: State, own: int) -> tuple[set[int], State]:
        """See sql_packs: where a row leads to a pack that nobody may rely on, it is made to lead to the commit's own copy."""
        rows, spares, stamped = list(s.rows), list(s.spares), set()
        for record in bits(s.spares[own]) if self.rules.spares != "ignored" else []:
            other = rows[record]
            if other != NOWHERE and s.packs[other].state in KEPT:
                if self.rules.spares != "unstamped":
                    stamped.add(other)
                continue
            if other not in (NOWHERE, own) and s.packs[other].state == WRITING and self.rules.spares != "taken":
                spares[other] |= 1 << record
            rows[record] = own
        spares[own] = 0
        return stamped, s._replace(rows=tuple(rows), spares=tuple(spares))

    def _collector(self, s: State, who: int, g: Collector) -> Iterator[Step]:
        name = f"gc {who}"

        def become(state: State = s, **changes: Any) -> State:
            return state._replace(collectors=put(state.collectors, who, state.collectors[who]._replace(**changes)))

        if g.at == IDLE:
            begun = s._replace(fence=who)
            if self.rules.mark == "one":
                yield f"{name} marks {s.seq}, live: {show(self.live(s))}", become(begun, at=LISTED, mark=s.seq, live=self.live(s))
            elif self.rules.mark == "late":
                yield f"{name} finds live: {show(self.live(s))}", become(begun, at=MARKED, live=self.live(s))
            else:
                yield f"{name} marks {s.seq}", become(begun, at=MARKED, mark=s.seq)
        elif g.at == MARKED and self.rules.mark == "late":
            yield f"{name} marks {s.seq}", become(at=LISTED, mark=s.seq)
        elif g.at == MARKED:
            thread = 2 - g.listed
            at = LISTED if g.listed == 2 else MARKED
            live = g.live | self.live(s, (thread,))
            yield f"{name} lists thread {thread}", become(at=at, live=live, listed=0 if at == LISTED else g.listed + 1)
        elif g.at == LISTED:
            garbage = sum(
                1 << n for n, p in enumerate(s.packs) if p.state == LIVE and p.seq <= g.mark and not self._has(s, n, g.live)
            )
            yield f"{name} finds garbage: {[n for n in range(4) if garbage >> n & 1]}", become(at=JUDGED, garbage=garbage)
        elif g.at == JUDGED:
            for n, pack in enumerate(s.packs):
                fits = pack.seq <= g.mark or self.rules.condemn == "list"
                if g.garbage >> n & 1 and pack.state == LIVE and fits:
                    yield f"{name} condemns pack {n}", s._replace(packs=put(s.packs, n, Pack(CONDEMNED, pack.seq)))
                elif pack.state == WRITING and self._is_given_up(s, n):
                    spares = put(s.spares, n, 0)
                    yield f"{name} gives pack {n} up", s._replace(packs=put(s.packs, n, Pack(CONDEMNED)), spares=spares)

    def _has(self, s: State, pack: int, records: int) -> bool:
        return any(s.rows[record] == pack for record in bits(records))

    def _is_given_up(self, s: State, pack: int) -> bool:
        if self.rules.leases == "free" or pack == REPACKED:
            return True
        w = s.writers[pack - 1]
        return w.at == DONE or not w.alive

    def _sweep(self, s: State) -> Iterator[Step]:
        for n, pack in enumerate(s.packs):
            on_a_list = (
                self.rules.sweep == "list"
                and pack.state == LIVE
                and any(g.at == JUDGED and g.garbage >> n & 1 for g in s.collectors)
            )
            if pack.state == CONDEMNED or on_a_list:
                rows = s.rows if self.rules.sweep == "rows" else tuple(NOWHERE if row == n else row for row in s.rows)
                yield f"pack {n} is deleted", s._replace(packs=put(s.packs, n, Pack(GONE)), rows=rows)

    def _repack(self, s: State, r: Repacker) -> Iterator[Step]:
        if r.at == IDLE:
            yield f"the repacker marks {s.seq}", s._replace(repacker=Repacker(LISTED, s.seq, self.live(s)), fence=REPACKED)
        elif r.at == LISTED:
            fit = [n for n in range(REPACKED) if s.packs[n].state == LIVE and self._has(s, n, r.live)]
            for sources in [(n,) for n in fit] + [(m, n) for m in fit for n in fit if m < n]:
                records = sum(1 << x for x in bits(r.live) if s.rows[x] in sources)
                packs = put(s.packs, REPACKED, Pack(WRITING))
                after = s._replace(repacker=r._replace(at=RESERVED, sources=sources, records=records), packs=packs)
                yield f"the repacker reads {show(records)} of packs {list(sources)}", after
        elif r.at == RESERVED:
            yield f"the repacker puts pack {REPACKED}", s._replace(repacker=r._replace(at=STORED))
        elif r.at == STORED and s.packs[REPACKED].state == WRITING:
            free = [n for n in r.sources if s.packs[n].state == LIVE and s.packs[n].seq <= r.mark]
            if self.rules.sources == "unchecked":
                free = [n for n in r.sources if s.packs[n].state in KEPT]
            if not free:
                return
            seq = s.seq + 1 if self.rules.moved == "stamped" else 0
            moved = [Pack(CONDEMNED, pack.seq) if n in free else pack for n, pack in enumerate(s.packs)]
            moved[REPACKED] = Pack(LIVE, seq)
            rows = tuple(REPACKED if r.records >> x & 1 and row in free else row for x, row in enumerate(s.rows))
            after = s._replace(packs=tuple(moved), rows=rows, seq=max(seq, s.seq), repacker=r._replace(at=DONE))
            yield f"the repacker moves what leads to packs {free}", after

    def _fork(self, s: State) -> Iterator[Step]:
        at, records = s.forking
        if at == 0:
            for c, _, of in s.checkpoints:
                if self.rules.fork == "one":
                    yield f"fork of {c} to 9", s._replace(checkpoints=(*s.checkpoints, (9, 2, of)), forking=(2, 0))
                else:
                    yield f"a fork reads {c}", s._replace(forking=(1, of))
        elif at == 1:
            yield "the fork inserts 9", s._replace(checkpoints=(*s.checkpoints, (9, 2, records)), forking=(2, 0))

    def _read(self, s: State) -> Iterator[Step]:
        if s.pin[0] == 0:
            for c, _, records in s.checkpoints:
                yield f"a reader pins {c}", s._replace(pin=(1, c, records))
        elif s.pin[0] == 1:
            yield "the pin ends", s._replace(pin=(2, 0, 0))

    # ---- search

    def settled(self, s: State) -> State:
        """The same state for the same future: what is over is forgotten, and sequence numbers are counted anew."""
        writers = tuple(Writer(DONE) if w.at == DONE else w for w in s.writers)
        repacker = Repacker(DONE) if s.repacker.at == DONE else s.repacker
        packs = tuple(p if p.state in KEPT else Pack(p.state) for p in s.packs)
        used = {s.seq, repacker.mark, *(w.number for w in writers), *(g.mark for g in s.collectors), *(p.seq for p in packs)}
        rank = {0: 0} | {number: place for place, number in enumerate(sorted(used - {0}), 1)}
        if any(place != number for number, place in rank.items()):
            writers = tuple(w._replace(number=rank[w.number]) if w.number else w for w in writers)
            packs = tuple(Pack(p.state, rank[p.seq]) for p in packs)
            repacker = repacker._replace(mark=rank[repacker.mark])
        collectors = tuple(g._replace(mark=rank[g.mark]) for g in s.collectors)
        if not self.rules.fenced:
            collectors = tuple(sorted(collectors))
        fence = s.fence if self.rules.fenced else NOBODY
        return s._replace(seq=rank[s.seq], packs=packs, writers=writers, collectors=collectors, repacker=repacker, fence=fence)

    def explore(self) -> Result:
        """Every state, nearest first; stops at the first that is broken."""
        first = self.settled(self.first)
        before: dict[State, State | None] = {first: None}
        queue = deque([first])
        while queue:
            state = queue.popleft()
            why = self.broken(state)
            if why is not None:
                return Result(len(before), why, self._way_to(state, before))
            for _, after in self.steps(state):
                after = self.settled(after)
                if after not in before:
                    before[after] = state
                    queue.append(after)
        return Result(len(before), None)

    def explore_large(self) -> Result:
        """As `explore`, with the states' hashes alone in memory: of n states each is missed with a chance of n in 2^64."""
        first = self.settled(self.first)
        seen = {hash(first)}
        queue = deque([first])
        while queue:
            state = queue.popleft()
            why = self.broken(state)
            if why is not None:
                return Result(len(seen), why)
            for _, after in self.steps(state):
                after = self.settled(after)
                if hash(after) not in seen:
                    seen.add(hash(after))
                    queue.append(after)
        return Result(len(seen), None)

    def _way_to(self, state: State, before: dict[State, State | None]) -> tuple[str, ...]:
        way = []
        while (last := before[state]) is not None:
            way.append(next(name for name, after in self.steps(last) if self.settled(after) == state))
            state = last
        return tuple(reversed(way))


CHECKED: Final = Rules(leases="checked")
OLD: Final = (0, 2)  # writers that want b, or only keep
NEW: Final = (4,)  # writers that want what is new, and nothing else
HOLD: Final = (
    Run("one writer, one gc", writers=1, collectors=1),
    Run("one writer, one gc, leases as they are", writers=1, collectors=1, rules=CHECKED),
    Run("two writers of what is new, one gc", writers=2, collectors=1, wants=NEW, keeps=False),
    Run(
        "two writers of what is new, one gc, leases as they are",
        writers=2,
        collectors=1,
        deletes=1,
        wants=NEW,
        keeps=False,
        rules=CHECKED,
    ),
    Run("two gcs, repacker, fork", collectors=2, repacker=True, fork=True),
    Run("one writer, repacker, one delete", writers=1, repacker=True, deletes=1),
    Run("reader, fork, repacker, one gc", collectors=1, repacker=True, reader=True, fork=True),
    Run(
        "only heads are bases: what is inherited needs no stamp",
        writers=1,
        collectors=1,
        rules=Rules(stamps="base", any_base=False),
    ),
    Run(
        "rows outlive the sweep: a writer that stores such a record again has a spare",
        writers=1,
        collectors=1,
        rules=Rules(sweep="rows"),
    ),
    Run("two writers that keep nothing, one gc, one delete", writers=2, collectors=1, deletes=1, wants=(2, 4), keeps=False),
    Run("LARGE two writers, one gc", writers=2, collectors=1, large=True),
    Run("LARGE two writers, two gcs", writers=2, collectors=2, large=True),
    Run("LARGE two writers, one gc, leases as they are", writers=2, collectors=1, rules=CHECKED, large=True),
    Run("LARGE two writers with pairs, one gc", writers=2, collectors=1, wants=(0, 1, 2, 3, 4, 5, 6), large=True),
    Run("LARGE one writer, two gcs, repacker", writers=1, collectors=2, repacker=True, large=True),
    Run("LARGE two writers, one gc, repacker", writers=2, collectors=1, repacker=True, large=True),
    Run("LARGE two writers, two gcs, fork, three deletes", writers=2, collectors=2, fork=True, deletes=3, large=True),
    Run(
        "LARGE one writer, one gc, repacker, reader, fork",
        writers=1,
        collectors=1,
        repacker=True,
        reader=True,
        fork=True,
        large=True,
    ),
)
BREAK: Final = (
    Run("inherited records are not stamped", writers=1, collectors=1, rules=Rules(stamps="base")),
    Run(
        "inherited records are not stamped and leases that ran out are renewed",
        writers=1,
        collectors=1,
        rules=Rules(stamps="base", leases="checked", renewals="dead"),
    ),
    Run(
        "only heads are bases, and the commit does not look at the head",
        writers=1,
        collectors=1,
        rules=Rules(stamps="base", any_base=False, check_head=False),
    ),
    Run("numbers from a sequence", writers=1, collectors=1, rules=Rules(numbers="early")),
    Run("the mark after the live set", writers=1, collectors=1, rules=Rules(mark="late")),
    Run("roots listed in several statements", collectors=1, fork=True, rules=Rules(mark="paged")),
    Run("a fork in two statements", collectors=1, fork=True, rules=Rules(fork="two")),
    Run("a rewind that does not look for its source", writers=1, collectors=1, rules=Rules(rewind="unchecked")),
    Run(
        "a repacked pack without a new number", collectors=1, writers=1, repacker=True, wants=OLD, rules=Rules(moved="unstamped")
    ),
    Run(
        "sources of a repack not looked at again",
        collectors=1,
        writers=1,
        repacker=True,
        wants=OLD,
        rules=Rules(sources="unchecked"),
    ),
    Run(
        "a record's pack taken from the look-up",
        collectors=1,
        writers=1,
        repacker=True,
        wants=OLD,
        rules=Rules(resolve="look-up"),
    ),
    Run("spares are ignored", writers=2, collectors=1, wants=NEW, keeps=False, rules=Rules(spares="ignored")),
    Run(
        "the pack that has a spare's row is not stamped",
        writers=2,
        collectors=1,
        deletes=3,
        wants=NEW,
        keeps=False,
        rules=Rules(spares="unstamped"),
    ),
    Run(
        "no spare is left to the other writer",
        writers=2,
        collectors=1,
        deletes=3,
        wants=NEW,
        keeps=False,
        rules=Rules(spares="taken"),
    ),
    Run("a pin that names a checkpoint", collectors=1, reader=True, rules=Rules(pin="id")),
    Run("the sweep does not look again", writers=1, collectors=1, rules=Rules(sweep="list")),
    Run(
        "LARGE sources of a repack not looked at again, and a fence",
        collectors=2,
        writers=1,
        repacker=True,
        rules=Rules(sources="unchecked", fenced=True),
        large=True,
    ),
    Run(
        "LARGE a record's pack taken from the look-up, and a fence",
        collectors=2,
        writers=1,
        repacker=True,
        rules=Rules(resolve="look-up", fenced=True),
        large=True,
    ),
    Run("condemned without a look at the number", writers=1, collectors=1, rules=Rules(condemn="list")),
)


def main(wanted: list[str]) -> None:
    for run in (*HOLD, *BREAK):
        if any(run.name.startswith(name) for name in wanted) if wanted else not run.large:
            began = time.monotonic()
            model = Model(run)
            result = model.explore_large() if run.large else model.explore()
            print(
                f"{run.name}: {result.broken or 'holds'} ({result.states:,} states, {time.monotonic() - began:.1f} s)", flush=True
            )
            for step in result.steps:
                print("   ", step)


if __name__ == "__main__":
    main(sys.argv[1:])
