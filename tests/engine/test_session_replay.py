"""Replay: what had been done before a checkpoint is not done again, and nothing lies about it. Case 37."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore import Repository
from snapcore.errors import Code, ProviderError, ReplayDivergedError, SnapshotError
from snapcore.ledger import EventKind
from snapcore.providers.local import LocalProvider
from snapcore.session import Session

from .session_helpers import Counter, contents, local, whole_ledger

Program = Callable[[Session], Awaitable[list[bool]]]


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return local(tmp_path)


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(tmp_path / "runs")


async def work(session: Session, counter: Counter, *names: str, label: str | None = None) -> list[bool]:
    """Run a command for each name, then take a checkpoint. Returns which were replayed."""
    replayed = [(await session.exec(counter(name, f"echo {name} >> log"))).replayed for name in names]
    if label is not None:
        await session.checkpoint(label)
    return replayed


async def test_what_came_before_the_checkpoint_is_not_run_again(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        first = await session.exec(counter("a", "echo out; echo err >&2; exit 7"))
        await session.write_file("f", "x")
        await work(session, counter, "b", label="here")
        await work(session, counter, "later")
    async with await repo.resume("t", label="here") as session:
        assert session.replaying == 4
        pieces: list[tuple[str, bytes]] = []
        again = await session.exec(
            counter("a", "echo out; echo err >&2; exit 7"), on_output=lambda stream, piece: pieces.append((stream, piece))
        )
        assert again.replayed
        assert (again.exit_code, again.stdout, again.stderr, again.sequence) == (7, first.stdout, first.stderr, first.sequence)
        assert pieces == [("stdout", b"out\n"), ("stderr", b"err\n")]
        await session.write_file("f", "x")
        assert await work(session, counter, "b", label="here") == [True]
        assert session.replaying == 0
        assert counter.runs == ["a", "b", "later"]
        assert await work(session, counter, "later") == [False]
        assert counter.runs == ["a", "b", "later", "later"]
        assert contents(session) == {"f": b"x", "log": b"b\nlater\n"}


async def test_a_large_output_is_replayed_whole(repo: Repository, provider: LocalProvider) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        first = await session.exec("seq 300000")
        await session.checkpoint()
    async with await repo.resume("t") as session:
        again = await session.exec("seq 300000")
        assert again.replayed
        assert again.stdout == first.stdout


async def test_a_time_limit_that_was_exceeded_is_replayed_as_such(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    slow = counter("slow", "sleep 600")
    async with await repo.session(provider, thread_id="t") as session:
        with pytest.raises(ProviderError):
            await session.exec(slow, timeout=0.2)
        await session.checkpoint()
    async with await repo.resume("t") as session:
        with pytest.raises(ProviderError) as caught:
            await session.exec(slow, timeout=600)
        assert caught.value.code == Code.EXEC_TIMEOUT
        assert session.replaying == 1
    assert counter.runs == ["slow"]


async def test_a_command_that_could_not_be_run_is_replayed_as_such(repo: Repository, provider: LocalProvider) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        with pytest.raises(SnapshotError):
            await session.exec("true", user="nobody-of-that-name")
        await session.checkpoint()
    async with await repo.resume("t") as session:
        with pytest.raises(SnapshotError) as caught:
            await session.exec("true", user="nobody-of-that-name")
        assert caught.value.code == Code.INVALID_REQUEST
        assert session.replaying == 1


async def test_a_second_and_a_third_resume_replay_everything_that_came_before(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    names = ["a", "b", "c", "d"]
    async with await repo.session(provider, thread_id="t") as session:
        await work(session, counter, "a", label="1")
    for number in range(1, 4):
        async with await repo.resume("t", label=str(number)) as session:
            for earlier in range(number):
                assert await work(session, counter, names[earlier], label=str(earlier + 1)) == [True]
            assert await work(session, counter, names[number], label=str(number + 1)) == [False]
    assert counter.runs == names
    async with await repo.resume("t") as session:
        assert contents(session) == {"log": b"a\nb\nc\nd\n"}


async def test_an_abandoned_line_of_work_is_not_replayed(repo: Repository, provider: LocalProvider, counter: Counter) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await work(session, counter, "a", label="fork here")
        await work(session, counter, "abandoned", label="abandoned")
    async with await repo.resume("t", label="fork here") as session:
        assert await work(session, counter, "a", "b", label="kept") == [True, False]
    async with await repo.resume("t") as session:
        assert session.replaying == 4
        assert await work(session, counter, "a", "b", "abandoned") == [True, True, False]
        assert contents(session) == {"log": b"a\nb\nabandoned\n"}
    async with await repo.resume("t", label="abandoned") as session:
        assert await work(session, counter, "a", "abandoned") == [True, True]


async def test_another_operation_at_a_place_is_an_error_and_consumes_nothing(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    """Case 37: by place and identity."""
    async with await repo.session(provider, thread_id="t") as session:
        await session.exec(counter("a"), stdin=b"in", cwd=".", environment={"X": "1"})
        await session.write_file("f", "x")
        await session.checkpoint()
    async with await repo.resume("t") as session:
        right: dict[str, Any] = {"stdin": b"in", "cwd": ".", "environment": {"X": "another value"}}

        def but(**other: Any) -> dict[str, Any]:
            return {**right, **other}

        for wrong in (
            session.exec(counter("b"), **right),
            session.exec(counter("a"), **but(stdin=b"other")),
            session.exec(counter("a"), **but(cwd="inner")),
            session.exec(counter("a"), **but(environment={"Y": "1"})),
            session.exec(counter("a"), **but(user="root")),
            session.write_file("f", "x"),
            session.checkpoint("not yet"),
        ):
            with pytest.raises(ReplayDivergedError) as caught:
                await wrong
            assert caught.value.code == Code.REPLAY_DIVERGED
            assert session.replaying == 3
        assert (await session.exec(counter("a"), **right)).replayed
        for other in (session.write_file("f", "y"), session.write_file("g", "x"), session.exec(counter("a"), **right)):
            with pytest.raises(ReplayDivergedError):
                await other
        await session.write_file("f", "x")
        assert [c.id for c in await session.list_checkpoints()] == [(await session.checkpoint()).id]
    assert counter.runs == ["a"]


async def test_places_inside_the_workspace_are_the_same_in_every_sandbox(repo: Repository, provider: LocalProvider) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        root = session.handle.workspace_root
        await session.write_file(f"{root}/inner/f", "x")
        await session.exec("pwd", cwd=f"{root}/inner")
        await session.checkpoint()
    async with await repo.resume("t") as session:
        root = session.handle.workspace_root
        await session.write_file(f"{root}/inner/f", "x")
        assert (await session.exec("pwd", cwd="inner")).replayed


async def test_a_program_that_differs_may_go_on_live(repo: Repository, provider: LocalProvider, counter: Counter) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await work(session, counter, "a", "b", "c", label="old")
    async with await repo.resume("t", replay="live") as session:
        assert await work(session, counter, "a", "other", "c", label="new") == [True, False, False]
        assert session.replaying == 0
        assert any("not replayed" in warning for warning in session.warnings)
    assert counter.runs == ["a", "b", "c", "other", "c"]
    async with await repo.resume("t") as session:  # what the program has left is no part of its past
        assert await work(session, counter, "a", "other", "c", label="new") == [True, True, True]
        assert session.replaying == 0


async def test_a_checkpoint_comes_back_in_its_place_and_may_be_passed_over(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await work(session, counter, "a", label="one")
        await work(session, counter, "b", label="two")
    one, two = await repo.list("t")
    async with await repo.resume("t") as session:
        await work(session, counter, "a")
        assert await session.checkpoint("one") == one
        await work(session, counter, "b")
        assert await session.checkpoint("two") == two
    async with await repo.resume("t") as session:
        assert await work(session, counter, "a", "b", "c") == [True, True, False]  # without a checkpoint between
        assert not any("not replayed" in warning for warning in session.warnings)
    assert await repo.list("t") == [one, two]


async def test_a_checkpoint_that_was_deleted_is_passed_over(repo: Repository, provider: LocalProvider, counter: Counter) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await work(session, counter, "a", label="one")
        await work(session, counter, "b", label="two")
        await work(session, counter, "c", label="three")
    one, two, _ = await repo.list("t")
    await repo.delete("t", two.id)
    async with await repo.resume("t") as session:
        await work(session, counter, "a")
        assert await session.checkpoint("one") == one
        await work(session, counter, "b")
        assert await session.checkpoint("two") == one
        assert any(two.id in warning and "deleted" in warning for warning in session.warnings)
        assert await work(session, counter, "c") == [True]


async def test_automatic_checkpoints_are_no_operations(repo: Repository, provider: LocalProvider, counter: Counter) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await work(session, counter, "a")
        async with session._lock:
            await session._checkpoint_locked(None, automatic=True)
        await work(session, counter, "b", label="b")
    async with await repo.resume("t") as session:
        assert session.replaying == 3
        assert await work(session, counter, "a", "b", label="b") == [True, True]


async def test_without_a_checkpoint_the_same_sandbox_is_replayed_to_its_present_state(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await work(session, counter, "a", "b")
    async with await repo.session(provider, thread_id="t", replay="strict") as session:
        assert await work(session, counter, "a", "b", "c") == [True, True, False]
    async with await repo.session(provider, thread_id="t") as session:
        assert session.replaying == 0
        assert await work(session, counter, "a") == [False]
        assert contents(session) == {"log": b"a\nb\nc\na\n"}
    assert counter.runs == ["a", "b", "c", "a"]


async def test_a_rewind_replays_what_led_to_the_checkpoint_it_copies(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await work(session, counter, "a", label="one")
        await work(session, counter, "b", label="two")
    await repo.rewind("t", (await repo.list("t"))[0].id)
    async with await repo.resume("t") as session:
        assert await work(session, counter, "a", label="one") == [True]
        assert await work(session, counter, "c") == [False]


async def test_a_plain_capture_replays_what_had_been_done_by_then(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await work(session, counter, "a", "b")
        await repo.capture(session.handle, thread_id="t", label="by hand")
        await work(session, counter, "c")
    async with await repo.resume("t", label="by hand") as session:
        assert await work(session, counter, "a", "b", "c") == [True, True, False]


async def test_where_nobody_knows_what_led_to_a_copy_it_is_resumed_without_a_replay(
    repo: Repository, provider: LocalProvider, counter: Counter, tmp_path: Path
) -> None:
    folder = tmp_path / "by hand"
    folder.mkdir()
    (folder / "f").write_text("x")
    source = await repo.capture(folder, thread_id="source")
    await repo.fork("source", to_thread_id="t")
    await repo.delete("source", source.id)
    with pytest.raises(SnapshotError, match="off"):
        await repo.resume("t", provider=provider)
    async with await repo.resume("t", provider=provider, replay="off") as session:
        assert contents(session) == {"f": b"x"}
        await work(session, counter, "a", label="a")
    async with await repo.resume("t") as session:
        assert await work(session, counter, "a", label="a") == [True]


async def test_forget_and_gc_leave_what_is_replayed(repo: Repository, provider: LocalProvider, counter: Counter) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        large = await session.exec(counter("large", "seq 100000"))
        for name in ("a", "b"):
            await work(session, counter, name, label=name)
    await repo.forget("t", keep_last=1, keep_labeled=False)
    await repo.gc(grace=0, repack="all")
    await repo.gc(grace=0)
    async with await repo.resume("t") as session:
        again = await session.exec(counter("large", "seq 100000"))
        assert (again.replayed, again.stdout) == (True, large.stdout)
        assert await work(session, counter, "a") == [True]
        assert await work(session, counter, "b") == [True]
    assert counter.runs == ["large", "a", "b"]


# ------------------------------------------------------------------------------------------------- outside of the roots


async def test_what_reaches_outside_is_run_again_in_a_new_sandbox(
    repo: Repository, provider: LocalProvider, counter: Counter, tmp_path: Path
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await session.exec(counter("inside"), outside=False)
        await session.exec(counter("outside", "echo $((1 + 1))"), outside=True)
        await session.write_file(str(tmp_path / "config"), "x")
        await work(session, counter, "unsaid", label="here")
    for _ in range(2):  # the second time it stands once in what is recorded, too
        (tmp_path / "config").unlink()
        before = len(counter.runs)
        async with await repo.resume("t") as session:
            assert any("unsaid" in warning and "inside" not in warning for warning in session.warnings)
            assert session.replaying == 5
            assert (await session.exec(counter("inside"), outside=False)).replayed
            again = await session.exec(counter("outside", "echo $((1 + 1))"), outside=True)
            assert (again.replayed, again.stdout) == (False, b"2\n")
            await session.write_file(str(tmp_path / "config"), "x")
            assert (tmp_path / "config").read_text() == "x"
            assert await work(session, counter, "unsaid", label="here") == [True]
            assert session.replaying == 0
            assert session.step == 4
            await work(session, counter, "more", label="here")
            await session.close()
        assert counter.runs[before:] == ["outside", "more"]
        # what "more" added is undone for the next round
        await repo.delete_head("t")


async def test_what_failed_when_it_was_run_again_can_be_tried_again(
    repo: Repository, provider: LocalProvider, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await session.exec(counter("outside"), outside=True)
        await work(session, counter, "a", label="here")
    async with await repo.resume("t") as session:
        with monkeypatch.context() as patch:
            patch.setattr(session.handle, "exec", lost)
            with pytest.raises(ProviderError):
                await session.exec(counter("outside"), outside=True)
        assert session.replaying == 3
        await session.exec(counter("outside"), outside=True)
        assert await work(session, counter, "a", label="here") == [True]
    assert counter.runs == ["outside", "a", "outside"]
    async with await repo.resume("t") as session:
        assert session.replaying == 3
        assert session.uncertain == ()


async def test_what_must_be_done_at_most_once_is_not_run_again_because_it_reaches_outside(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await session.exec(counter("pay"), outside=True, at_most_once=True)
        await session.checkpoint()
    async with await repo.resume("t") as session:
        assert (await session.exec(counter("pay"), outside=True, at_most_once=True)).replayed
        assert any("pay" in warning for warning in session.warnings)
    assert counter.runs == ["pay"]


async def test_another_outcome_of_what_was_run_again_is_told(repo: Repository, provider: LocalProvider, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    async with await repo.session(provider, thread_id="t") as session:
        await session.exec(f"test -e {flag}", outside=True)
        await session.checkpoint()
    flag.touch()
    async with await repo.resume("t") as session:
        assert (await session.exec(f"test -e {flag}", outside=True)).exit_code == 0
        assert any("ended with 0" in warning for warning in session.warnings)


async def test_the_same_sandbox_shows_what_was_done_outside(repo: Repository, provider: LocalProvider, counter: Counter) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await session.exec(counter("outside"), outside=True)
    async with await repo.session(provider, thread_id="t", replay="strict") as session:
        assert (await session.exec(counter("outside"), outside=True)).replayed
        assert session.warnings == []
    assert counter.runs == ["outside"]


async def test_without_a_replay_a_warning_says_what_is_not_run_again(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await session.exec(counter("outside"), outside=True)
        await session.checkpoint()
    async with await repo.resume("t", replay="off") as session:
        assert any("not run again" in warning and "outside" in warning for warning in session.warnings)


# ------------------------------------------------------------------------------------------------------- uncertainty


async def lost(*args: Any, **kwargs: Any) -> None:
    """Instead of a command: the sandbox cannot be reached."""
    raise ProviderError("The connection broke.", code=Code.SANDBOX_UNAVAILABLE, retryable=True)


async def interrupted(repo: Repository, provider: LocalProvider, command: str, **options: Any) -> None:
    """A session whose command began, and of which nobody knows whether it ended: its worker is gone."""
    session = await repo.session(provider, thread_id="t")
    session.handle.exec = lost  # type: ignore[method-assign,assignment]
    with pytest.raises(ProviderError):
        await session.exec(command, **options)
    await session.close()


@pytest.mark.parametrize("replay", ["off", "strict"])
async def test_an_operation_without_an_end_is_reported_and_run_again_only_when_allowed(
    repo: Repository, provider: LocalProvider, counter: Counter, replay: Any
) -> None:
    await interrupted(repo, provider, counter("x"))
    async with await repo.session(provider, thread_id="t", replay=replay) as session:
        (event,) = session.uncertain
        assert event.kind == EventKind.EXEC_STARTED
        with pytest.raises(ReplayDivergedError) as caught:
            await session.exec(counter("x"))
        assert caught.value.code == Code.OPERATION_UNCERTAIN
        assert counter.runs == []
        await session.exec(counter("something else"))
        await session.exec(counter("x"), rerun=True)
        assert session.uncertain == ()
        await session.exec(counter("x"))
    assert counter.runs == ["something", "else", "x", "x"]
    async with await repo.session(provider, thread_id="t") as session:
        assert session.uncertain == ()


async def test_all_uncertain_operations_may_be_allowed_but_not_those_to_be_done_at_most_once(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    await interrupted(repo, provider, counter("plain"))
    await interrupted(repo, provider, counter("once"), at_most_once=True)
    async with await repo.session(provider, thread_id="t", rerun_uncertain=True) as session:
        assert len(session.uncertain) == 2
        await session.exec(counter("plain"))
        with pytest.raises(ReplayDivergedError) as caught:
            await session.exec(counter("once"), at_most_once=True)
        assert caught.value.code == Code.OPERATION_UNCERTAIN
        await session.exec(counter("once"), at_most_once=True, rerun=True)
    assert counter.runs == ["plain", "once"]


async def test_what_was_done_at_most_once_on_an_abandoned_line_is_not_done_again(
    repo: Repository, provider: LocalProvider, counter: Counter
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await session.checkpoint("before")
        await session.exec(counter("pay"), at_most_once=True)
        await session.exec(counter("plain"))
        await session.checkpoint("after")
    async with await repo.resume("t", label="before", rerun_uncertain=True) as session:
        await session.exec(counter("plain"))
        with pytest.raises(ReplayDivergedError) as caught:
            await session.exec(counter("pay"), at_most_once=True)
        assert caught.value.code == Code.OPERATION_UNCERTAIN
    assert counter.runs == ["pay", "plain", "plain"]
    async with await repo.resume("t", label="after") as session:
        assert session.uncertain == ()
        await session.checkpoint("before")
        assert (await session.exec(counter("pay"), at_most_once=True)).replayed


async def test_in_the_session_that_saw_it_fail_an_operation_may_be_tried_again_unless_at_most_once(
    repo: Repository, provider: LocalProvider, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        handle = session.handle

        with monkeypatch.context() as patch:
            patch.setattr(handle, "exec", lost)
            for once in (False, True):
                with pytest.raises(ProviderError):
                    await session.exec(counter(f"once-{once}"), at_most_once=once)
        assert len(session.uncertain) == 2
        await session.exec(counter("once-False"))
        with pytest.raises(ReplayDivergedError):
            await session.exec(counter("once-True"), at_most_once=True)
    assert counter.runs == ["once-False"]


async def test_a_replay_survives_a_failure_to_read_what_is_recorded(
    repo: Repository, provider: LocalProvider, tmp_path: Path
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await session.exec("seq 100000")
        await session.checkpoint()
    async with await repo.resume("t") as session:
        packs = [path for path in (tmp_path / "repo").rglob("packs/**/*") if path.is_file()]
        for pack in packs:
            pack.rename(pack.with_suffix(".away"))
        with pytest.raises(SnapshotError) as caught:
            await session.exec("seq 100000")
        assert caught.value.code == Code.MISSING_BLOB
        assert session.replaying == 2
        for pack in packs:
            pack.with_suffix(".away").rename(pack)
        assert (await session.exec("seq 100000")).replayed


def test_the_mode_is_strict_for_a_resume_and_off_for_a_session(tmp_path: Path) -> None:
    provider = local(tmp_path)
    with snapcore.blocking.open_repository("memory://") as repo:
        with repo.session(provider, thread_id="t") as session:
            session.exec("echo 1")
            session.checkpoint()
        with repo.session(provider, thread_id="t") as session:
            assert session.replaying == 0
        with repo.resume("t") as session:
            assert session.replaying == 2


async def test_the_ledger_is_in_order_without_gaps(repo: Repository, provider: LocalProvider, counter: Counter) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await work(session, counter, "a", label="one")
    async with await repo.resume("t") as session:
        await work(session, counter, "a", label="one")
    events = await whole_ledger(repo, "t")
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [event.kind for event in events] == [
        "sandbox.created",
        "exec.started",
        "exec.completed",
        "sandbox.checkpoint_created",
        "sandbox.closed",
        "sandbox.resumed",
        "sandbox.closed",
    ]
    assert await repo.events("t", after=5) == events[5:]
