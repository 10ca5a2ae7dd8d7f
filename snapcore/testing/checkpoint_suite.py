"""Conformance of threads and checkpoints. Subclass `CheckpointStoreTests` and override the fixture `store`.

Leases and records have suites of their own: `WriterLeaseTests`, `RecordTests`.
"""

import asyncio
from typing import Any

import msgspec
import pytest

from snapcore.errors import CheckpointConflictError, CheckpointWriterLostError, Code, SnapcoreError, SnapshotError
from snapcore.model import Checkpoint, ContentRef, ThreadInfo
from snapcore.protocols import CheckpointStore, Commit

from .clock import ManualClock
from .entries import acquire, append, checkpoint_for, digest, pack_of, start, state_of

__all__ = ["CheckpointStoreTests"]

INVALID_IDS = ["", "\ud800", "a\udc80", "a/b", "a:b", "latest", "a\nb", "a\0", "x" * 513]

ROOT = checkpoint_for("thread", "x").roots[0]

INVALID_ENTRIES: list[dict[str, Any]] = [
    {"thread_id": "other"},
    {"record_id": b""},
    {"record_id": bytes(31)},
    {"content_id": b""},
    {"reason": "because"},
    {"created_at": -1},
    {"created_at": 2**63},
    {"step": -1},
    {"step": 2**63},
    {"step": True},
    {"label": ""},
    {"label": "a\udc80"},
    {"label": "a\nb"},
    {"label": "x" * 513},
    {"run_id": ""},
    {"idempotency_key": ""},
    {"idempotency_key": "\ud800"},
    {"roots": (msgspec.structs.replace(ROOT, manifest=bytes(31)),)},
    {"roots": (msgspec.structs.replace(ROOT, content_id=b""),)},
    {"roots": (msgspec.structs.replace(ROOT, name=""),)},
    {"roots": (ROOT, ROOT)},
    {"conversation": ContentRef(size=1, chunks=bytes(33))},
    {"conversation": ContentRef(size=1, chunk_list=bytes(31))},
    {"artifacts": {"": ContentRef()}},
]


