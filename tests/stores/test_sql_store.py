"""What only the SQL store has to show: files, schemas, and what goes wrong with them."""

import asyncio
import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event

from snapcore.errors import Code, RepositoryError, SnapcoreError
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.stores.sql_dialects import open_database
from snapcore.stores.sql_migrate import upgrade
from snapcore.stores.sql_schema import HEAD_REVISION
from snapcore.testing.clock import ManualClock
from snapcore.testing.entries import IDENTITY, acquire, append, digest, pack_of, start


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "snapcore.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqlCheckpointStore]:
    store = SqlCheckpointStore(f"sqlite:///{path}", busy_timeout=0.2)
    await store.initialize(IDENTITY)
    yield store
    await store.close()


def code_of(error: pytest.ExceptionInfo[SnapcoreError]) -> Code:
    return error.value.code


# ---- what gc reads


async def test_a_pin_that_runs_out_while_the_checkpoints_are_read_is_a_root(path: Path) -> None:
    """It may have been renewed since the state that is read."""
    clock = ManualClock()
    store = SqlCheckpointStore(f"sqlite:///{path}", clock=clock)
    await store.initialize(IDENTITY)
    await append(store, "thread", "first")
    await store.pin([digest("pinned")], ("thread", "first"), ttl=60)

    def take_long(*arguments: object) -> None:
        if "FROM checkpoints" in str(arguments[2]):
            clock.advance(61)

    event.listen(Engine, "after_cursor_execute", take_long)
    try:
        roots = await store.roots()
    finally:
        event.remove(Engine, "after_cursor_execute", take_long)
    assert roots.manifests == {digest("pinned"), digest("manifest-first")}
    assert (await store.roots()).manifests == {digest("manifest-first")}
    await store.close()


async def test_a_checkpoint_whose_row_cannot_be_read_stops_gc_with_a_code(store: SqlCheckpointStore, path: Path) -> None:
    await append(store, "thread", "first")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE checkpoints SET record = x'00'")
    database.close()
    with pytest.raises(RepositoryError) as caught:
        await store.roots()
    assert code_of(caught) is Code.DAMAGED


# ---- files


async def test_the_database_is_for_its_owner_alone(store: SqlCheckpointStore, path: Path) -> None:
    await append(store, "thread", "first")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}


async def test_commits_are_durable_and_readers_do_not_wait(store: SqlCheckpointStore, path: Path) -> None:
    database = open_database(store.url)
    with database.connect(writes=False) as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    database.dispose()
    with sqlite3.connect(path, isolation_level=None) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert await store.head("thread") is None
        writer.execute("ROLLBACK")
    writer.close()


async def test_what_was_committed_is_there_after_reopening(store: SqlCheckpointStore) -> None:
    first = await append(store, "thread", "first")
    await store.close()
    again = SqlCheckpointStore(store.url)
    assert await again.identity() == IDENTITY
    assert await again.head("thread") == first
    await again.close()


async def test_a_database_that_is_not_there_is_no_repository_and_is_not_made(path: Path) -> None:
    store = SqlCheckpointStore(f"sqlite:///{path}")
    assert await store.identity() is None
    for call in (store.head("thread"), store.acquire_writer("thread")):
        with pytest.raises(RepositoryError) as caught:
            await call
        assert code_of(caught) is Code.NO_REPOSITORY
    await store.close()
    assert not path.parent.exists()


async def test_an_empty_file_is_no_repository_and_can_be_initialised(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    store = SqlCheckpointStore(f"sqlite:///{path}")
    assert await store.identity() is None
    with pytest.raises(RepositoryError) as caught:
        await store.head("thread")
    assert code_of(caught) is Code.NO_REPOSITORY
    assert await store.initialize(IDENTITY) == IDENTITY
    assert await store.head("thread") is None
    await store.close()


async def test_a_file_that_is_no_database_is_damaged_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"These are notes of mine, not a database. " * 100)
    before = path.read_bytes()
    store = SqlCheckpointStore(f"sqlite:///{path}")
    for call in (store.identity(), store.initialize(IDENTITY), store.head("thread")):
        with pytest.raises(RepositoryError) as caught:
            await call
        assert code_of(caught) is Code.DAMAGED
    await store.close()
    assert path.read_bytes() == before


async def test_damage_inside_the_file_is_told(store: SqlCheckpointStore, path: Path) -> None:
    await append(store, "thread", "first")
    await store.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    damaged = SqlCheckpointStore(store.url)
    with pytest.raises(RepositoryError) as caught:
        await damaged.head("thread")
    assert code_of(caught) is Code.DAMAGED
    await damaged.close()


async def test_a_table_that_is_gone_is_damage(store: SqlCheckpointStore, path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE checkpoints")
    with pytest.raises(RepositoryError) as caught:
        await store.head("thread")
    assert code_of(caught) is Code.DAMAGED


async def test_a_lock_that_is_held_too_long_is_told_and_worth_a_retry(store: SqlCheckpointStore, path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(RepositoryError) as caught:
        await store.acquire_writer("thread")
    assert code_of(caught) is Code.STORE_UNAVAILABLE
    assert caught.value.retryable
    other.execute("ROLLBACK")
    other.close()
    assert await store.acquire_writer("thread")


def remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


@pytest.fixture
def read_only_folder(path: Path) -> Iterator[Path]:
    """Makes the database's folder read-only when entered: by a mount for root, whom modes do not stop."""
    folder = path.parent
    copy = folder.with_name("read-only")
    copy.mkdir()
    if os.geteuid() == 0 and sys.platform == "linux":
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(copy)], check=True)
    yield copy
    if os.geteuid() == 0 and sys.platform == "linux":
        subprocess.run(["umount", str(copy)], check=True)
    else:
        copy.chmod(0o700)


