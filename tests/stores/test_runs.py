"""The SQL store keeps runs of jobs as every store does, in a file, in memory and on Postgres; and what only SQL has to show:
databases of an earlier schema, users who may only read, several processes, damage."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, event, make_url

from snapcore.errors import Code, RepositoryError
from snapcore.runs import RUNS_KEPT, JobRun, Outcome
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import RunTests
from snapcore.testing.entries import IDENTITY, checkpoint_for
from snapcore.testing.run_suite import COMPLETE, new_run

from .postgres_helpers import Wire, raw
from .sql_stores import OnSql, make_old_database


class TestRuns(OnSql, RunTests):
    """On each kind of database."""


@pytest.fixture
async def store(url: str) -> AsyncIterator[SqlCheckpointStore]:
    store = SqlCheckpointStore(url)
    await store.initialize(IDENTITY)
    yield store
    await store.close()


# ---- databases of an earlier schema

OLD = checkpoint_for("thread", "old", created_at=7)


@pytest.fixture
def old_url(url: str) -> str:
    """The address of a database without a table of runs, with a thread in it."""
    make_old_database(url, "0002", OLD, lacks="job_runs")
    return url


async def test_a_database_without_runs_is_upgraded_when_it_is_opened(old_url: str) -> None:
    stores = [SqlCheckpointStore(old_url) for _ in range(4)]
    assert await asyncio.gather(*(store.runs() for store in stores)) == [[]] * 4
    await asyncio.gather(*(store.record_run(new_run(number)) for number, store in enumerate(stores)))
    for store in stores:
        assert [run.started_at for run in await store.runs()] == [3, 2, 1, 0]
        assert await store.head("thread") == OLD
        await store.close()


# ---- users who may only read


async def test_a_user_who_may_only_read_sees_the_runs(postgres_url: str) -> None:
    owner = SqlCheckpointStore(postgres_url)
    await owner.initialize(IDENTITY)
    await owner.record_run(COMPLETE)
    await owner.close()
    reader = SqlCheckpointStore(
        make_url(postgres_url)
        .update_query_dict({"options": "-cdefault_transaction_read_only=on"})
        .render_as_string(hide_password=False)
    )
    assert await reader.runs() == await reader.last_runs() == [COMPLETE]
    with pytest.raises(RepositoryError) as caught:
        await reader.record_run(new_run())
    assert caught.value.code is Code.READ_ONLY
    await reader.close()


async def test_rights_to_read_are_enough_to_see_the_runs(postgres_url: str) -> None:
    owner = SqlCheckpointStore(postgres_url)
    await owner.initialize(IDENTITY)
    await owner.record_run(COMPLETE)
    await owner.close()
    name = make_url(postgres_url).query["schema"]
    role = f"reader_{name}"
    with raw(postgres_url) as connection:
        connection.execute(
            f"CREATE ROLE {role} LOGIN PASSWORD 'no secret'; GRANT USAGE ON SCHEMA {name} TO {role};"
            f"GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO {role}".encode()
        )
    try:
        url = make_url(postgres_url).set(username=role, password="no secret")
        reader = SqlCheckpointStore(url.render_as_string(hide_password=False))
        assert await reader.runs() == [COMPLETE]
        with pytest.raises(RepositoryError) as caught:
            await reader.record_run(new_run())
        assert caught.value.code is Code.READ_ONLY
        await reader.close()
    finally:
        with raw(postgres_url) as connection:
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


# ---- several processes

WRITER = """
import asyncio, json, sys
import msgspec
from snapcore.runs import JobRun
from snapcore.stores.sql import SqlCheckpointStore

async def main():
    store = SqlCheckpointStore(sys.argv[1])
    await store.runs()
    print("ready", flush=True)
    for line in sys.stdin:
        await store.record_run(msgspec.json.decode(line, type=JobRun))
    await store.close()

