"""Conformance of what gc and repair need. Subclass `MaintenanceTests` and override the fixture `store`."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import pytest

from snapcore.errors import CheckpointConflictError, CheckpointWriterLostError, Code, RepositoryError, SnapshotError
from snapcore.maintenance import Maintenance, PackContents
from snapcore.model import Checkpoint, ContentRef, PackState, PackWrite, StatPage, StatUpdate, WriterLease
from snapcore.protocols import CheckpointStore, Commit, StoreIdentity

from .clock import ManualClock
from .entries import IDENTITY, acquire, append, checkpoint_for, digest, new_pack_id, pack_of, start, state_of

__all__ = ["MaintenanceTests"]

PACK: Final = "0" * 32
CALLS: Final[dict[str, Callable[[CheckpointStore, Maintenance, str], Awaitable[object]]]] = {
    "reserve": lambda store, run, _: store.reserve_maintenance_packs(run, [PACK]),
    "condemn": lambda store, run, pack: store.condemn(run, 1 << 40, [pack]),
    "condemn_abandoned": lambda store, run, _: store.condemn_abandoned(run),
    "move_records": lambda store, run, pack: store.move_records(run, 1 << 40, pack_of(PACK, "manifest-a"), [pack]),
    "sweep": lambda store, run, _: store.sweep(run, grace=0),
    "mark_deleted": lambda store, run, pack: store.mark_deleted(run, [pack]),
    "deleted_before": lambda store, run, _: store.deleted_before(run, 0),
    "forget_packs": lambda store, run, pack: store.forget_packs(run, [pack]),
    "expire_caches": lambda store, run, _: store.expire_caches(run, unused=0),
    "adopt_pack": lambda store, run, _: store.adopt_pack(run, pack_of(PACK, "new")),
    "lose_packs": lambda store, run, pack: store.lose_packs(run, [pack]),
    "drop_records": lambda store, run, pack: store.drop_records(run, pack, [digest("record-a")]),
    "note_damage": lambda store, run, _: store.note_damage(run),
    "replace_record": lambda store, run, _: store.replace_record(run, "t", "a", digest("record-a"), digest("other")),
    "adopt_checkpoints": lambda store, run, _: store.adopt_checkpoints(run, [checkpoint_for("new", "new")]),
    "mend_heads": lambda store, run, _: store.mend_heads(run),
    "rename_database": lambda store, run, _: store.rename_database(run, "other"),
}
"""Every call that a run makes, with a pack that can be condemned."""


async def contents(store: CheckpointStore) -> dict[str, PackContents]:
    """Every pack's row by its id."""
    return {pack.pack_id: pack for pack in await store.pack_contents(limit=1000)}


async def state(store: CheckpointStore, pack_id: str) -> str | None:
    """A pack's state, None when it has no row."""
    pack = (await contents(store)).get(pack_id)
    return pack.state if pack is not None else None


async def pack_with(store: CheckpointStore, name: str) -> str | None:
    """The pack that a record's row leads to, None when it has no row."""
    found = await store.locate([digest(name)])
    return found[digest(name)].pack_id if found else None


async def garbage(store: CheckpointStore, *names: str) -> str:
    """A live pack, with records of these names among others, that no checkpoint needs."""
    pack_id = new_pack_id()
    grant = await store.acquire_writer("garbage", pack_id=pack_id)
    name = f"garbage-{pack_id}"
    parent = None if grant.head is None else grant.head.id
    made = checkpoint_for("garbage", name, parent)
    pack = pack_of(pack_id, *names, f"manifest-{name}", f"record-{name}")
    await store.append(grant.lease, made, Commit(packs=(pack,)), release=False)
    await store.delete(grant.lease, [name])
    await store.release_writer(grant.lease)
    return pack_id


async def abandoned(store: CheckpointStore, *names: str) -> str:
    """A pack in state `writing` whose writer has left."""
    lease, pack_id = await acquire(store, "left")
    if names:
        await store.add_pack(lease, pack_of(pack_id, *names))
    await store.release_writer(lease)
    return pack_id


