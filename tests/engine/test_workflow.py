"""Workflows: steps that are declared once, and run from where the run before came to. Case 7's kind: a fresh process finds what
the one before had done."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.autocheckpoint import AutoCheckpoint
from snapcore.errors import Code, ReplayDivergedError, SnapshotError, StepFailedError
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository
from snapcore.sandboxes import Binding, SandboxSpec
from snapcore.workflows import StepResult, Workflow, WorkflowResult

from .session_helpers import Counter


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return LocalProvider(tmp_path / "sandboxes")


@pytest.fixture
def count(tmp_path: Path) -> Counter:
    return Counter(tmp_path / "counted")


@pytest.fixture
def base(provider: LocalProvider) -> Workflow:
    return snapcore.workflow("t").sandbox(provider)


def states(result: WorkflowResult) -> list[str]:
    return [step.state for step in result.steps]


def files(result: WorkflowResult) -> dict[str, bytes]:
    root = Path(result.binding.workspace_root)
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


# ---- running


async def test_steps_are_taken_in_order_and_told_as_they_come(memory_repo: Repository, base: Workflow) -> None:
    told: list[tuple[int, str]] = []
    wrote: list[tuple[str, bytes]] = []
    flow = (
        base.exec("echo one > a; echo said; echo wrong >&2")
        .write_file("sub/b", "two")
        .checkpoint("there")
        .exec(["sh", "-c", "cat a sub/b; exit 3"], allow=(0, 3))
    )
    result = await flow.run(
        memory_repo,
        on_output=lambda stream, piece: wrote.append((stream, piece)),
        on_step=lambda step: told.append((step.number, step.state)),
    )
    assert told == [(number, state) for number in range(1, 5) for state in ("started", "done")]
    assert sorted(wrote[:2]) == [("stderr", b"wrong\n"), ("stdout", b"said\n")]
    assert [(step.kind, step.about, step.exit_code) for step in result.steps] == [
        ("exec", "exec echo one > a; echo said; echo wrong >&2", 0),
        ("write", "write sub/b", None),
        ("checkpoint", "checkpoint there", None),
        ("exec", "exec cat a sub/b; exit 3", 3),
    ]
    assert (result.steps[0].stdout, result.steps[0].stderr) == (b"said\n", b"wrong\n")
    assert result.steps[2].checkpoint == await memory_repo.get("t", label="there")
    assert result.steps[3].stdout == b"one\ntwo"
    assert files(result) == {"a": b"one\n", "sub/b": b"two"}
    assert (result.thread_id, result.started_from, result.covered) == ("t", None, 0)
    assert result.reason == "the thread has no checkpoint"


async def test_a_workflow_is_never_changed_by_what_is_built_on_it(memory_repo: Repository, base: Workflow) -> None:
    stem = base.exec("echo stem >> a").checkpoint("stem")
    left, right = stem.exec("echo left >> a"), stem.exec("echo right >> a")
    assert len(stem._steps) == 2
    assert files(await left.run(memory_repo, thread_id="l")) == {"a": b"stem\nleft\n"}
    assert files(await right.run(memory_repo, thread_id="r")) == {"a": b"stem\nright\n"}
    with pytest.raises(AttributeError):
        stem.thread_id = "other"  # type: ignore[misc]


async def test_a_second_run_goes_on_from_the_last_checkpoint(memory_repo: Repository, base: Workflow, count: Counter) -> None:
    """In a new sandbox, also in another process later; what came after the checkpoint is done again."""
    flow = (
        base.exec(count("1", "echo 1 >> a"))
        .checkpoint("one")
        .exec(count("2", "echo 2 >> a"))
        .checkpoint("two")
        .exec(count("3", "echo 3 >> a"))
    )
    first = await flow.run(memory_repo)
    told: list[StepResult] = []
    second = await flow.run(memory_repo, on_step=told.append)
    assert count.runs == ["1", "2", "3", "3"]
    assert states(second) == ["replayed"] * 4 + ["done"]
    assert second.started_from == await memory_repo.get("t", label="two")
    assert (second.covered, second.reason) == (4, "4 of 5 steps are done and unchanged")
    assert files(second) == files(first) == {"a": b"1\n2\n3\n"}
    assert second.binding != first.binding
    assert second.steps[0].stdout == first.steps[0].stdout
    assert len([step for step in told if step.state == "started"]) == 5
    assert len(await memory_repo.list("t")) == 2


async def test_a_workflow_that_ended_with_a_checkpoint_has_nothing_left_to_do(
    memory_repo: Repository, base: Workflow, count: Counter
) -> None:
    flow = base.exec(count("1", "echo 1 >> a")).checkpoint("end")
    await flow.run(memory_repo)
    for _ in range(3):
        again = await flow.run(memory_repo)
        assert states(again) == ["replayed", "replayed"]
        assert files(again) == {"a": b"1\n"}
    assert count.runs == ["1"]


async def test_steps_may_be_added_at_the_end(memory_repo: Repository, base: Workflow, count: Counter) -> None:
    flow = base.exec(count("1", "echo 1 >> a")).checkpoint("one")
    await flow.run(memory_repo)
    longer = flow.exec(count("2", "echo 2 >> a")).checkpoint("two")
    result = await longer.run(memory_repo)
    assert states(result) == ["replayed", "replayed", "done", "done"]
    assert count.runs == ["1", "2"]
    assert files(result) == {"a": b"1\n2\n"}


async def test_its_thread_is_like_any_other(memory_repo: Repository, base: Workflow, tmp_path: Path) -> None:
    """A resume that names no provider takes that of the workflow."""
    await base.exec("echo 1 > a").checkpoint("one").run(memory_repo)
    async with await memory_repo.resume("t", label="one") as session:
        assert (await session.exec("echo 1 > a")).replayed
        assert Path(session.binding.workspace_root).parent == tmp_path / "sandboxes"


# ---- changed steps


async def test_a_changed_step_goes_back_to_the_newest_checkpoint_before_it(
    memory_repo: Repository, base: Workflow, count: Counter
) -> None:
    stem = base.exec(count("1", "echo 1 >> a")).checkpoint("one")
    await stem.exec(count("2", "echo 2 >> a")).checkpoint("two").exec(count("3")).run(memory_repo)
    changed = stem.exec(count("2b", "echo 2b >> a")).checkpoint("two").exec(count("3"))
    result = await changed.run(memory_repo)
    assert count.runs == ["1", "2", "3", "2b", "3"]
    assert (result.covered, result.reason) == (2, "step 3 is not the one that was run")
    assert states(result) == ["replayed", "replayed", "done", "done", "done"]
    assert files(result) == {"a": b"1\n2b\n"}
    # and from then on, the changed one is what was done
    again = await changed.run(memory_repo)
    assert (again.covered, count.runs) == (4, ["1", "2", "3", "2b", "3", "3"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda flow: flow.exec("true other").exec("echo 1 >> a").checkpoint("one"), "step 1 is not the one that was run"),
        (lambda flow: flow.exec("echo 1 >> a", cwd=".").checkpoint("one"), "step 1 is not the one that was run"),
        (lambda flow: flow.exec("echo 1 >> a", stdin=b"x").checkpoint("one"), "step 1 is not the one that was run"),
        (lambda flow: flow.exec("echo 1 >> a", environment={"A": "b"}).checkpoint("one"), "step 1 is not the one that was run"),
        (lambda flow: flow.write_file("a", "1\n").checkpoint("one"), "step 1 is not the one that was run"),
        (lambda flow: flow, "steps were removed"),
    ],
)
async def test_a_change_before_the_first_checkpoint_starts_from_scratch(
    memory_repo: Repository, base: Workflow, change: Callable[[Workflow], Workflow], reason: str
) -> None:
    """In a new sandbox, which has nothing of the one before."""
    await base.exec("echo 1 >> a").checkpoint("one").run(memory_repo)
    result = await change(base).run(memory_repo)
    assert (result.started_from, result.covered, result.reason) == (None, 0, reason)
    assert "replayed" not in states(result)
    assert files(result).get("a", b"1\n") == b"1\n"


async def test_the_value_of_a_variable_and_a_secret_do_not_tell_steps_apart(
    memory_repo: Repository, base: Workflow, count: Counter
) -> None:
    """As in any replay: a token that was rotated is the same operation."""

    def flow(token: str) -> Workflow:
        command = count("1", f": {token}")
        return base.exec(command, environment={"VALUE": token}, stdin=token.encode()).write_file("b", token).checkpoint("one")

    await flow("hunter-22").run(memory_repo, secrets={"TOKEN": "hunter-22"})
    result = await flow("rotated-33").run(memory_repo, secrets={"TOKEN": "rotated-33"})
    assert states(result) == ["replayed"] * 3
    assert "hunter" not in repr(result)
    assert "hunter" not in repr(flow("hunter-22"))
    assert count.runs == ["1"]


async def test_a_sandbox_that_is_declared_otherwise_starts_from_scratch(
    memory_repo: Repository, provider: LocalProvider, tmp_path: Path, count: Counter
) -> None:
    def flow(spec: SandboxSpec) -> Workflow:
        return snapcore.workflow("t").sandbox(provider, spec=spec).exec(count("1", "echo 1 >> a")).checkpoint("one")

    await flow(SandboxSpec(environment={"A": "1"})).run(memory_repo)
    same = await flow(SandboxSpec(environment={"A": "2"})).run(memory_repo)
    other = await flow(SandboxSpec(environment={"B": "2"})).run(memory_repo)
    assert (same.covered, other.covered) == (2, 0)
    assert other.reason == "the sandbox was declared otherwise"
    assert files(other) == {"a": b"1\n"}
    assert count.runs == ["1", "1"]


async def test_a_named_sandbox_is_made_anew_under_another_name(memory_repo: Repository, provider: LocalProvider) -> None:
    flow = snapcore.workflow("t").sandbox(provider, spec=SandboxSpec(name="mine")).exec("echo 1 > a").checkpoint("one")
    first = await flow.run(memory_repo)
    second = await flow.run(memory_repo)
    assert first.binding.workspace_root.endswith("/mine")
    assert second.binding.workspace_root != first.binding.workspace_root


async def test_checkpoints_of_the_workflow_itself_may_come_and_go(
    memory_repo: Repository, base: Workflow, count: Counter
) -> None:
    one, two = count("1", "echo 1 >> a"), count("2", "echo 2 >> a")
    await base.exec(one).checkpoint("one").exec(two).checkpoint("two").run(memory_repo)
    fewer = await base.exec(one).exec(two).checkpoint("two").run(memory_repo)
    assert (fewer.covered, count.runs) == (3, ["1", "2"])
    await memory_repo.delete_head("t")
    kept = await base.exec(one).checkpoint("one").exec(two).checkpoint("two").run(memory_repo)
    assert kept.started_from is not None
    assert (kept.started_from.label, count.runs) == ("one", ["1", "2", "2"])


async def test_a_run_begins_with_a_checkpoint_that_was_made_by_hand(
    memory_repo: Repository, base: Workflow, tmp_path: Path
) -> None:
    """A thread that was captured or forked before has files to begin with."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "given").write_bytes(b"x")
    await memory_repo.capture(work, thread_id="t")
    result = await base.exec("cat given > a").checkpoint("one").run(memory_repo)
    assert result.started_from is not None
    assert files(result) == {"a": b"x", "given": b"x"}


