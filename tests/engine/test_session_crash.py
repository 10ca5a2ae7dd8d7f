"""Sessions whose worker ends, whose store fails, or whose caller is cancelled, at any point."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import snapcore
import snapcore.stores.sql_leases
from snapcore import Repository
from snapcore.errors import Code, ProviderError, SnapcoreError
from snapcore.providers.local import LocalProvider
from snapcore.session import Session
from snapcore.testing import Crash, Faults, with_faults

from .crash_helpers import cancelled_at
from .session_helpers import Counter, contents, local, whole_ledger

MANY = 2000
NAMES = ["a", "large", "b"]


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return local(tmp_path)


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(tmp_path / "runs")


@pytest.fixture(autouse=True)
async def nothing_goes_on() -> AsyncIterator[None]:
    yield
    mine = asyncio.current_task()
    assert {task for task in asyncio.all_tasks() if task is not mine and "async_finalizer" not in repr(task)} == set()


async def opened(repo: Repository, provider: LocalProvider) -> Session:
    """The thread's session, wherever it stands: in its sandbox, or in a new one when that is gone."""
    try:
        return await repo.session(provider, thread_id="t", replay="strict", rerun_uncertain=True)
    except ProviderError as error:
        if error.code != Code.NO_SANDBOX:
            raise
        return await repo.resume("t", provider=provider, rerun_uncertain=True)


async def program(repo: Repository, provider: LocalProvider, counter: Counter) -> None:
    """What a worker does, and does again from its first line after it ended early."""
    async with await opened(repo, provider) as session:
        await session.exec(counter("a", "echo a > a"))
        await session.write_file("deep/file", "content")
        await session.exec(counter("large", "seq 20000"))
        await session.checkpoint("middle")
        await session.exec(counter("b", "echo b > b"))
        await session.checkpoint("end")


async def check(repo: Repository, provider: LocalProvider, counter: Counter, base: Path) -> None:
    """All is there, in order, and nothing of it was lost; nothing was done twice of which it was known that it was done."""
    async with await opened(repo, provider) as session:
        assert contents(session) == {"a": b"a\n", "b": b"b\n", "deep/file": b"content"}
        assert session.uncertain == ()
        assert session.step == 4
    async with await repo.resume("t", provider=provider) as session:
        assert (await session.exec(counter("a", "echo a > a"))).replayed
        await session.write_file("deep/file", "content")
        large = await session.exec(counter("large", "seq 20000"))
        assert (large.replayed, len(large.stdout)) == (True, 108894)
        await session.checkpoint("middle")
        assert (await session.exec(counter("b", "echo b > b"))).replayed
        assert session.replaying == 1
    assert (await repo.verify(read_data=True)).ok
    assert len(list((base / "sandboxes").iterdir())) == 2
    events = await whole_ledger(repo, "t")
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert sorted(set(counter.runs)) == sorted(NAMES)


async def store_calls(tmp_path: Path) -> int:
    """How many calls to the stores the program makes."""
    faults = Faults()
    async with snapcore.open_repository("memory://") as repo:
        await program(behind(repo, faults), local(tmp_path / "count"), Counter(tmp_path / "count runs"))
    return len(faults.log)


def behind(repo: Repository, faults: Faults) -> Repository:
    """The repository with both stores behind faults, which count their calls together."""
    return Repository(with_faults(repo.blobs, faults), with_faults(repo.checkpoints, faults), repo.config)


