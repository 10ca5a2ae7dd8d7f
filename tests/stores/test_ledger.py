"""The SQL store keeps a ledger as every store does, in a file, in memory and on Postgres; and what only SQL has to show:
databases of an earlier schema, large ledgers, damage (case 38 is in test_ledger_processes.py)."""

import asyncio
import sqlite3
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, inspect

import snapcore
from snapcore.errors import Code, RepositoryError
from snapcore.ledger import EventKind, Output
from snapcore.model import ContentRef
from snapcore.protocols import Commit
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.stores.sql_dialects import open_database
from snapcore.stores.sql_migrate import upgrade
from snapcore.stores.sql_transactions import stored_revision
from snapcore.testing import LedgerTests
from snapcore.testing.entries import IDENTITY, acquire, append, checkpoint_for, digest, pack_of
from snapcore.testing.ledger_suite import claim_thread, new_event

from .sql_stores import OnSql, make_old_database


class TestLedger(OnSql, LedgerTests):
    """On each kind of database."""


# ---- databases of an earlier schema


OLD = checkpoint_for("thread", "old", created_at=7, label="kept")


@pytest.fixture
def old_url(url: str) -> str:
    """The address of a database of the first schema, with a thread in it."""
    make_old_database(url, "0001", OLD, lacks="events")
    return url


async def test_a_database_of_the_first_schema_is_upgraded_when_it_is_opened(old_url: str) -> None:
    store = SqlCheckpointStore(old_url)
    assert await store.identity() == IDENTITY
    assert await store.head("thread") == OLD
    claim = await claim_thread(store, "thread")
    assert claim.fence == 43, "numbers go on"
    assert (await store.append_event(claim, new_event())).sequence == 1
    assert await append(store, "thread", "new")
    await store.close()
    again = SqlCheckpointStore(old_url)
    assert [checkpoint.id for checkpoint in await again.checkpoints("thread")] == ["new", "old"]
    assert len(await again.events("thread")) == 1
    await again.close()


async def test_stores_that_open_an_old_database_at_once_upgrade_it_once(old_url: str) -> None:
    stores = [SqlCheckpointStore(old_url) for _ in range(5)]
    assert await asyncio.gather(*(store.head("thread") for store in stores)) == [OLD] * 5
    for number, store in enumerate(stores):
        claim = await claim_thread(store, "thread")
        assert (await store.append_event(claim, new_event())).sequence == number + 1
        await store.close()


async def test_an_upgrade_that_is_cut_short_leaves_the_database_as_it_was(old_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(connection: Connection) -> None:
        upgrade(connection)
        raise MemoryError

    monkeypatch.setattr("snapcore.stores.sql_migrate.upgrade", cut_short)
    store = SqlCheckpointStore(old_url)
    with pytest.raises(MemoryError):
        await store.head("thread")
    monkeypatch.undo()
    database = open_database(old_url)
    with database.connect(writes=False) as connection, connection.begin():
        assert stored_revision(connection) == "0001"
        assert not inspect(connection).has_table("events")
    database.dispose()
    assert await store.head("thread") == OLD
    await store.close()


async def test_a_repository_that_an_earlier_release_made_gets_a_ledger(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parents[1] / "formats" / "v1" / "repository.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    async with snapcore.open_repository(tmp_path, create=False) as repo:
        before = await repo.list("main")
        claim = await claim_thread(repo.checkpoints, "main")
        await repo.checkpoints.append_event(claim, new_event())
        assert await repo.list("main") == before
        assert len(await repo.checkpoints.events("main")) == 1
        assert (await repo.gc(grace=0)).packs
        assert (await repo.verify(read_data=True)).ok


# ---- large ledgers


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlCheckpointStore]:
    store = SqlCheckpointStore(f"sqlite:///{tmp_path}/snapcore.db")
    await store.initialize(IDENTITY)
    yield store
    await store.close()


def change(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as database:
        database.execute(statement)
    database.close()


async def with_output(store: SqlCheckpointStore) -> None:
    """An event of thread `thread` with a stored output."""
    claim = await claim_thread(store, "thread")
    lease, pack_id = await acquire(store, "outputs")
    stored = new_event(EventKind.EXEC_COMPLETED, stdout=Output(20, ref=ContentRef(20, chunks=digest("x"))))
    await store.append_event(claim, stored, lease=lease, commit=Commit(packs=(pack_of(pack_id, "x"),)))


async def test_pages_and_roots_are_found_by_their_indexes(store: SqlCheckpointStore, tmp_path: Path) -> None:
    """And not by reading a ledger from its beginning."""
    await with_output(store)
    plans: list[str] = []

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if "FROM events" in statement or "max(checkpoints" in statement:
            other = connection.connection.dbapi_connection.cursor()
            other.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans.append(" / ".join(row[3] for row in other.fetchall()))
            other.close()

    event.listen(Engine, "before_cursor_execute", explain)
    try:
        await store.events("thread", after=700, limit=10)
        await store.roots()
        await store.append_event(await claim_thread(store, "thread"), new_event())
    finally:
        event.remove(Engine, "before_cursor_execute", explain)
    page, roots, taken, same, last, captured = plans
    assert page == "SEARCH events USING INDEX sqlite_autoindex_events_1 (thread_id=? AND sequence>?)"
    assert roots == "SCAN events USING INDEX events_with_outputs"
    assert "SEARCH" in same
    assert "id=?" in same
    assert taken == last == "SEARCH events USING INDEX sqlite_autoindex_events_1 (thread_id=?)"
    assert captured == "SEARCH checkpoints USING COVERING INDEX checkpoints_in_order (thread_id=?)"


async def test_gc_decodes_no_event(store: SqlCheckpointStore, tmp_path: Path) -> None:
    await with_output(store)
    await store.append_event(await claim_thread(store, "thread"), new_event())
    change(tmp_path / "snapcore.db", "UPDATE events SET record = x'00'")
    assert (await store.roots()).chunks == {digest("x")}


@pytest.mark.parametrize("record", ["", "00", "c1", "80", "91"])
async def test_a_damaged_event_is_a_typed_error(store: SqlCheckpointStore, tmp_path: Path, record: str) -> None:
    await with_output(store)
    change(tmp_path / "snapcore.db", f"UPDATE events SET record = x'{record}'")
    with pytest.raises(RepositoryError) as caught:
        await store.events("thread")
    assert caught.value.code is Code.DAMAGED


@pytest.mark.parametrize("outputs", ["", "00", "c1", "91c400", "92c400a0"])
async def test_damaged_roots_of_an_event_stop_gc(store: SqlCheckpointStore, tmp_path: Path, outputs: str) -> None:
    await with_output(store)
    change(tmp_path / "snapcore.db", f"UPDATE events SET outputs = x'{outputs}'")
    with pytest.raises(RepositoryError) as caught:
        await store.roots()
    assert caught.value.code is Code.DAMAGED