# ---- failing steps


async def test_a_failing_step_is_an_error_and_the_next_run_goes_on(
    memory_repo: Repository, base: Workflow, count: Counter, tmp_path: Path
) -> None:
    flow = (
        base.exec(count("1", "echo 1 >> a"))
        .checkpoint("one")
        .exec(count("2", f"echo 2 >> a; echo why >&2; test -e {tmp_path}/mended"))
        .exec(count("3", "echo 3 >> a"))
        .checkpoint("end")
    )
    told: list[str] = []
    with pytest.raises(StepFailedError) as caught:
        await flow.run(memory_repo, on_step=lambda step: told.append(step.state))
    error = caught.value
    assert (error.code, error.step, error.exit_code, error.stderr) == (Code.STEP_FAILED, 3, 1, b"why\n")
    assert "Step 3" in str(error)
    assert "exit code 1" in str(error)
    assert told == ["started", "done", "started", "done", "started", "failed"]
    (tmp_path / "mended").touch()
    result = await flow.run(memory_repo)
    assert states(result) == ["replayed", "replayed", "done", "done", "done"]
    assert count.runs == ["1", "2", "2", "3"]
    assert files(result) == {"a": b"1\n2\n3\n"}


async def test_a_checkpoint_after_a_failed_step_is_not_a_good_one(
    memory_repo: Repository, provider: LocalProvider, count: Counter, tmp_path: Path
) -> None:
    """An automatic one as the run ends holds what the failed step left behind."""
    base = snapcore.workflow("t").sandbox(provider, auto=AutoCheckpoint(every_steps=1))
    flow = base.exec(count("1", "echo 1 >> a")).exec(count("2", f"echo 2 >> a; test -e {tmp_path}/mended"))
    with pytest.raises(StepFailedError):
        await flow.run(memory_repo)
    assert await memory_repo.read_file((await memory_repo.list("t"))[-1], b"a") == b"1\n2\n"
    (tmp_path / "mended").touch()
    result = await flow.run(memory_repo)
    assert (result.covered, result.reason) == (1, "step 2 failed")
    assert files(result) == {"a": b"1\n2\n"}
    assert count.runs == ["1", "2", "2"]


