"""Conformance of packs, records, pins and the stat cache. Subclass `RecordTests` and override the fixture `store`."""

import msgspec
import pytest

from snapcore.errors import (
    CheckpointConflictError,
    CheckpointWriterLostError,
    Code,
    RecordsMissingError,
    RepositoryError,
    SnapcoreError,
    SnapshotError,
)
from snapcore.model import Location, PackState, PackWrite, StatPage, StatUpdate, WriterLease
from snapcore.protocols import CheckpointStore, Commit

from .clock import ManualClock
from .entries import acquire, append, checkpoint_for, digest, new_pack_id, pack_of, start, state_of

__all__ = ["RecordTests"]


async def states(store: CheckpointStore) -> dict[str, str]:
    """State by pack id."""
    return {pack.pack_id: pack.state for pack in await store.packs()}


async def pack_with(store: CheckpointStore, name: str) -> str:
    """The id of the pack that the record's row leads to."""
    return (await store.locate([digest(name)]))[digest(name)].pack_id


async def enter(store: CheckpointStore, lease: WriterLease, pack: PackWrite, next_pack_id: str) -> frozenset[bytes]:
    """Enter a pack, and reserve the next."""
    elsewhere = await store.add_pack(lease, pack)
    await store.reserve_packs(lease, [next_pack_id])
    return elsewhere


def page(name: str, data: bytes = b"data") -> StatPage:
    """A stat page."""
    return StatPage(page_id=digest(name), digest=digest(f"digest-{name}"), data=data)


