"""Conformance of the ledger. Subclass `LedgerTests` and override the fixture `store`."""

import secrets
from typing import Any

import msgspec
import pytest

from snapcore.errors import CheckpointConflictError, CheckpointWriterLostError, Code, RecordsMissingError, SnapshotError
from snapcore.ledger import MAX_INLINE_OUTPUT, Claim, Event, EventKind, Operation, Output, Point, SpecRecord
from snapcore.model import ContentRef, PackState, WriterLease
from snapcore.protocols import CheckpointStore, Commit
from snapcore.sandboxes import Binding

from .clock import ManualClock
from .entries import State, acquire, append, checkpoint_for, digest, pack_of, start, state_of

__all__ = ["LedgerTests", "claim_thread", "new_event"]

COMPLETE = Event(
    id="0" * 32,
    kind=EventKind.EXEC_COMPLETED,
    sandbox_id="sandbox",
    step=3,
    operation=Operation(
        kind="exec", command=("sh", "-c", "ls \x00 \n ü"), cwd="/w", user="me", environment=("A", "B"), input=b"i" * 32
    ),
    outside=True,
    at_most_once=True,
    started_id="1" * 32,
    reruns="2" * 32,
    exit_code=-9,
    stdout=Output(3, b"a\0b"),
    stderr=Output(MAX_INLINE_OUTPUT, b"x" * MAX_INLINE_OUTPUT),
    truncated=True,
    error="EXEC_TIMEOUT",
    checkpoint_id="checkpoint",
    continues=Point("other", 7),
    drops=Point("thread", 0),
    automatic=True,
    binding=Binding("docker", "sandbox", "/workspace", {"host": "h"}),
    spec=SpecRecord(image="debian", environment=("A",), cpus=1.5, labels={"a": "b"}, roots={"main": "/workspace"}),
    snapshot="snap",
    destroyed=True,
)


def new_event(kind: str = EventKind.EXEC_STARTED, **fields: Any) -> Event:
    """An event with an id of its own."""
    return Event(id=secrets.token_hex(16), kind=kind, **fields)


async def claim_thread(store: CheckpointStore, thread_id: str, token: str | None = None) -> Claim:
    """Claim a thread's ledger under a lease that is given up again."""
    lease = (await store.acquire_writer(thread_id)).lease
    claim = await store.claim_ledger(lease, token or secrets.token_hex(16))
    await store.release_writer(lease)
    return claim


async def everything(store: CheckpointStore) -> tuple[State, list[list[Event]]]:
    """All that a refused call must leave as it was."""
    return await state_of(store), [await store.events(thread_id) for thread_id in ("thread", "other")]


async def stored_output(store: CheckpointStore, *names: str, thread_id: str = "outputs") -> tuple[WriterLease, Commit, Event]:
    """An event that refers to records of those names, and the commit that enters them in a pack of its own."""
    lease, pack_id = await acquire(store, thread_id)
    ref = ContentRef(size=20 * len(names), chunks=b"".join(map(digest, names)))
    event = new_event(EventKind.EXEC_COMPLETED, stdout=Output(ref.size, ref=ref))
    return lease, Commit(packs=(pack_of(pack_id, *names),)), event


