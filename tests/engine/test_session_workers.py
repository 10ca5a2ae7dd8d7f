"""Several workers and one thread: only the newest goes on. Workers are killed and frozen. Case 38."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import snapcore
from snapcore import Repository
from snapcore.errors import CheckpointWriterConflictError, CheckpointWriterLostError, Code, ReplayDivergedError
from snapcore.opening import borrowed
from snapcore.providers.local import LocalProvider
from snapcore.sandboxes import Abilities, SandboxHandle
from snapcore.session import Session
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import Faults, ManualClock, with_faults

from .session_helpers import Counter, contents, local, whole_ledger

WORKER = Path(__file__).with_name("session_worker.py")


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return local(tmp_path)


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(tmp_path / "runs")


class Worker:
    """A process that runs `session_worker.py`, and the process of its command."""

    def __init__(self, tmp_path: Path, command: str) -> None:
        self._marker = tmp_path / "marker"
        self._marker.touch()
        # the command says its number before it does anything; it outlives its worker
        arguments = [
            sys.executable,
            str(WORKER),
            str(tmp_path / "repo"),
            str(tmp_path / "sandboxes"),
            f"echo $$ > {self._marker}; {command}",
        ]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.command = 0

    async def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def command_began(self) -> None:
        """Wait until its command runs."""
        while not (text := self._marker.read_text()).endswith("\n"):
            assert self.process.poll() is None
            await asyncio.sleep(0.01)
        self.command = int(text)

    async def rest(self) -> list[str]:
        """Let it go on; what it says to its end."""
        out, _ = await asyncio.to_thread(self.process.communicate, "\n")
        return out.splitlines()

    def end(self) -> None:
        for number in (self.command, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                if number:
                    os.kill(number, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Worker]]:
    started: list[Worker] = []
    yield started
    for worker in started:
        worker.end()


async def test_a_worker_that_is_killed_leaves_an_uncertain_operation(
    repo: Repository, provider: LocalProvider, tmp_path: Path, workers: list[Worker]
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await session.checkpoint("start")
    command = "echo x >> runs; exec sleep 600"
    worker = Worker(tmp_path, command)
    workers.append(worker)
    assert await worker.line() == "open done"
    await worker.command_began()
    worker.process.kill()
    worker.process.wait()
    whole = f"echo $$ > {tmp_path / 'marker'}; {command}"
    async with await repo.session(provider, thread_id="t", replay="strict") as session:
        (event,) = session.uncertain
        assert event.operation is not None
        assert event.operation.command[-1] == whole
        await session.checkpoint("start")
        await session.write_file("mine", "1")
        with pytest.raises(ReplayDivergedError) as caught:
            await session.exec(whole)
        assert caught.value.code == Code.OPERATION_UNCERTAIN
        assert contents(session)["runs"] == b"x\n"
        with pytest.raises(snapcore.ProviderError):
            await session.exec(whole, rerun=True, timeout=0.5)
        assert contents(session)["runs"] == b"x\nx\n"
    async with await repo.resume("t", label="start") as session:
        assert session.uncertain == ()


async def test_a_worker_that_was_frozen_in_a_command_neither_writes_events_nor_checkpoints(
    repo: Repository, provider: LocalProvider, tmp_path: Path, workers: list[Worker]
) -> None:
    """Case 38: it held the thread once, and is told that it does not any more."""
    go = tmp_path / "go"
    worker = Worker(tmp_path, f"while [ ! -e {go} ]; do sleep 0.01; done")
    workers.append(worker)
    assert await worker.line() == "open done"
    await worker.command_began()
    worker.process.send_signal(signal.SIGSTOP)
    async with await repo.session(provider, thread_id="t") as session:
        assert len(session.uncertain) == 1
        await session.write_file("mine", "the new one's")
        worker.process.send_signal(signal.SIGCONT)
        go.touch()
        assert await worker.line() == "exec WRITER_LOST"
        assert await worker.rest() == [
            "exec WRITER_LOST",
            "write WRITER_LOST",
            "checkpoint WRITER_LOST",
            "fork WRITER_LOST",
            "destroy WRITER_LOST",
            "close done",
        ]
        assert contents(session) == {"mine": b"the new one's"}
        await session.checkpoint("the new one's")
    events = await whole_ledger(repo, "t")
    taken = next(number for number, event in enumerate(events) if event.kind == "sandbox.opened")
    assert len({event.fence for event in events[:taken]}) == 1
    assert {event.fence for event in events[taken:]} == {events[taken].fence}
    assert [c.label for c in await repo.list("t")] == ["the new one's"]
    assert await repo.list("u") == []


@pytest.mark.parametrize("how", ["session", "resume"])
async def test_a_superseded_session_leaves_everything_alone(
    repo: Repository, provider: LocalProvider, counter: Counter, tmp_path: Path, how: str
) -> None:
    old = await repo.session(provider, thread_id="t")
    await old.write_file("f", "old")
    await old.checkpoint()
    root = Path(old.handle.workspace_root)
    async with snapcore.open_repository(tmp_path / "repo") as other:
        new = await (
            other.session(local(tmp_path), thread_id="t") if how == "session" else other.resume("t", provider=local(tmp_path))
        )
        async with new:
            before = await whole_ledger(repo, "t")
            for work in (
                old.exec(counter("x")),
                old.write_file("f", "changed"),
                old.checkpoint("x"),
                old.fork("u"),
                old.destroy(),
            ):
                with pytest.raises(CheckpointWriterLostError):
                    await work
            await old.close()
            assert any("taken the thread" in warning for warning in old.warnings)
            assert await whole_ledger(repo, "t") == before
            assert len(await repo.list("t")) == 1
            assert (root / "f").read_text() == "old"
            assert counter.runs == []
            await new.exec(counter("new")) if how == "session" else await new.write_file("f", "old")


async def test_a_thread_is_not_taken_in_the_middle_of_a_capture(repo: Repository, provider: LocalProvider) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await session.checkpoint()
        lease = (await repo.checkpoints.acquire_writer("t")).lease
        for taking in (repo.session(provider, thread_id="t"), repo.resume("t")):
            with pytest.raises(CheckpointWriterConflictError):
                await taking
        await session.exec("true")  # it has the thread still
        waiting = asyncio.create_task(repo.session(provider, thread_id="t", wait=60))
        await asyncio.sleep(0)
        await repo.checkpoints.release_writer(lease)
        async with await waiting:
            with pytest.raises(CheckpointWriterLostError):
                await session.exec("true")


async def test_many_workers_take_one_thread_and_one_has_it_in_the_end(
    repo: Repository, provider: LocalProvider, tmp_path: Path
) -> None:
    async with await repo.session(provider, thread_id="t") as first:
        await first.write_file("f", "x")
    repos = [await snapcore.open_repository(tmp_path / "repo") for _ in range(4)]
    opened = await asyncio.gather(
        *(each.session(local(tmp_path), thread_id="t", wait=60) for each in repos), return_exceptions=True
    )
    sessions = [session for session in opened if isinstance(session, Session)]  # some lost it before they had begun
    ends = await asyncio.gather(*(s.exec(f"echo {n} >> log") for n, s in enumerate(sessions)), return_exceptions=True)
    winners = [n for n, end in enumerate(ends) if not isinstance(end, BaseException)]
    assert len(winners) == 1
    assert contents(sessions[winners[0]])["log"] == b"%d\n" % winners[0]
    lost = [each for each in (*opened, *ends) if isinstance(each, BaseException)]
    assert len(lost) == 3
    assert all(isinstance(each, CheckpointWriterLostError) for each in lost)
    for session in sessions:
        await session.close()
    for each in repos:
        await each.close()


class Pausing(LocalProvider):
    """Counts how often it would have paused."""

    paused = 0

    @property
    def abilities(self) -> Abilities:
        return msgspec.structs.replace(super().abilities, pause=True)

    async def pause(self, handle: SandboxHandle) -> None:
        self.paused += 1
        await handle.close()


@pytest.mark.parametrize("ending", ["pause", "destroy"])
async def test_a_worker_that_stood_still_in_a_pause_does_not_pause_what_is_anothers_by_then(tmp_path: Path, ending: str) -> None:
    """Its lease ran out after it had told the ledger, and before it did it."""
    clock, faults, provider = ManualClock(), Faults(), Pausing(tmp_path / "sandboxes")
    inner = SqlCheckpointStore("sqlite://", clock=clock)
    blobs = MemoryBlobStore()
    taken: list[Session] = []

    async with borrowed(blobs, inner) as new_repo, borrowed(blobs, with_faults(inner, faults)) as old_repo:

        async def stands_still() -> None:
            clock.advance(200)
            taken.append(await new_repo.session(provider, thread_id="t"))

        old = await old_repo.session(provider, thread_id="t")
        faults.run("renew_writer", stands_still)
        with pytest.raises(CheckpointWriterLostError):
            await getattr(old, ending)()
        (new,) = taken
        assert provider.paused == 0
        assert (await new.exec("echo here")).stdout == b"here\n"
        await old.close()
        await new.close()
    await inner.close()
