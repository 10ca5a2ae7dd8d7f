"""Rebuno's own `resource()`, policies and agents over snapcore's driver, with local sandboxes and a kernel of the tests' own."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rebuno

import snapcore
from snapcore.integrations.rebuno import RebunoSandbox, SandboxDriver, thread_of
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository

from .rebuno_kernel import RebunoKernel
from .rebuno_worker import AGENT, ended, run, run_fork, working

Process = Callable[[int], Awaitable[list[str]]]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[RebunoKernel]:
    with RebunoKernel(tmp_path) as kernel:
        yield kernel


@pytest.fixture
async def repo(tmp_path: Path) -> AsyncIterator[Repository]:
    async with snapcore.open_repository(tmp_path / "repository") as repo:
        yield repo


@pytest.fixture
def sandboxes(tmp_path: Path) -> Path:
    return tmp_path / "sandboxes"


@pytest.fixture
def driver(repo: Repository, sandboxes: Path) -> SandboxDriver:
    return SandboxDriver(repo, LocalProvider(sandboxes))


async def names(sandbox: RebunoSandbox) -> list[str]:
    """What lies in the sandbox."""
    result = await sandbox.exec("ls")
    return result.stdout.decode().split()


def writing(driver: Any, *, every_steps: int = 1, on_completion: bool = True) -> Process:
    """An agent that writes file1, file2, ... each in a step of its own, and says what lies in the sandbox then."""

    async def process(files: int) -> list[str]:
        policy = rebuno.CheckpointPolicy(every_steps, on_completion)
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=policy)

        async def write(number: int) -> int:
            await sandbox.upload(f"{sandbox.workspace_root}/file{number}", b"%d" % number)
            return number

        for number in range(1, files + 1):
            await rebuno.step("write", write, {"number": number}, resources=["workspace"])
        return await names(sandbox)

    return process


async def kept(repo: Repository, reference: str) -> list[str]:
    """The files of the checkpoint that a reference names."""
    _, _, checkpoint_id, thread_id = reference.split("/", 3)
    checkpoint = await repo.get(thread_id, checkpoint_id)
    assert checkpoint is not None
    return [entry.path.decode() async for entry in repo.ls(checkpoint) if entry.path]


async def test_checkpoints_come_at_the_start_after_every_second_step_and_at_the_end(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver
) -> None:
    execution = await run(kernel, writing(driver, every_steps=2), {"files": 3})
    assert kernel.executions[execution]["output"] == ["file1", "file2", "file3"]
    files = [await kept(repo, reference) for reference in kernel.references(execution)]
    assert files == [[], ["file1", "file2"], ["file1", "file2", "file3"]]
    history = await repo.list(thread_of(execution))
    assert [c.run_id for c in history] == [execution] * 3
    assert not kernel.events(execution, "resource.checkpoint_failed")


async def test_an_execution_that_waited_goes_on_in_its_sandbox(
    kernel: RebunoKernel, driver: SandboxDriver, sandboxes: Path
) -> None:
    kernel.hold.add("ask")

    async def process(files: int) -> list[str]:
        found = await writing(driver)(files)
        await rebuno.step("ask", lambda: None)
        return found

    async with working(kernel, process):
        execution = kernel.create(AGENT, {"files": 2})
        await ended(kernel, execution, "blocked")
        before = kernel.references(execution)
        kernel.approve(execution, "ask")
        assert (await ended(kernel, execution))["output"] == ["file1", "file2"]
    assert len(os.listdir(sandboxes)) == 1
    assert len(kernel.events(execution, "step.executing")) == 3
    assert kernel.references(execution)[: len(before)] == before


async def test_a_fork_starts_from_the_files_that_its_event_left_and_leaves_the_source_alone(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver
) -> None:
    source = await run(kernel, writing(driver), {"files": 3})
    second = kernel.events(source, "step.succeeded")[1]["event_seq"]

    async def process(files: int) -> list[str]:
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())
        return await names(sandbox)

    before = await repo.list(thread_of(source))
    fork = await run_fork(kernel, process, source, second)
    assert fork["output"] == ["file1", "file2"]
    root, *_ = await repo.list(thread_of(fork["id"]))
    assert (root.reason, root.source_thread_id, root.source_id) == ("fork-root", thread_of(source), before[2].id)
    assert await repo.list(thread_of(source)) == before


async def test_a_fork_between_checkpoints_starts_from_the_one_before_and_takes_its_own(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver
) -> None:
    source = await run(kernel, writing(driver, every_steps=2), {"files": 3})
    first = kernel.events(source, "step.succeeded")[0]["event_seq"]
    fork = await run_fork(kernel, writing(driver, every_steps=2), source, first)
    assert fork["output"] == ["file2", "file3"]  # of the first step only the result was copied
    _, *own = kernel.references(fork["id"])
    assert [await kept(repo, reference) for reference in own][0] == []
    assert all(reference.endswith(thread_of(fork["id"])) for reference in own)