class CheckpointStoreTests:
    """What every checkpoint store does with threads and checkpoints."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """The store's clock."""
        return ManualClock()

    @pytest.fixture
    def store(self, clock: ManualClock) -> CheckpointStore:
        """Override: a store initialised with `IDENTITY` of `snapcore.testing.entries`, on `clock`."""
        pytest.fail("The fixture `store` must be overridden.")

    # ---- append

    async def test_append_moves_the_head(self, store: CheckpointStore) -> None:
        first = await append(store, "thread", "first")
        assert await store.head("thread") == first
        second = await append(store, "thread", "second")
        assert second.parent_id == "first"
        assert await store.head("thread") == second
        assert await store.get("thread", "first") == first

    async def test_every_field_comes_back(self, store: CheckpointStore) -> None:
        reference = ContentRef(size=3, chunks=digest("chunk"))
        grant, checkpoint, commit = await start(
            store,
            "thread ☃",
            "größe",
            created_at=17,
            reason="named",
            label="état",
            run_id="run",
            step=0,
            conversation=reference,
            artifacts={"report": reference},
            warnings=("careful",),
            redaction=b"fingerprint",
            idempotency_key="key",
        )
        returned = await store.append(grant.lease, checkpoint, commit)
        assert returned == checkpoint
        assert await store.get("thread ☃", "größe") == checkpoint

    async def test_a_checkpoint_needs_no_root(self, store: CheckpointStore) -> None:
        lease, pack_id = await acquire(store, "thread")
        checkpoint = checkpoint_for("thread", "empty", roots=(), content_id=b"")
        await store.append(lease, checkpoint, Commit(packs=(pack_of(pack_id, "record-empty"),)))
        assert await store.head("thread") == checkpoint

    async def test_a_stale_head_is_refused(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first")
        await append(store, "thread", "second")
        for parent in ("first", None):
            await self.refused(store, {"parent_id": parent}, CheckpointConflictError, Code.STALE_HEAD)

    async def test_a_parent_of_another_thread_or_of_none_is_refused(self, store: CheckpointStore) -> None:
        await append(store, "other", "elsewhere")
        for parent in ("elsewhere", "unknown"):
            await self.refused(store, {"parent_id": parent}, CheckpointConflictError, Code.PARENT_MISMATCH)
        await append(store, "thread", "first")
        for parent in ("elsewhere", "unknown"):
            await self.refused(store, {"parent_id": parent}, CheckpointConflictError, Code.PARENT_MISMATCH)

    async def test_an_id_that_is_taken_is_refused(self, store: CheckpointStore) -> None:
        await append(store, "other", "taken")
        await append(store, "thread", "first")
        for taken in ("taken", "first"):
            await self.refused(store, {"id": taken, "parent_id": "first"}, CheckpointConflictError, Code.DUPLICATE_ID)

    @pytest.mark.parametrize("checkpoint_id", INVALID_IDS)
    async def test_an_invalid_id_is_refused(self, store: CheckpointStore, checkpoint_id: str) -> None:
        await self.refused(store, {"id": checkpoint_id}, SnapshotError, Code.INVALID_ID)

    @pytest.mark.parametrize("fields", INVALID_ENTRIES, ids=repr)
    async def test_an_invalid_entry_is_refused(self, store: CheckpointStore, fields: dict[str, Any]) -> None:
        await self.refused(store, fields, SnapshotError, Code.INVALID_ENTRY)

    async def refused(self, store: CheckpointStore, fields: dict[str, Any], error: type[SnapcoreError], code: Code) -> None:
        """An append with these fields raises, changes nothing, and the writer may go on."""
        grant, checkpoint, commit = await start(store, "thread", "next")
        before = await state_of(store)
        with pytest.raises(error) as caught:
            await store.append(grant.lease, msgspec.structs.replace(checkpoint, **fields), commit)
        assert caught.value.code is code
        assert await state_of(store) == before
        assert await store.known([digest("record-next")]) == frozenset()
        await store.release_writer(grant.lease)

    async def test_a_repeated_append_returns_the_same_though_the_lease_is_gone(self, store: CheckpointStore) -> None:
        grant, checkpoint, commit = await start(store, "thread", "first")
        first = await store.append(grant.lease, checkpoint, commit)
        before = await state_of(store)
        assert await store.append(grant.lease, checkpoint, commit) == first
        assert await state_of(store) == before
        await append(store, "thread", "second")
        assert await store.append(grant.lease, checkpoint, commit) == first
        head = await store.head("thread")
        assert head is not None
        assert head.id == "second"

    async def test_the_same_id_with_another_record_is_no_repetition(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first")
        lease, pack_id = await acquire(store, "thread")
        other = checkpoint_for("thread", "first", "first", record_id=digest("another"))
        with pytest.raises((CheckpointConflictError, SnapshotError)):
            await store.append(lease, other, Commit(packs=(pack_of(pack_id, "another"),)))

    async def test_an_idempotency_key_returns_what_was_appended_under_it(self, store: CheckpointStore) -> None:
        first = await append(store, "thread", "first", idempotency_key="key")
        grant, checkpoint, commit = await start(store, "thread", "second", idempotency_key="key")
        assert await store.append(grant.lease, checkpoint, commit) == first
        assert await store.checkpoints("thread") == [first]
        assert await store.by_idempotency_key("thread", "key") == first
        assert await store.acquire_writer("thread"), "the lease was released, as asked"

    async def test_an_idempotency_key_is_of_one_thread_and_freed_by_deletion(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first", idempotency_key="key")
        other = await append(store, "other", "second", idempotency_key="key")
        assert await store.by_idempotency_key("other", "key") == other
        lease, _ = await acquire(store, "thread")
        await store.delete(lease, ["first"])
        await store.release_writer(lease)
        assert await store.by_idempotency_key("thread", "key") is None
        assert (await append(store, "thread", "third", idempotency_key="key")).id == "third"

    async def test_a_source_must_exist(self, store: CheckpointStore) -> None:
        await append(store, "other", "there")
        grant, checkpoint, commit = await start(store, "thread", "first")
        before = await state_of(store)
        for source in (("other", "absent"), ("thread", "there")):
            with pytest.raises(SnapshotError) as caught:
                await store.append(grant.lease, checkpoint, commit, source=source)
            assert caught.value.code is Code.MISSING_CHECKPOINT
        assert await state_of(store) == before
        assert await store.append(grant.lease, checkpoint, commit, source=("other", "there"))

    async def test_one_of_many_writers_at_once_wins(self, store: CheckpointStore) -> None:
        async def attempt(number: int) -> Checkpoint:
            return await append(store, "thread", f"checkpoint-{number}")

        results = await asyncio.gather(*(attempt(n) for n in range(8)), return_exceptions=True)
        kept = [result for result in results if isinstance(result, Checkpoint)]
        assert kept
        assert {c.id for c in await store.checkpoints("thread")} == {c.id for c in kept}
        assert all(isinstance(result, (Checkpoint, SnapcoreError)) for result in results)

    async def test_threads_at_once_do_not_disturb_each_other(self, store: CheckpointStore) -> None:
        await asyncio.gather(*(append(store, f"thread-{n}", f"checkpoint-{n}") for n in range(16)))
        assert len(await store.threads()) == 16

    async def test_a_cancelled_append_has_happened_or_not(self, store: CheckpointStore) -> None:
        for number in range(10):
            grant, checkpoint, commit = await start(store, "thread", f"checkpoint-{number}")
            task = asyncio.create_task(store.append(grant.lease, checkpoint, commit))
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            head = await store.head("thread")
            if head == checkpoint:
                assert await store.known([checkpoint.record_id]) == {checkpoint.record_id}
            else:
                assert head == grant.head
                assert await store.append(grant.lease, checkpoint, commit) == checkpoint

    # ---- reading

    async def test_lists_are_in_order_of_time_then_id_as_utf8_bytes(self, store: CheckpointStore) -> None:
        order = [("z", 1), ("B", 2), ("a", 2), ("é", 2), ("\uffee", 2), ("😀", 2), ("A", 3)]
        for name, created_at in [order[i] for i in (4, 0, 6, 2, 5, 1, 3)]:
            await append(store, "thread", name, created_at=created_at)
        assert [c.id for c in await store.checkpoints("thread")] == [name for name, _ in order]

    async def test_threads_are_listed_by_id_as_utf8_bytes(self, store: CheckpointStore) -> None:
        names = ["B", "a", "a b", "é", "\uffee", "😀"]
        for number, name in enumerate(reversed(names)):
            await append(store, name, f"checkpoint-{number}", created_at=number)
        threads = await store.threads()
        assert [thread.thread_id for thread in threads] == names
        assert threads[0] == ThreadInfo(thread_id="B", head_id="checkpoint-5", checkpoints=1, updated_at=5)

    async def test_threads_are_isolated(self, store: CheckpointStore) -> None:
        first = await append(store, "thread", "first", label="label", idempotency_key="key")
        assert await store.checkpoints("other") == []
        assert await store.head("other") is None
        assert await store.get("other", "first") is None
        assert await store.by_label("other", "label") is None
        assert await store.by_idempotency_key("other", "key") is None
        assert await store.find("fi", "other") == []
        lease, _ = await acquire(store, "other")
        with pytest.raises(SnapshotError) as caught:
            await store.delete(lease, ["first"])
        assert caught.value.code is Code.MISSING_CHECKPOINT
        assert await store.get("thread", "first") == first

    async def test_what_is_returned_is_a_copy(self, store: CheckpointStore) -> None:
        artifacts = {"report": ContentRef(size=1, chunks=digest("chunk"))}
        grant, checkpoint, commit = await start(store, "thread", "first", artifacts=artifacts)
        returned = await store.append(grant.lease, checkpoint, commit)
        returned.artifacts.clear()
        assert list(checkpoint.artifacts) == ["report"]
        artifacts.clear()
        for found in [await store.get("thread", "first"), await store.head("thread"), *await store.checkpoints("thread")]:
            assert found is not None
            assert list(found.artifacts) == ["report"]
            found.artifacts.clear()

    async def test_a_label_finds_its_newest_checkpoint(self, store: CheckpointStore) -> None:
        for number, label in enumerate(["a", "b", "a", None, "b"]):
            await append(store, "thread", f"c{number}", created_at=number, label=label)
        found = await store.by_label("thread", "a")
        assert found is not None
        assert found.id == "c2"
        assert await store.by_label("thread", "c") is None

    async def test_find_takes_a_prefix_of_the_id(self, store: CheckpointStore) -> None:
        for number, name in enumerate(["ab", "abc", "aB", "a%", "a_", "b", "a\ud7ff", "a😀"]):
            await append(store, f"thread-{number % 2}", name, created_at=number)
        found = {prefix: [c.id for c in await store.find(prefix)] for prefix in ["ab", "a%", "a_", "a\ud7ff", "a😀", "x"]}
        assert found == {"ab": ["ab", "abc"], "a%": ["a%"], "a_": ["a_"], "a\ud7ff": ["a\ud7ff"], "a😀": ["a😀"], "x": []}
        assert [c.id for c in await store.find("ab", "thread-0")] == ["ab"]
        assert len(await store.find("")) == 8

    async def test_find_gives_at_most_20(self, store: CheckpointStore) -> None:
        for number in range(21):
            await append(store, "thread", f"a{number:02}", created_at=number)
        assert [c.id for c in await store.find("a")] == [f"a{number:02}" for number in range(20)]

    @pytest.mark.parametrize("checkpoint_id", INVALID_IDS)
    async def test_reads_refuse_invalid_ids(self, store: CheckpointStore, checkpoint_id: str) -> None:
        with pytest.raises(SnapshotError) as caught:
            await store.get("thread", checkpoint_id)
        assert caught.value.code is Code.INVALID_ID

    @pytest.mark.parametrize("thread_id", ["", "\ud800", "a\nb", "x" * 513])
    async def test_reads_refuse_invalid_thread_ids(self, store: CheckpointStore, thread_id: str) -> None:
        for call in (
            store.get(thread_id, "a"),
            store.head(thread_id),
            store.by_label(thread_id, "a"),
            store.by_idempotency_key(thread_id, "a"),
            store.checkpoints(thread_id),
            store.find("a", thread_id),
        ):
            with pytest.raises(SnapshotError) as caught:
                await call
            assert caught.value.code is Code.INVALID_ID

    # ---- labels and deletion

    async def test_a_label_is_set_and_taken_away(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first")
        lease, pack_id = await acquire(store, "thread")
        commit = Commit(packs=(pack_of(pack_id, "relabelled"),))
        named = await store.set_label(lease, "first", "label", digest("relabelled"), commit)
        assert (named.label, named.reason, named.record_id) == ("label", "named", digest("relabelled"))
        assert await store.by_label("thread", "label") == named == await store.get("thread", "first")
        bare = await store.set_label(lease, "first", None, digest("relabelled"), Commit())
        assert (bare.label, bare.reason) == (None, "automatic")
        assert await store.by_label("thread", "label") is None
        await store.release_writer(lease)

    @pytest.mark.parametrize("reason", ["fork-root", "rewind"])
    async def test_how_a_fork_or_a_rewind_came_about_stays_its_reason(self, store: CheckpointStore, reason: str) -> None:
        await append(store, "thread", "first", reason=reason)
        lease, _ = await acquire(store, "thread")
        for label in ("label", None):
            changed = await store.set_label(lease, "first", label, digest("record-first"), Commit())
            assert (changed.label, changed.reason) == (label, reason)

    async def test_a_label_needs_its_record_and_its_checkpoint(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first")
        lease, _ = await acquire(store, "thread")
        before = await state_of(store)
        with pytest.raises(SnapcoreError) as caught:
            await store.set_label(lease, "first", "label", digest("absent"), Commit())
        assert caught.value.code is Code.RECORDS_MISSING
        with pytest.raises(SnapcoreError) as caught:
            await store.set_label(lease, "absent", "label", digest("record-first"), Commit())
        assert caught.value.code is Code.MISSING_CHECKPOINT
        with pytest.raises(SnapcoreError) as caught:
            await store.set_label(lease, "first", "a\nb", digest("record-first"), Commit())
        assert caught.value.code is Code.INVALID_ENTRY
        assert await state_of(store) == before

    async def test_deleting_the_head_makes_the_newest_that_remains_the_head(self, store: CheckpointStore) -> None:
        for number in range(3):
            await append(store, "thread", f"c{number}", created_at=number)
        lease, _ = await acquire(store, "thread")
        assert [c.id for c in await store.delete(lease, ["c1"])] == ["c1"]
        assert [c.id for c in await store.checkpoints("thread")] == ["c0", "c2"]
        await store.delete(lease, ["c2"])
        head = await store.head("thread")
        assert head is not None
        assert head.id == "c0"
        await store.delete(lease, ["c0"])
        assert await store.head("thread") is None
        assert await store.threads() == []
        await store.release_writer(lease)
        assert (await append(store, "thread", "c3")).parent_id is None

    async def test_the_grant_names_what_was_deleted_until_a_checkpoint_notes_it(self, store: CheckpointStore) -> None:
        for number in range(3):
            await append(store, "thread", f"c{number}", created_at=number)
        lease, _ = await acquire(store, "thread")
        await store.delete(lease, ["c0"])
        await store.delete(lease, ["c2"])
        await store.release_writer(lease)
        grant, checkpoint, commit = await start(store, "thread", "c3", created_at=3)
        assert grant.deleted == ("c0", "c2")
        noting = msgspec.structs.replace(checkpoint, deleted=grant.deleted)
        assert await store.append(grant.lease, noting, commit) == noting
        assert (await store.acquire_writer("thread")).deleted == ()

    async def test_a_deleted_checkpoint_cannot_be_deleted_again(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first")
        lease, _ = await acquire(store, "thread")
        await store.delete(lease, ["first"])
        with pytest.raises(SnapshotError) as caught:
            await store.delete(lease, ["first"])
        assert caught.value.code is Code.MISSING_CHECKPOINT

    # ---- fork

    async def prepared_fork(self, store: CheckpointStore) -> tuple[Any, Checkpoint, Commit]:
        """A source `thread` with `first` and `second`, and a writer of the empty `copy` about to fork `first`."""
        await append(store, "thread", "first", created_at=1)
        await append(store, "thread", "second", created_at=2)
        lease, pack_id = await acquire(store, "copy")
        checkpoint = checkpoint_for(
            "copy",
            "fork",
            reason="fork-root",
            source_thread_id="thread",
            source_id="first",
            roots=checkpoint_for("thread", "first").roots,
        )
        return lease, checkpoint, Commit(packs=(pack_of(pack_id, "record-fork"),))

    async def test_a_fork_starts_a_thread_and_leaves_the_source_alone(self, store: CheckpointStore) -> None:
        lease, checkpoint, commit = await self.prepared_fork(store)
        source = await store.checkpoints("thread")
        forked = await store.fork(lease, checkpoint, commit)
        assert forked == checkpoint == await store.head("copy")
        assert await store.checkpoints("thread") == source
        assert (await append(store, "copy", "next")).parent_id == "fork"

    async def test_a_repeated_fork_returns_the_same(self, store: CheckpointStore) -> None:
        lease, checkpoint, commit = await self.prepared_fork(store)
        assert await store.fork(lease, checkpoint, commit) == await store.fork(lease, checkpoint, commit)

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({"source_id": "absent"}, Code.MISSING_CHECKPOINT),
            ({"source_thread_id": "absent"}, Code.MISSING_CHECKPOINT),
            ({"source_thread_id": "other"}, Code.MISSING_CHECKPOINT),
            ({"source_thread_id": "copy"}, Code.SAME_THREAD),
            ({"source_thread_id": None}, Code.INVALID_ENTRY),
            ({"source_id": None}, Code.INVALID_ENTRY),
            ({"parent_id": "first"}, Code.INVALID_ENTRY),
            ({"thread_id": "other"}, Code.INVALID_ENTRY),
            ({"source_id": "a/b"}, Code.INVALID_ID),
            ({"id": "first"}, Code.DUPLICATE_ID),
        ],
    )
    async def test_a_fork_that_cannot_be_changes_nothing(
        self, store: CheckpointStore, fields: dict[str, Any], code: Code
    ) -> None:
        await append(store, "other", "elsewhere")
        lease, checkpoint, commit = await self.prepared_fork(store)
        before = await state_of(store)
        with pytest.raises(SnapcoreError) as caught:
            await store.fork(lease, msgspec.structs.replace(checkpoint, **fields), commit)
        assert caught.value.code is code
        assert await state_of(store) == before
        assert await store.fork(lease, checkpoint, commit), "the writer may go on"

    async def test_a_fork_into_a_thread_with_checkpoints_changes_nothing(self, store: CheckpointStore) -> None:
        lease, checkpoint, commit = await self.prepared_fork(store)
        await store.release_writer(lease)
        await append(store, "copy", "present")
        lease, _ = await acquire(store, "copy")
        before = await state_of(store)
        with pytest.raises(CheckpointConflictError) as caught:
            await store.fork(lease, checkpoint, msgspec.structs.replace(commit, packs=()))
        assert caught.value.code is Code.DESTINATION_NOT_EMPTY
        assert await state_of(store) == before

    async def test_a_fork_with_another_threads_lease_changes_nothing(self, store: CheckpointStore) -> None:
        _, checkpoint, commit = await self.prepared_fork(store)
        foreign, _ = await acquire(store, "other")
        before = await state_of(store)
        with pytest.raises(CheckpointWriterLostError):
            await store.fork(msgspec.structs.replace(foreign, thread_id="copy"), checkpoint, commit)
        assert await state_of(store) == before
