"""A small world on a real SQL store, in which writers, collectors, forks, readers and deletions take one step at a time.

A step is one call of the store or of the blob store, run to its end at once. Blobs are a dictionary that says where in each
pack which record is. Next to the store the world keeps what each checkpoint needs, and `check` holds the two together.
Actors are plain values, so that a state of the world can be kept and gone back to (`save`, `load`).
"""

import copy
import dataclasses
import hashlib
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from snapcore.errors import (
    CheckpointConflictError,
    CheckpointWriterConflictError,
    CheckpointWriterLostError,
    Code,
    RecordsMissingError,
    RepositoryError,
    SnapshotError,
)
from snapcore.maintenance import Maintenance
from snapcore.model import Checkpoint, PackRecord, PackState, PackWrite, RecordType, RootState, WriterLease
from snapcore.protocols import Commit, Pin
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.stores.sql_transactions import Transactions
from snapcore.testing import ManualClock
from snapcore.testing.entries import IDENTITY

T = TypeVar("T")
SHORT, LONG = 10.0, 1000.0  # seconds that leases and pins last
KEPT = (PackState.LIVE, PackState.CONDEMNED)
# steps after which nothing that another could meet has changed, or that only finish the one before
QUIET = frozenset({"mark", "put", "last", "copy", "delete", "deleted", "forget", "release"})
EXPECTED = (CheckpointConflictError, CheckpointWriterConflictError, SnapshotError)