asyncio.run(main())
"""


def launch(url: str) -> "subprocess.Popen[str]":
    """A process that records each run that it is told, one JSON object a line."""
    return subprocess.Popen([sys.executable, "-c", WRITER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_processes_that_record_at_once_lose_nothing(store: SqlCheckpointStore, url: str) -> None:
    each = 10
    processes = [launch(url) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    written: list[JobRun] = []
    for number, process in enumerate(processes):
        runs = [new_run(started, thread_id=thread, message=str(number)) for thread in ("thread", "u") for started in range(each)]
        assert process.stdin is not None
        process.stdin.write("".join(msgspec.json.encode(run).decode() + "\n" for run in runs))
        process.stdin.flush()
        written += runs
    for process in processes:
        _, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    expected = sorted(written, key=lambda run: (run.started_at, run.id), reverse=True)
    assert await store.runs(limit=1000) == expected


async def test_processes_that_record_at_once_keep_as_many_as_one_would(store: SqlCheckpointStore, url: str) -> None:
    stores = [SqlCheckpointStore(url) for _ in range(3)]
    runs = [new_run(started) for started in range(RUNS_KEPT + 5)]
    for other, some in zip(stores, (runs[0::3], runs[1::3], runs[2::3]), strict=True):
        await asyncio.gather(*(other.record_run(run) for run in some))
    assert await store.runs(limit=1000) == list(reversed(runs))[:RUNS_KEPT]
    for other in stores:
        await other.close()


@pytest.mark.parametrize("late", [False, True], ids=["the message is lost", "the answer is lost"])
async def test_a_run_whose_wire_is_cut_at_commit_is_there_once(wire: Wire, late: bool) -> None:
    store = SqlCheckpointStore(wire.url)
    await store.initialize(IDENTITY)
    assert await store.runs() == []
    wire.cut(1, late=late, commits=True)
    with pytest.raises(RepositoryError) as caught:
        await store.record_run(COMPLETE)
    assert caught.value.retryable
    assert len(await store.runs()) == late
    await store.record_run(COMPLETE)
    assert await store.runs() == [COMPLETE]
    await store.close()


# ---- what is kept where


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[SqlCheckpointStore]:
    store = SqlCheckpointStore(f"sqlite:///{tmp_path}/snapcore.db")
    await store.initialize(IDENTITY)
    yield store
    await store.close()


async def test_a_run_finds_its_place_by_an_index(file: SqlCheckpointStore) -> None:
    plans: list[str] = []

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if "FROM job_runs" in statement:
            other = connection.connection.dbapi_connection.cursor()
            other.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans.append(" / ".join(row[3] for row in other.fetchall()))
            other.close()

    for started in range(RUNS_KEPT):
        await file.record_run(new_run(started, outcome=Outcome.FAILED))
    event.listen(Engine, "before_cursor_execute", explain)
    try:
        await file.record_run(new_run(RUNS_KEPT))
        await file.runs(job="job", thread_id="thread", limit=5)
    finally:
        event.remove(Engine, "before_cursor_execute", explain)
    assert len(plans) == 5
    assert [plan for plan in plans if "SCAN" in plan or "TEMP B-TREE" in plan] == []


@pytest.mark.parametrize("stored", ["", "00", "c1", "80", "91"])
async def test_a_damaged_run_is_a_typed_error(file: SqlCheckpointStore, tmp_path: Path, stored: str) -> None:
    await file.record_run(COMPLETE)
    with sqlite3.connect(tmp_path / "snapcore.db") as database:
        database.execute(f"UPDATE job_runs SET record = x'{stored}'")
    database.close()
    for call in (file.runs(), file.last_runs(), file.record_run(COMPLETE)):
        with pytest.raises(RepositoryError) as caught:
            await call
        assert caught.value.code is Code.DAMAGED


async def test_a_run_that_a_later_release_says_more_about_is_read(file: SqlCheckpointStore, tmp_path: Path) -> None:
    await file.record_run(COMPLETE)
    later = msgspec.msgpack.encode(msgspec.to_builtins(COMPLETE) | {"colour": "green"})
    with sqlite3.connect(tmp_path / "snapcore.db") as database:
        database.execute("UPDATE job_runs SET record = ?", (later,))
    database.close()
    assert await file.runs() == [COMPLETE]