async def swept(store: CheckpointStore, run: Maintenance, *names: str) -> str:
    """A pack in state `deleting`."""
    pack_id = await garbage(store, *names)
    assert await store.condemn(run, (await store.roots()).mark, [pack_id]) == [pack_id]
    assert pack_id in await store.sweep(run, grace=0)
    return pack_id


async def written(store: CheckpointStore, lease: WriterLease, pack_id: str, name: str, **fields: Any) -> Checkpoint:
    """Append a checkpoint with a lease at hand."""
    commit = Commit(packs=(pack_of(pack_id, f"manifest-{name}", f"record-{name}"),))
    return await store.append(lease, checkpoint_for(lease.thread_id, name, **fields), commit)


async def is_damaged(store: CheckpointStore, thread_id: str) -> bool:
    """What a writer of the thread is told."""
    grant = await store.acquire_writer(thread_id)
    await store.release_writer(grant.lease)
    return grant.damaged


class MaintenanceTests:
    """gc frees what nobody needs and nothing else, repair enters what was found, and of two runs the later one counts."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """The store's clock."""
        return ManualClock()

    @pytest.fixture
    def store(self, clock: ManualClock) -> CheckpointStore:
        """Override: a store initialised with `IDENTITY` of `snapcore.testing.entries`, on `clock`."""
        pytest.fail("The fixture `store` must be overridden.")

    # ---- the fence

    async def test_a_later_run_supersedes_and_no_fence_is_used_twice(self, store: CheckpointStore) -> None:
        runs = [await store.start_maintenance() for _ in range(3)]
        assert len({run.fence for run in runs}) == 3
        assert runs == sorted(runs, key=lambda run: run.fence)
        await store.mend_heads(runs[2])
        for run in runs[:2]:
            with pytest.raises(RepositoryError) as caught:
                await store.mend_heads(run)
            assert caught.value.code == Code.MAINTENANCE_LOST

    @pytest.mark.parametrize("call", CALLS)
    async def test_a_run_that_was_superseded_changes_nothing(self, store: CheckpointStore, call: str) -> None:
        await append(store, "t", "a")
        pack_id = await garbage(store, "x")
        old = await store.start_maintenance()
        await store.condemn(old, (await store.roots()).mark, [await garbage(store, "y")])
        await abandoned(store, "z")
        await store.start_maintenance()
        before, rows = await state_of(store), await contents(store)
        with pytest.raises(RepositoryError) as caught:
            await CALLS[call](store, old, pack_id)
        assert caught.value.code == Code.MAINTENANCE_LOST
        assert (await state_of(store), await contents(store)) == (before, rows)
        assert await store.identity() == IDENTITY
        assert await store.damaged_threads() == frozenset()

    @pytest.mark.parametrize("call", CALLS)
    async def test_a_run_in_force_may_call_each(self, store: CheckpointStore, call: str) -> None:
        await append(store, "t", "a")
        pack_id = await garbage(store, "x")
        run = await store.start_maintenance()
        if call == "move_records":
            await store.reserve_maintenance_packs(run, [PACK])
        await CALLS[call](store, run, pack_id)

    async def test_pack_ids_that_cannot_be_right_are_refused(self, store: CheckpointStore) -> None:
        run = await store.start_maintenance()
        for bad in ("", "x" * 32, "../../" + "0" * 26, PACK.upper() + "0"):
            for refused in (
                store.reserve_maintenance_packs(run, [bad]),
                store.condemn(run, 1, [bad]),
                store.mark_deleted(run, [bad]),
                store.forget_packs(run, [bad]),
                store.lose_packs(run, [bad]),
                store.drop_records(run, bad, []),
                store.adopt_pack(run, PackWrite(bad, 100, ())),
                store.adopt_pack(run, pack_of(PACK, "x"), instead_of=bad),
                store.move_records(run, 1, pack_of(PACK, "x"), [bad]),
            ):
                with pytest.raises(SnapshotError):
                    await refused
        assert await store.packs() == []

    # ---- what is there

    async def test_roots_are_what_checkpoints_and_pins_lead_to(self, store: CheckpointStore, clock: ManualClock) -> None:
        grant, made, commit = await start(
            store,
            "t",
            "a",
            conversation=ContentRef(size=2, chunks=digest("c1") + digest("c2")),
            artifacts={"log": ContentRef(size=3, chunk_list=digest("list"))},
        )
        more = pack_of(new_pack_id(), "c1", "c2", "list")
        await store.reserve_packs(grant.lease, [more.pack_id])
        await store.append(grant.lease, made, Commit(packs=(*commit.packs, more)))
        roots = await store.roots()
        assert roots.records == {digest("record-a")}
        assert roots.manifests == {digest("manifest-a")}
        assert sorted(roots.chunks) == sorted([digest("c1"), digest("c2")])
        assert roots.chunk_lists == {digest("list")}
        assert roots.now == clock()
        await store.pin([digest("manifest-a")], ("t", "a"), ttl=60)
        lease, _ = await acquire(store, "t")
        await store.delete(lease, ["a"])
        left = await store.roots()
        assert not (left.records | left.chunks | left.chunk_lists)
        assert left.manifests == {digest("manifest-a")}
        assert left.mark > roots.mark
        clock.advance(61)
        assert (await store.roots()).manifests == frozenset()

    async def test_packs_are_told_by_number_with_their_records_in_order(self, store: CheckpointStore) -> None:
        for name in "abc":
            await append(store, "t", name)
        lease, pack_id = await acquire(store, "u")
        listed = await store.pack_contents(limit=2)
        assert len(listed) == 2
        listed += await store.pack_contents(listed[-1].number, 10)
        assert await store.pack_contents(listed[-1].number) == []
        assert [pack.number for pack in listed] == sorted({pack.number for pack in listed})
        assert [[offset for _, offset, _ in pack.records] for pack in listed] == [[0, 10]] * 3 + [[]]
        assert {i for pack in listed for i, _, _ in pack.records} == {
            digest(f"{k}-{n}") for k in ("manifest", "record") for n in "abc"
        }
        assert {(pack.state, pack.owned) for pack in listed[:3]} == {(PackState.LIVE, False)}
        assert (listed[3].pack_id, listed[3].state, listed[3].owned) == (pack_id, PackState.WRITING, True)
        await store.release_writer(lease)
        assert not (await contents(store))[pack_id].owned

    # ---- condemning

    async def test_what_is_live_up_to_the_mark_is_condemned_and_nothing_else(
        self, store: CheckpointStore, clock: ManualClock
    ) -> None:
        old = await garbage(store, "x")
        lease, writing = await acquire(store, "writer")
        run = await store.start_maintenance()
        mark = (await store.roots()).mark
        new = await garbage(store, "y")
        assert await store.condemn(run, mark, [old, new, writing, PACK]) == [old]
        assert (await contents(store))[old].condemned_at == clock()
        assert (await state(store, new), await state(store, writing)) == (PackState.LIVE, PackState.WRITING)
        assert await pack_with(store, "x") == old  # until the sweep
        assert await store.known([digest("x")]) == {digest("x")}
        assert await store.condemn(run, mark, [old]) == []  # once more: it is done
        assert await store.renew_writer(lease)

    async def test_a_commit_brings_a_condemned_pack_back(self, store: CheckpointStore) -> None:
        old = await garbage(store, "x")
        run = await store.start_maintenance()
        mark = (await store.roots()).mark
        await store.condemn(run, mark, [old])
        lease, pack_id = await acquire(store, "t")
        commit = Commit(packs=(pack_of(pack_id, "manifest-a", "record-a"),), refs=(digest("x"),))
        await store.append(lease, checkpoint_for("t", "a"), commit)
        row = (await contents(store))[old]
        assert (row.state, row.condemned_at) == (PackState.LIVE, None)
        assert (row.commit_seq or 0) > mark
        assert await store.sweep(run, grace=0) == []
        assert await store.condemn(run, mark, [old]) == []

    async def test_packs_whose_writer_cannot_commit_are_condemned(self, store: CheckpointStore, clock: ManualClock) -> None:
        left = await abandoned(store, "x")
        lease, late = await acquire(store, "late", ttl=10)
        clock.advance(11)
        _, writing = await acquire(store, "writer")
        before = await store.start_maintenance()
        await store.reserve_maintenance_packs(before, [PACK])
        run = await store.start_maintenance()
        own = new_pack_id()
        await store.reserve_maintenance_packs(run, [own])
        assert set(await store.condemn_abandoned(run)) == {left, late, PACK}
        assert (await state(store, writing), await state(store, own)) == (PackState.WRITING, PackState.WRITING)
        assert await store.condemn_abandoned(run) == []
        with pytest.raises(CheckpointWriterLostError):
            await written(store, lease, late, "a")

    async def test_a_pack_id_that_is_taken_is_not_reserved(self, store: CheckpointStore) -> None:
        _, writing = await acquire(store, "writer")
        run = await store.start_maintenance()
        await store.reserve_maintenance_packs(run, [PACK])
        await store.reserve_maintenance_packs(run, [PACK])
        with pytest.raises(CheckpointConflictError):
            await store.reserve_maintenance_packs(run, [writing])

    # ---- moving

    async def test_rows_move_with_their_records_and_the_sources_are_condemned(self, store: CheckpointStore) -> None:
        a = await append(store, "t", "a")
        source = (await store.locate([a.record_id]))[a.record_id].pack_id
        run = await store.start_maintenance()
        mark = (await store.roots()).mark
        copy = pack_of(PACK, "record-a", "manifest-a")
        await store.reserve_maintenance_packs(run, [PACK])
        assert await store.move_records(run, mark, copy, [source]) == [source]
        assert await pack_with(store, "record-a") == await pack_with(store, "manifest-a") == PACK
        rows = await contents(store)
        assert (rows[PACK].state, rows[source].state) == (PackState.LIVE, PackState.CONDEMNED)
        assert (rows[PACK].commit_seq or 0) > mark
        assert rows[PACK].size == copy.size
        with pytest.raises(RepositoryError) as caught:  # its answer was lost: nothing more is to be done
            await store.move_records(run, mark, copy, [source])
        assert caught.value.code == Code.MAINTENANCE_LOST
        assert await contents(store) == rows

    async def test_a_source_that_was_referred_to_since_the_mark_stays(self, store: CheckpointStore) -> None:
        a = await append(store, "t", "a")
        run = await store.start_maintenance()
        mark = (await store.roots()).mark
        b = await append(store, "u", "b")
        sources = [(await store.locate([c.record_id]))[c.record_id].pack_id for c in (a, b)]
        packs = [new_pack_id(), new_pack_id()]
        await store.reserve_maintenance_packs(run, packs)
        assert await store.move_records(run, mark, pack_of(packs[0], "record-b"), sources[1:]) == []
        assert await state(store, packs[0]) == PackState.WRITING
        both = pack_of(packs[1], "record-a", "record-b", "manifest-a")
        assert await store.move_records(run, mark, both, sources) == sources[:1]
        assert await pack_with(store, "record-a") == packs[1]
        assert await pack_with(store, "record-b") == sources[1]

    async def test_records_move_only_into_a_pack_that_the_run_reserved(self, store: CheckpointStore) -> None:
        source = await garbage(store, "x")
        _, writing = await acquire(store, "writer")
        run = await store.start_maintenance()
        before = await contents(store)
        for pack_id in (PACK, writing, source):
            with pytest.raises(RepositoryError) as caught:
                await store.move_records(run, 1 << 40, pack_of(pack_id, "x"), [source])
            assert caught.value.code == Code.MAINTENANCE_LOST
        assert await contents(store) == before

    # ---- sweeping

    async def test_a_sweep_waits_for_the_grace_and_drops_the_rows(self, store: CheckpointStore, clock: ManualClock) -> None:
        old = await garbage(store, "x")
        run = await store.start_maintenance()
        await store.condemn(run, (await store.roots()).mark, [old])
        clock.advance(59)
        assert await store.sweep(run, grace=60) == []
        clock.advance(1)
        assert await store.sweep(run, grace=60) == [old]
        assert (await state(store, old), await pack_with(store, "x")) == (PackState.DELETING, None)
        assert await store.known([digest("x")]) == frozenset()
        assert await store.sweep(run, grace=60) == [old]  # its answer was lost: the blobs are named again

    async def test_a_sweep_takes_so_many_at_once_and_what_an_earlier_one_left(self, store: CheckpointStore) -> None:
        packs = [await garbage(store, str(n)) for n in range(5)]
        run = await store.start_maintenance()
        await store.condemn(run, (await store.roots()).mark, packs)
        first = await store.sweep(run, grace=0, limit=2)
        assert len(first) == 2
        run = await store.start_maintenance()
        assert sorted(await store.sweep(run, grace=3600)) == sorted(first)
        await store.mark_deleted(run, first)
        seen = set(first)
        while due := await store.sweep(run, grace=0, limit=2):
            seen.update(due)
            await store.mark_deleted(run, due)
        assert seen == set(packs)

    async def test_what_was_deleted_is_forgotten_later_and_nothing_else(self, store: CheckpointStore, clock: ManualClock) -> None:
        run = await store.start_maintenance()
        first, second, live = await swept(store, run, "x"), await swept(store, run, "y"), await garbage(store, "z")
        clock.advance(5)
        for _ in range(2):
            await store.mark_deleted(run, [first, live, PACK])
        assert [await state(store, p) for p in (first, second, live)] == [PackState.DELETED, PackState.DELETING, PackState.LIVE]
        assert (await contents(store))[first].condemned_at == clock()
        clock.advance(9)
        assert await store.deleted_before(run, 10) == []
        clock.advance(1)
        assert await store.deleted_before(run, 10) == [first]
        assert await store.deleted_before(run, 10, limit=0) == []
        for _ in range(2):
            await store.forget_packs(run, [first, second, live])
        assert {second, live} == set(await contents(store))

    async def test_caches_that_nobody_used_and_pins_that_ran_out_are_dropped(
        self, store: CheckpointStore, clock: ManualClock
    ) -> None:
        page = StatPage(page_id=digest("page"), digest=digest("stats"), data=b"data")
        for name in ("old", "new"):
            grant, made, commit = await start(store, name, name)
            stats = StatUpdate(sandbox_id=name, root="/w", manifest=made.roots[0].manifest, saved=(page,), replace=True)
            await store.append(grant.lease, made, msgspec.structs.replace(commit, stats=(stats,)))
            clock.advance(100)
        run = await store.start_maintenance()
        assert await store.expire_caches(run, unused=201) == 0
        assert await store.expire_caches(run, unused=150) == 1
        assert await store.expire_caches(run, unused=150) == 0
        assert await store.stat_digests("old", "/w") == {}
        assert await store.stat_digests("new", "/w") == {page.page_id: page.digest}

    # ---- packs that were found

    async def test_a_pack_that_is_found_is_entered_with_what_has_no_row(self, store: CheckpointStore) -> None:
        a = await append(store, "t", "a")
        run = await store.start_maintenance()
        mark = (await store.roots()).mark
        assert await store.adopt_pack(run, pack_of(PACK, "new", "record-a")) == 1
        assert (await pack_with(store, "new"), await pack_with(store, "record-a") == PACK) == (PACK, False)
        row = (await contents(store))[PACK]
        assert (row.state, row.size) == (PackState.LIVE, pack_of(PACK, "new", "record-a").size)
        assert (row.commit_seq or 0) > mark
        assert await store.adopt_pack(run, pack_of(PACK, "new", "record-a")) == 0
        assert await store.known([digest("new"), a.record_id]) == {digest("new"), a.record_id}

    async def test_a_pack_takes_the_rows_of_the_one_it_stands_for_and_corrects_its_own(self, store: CheckpointStore) -> None:
        a = await append(store, "t", "a")
        damaged = (await store.locate([a.record_id]))[a.record_id].pack_id
        run = await store.start_maintenance()
        await store.adopt_pack(run, pack_of(PACK, "record-a", "manifest-a"), instead_of=damaged)
        assert await pack_with(store, "record-a") == await pack_with(store, "manifest-a") == PACK
        before = await store.locate([a.record_id])
        await store.adopt_pack(run, pack_of(PACK, "manifest-a", "record-a"))
        after = await store.locate([a.record_id])
        assert (before[a.record_id].offset, after[a.record_id].offset) == (0, 10)

    @pytest.mark.parametrize("was", ["condemned", "lost", "abandoned", "reserved"])
    async def test_a_pack_that_nobody_else_holds_is_made_live(self, store: CheckpointStore, was: str) -> None:
        run = await store.start_maintenance()
        pack_id = await abandoned(store, "x") if was == "abandoned" else await garbage(store, "x")
        if was == "condemned":
            await store.condemn(run, (await store.roots()).mark, [pack_id])
        elif was == "lost":
            await store.lose_packs(run, [pack_id])
        elif was == "reserved":
            await store.reserve_maintenance_packs(run, [pack_id := new_pack_id()])
        await store.adopt_pack(run, pack_of(pack_id, "x"))
        row = (await contents(store))[pack_id]
        assert (row.state, row.condemned_at) == (PackState.LIVE, None)
        assert await store.condemn_abandoned(run) == []
        assert await store.sweep(run, grace=0) == []
        assert await store.known([digest("x")]) == {digest("x")}

    @pytest.mark.parametrize("was", ["deleting", "deleted", "writing"])
    async def test_a_pack_that_may_be_deleted_or_committed_by_others_is_refused(self, store: CheckpointStore, was: str) -> None:
        run = await store.start_maintenance()
        if was == "writing":
            _, pack_id = await acquire(store, "writer")
        else:
            pack_id = await swept(store, run, "x")
            await store.mark_deleted(run, [pack_id] if was == "deleted" else [])
        run = await store.start_maintenance()
        before = await contents(store)
        with pytest.raises(CheckpointConflictError) as caught:
            await store.adopt_pack(run, pack_of(pack_id, "x"))
        assert caught.value.code == Code.DUPLICATE_ID
        assert caught.value.hint
        assert (await contents(store), await pack_with(store, "x")) == (before, None)
        assert before[pack_id].state == was
        await store.adopt_pack(run, pack_of(PACK, "x"), instead_of=pack_id)  # a copy is as good
        assert await pack_with(store, "x") == PACK

    async def test_an_adopted_pack_that_a_writer_left_takes_nothing_from_others(self, store: CheckpointStore) -> None:
        """Both stored the same record; the row leads to the pack of the one that is still writing."""
        lease, writing = await acquire(store, "writer")
        await store.add_pack(lease, pack_of(writing, "x", "manifest-a", "record-a"))
        left = await abandoned(store, "x")
        run = await store.start_maintenance()
        await store.adopt_pack(run, pack_of(left, "x"))
        assert await pack_with(store, "x") == writing
        commit = Commit(own=(writing,), refs=(digest("x"),))
        await store.append(lease, checkpoint_for("writer", "a"), commit)
        assert await store.known([digest("x")]) == {digest("x")}

    # ---- what was lost

    async def test_a_lost_pack_is_set_aside_and_its_rows_are_dropped(self, store: CheckpointStore) -> None:
        a = await append(store, "t", "a")
        await append(store, "u", "b")
        pack_id = (await store.locate([a.record_id]))[a.record_id].pack_id
        run = await store.start_maintenance()
        assert await store.lose_packs(run, [pack_id, PACK]) == 2
        assert (await state(store, pack_id), await state(store, PACK)) == (PackState.LOST, PackState.LOST)
        assert (await pack_with(store, "record-a"), await pack_with(store, "manifest-a")) == (None, None)
        assert await pack_with(store, "record-b") is not None
        assert await store.damaged_threads() == {"t", "u"}
        assert await is_damaged(store, "t")
        assert await store.lose_packs(run, [pack_id, PACK]) == 0
        mark = (await store.roots()).mark
        assert await store.condemn(run, mark, [pack_id, PACK]) == []
        assert await store.condemn_abandoned(run) == []
        assert await store.sweep(run, grace=0) == []

    async def test_losing_what_had_no_rows_is_no_damage(self, store: CheckpointStore) -> None:
        await append(store, "t", "a")
        run = await store.start_maintenance()
        assert await store.lose_packs(run, [PACK]) == 0
        assert await store.damaged_threads() == frozenset()

    @pytest.mark.parametrize("was", ["deleting", "deleted"])
    async def test_what_gc_deletes_is_never_taken_for_lost(self, store: CheckpointStore, was: str) -> None:
        run = await store.start_maintenance()
        pack_id = await swept(store, run, "x")
        await store.mark_deleted(run, [pack_id] if was == "deleted" else [])
        assert await store.lose_packs(run, [pack_id]) == 0
        assert await state(store, pack_id) == was

    async def test_what_is_being_written_is_never_taken_for_lost(self, store: CheckpointStore) -> None:
        lease, writing = await acquire(store, "writer")
        await store.add_pack(lease, pack_of(writing, "x", "manifest-a", "record-a"))
        run = await store.start_maintenance()
        assert await store.lose_packs(run, [writing]) == 0
        assert await pack_with(store, "x") == writing
        await store.append(lease, checkpoint_for("writer", "a"), Commit(own=(writing,)))

    async def test_rows_that_lead_to_no_record_are_dropped_alone(self, store: CheckpointStore) -> None:
        a = await append(store, "t", "a")
        pack_id = (await store.locate([a.record_id]))[a.record_id].pack_id
        run = await store.start_maintenance()
        assert await store.drop_records(run, new_pack_id(), [a.record_id]) == 0
        assert await store.damaged_threads() == frozenset()
        assert await store.drop_records(run, pack_id, [a.record_id, digest("absent")]) == 1
        assert (await pack_with(store, "record-a"), await pack_with(store, "manifest-a")) == (None, pack_id)
        assert await state(store, pack_id) == PackState.LIVE
        assert await store.damaged_threads() == {"t"}
        assert await store.drop_records(run, pack_id, [a.record_id]) == 0
        with pytest.raises(SnapshotError):
            await store.drop_records(run, pack_id, [b"short"])

    async def test_damage_counts_for_what_was_written_before_it(self, store: CheckpointStore) -> None:
        await append(store, "t", "a")
        await append(store, "u", "b")
        run = await store.start_maintenance()
        await store.note_damage(run)
        assert await store.damaged_threads() == {"t", "u"}
        await append(store, "t", "later")
        assert await store.damaged_threads() == {"u"}
        assert (await is_damaged(store, "t"), await is_damaged(store, "u")) == (False, True)
        await store.note_damage(run)
        assert await store.damaged_threads() == {"t", "u"}

    # ---- checkpoints that were found

    async def test_checkpoints_are_entered_and_the_newest_is_the_head(self, store: CheckpointStore) -> None:
        run = await store.start_maintenance()
        found = [checkpoint_for("t", name, created_at=at, recovered=True) for name, at in (("b", 20), ("c", 30), ("a", 10))]
        other = checkpoint_for("u", "d", label="kept", idempotency_key="key")
        assert set(await store.adopt_checkpoints(run, [*found, other])) == {"a", "b", "c", "d"}
        assert [c.id for c in await store.checkpoints("t")] == ["a", "b", "c"]
        assert {t.thread_id: t.head_id for t in await store.threads()} == {"t": "c", "u": "d"}
        assert await store.checkpoints("u") == [other]
        assert await store.by_idempotency_key("u", "key") == other
        assert await store.adopt_checkpoints(run, [*found, other]) == []
        assert await store.astray_heads() == []
        assert await is_damaged(store, "t")  # nothing is known of their records

    async def test_checkpoints_that_are_there_stay_as_they_are(self, store: CheckpointStore) -> None:
        a = await append(store, "t", "a", created_at=50)
        run = await store.start_maintenance()
        claims = [checkpoint_for("t", "a", label="forged", created_at=99), checkpoint_for("u", "a"), checkpoint_for("t", "b")]
        assert await store.adopt_checkpoints(run, claims) == ["b"]
        assert [c.id for c in await store.checkpoints("t")] == ["b", "a"]
        assert (await store.checkpoints("t"))[1] == a
        assert {t.thread_id: t.head_id for t in await store.threads()} == {"t": "a"}

    async def test_of_two_with_one_id_or_one_key_the_first_is_entered(self, store: CheckpointStore) -> None:
        run = await store.start_maintenance()
        found = [
            checkpoint_for("t", "a", idempotency_key="key"),
            checkpoint_for("u", "a"),
            checkpoint_for("t", "b", idempotency_key="key", created_at=9),
            checkpoint_for("u", "c", idempotency_key="key"),
        ]
        assert await store.adopt_checkpoints(run, found) == ["a", "c"]
        assert {t.thread_id: t.head_id for t in await store.threads()} == {"t": "a", "u": "c"}
        assert await store.adopt_checkpoints(run, found[2:3]) == []

    async def test_checkpoints_that_are_not_well_formed_are_refused_together(self, store: CheckpointStore) -> None:
        run = await store.start_maintenance()
        with pytest.raises(SnapshotError):
            await store.adopt_checkpoints(run, [checkpoint_for("t", "a"), checkpoint_for("t", "a/b")])
        assert await store.threads() == []

    async def test_many_checkpoints_are_entered_at_once(self, store: CheckpointStore) -> None:
        run = await store.start_maintenance()
        found = [checkpoint_for(f"t-{n % 3}", f"c-{n:04}", created_at=n) for n in range(1200)]
        assert await store.adopt_checkpoints(run, found[:700]) == [c.id for c in found[:700]]
        assert await store.adopt_checkpoints(run, found) == [c.id for c in found[700:]]
        assert {t.head_id for t in await store.threads()} == {c.id for c in found[-3:]}
        assert sum(t.checkpoints for t in await store.threads()) == 1200

    async def test_heads_that_are_right_are_left(self, store: CheckpointStore) -> None:
        await append(store, "t", "a", created_at=1)
        await append(store, "t", "b", created_at=2)
        lease, _ = await acquire(store, "u")
        await written(store, lease, _, "only")
        lease, _ = await acquire(store, "u")
        await store.delete(lease, ["only"])
        assert await store.astray_heads() == []
        assert await store.mend_heads(await store.start_maintenance()) == []

    async def test_another_record_becomes_a_checkpoints_own(self, store: CheckpointStore) -> None:
        a = await append(store, "t", "a", label="label")
        run = await store.start_maintenance()
        new = digest("another")
        assert not await store.replace_record(run, "t", "a", digest("wrong"), new)
        assert not await store.replace_record(run, "t", "absent", a.record_id, new)
        assert not await store.replace_record(run, "u", "a", a.record_id, new)
        assert await store.checkpoints("t") == [a]
        assert await store.replace_record(run, "t", "a", a.record_id, new)
        assert await store.checkpoints("t") == [msgspec.structs.replace(a, record_id=new)]
        assert (await store.roots()).records == {new}
        assert not await store.replace_record(run, "t", "a", a.record_id, new)
        with pytest.raises(SnapshotError):
            await store.replace_record(run, "t", "a", new, b"short")

    async def test_a_database_gets_another_id_and_keeps_all_else(self, store: CheckpointStore) -> None:
        await append(store, "t", "a")
        run = await store.start_maintenance()
        before = await state_of(store)
        for _ in range(2):
            await store.rename_database(run, "renamed")
        assert await store.identity() == StoreIdentity(IDENTITY.repository_id, "renamed")
        assert await state_of(store) == before