async def test_automatic_checkpoints_count_as_well(memory_repo: Repository, provider: LocalProvider, count: Counter) -> None:
    flow = snapcore.workflow("t").sandbox(provider, auto=AutoCheckpoint(every_steps=1)).exec(count("1")).exec(count("2"))
    first = await flow.run(memory_repo)
    second = await flow.run(memory_repo)
    assert (first.failures, second.covered, count.runs) == ((), 2, ["1", "2"])


async def test_no_secret_is_in_the_error(memory_repo: Repository, base: Workflow) -> None:
    flow = base.exec("echo hunter-22 >&2; exit 4")
    with pytest.raises(StepFailedError) as caught:
        await flow.run(memory_repo, secrets={"TOKEN": "hunter-22"})
    assert caught.value.stderr == b"{secret:TOKEN}\n"
    assert "hunter" not in f"{caught.value}{caught.value.__notes__ if hasattr(caught.value, '__notes__') else ''}"


@pytest.mark.parametrize("fails", [False, True])
async def test_the_sandbox_is_destroyed_when_that_is_asked_for(memory_repo: Repository, base: Workflow, fails: bool) -> None:
    bindings: list[Binding] = []

    async def note(handle: Any) -> None:
        bindings.append(handle.binding)

    flow = base.exec(f"exit {int(fails)}")
    if fails:
        with pytest.raises(StepFailedError):
            await flow.run(memory_repo, destroy=True, on_open=[note])
    else:
        await flow.run(memory_repo, destroy=True, on_open=[note])
    (binding,) = bindings
    assert not Path(binding.workspace_root).exists()


