"""The traps of Postgres's locks and snapshots, each with a second connection that stands in the way at the right moment."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from sqlalchemy import make_url

from snapcore.errors import CheckpointWriterLostError, SnapcoreError
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.stores.sql_transactions import Transaction
from snapcore.testing.entries import IDENTITY, acquire, append, digest, new_pack_id, pack_of, start

from .postgres_helpers import named, raw, value, wait_for_lock, wait_until

LOCK = "BEGIN; UPDATE repository SET commit_seq = commit_seq + 1"


@pytest.fixture
def name() -> str:
    return f"snapcore-{secrets.token_hex(6)}"


@pytest.fixture
async def store(postgres_url: str, name: str) -> AsyncIterator[SqlCheckpointStore]:
    store = SqlCheckpointStore(named(postgres_url, name))
    await store.initialize(IDENTITY)
    yield store
    await store.close()


async def waits(other: Any, name: str) -> None:
    """Until the store waits for a lock that the other connection holds."""
    await asyncio.to_thread(wait_for_lock, other, name)


async def test_a_writer_waits_for_the_repositorys_lock_and_numbers_follow_its_order(
    store: SqlCheckpointStore, postgres_url: str, name: str
) -> None:
    """No SEQUENCE: a number is taken under the lock, so that whoever has a larger one commits later."""
    grant, checkpoint, commit = await start(store, "thread", "first")
    with raw(postgres_url) as other:
        other.execute(LOCK)
        held = value(other, "SELECT commit_seq FROM repository")
        task = asyncio.create_task(store.append(grant.lease, checkpoint, commit))
        await waits(other, name)
        assert await store.head("thread") is None, "readers wait for nobody"
        other.execute("COMMIT")
        await task
        assert value(other, "SELECT commit_seq FROM packs") == held + 1


async def test_no_state_is_seen_with_a_mark_that_a_later_commit_goes_below(store: SqlCheckpointStore, postgres_url: str) -> None:
    """gc's mark: every commit numbered up to the mark is seen by whoever reads the mark."""
    seen: list[tuple[int, frozenset[int]]] = []
    done = threading.Event()

    def look(tx: Transaction) -> tuple[int, frozenset[int]]:
        mark = tx.connection.exec_driver_sql("SELECT commit_seq FROM repository").scalar_one()
        return mark, frozenset(tx.connection.exec_driver_sql("SELECT commit_seq FROM packs WHERE commit_seq > 0").scalars())

    async def watch() -> None:
        while not done.is_set():
            seen.append(await store._transactions.read(look))

    async def write(writer: SqlCheckpointStore, number: int) -> None:
        for step in range(8):
            await append(writer, f"thread-{number}", f"c-{number}-{step}")
        await writer.close()

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(write(SqlCheckpointStore(postgres_url), number) for number in range(3)))
    done.set()
    await watching
    _, every = await store._transactions.read(look)
    assert len(every) == 24
    assert len({mark for mark, _ in seen}) > 3
    for mark, visible in seen:
        assert visible == {seq for seq in every if seq <= mark}


async def test_what_is_read_after_a_wait_for_the_lock_is_what_the_other_left(
    store: SqlCheckpointStore, postgres_url: str, name: str
) -> None:
    """Lock first, then look: a look in the same statement would see the state from before the wait."""
    grant, checkpoint, commit = await start(store, "thread", "first")
    with raw(postgres_url) as other:
        other.execute(LOCK)
        task = asyncio.create_task(store.append(grant.lease, checkpoint, commit))
        await waits(other, name)
        other.execute("DELETE FROM writer_leases")
        other.execute("COMMIT")
        with pytest.raises(CheckpointWriterLostError):
            await task
    assert await store.head("thread") is None


async def test_a_row_that_was_inserted_during_a_wait_is_read_back(
    store: SqlCheckpointStore, postgres_url: str, name: str
) -> None:
    """ON CONFLICT DO NOTHING says nothing about the row that is there: it is read in a statement of its own."""
    other_lease, theirs = await acquire(store, "other")
    lease, mine = await acquire(store, "thread")
    await store.add_pack(other_lease, pack_of(theirs, "theirs"))
    with raw(postgres_url) as other:
        other.execute(LOCK)
        task = asyncio.create_task(store.add_pack(lease, pack_of(mine, "shared", "own")))
        await waits(other, name)
        other.execute(
            'INSERT INTO chunks (id, pack_number, "offset", stored_size, raw_size, codec) '
            "SELECT %s, number, 0, 1, 1, 1 FROM packs WHERE pack_id = %s",
            [digest("shared"), theirs],
        )
        other.execute("UPDATE packs SET state = 'live' WHERE pack_id = %s", [theirs])
        other.execute("COMMIT")
        assert await task == {digest("shared")}
    assert (await store.locate([digest("shared")]))[digest("shared")].pack_id == theirs