class InlineTransactions(Transactions):
    """The same transactions, in the caller's thread: a thousand orders of steps take seconds then, not minutes."""

    async def _run(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        del executor
        return work()


def run(call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("it waits")


def name_of(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


def tree(contents: frozenset[str]) -> bytes:
    """The manifest of a tree that holds these contents."""
    return name_of("tree", sorted(contents))


def chunk(content: str) -> bytes:
    return name_of("chunk", content)


def records_of(contents: frozenset[str]) -> frozenset[bytes]:
    return frozenset([tree(contents), *map(chunk, contents)])


@dataclass(frozen=True)
class Actor:
    """Someone who works in steps; `at` is what was done last, "" at the end."""

    name: str
    at: str = "begin"


@dataclass(frozen=True)
class Writer(Actor):
    """A capture: it keeps `kept` of a base unseen, looks for the rest, stores what is new, commits.

    `early` enters the first pack before the commit, as long captures do; the record then goes into a second pack.
    """

    thread: str = ""
    contents: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    ttl: float = LONG
    early: bool = False
    lease: WriterLease | None = None
    parent: str | None = None
    known_by_head: frozenset[bytes] = frozenset()
    refs: frozenset[bytes] = frozenset()
    new: tuple[bytes, ...] = ()
    packs: tuple[str, ...] = ()  # reserved and not put yet
    entered: tuple[str, ...] = ()
    ready: tuple[PackWrite, ...] = ()  # put and not entered
    stored: frozenset[bytes] = frozenset()
    tries: int = 0


@dataclass(frozen=True)
class Copier(Actor):
    """A fork, a rewind or a relabelling: a new record over the content of `source`."""

    kind: str = "fork"
    source: Checkpoint | None = None
    thread: str = ""
    lease: WriterLease | None = None
    parent: str | None = None
    pack: str = ""
    ready: PackWrite | None = None


@dataclass(frozen=True)
class Deleter(Actor):
    thread: str = ""
    checkpoint: str = ""
    lease: WriterLease | None = None


@dataclass(frozen=True)
class Collector(Actor):
    """A gc without grace; `repack` also merges all live packs. It goes on, deleting blobs, when another has begun."""

    repack: bool = False
    run: Maintenance | None = None
    mark: int = 0
    live: frozenset[bytes] = frozenset()
    judged: int = 0  # the number of the last pack that was looked at
    garbage: tuple[str, ...] = ()
    pack: str = ""
    moving: PackWrite | None = None
    sources: tuple[str, ...] = ()
    due: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()


@dataclass
class World:
    """`trees` says which contents a manifest lists; `needs` which records a checkpoint needs, by its id."""

    store: SqlCheckpointStore
    clock: ManualClock
    database: sqlite3.Connection
    blobs: dict[str, dict[bytes, int]] = field(default_factory=dict)
    trees: dict[bytes, frozenset[str]] = field(default_factory=dict)
    needs: dict[str, frozenset[bytes]] = field(default_factory=dict)
    threads: dict[str, list[str]] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)
    actors: dict[str, Actor] = field(default_factory=dict)
    robbed: str = ""
    coarse: bool = False  # whether steps in `QUIET` are one with the step before

    # ---- going back

    def save(self) -> Any:
        threads = {thread: list(ids) for thread, ids in self.threads.items()}
        state = [copy.copy(part) for part in (self.blobs, self.trees, self.needs, threads, self.pins, self.actors)]
        return self.database.serialize(), self.clock(), state, self.robbed

    def load(self, saved: Any) -> None:
        database, now, state, self.robbed = saved
        self.database.deserialize(database)
        self.clock.advance((now - self.clock()) / 1_000_000)
        self.blobs, self.trees, self.needs, threads, self.pins, self.actors = [copy.copy(part) for part in state]
        self.threads = {thread: list(ids) for thread, ids in threads.items()}

    def key(self) -> object:
        """Equal for two states with the same future: sequence numbers only by their order, leases by who has them."""
        query = self.database.execute
        packs = query("SELECT pack_id, state, commit_seq FROM packs").fetchall()
        (fence,) = query("SELECT gc_fence FROM repository").fetchone()
        marks = {a.mark for a in self.actors.values() if isinstance(a, Collector)}
        rank = {seq: place for place, seq in enumerate(sorted({seq or 0 for _, _, seq in packs} | marks))}
        leases = query("SELECT thread_id, token, expires_at FROM writer_leases").fetchall()
        owners = {lease.token: a.name for a in self.actors.values() if (lease := getattr(a, "lease", None)) is not None}
        actors = []
        for a in self.actors.values():
            parts: list[object] = [
                (f, getattr(a, f)) for f in a.__dataclass_fields__ if f not in ("lease", "run", "mark", "source")
            ]
            if isinstance(a, Collector):
                parts += [rank[a.mark], a.run is not None and a.run.fence == fence]
            actors.append((a.name, tuple(parts)))
        return (
            frozenset((pack, state, rank[seq or 0]) for pack, state, seq in packs),
            frozenset(query("SELECT id, pack_id FROM chunks JOIN packs ON number = pack_number")),
            frozenset(query("SELECT id, pack_id FROM spares JOIN packs ON number = pack_number")),
            frozenset(query("SELECT id, record_id FROM checkpoints")),
            frozenset((thread, owners.get(token), ends > self.clock()) for thread, token, ends in leases),
            frozenset((name, pin.expires_at > self.clock()) for name, pin in self.pins.items()),
            frozenset(actors),
            frozenset(self.blobs),
            self.robbed,
        )

    # ---- what must be so

    def check(self) -> None:
        """Every record of every checkpoint and of every pin in force can be read."""
        assert not self.robbed, self.robbed
        there = {
            record: (pack, offset, state)
            for record, pack, offset, state in self.database.execute(
                "SELECT id, pack_id, offset, state FROM chunks JOIN packs ON number = pack_number"
            )
        }
        ids = [i for (i,) in self.database.execute("SELECT id FROM checkpoints ORDER BY id")]
        assert ids == sorted(i for listed in self.threads.values() for i in listed)
        heads = dict(self.database.execute("SELECT thread_id, head_id FROM threads WHERE head_id IS NOT NULL"))
        assert heads == {thread: listed[-1] for thread, listed in self.threads.items() if listed}
        needed = [(f"checkpoint {i}", self.needs[i]) for i in ids]
        needed += [
            ("a pin in force", frozenset().union(*(records_of(self.trees[r]) for r in pin.roots)))
            for pin in self.pins.values()
            if pin.expires_at > self.clock()
        ]
        for what, records in needed:
            for record in records:
                assert record in there, f"{what}: a record has no row"
                pack, offset, state = there[record]
                assert state in KEPT, f"{what}: a record is in a pack that is {state}"
                assert self.blobs.get(pack, {}).get(record) == offset, f"{what}: a record is not in its pack"

    def end(self) -> None:
        """Once everyone has stopped, gc leaves the packs that are needed, and nothing else."""
        self.actors.clear()
        self.pins.clear()
        self.clock.advance(LONG)
        for _ in range(2):
            self.clock.advance(2 * 86_400)
            self.add(Collector("last"))
            while "last" in self.actors:
                self.step("last")
            self.check()
        needed = frozenset().union(*self.needs_now())
        rows = self.database.execute("SELECT id, pack_id FROM chunks JOIN packs ON number = pack_number").fetchall()
        packs = {pack for record, pack in rows if record in needed}
        assert set(self.blobs) == packs, "garbage is left, or more than that is gone"
        # what the last two gcs deleted has its row until a late put of it is out of the question
        states = self.database.execute("SELECT pack_id, state FROM packs WHERE state != 'deleted'").fetchall()
        assert dict(states) == dict.fromkeys(packs, PackState.LIVE)
        (count,) = self.database.execute("SELECT count(*) FROM chunks").fetchone()
        assert count == len([pack for _, pack in rows if pack in packs]), "rows lead to packs that are gone"
        assert self.database.execute("SELECT count(*) FROM spares").fetchone() == (0,), "spares are left"

    def needs_now(self) -> list[frozenset[bytes]]:
        return [self.needs[i] for ids in self.threads.values() for i in ids]

    # ---- steps

    def add(self, actor: Actor) -> None:
        self.actors[actor.name] = actor

    def step(self, name: str) -> None:
        """Let one actor do its next step."""
        self._step(name)
        while self.coarse and name in self.actors and self.actors[name].at in QUIET:
            self._step(name)

    def _step(self, name: str) -> None:
        actor = self.actors[name]
        method = getattr(self, f"_{type(actor).__name__.lower()}_{actor.at}")
        try:
            after = method(actor)
        except CheckpointWriterLostError:
            lease: WriterLease | None = getattr(actor, "lease", None)
            if lease is not None and lease.expires_at > self.clock():
                self.robbed = f"{name} lost its lease or its pack while its lease was in force"
            after = None
        except RecordsMissingError:
            self.robbed = f"{name} refers to records of its source that are gone"
            after = None
        except EXPECTED:
            after = None
        except RepositoryError as error:
            if error.code is not Code.MAINTENANCE_LOST:
                raise
            after = None
        if after is None or not after.at:
            del self.actors[name]
        else:
            self.actors[name] = after

    def give_up(self, name: str) -> None:
        """The actor stops for ever."""
        self.actors.pop(name, None)

    def expire(self) -> None:
        """Time passes: leases and pins that last `SHORT` run out."""
        self.clock.advance(SHORT + 1)

    def pack_id(self, actor: Actor) -> str:
        return hashlib.blake2b(f"{actor.name} {actor.at} {getattr(actor, 'entered', '')}".encode(), digest_size=16).hexdigest()

    def put(self, pack_id: str, ids: Sequence[bytes]) -> PackWrite:
        records = tuple(
            PackRecord(id=i, type=RecordType.CHUNK, offset=10 * place, stored_size=10, raw_size=20, codec=1)
            for place, i in enumerate(ids)
        )
        self.blobs = self.blobs | {pack_id: {r.id: r.offset for r in records}}
        return PackWrite(pack_id, 100, records)

    def delete_blob(self, pack_id: str) -> None:
        self.blobs = {i: records for i, records in self.blobs.items() if i != pack_id}

    def committed(self, checkpoint: Checkpoint) -> None:
        contents = self.trees[checkpoint.roots[0].manifest]
        self.needs[checkpoint.id] = records_of(contents) | {checkpoint.record_id}
        self.threads.setdefault(checkpoint.thread_id, []).append(checkpoint.id)

    def pin(self, checkpoint: Checkpoint, ttl: float) -> None:
        roots = [root.manifest for root in checkpoint.roots]
        try:
            pin = run(self.store.pin(roots, (checkpoint.thread_id, checkpoint.id), ttl=ttl))
        except SnapshotError:
            return  # it has been deleted
        self.pins[f"{checkpoint.id} {len(self.pins)}"] = pin

    def unpin(self, name: str) -> None:
        run(self.store.unpin(self.pins.pop(name)))

    # ---- a capture

    def _writer_begin(self, w: Writer) -> Writer:
        pack = self.pack_id(w)
        grant = run(self.store.acquire_writer(w.thread, ttl=w.ttl, pack_id=pack))
        head = grant.head
        known = records_of(self.trees[head.roots[0].manifest]) if head is not None else frozenset()
        self.trees[tree(w.contents)] = w.contents
        parent = head.id if head is not None else None
        return dataclasses.replace(w, at="look", lease=grant.lease, parent=parent, known_by_head=known, packs=(pack,))

    def _writer_look(self, w: Writer) -> Writer:
        kept = frozenset(map(chunk, w.kept))
        wanted = records_of(w.contents) - kept - w.stored
        known = run(self.store.known(wanted))
        refs = known | (kept - w.known_by_head)
        return dataclasses.replace(w, at="put", refs=w.refs | refs, new=tuple(sorted(wanted - known)))

    def _writer_put(self, w: Writer) -> Writer:
        if not w.early or not w.new:
            return dataclasses.replace(self._put_last(w), at="commit")
        pack = self.put(w.packs[0], w.new)
        return dataclasses.replace(w, at="enter", ready=(pack,), packs=w.packs[1:], stored=w.stored | {*w.new}, new=())

    def _writer_enter(self, w: Writer) -> Writer:
        assert w.lease is not None
        refs = run(self.store.add_pack(w.lease, w.ready[0]))
        return dataclasses.replace(w, at="reserve", refs=w.refs | refs, entered=(*w.entered, w.ready[0].pack_id), ready=())

    def _writer_reserve(self, w: Writer) -> Writer:
        assert w.lease is not None
        pack = self.pack_id(w)
        run(self.store.reserve_packs(w.lease, [pack]))
        return dataclasses.replace(w, at="last", packs=(pack,))

    def _writer_last(self, w: Writer) -> Writer:
        return dataclasses.replace(self._put_last(w), at="commit")

    def _put_last(self, w: Writer) -> Writer:
        record = _record(w.name, w.tries)
        pack = self.put(w.packs[0], [*w.new, record])
        return dataclasses.replace(w, ready=(pack,), packs=w.packs[1:], stored=w.stored | {*w.new, record}, new=())

    def _writer_commit(self, w: Writer) -> Writer | None:
        assert w.lease is not None
        alive = w.lease.expires_at > self.clock()
        commit = Commit(packs=w.ready, own=w.entered, refs=tuple(w.refs))
        checkpoint = _checkpoint(w, w.lease.fence)
        try:
            self.committed(run(self.store.append(w.lease, checkpoint, commit)))
        except RecordsMissingError:
            # as PackWriter.reopen: what was put is entered, and all that was found or kept is looked for again
            if w.tries:
                return None
            return dataclasses.replace(w, at="reopen", refs=frozenset(), kept=frozenset(), tries=1, early=True)
        if not alive:
            self.robbed = f"{w.name} has committed though its lease had run out"
        return None

    def _writer_reopen(self, w: Writer) -> Writer:
        w = self._writer_enter(w)
        return dataclasses.replace(self._writer_reserve(w), at="look")

    # ---- a fork, a rewind, a relabelling

    def _copier_begin(self, c: Copier) -> Copier:
        pack = self.pack_id(c)
        grant = run(self.store.acquire_writer(c.thread, pack_id=pack, ttl=LONG))
        return dataclasses.replace(c, at="put", lease=grant.lease, parent=grant.head.id if grant.head else None, pack=pack)

    def _copier_put(self, c: Copier) -> Copier:
        return dataclasses.replace(c, at=c.kind, ready=self.put(c.pack, [_record(c.name, 0)]))

    def _copy(self, c: Copier, **fields: Any) -> tuple[WriterLease, Checkpoint, Commit]:
        assert c.lease is not None
        assert c.source is not None
        assert c.ready is not None
        new = msgspec.structs.replace(
            c.source, id=c.name, thread_id=c.thread, record_id=_record(c.name, 0), created_at=c.lease.fence, **fields
        )
        return c.lease, new, Commit(packs=(c.ready,))

    def _copier_fork(self, c: Copier) -> None:
        assert c.source is not None
        source = {"source_thread_id": c.source.thread_id, "source_id": c.source.id}
        lease, new, commit = self._copy(c, reason="fork-root", parent_id=None, **source)
        self.committed(run(self.store.fork(lease, new, commit)))

    def _copier_rewind(self, c: Copier) -> None:
        assert c.source is not None
        source = (c.source.thread_id, c.source.id)
        lease, new, commit = self._copy(c, reason="rewind", parent_id=c.parent)
        self.committed(run(self.store.append(lease, new, commit, source=source)))

    def _copier_label(self, c: Copier) -> None:
        assert c.lease is not None
        assert c.source is not None
        assert c.ready is not None
        record = _record(c.name, 0)
        changed = run(self.store.set_label(c.lease, c.source.id, c.name, record, Commit(packs=(c.ready,))))
        self.needs[changed.id] = records_of(self.trees[changed.roots[0].manifest]) | {record}

    # ---- a deletion

    def _deleter_begin(self, d: Deleter) -> Deleter:
        return dataclasses.replace(d, at="delete", lease=run(self.store.acquire_writer(d.thread, ttl=LONG)).lease)

    def _deleter_delete(self, d: Deleter) -> Deleter:
        assert d.lease is not None
        run(self.store.delete(d.lease, [d.checkpoint]))
        self.threads[d.thread].remove(d.checkpoint)
        return dataclasses.replace(d, at="release")

    def _deleter_release(self, d: Deleter) -> None:
        assert d.lease is not None
        run(self.store.release_writer(d.lease))

    # ---- gc

    def _collector_begin(self, g: Collector) -> Collector:
        return dataclasses.replace(g, at="mark", run=run(self.store.start_maintenance()))

    def _collector_mark(self, g: Collector) -> Collector:
        roots = run(self.store.roots())
        live = roots.records.union(*(records_of(self.trees[i]) for i in roots.manifests))
        return dataclasses.replace(g, at="judge", mark=roots.mark, live=live)

    def _collector_judge(self, g: Collector) -> Collector:
        """Some of the packs; more in the next step."""
        found = run(self.store.pack_contents(g.judged, 3))
        mine = [p for p in found if p.state == PackState.LIVE and (p.commit_seq or 0) <= g.mark]
        garbage = tuple(p.pack_id for p in mine if not any(i in g.live for i, _, _ in p.records))
        sources = tuple(p.pack_id for p in mine if p.pack_id not in garbage) if g.repack else ()
        return dataclasses.replace(
            g,
            at="judge" if len(found) == 3 else "condemn",
            judged=found[-1].number if found else g.judged,
            garbage=g.garbage + garbage,
            sources=g.sources + sources,
        )

    def _collector_condemn(self, g: Collector) -> Collector:
        assert g.run is not None
        run(self.store.condemn(g.run, g.mark, g.garbage))
        return dataclasses.replace(g, at="abandoned")

    def _collector_abandoned(self, g: Collector) -> Collector:
        assert g.run is not None
        run(self.store.condemn_abandoned(g.run))
        return dataclasses.replace(g, at="reserve" if g.sources else "sweep")

    def _collector_reserve(self, g: Collector) -> Collector:
        assert g.run is not None
        pack = self.pack_id(g)
        run(self.store.reserve_maintenance_packs(g.run, [pack]))
        return dataclasses.replace(g, at="copy", pack=pack)

    def _collector_copy(self, g: Collector) -> Collector:
        found = {i for pack in g.sources for i in self.blobs.get(pack, {}) if i in g.live}
        places = run(self.store.locate(found))
        records = sorted(i for i in found if i in places and places[i].pack_id in g.sources)
        return dataclasses.replace(g, at="move", moving=self.put(g.pack, records))

    def _collector_move(self, g: Collector) -> Collector:
        assert g.run is not None
        assert g.moving is not None
        run(self.store.move_records(g.run, g.mark, g.moving, g.sources))
        return dataclasses.replace(g, at="sweep")

    def _collector_sweep(self, g: Collector) -> Collector:
        assert g.run is not None
        due = tuple(run(self.store.sweep(g.run, grace=0)))
        return dataclasses.replace(g, at="delete" if due else "forget", due=due, deleted=due)

    def _collector_delete(self, g: Collector) -> Collector:
        self.delete_blob(g.due[0])
        return dataclasses.replace(g, at="delete" if g.due[1:] else "deleted", due=g.due[1:])

    def _collector_deleted(self, g: Collector) -> Collector:
        assert g.run is not None
        run(self.store.mark_deleted(g.run, g.deleted))
        return dataclasses.replace(g, at="sweep")

    def _collector_forget(self, g: Collector) -> Collector:
        assert g.run is not None
        old = tuple(run(self.store.deleted_before(g.run, 86_400)))
        for pack in old:
            self.delete_blob(pack)
        run(self.store.forget_packs(g.run, old))
        run(self.store.expire_caches(g.run, unused=86_400))
        return dataclasses.replace(g, at="")


def _record(name: str, tries: int) -> bytes:
    return name_of("record", name, tries)


def _checkpoint(w: Writer, created_at: int) -> Checkpoint:
    manifest = tree(w.contents)
    return Checkpoint(
        id=w.name,
        thread_id=w.thread,
        parent_id=w.parent,
        created_at=created_at,
        roots=(RootState("workspace", "/workspace", manifest, manifest),),
        content_id=manifest,
        record_id=_record(w.name, w.tries),
    )


def make_world() -> World:
    clock = ManualClock()
    store = SqlCheckpointStore("sqlite://", clock=clock)
    old = store._transactions
    store._transactions = InlineTransactions(old._database, clock)
    run(store.initialize(IDENTITY))
    with old._database.engine.connect() as connection:
        database = connection.connection.driver_connection
    assert isinstance(database, sqlite3.Connection)
    return World(store, clock, database)


def close_world(world: World) -> None:
    world.store._transactions._shut_down()


def capture(world: World, name: str, thread: str, contents: str) -> None:
    """A checkpoint that is there from the start."""
    world.add(Writer(name, thread=thread, contents=frozenset(contents)))
    while name in world.actors:
        world.step(name)
