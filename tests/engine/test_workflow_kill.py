"""A workflow whose process is killed, anywhere: the next run completes it, and does no step more often than the rules say."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

import snapcore
from snapcore.errors import Code, ReplayDivergedError
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository
from snapcore.testing import Faults
from snapcore.workflows import Workflow, WorkflowResult

from .crash_helpers import faulty, run_forked
from .session_helpers import Counter

KILLED = 9
ONCE = 4  # the number of the step that is to be run at most once


def declared(base: Path, count: Counter) -> Workflow:
    return (
        snapcore.workflow("t")
        .sandbox(LocalProvider(base / "sandboxes"))
        .exec(count("1", "echo 1 >> a"))
        .checkpoint("one")
        .exec(count("2", "echo 2 >> a"))
        .exec(count("once", "echo once >> a"), at_most_once=True)
        .checkpoint("two")
        .exec(count("3", "echo 3 >> a"))
    )


def killed_at(base: Path, call: int) -> bool:
    """Run the workflow in a process that is gone right after its call of that number to a store; whether it came so far."""
    faults = Faults()
    faults.crash("*", call, exit_code=KILLED)

    async def job() -> None:
        async with faulty(base / "repo", faults) as repo:
            await declared(base, Counter(base / "counted")).run(repo)

    ended = run_forked(job)
    assert ended in (0, KILLED)
    return ended == KILLED


async def completed(repo: Repository, base: Path) -> list[str]:
    """Run the workflow to its end as its owner would, and return what was to be run again by the rules."""
    count = Counter(base / "counted")
    flow = declared(base, count)
    labels = [checkpoint.label for checkpoint in await repo.list("t")]
    after = labels.index(labels[-1]) if labels else -1  # 0 after the checkpoint "one", 1 after "two"
    expected = [["1", "2", "once", "3"], ["2", "once", "3"], ["3"]][after + 1]
    try:
        result = await flow.run(repo)
    except ReplayDivergedError as refusal:
        assert refusal.code == Code.OPERATION_UNCERTAIN  # noqa: PT017 (whether it is refused depends on where it was killed)
        assert count.runs.count("once") <= 1
        assert "two" not in labels
        # the run went up to that step, and may have made the first checkpoint
        expected = [*expected[: expected.index("once")], *["2", "once", "3"]]
        result = await flow.run(repo, rerun=[ONCE])
    whole(result)
    return expected


def whole(result: WorkflowResult) -> None:
    assert (Path(result.binding.workspace_root) / "a").read_text() == "1\n2\nonce\n3\n"


def test_a_process_that_is_gone_after_a_call_to_a_store(tmp_path: Path) -> None:
    start = tmp_path / "start"

    async def make() -> None:
        await (await snapcore.open_repository(start / "repo")).close()

    assert run_forked(make) == 0
    refused = 0
    for call in range(1, 500, 3):  # each would take minutes
        base = tmp_path / f"{call}"
        shutil.copytree(start, base)
        count = Counter(base / "counted")
        if not killed_at(base, call):
            break
        before = count.runs
        assert before == ["1", "2", "once", "3"][: len(before)]

        async def job(base: Path = base, count: Counter = count, before: list[str] = before) -> None:
            async with snapcore.open_repository(base / "repo") as repo:
                expected = await completed(repo, base)
                assert count.runs[len(before) :] == expected
                assert (await repo.verify(read_data=True)).ok

        assert run_forked(job) == 0, f"killed after call {call}"
        refused += count.runs.count("once") > 1 or count.runs.count("2") > 2
        shutil.rmtree(base)
    assert call > 30
    assert refused > 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_is_killed_while_a_step_runs(tmp_path: Path, times: int) -> None:
    """Once, and once more in the run that goes on."""
    count = Counter(tmp_path / "counted")
    gate = tmp_path / "gate"

    def flow() -> Workflow:
        waiting = f"echo begun; until [ -e {gate} ]; do sleep 0.05; done; echo 2 >> a"
        return (
            snapcore.workflow("t")
            .sandbox(LocalProvider(tmp_path / "sandboxes"))
            .exec(count("1", "echo 1 >> a"))
            .checkpoint("one")
            .exec(count("2", waiting))
        )

    async def dies() -> None:
        async with snapcore.open_repository(tmp_path / "repo") as repo:
            await flow().run(repo, on_output=lambda stream, piece: os.kill(os.getpid(), signal.SIGKILL))

    for _ in range(times):
        assert run_forked(dies) == -signal.SIGKILL
    gate.touch()  # what was started lives on, and ends now

    async def main() -> WorkflowResult:
        async with snapcore.open_repository(tmp_path / "repo") as repo:
            return await flow().run(repo)

    result = asyncio.run(main())
    assert [step.state for step in result.steps] == ["replayed", "replayed", "done"]
    assert (Path(result.binding.workspace_root) / "a").read_text() == "1\n2\n"
    assert count.runs == ["1", *["2"] * (times + 1)]