@pytest.mark.parametrize("fault", ["crash", "answer lost", "out of reach"])
async def test_after_a_fault_at_any_call_of_a_store_the_next_session_goes_on(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault.startswith("crash"):  # who holds a lease is a process that is gone
        monkeypatch.setattr(snapcore.stores.sql_leases, "is_gone", lambda holder: True)
    total = await store_calls(tmp_path)
    assert total > 30
    for at in range(1, total + 1):
        base = tmp_path / str(at)
        base.mkdir()
        provider, counter, faults = local(base), Counter(base / "runs"), Faults()
        if fault.startswith("crash"):
            faults.crash("*", at, work_done=True)
        elif fault == "answer lost":
            faults.lose_response("*", at)
        else:
            faults.fail("*", at)
        async with snapcore.open_repository("memory://") as repo:
            wrapped = behind(repo, faults)
            try:
                await program(wrapped, provider, counter)
            except Crash:
                assert fault.startswith("crash"), at
            except SnapcoreError as error:
                if fault.startswith("crash") or not error.retryable:
                    raise
            done = [event for event in await whole_ledger(repo, "t") if event.kind == "exec.completed"]
            before = list(counter.runs)
            faults.clear()
            await program(repo if fault.startswith("crash") else wrapped, provider, counter)
            wrapped._engine.workers.shutdown()
            # what is known to be done is not done again, and of the rest at most the one that was under way
            assert len(counter.runs) - len(before) <= len(NAMES) - len(done), at
            assert len(counter.runs) <= len(NAMES) + 1, at
            await check(repo, provider, counter, base)


async def test_a_completion_that_cannot_be_written_is_written_next(
    tmp_path: Path, provider: LocalProvider, counter: Counter
) -> None:
    faults = Faults()
    async with snapcore.open_repository("memory://") as repo:
        wrapped = behind(repo, faults)
        session = await wrapped.session(provider, thread_id="t")
        for call in range(3, 8):
            faults.fail("append_event", call)
        with pytest.raises(SnapcoreError):
            await session.exec(counter("a"))
        assert (await whole_ledger(repo, "t"))[-1].kind == "exec.started"
        await session.exec(counter("b"))
        assert [e.kind for e in await whole_ledger(repo, "t")][1:] == ["exec.started", "exec.completed"] * 2
        assert session.uncertain == ()
        await session.close()
        wrapped._engine.workers.shutdown()


# -------------------------------------------------------------------------------------------------------- cancellation


Job = Callable[[Session, Counter, int], Coroutine[Any, Any, object]]

JOBS: dict[str, Job] = {
    "exec": lambda session, counter, n: session.exec(counter("x", "echo x > x")),
    "a large output": lambda session, counter, n: session.exec("seq 20000"),
    "write_file": lambda session, counter, n: session.write_file(f"deep/{n}", str(n)),
    "checkpoint": lambda session, counter, n: session.checkpoint(f"c{n}"),
    "fork": lambda session, counter, n: session.fork(f"fork-{n}"),
}


@pytest.mark.parametrize("name", JOBS)
async def test_an_operation_cancelled_at_any_await_leaves_the_session_usable(
    repo: Repository, provider: LocalProvider, counter: Counter, tmp_path: Path, name: str
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        for at in range(1, MANY):
            result = await cancelled_at(JOBS[name](session, counter, at), at)
            async with asyncio.timeout(60):
                assert (await session.exec("echo on", affects=False)).stdout == b"on\n"
            if isinstance(result, Session):
                await result.close()
            if result is not None or (name == "write_file" and f"deep/{at}" in contents(session) and at > 40):
                break
        else:
            pytest.fail("it never came to its end")
    events = await whole_ledger(repo, "t")
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    # a sandbox for the thread, and one for each fork whose session was returned
    assert len(list((tmp_path / "sandboxes").iterdir())) == (2 if name == "fork" else 1)
    async with (
        await repo.resume("t", provider=provider, replay="off")
        if name in ("checkpoint", "fork")
        else await repo.session(provider, thread_id="t") as again
    ):
        await again.exec("true")


@pytest.mark.parametrize("how", ["session", "reopened", "resume"])
async def test_an_opening_cancelled_at_any_await_leaves_no_sandbox(
    repo: Repository, provider: LocalProvider, tmp_path: Path, how: str
) -> None:
    if how != "session":
        async with await repo.session(provider, thread_id="t") as session:
            await session.write_file("f", "x")
            await session.checkpoint()
    folder = tmp_path / "sandboxes"
    before = sorted(folder.iterdir()) if folder.exists() else []
    for at in range(1, MANY):
        opening = repo.resume("t", provider=provider) if how == "resume" else repo.session(provider, thread_id="t")
        result = await cancelled_at(opening, at)
        if result is not None:
            await result.close()
            break
        assert (sorted(folder.iterdir()) if folder.exists() else []) == before, at
    else:
        pytest.fail("it never came to its end")
    assert len(list(folder.iterdir())) == len(before) + (how != "reopened")


async def test_a_close_cancelled_at_any_await_has_let_go(repo: Repository, provider: LocalProvider) -> None:
    for at in range(1, MANY):
        session = await repo.session(provider, thread_id="t")
        handle = session.handle
        finished = await cancelled_at(returning(session.close()), at)
        async with asyncio.timeout(60):
            await session.close()
        with pytest.raises(ProviderError):
            await handle.exec("true")
        if finished:
            break
    else:
        pytest.fail("it never came to its end")


async def returning(work: Coroutine[Any, Any, object]) -> bool:
    await work
    return True