# ---- what may not be done twice


async def test_a_step_to_be_run_at_most_once_is_not_run_again_unasked(
    memory_repo: Repository, base: Workflow, count: Counter
) -> None:
    flow = base.exec(count("1")).checkpoint("one").exec(count("once"), at_most_once=True).exec("exit 1")
    with pytest.raises(StepFailedError):
        await flow.run(memory_repo)
    with pytest.raises(ReplayDivergedError) as caught:
        await flow.run(memory_repo)
    assert caught.value.code == Code.OPERATION_UNCERTAIN
    assert any("step 3" in note for note in caught.value.__notes__)
    assert count.runs == ["1", "once"]
    with pytest.raises(StepFailedError):
        await flow.run(memory_repo, rerun=[3])
    assert count.runs == ["1", "once", "once"]


async def test_a_cancelled_run_is_gone_on_with(memory_repo: Repository, base: Workflow, count: Counter, tmp_path: Path) -> None:
    flow = base.exec(count("1")).checkpoint("one").exec(count("2", f"echo; test -e {tmp_path}/go || sleep 600"))
    begun = asyncio.Event()
    running = asyncio.create_task(flow.run(memory_repo, on_output=lambda stream, piece: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (tmp_path / "go").touch()
    result = await flow.run(memory_repo)
    assert states(result) == ["replayed", "replayed", "done"]
    assert count.runs == ["1", "2", "2"]


# ---- what cannot be


async def test_what_makes_no_sense_is_refused(memory_repo: Repository, base: Workflow) -> None:
    cases: list[Callable[[], Any]] = [
        lambda: base.exec(""),
        lambda: base.exec(["a\0b"]),
        lambda: base.exec("true", environment={"no name": "x"}),
        lambda: base.checkpoint("two\nlines"),
        lambda: base.sandbox(LocalProvider(), replay="off"),
        lambda: base.sandbox(LocalProvider(), rerun_uncertain=True),
    ]
    for case in cases:
        with pytest.raises(SnapshotError):
            case()
    with pytest.raises(SnapshotError) as caught:
        await snapcore.workflow().exec("true").run(memory_repo)
    assert "sandbox" in str(caught.value)
    with pytest.raises(SnapshotError):
        await base.run(memory_repo, replay="live")
    assert await memory_repo.events("t") == []


async def test_a_workflow_without_steps_makes_a_sandbox(memory_repo: Repository, base: Workflow) -> None:
    result = await base.run(memory_repo)
    assert (result.steps, files(result)) == ((), {})
