"""Conformance of writer leases. Subclass `WriterLeaseTests` and override the fixture `store`."""

from typing import Any

import msgspec
import pytest

from snapcore.errors import CheckpointConflictError, CheckpointWriterConflictError, CheckpointWriterLostError, Code, SnapshotError
from snapcore.hosts import current_holder
from snapcore.model import Holder, PackState, WriterLease
from snapcore.protocols import CheckpointStore, Commit

from .clock import ManualClock
from .entries import IDENTITY, acquire, append, checkpoint_for, digest, new_pack_id, pack_of, start, state_of

__all__ = ["WriterLeaseTests"]

TOKEN = "00112233445566778899aabbccddeeff"
INVALID_THREAD_IDS = ["", "\ud800", "a\udc80", "a\nb", "a\0", "x" * 513]


async def use(store: CheckpointStore, lease: WriterLease, call: str) -> None:
    """Call a method of the store that needs the lease."""
    checkpoint = checkpoint_for(lease.thread_id, "used", parent="first")
    match call:
        case "renew":
            await store.renew_writer(lease)
        case "release":
            await store.release_writer(lease)
        case "append":
            await store.append(lease, checkpoint, Commit())
        case "delete":
            await store.delete(lease, ["first"])
        case "set_label":
            await store.set_label(lease, "first", "label", digest("record-first"), Commit())
        case "add_pack":
            await store.add_pack(lease, pack_of(new_pack_id(), "x"))
        case _:
            fork = msgspec.structs.replace(checkpoint, parent_id=None, source_thread_id="other", source_id="other")
            await store.fork(lease, fork, Commit())


CALLS = ["renew", "release", "append", "delete", "set_label", "add_pack", "fork"]


