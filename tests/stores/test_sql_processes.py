"""Several processes on one database, SQLite and Postgres: one writer a thread, leases that end with their process, fences in
the commit."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from snapcore.errors import CheckpointWriterConflictError, CheckpointWriterLostError, RepositoryError
from snapcore.hosts import current_holder
from snapcore.model import PackState
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import Faults, ManualClock, with_faults
from snapcore.testing.entries import IDENTITY, acquire, append, start

PREAMBLE = """
import asyncio, os, signal, sys
from snapcore.errors import *
from snapcore.hosts import current_holder
from snapcore.protocols import StoreIdentity
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing.entries import IDENTITY, acquire, append, start
store = SqlCheckpointStore(sys.argv[1])
"""


@pytest.fixture
async def store(url: str) -> AsyncIterator[SqlCheckpointStore]:
    store = SqlCheckpointStore(url)
    await store.initialize(IDENTITY)
    yield store
    await store.close()


def launch(url: str, body: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs the body of an async function on a store of its own."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    script = f"{PREAMBLE}\nasync def main():\n{lines}    await store.close()\n\nasyncio.run(main())\n"
    return subprocess.Popen(
        [sys.executable, "-c", script, url, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate("go\n")
    assert process.returncode == 0
    return output.strip()


def kill(process: subprocess.Popen[str], wait: bool) -> None:
    """Kill a process; without `wait` it stays a zombie."""
    os.kill(process.pid, signal.SIGKILL)
    if wait:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


HOLD = """
lease, _ = await acquire(store, "thread", holder=current_holder())
print("held", flush=True)
sys.stdin.readline()
await store.release_writer(lease)
"""


async def test_one_writer_a_thread_across_processes_and_others_free(store: SqlCheckpointStore, url: str) -> None:
    process = launch(url, HOLD)
    assert line_of(process) == "held"
    with pytest.raises(CheckpointWriterConflictError, match=f"process {process.pid} "):
        await store.acquire_writer("thread", holder=current_holder())
    assert await append(store, "other", "first")
    finish(process)
    assert await store.acquire_writer("thread", holder=current_holder())


@pytest.mark.parametrize("waited_for", [True, False], ids=["waited for", "still a zombie"])
async def test_the_lease_of_a_killed_process_is_free_at_once(store: SqlCheckpointStore, url: str, waited_for: bool) -> None:
    process = launch(url, HOLD)
    assert line_of(process) == "held"
    kill(process, waited_for)
    assert await store.acquire_writer("thread", holder=current_holder())
    process.communicate()


async def test_a_frozen_process_keeps_its_lease(store: SqlCheckpointStore, url: str) -> None:
    process = launch(url, HOLD)
    assert line_of(process) == "held"
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(CheckpointWriterConflictError):
        await store.acquire_writer("thread", holder=current_holder())
    os.kill(process.pid, signal.SIGCONT)
    finish(process)


async def test_a_process_killed_inside_a_transaction_leaves_none_of_it(store: SqlCheckpointStore, url: str) -> None:
    process = launch(
        url,
        """
grant, checkpoint, commit = await start(store, "thread", "first")
from snapcore.stores import sql_stats
sql_stats.save = lambda tx, updates: os.kill(os.getpid(), signal.SIGKILL)
await store.append(grant.lease, checkpoint, commit)
""",
    )
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert await store.head("thread") is None
    assert [pack.state for pack in await store.packs()] == [PackState.WRITING]


async def test_a_lease_that_runs_out_before_the_commit_of_another_process_is_lost(url: str) -> None:
    clock = ManualClock()
    late, quick = SqlCheckpointStore(url, clock=clock), SqlCheckpointStore(url, clock=clock)
    await late.initialize(IDENTITY)
    first = await append(late, "thread", "first")
    grant, checkpoint, commit = await start(late, "thread", "late")
    faults = Faults()

    async def take_over() -> None:
        clock.advance(121)
        await append(quick, "thread", "quick")

    faults.run("append", take_over)
    with pytest.raises(CheckpointWriterLostError):
        await with_faults(late, faults).append(grant.lease, checkpoint, commit)
    head = await quick.head("thread")
    assert head is not None
    assert (head.id, head.parent_id) == ("quick", first.id)
    await late.close()
    await quick.close()


async def test_the_database_decides_when_a_lease_ends_whatever_a_clients_clock_says(url: str) -> None:
    """The store's clock is set by hand, decades from this host's: nothing else is asked for the time."""
    for begin in (1_000_000, 4_000_000_000_000_000):
        clock = ManualClock(begin)
        store = SqlCheckpointStore(url, clock=clock)
        await store.initialize(IDENTITY)
        thread_id = f"thread-{begin}"
        lease, _ = await acquire(store, thread_id, ttl=60)
        clock.advance(59)
        with pytest.raises(CheckpointWriterConflictError):
            await store.acquire_writer(thread_id)
        assert await store.renew_writer(lease)
        clock.advance(60)
        assert await store.acquire_writer(thread_id)
        await store.close()


async def test_processes_that_write_at_once_lose_nothing(store: SqlCheckpointStore, url: str) -> None:
    body = """
for number in range(10):
    await append(store, f"thread-{sys.argv[2]}", f"c-{sys.argv[2]}-{number}", created_at=number)
won = 0
for number in range(10):
    try:
        await append(store, "shared", f"s-{sys.argv[2]}-{number}")
        won += 1
    except (CheckpointWriterConflictError, CheckpointConflictError):
        pass
print(won)
"""
    processes = [launch(url, body, str(number)) for number in range(3)]
    won = [int(finish(process)) for process in processes]
    for number in range(3):
        assert [c.id for c in await store.checkpoints(f"thread-{number}")] == [f"c-{number}-{n}" for n in range(10)]
    shared = await store.checkpoints("shared")
    assert len(shared) == sum(won) > 0
    parents = {checkpoint.parent_id for checkpoint in shared}
    assert len(parents) == len(shared), "one line, no branch"


async def test_processes_that_initialise_at_once_agree(url: str) -> None:
    body = """
print((await store.initialize(StoreIdentity(sys.argv[2], sys.argv[2]))).repository_id)
"""
    processes = [launch(url, body, str(number)) for number in range(4)]
    assert len({finish(process) for process in processes}) == 1


async def test_a_response_that_was_lost_is_found_by_repeating(store: SqlCheckpointStore) -> None:
    faults = Faults()
    faults.lose_response("append")
    unreliable = with_faults(store, faults)
    grant, checkpoint, commit = await start(unreliable, "thread", "first")
    with pytest.raises(RepositoryError, match="did not answer"):
        await unreliable.append(grant.lease, checkpoint, commit)
    assert await unreliable.append(grant.lease, checkpoint, commit) == checkpoint
    assert faults.calls == {"acquire_writer": 1, "append": 2}
