"""A sandbox without a session that is captured again and again while a block runs: `checkpoint_every`. Case 25's kind: a capture
that fails for days is told, and does not end what it is beside."""

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import CheckpointWriterConflictError, Code, ProviderError, RepositoryError, SnapcoreError, SnapshotError
from snapcore.protocols import Workspace
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository
from snapcore.sandboxes import SandboxSpec
from snapcore.testing import Faults, with_faults

from .crash_helpers import leaks_nothing
from .manual_sleep import PATIENCE, ManualSleep

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    with leaks_nothing():
        yield
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()


@pytest.fixture
def sleep() -> ManualSleep:
    return ManualSleep()


@pytest.fixture
async def faults() -> Faults:
    return Faults()


@pytest.fixture
async def faulty_repo(memory_repo: Repository, faults: Faults) -> AsyncIterator[Repository]:
    """The same repository, its stores behind `faults`."""
    repo = Repository(with_faults(memory_repo.blobs, faults), with_faults(memory_repo.checkpoints, faults), memory_repo.config)
    yield repo
    repo._engine.workers.shutdown()


class Breaking:
    """A sandbox over a folder whose next captures fail with these errors, one each."""

    def __init__(self, folder: Path, *errors: Exception) -> None:
        from snapcore.providers.direct import DirectWorkspace

        self._workspace = DirectWorkspace(folder)
        self.errors: list[Exception] = list(errors)

    def workspace(self, root: str | None = None) -> Workspace:
        if self.errors:
            raise self.errors.pop(0)
        return self._workspace


def passing() -> ProviderError:
    return ProviderError("The sandbox did not answer.", code=Code.SANDBOX_UNAVAILABLE, retryable=True)


async def contents(repo: Repository, name: bytes = b"a", thread: str = "t") -> list[bytes]:
    """What a file holds in each checkpoint of the thread."""
    return [await repo.read_file(checkpoint, name) for checkpoint in await repo.list(thread)]


async def the_thread_is_free(repo: Repository, thread: str = "t") -> None:
    await repo.checkpoints.release_writer((await repo.checkpoints.acquire_writer(thread)).lease)


# ---- when it captures


async def test_at_the_start_each_time_that_passes_and_at_the_end(memory_repo: Repository, make: Make, sleep: ManualSleep) -> None:
    work = make({"a": "0"})
    async with memory_repo.checkpoint_every(work, thread_id="t", seconds=60, sleep=sleep) as every:
        assert await contents(memory_repo) == [b"0"]
        for number in range(1, 4):
            make({"a": f"{number}"})
            assert await sleep.turn() == 60
        make({"a": "end"})
    assert await contents(memory_repo) == [b"0", b"1", b"2", b"3", b"end"]
    assert (every.made, every.failures, every.ended) == (5, [], None)
    assert every.latest == await memory_repo.get("t")
    assert sleep.idle
    await the_thread_is_free(memory_repo)


async def test_an_unchanged_sandbox_gets_no_new_checkpoint(memory_repo: Repository, make: Make, sleep: ManualSleep) -> None:
    work = make({"a": "0"})
    first = await memory_repo.capture(work, thread_id="t", label="mine")
    async with memory_repo.checkpoint_every(work, thread_id="t", seconds=1, sleep=sleep) as every:
        for _ in range(3):
            await sleep.turn()
    assert await memory_repo.list("t") == [first]
    assert (every.made, every.latest) == (0, first)


async def test_start_and_end_can_be_left_out(memory_repo: Repository, make: Make, sleep: ManualSleep) -> None:
    work = make({"a": "0"})
    async with memory_repo.checkpoint_every(
        work, thread_id="t", seconds=5, baseline=False, on_completion=False, sleep=sleep
    ) as every:
        await sleep.asleep()
        assert await memory_repo.list("t") == []
        await sleep.turn()
        make({"a": "end"})
    assert await contents(memory_repo) == [b"0"]
    assert every.made == 1


