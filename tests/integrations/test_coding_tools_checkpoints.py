"""Checkpoints between the calls of coding tools: when they are made, what they hold, and that they never fail a call.

Case 28 for checkpoints: what the tools hide from a model is in no checkpoint either.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import SnapshotError
from snapcore.integrations.coding_tools import CodingTools
from snapcore.integrations.coding_tools_checkpoints import CheckpointReport
from snapcore.providers.local import LocalSandbox
from snapcore.repository import Repository

TOKEN = "token-0123456789abcdef"  # of no service


@pytest.fixture
async def repo(tmp_path: Path) -> AsyncIterator[Repository]:
    async with snapcore.open_repository(tmp_path / "repo") as opened:
        yield opened


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "start").write_text("start")
    return folder


async def held(repo: Repository, thread_id: str) -> list[tuple[int | None, list[str]]]:
    """(step, names of files) of each checkpoint."""
    found = []
    for checkpoint in await repo.list(thread_id):
        names = [os.fsdecode(entry.path) async for entry in repo.ls(checkpoint) if entry.path]
        found.append((checkpoint.step, names))
    return found


def outcomes(tools: CodingTools) -> list[tuple[str, str]]:
    return [(report.moment, report.outcome) for report in tools.reports]


async def test_a_baseline_then_every_few_changes_then_the_rest(repo: Repository, root: Path) -> None:
    told: list[CheckpointReport] = []
    async with CodingTools(LocalSandbox(root), repo, thread_id="t", every=2, on_checkpoint=told.append) as tools:
        assert not (await tools.list()).is_error
        assert not (await tools.read_file("start")).is_error
        assert await repo.list("t") == []
        first = await tools.write_file("a", "1")
        second = await tools.exec("echo 2 > b")
        assert (await tools.edit("a", "1", "3")).value.get("checkpoint") is None
    every = await repo.list("t")
    assert await held(repo, "t") == [(0, ["start"]), (2, ["a", "b", "start"]), (3, ["a", "b", "start"])]
    assert first.value["checkpoint"] == {"outcome": "saved", "id": every[0].id}
    assert second.value["checkpoint"] == {"outcome": "saved", "id": every[1].id}
    assert await repo.read_file(every[-1], b"a") == b"3"
    assert outcomes(tools) == [("baseline", "saved"), ("step", "saved"), ("end", "saved")]
    assert tuple(told) == tools.reports


async def test_what_only_looks_makes_no_checkpoint(repo: Repository, root: Path) -> None:
    async with CodingTools(LocalSandbox(root), repo, thread_id="t", every=1) as tools:
        await tools.list()
        await tools.read_file("start")
        await tools.read_file("missing")
    assert await repo.list("t") == []
    assert tools.reports == ()


async def test_an_unchanged_sandbox_makes_no_second_checkpoint(repo: Repository, root: Path) -> None:
    async with CodingTools(LocalSandbox(root), repo, thread_id="t", every=1) as tools:
        await tools.exec("true")
        await tools.exec("ls")
    assert len(await repo.list("t")) == 1
    assert outcomes(tools) == [("baseline", "saved"), ("step", "unchanged"), ("step", "unchanged")]


async def test_a_call_that_failed_may_have_changed_something(repo: Repository, root: Path) -> None:
    async with CodingTools(LocalSandbox(root), repo, thread_id="t") as tools:
        assert (await tools.exec("echo half > a; sleep 1000", timeout_seconds=1)).is_error
    assert await held(repo, "t") == [(0, ["start"]), (1, ["a", "start"])]


async def test_parts_can_be_turned_off(repo: Repository, root: Path) -> None:
    async with CodingTools(LocalSandbox(root), repo, thread_id="t", every=2, baseline=False, at_end=False) as tools:
        for name in "abc":
            await tools.write_file(name, name)
    assert await held(repo, "t") == [(2, ["a", "b", "start"])]
    async with CodingTools(LocalSandbox(root)) as tools:
        assert "checkpoint" not in (await tools.write_file("d", "d")).value
    with pytest.raises(SnapshotError):
        CodingTools(LocalSandbox(root), repo, thread_id="t", every=0)


async def test_a_capture_that_fails_fails_no_call_and_is_told(repo: Repository, root: Path) -> None:
    os.mkfifo(root / "pipe")
    async with CodingTools(LocalSandbox(root), repo, thread_id="t", every=1) as tools:
        result = await tools.write_file("a", "1")
        assert not result.is_error
        assert result.value["checkpoint"]["outcome"] == "failed"
        assert result.value["checkpoint"]["code"] == "UNSUPPORTED_ENTRY"
        (root / "pipe").unlink()
        assert (await tools.write_file("b", "2")).value["checkpoint"]["outcome"] == "saved"
    assert outcomes(tools) == [("baseline", "failed"), ("step", "failed"), ("step", "saved")]


async def test_an_option_that_breaks_a_capture_fails_no_call(repo: Repository, root: Path) -> None:
    def broken(path: str, kind: str) -> bool:
        raise ValueError(path)

    options: list[dict[str, Any]] = [{"policy": snapcore.FilePolicy(exclude=broken)}, {"no_such_option": 1}]
    for capture in options:
        tools = CodingTools(LocalSandbox(root), repo, thread_id="t", every=1, capture=capture)
        result = await tools.write_file("a", "1")
        assert not result.is_error
        assert result.value["checkpoint"]["outcome"] == "failed"


async def test_who_is_told_and_fails_fails_no_call(repo: Repository, root: Path) -> None:
    """Such as a terminal that was closed."""
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["exception"]))

    def told(report: CheckpointReport) -> None:
        raise BrokenPipeError

    async with CodingTools(LocalSandbox(root), repo, thread_id="t", every=1, on_checkpoint=told) as tools:
        assert not (await tools.write_file("a", "1")).is_error
    assert outcomes(tools) == [("baseline", "saved"), ("step", "saved")]
    assert [type(failure) for failure in failures] == [BrokenPipeError] * 2


async def test_steps_are_counted_on_by_whoever_goes_on_with_a_thread(repo: Repository, root: Path) -> None:
    """Such as after a crash: a step names one state of the thread."""
    for names in ("abc", "def"):
        async with CodingTools(LocalSandbox(root), repo, thread_id="t", every=2) as tools:
            for name in names:
                await tools.write_file(name, name)
        await repo.capture(str(root), thread_id="t", label="by hand")
    assert [step for step, _ in await held(repo, "t")] == [0, 2, 3, None, 5, 6, None]
    assert [report.step for report in tools.reports] == [3, 5, 6]
    fork = await repo.fork("t", to_thread_id="u", at_step=3)
    assert [os.fsdecode(entry.path) async for entry in repo.ls(fork) if entry.path] == ["a", "b", "c", "start"]


async def test_a_thread_that_another_writer_holds_is_passed_over(repo: Repository, root: Path) -> None:
    grant = await repo.checkpoints.acquire_writer("t", ttl=600)
    async with CodingTools(LocalSandbox(root), repo, thread_id="t", every=1) as tools:
        result = await tools.write_file("a", "1")
        assert result.value["checkpoint"] == {
            "outcome": "skipped",
            "code": "WRITER_HELD",
            "message": "Another writer holds the thread.",
        }
        await repo.checkpoints.release_writer(grant.lease)
    assert outcomes(tools) == [("baseline", "skipped"), ("step", "skipped"), ("end", "saved")]
    assert await held(repo, "t") == [(1, ["a", "start"])]


async def test_secrets_are_in_no_checkpoint(repo: Repository, root: Path) -> None:
    """Case 28."""
    async with CodingTools(LocalSandbox(root), repo, thread_id="t", secrets={"TOKEN": TOKEN}) as tools:
        await tools.write_file("config", f"key={TOKEN}\n")
    checkpoint = await repo.get("t")
    assert checkpoint is not None
    assert await repo.read_file(checkpoint, b"config") == b"key=" + b"\0" * len(TOKEN) + b"\n"
    assert (root / "config").read_text() == f"key={TOKEN}\n"


async def test_a_call_that_is_cancelled_ends_its_command_and_leaves_no_lease(
    repo: Repository, root: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "begun")
    tools = CodingTools(LocalSandbox(root), repo, thread_id="t", every=1)
    running = asyncio.create_task(tools.exec(f"echo $$ > {tmp_path}/begun; exec sleep 1000"))
    process = int(await asyncio.to_thread((tmp_path / "begun").read_text))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert (await tools.write_file("a", "1")).value["checkpoint"]["outcome"] == "saved"


async def leave(tools: CodingTools, error: BaseException) -> None:
    async with tools:
        await tools.write_file("a", type(error).__name__)
        raise error


async def test_whoever_is_cancelled_makes_no_last_checkpoint(repo: Repository, root: Path) -> None:
    tools = CodingTools(LocalSandbox(root), repo, thread_id="t")
    with pytest.raises(asyncio.CancelledError):
        await leave(tools, asyncio.CancelledError())
    assert outcomes(tools) == [("baseline", "saved")]
    with pytest.raises(KeyError):
        await leave(tools, KeyError())
    assert outcomes(tools) == [("baseline", "saved"), ("end", "saved")]