async def test_a_read_only_database_can_be_read_and_not_written(
    store: SqlCheckpointStore, path: Path, read_only_folder: Path
) -> None:
    first = await append(store, "thread", "first")
    await store.close()
    shutil.copy(path, read_only_folder)
    if os.geteuid() == 0 and sys.platform == "linux":
        remount(read_only_folder, "ro")
    else:
        (read_only_folder / path.name).chmod(0o400)
        read_only_folder.chmod(0o500)
    reader = SqlCheckpointStore(f"sqlite:///{read_only_folder / path.name}")
    assert await reader.identity() == IDENTITY
    assert await reader.head("thread") == first
    assert len(await reader.locate([first.record_id])) == 1
    for call in (reader.acquire_writer("thread"), reader.pin([], ("thread", "first"))):
        with pytest.raises(RepositoryError) as caught:
            await call
        assert code_of(caught) is Code.READ_ONLY
    await reader.close()


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs a file system of its own")
async def test_a_full_disk_is_told_and_nothing_is_committed(path: Path, read_only_folder: Path) -> None:
    remount(read_only_folder, "size=1m")
    store = SqlCheckpointStore(f"sqlite:///{read_only_folder}/snapcore.db")
    await store.initialize(IDENTITY)
    first = await append(store, "thread", "first")
    lease, pack_id = await acquire(store, "thread")
    with pytest.raises(RepositoryError) as caught:
        await store.add_pack(lease, pack_of(pack_id, *range(20_000)))
    assert code_of(caught) is Code.STORE_FULL
    assert await store.head("thread") == first
    assert await store.locate([digest(0)]) == {}
    await store.close()


# ---- addresses


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://user:hidden@host/db", "oracle://user:hidden@host/db"])
def test_other_databases_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(RepositoryError) as caught:
        SqlCheckpointStore(url)
    assert code_of(caught) is Code.UNKNOWN_SCHEME
    assert "hidden" not in str(caught.value)


async def test_the_url_holds_no_options() -> None:
    store = SqlCheckpointStore("sqlite:////folder/a.db?password=hidden")
    assert store.url == "sqlite:////folder/a.db"
    await store.close()


async def test_a_closed_store_says_so(store: SqlCheckpointStore) -> None:
    await store.close()
    await store.close()
    with pytest.raises(RepositoryError, match="closed"):
        await store.head("thread")


# ---- schema


def schema_of(connection: Connection) -> list[tuple[str, str, str]]:
    rows = connection.exec_driver_sql("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type, name")
    return [(row[0], row[1], " ".join(row[2].split())) for row in rows]


def test_migrations_lead_to_the_same_schema_as_a_new_database(tmp_path: Path) -> None:
    async def create(url: str) -> None:
        store = SqlCheckpointStore(url)
        await store.initialize(IDENTITY)
        await store.close()

    new, migrated = open_database(f"sqlite:///{tmp_path}/new.db"), open_database(f"sqlite:///{tmp_path}/migrated.db")
    asyncio.run(create(new.url))
    migrated.create()
    with migrated.connect(writes=True) as connection, connection.begin():
        upgrade(connection)
        found = schema_of(connection)
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() == HEAD_REVISION
    with new.connect(writes=False) as connection, connection.begin():
        assert found == schema_of(connection)
    new.dispose()
    migrated.dispose()


async def test_a_database_of_a_newer_release_is_refused_and_left_alone(store: SqlCheckpointStore, path: Path) -> None:
    await append(store, "thread", "first")
    await store.close()
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("UPDATE alembic_version SET version_num = '9999'")
    newer = SqlCheckpointStore(store.url)
    for call in (newer.head("thread"), newer.acquire_writer("thread"), newer.identity()):
        with pytest.raises(RepositoryError) as caught:
            await call
        assert code_of(caught) is Code.UNSUPPORTED_FORMAT
    await newer.close()
    assert raw.execute("SELECT version_num FROM alembic_version").fetchone() == ("9999",)
    raw.close()


def test_alembic_is_not_imported_for_a_database_of_this_release(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from snapcore.protocols import StoreIdentity
from snapcore.stores.sql import SqlCheckpointStore
async def main():
    store = SqlCheckpointStore("sqlite:///{tmp_path}/a.db")
    await store.initialize(StoreIdentity("r", "d"))
    await store.acquire_writer("thread")
    await store.close()
asyncio.run(main())
print([name for name in ("alembic", "aiosqlite", "sqlalchemy.ext.asyncio", "sqlalchemy.orm") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == "[]"


# ---- cancellation


async def test_a_cancelled_caller_is_told_only_when_its_transaction_has_ended(store: SqlCheckpointStore, path: Path) -> None:
    grant, checkpoint, commit = await start(store, "thread", "first")
    blocker = sqlite3.connect(path, isolation_level=None)
    patient = SqlCheckpointStore(store.url)
    assert await patient.head("thread") is None
    blocker.execute("BEGIN IMMEDIATE")
    task = asyncio.create_task(patient.append(grant.lease, checkpoint, commit))
    running = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, running.set)
    await running.wait()
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()  # a second time, while it waits
    await asyncio.sleep(0)
    assert not task.done()
    blocker.execute("COMMIT")
    blocker.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store.head("thread") == checkpoint
    await patient.close()