async def test_the_options_of_a_capture_are_passed_on(memory_repo: Repository, make: Make, sleep: ManualSleep) -> None:
    work = make({"a": "the password is hunter-22", "b.log": "x"})
    async with memory_repo.checkpoint_every(
        work,
        thread_id="t",
        seconds=5,
        sleep=sleep,
        secrets={"PASSWORD": "hunter-22"},
        policy=snapcore.FilePolicy.default().with_exclude("*.log"),
        run_id="r",
    ):
        pass
    (checkpoint,) = await memory_repo.list("t")
    assert checkpoint.run_id == "r"
    assert [entry.path async for entry in memory_repo.ls(checkpoint)] == [b"", b"a"]
    assert b"hunter" not in await memory_repo.read_file(checkpoint, b"a")


async def test_a_capture_by_hand_waits_its_turn(faulty_repo: Repository, faults: Faults, make: Make, sleep: ManualSleep) -> None:
    """Beside an automatic one, which holds the thread, `repo.capture` would be refused."""
    work = make({"a": "0"})
    repo = faulty_repo
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        reached.set()
        await asyncio.wait_for(go_on.wait(), PATIENCE)

    async with repo.checkpoint_every(work, thread_id="t", seconds=5, sleep=sleep) as every:
        faults.run("put", hold, faults.calls["put"] + 1)
        make({"a": "1"})
        await sleep.wake()
        await asyncio.wait_for(reached.wait(), PATIENCE)
        by_hand = asyncio.create_task(every.checkpoint("mine"))
        with pytest.raises(CheckpointWriterConflictError):
            await repo.capture(work, thread_id="t")
        make({"a": "2"})
        go_on.set()
        made = await by_hand
    assert (made.label, made.reason) == ("mine", "named")
    assert await repo.read_file(made, b"a") == b"2"
    assert [c.label for c in await repo.list("t")] == [None, None, "mine"]
    assert every.failures == []


async def test_the_work_of_the_block_may_fail(memory_repo: Repository, make: Make, sleep: ManualSleep) -> None:
    """Its error goes on, and what it left behind is captured."""
    work = make({"a": "0"})

    async def block() -> None:
        async with memory_repo.checkpoint_every(work, thread_id="t", seconds=5, sleep=sleep):
            make({"a": "half"})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()
    assert await contents(memory_repo) == [b"0", b"half"]


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
async def test_a_time_that_makes_no_sense_is_refused(memory_repo: Repository, make: Make, seconds: float) -> None:
    with pytest.raises(SnapshotError) as caught:
        memory_repo.checkpoint_every(make({"a": "0"}), thread_id="t", seconds=seconds)
    assert caught.value.code == Code.INVALID_REQUEST


async def test_an_unknown_option_is_refused_at_once(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "0"})
    with pytest.raises(TypeError):
        memory_repo.checkpoint_every(work, thread_id="t", seconds=1, secret={"A": "hunter-22"})
    with pytest.raises(SnapshotError) as caught:
        memory_repo.checkpoint_every(work, thread_id="", seconds=1)
    assert caught.value.code == Code.INVALID_ID


# ---- what fails