class WriterLeaseTests:
    """One writer a thread, by the database's clock."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """The store's clock."""
        return ManualClock()

    @pytest.fixture
    def store(self, clock: ManualClock) -> CheckpointStore:
        """Override: a store initialised with `IDENTITY` of `snapcore.testing.entries`, on `clock`."""
        pytest.fail("The fixture `store` must be overridden.")

    async def test_a_lease_is_granted_on_a_thread_that_does_not_exist(self, store: CheckpointStore, clock: ManualClock) -> None:
        grant = await store.acquire_writer("thread", ttl=30)
        assert grant.lease.thread_id == "thread"
        assert grant.lease.acquired_at == clock()
        assert grant.lease.expires_at == clock() + 30_000_000
        assert grant.lease.ttl == 30_000_000
        assert (grant.head, grant.deleted, grant.bases, grant.has_records) == (None, (), {}, False)
        assert await store.threads() == []

    async def test_a_second_writer_of_a_thread_is_refused(self, store: CheckpointStore) -> None:
        lease = (await store.acquire_writer("thread")).lease
        with pytest.raises(CheckpointWriterConflictError) as caught:
            await store.acquire_writer("thread")
        assert caught.value.expires_at == lease.expires_at
        assert await store.renew_writer(lease)

    async def test_a_refused_writer_leaves_no_pack_behind(self, store: CheckpointStore) -> None:
        await acquire(store, "thread")
        before = await state_of(store)
        with pytest.raises(CheckpointWriterConflictError):
            await acquire(store, "thread")
        assert await state_of(store) == before

    async def test_other_threads_are_free(self, store: CheckpointStore) -> None:
        await store.acquire_writer("thread")
        assert (await store.acquire_writer("other")).lease.thread_id == "other"

    async def test_the_conflict_names_the_holder(self, store: CheckpointStore) -> None:
        await store.acquire_writer("thread", holder=Holder(host="elsewhere", pid=4711, boot_id="boot", started=1))
        with pytest.raises(CheckpointWriterConflictError, match="process 4711 on elsewhere"):
            await store.acquire_writer("thread")

    async def test_a_released_lease_is_free_at_once(self, store: CheckpointStore) -> None:
        await store.release_writer((await store.acquire_writer("thread")).lease)
        assert await store.acquire_writer("thread")

    async def test_every_acquisition_has_a_larger_fence(self, store: CheckpointStore, clock: ManualClock) -> None:
        fences = []
        for thread_id in ("a", "b", "a", "a", "b"):
            fences.append((await store.acquire_writer(thread_id, ttl=1)).lease.fence)
            clock.advance(2)
        assert fences == sorted(set(fences))

    async def test_a_fence_stays_larger_after_a_release(self, store: CheckpointStore) -> None:
        first = (await store.acquire_writer("thread")).lease
        await store.release_writer(first)
        assert (await store.acquire_writer("thread")).lease.fence > first.fence

    async def test_a_lease_holds_until_it_runs_out_and_not_longer(self, store: CheckpointStore, clock: ManualClock) -> None:
        await store.acquire_writer("thread", ttl=10)
        clock.advance(9.999999)
        with pytest.raises(CheckpointWriterConflictError):
            await store.acquire_writer("thread")
        clock.advance(0.000001)
        assert await store.acquire_writer("thread")

    async def test_renewal_extends_from_now(self, store: CheckpointStore, clock: ManualClock) -> None:
        lease = (await store.acquire_writer("thread", ttl=10)).lease
        clock.advance(9)
        renewed = await store.renew_writer(lease)
        assert renewed.expires_at == clock() + 10_000_000
        assert (renewed.token, renewed.fence, renewed.acquired_at) == (lease.token, lease.fence, lease.acquired_at)
        clock.advance(9)
        with pytest.raises(CheckpointWriterConflictError):
            await store.acquire_writer("thread")

    async def test_the_lease_as_first_granted_stays_good_after_a_renewal(
        self, store: CheckpointStore, clock: ManualClock
    ) -> None:
        lease = (await store.acquire_writer("thread", ttl=10)).lease
        clock.advance(9)
        await store.renew_writer(lease)
        clock.advance(9)
        await store.release_writer(lease)

    @pytest.mark.parametrize("call", CALLS)
    async def test_an_expired_lease_can_do_nothing_though_nobody_took_it_over(
        self, store: CheckpointStore, clock: ManualClock, call: str
    ) -> None:
        await append(store, "thread", "first")
        await append(store, "other", "other")
        lease, _ = await acquire(store, "thread", ttl=10)
        clock.advance(10)
        before = await state_of(store)
        with pytest.raises(CheckpointWriterLostError) as caught:
            await use(store, lease, call)
        assert caught.value.code is Code.WRITER_LOST
        assert await state_of(store) == before

    @pytest.mark.parametrize("call", CALLS)
    async def test_a_lease_that_was_taken_over_can_do_nothing(
        self, store: CheckpointStore, clock: ManualClock, call: str
    ) -> None:
        await append(store, "thread", "first")
        await append(store, "other", "other")
        lease, _ = await acquire(store, "thread", ttl=10)
        clock.advance(11)
        successor, _ = await acquire(store, "thread")
        before = await state_of(store)
        with pytest.raises(CheckpointWriterLostError):
            await use(store, lease, call)
        assert await state_of(store) == before
        assert await store.renew_writer(successor)

    @pytest.mark.parametrize("call", CALLS)
    async def test_a_released_lease_can_do_nothing(self, store: CheckpointStore, call: str) -> None:
        await append(store, "thread", "first")
        await append(store, "other", "other")
        lease, _ = await acquire(store, "thread")
        await store.release_writer(lease)
        before = await state_of(store)
        with pytest.raises(CheckpointWriterLostError):
            await use(store, lease, call)
        assert await state_of(store) == before

    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("forged", ["token", "fence", "thread"])
    async def test_a_forged_lease_can_do_nothing(self, store: CheckpointStore, call: str, forged: str) -> None:
        await append(store, "thread", "first")
        await append(store, "other", "other")
        lease = (await store.acquire_writer("thread")).lease
        match forged:
            case "token":
                lease = msgspec.structs.replace(lease, token="0" * 32)
            case "fence":
                lease = msgspec.structs.replace(lease, fence=lease.fence - 1)
            case _:
                lease = msgspec.structs.replace(lease, thread_id="another")
        before = await state_of(store)
        with pytest.raises(CheckpointWriterLostError):
            await use(store, lease, call)
        assert await state_of(store) == before

    async def test_an_expired_lease_does_not_revive_when_the_clock_is_set_back_after_a_takeover(
        self, store: CheckpointStore, clock: ManualClock
    ) -> None:
        lease = (await store.acquire_writer("thread", ttl=10)).lease
        clock.advance(11)
        await store.acquire_writer("thread", ttl=10)
        clock.advance(-11)
        with pytest.raises(CheckpointWriterLostError):
            await store.renew_writer(lease)

    async def test_append_releases_the_lease_if_asked(self, store: CheckpointStore) -> None:
        grant, checkpoint, commit = await start(store, "thread", "first")
        await store.append(grant.lease, checkpoint, commit)
        assert await store.acquire_writer("thread")

    async def test_append_keeps_the_lease_if_asked(self, store: CheckpointStore) -> None:
        grant, checkpoint, commit = await start(store, "thread", "first")
        await store.append(grant.lease, checkpoint, commit, release=False)
        with pytest.raises(CheckpointWriterConflictError):
            await store.acquire_writer("thread")
        await store.release_writer(grant.lease)

    async def test_a_failed_append_keeps_the_lease(self, store: CheckpointStore) -> None:
        grant, checkpoint, commit = await start(store, "thread", "first")
        with pytest.raises(SnapshotError):
            await store.append(grant.lease, msgspec.structs.replace(checkpoint, reason="odd"), commit)
        assert await store.append(grant.lease, checkpoint, commit)

    async def test_a_holder_of_this_host_that_is_gone_is_replaced_at_once(self, store: CheckpointStore) -> None:
        here = current_holder()
        gone = msgspec.structs.replace(here, started=here.started + 1)  # the pid now belongs to another process
        lease = (await store.acquire_writer("thread", holder=gone)).lease
        successor = (await store.acquire_writer("thread", holder=here)).lease
        assert successor.fence > lease.fence
        with pytest.raises(CheckpointWriterLostError):
            await store.renew_writer(lease)

    async def test_a_holder_that_runs_or_cannot_be_judged_is_not_replaced(self, store: CheckpointStore) -> None:
        here = current_holder()
        holders = [here, msgspec.structs.replace(here, host="elsewhere", started=1), None]
        for number, holder in enumerate(holders):
            await store.acquire_writer(f"thread-{number}", holder=holder)
            with pytest.raises(CheckpointWriterConflictError):
                await store.acquire_writer(f"thread-{number}", holder=here)

    async def test_the_grant_holds_the_head_and_a_pack_is_entered(self, store: CheckpointStore) -> None:
        first = await append(store, "thread", "first")
        pack_id = new_pack_id()
        grant = await store.acquire_writer("thread", pack_id=pack_id)
        assert grant.head == first
        assert grant.has_records
        assert {pack.pack_id: pack.state for pack in await store.packs()}[pack_id] == PackState.WRITING

    async def test_the_token_is_the_callers_own_if_given(self, store: CheckpointStore) -> None:
        assert (await store.acquire_writer("thread", token=TOKEN)).lease.token == TOKEN
        tokens = {(await store.acquire_writer(f"other-{number}")).lease.token for number in range(3)}
        assert len(tokens) == 3

    async def test_a_repeated_acquisition_is_the_same_grant(self, store: CheckpointStore, clock: ManualClock) -> None:
        """An answer that was lost on the way is found by asking again, and blocks nobody until it runs out."""
        await append(store, "thread", "first")
        pack_id = new_pack_id()
        holder = Holder(host="elsewhere", pid=4711, boot_id="boot", started=1)
        grant = await store.acquire_writer("thread", ttl=30, holder=holder, pack_id=pack_id, token=TOKEN)
        before = await state_of(store)
        clock.advance(29.999999)
        assert await store.acquire_writer("thread", ttl=30, holder=holder, pack_id=pack_id, token=TOKEN) == grant
        assert await state_of(store) == before
        checkpoint = checkpoint_for("thread", "second", parent="first")
        commit = Commit(packs=(pack_of(pack_id, "manifest-second", "record-second"),))
        assert await store.append(grant.lease, checkpoint, commit)

    async def test_a_token_does_not_revive_a_lease_that_ran_out(self, store: CheckpointStore, clock: ManualClock) -> None:
        await store.acquire_writer("thread", ttl=30, token=TOKEN)
        clock.advance(30)
        with pytest.raises(CheckpointWriterLostError):
            await store.acquire_writer("thread", ttl=30, token=TOKEN)
        successor = (await store.acquire_writer("thread")).lease
        with pytest.raises(CheckpointWriterConflictError):
            await store.acquire_writer("thread", ttl=30, token=TOKEN)
        assert await store.renew_writer(successor)

    async def test_the_token_of_another_threads_lease_is_refused(self, store: CheckpointStore) -> None:
        await store.acquire_writer("thread", token=TOKEN)
        with pytest.raises(CheckpointConflictError) as caught:
            await store.acquire_writer("other", token=TOKEN)
        assert caught.value.code is Code.DUPLICATE_ID
        assert await store.acquire_writer("other")

    @pytest.mark.parametrize("token", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 31 + "\n", "٠" * 32, 7, b"0" * 32])
    async def test_an_invalid_token_is_refused(self, store: CheckpointStore, token: Any) -> None:
        with pytest.raises(SnapshotError) as caught:
            await store.acquire_writer("thread", token=token)
        assert caught.value.code is Code.INVALID_REQUEST

    @pytest.mark.parametrize("thread_id", INVALID_THREAD_IDS)
    async def test_invalid_thread_ids_are_refused(self, store: CheckpointStore, thread_id: str) -> None:
        with pytest.raises(SnapshotError) as caught:
            await store.acquire_writer(thread_id)
        assert caught.value.code is Code.INVALID_ID

    @pytest.mark.parametrize("ttl", [0, -1, float("nan")])
    async def test_a_lease_must_last(self, store: CheckpointStore, ttl: float) -> None:
        with pytest.raises(SnapshotError) as caught:
            await store.acquire_writer("thread", ttl=ttl)
        assert caught.value.code is Code.INVALID_REQUEST

    async def test_the_store_tells_its_clock(self, store: CheckpointStore, clock: ManualClock) -> None:
        assert await store.now() == clock()
        clock.advance(3)
        assert await store.now() == clock()

    async def test_initialising_twice_changes_nothing(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first")
        other = msgspec.structs.replace(IDENTITY, repository_id="another")
        assert await store.initialize(other) == IDENTITY
        assert await store.identity() == IDENTITY
        assert await store.head("thread") is not None
