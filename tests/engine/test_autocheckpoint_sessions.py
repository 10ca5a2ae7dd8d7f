"""A session that is captured by itself: after steps, by time, at its beginning and its end. Case 24's kind: what a capture meets
never reaches the step beside it."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.autocheckpoint import AutoCheckpoint
from snapcore.errors import CheckpointWriterLostError, Code, SnapcoreError, SnapshotError
from snapcore.ledger import EventKind
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository
from snapcore.sandboxes import Abilities, Binding, SandboxHandle
from snapcore.session import Session
from snapcore.testing import Faults, with_faults

from .crash_helpers import leaks_nothing
from .manual_sleep import PATIENCE, ManualSleep


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    with leaks_nothing():
        yield
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()


@pytest.fixture
def sleep() -> ManualSleep:
    return ManualSleep()


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return LocalProvider(tmp_path / "sandboxes")


@pytest.fixture
def begin(memory_repo: Repository, provider: LocalProvider) -> Callable[..., Any]:
    async def begin_session(auto: AutoCheckpoint, **options: Any) -> Session:
        return await memory_repo.session(options.pop("provider", provider), thread_id="t", auto=auto, **options)

    return begin_session


async def step(session: Session, text: str) -> None:
    assert (await session.exec(f"printf {text} > a")).exit_code == 0


async def contents(repo: Repository, thread: str = "t") -> list[str]:
    """What `a` holds in each checkpoint of the thread, nothing where it is not there."""
    out = []
    for checkpoint in await repo.list(thread):
        names = [entry.path async for entry in repo.ls(checkpoint)]
        out.append((await repo.read_file(checkpoint, b"a")).decode() if b"a" in names else "")
    return out


async def places(repo: Repository) -> list[tuple[str | None, int | None]]:
    """The id and the step of each checkpoint event."""
    events = await repo.events("t")
    return [(event.checkpoint_id, event.step) for event in events if event.kind == EventKind.CHECKPOINT]


async def the_thread_is_free(repo: Repository) -> None:
    await repo.checkpoints.release_writer((await repo.checkpoints.acquire_writer("t")).lease)


# ---- when it captures


async def test_at_the_beginning_after_steps_and_at_the_end(memory_repo: Repository, begin: Callable[..., Any]) -> None:
    async with await begin(AutoCheckpoint(every_steps=2)) as session:
        assert await contents(memory_repo) == [""]
        for number in range(1, 6):
            await step(session, f"{number}")
        assert await contents(memory_repo) == ["", "2", "4"]
        assert session.failures == []
    assert await contents(memory_repo) == ["", "2", "4", "5"]
    checkpoints = await memory_repo.list("t")
    assert [(c.reason, c.label, c.step) for c in checkpoints] == [("automatic", None, n) for n in (0, 2, 4, 5)]
    assert await places(memory_repo) == [(c.id, c.step) for c in checkpoints]
    assert all(event.automatic for event in await memory_repo.events("t") if event.kind == EventKind.CHECKPOINT)
    await the_thread_is_free(memory_repo)


async def test_only_what_affects_the_files_counts(memory_repo: Repository, begin: Callable[..., Any]) -> None:
    async with await begin(AutoCheckpoint(every_steps=2, baseline=False, on_completion=False)) as session:
        await session.write_file("a", "1")
        for _ in range(3):
            await session.exec("cat a", affects=False)
        assert await contents(memory_repo) == []
        await session.write_file("a", "2")
        assert await contents(memory_repo) == ["2"]


async def test_a_checkpoint_by_hand_starts_the_count_anew(memory_repo: Repository, begin: Callable[..., Any]) -> None:
    async with await begin(AutoCheckpoint(every_steps=2, baseline=False, on_completion=False)) as session:
        await step(session, "1")
        await session.checkpoint("mine")
        await step(session, "2")
        assert await contents(memory_repo) == ["1"]
        await step(session, "3")
        assert await contents(memory_repo) == ["1", "3"]


async def test_by_time(memory_repo: Repository, begin: Callable[..., Any], sleep: ManualSleep) -> None:
    auto = AutoCheckpoint(every_steps=None, every_seconds=60, sleep=sleep)
    async with await begin(auto) as session:
        for number in range(1, 4):
            await step(session, f"{number}")
            assert await sleep.turn() == 60
        assert await contents(memory_repo) == ["", "1", "2", "3"]
        # what nobody did by the session is captured too
        await session.handle.upload(f"{session.handle.workspace_root}/a", b"aside")
        await sleep.turn()
    assert await contents(memory_repo) == ["", "1", "2", "3", "aside"]


async def test_by_time_nothing_is_captured_while_a_command_runs(
    memory_repo: Repository, begin: Callable[..., Any], sleep: ManualSleep, tmp_path: Path
) -> None:
    """A checkpoint is at a place between operations."""
    seen = asyncio.Event()
    async with await begin(AutoCheckpoint(every_steps=None, every_seconds=60, on_completion=False, sleep=sleep)) as session:
        gate = tmp_path / "gate"
        command = f"printf half > a; echo begun; until [ -e {gate} ]; do sleep 0.01; done; printf whole > a"
        running = asyncio.create_task(session.exec(command, on_output=lambda stream, piece: seen.set()))
        try:
            await asyncio.wait_for(seen.wait(), PATIENCE)
            await sleep.last()
            for _ in range(5):  # time enough for a capture that does not wait
                await memory_repo.capture(session.handle, thread_id="u")
            assert await contents(memory_repo) == [""]
        finally:
            gate.touch()
        await running
        await sleep.asleep()
        assert await contents(memory_repo) == ["", "whole"]


async def test_unchanged_content_makes_no_checkpoint_and_is_noted_in_the_ledger(
    memory_repo: Repository, begin: Callable[..., Any], provider: LocalProvider
) -> None:
    """So a resume of that checkpoint replays what changed nothing, too."""
    async with await begin(AutoCheckpoint(every_steps=2)) as session:
        for number in range(4):
            await session.exec(f"true {number}")
    (only,) = await memory_repo.list("t")
    assert await places(memory_repo) == [(only.id, 0), (only.id, 2), (only.id, 4)]
    async with await memory_repo.resume("t", provider=provider) as again:
        assert again.replaying == 4
        for number in range(4):
            assert (await again.exec(f"true {number}")).replayed
        assert again.replaying == 0


async def test_an_idle_session_lets_no_ledger_grow(
    memory_repo: Repository, begin: Callable[..., Any], sleep: ManualSleep
) -> None:
    async with await begin(AutoCheckpoint(every_seconds=1, sleep=sleep)) as session:
        await step(session, "1")
        await sleep.turn()
        before = await memory_repo.events("t")
        for _ in range(5):
            await sleep.turn()
        assert await memory_repo.events("t") == before


async def test_a_resumed_session_goes_on_counting(
    memory_repo: Repository, begin: Callable[..., Any], provider: LocalProvider
) -> None:
    """Its baseline is the checkpoint that it began with; what it replays is no step."""
    async with await begin(AutoCheckpoint(every_steps=2)) as session:
        for text in ("1", "2"):
            await step(session, text)
    before = await memory_repo.list("t")
    async with await memory_repo.resume("t", provider=provider, auto=AutoCheckpoint(every_steps=2)) as again:
        for text in ("1", "2", "3"):
            await step(again, text)
        assert await memory_repo.list("t") == before
        await step(again, "4")
    assert await contents(memory_repo) == ["", "2", "4"]
    async with await memory_repo.resume("t", provider=provider) as third:
        assert third.replaying == 4


async def test_one_for_many_sessions(memory_repo: Repository, provider: LocalProvider) -> None:
    auto = AutoCheckpoint(every_steps=2, baseline=False, on_completion=False)
    async with (
        await memory_repo.session(provider, thread_id="t", auto=auto) as one,
        await memory_repo.session(provider, thread_id="u", auto=auto) as two,
    ):
        await step(one, "1")
        await step(two, "1")
        assert (await contents(memory_repo), await contents(memory_repo, "u")) == ([], [])
        await step(one, "2")
        assert (await contents(memory_repo), await contents(memory_repo, "u")) == (["2"], [])
    assert len(auto._watched) == 0


@pytest.mark.parametrize(
    "wrong", [{"every_steps": 0}, {"every_steps": 1.5}, {"every_steps": True}, {"every_seconds": 0}, {"every_seconds": math.nan}]
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError) as caught:
        AutoCheckpoint(**wrong)
    assert caught.value.code == Code.INVALID_REQUEST


# ---- what fails


async def test_a_failed_capture_fails_no_step_and_is_reported(
    memory_repo: Repository, begin: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """In the session, to the callback, and in the log. It is tried again after the next step."""
    told: list[SnapcoreError] = []
    async with await begin(AutoCheckpoint(every_steps=2, on_failure=told.append)) as session:
        await step(session, "1")
        assert (await session.exec("mkfifo fifo")).exit_code == 0
        assert [error.code for error in session.failures] == [Code.UNSUPPORTED_ENTRY]
        assert told == session.failures
        await session.exec("rm fifo")
        assert await contents(memory_repo) == ["", "1"]
    (record,) = [record for record in caplog.records if record.name == "snapcore"]
    assert record.levelno == logging.WARNING
    assert "UNSUPPORTED_ENTRY" in record.getMessage()
    assert len(told) == 1


async def test_failures_at_the_beginning_and_the_end_are_reported_too(
    memory_repo: Repository, begin: Callable[..., Any], provider: LocalProvider
) -> None:
    def refuse(path: str, kind: str) -> bool:
        raise KeyError("hunter-22")

    async def fill(handle: SandboxHandle) -> None:
        await handle.upload(f"{handle.workspace_root}/a", b"0")

    session = await begin(AutoCheckpoint(), policy=snapcore.FilePolicy(exclude=refuse), on_create=[fill])
    await step(session, "1")
    await session.close()
    assert [str(error) for error in session.failures] == ["The capture ended with KeyError."] * 2
    assert await memory_repo.list("t") == []


async def test_while_another_holds_the_thread_captures_are_left_out(
    memory_repo: Repository, begin: Callable[..., Any], sleep: ManualSleep
) -> None:
    async with await begin(AutoCheckpoint(every_steps=1, every_seconds=60, sleep=sleep), wait=3600) as session:
        other = (await memory_repo.checkpoints.acquire_writer("t")).lease
        async with asyncio.timeout(PATIENCE):  # what the session's own captures would wait is not waited
            await step(session, "1")
            await sleep.turn()
        assert [error.code for error in session.failures] == [Code.WRITER_HELD] * 2
        await memory_repo.checkpoints.release_writer(other)
        await step(session, "2")
        assert await contents(memory_repo) == ["", "2"]
    assert len(session.failures) == 2


async def test_a_session_that_was_superseded_reports_and_captures_nothing(
    memory_repo: Repository, begin: Callable[..., Any], sleep: ManualSleep
) -> None:
    first = await begin(AutoCheckpoint(every_seconds=60, sleep=sleep))
    await step(first, "1")
    await sleep.turn()
    async with await begin(AutoCheckpoint(baseline=False, on_completion=False)) as second:
        await step(second, "2")
        before = await memory_repo.list("t")
        await sleep.turn()
        await first.close()
        assert {type(error) for error in first.failures} == {CheckpointWriterLostError}
        assert await memory_repo.list("t") == before


async def test_no_secret_is_in_what_is_reported(
    memory_repo: Repository, begin: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with await begin(AutoCheckpoint(every_steps=1), secrets={"TOKEN": "hunter-22"}) as session:
        await session.exec("touch hunter-22; mkfifo of-hunter-22")
    assert session.failures
    assert not any("hunter" in f"{error} {error.__cause__} {error.__context__}" for error in session.failures)
    assert "hunter" not in caplog.text


# ---- paused sandboxes


class Pausing(LocalProvider):
    """Folders that can be paused: a paused one has no open handle."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.opened = 0

    @property
    def abilities(self) -> Abilities:
        import msgspec

        return msgspec.structs.replace(super().abilities, pause=True)

    async def open(self, binding: Binding) -> SandboxHandle:
        self.opened += 1
        return await super().open(binding)

    async def pause(self, handle: SandboxHandle) -> None:
        await handle.close()