async def test_passing_errors_of_the_sandbox_are_outlived(
    memory_repo: Repository, make: Make, sleep: ManualSleep, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is reported three ways; tries come again after a pause that grows, and the usual one once all is well."""
    told: list[SnapcoreError] = []
    errors = [passing() for _ in range(8)]
    sandbox = Breaking(make({"a": "0"}), *errors)
    async with memory_repo.checkpoint_every(sandbox, thread_id="t", seconds=30, sleep=sleep, on_failure=told.append) as every:
        pauses = [await sleep.asleep()] + [await sleep.turn() for _ in errors]
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 30]
        assert every.failures == errors
        assert told == errors
    assert await contents(memory_repo) == [b"0"]
    records = [record for record in caplog.records if record.name == "snapcore"]
    assert [record.levelno for record in records] == [logging.WARNING] * len(errors)
    assert all("SANDBOX_UNAVAILABLE" in record.getMessage() and "thread t" in record.getMessage() for record in records)
    assert all(error.__traceback__ is None for error in every.failures)  # frames would hold what was being stored


async def test_passing_errors_of_the_stores_are_outlived(
    faulty_repo: Repository, faults: Faults, make: Make, sleep: ManualSleep
) -> None:
    repo = faulty_repo
    work = make({"a": "0"})
    async with repo.checkpoint_every(work, thread_id="t", seconds=30, sleep=sleep) as every:
        make({"a": "1"})
        full = RepositoryError("There is no room.", code=Code.STORE_FULL, retryable=True)
        faults.fail("put", None, full)
        assert await sleep.turn() == 1
        assert await sleep.turn() == 2
        assert await contents(repo) == [b"0"]
        faults.clear()
        assert await sleep.turn() == 30
        assert await contents(repo) == [b"0", b"1"]
    assert [error.code for error in every.failures] == [Code.STORE_FULL] * 2
    await the_thread_is_free(repo)


async def test_what_does_not_pass_by_itself_is_tried_at_the_usual_pace(
    memory_repo: Repository, make: Make, sleep: ManualSleep
) -> None:
    work = make({"a": "0"})
    async with memory_repo.checkpoint_every(work, thread_id="t", seconds=30, sleep=sleep) as every:
        os.mkfifo(work / "fifo")
        assert [await sleep.turn() for _ in range(3)] == [30, 30, 30]
        assert [error.code for error in every.failures] == [Code.UNSUPPORTED_ENTRY] * 3
        (work / "fifo").unlink()
        make({"a": "1"})
        await sleep.turn()
        assert await contents(memory_repo) == [b"0", b"1"]


async def test_while_another_holds_the_thread_captures_are_left_out(
    memory_repo: Repository, make: Make, sleep: ManualSleep, caplog: pytest.LogCaptureFixture
) -> None:
    work = make({"a": "0"})
    async with memory_repo.checkpoint_every(work, thread_id="t", seconds=30, sleep=sleep) as every:
        other = (await memory_repo.checkpoints.acquire_writer("t")).lease
        make({"a": "1"})
        assert [await sleep.turn() for _ in range(2)] == [30, 30]
        assert [error.code for error in every.failures] == [Code.WRITER_HELD] * 2
        await memory_repo.checkpoints.release_writer(other)
        await sleep.turn()
        assert await contents(memory_repo) == [b"0", b"1"]
    assert len(every.failures) == 2
    assert all("left out" in record.getMessage() for record in caplog.records if record.name == "snapcore")


async def test_the_last_capture_is_tried_again_when_that_can_help(
    memory_repo: Repository, make: Make, sleep: ManualSleep
) -> None:
    sandbox = Breaking(make({"a": "0"}))
    every = memory_repo.checkpoint_every(sandbox, thread_id="t", seconds=30, sleep=sleep)
    await every.__aenter__()
    await sleep.asleep()
    make({"a": "end"})
    sandbox.errors = [passing(), passing()]
    leaving = asyncio.create_task(every.__aexit__(None, None, None))
    while sleep.asked == [30]:
        await sleep.changes()
    assert await sleep.turn() == 2
    await sleep.wake()
    await leaving
    assert await contents(memory_repo) == [b"0", b"end"]
    assert sleep.asked == [30, 1, 2]


@pytest.mark.parametrize("code", [Code.NO_SANDBOX, Code.SANDBOX_UNAVAILABLE])
async def test_a_sandbox_that_goes_away_ends_it_and_not_the_block(
    memory_repo: Repository, make: Make, sleep: ManualSleep, code: Code
) -> None:
    sandbox = Breaking(make({"a": "0"}))
    gone = ProviderError("The sandbox is gone.", code=code)
    async with memory_repo.checkpoint_every(sandbox, thread_id="t", seconds=30, sleep=sleep) as every:
        await sleep.asleep()
        sandbox.errors = [gone]
        await sleep.last()
        assert every.ended is gone
        make({"a": "1"})
    assert every.ended is gone
    assert every.failures == [gone]
    assert await contents(memory_repo) == [b"0"]
    assert sleep.asked == [30]


async def test_a_folder_that_is_destroyed_meanwhile_is_reported(
    memory_repo: Repository, tmp_path: Path, sleep: ManualSleep
) -> None:
    provider = LocalProvider(tmp_path / "sandboxes")
    handle = await provider.create(SandboxSpec())
    await handle.upload(f"{handle.workspace_root}/a", b"0")
    async with memory_repo.checkpoint_every(handle, thread_id="t", seconds=30, sleep=sleep) as every:
        await provider.destroy(handle.binding)
        await sleep.turn()
    assert {error.code for error in every.failures} == {Code.MISSING_WORKSPACE}
    assert await contents(memory_repo) == [b"0"]


async def test_what_a_policy_or_a_callback_raises_is_reported_too(
    memory_repo: Repository, make: Make, sleep: ManualSleep
) -> None:
    """Of an exception that is none of snapcore's only the type is told: nobody knows what its text holds."""

    def refuse(path: str, kind: str) -> bool:
        raise KeyError("hunter-22")

    def fail(error: SnapcoreError) -> None:
        raise LookupError("in the callback")

    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    policy = snapcore.FilePolicy(exclude=refuse)
    async with memory_repo.checkpoint_every(
        make({"a": "0"}), thread_id="t", seconds=30, sleep=sleep, policy=policy, on_failure=fail
    ) as every:
        assert await sleep.turn() == 30
    assert [str(error) for error in every.failures] == ["The capture ended with KeyError."] * 3
    assert [type(problem["exception"]) for problem in problems] == [LookupError] * 3


async def test_no_secret_is_logged(
    memory_repo: Repository, make: Make, sleep: ManualSleep, caplog: pytest.LogCaptureFixture
) -> None:
    """Also not where it is what the failure is about: a thread id, a file name."""
    secrets = {"TOKEN": "hunter-22"}
    work = make({"hunter-22": "x"})
    for thread in ("t", "of-hunter-22"):
        async with memory_repo.checkpoint_every(work, thread_id=thread, seconds=30, sleep=sleep, secrets=secrets) as every:
            pass
        assert {error.code for error in every.failures} == {Code.SECRET_IN_NAME}
        assert not any("hunter" in str(error) for error in every.failures)
    assert caplog.records
    assert "hunter" not in caplog.text


async def test_only_the_newest_failures_are_kept(memory_repo: Repository, make: Make, sleep: ManualSleep) -> None:
    errors = [passing() for _ in range(130)]
    sandbox = Breaking(make({"a": "0"}), *errors)
    async with memory_repo.checkpoint_every(sandbox, thread_id="t", seconds=1, sleep=sleep) as every:
        while sandbox.errors:
            await sleep.turn()
        assert every.failures == errors[-100:]


# ---- how it ends


async def test_a_cancelled_block_ends_at_once_and_leaves_nothing(memory_repo: Repository, make: Make, sleep: ManualSleep) -> None:
    work = make({"a": "0"})

    async def block() -> None:
        async with memory_repo.checkpoint_every(work, thread_id="t", seconds=30, sleep=sleep):
            make({"a": "1"})
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await sleep.asleep()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await contents(memory_repo) == [b"0"]
    await the_thread_is_free(memory_repo)


@pytest.mark.parametrize("where", ["baseline", "by time", "at the end"])
async def test_cancelled_in_the_middle_of_a_capture_it_leaves_no_lease(
    faulty_repo: Repository, faults: Faults, make: Make, sleep: ManualSleep, where: str
) -> None:
    work = make({"a": "0"})
    repo = faulty_repo
    reached = asyncio.Event()

    async def stuck() -> None:
        reached.set()
        await asyncio.Event().wait()

    faults.run("put", stuck, 1 if where == "baseline" else 2)

    async def block() -> None:
        async with repo.checkpoint_every(work, thread_id="t", seconds=30, sleep=sleep):
            make({"a": "1"})
            if where == "by time":
                await sleep.wake()
                await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await asyncio.wait_for(reached.wait(), PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await contents(repo) == ([] if where == "baseline" else [b"0"])
    await the_thread_is_free(repo)


def test_a_loop_that_ends_takes_it_along(make: Make, tmp_path: Path) -> None:
    """Nobody leaves the block: the loop cancels its tasks, and the thread is free afterwards."""
    work = make({"a": "0"})

    async def main() -> None:
        repo = await snapcore.open_repository(tmp_path / "repo")
        sleep = ManualSleep()
        await repo.checkpoint_every(work, thread_id="t", seconds=30, sleep=sleep).__aenter__()
        await sleep.asleep()
        await repo.close()

    asyncio.run(main())

    async def after() -> None:
        async with snapcore.open_repository(tmp_path / "repo") as repo:
            await the_thread_is_free(repo)

    asyncio.run(after())