class LedgerTests:
    """What was done in the sandboxes of a thread, in order, by whoever holds the newest claim."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """The store's clock."""
        return ManualClock()

    @pytest.fixture
    def store(self, clock: ManualClock) -> CheckpointStore:
        """Override: a store initialised with `IDENTITY` of `snapcore.testing.entries`, on `clock`."""
        pytest.fail("The fixture `store` must be overridden.")

    # ---- events

    async def test_an_event_is_read_as_it_was_written(self, store: CheckpointStore, clock: ManualClock) -> None:
        claim = await claim_thread(store, "thread")
        stored = await store.append_event(claim, COMPLETE)
        expected = msgspec.structs.replace(COMPLETE, thread_id="thread", sequence=1, at=clock(), fence=claim.fence)
        assert stored == expected
        assert await store.events("thread") == [expected]

    async def test_what_the_store_sets_is_not_taken_from_the_caller(self, store: CheckpointStore, clock: ManualClock) -> None:
        claim = await claim_thread(store, "thread")
        stored = await store.append_event(claim, new_event(thread_id="other", sequence=70, at=5, fence=10**9))
        assert (stored.thread_id, stored.sequence, stored.at, stored.fence) == ("thread", 1, clock(), claim.fence)
        assert await store.events("other") == []

    async def test_events_are_numbered_from_1_without_a_gap_in_each_thread(self, store: CheckpointStore) -> None:
        claims = [await claim_thread(store, thread_id) for thread_id in ("thread", "other")]
        for _ in range(4):
            for claim in claims:
                await store.append_event(claim, new_event())
            with pytest.raises(SnapshotError):
                await store.append_event(claims[0], new_event("unheard of"))
        for thread_id in ("thread", "other"):
            assert [event.sequence for event in await store.events(thread_id)] == [1, 2, 3, 4]

    async def test_events_come_in_pages_by_their_numbers(self, store: CheckpointStore) -> None:
        claim = await claim_thread(store, "thread")
        written = [await store.append_event(claim, new_event()) for _ in range(7)]
        assert await store.events("thread", limit=3) == written[:3]
        assert await store.events("thread", after=3, limit=3) == written[3:6]
        assert await store.events("thread", after=6) == written[6:]
        assert await store.events("thread", after=7) == []
        assert await store.events("nothing here") == []

    async def test_times_do_not_go_back_within_a_thread(self, store: CheckpointStore, clock: ManualClock) -> None:
        claim = await claim_thread(store, "thread")
        times = []
        for seconds in (0, 5, -3600, 10, 3600):
            clock.advance(seconds)
            times.append((await store.append_event(claim, new_event())).at)
        assert times == sorted(times)
        assert times[-1] == clock()

    async def test_a_repeated_event_is_stored_once(self, store: CheckpointStore, clock: ManualClock) -> None:
        claim = await claim_thread(store, "thread")
        event = new_event(sandbox_id="sandbox")
        first = await store.append_event(claim, event)
        await store.append_event(claim, new_event())
        clock.advance(60)
        assert await store.append_event(claim, event) == first
        newer = await claim_thread(store, "thread")
        assert await store.append_event(newer, event) == first
        assert [stored.sequence for stored in await store.events("thread")] == [1, 2]

    @pytest.mark.parametrize("thread_id", ["thread", "other"])
    async def test_an_id_that_another_event_has_is_refused(self, store: CheckpointStore, thread_id: str) -> None:
        event = new_event()
        await store.append_event(await claim_thread(store, "thread"), event)
        claim = await claim_thread(store, thread_id)
        changed = event if thread_id == "other" else msgspec.structs.replace(event, exit_code=1)
        before = await everything(store)
        with pytest.raises(CheckpointConflictError) as caught:
            await store.append_event(claim, changed)
        assert caught.value.code is Code.DUPLICATE_ID
        assert await everything(store) == before

    @pytest.mark.parametrize(
        ("code", "fields"),
        [
            (Code.INVALID_ENTRY, {"id": ""}),
            (Code.INVALID_ENTRY, {"id": "G" * 32}),
            (Code.INVALID_ENTRY, {"kind": ""}),
            (Code.INVALID_ENTRY, {"kind": "sandbox.burnt"}),
            (Code.INVALID_ENTRY, {"sandbox_id": "a\0b"}),
            (Code.INVALID_ENTRY, {"sandbox_id": "x" * 513}),
            (Code.INVALID_ENTRY, {"started_id": "none"}),
            (Code.INVALID_ENTRY, {"reruns": ""}),
            (Code.INVALID_ENTRY, {"step": -1}),
            (Code.INVALID_ENTRY, {"exit_code": "0"}),
            (Code.INVALID_ENTRY, {"exit_code": 2**70}),
            (Code.INVALID_ENTRY, {"error": "\ud800"}),
            (Code.INVALID_ENTRY, {"operation": Operation(kind="exec", command=("\udc80",))}),
            (Code.INVALID_ENTRY, {"operation": Operation(kind="exec", command=["ls"])}),  # type: ignore[arg-type]
            (Code.INVALID_ENTRY, {"kind": EventKind.RESUMED, "checkpoint_id": "first"}),
            (Code.INVALID_ENTRY, {"drops": Point("thread", -1)}),
            (Code.INVALID_ID, {"continues": Point("", 1)}),
            (Code.INVALID_ENTRY, {"stdout": Output(-1)}),
            (Code.INVALID_ENTRY, {"stdout": Output(5000, b"x" * (MAX_INLINE_OUTPUT + 1))}),
            (Code.INVALID_ENTRY, {"stderr": Output(32, ref=ContentRef(32, chunks=digest("x")))}),
            (Code.INVALID_ID, {"checkpoint_id": "a/b"}),
        ],
    )
    async def test_what_is_not_well_formed_is_refused(self, store: CheckpointStore, code: Code, fields: dict[str, Any]) -> None:
        claim = await claim_thread(store, "thread")
        with pytest.raises(SnapshotError) as caught:
            await store.append_event(claim, msgspec.structs.replace(new_event(), **fields))
        assert caught.value.code is code
        assert await store.events("thread") == []

    async def test_requests_that_make_no_sense_are_refused(self, store: CheckpointStore) -> None:
        claim = await claim_thread(store, "thread")
        lease, _ = await acquire(store, "thread")
        inner = Commit(event=(claim, new_event()))
        for refused in (
            store.append_event(claim, new_event(), lease=lease),
            store.append_event(claim, new_event(), commit=Commit()),
            store.append_event(claim, new_event(), lease=lease, commit=inner),
            store.events("thread", limit=0),
            store.events("thread", after=-1),
            store.events(""),
            store.sandbox_thread(""),
            store.claim_ledger(lease, "short"),
        ):
            with pytest.raises(SnapshotError):
                await refused
        assert await store.events("thread") == []

    # ---- claims

    async def test_every_claim_has_a_larger_fence_and_keeps_the_lease(self, store: CheckpointStore) -> None:
        fences = []
        for thread_id in ("thread", "other", "thread"):
            lease, _ = await acquire(store, thread_id)
            fences.append((await store.claim_ledger(lease, secrets.token_hex(16))).fence)
            await store.release_writer(lease)
        assert fences == sorted(set(fences))

    async def test_a_claim_whose_answer_was_lost_is_found_by_repeating(self, store: CheckpointStore) -> None:
        lease, _ = await acquire(store, "thread")
        token = secrets.token_hex(16)
        claim = await store.claim_ledger(lease, token)
        assert await store.claim_ledger(lease, token) == claim
        assert claim == Claim("thread", token, claim.fence)
        await store.append_event(claim, new_event())

    async def test_a_claim_needs_a_lease_in_force(self, store: CheckpointStore, clock: ManualClock) -> None:
        first = await claim_thread(store, "thread")
        released, _ = await acquire(store, "thread")
        await store.release_writer(released)
        late, _ = await acquire(store, "thread", ttl=10)
        clock.advance(10)
        for lease in (released, late):
            with pytest.raises(CheckpointWriterLostError):
                await store.claim_ledger(lease, secrets.token_hex(16))
        assert (await store.append_event(first, new_event())).sequence == 1

    async def test_a_superseded_claim_can_do_nothing(self, store: CheckpointStore) -> None:
        old = await claim_thread(store, "thread")
        event = new_event()
        await store.append_event(old, event)
        newest = await claim_thread(store, "thread")
        lease, commit, with_output = await stored_output(store, "x")
        before = await everything(store)
        for refused in (
            store.append_event(old, new_event()),
            store.append_event(old, event),
            store.append_event(old, with_output, lease=lease, commit=commit),
        ):
            with pytest.raises(CheckpointWriterLostError):
                await refused
        assert await everything(store) == before
        assert await store.renew_writer(lease), "the lease is not given up either"
        assert (await store.append_event(newest, new_event())).sequence == 2

    async def test_what_only_looks_like_a_claim_is_none(self, store: CheckpointStore) -> None:
        claim = await claim_thread(store, "thread")
        for wrong in (
            Claim("other", claim.token, claim.fence),
            Claim("thread", "0" * 32, claim.fence),
            Claim("thread", claim.token, claim.fence + 1),
        ):
            with pytest.raises(CheckpointWriterLostError):
                await store.append_event(wrong, new_event())
        assert await store.events("thread") == await store.events("other") == []

    async def test_a_claim_outlives_the_lease_it_was_taken_under_and_other_writers(
        self, store: CheckpointStore, clock: ManualClock
    ) -> None:
        claim = await claim_thread(store, "thread")
        clock.advance(10**6)
        await append(store, "thread", "first")
        assert (await store.append_event(claim, new_event())).sequence == 1

    # ---- events of commits

    async def test_the_event_of_a_commit_is_there_when_the_checkpoint_is(self, store: CheckpointStore) -> None:
        claim = await claim_thread(store, "thread")
        grant, checkpoint, commit = await start(store, "thread", "first")
        event = new_event(EventKind.CHECKPOINT, checkpoint_id="first", sandbox_id="sandbox")
        with_event = msgspec.structs.replace(commit, event=(claim, event))
        assert await store.append(grant.lease, checkpoint, with_event) == checkpoint
        [stored] = await store.events("thread")
        assert stored == msgspec.structs.replace(event, thread_id="thread", sequence=1, at=stored.at, fence=claim.fence)
        assert await store.append(grant.lease, checkpoint, with_event) == checkpoint, "the answer was lost on the way"
        assert await store.events("thread") == [stored]

    async def test_a_commit_with_a_superseded_claim_changes_nothing(self, store: CheckpointStore) -> None:
        old = await claim_thread(store, "thread")
        await append(store, "thread", "first")
        await claim_thread(store, "thread")
        grant, checkpoint, commit = await start(store, "thread", "second")
        before = await everything(store)
        event = new_event(EventKind.CHECKPOINT, checkpoint_id="second")
        with pytest.raises(CheckpointWriterLostError):
            await store.append(grant.lease, checkpoint, msgspec.structs.replace(commit, event=(old, event)))
        label = msgspec.structs.replace(commit, event=(old, msgspec.structs.replace(event, checkpoint_id="first")))
        with pytest.raises(CheckpointWriterLostError):
            await store.set_label(grant.lease, "first", "label", digest("record-second"), label)
        assert await everything(store) == before
        assert await store.append(grant.lease, checkpoint, commit), "the lease is still in force"

    async def test_a_commit_that_is_refused_adds_no_event(self, store: CheckpointStore) -> None:
        claim = await claim_thread(store, "thread")
        grant, checkpoint, commit = await start(store, "thread", "first")
        event = new_event(EventKind.CHECKPOINT, checkpoint_id="first")
        missing = Commit(packs=commit.packs, refs=(digest("nowhere"),), event=(claim, event))
        with pytest.raises(RecordsMissingError):
            await store.append(grant.lease, checkpoint, missing)
        stale = msgspec.structs.replace(checkpoint, parent_id="unknown")
        with pytest.raises(CheckpointConflictError):
            await store.append(grant.lease, stale, msgspec.structs.replace(commit, event=(claim, event)))
        assert await store.events("thread") == []

    async def test_a_commit_whose_event_s_id_is_taken_is_refused(self, store: CheckpointStore) -> None:
        claim = await claim_thread(store, "thread")
        taken = await store.append_event(claim, new_event())
        grant, checkpoint, commit = await start(store, "thread", "first")
        event = Event(id=taken.id, kind=EventKind.CHECKPOINT, checkpoint_id="first")
        before = await everything(store)
        with pytest.raises(CheckpointConflictError) as caught:
            await store.append(grant.lease, checkpoint, msgspec.structs.replace(commit, event=(claim, event)))
        assert caught.value.code is Code.DUPLICATE_ID
        assert await everything(store) == before

    async def test_a_hit_of_an_idempotency_key_adds_no_event(self, store: CheckpointStore) -> None:
        first = await append(store, "thread", "first", idempotency_key="key")
        old = await claim_thread(store, "thread")
        claim = await claim_thread(store, "thread")
        grant, checkpoint, commit = await start(store, "thread", "second", idempotency_key="key")
        event = new_event(EventKind.CHECKPOINT, checkpoint_id="second")
        with pytest.raises(CheckpointWriterLostError):
            await store.append(grant.lease, checkpoint, msgspec.structs.replace(commit, event=(old, event)))
        assert await store.append(grant.lease, checkpoint, msgspec.structs.replace(commit, event=(claim, event))) == first
        assert await store.events("thread") == []

    @pytest.mark.parametrize(
        ("thread_id", "checkpoint_id", "fields"),
        [
            ("other", "first", {}),
            ("thread", "second", {}),
            ("thread", None, {}),
            ("thread", "first", {"stdout": Output(20, ref=ContentRef(20, chunks=digest("record-first")))}),
            ("thread", "first", {"kind": "unheard of"}),
        ],
    )
    async def test_the_event_of_a_commit_is_about_its_checkpoint(
        self, store: CheckpointStore, thread_id: str, checkpoint_id: str | None, fields: dict[str, Any]
    ) -> None:
        claim = await claim_thread(store, thread_id)
        grant, checkpoint, commit = await start(store, "thread", "first")
        event = msgspec.structs.replace(new_event(EventKind.CHECKPOINT, checkpoint_id=checkpoint_id), **fields)
        before = await everything(store)
        with pytest.raises(SnapshotError) as caught:
            await store.append(grant.lease, checkpoint, msgspec.structs.replace(commit, event=(claim, event)))
        assert caught.value.code is Code.INVALID_ENTRY
        assert await everything(store) == before

    async def test_a_fork_and_a_new_label_take_their_event_along(self, store: CheckpointStore) -> None:
        source = await append(store, "thread", "first")
        grant, _, commit = await start(store, "other", "forked")
        claim = await store.claim_ledger(grant.lease, secrets.token_hex(16))
        forked = checkpoint_for(
            "other", "forked", roots=source.roots, reason="fork-root", source_thread_id="thread", source_id="first"
        )
        with_event = msgspec.structs.replace(commit, event=(claim, new_event(EventKind.CHECKPOINT, checkpoint_id="forked")))
        await store.fork(grant.lease, forked, with_event)
        lease, pack_id = await acquire(store, "other")
        relabel = Commit(
            packs=(pack_of(pack_id, "record-again"),),
            event=(claim, new_event(EventKind.CHECKPOINT, checkpoint_id="forked", automatic=True)),
        )
        await store.set_label(lease, "forked", "label", digest("record-again"), relabel)
        assert [(event.sequence, event.automatic) for event in await store.events("other")] == [(1, False), (2, True)]

    # ---- stored outputs

    async def test_an_event_makes_the_records_of_its_outputs_live_and_releases_the_lease(self, store: CheckpointStore) -> None:
        claim = await claim_thread(store, "thread")
        lease, commit, event = await stored_output(store, "x", "y")
        stored = await store.append_event(claim, event, lease=lease, commit=commit)
        assert stored.stdout == event.stdout
        assert [(pack.pack_id, pack.state) for pack in await store.packs()] == [(commit.packs[0].pack_id, PackState.LIVE)]
        assert await store.known([digest("x"), digest("y")]) == {digest("x"), digest("y")}
        with pytest.raises(CheckpointWriterLostError):
            await store.renew_writer(lease)
        assert await store.threads() == []
        again, _ = await acquire(store, "outputs")
        await store.release_writer(again)
        assert await store.append_event(claim, event, lease=lease, commit=commit) == stored, "the answer was lost on the way"

    async def test_an_event_may_refer_to_records_that_are_there_already(self, store: CheckpointStore) -> None:
        claim = await claim_thread(store, "thread")
        lease, commit, event = await stored_output(store, "x", "y")
        await store.append_event(claim, event, lease=lease, commit=commit)
        [first] = await store.packs()
        lease, _, other = await stored_output(store, "y", "x")
        await store.append_event(claim, other, lease=lease, commit=Commit())
        [stamped] = [pack for pack in await store.packs() if pack.pack_id == first.pack_id]
        assert first.commit_seq is not None
        assert stamped.commit_seq is not None
        assert stamped.commit_seq > first.commit_seq, "gc must see that somebody relies on them anew"

    @pytest.mark.parametrize("as_list", [False, True], ids=["chunk", "chunk list"])
    async def test_an_output_whose_records_are_gone_is_refused(self, store: CheckpointStore, as_list: bool) -> None:
        claim = await claim_thread(store, "thread")
        lease, commit, event = await stored_output(store, "x")
        gone = ContentRef(20, chunk_list=digest("gone")) if as_list else ContentRef(20, chunks=digest("x") + digest("gone"))
        before = await everything(store)
        with pytest.raises(RecordsMissingError) as caught:
            await store.append_event(
                claim, msgspec.structs.replace(event, stderr=Output(20, ref=gone)), lease=lease, commit=commit
            )
        assert caught.value.ids == {digest("gone")}
        assert await everything(store) == before
        await store.append_event(claim, event, lease=lease, commit=commit)

    async def test_an_output_needs_a_lease_in_force(self, store: CheckpointStore, clock: ManualClock) -> None:
        claim = await claim_thread(store, "thread")
        lease, commit, event = await stored_output(store, "x")
        clock.advance(121)
        before = await everything(store)
        with pytest.raises(CheckpointWriterLostError):
            await store.append_event(claim, event, lease=lease, commit=commit)
        assert await everything(store) == before

    async def test_stored_outputs_are_roots(self, store: CheckpointStore) -> None:
        claim = await claim_thread(store, "thread")
        for name in ("a", "b"):
            lease, commit, event = await stored_output(store, name, f"{name}-list")
            refs = {
                "stdout": Output(20, ref=ContentRef(20, chunks=digest(name))),
                "stderr": Output(20, ref=ContentRef(20, chunk_list=digest(f"{name}-list"))),
            }
            await store.append_event(claim, msgspec.structs.replace(event, **refs), lease=lease, commit=commit)
            await store.append_event(claim, new_event(stdout=Output(1, b"x")))
        roots = await store.roots()
        assert roots.chunks == {digest("a"), digest("b")}
        assert roots.chunk_lists == {digest("a-list"), digest("b-list")}
        assert not roots.records | roots.manifests

    async def test_an_output_whose_list_was_lost_holds_nothing_any_more(self, store: CheckpointStore) -> None:
        """It cannot be read, and gc must be able to go on without it."""
        claim = await claim_thread(store, "thread")
        lease, commit, event = await stored_output(store, "kept", "lost")
        refs = {
            "stdout": Output(20, ref=ContentRef(20, chunk_list=digest("kept"))),
            "stderr": Output(20, ref=ContentRef(20, chunk_list=digest("lost"))),
        }
        await store.append_event(claim, msgspec.structs.replace(event, **refs), lease=lease, commit=commit)
        run = await store.start_maintenance()
        assert (await store.roots()).chunk_lists == {digest("kept"), digest("lost")}
        await store.drop_records(run, commit.packs[0].pack_id, [digest("lost")])
        assert (await store.roots()).chunk_lists == {digest("kept")}

    # ---- sandboxes

    async def test_a_sandbox_is_of_the_thread_that_last_opened_it(self, store: CheckpointStore) -> None:
        assert await store.sandbox_thread("sandbox") is None
        first = await claim_thread(store, "thread")
        for _ in range(3):
            await store.append_event(first, new_event(EventKind.EXEC_STARTED, sandbox_id="sandbox"))
        assert await store.sandbox_thread("sandbox") is None
        await store.append_event(first, new_event(EventKind.CREATED, sandbox_id="sandbox"))
        await store.append_event(first, new_event(EventKind.CREATED, sandbox_id="sandbox too"))
        assert await store.sandbox_thread("sandbox") == "thread"
        second = await claim_thread(store, "other")
        await store.append_event(second, new_event(EventKind.EXEC_STARTED, sandbox_id="sandbox"))
        assert await store.sandbox_thread("sandbox") == "thread"
        await store.append_event(second, new_event(EventKind.OPENED, sandbox_id="sandbox"))
        assert await store.sandbox_thread("sandbox") == "other"
        third = await claim_thread(store, "thread")
        await store.append_event(third, new_event(EventKind.RESUMED, sandbox_id="sandbox", continues=Point("thread", 0)))
        assert await store.sandbox_thread("sandbox") == "thread"
        assert await store.sandbox_thread("sandbox too") == "thread"
