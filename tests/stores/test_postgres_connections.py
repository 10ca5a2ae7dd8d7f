"""Connections that are lost at any moment: what was committed is there once, what was not is not there at all."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import psycopg
import pytest

import snapcore
from snapcore.errors import Code, RepositoryError
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing.entries import IDENTITY, append, start

from .postgres_helpers import Wire, on_statement, raw, value


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[SqlCheckpointStore]:
    store = SqlCheckpointStore(postgres_url)
    await store.initialize(IDENTITY)
    yield store
    await store.close()


@pytest.fixture
async def remote(wire: Wire) -> AsyncIterator[SqlCheckpointStore]:
    """A store at the other end of the wire."""
    remote = SqlCheckpointStore(wire.url)
    await remote.initialize(IDENTITY)
    yield remote
    await remote.close()


async def unanswered(work: Awaitable[object]) -> bool:
    """Whether a call ended with the error that says that nobody knows whether it was done."""
    try:
        await work
    except RepositoryError as error:
        return (error.code, error.retryable) == (Code.STORE_UNAVAILABLE, True) or pytest.fail(str(error))
    return False


class Killer:
    """Has the server end the store's session before a statement of the store's, by its number."""

    def __init__(self, store: SqlCheckpointStore, url: str) -> None:
        self._url = url
        self._at = 0
        self.seen: list[str] = []
        self.killed = ""
        on_statement(store, self._act)

    def arm(self, at: int) -> None:
        self._at, self.killed = at, ""
        self.seen.clear()

    def _act(self, connection: psycopg.Connection[Any], statement: str) -> None:
        self.seen.append(statement)
        if len(self.seen) == self._at:
            self.killed = statement
            with raw(self._url) as other:
                value(other, "SELECT pg_terminate_backend(%s, 60000)", connection.info.backend_pid)


async def test_a_session_that_is_ended_at_any_statement_of_a_write_costs_nothing(
    store: SqlCheckpointStore, postgres_url: str
) -> None:
    """Before COMMIT the transaction is run again. At COMMIT its fate is told to be unknown; a repetition finds out."""
    killer = Killer(store, postgres_url)
    parent = await append(store, "thread", "first")
    at_commit = 0
    for at in range(1, 100):
        grant, checkpoint, commit = await start(store, "thread", f"c-{at:03}")
        killer.arm(at)
        if await unanswered(store.append(grant.lease, checkpoint, commit)):
            assert killer.killed == "COMMIT"
            at_commit += 1
            assert await store.head("thread") == parent
            assert await store.append(grant.lease, checkpoint, commit) == checkpoint
        assert await store.head("thread") == checkpoint
        parent = checkpoint
        if not killer.killed:
            break
    assert at > 8, "each statement had its turn"
    assert at_commit == 1
    assert len(await store.checkpoints("thread")) == at + 1


async def test_a_session_that_is_ended_at_any_statement_of_a_read_is_not_noticed(
    store: SqlCheckpointStore, postgres_url: str
) -> None:
    first = await append(store, "thread", "first")
    killer = Killer(store, postgres_url)
    for at in range(1, 20):
        killer.arm(at)
        assert await store.head("thread") == first
        if not killer.killed:
            break
    assert at == 4, "BEGIN, the query, COMMIT"


@pytest.mark.parametrize("late", [False, True], ids=["the message is lost", "the answer is lost"])
async def test_an_append_whose_wire_is_cut_at_any_message_is_one_checkpoint(
    remote: SqlCheckpointStore, wire: Wire, late: bool
) -> None:
    unknown = 0
    for at in range(1, 100):
        grant, checkpoint, commit = await start(remote, "thread", f"c-{at:03}")
        cuts = wire.cuts
        wire.cut(at, late=late)
        unknown += await unanswered(remote.append(grant.lease, checkpoint, commit))
        wire.cut(0, late=False)
        assert await remote.append(grant.lease, checkpoint, commit) == checkpoint
        assert [c.id for c in await remote.checkpoints("thread")] == [f"c-{number:03}" for number in range(1, at + 1)]
        if wire.cuts == cuts:
            break
    assert at > 8
    assert unknown == 1, "only of COMMIT nobody knows"


async def test_a_commit_whose_answer_is_lost_was_done(remote: SqlCheckpointStore, wire: Wire, store: SqlCheckpointStore) -> None:
    grant, checkpoint, commit = await start(remote, "thread", "first")
    wire.cut(1, late=True, commits=True)
    with pytest.raises(RepositoryError) as caught:
        await remote.append(grant.lease, checkpoint, commit)
    assert caught.value.retryable
    assert await store.head("thread") == checkpoint, "done, though the client cannot know"
    assert await remote.append(grant.lease, checkpoint, commit) == checkpoint
    assert await store.checkpoints("thread") == [checkpoint]


@pytest.mark.parametrize("late", [False, True], ids=["the commit is lost", "its answer is lost"])
async def test_a_capture_survives_the_loss_of_any_of_its_commits(
    postgres_url: str, wire: Wire, tmp_path: Path, late: bool
) -> None:
    """The lease is asked for again by its token, the checkpoint by its id: one of each, and nobody has to wait."""
    (tmp_path / "file").write_bytes(b"content")
    blobs, remote = MemoryBlobStore(), SqlCheckpointStore(wire.url)
    made = [await snapcore.capture(handle=str(tmp_path), checkpoints=remote, blobs=blobs, thread_id="thread")]
    for at in range(1, 30):
        (tmp_path / "file").write_bytes(os.urandom(100))
        cuts = wire.cuts
        wire.cut(at, late=late, commits=True)
        made.append(await snapcore.capture(handle=str(tmp_path), checkpoints=remote, blobs=blobs, thread_id="thread"))
        assert [c.id for c in await remote.checkpoints("thread")] == [c.id for c in made]
        if wire.cuts == cuts:
            break
    assert at > 2, "the commits of the lease and of the checkpoint, at least"
    await remote.close()


async def test_an_initialisation_whose_answer_is_lost_is_repeated(wire: Wire) -> None:
    remote = SqlCheckpointStore(wire.url)
    wire.cut(1, late=True, commits=True)
    assert await remote.initialize(IDENTITY) == IDENTITY
    assert wire.cuts == 1
    assert await remote.identity() == IDENTITY
    await remote.close()


async def test_a_server_that_is_away_for_a_while_is_told_and_found_again(remote: SqlCheckpointStore, wire: Wire) -> None:
    first = await append(remote, "thread", "first")
    wire.down()
    for call in (remote.head("thread"), remote.acquire_writer("thread")):
        with pytest.raises(RepositoryError) as caught:
            await call
        assert (caught.value.code, caught.value.retryable) == (Code.STORE_UNAVAILABLE, True)
    wire.up()
    assert await remote.head("thread") == first
    assert await append(remote, "thread", "second")


async def test_a_server_that_was_restarted_between_calls_is_not_noticed(remote: SqlCheckpointStore, wire: Wire) -> None:
    first = await append(remote, "thread", "first")
    await asyncio.gather(*(remote.head("thread") for _ in range(6)))  # every connection is open
    for writes in (False, True):
        wire.down()
        wire.up()
        if writes:
            await append(remote, "thread", "second")
        else:
            assert await remote.head("thread") == first


FROZEN = """
import asyncio, signal, sys, threading
from snapcore.stores import sql_postgres, sql_stats
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing.entries import start

sql_postgres.IDLE_SECONDS = 1.0

async def main():
    store = SqlCheckpointStore(sys.argv[1])
    grant, checkpoint, commit = await start(store, "frozen", "late")
    save = sql_stats.save

    def freeze(tx, updates):
        sql_stats.save = save
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread first, and the process with it
        save(tx, updates)

    sql_stats.save = freeze
    print((await store.append(grant.lease, checkpoint, commit)).id)
    await store.close()

asyncio.run(main())
"""


def launch(script: str, url: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, url], stdout=subprocess.PIPE, text=True)


async def test_a_writer_that_freezes_inside_a_transaction_holds_up_nobody_for_long(
    store: SqlCheckpointStore, postgres_url: str
) -> None:
    """The server ends its session; thawed, it runs its transaction again, as its lease is still in force."""
    child = launch(FROZEN, postgres_url)
    _, status = await asyncio.to_thread(os.waitpid, child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert await append(store, "thread", "first")
    assert await store.head("frozen") is None
    os.kill(child.pid, signal.SIGCONT)
    output, _ = await asyncio.to_thread(child.communicate)
    assert output.strip() == "late"
    assert [c.id for c in await store.checkpoints("frozen")] == ["late"]
