"""Rebuno's own `resource()`, policies and agents over snapcore's driver, with local sandboxes and a kernel of the tests' own."""

import asyncio
import os
from pathlib import Path

import pytest
import rebuno

import snapcore
from snapcore.integrations.rebuno import SandboxDriver, thread_of
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository
from snapcore.sandboxes import Hook, SandboxHandle, SandboxSpec

from .rebuno_kernel import RebunoKernel
from .rebuno_worker import AGENT, ended, kept, looking, names, run, run_fork, working, writing


@pytest.fixture
def sandboxes(tmp_path: Path) -> Path:
    return tmp_path / "sandboxes"


@pytest.fixture
def driver(repo: Repository, sandboxes: Path) -> SandboxDriver:
    return SandboxDriver(repo, LocalProvider(sandboxes))


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
    before = await repo.list(thread_of(source))
    fork = await run_fork(kernel, looking(driver), source, second)
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
    copied, baseline, *later = kernel.references(fork["id"])
    assert copied.endswith(thread_of(source))
    assert baseline.endswith(thread_of(fork["id"]))
    assert [await kept(repo, reference) for reference in (copied, baseline)] == [[], []]
    assert await kept(repo, later[-1]) == ["file2", "file3"]


async def test_a_later_turn_of_a_session_goes_on_in_the_sandbox_and_the_thread_of_the_one_before(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, sandboxes: Path
) -> None:
    first = await run(kernel, writing(driver), {"files": 1}, session="session")
    second = await run(kernel, writing(driver), {"files": 2}, session="session")
    assert kernel.executions[second]["output"] == ["file1", "file2"]
    assert kernel.resource(second)["binding"] == kernel.resource(first)["binding"]
    assert len(os.listdir(sandboxes)) == 1
    history = await repo.list(thread_of(first))
    assert {c.run_id for c in history} == {first, second}
    assert kernel.references(second)[0] == kernel.references(first)[-1]  # nothing had changed since
    assert not await repo.list(thread_of(second))


async def test_what_the_kernel_knows_is_json_without_secrets_and_checkpoints_have_none(
    kernel: RebunoKernel, repo: Repository, tmp_path: Path, sandboxes: Path
) -> None:
    secret = "correct horse battery"
    provider = LocalProvider(sandboxes)
    spec = SandboxSpec(environment={"TOKEN": secret})
    driver = SandboxDriver(repo, provider, spec=spec, secrets={"TOKEN": secret}, reinject=True)

    async def process(files: int) -> int:
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())

        async def write() -> int:
            return int((await sandbox.exec('printf "token: %s" "$TOKEN" > config')).exit_code)

        return int(await rebuno.step("write", write, resources=["workspace"]))

    source = await run(kernel, process, {"files": 0})
    fork = await run_fork(kernel, process, source)
    assert fork["status"] == "completed"
    assert sorted(path.read_text() for path in sandboxes.glob("*/config")) == [f"token: {secret}"] * 2  # the present value
    assert secret not in (tmp_path / "kernel.json").read_text()
    last = await repo.get(thread_of(source))
    assert last is not None
    assert await repo.read_file(last, b"config") == b"token: " + bytes(len(secret))


async def test_a_policy_that_is_code_is_used_by_the_restore_too(kernel: RebunoKernel, repo: Repository, sandboxes: Path) -> None:
    policy = snapcore.FilePolicy.with_exclude(lambda path, kind: path == "file2")
    driver = SandboxDriver(repo, LocalProvider(sandboxes), policy=policy)
    source = await run(kernel, writing(driver), {"files": 3})
    assert (await run_fork(kernel, looking(driver), source))["output"] == ["file1", "file3"]


async def test_what_a_replayed_step_installed_is_there_in_a_fork(kernel: RebunoKernel, driver: SandboxDriver) -> None:
    installed = ("node_modules/left-pad/index.js", ".venv/bin/tool", ".env")

    async def process(files: int) -> list[str]:
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())

        async def install() -> None:
            for name in installed:
                await sandbox.exec(["sh", "-c", 'mkdir -p "$(dirname "$0")" && touch "$0"', name])

        await rebuno.step("install", install, resources=["workspace"])
        found: str = (await sandbox.exec("find . -type f | sort")).stdout.decode()
        return found.split()

    source = await run(kernel, process, {"files": 0})
    assert kernel.executions[source]["output"] == ["./.env", "./.venv/bin/tool", "./node_modules/left-pad/index.js"]
    fork = await run_fork(kernel, process, source)
    assert fork["output"] == ["./.venv/bin/tool", "./node_modules/left-pad/index.js"]  # .env is left out, as ever


