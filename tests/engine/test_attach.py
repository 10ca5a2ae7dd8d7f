"""`Repository.attach`: work by hand in a sandbox that is there is recorded, and is no part of what a program replays."""

import asyncio
from pathlib import Path

import pytest

import snapcore
from snapcore.ledger import EventKind
from snapcore.repository import Repository
from snapcore.session import Session

from .session_helpers import Counter, local, whole_ledger


async def kinds(repo: Repository, thread_id: str) -> list[str]:
    return [event.kind for event in await whole_ledger(repo, thread_id)]


async def test_what_is_done_by_hand_is_in_the_log(memory_repo: Repository, work: Path) -> None:
    async with await memory_repo.attach(work, thread_id="t", secrets={"TOKEN": "a secret value"}) as s:
        done = await s.exec("echo a secret value > made; cat made")
        made = await s.checkpoint("ready")
    assert done.stdout == b"{secret:TOKEN}\n"
    assert (made.label, made.totals.files) == ("ready", 1)
    assert await memory_repo.read_file(made, b"made") == bytes(14) + b"\n"
    events = await whole_ledger(memory_repo, "t")
    assert [event.kind for event in events] == [
        EventKind.OPENED,
        EventKind.EXEC_STARTED,
        EventKind.EXEC_COMPLETED,
        EventKind.CHECKPOINT,
        EventKind.CLOSED,
    ]
    assert "a secret value" not in repr(events)
    assert events[0].binding is not None
    assert events[0].binding.workspace_root == str(work)


async def test_a_program_replays_what_it_did_and_nothing_that_was_done_by_hand(memory_repo: Repository, tmp_path: Path) -> None:
    counter = Counter(tmp_path / "runs")
    provider = local(tmp_path)

    async def program(session: Session) -> None:
        await session.exec(counter("one"))
        await session.checkpoint("first")
        await session.exec(counter("two"))

    async with await memory_repo.session(provider, thread_id="t") as s:
        await s.exec(counter("one"))
        await s.checkpoint("first")
        step = s.step
    async with await memory_repo.attach(thread_id="t") as s:
        assert Path(s.handle.workspace_root).parent == tmp_path / "sandboxes"
        await s.exec(counter("by-hand", "echo by hand > note"))
        await s.write_file("other", "text")
        await s.checkpoint("looked")
        assert s.step == step
    async with await memory_repo.session(provider, thread_id="t", replay="strict") as s:
        await program(s)
    assert counter.runs == ["one", "by-hand", "two"]
    async with await memory_repo.resume("t", label="looked") as s:
        assert (Path(s.handle.workspace_root) / "note").read_text() == "by hand\n"
        await s.exec(counter("one"))
        assert s.warnings == [] or "by-hand" not in repr(s.warnings)
    assert counter.runs == ["one", "by-hand", "two"]


async def test_what_was_cut_short_by_hand_makes_nothing_uncertain(memory_repo: Repository, tmp_path: Path) -> None:
    provider = local(tmp_path)
    async with await memory_repo.session(provider, thread_id="t") as s:
        await s.exec("true")
    async with await memory_repo.attach(thread_id="t") as s:
        begun = asyncio.Event()
        running = asyncio.create_task(s.exec("echo; sleep 60", on_output=lambda *_: begun.set()))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (await kinds(memory_repo, "t"))[-2:] == [EventKind.EXEC_STARTED, EventKind.CLOSED]
    async with await memory_repo.session(provider, thread_id="t") as s:
        assert s.uncertain == ()


async def test_a_thread_with_another_sandbox_is_refused(memory_repo: Repository, work: Path, tmp_path: Path) -> None:
    async with await memory_repo.session(local(tmp_path), thread_id="t") as s:
        await s.exec("true")
    before = await kinds(memory_repo, "t")
    with pytest.raises(snapcore.SnapshotError) as caught:
        await memory_repo.attach(work, thread_id="t")
    assert caught.value.code == snapcore.Code.INVALID_REQUEST
    assert "--no-record" in caught.value.hint
    assert await kinds(memory_repo, "t") == before


async def test_a_session_that_is_open_is_left_alone_unless_it_is_taken_over(memory_repo: Repository, tmp_path: Path) -> None:
    async with await memory_repo.session(local(tmp_path), thread_id="t") as s:
        with pytest.raises(snapcore.CheckpointWriterConflictError) as caught:
            await memory_repo.attach(thread_id="t")
        assert "take_over" in caught.value.hint
        assert (await s.exec("echo still here")).stdout == b"still here\n"
        async with await memory_repo.attach(thread_id="t", take_over=True) as other:
            await other.exec("true")
        with pytest.raises(snapcore.CheckpointWriterLostError):
            await s.exec("true")


async def test_a_thread_without_a_sandbox_needs_one_to_be_named(memory_repo: Repository, work: Path) -> None:
    with pytest.raises(snapcore.ProviderError) as caught:
        await memory_repo.attach(thread_id="t")
    assert caught.value.code == snapcore.Code.NO_SANDBOX
    async with await memory_repo.attach(str(work), thread_id="t"):
        pass
    async with await memory_repo.attach(thread_id="t") as s:
        assert s.handle.workspace_root == str(work)


async def test_a_session_by_hand_neither_pauses_nor_ends_the_sandbox(memory_repo: Repository, work: Path) -> None:
    s = await memory_repo.attach(work, thread_id="t")
    for call in (s.pause(), s.destroy(), s.checkpoint(native=True)):
        with pytest.raises(snapcore.ProviderError) as caught:
            await call
        assert caught.value.code == snapcore.Code.NOT_CAPABLE
    assert work.is_dir()
    assert (await s.exec("echo on")).stdout == b"on\n"
    await s.close()
    assert EventKind.PAUSED not in await kinds(memory_repo, "t")
    assert not any(event.destroyed for event in await whole_ledger(memory_repo, "t"))


async def test_an_unchanged_sandbox_gives_no_new_checkpoint(memory_repo: Repository, work: Path) -> None:
    (work / "file").write_text("x")
    async with await memory_repo.attach(work, thread_id="t") as s:
        first = await s.checkpoint(skip_unchanged=True)
        assert await s.checkpoint(skip_unchanged=True) == first
        assert (await s.checkpoint()).id != first.id


async def test_a_folder_that_is_not_there_is_no_sandbox(memory_repo: Repository, tmp_path: Path) -> None:
    async with await memory_repo.attach(tmp_path / "none", thread_id="t") as s:
        with pytest.raises(snapcore.ProviderError) as caught:
            await s.exec("true")
        assert caught.value.code == snapcore.Code.NO_SANDBOX


def test_without_async(work: Path) -> None:
    with snapcore.blocking.open_repository("memory://") as repo, repo.attach(work, thread_id="t") as s:
        assert s.exec("echo hi").stdout == b"hi\n"