async def test_a_paused_sandbox_is_not_woken_by_time(
    memory_repo: Repository, begin: Callable[..., Any], sleep: ManualSleep, tmp_path: Path
) -> None:
    """And at the end only when something is left to be captured."""
    pausing = Pausing(tmp_path / "pausing")
    session = await begin(AutoCheckpoint(every_steps=None, every_seconds=60, sleep=sleep), provider=pausing)
    await step(session, "1")
    await sleep.turn()
    await session.pause()
    await sleep.turn()
    await sleep.turn()
    await session.close()
    assert pausing.opened == 0
    again = await begin(AutoCheckpoint(every_steps=None), provider=pausing)
    await step(again, "2")
    await again.pause()
    await again.close()
    assert await contents(memory_repo) == ["", "1", "2"]
    assert again.failures == []
    assert [event.kind for event in (await memory_repo.events("t"))[-4:]] == [
        EventKind.OPENED,
        EventKind.CHECKPOINT,
        EventKind.PAUSED,
        EventKind.CLOSED,
    ]


# ---- how it ends


@pytest.mark.parametrize("how", ["close", "destroy"])
async def test_a_session_that_ends_takes_its_timer_along(
    memory_repo: Repository, begin: Callable[..., Any], sleep: ManualSleep, how: str
) -> None:
    session = await begin(AutoCheckpoint(every_seconds=60, sleep=sleep))
    await sleep.asleep()
    await step(session, "1")
    await getattr(session, how)()
    await getattr(session, how)()
    assert sleep.idle
    assert await contents(memory_repo) == ["", "1"]
    await the_thread_is_free(memory_repo)