async def test_several_folders_are_one_state(kernel: RebunoKernel, repo: Repository, sandboxes: Path, tmp_path: Path) -> None:
    for name in ("code", "data"):
        (tmp_path / name).mkdir()
    roots = {name: str(tmp_path / name) for name in ("code", "data")}
    driver = SandboxDriver(repo, LocalProvider(sandboxes), roots=roots)
    (tmp_path / "data" / "table").write_text("rows")
    source = await run(kernel, looking(driver), {"files": 0})
    (tmp_path / "data" / "table").write_text("other rows")
    assert (await run_fork(kernel, looking(driver), source))["status"] == "completed"
    assert (tmp_path / "data" / "table").read_text() == "rows"


async def test_hooks_run_when_the_files_are_there_and_at_each_open(
    kernel: RebunoKernel, repo: Repository, sandboxes: Path
) -> None:
    seen: list[str] = []

    def hook(name: str) -> Hook:
        async def run_hook(sandbox: SandboxHandle) -> None:
            seen.append(f"{name} {len(os.listdir(sandbox.workspace_root))}")

        return run_hook

    driver = SandboxDriver(repo, LocalProvider(sandboxes), on_create=[hook("create")], on_open=[hook("open")])
    source = await run(kernel, writing(driver), {"files": 2}, session="session")
    await run(kernel, looking(driver), {"files": 0}, session="session")
    await run_fork(kernel, looking(driver), source)
    assert seen == ["create 0", "open 0", "open 2", "create 2", "open 2"]


async def test_a_sandbox_that_is_done_with_is_destroyed_by_its_binding_and_its_checkpoints_stay(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, sandboxes: Path
) -> None:
    source = await run(kernel, writing(driver), {"files": 1})
    await driver.destroy(kernel.resource(source)["binding"])
    assert os.listdir(sandboxes) == []
    assert (await run_fork(kernel, looking(driver), source))["output"] == ["file1"]


async def test_two_resources_have_threads_of_their_own_and_sandboxes_named_after_them(
    kernel: RebunoKernel, repo: Repository, sandboxes: Path
) -> None:
    def made(key: str) -> SandboxDriver:
        return SandboxDriver(
            repo, LocalProvider(sandboxes), key=key, spec=lambda thread_id: SandboxSpec(name=thread_id.replace("/", "-"))
        )

    async def process(files: int) -> None:
        for key in ("code", "data"):
            sandbox = await rebuno.resource(key, driver=made(key), checkpoints=rebuno.CheckpointPolicy())
            await sandbox.close()  # the connection; the last checkpoint opens its own
            await rebuno.step(key, Path(sandbox.workspace_root, key).touch, resources=[key])

    execution = await run(kernel, process, {"files": 0})
    for key in ("code", "data"):
        assert await kept(repo, kernel.references(execution, key)[-1]) == [key]
        assert [c.thread_id for c in await repo.list(thread_of(execution, key))] == [f"rebuno/{execution}/{key}"] * 2
    assert sorted(os.listdir(sandboxes)) == [f"rebuno-{execution}-code", f"rebuno-{execution}-data"]


async def test_an_execution_and_its_fork_go_on_beside_each_other(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, sandboxes: Path
) -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()
    sources: list[str] = []

    async def process(files: int) -> list[str]:
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())

        async def write(number: int) -> None:
            if number == 2 and rebuno.execution().id in sources:
                inside.set()
                await go_on.wait()
            await sandbox.upload(f"{sandbox.workspace_root}/{rebuno.execution().id}-{number}", b"x")

        for number in range(1, files + 1):
            await rebuno.step("write", write, {"number": number}, resources=["workspace"])
        return await names(sandbox)

    async with working(kernel, process):
        source = kernel.create(AGENT, {"files": 3})
        sources.append(source)
        await inside.wait()
        fork = kernel.fork(source)
        assert (await ended(kernel, fork))["output"] == [f"{source}-1", f"{fork}-2", f"{fork}-3"]
        go_on.set()
        assert (await ended(kernel, source))["output"] == [f"{source}-{number}" for number in (1, 2, 3)]
    for execution in (source, fork):
        assert not kernel.events(execution, "resource.checkpoint_failed")
        assert len(await kept(repo, kernel.references(execution)[-1])) == 3
    assert len(os.listdir(sandboxes)) == 2
