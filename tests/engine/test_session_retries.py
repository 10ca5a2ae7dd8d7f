"""A program that asks once more for what raised an error, or was cancelled, after it was done."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import snapcore
from snapcore import Repository
from snapcore.errors import Code, ReplayDivergedError, SnapcoreError
from snapcore.ledger import Event
from snapcore.providers.local import LocalProvider
from snapcore.session import Session
from snapcore.testing import Faults, with_faults

from .session_helpers import Counter, local, whole_ledger

ATTEMPTS = 4  # of a session to write an event


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return local(tmp_path)


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(tmp_path / "runs")


def without_answers(repo: Repository, faults: Faults) -> Repository:
    return Repository(repo.blobs, with_faults(repo.checkpoints, faults), repo.config)


async def twice(work: Callable[[], Awaitable[object]]) -> None:
    """What a program does that tries once more."""
    try:
        await work()
    except SnapcoreError:
        await work()


@pytest.mark.parametrize("what", ["exec", "write"])
async def test_what_was_done_again_since_its_end_could_not_be_recorded_is_replayed_as_one(
    provider: LocalProvider, counter: Counter, what: str
) -> None:
    async def program(session: Session) -> None:
        if what == "exec":
            await twice(lambda: session.exec(counter("a")))
        else:
            await twice(lambda: session.write_file("a", "content"))
        await session.exec(counter("b"))

    faults = Faults()
    async with snapcore.open_repository("memory://") as repo:
        session = await without_answers(repo, faults).session(provider, thread_id="t")
        first = 3 if what == "exec" else 2
        for call in range(first, first + ATTEMPTS):
            faults.fail("append_event", call)
        await program(session)
        await session.checkpoint()
        await session.close()
        runs = counter.runs
        assert runs == (["a", "a", "b"] if what == "exec" else ["b"])
        async with await repo.resume("t", provider=provider) as session:
            await program(session)
            assert session.replaying == 1
        assert counter.runs == runs
        session._engine.workers.shutdown()


async def test_what_is_done_at_most_once_is_not_done_again_since_its_end_could_not_be_recorded(
    provider: LocalProvider, counter: Counter
) -> None:
    faults = Faults()
    async with snapcore.open_repository("memory://") as repo:
        session = await without_answers(repo, faults).session(provider, thread_id="t")
        for call in range(3, 3 + ATTEMPTS):
            faults.fail("append_event", call)
        with pytest.raises(ReplayDivergedError) as raised:
            await twice(lambda: session.exec(counter("pay"), at_most_once=True))
        assert raised.value.code == Code.OPERATION_UNCERTAIN
        assert counter.runs == ["pay"]
        await session.exec(counter("pay"), at_most_once=True, rerun=True)
        await session.exec(counter("pay"), at_most_once=True)  # another one: the program knows that the one before was made
        assert counter.runs == ["pay", "pay", "pay"]
        await session.close()
        session._engine.workers.shutdown()


async def test_what_was_cancelled_before_it_began_is_done_when_it_is_asked_for_again(
    provider: LocalProvider, counter: Counter
) -> None:
    faults = Faults()
    async with snapcore.open_repository("memory://") as repo:
        session = await without_answers(repo, faults).session(provider, thread_id="t")
        recorder = session._recorder
        append, entered, go = recorder._append, asyncio.Event(), asyncio.Event()

        async def held(event: Event) -> Event:
            entered.set()
            await go.wait()
            return await append(event)

        recorder._append = held  # type: ignore[method-assign]
        task = asyncio.create_task(session.exec(counter("pay"), at_most_once=True))
        await entered.wait()
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert counter.runs == []
        await session.exec(counter("pay"), at_most_once=True)
        assert counter.runs == ["pay"]
        await session.close()
        async with await repo.session(provider, thread_id="t", replay="strict") as session:
            assert session.uncertain == ()
            assert (await session.exec(counter("pay"), at_most_once=True)).replayed
        assert [event.kind for event in await whole_ledger(repo, "t")].count("exec.started") == 2