async def test_a_lease_that_runs_out_while_its_writer_waits_for_the_lock_is_lost(
    store: SqlCheckpointStore, postgres_url: str, name: str
) -> None:
    """Case 38: now is the moment at which the lock was got, not that at which the transaction began."""
    lease, _ = await acquire(store, "thread", ttl=1.0)
    with raw(postgres_url) as other:
        other.execute(LOCK)
        task = asyncio.create_task(store.renew_writer(lease))
        await waits(other, name)
        clock = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
        await asyncio.to_thread(wait_until, lambda: value(other, clock) > lease.expires_at, "the lease to run out")
        other.execute("COMMIT")
        with pytest.raises(CheckpointWriterLostError, match="has run out"):
            await task


async def test_a_deadlock_with_a_stranger_is_survived(postgres_url: str, name: str) -> None:
    """Somebody locks rows in another order by hand: the server gives our transaction up, and it is run again."""
    patient = make_url(named(postgres_url, name)).update_query_dict({"options": "-cdeadlock_timeout=2s"})
    store = SqlCheckpointStore(patient.render_as_string(hide_password=False))
    await store.initialize(IDENTITY)
    await append(store, "thread", "first")
    grant, checkpoint, commit = await start(store, "thread", "second")
    with raw(postgres_url) as other:
        other.execute("SET deadlock_timeout = '1h'")
        other.execute("BEGIN; SELECT * FROM threads FOR UPDATE")
        task = asyncio.create_task(store.append(grant.lease, checkpoint, commit))
        await waits(other, name)
        await asyncio.to_thread(other.execute, "UPDATE repository SET commit_seq = commit_seq + 1")
        other.execute("COMMIT")
        assert await task == checkpoint
    assert [c.id for c in await store.checkpoints("thread")] == ["first", "second"]
    await store.close()


async def test_a_lock_that_is_held_too_long_is_told_and_worth_a_retry(postgres_url: str) -> None:
    store = SqlCheckpointStore(postgres_url, busy_timeout=0.3)
    await store.initialize(IDENTITY)
    with raw(postgres_url) as other:
        other.execute(LOCK)
        with pytest.raises(SnapcoreError, match="locked by another writer") as caught:
            await store.acquire_writer("thread")
        assert caught.value.retryable
        other.execute("ROLLBACK")
    assert await store.acquire_writer("thread")
    await store.close()


async def test_writers_of_all_kinds_at_once_never_meet_in_a_deadlock(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transaction that writes locks the repository's row first: nothing is ever run again."""
    stores = [SqlCheckpointStore(postgres_url) for _ in range(3)]
    await stores[0].initialize(IDENTITY)
    undone: list[object] = []

    def note(error: object, **_: object) -> bool:
        undone.append(error)
        return False

    for store in stores:
        monkeypatch.setattr(store._transactions._database, "undone", note)

    async def work(store: SqlCheckpointStore, number: int) -> None:
        thread = f"thread-{number}"
        for step in range(3):
            name = f"c-{number}-{step}"
            made = await append(store, thread, name)
            pin = await store.pin([made.roots[0].manifest], (thread, name))
            lease, pack_id = await acquire(store, thread)
            await store.add_pack(lease, pack_of(pack_id, *(f"shared-{n}" for n in range(200 * step))))
            await store.reserve_packs(lease, [new_pack_id(), new_pack_id()])
            await store.renew_writer(lease)
            await store.renew_pin(pin)
            await store.release_writer(lease)
            grant, copy, commit = await start(store, f"fork-{name}", f"f-{name}")
            copy = msgspec.structs.replace(copy, source_thread_id=thread, source_id=name)
            await store.fork(grant.lease, copy, commit)
            await store.unpin(pin)

    await asyncio.gather(*(work(store, number) for number, store in enumerate(stores)))
    assert undone == []
    assert len(await stores[0].threads()) == 12
    for store in stores:
        await store.close()