class RecordTests:
    """What makes commits safe: a checkpoint that is visible rests on packs that stay."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """The store's clock."""
        return ManualClock()

    @pytest.fixture
    def store(self, clock: ManualClock) -> CheckpointStore:
        """Override: a store initialised with `IDENTITY` of `snapcore.testing.entries`, on `clock`."""
        pytest.fail("The fixture `store` must be overridden.")

    # ---- packs of a commit

    async def test_a_commit_makes_its_packs_live_and_its_records_known(self, store: CheckpointStore) -> None:
        grant, checkpoint, commit = await start(store, "thread", "first")
        ids = [digest("manifest-first"), digest("record-first")]
        assert await store.known(ids) == frozenset()
        await store.append(grant.lease, checkpoint, commit)
        assert await store.known([*ids, digest("absent")]) == frozenset(ids)
        pack_id = commit.packs[0].pack_id
        assert await store.locate([*ids, digest("absent")]) == {
            ids[0]: Location(pack_id, 0, 10, 20, 1),
            ids[1]: Location(pack_id, 10, 10, 20, 1),
        }
        [info] = await store.packs()
        assert (info.pack_id, info.state, info.size) == (pack_id, PackState.LIVE, commit.packs[0].size)
        assert info.commit_seq is not None

    async def test_later_commits_have_larger_sequence_numbers(self, store: CheckpointStore) -> None:
        numbers = []
        for name in ("a", "b", "c"):
            await append(store, name, name)
            pack_id = await pack_with(store, f"record-{name}")
            numbers.append(next(pack.commit_seq for pack in await store.packs() if pack.pack_id == pack_id) or 0)
        assert numbers == sorted(set(numbers))

    async def test_packs_are_listed_by_id(self, store: CheckpointStore) -> None:
        for name in ("a", "b", "c", "d"):
            await append(store, name, name)
        listed = [pack.pack_id for pack in await store.packs()]
        assert listed == sorted(listed)

    async def test_packs_entered_early_stay_writing_until_the_commit(self, store: CheckpointStore) -> None:
        lease, first = await acquire(store, "thread")
        second = new_pack_id()
        assert await enter(store, lease, pack_of(first, "x", "y"), second) == frozenset()
        assert await states(store) == {first: PackState.WRITING, second: PackState.WRITING}
        assert await store.known([digest("x")]) == frozenset()
        checkpoint = checkpoint_for("thread", "c")
        await store.append(lease, checkpoint, Commit(packs=(pack_of(second, "manifest-c", "record-c"),), own=(first,)))
        assert await states(store) == {first: PackState.LIVE, second: PackState.LIVE}
        assert await store.known([digest("x"), digest("y")]) == {digest("x"), digest("y")}

    async def test_entering_a_pack_may_be_repeated(self, store: CheckpointStore) -> None:
        await append(store, "other", "other")
        lease, first = await acquire(store, "thread")
        second = new_pack_id()
        pack = pack_of(first, "x", "record-other")
        answers = [await enter(store, lease, pack, second) for _ in range(2)]
        assert answers == [{digest("record-other")}] * 2
        assert len(await store.packs()) == 3

    async def test_a_pack_that_is_not_in_the_commit_stays_writing(self, store: CheckpointStore) -> None:
        lease, first = await acquire(store, "thread")
        second = new_pack_id()
        await enter(store, lease, pack_of(first, "x"), second)
        await store.append(lease, checkpoint_for("thread", "c"), Commit(packs=(pack_of(second, "manifest-c", "record-c"),)))
        assert await states(store) == {first: PackState.WRITING, second: PackState.LIVE}
        assert await store.known([digest("x")]) == frozenset()

    @pytest.mark.parametrize("how", ["own", "packs"])
    async def test_a_pack_of_another_writer_cannot_be_committed(self, store: CheckpointStore, how: str) -> None:
        other, foreign = await acquire(store, "other")
        await store.add_pack(other, pack_of(foreign, "x"))
        grant, checkpoint, commit = await start(store, "thread", "first")
        wrong = Commit(packs=commit.packs, own=(foreign,))
        if how == "packs":
            wrong = Commit(packs=(*commit.packs, pack_of(foreign, "x")))
        before = await state_of(store)
        with pytest.raises(CheckpointWriterLostError):
            await store.append(grant.lease, checkpoint, wrong)
        assert await state_of(store) == before

    async def test_a_pack_is_of_one_lease_and_not_of_its_successor(self, store: CheckpointStore, clock: ManualClock) -> None:
        old, pack_id = await acquire(store, "thread", ttl=10)
        await store.add_pack(old, pack_of(pack_id, "x"))
        clock.advance(11)
        grant, checkpoint, commit = await start(store, "thread", "first")
        before = await state_of(store)
        with pytest.raises(CheckpointWriterLostError):
            await store.append(grant.lease, checkpoint, Commit(packs=commit.packs, own=(pack_id,)))
        assert await state_of(store) == before

    async def test_a_pack_that_was_never_announced_cannot_be_entered(self, store: CheckpointStore) -> None:
        lease, _ = await acquire(store, "thread")
        with pytest.raises(CheckpointWriterLostError):
            await store.add_pack(lease, pack_of(new_pack_id(), "x"))

    async def test_a_pack_id_is_used_once(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first")
        used = await pack_with(store, "record-first")
        before = await state_of(store)
        with pytest.raises(CheckpointConflictError) as caught:
            await store.acquire_writer("other", pack_id=used)
        assert caught.value.code is Code.DUPLICATE_ID
        assert await state_of(store) == before
        assert await store.acquire_writer("other"), "the refused acquisition took no lease"

    @pytest.mark.parametrize("pack_id", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "../" + "0" * 29])
    async def test_invalid_pack_ids_are_refused(self, store: CheckpointStore, pack_id: str) -> None:
        lease, good = await acquire(store, "thread")
        for call in (
            store.acquire_writer("other", pack_id=pack_id),
            store.add_pack(lease, pack_of(pack_id, "x")),
            enter(store, lease, pack_of(good, "x"), pack_id),
            store.append(lease, checkpoint_for("thread", "c"), Commit(own=(pack_id,))),
        ):
            with pytest.raises(SnapshotError) as caught:
                await call
            assert caught.value.code is Code.INVALID_REQUEST

    async def test_invalid_records_are_refused(self, store: CheckpointStore) -> None:
        lease, pack_id = await acquire(store, "thread")
        good = pack_of(pack_id, "x").records[0]
        for fields in ({"id": b"short"}, {"offset": -1}, {"offset": 1000}, {"stored_size": 1000}, {"raw_size": -1}):
            pack = PackWrite(pack_id=pack_id, size=100, records=(msgspec.structs.replace(good, **fields),))
            with pytest.raises(SnapshotError) as caught:
                await store.add_pack(lease, pack)
            assert caught.value.code is Code.INVALID_REQUEST
        for call in (store.known([b"short"]), store.locate([b"short"])):
            with pytest.raises(SnapshotError) as caught:
                await call
            assert caught.value.code is Code.INVALID_REQUEST

    # ---- records that a commit refers to

    @pytest.mark.parametrize("absent", ["record-first", "manifest-first", "reference"])
    async def test_a_record_that_is_missing_rolls_everything_back(self, store: CheckpointStore, absent: str) -> None:
        await append(store, "other", "other")
        lease, pack_id = await acquire(store, "thread")
        stored = [name for name in ("record-first", "manifest-first", "reference") if name != absent]
        update = StatUpdate(sandbox_id="s", root="r", manifest=digest("m"), saved=(page("p"),))
        commit = Commit(
            packs=(pack_of(pack_id, *stored),),
            refs=(digest("reference"), digest("record-other")),
            stats=(update,),
        )
        before = await state_of(store)
        with pytest.raises(RecordsMissingError) as caught:
            await store.append(lease, checkpoint_for("thread", "first"), commit)
        assert caught.value.ids == {digest(absent)}
        assert await state_of(store) == before
        assert await store.known([digest(name) for name in stored]) == frozenset()
        assert await store.stat_digests("s", "r") == {}
        whole = msgspec.structs.replace(commit, packs=(pack_of(pack_id, *stored, absent),))
        assert await store.append(lease, checkpoint_for("thread", "first"), whole), "the lease is kept for the retry"

    async def test_a_commit_stamps_the_packs_it_refers_to(self, store: CheckpointStore) -> None:
        await append(store, "other", "other")
        shared = await pack_with(store, "record-other")
        grant, checkpoint, commit = await start(store, "thread", "first")
        await store.append(grant.lease, checkpoint, msgspec.structs.replace(commit, refs=(digest("record-other"),)))
        numbers = {pack.pack_id: pack.commit_seq for pack in await store.packs()}
        assert numbers[shared] == numbers[commit.packs[0].pack_id]

    async def test_a_commit_leaves_other_packs_alone(self, store: CheckpointStore) -> None:
        await append(store, "other", "other")
        before = await store.packs()
        await append(store, "thread", "first")
        assert [pack for pack in await store.packs() if pack in before] == before

    async def test_a_record_in_a_live_pack_is_reported_and_its_pack_stamped(self, store: CheckpointStore) -> None:
        await append(store, "other", "other")
        shared = await pack_with(store, "record-other")
        lease, pack_id = await acquire(store, "thread")
        last = new_pack_id()
        assert await enter(store, lease, pack_of(pack_id, "record-other", "x"), last) == {digest("record-other")}
        commit = Commit(packs=(pack_of(last, "manifest-c", "record-c"),), own=(pack_id,))
        await store.append(lease, checkpoint_for("thread", "c"), commit)
        numbers = {pack.pack_id: pack.commit_seq for pack in await store.packs()}
        assert len({numbers[shared], numbers[pack_id], numbers[last]}) == 1, "the loser of the race stamps the winner's pack"
        assert await pack_with(store, "record-other") == shared

    async def test_a_record_in_another_writers_pack_does_not_count(self, store: CheckpointStore) -> None:
        other, foreign = await acquire(store, "other")
        await store.add_pack(other, pack_of(foreign, "x"))
        assert await store.known([digest("x")]) == frozenset()
        grant, checkpoint, commit = await start(store, "thread", "first")
        with pytest.raises(RecordsMissingError) as caught:
            await store.append(grant.lease, checkpoint, msgspec.structs.replace(commit, refs=(digest("x"),)))
        assert caught.value.ids == {digest("x")}

    @pytest.mark.parametrize("early", [True, False])
    @pytest.mark.parametrize("order", ["first entered commits first", "last entered commits first"])
    async def test_writers_that_store_the_same_record_at_once_both_rest_on_live_packs(
        self, store: CheckpointStore, early: bool, order: str
    ) -> None:
        writers = {}
        for thread_id in ("a", "b"):
            lease, pack_id = await acquire(store, thread_id)
            last = new_pack_id()
            assert await enter(store, lease, pack_of(pack_id, "shared", f"only-{thread_id}"), last) == frozenset()
            records = pack_of(last, f"manifest-{thread_id}", f"record-{thread_id}", *([] if early else ["late"]))
            # What a pack of the commit holds need not be named again: its commit finds out which copy counts.
            refs = (digest(f"only-{thread_id}"),)
            writers[thread_id] = (lease, Commit(packs=(records,), own=(pack_id,), refs=refs))
        for thread_id in ("a", "b") if order.startswith("first") else ("b", "a"):
            lease, commit = writers[thread_id]
            await store.append(lease, checkpoint_for(thread_id, thread_id), commit)
            live = await states(store)
            for record_id in (digest("shared"), *commit.refs, *(record.id for record in commit.packs[0].records)):
                place = (await store.locate([record_id]))[record_id]
                assert live[place.pack_id] == PackState.LIVE
        numbers = {pack.pack_id: pack.commit_seq or 0 for pack in await store.packs()}
        assert numbers[await pack_with(store, "shared")] == max(numbers.values()), "the later commit stamped it too"

    async def test_a_writer_that_gives_up_takes_nothing_with_it(self, store: CheckpointStore) -> None:
        gone, foreign = await acquire(store, "gone")
        await store.add_pack(gone, pack_of(foreign, "x"))
        lease, pack_id = await acquire(store, "thread")
        commit = Commit(packs=(pack_of(pack_id, "x", "manifest-c", "record-c"),), refs=(digest("x"),))
        await store.release_writer(gone)
        await store.append(lease, checkpoint_for("thread", "c"), commit)
        assert await store.locate([digest("x")]) == {digest("x"): Location(pack_id, 0, 10, 20, 1)}

    async def test_one_writer_may_store_a_record_twice(self, store: CheckpointStore) -> None:
        lease, first = await acquire(store, "thread")
        second, last = new_pack_id(), new_pack_id()
        await enter(store, lease, pack_of(first, "x"), second)
        assert await enter(store, lease, pack_of(second, "x", "y"), last) == {digest("x")}
        commit = Commit(packs=(pack_of(last, "x", "manifest-c", "record-c"),), own=(first, second))
        await store.append(lease, checkpoint_for("thread", "c"), commit)
        assert await pack_with(store, "x") == first
        assert set((await states(store)).values()) == {PackState.LIVE}

    async def test_a_second_copy_counts_when_the_pack_with_the_first_is_not_committed(self, store: CheckpointStore) -> None:
        lease, first = await acquire(store, "thread")
        second = new_pack_id()
        await enter(store, lease, pack_of(first, "x"), second)
        commit = Commit(packs=(pack_of(second, "x", "manifest-c", "record-c"),), refs=(digest("x"),))
        await store.append(lease, checkpoint_for("thread", "c"), commit)
        assert await pack_with(store, "x") == second

    async def test_large_numbers_of_records(self, store: CheckpointStore) -> None:
        names = range(40_000)
        ids = [digest(name) for name in names]
        lease, pack_id = await acquire(store, "thread")
        last = new_pack_id()
        await enter(store, lease, pack_of(pack_id, *names), last)
        commit = Commit(packs=(pack_of(last, "manifest-c", "record-c"),), own=(pack_id,), refs=tuple(ids))
        await store.append(lease, checkpoint_for("thread", "c"), commit)
        assert await store.known([*ids, digest("absent")]) == frozenset(ids)
        located = await store.locate(ids)
        assert [located[record_id].offset for record_id in ids] == [10 * n for n in names]

    async def test_no_ids_are_a_question_too(self, store: CheckpointStore) -> None:
        assert await store.known([]) == frozenset()
        assert await store.locate([]) == {}

    async def test_totals_count_every_record_once(self, store: CheckpointStore) -> None:
        assert await store.record_totals() == (0, 0)
        await append(store, "thread", "first")
        assert await store.record_totals() == (2, 40)

    # ---- pins

    async def test_a_pin_holds_for_its_time_and_can_be_renewed(self, store: CheckpointStore, clock: ManualClock) -> None:
        first = await append(store, "thread", "first")
        roots = [root.manifest for root in first.roots]
        pin = await store.pin(roots, ("thread", "first"), ttl=10)
        assert pin.roots == tuple(roots)
        assert pin.expires_at == clock() + 10_000_000
        clock.advance(9)
        assert (await store.renew_pin(pin, ttl=10)).expires_at == clock() + 10_000_000
        clock.advance(9)
        assert await store.renew_pin(pin, ttl=10)

    async def test_a_pin_that_has_run_out_cannot_be_renewed(self, store: CheckpointStore, clock: ManualClock) -> None:
        await append(store, "thread", "first")
        pin = await store.pin([digest("manifest-first")], ("thread", "first"), ttl=10)
        clock.advance(10)
        with pytest.raises(RepositoryError):
            await store.renew_pin(pin)

    async def test_letting_go_of_a_pin_may_be_repeated(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first")
        pin = await store.pin([digest("manifest-first")], ("thread", "first"))
        await store.unpin(pin)
        await store.unpin(pin)
        with pytest.raises(RepositoryError):
            await store.renew_pin(pin)

    @pytest.mark.parametrize("source", [("thread", "absent"), ("other", "first"), ("absent", "first")])
    async def test_a_pin_needs_its_source(self, store: CheckpointStore, source: tuple[str, str]) -> None:
        await append(store, "thread", "first")
        await append(store, "other", "elsewhere")
        with pytest.raises(SnapcoreError) as caught:
            await store.pin([digest("manifest-first")], source)
        assert caught.value.code is Code.MISSING_CHECKPOINT

    # ---- records that were lost

    async def test_a_head_is_damaged_when_records_were_lost_since_its_writer_took_its_lease(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first")
        grant, checkpoint, commit = await start(store, "thread", "second")
        assert not grant.damaged
        await store.lose_packs(await store.start_maintenance(), [await pack_with(store, "manifest-first")])
        await store.append(grant.lease, checkpoint, commit)
        grant, checkpoint, commit = await start(store, "thread", "third")
        assert grant.damaged, "the second may have taken over from the first what was lost"
        await store.append(grant.lease, checkpoint, commit)
        assert not (await store.acquire_writer("thread")).damaged

    # ---- the stat cache

    async def test_stats_are_saved_replaced_and_dropped(self, store: CheckpointStore) -> None:
        def update(**fields: object) -> StatUpdate:
            return msgspec.convert({"sandbox_id": "s", "root": "r", "manifest": digest("m"), **fields}, StatUpdate)

        await store.save_stats([update(saved=(page("a"), page("b"), page("c")))])
        assert await store.stat_digests("s", "r") == {page(n).page_id: page(n).digest for n in "abc"}
        await store.save_stats([update(saved=(page("b", b"new"), page("d")), dropped=(digest("a"), digest("absent")))])
        wanted = [digest(name) for name in "abcd"]
        assert await store.stat_pages("s", "r", wanted) == {
            digest("b"): page("b", b"new"),
            digest("c"): page("c"),
            digest("d"): page("d"),
        }
        assert await store.stat_pages("s", "r", [digest("b")]) == {digest("b"): page("b", b"new")}
        await store.save_stats([update(saved=(page("e"),), replace=True)])
        assert list(await store.stat_digests("s", "r")) == [digest("e")]

    async def test_stats_are_of_one_sandbox_and_root(self, store: CheckpointStore) -> None:
        places = [("s", "r"), ("s", "q"), ("t", "r")]
        updates = [
            StatUpdate(sandbox_id=s, root=r, manifest=digest(s + r), saved=(page(s + r), page("p", r.encode())))
            for s, r in places
        ]
        await store.save_stats(updates)
        for sandbox_id, root in places:
            digests = await store.stat_digests(sandbox_id, root)
            assert set(digests) == {digest(sandbox_id + root), digest("p")}
            pages = await store.stat_pages(sandbox_id, root, [digest("p")])
            assert pages[digest("p")].data == root.encode()
        assert await store.stat_digests("t", "q") == {}
        assert await store.stat_pages("t", "q", [digest("p")]) == {}

    async def test_the_grant_names_the_manifests_that_the_stats_align_with(self, store: CheckpointStore) -> None:
        grant, checkpoint, commit = await start(store, "thread", "first")
        stats = tuple(
            StatUpdate(sandbox_id="s", root=root, manifest=digest(root), redaction=root.encode()) for root in ("a", "b")
        )
        await store.append(grant.lease, checkpoint, msgspec.structs.replace(commit, stats=stats))
        grant = await store.acquire_writer("thread", sandbox_id="s", roots=["b", "c"])
        assert grant.bases == {"b": digest("b")}
        assert grant.base_redactions == {"b": b"b"}
        assert (await store.acquire_writer("other", sandbox_id="t", roots=["b"])).bases == {}
        await store.save_stats([msgspec.structs.replace(stats[1], manifest=digest("new"), redaction=b"")])
        grant = await store.acquire_writer("third", sandbox_id="s", roots=["b"])
        assert (grant.bases, grant.base_redactions) == ({"b": digest("new")}, {"b": b""})