async def test_a_session_whose_owner_is_cancelled_captures_nothing_more(
    memory_repo: Repository, begin: Callable[..., Any], sleep: ManualSleep
) -> None:
    at_work = asyncio.Event()

    async def work() -> None:
        async with await begin(AutoCheckpoint(every_seconds=60, sleep=sleep)) as session:
            await step(session, "1")
            at_work.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.wait_for(at_work.wait(), PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await contents(memory_repo) == [""]
    await the_thread_is_free(memory_repo)


@pytest.mark.parametrize("where", ["baseline", "after a step", "by time"])
async def test_cancelled_in_the_middle_of_a_capture_it_leaves_no_lease(
    memory_repo: Repository, provider: LocalProvider, sleep: ManualSleep, where: str
) -> None:
    faults = Faults()
    repo = Repository(with_faults(memory_repo.blobs, faults), memory_repo.checkpoints, memory_repo.config)
    reached = asyncio.Event()

    async def stuck() -> None:
        reached.set()
        await asyncio.Event().wait()

    faults.run("put", stuck, 1 if where == "baseline" else 2)
    auto = AutoCheckpoint(every_steps=1 if where == "after a step" else None, every_seconds=60, sleep=sleep)

    async def work() -> None:
        async with await repo.session(provider, thread_id="t", auto=auto) as session:
            await step(session, "1")
            await sleep.wake()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.wait_for(reached.wait(), PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    repo._engine.workers.shutdown()
    assert await contents(memory_repo) == ([] if where == "baseline" else [""])
    await the_thread_is_free(memory_repo)


def test_a_loop_that_ends_takes_it_along(tmp_path: Path) -> None:
    """Nobody closes the session: the loop cancels its tasks, and the thread is free afterwards."""

    async def main() -> None:
        repo = await snapcore.open_repository(tmp_path / "repo")
        auto = AutoCheckpoint(every_seconds=60, sleep=ManualSleep())
        session = await repo.session(LocalProvider(tmp_path / "sandboxes"), thread_id="t", auto=auto)
        await step(session, "1")
        await repo.close()

    asyncio.run(main())

    async def after() -> None:
        async with snapcore.open_repository(tmp_path / "repo") as repo:
            await the_thread_is_free(repo)

    asyncio.run(after())
