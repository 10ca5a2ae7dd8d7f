"""Fork at a step: the checkpoint that is taken, what it does not cover, and what of that can be run again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from snapcore.autocheckpoint import AutoCheckpoint
from snapcore.errors import Code, ReplayDivergedError, SnapshotError
from snapcore.forking import ForkReport
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository
from snapcore.session import Session

from .session_helpers import contents


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return LocalProvider(tmp_path / "sandboxes")


def words(report: ForkReport) -> list[str]:
    """The commands and paths that are not covered."""
    operations = [item.event.operation for item in report.uncovered]
    return [operation.command[-1] for operation in operations if operation is not None]


async def add(session: Session, *texts: str, **options: Any) -> None:
    for text in texts:
        await session.exec(f"echo {text} >> a", **options)


async def test_the_newest_checkpoint_at_or_before_the_step_and_what_it_lacks(
    memory_repo: Repository, provider: LocalProvider
) -> None:
    async with await memory_repo.session(provider, thread_id="t") as session:
        await add(session, "1", "2")
        two = await session.checkpoint("two")
        await add(session, "3", "4")
        await session.exec("cat a", affects=False)
        await add(session, "5")
        five = await session.checkpoint("five")
        await add(session, "6")
    cases: dict[int, tuple[str, list[str]]] = {
        2: (two.id, []),
        3: (two.id, ["echo 3 >> a"]),
        4: (two.id, ["echo 3 >> a", "echo 4 >> a"]),
        5: (five.id, []),
        6: (five.id, ["echo 6 >> a"]),
        99: (five.id, ["echo 6 >> a"]),
    }
    for step, (source, lacking) in cases.items():
        report = await memory_repo.fork_with_report("t", to_thread_id=f"u{step}", at_step=step)
        assert (report.source.id, words(report)) == (source, lacking), step
        assert report.checkpoint.source_id == source
        assert [item.reason for item in report.uncovered] == [""] * len(lacking)
        assert await memory_repo.list(f"u{step}") == [report.checkpoint]
    assert (await memory_repo.fork("t", to_thread_id="v", at_step=4)).source_id == two.id
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.fork_with_report("t", to_thread_id="early", at_step=1)
    assert caught.value.code == Code.MISSING_CHECKPOINT
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.fork_with_report("t", two.id, to_thread_id="both", at_step=2)
    assert caught.value.code == Code.INVALID_REQUEST


async def test_a_fork_without_a_step_lacks_nothing(memory_repo: Repository, provider: LocalProvider) -> None:
    async with await memory_repo.session(provider, thread_id="t") as session:
        one = await session.checkpoint("one")
        await add(session, "1")
        await session.checkpoint("two")
    report = await memory_repo.fork_with_report("t", one.id, to_thread_id="u")
    assert (report.source, report.at_step, report.uncovered) == (one, None, ())


async def test_the_fork_replays_what_came_before_and_runs_the_rest_when_told(
    memory_repo: Repository, provider: LocalProvider
) -> None:
    async with await memory_repo.session(provider, thread_id="t") as session:
        await add(session, "1", "2")
        await session.checkpoint()
        await add(session, "3")
        await session.exec("mkdir -p sub && cd sub && echo 4 >> ../a && exit 7")
        await add(session, "5", cwd="sub")
    report = await memory_repo.fork_with_report("t", to_thread_id="u", at_step=5)
    async with await memory_repo.resume("u", provider=provider) as fork:
        assert fork.replaying == 3
        with pytest.raises(ReplayDivergedError):
            await report.run_again(fork)
        for text in ("1", "2"):
            assert (await fork.exec(f"echo {text} >> a")).replayed
        await fork.checkpoint()
        assert contents(fork) == {"a": b"1\n2\n"}
        again = await report.run_again(fork)
        assert [outcome.exit_code for outcome in again.done] == [0, 7, 0]
        assert not any(outcome.replayed for outcome in again.done)
        assert again.left == ()
        assert contents(fork) == {"a": b"1\n2\n3\n4\n", "sub/a": b"5\n"}
    async with await memory_repo.resume("t", provider=provider) as source:
        assert contents(source) == {"a": b"1\n2\n"}


async def test_what_cannot_be_run_again_is_listed_with_the_reason(memory_repo: Repository, provider: LocalProvider) -> None:
    secrets = {"TOKEN": "hunter-22"}
    async with await memory_repo.session(provider, thread_id="t", secrets=secrets) as session:
        await session.checkpoint("start")
        await add(session, "1")
        await session.exec("echo hunter-22 > b")
        await session.exec("cat > c", stdin=b"x")
        await session.exec("echo $NAME > d", environment={"NAME": "value"})
        await session.exec("echo once > e", at_most_once=True)
        await session.write_file("f", "x")
        await add(session, "7")
    report = await memory_repo.fork_with_report("t", to_thread_id="u", at_step=7)
    assert [item.reason for item in report.uncovered] == [
        "",
        "a secret was taken out of it",
        "its input is not in the ledger",
        "the values of its environment are not in the ledger: NAME",
        "it is to be run at most once",
        "what was written is not in the ledger",
        "",
    ]
    async with await memory_repo.resume("u", provider=provider, replay="off", secrets=secrets) as fork:
        again = await report.run_again(fork)
        assert contents(fork) == {"a": b"1\n"}
    assert len(again.done) == 1
    assert [item.reason for item in again.left[:-1]] == [item.reason for item in report.uncovered[1:-1]]
    assert "comes after" in again.left[-1].reason


async def test_a_command_that_ends_otherwise_than_it_did_is_the_last(
    memory_repo: Repository, provider: LocalProvider, tmp_path: Path
) -> None:
    (tmp_path / "outside").touch()
    async with await memory_repo.session(provider, thread_id="t") as session:
        await session.checkpoint()
        await session.exec(f"test -e {tmp_path}/outside && echo 1 >> a")
        await add(session, "2")
    report = await memory_repo.fork_with_report("t", to_thread_id="u", at_step=2)
    (tmp_path / "outside").unlink()
    async with await memory_repo.resume("u", provider=provider, replay="off") as fork:
        again = await report.run_again(fork)
        assert contents(fork) == {}
    assert [outcome.exit_code for outcome in again.done] == [1]
    assert [item.event.operation and item.event.operation.command[-1] for item in again.left] == ["echo 2 >> a"]


async def test_a_command_of_which_nobody_knows_the_end_is_listed(memory_repo: Repository, provider: LocalProvider) -> None:
    begun = asyncio.Event()
    session = await memory_repo.session(provider, thread_id="t")
    await session.checkpoint()
    running = asyncio.create_task(session.exec("echo; sleep 600", on_output=lambda stream, piece: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    running.cancel()
    await asyncio.wait([running])
    await session.close()
    none = await memory_repo.fork_with_report("t", to_thread_id="u", at_step=0)
    one = await memory_repo.fork_with_report("t", to_thread_id="v", at_step=1)
    assert none.uncovered == ()
    assert [item.reason for item in one.uncovered] == ["nobody knows whether it was run"]


async def test_steps_are_those_of_the_present_line_of_work(memory_repo: Repository, provider: LocalProvider) -> None:
    """What was abandoned by going back has steps of the same numbers."""
    async with await memory_repo.session(provider, thread_id="t") as session:
        await add(session, "1")
        await session.checkpoint("one")
        await add(session, "old-2", "old-3")
        await session.checkpoint("old")
        await add(session, "old-4")
    async with await memory_repo.resume("t", provider=provider, label="one", replay="off") as session:
        await add(session, "new-2", "new-3", "new-4")
        new = await session.checkpoint("new")
        await add(session, "new-5")
    at_three = await memory_repo.fork_with_report("t", to_thread_id="u3", at_step=3)
    assert at_three.source.label == "one"
    assert words(at_three) == ["echo new-2 >> a", "echo new-3 >> a"]
    at_five = await memory_repo.fork_with_report("t", to_thread_id="u5", at_step=5)
    assert (at_five.source.id, words(at_five)) == (new.id, ["echo new-5 >> a"])


async def test_a_fork_of_a_fork_has_the_steps_before_it(memory_repo: Repository, provider: LocalProvider) -> None:
    async with await memory_repo.session(provider, thread_id="t") as session:
        await add(session, "1", "2")
        await session.checkpoint()
    await memory_repo.fork("t", to_thread_id="u")
    async with await memory_repo.resume("u", provider=provider, replay="off") as session:
        await add(session, "3")
        await session.checkpoint()
        await add(session, "4")
    for step, lacking in ((2, []), (3, []), (4, ["echo 4 >> a"])):
        report = await memory_repo.fork_with_report("u", to_thread_id=f"v{step}", at_step=step)
        assert (report.checkpoint.step, words(report)) == (min(step, 3), lacking), step
    with pytest.raises(SnapshotError):
        await memory_repo.fork_with_report("u", to_thread_id="w", at_step=1)


async def test_an_unchanged_checkpoint_covers_the_place_that_came_to_it_again(
    memory_repo: Repository, provider: LocalProvider
) -> None:
    async with await memory_repo.session(provider, thread_id="t", auto=AutoCheckpoint(every_steps=2)) as session:
        for number in range(3):
            await session.exec(f"true {number}")
        report = await memory_repo.fork_with_report("t", to_thread_id="u", at_step=3)
    assert words(report) == ["true 2"]


async def test_a_checkpoint_by_hand_counts_by_the_step_it_was_given(memory_repo: Repository, provider: LocalProvider) -> None:
    """A capture beside the session is in no ledger."""
    async with await memory_repo.session(provider, thread_id="t") as session:
        await add(session, "1")
        await session.checkpoint()
        await add(session, "2")
        aside = await memory_repo.capture(session.handle, thread_id="t", step=2)
        await add(session, "3")
    report = await memory_repo.fork_with_report("t", to_thread_id="u", at_step=3)
    assert (report.source.id, words(report)) == (aside.id, ["echo 3 >> a"])


async def test_conversation_and_artifacts_come_with_the_fork(memory_repo: Repository, provider: LocalProvider) -> None:
    async with await memory_repo.session(provider, thread_id="t") as session:
        await add(session, "1")
        await session.checkpoint(conversation=[{"role": "user"}], artifacts={"plan": b"first"})
        await add(session, "2")
        await session.checkpoint(conversation=[], artifacts={"plan": b"second"})
    report = await memory_repo.fork_with_report("t", to_thread_id="u", at_step=1)
    assert await memory_repo.read_conversation(report.checkpoint) == [{"role": "user"}]
    assert await memory_repo.read_artifact(report.checkpoint, "plan") == b"first"
