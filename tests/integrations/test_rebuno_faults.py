"""What becomes of sandboxes and checkpoints of Rebuno executions when workers, answers, kernels and blobs are lost.

Case 7: a process that knows nothing but what the kernel recorded finds sandbox and checkpoints.
"""

import asyncio
import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import rebuno

import snapcore
from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.integrations.rebuno import SandboxDriver, thread_of
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository
from snapcore.sandboxes import SandboxHandle, SandboxSpec

from .rebuno_kernel import Fault, RebunoKernel
from .rebuno_kernel_rules import ENDED
from .rebuno_worker import AGENT, SECRET, ended, kept, looking, names, run, run_fork, working, writing

OUTCOME = r"executions/[^/]+/(complete|fail)$"


@pytest.fixture
def sandboxes(tmp_path: Path) -> Path:
    return tmp_path / "sandboxes"


@pytest.fixture
def driver(repo: Repository, sandboxes: Path) -> SandboxDriver:
    return SandboxDriver(repo, LocalProvider(sandboxes))


@pytest.mark.parametrize("kind", ["lost", "unanswered"])
@pytest.mark.parametrize(
    "request_", ["resources$", "binding$", "resources/checkpoints$", "steps$", r"steps/\w+/complete$", OUTCOME]
)
async def test_a_request_that_is_cut_off_costs_no_file_and_no_checkpoint(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, sandboxes: Path, request_: str, kind: str
) -> None:
    kernel.faults = [Fault(request_, kind)]
    if request_ != OUTCOME:
        kernel.faults.append(Fault(OUTCOME, "lost"))  # nor can the worker say that it failed
    async with working(kernel, writing(driver)) as worker:
        execution = kernel.create(AGENT, {"files": 2})
        await asyncio.to_thread(kernel.until, lambda: not kernel.faults)
        await worker.agent.join()
        if kernel.executions[execution]["status"] not in ENDED:
            kernel.redispatch(execution)
        await ended(kernel, execution)
    done = kernel.executions[execution]
    assert (done["status"], done["output"]) == ("completed", ["file1", "file2"])
    assert await kept(repo, kernel.references(execution)[-1]) == ["file1", "file2"]
    binding = kernel.resource(execution)["binding"]
    assert await names(await driver.open(binding)) == ["file1", "file2"]
    # of a sandbox whose binding never arrived nobody knows
    assert len(os.listdir(sandboxes)) == (2 if (request_, kind) == ("binding$", "lost") else 1)


async def test_a_capture_that_is_asked_for_again_gives_the_same_reference(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver
) -> None:
    kernel.faults = [Fault("resources/checkpoints$", "lost"), Fault(OUTCOME, "lost")]
    async with working(kernel, looking(driver)) as worker:
        execution = kernel.create(AGENT, {"files": 0})
        await asyncio.to_thread(kernel.until, lambda: not kernel.faults)
        await worker.agent.join()
        (first,) = await repo.list(thread_of(execution))
        kernel.redispatch(execution)
        await ended(kernel, execution)
    assert kernel.references(execution) == [f"snapcore/1/{first.id}/{first.thread_id}"]
    assert await repo.list(thread_of(execution)) == [first]


async def test_an_execution_goes_on_across_restarts_of_the_kernel(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver
) -> None:
    async def process(files: int) -> list[str]:
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())
        await asyncio.to_thread(kernel.restart)

        async def write() -> None:
            await sandbox.upload(f"{sandbox.workspace_root}/file", b"x")
            await asyncio.to_thread(kernel.restart)

        await rebuno.step("write", write, resources=["workspace"])
        return await names(sandbox)

    execution = await run(kernel, process, {"files": 0})
    assert [await kept(repo, reference) for reference in kernel.references(execution)] == [[], ["file"]]
    assert (await run_fork(kernel, looking(driver), execution))["output"] == ["file"]


DIES = """
import os, sys
import rebuno, snapcore
from snapcore.integrations.rebuno import SandboxDriver
from snapcore.providers.local import LocalProvider

class Dying(SandboxDriver):
    async def create(self, checkpoint_ref=None):
        await super().create(checkpoint_ref)
        os._exit(9)

async def process(files):
    repo = await snapcore.open_repository(sys.argv[1])
    await rebuno.resource("workspace", driver=Dying(repo, LocalProvider(sys.argv[2])), checkpoints=rebuno.CheckpointPolicy())

rebuno.Agent("coder", secret=sys.argv[3], base_url=sys.argv[4]).run(process, host="127.0.0.1", port=int(sys.argv[5]))
"""


async def test_a_worker_that_dies_before_the_binding_is_followed_by_one_with_the_same_files(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, sandboxes: Path, tmp_path: Path, unused_port: int
) -> None:
    source = await run(kernel, writing(driver), {"files": 2})
    arguments = [str(tmp_path / "repo"), str(sandboxes), SECRET, kernel.url, str(unused_port)]
    dying = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, *arguments, stderr=asyncio.subprocess.DEVNULL)
    await answering(unused_port)
    kernel.register(AGENT, SECRET, f"http://127.0.0.1:{unused_port}/webhook")
    fork = kernel.fork(source)
    assert await dying.wait() == 9
    assert kernel.resource(fork)["binding"] is None
    async with working(kernel, writing(driver)):
        kernel.redispatch(fork)
        assert (await ended(kernel, fork))["output"] == ["file1", "file2"]
    assert len(os.listdir(sandboxes)) == 3  # the source's, the one that nobody knows of, and the fork's
    root, *_ = await repo.list(thread_of(fork))
    assert root.reason == "fork-root"


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


async def answering(port: int) -> None:
    """Wait until somebody listens."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                return
            await asyncio.sleep(0.05)


async def test_a_worker_that_was_replaced_loses_none_of_the_checkpoints_that_the_next_one_takes(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, tmp_path: Path
) -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def slow(files: int) -> list[str]:
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())

        async def write(number: int) -> int:
            await sandbox.upload(f"{sandbox.workspace_root}/slow", b"slow")
            inside.set()
            await go_on.wait()
            return number

        await rebuno.step("write", write, {"number": 1}, resources=["workspace"])
        return await names(sandbox)

    async with snapcore.open_repository(tmp_path / "repo") as second:  # as in another process
        other = SandboxDriver(second, LocalProvider(tmp_path / "sandboxes"))
        async with working(kernel, slow) as replaced:
            execution = kernel.create(AGENT, {"files": 1})
            await inside.wait()
            async with working(kernel, writing(other)):
                kernel.redispatch(execution)
                done = await ended(kernel, execution)
            references = kernel.references(execution)
            go_on.set()  # now the first captures too; the kernel refuses its result
            await replaced.agent.join()
    assert done["output"] == ["file1", "slow"]
    assert kernel.references(execution) == references
    assert [await kept(repo, reference) for reference in references] == [[], ["file1", "slow"]]
    assert (await run_fork(kernel, looking(driver), execution))["output"] == ["file1", "slow"]


async def test_a_capture_waits_for_one_of_a_worker_that_is_still_at_it(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver
) -> None:
    async def process(files: int) -> str:
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())
        await repo.checkpoints.acquire_writer(sandbox.thread_id, ttl=2)  # never given back
        return str(await rebuno.step("look", lambda: sandbox.thread_id, resources=["workspace"]))

    execution = await run(kernel, process, {"files": 0})
    assert kernel.executions[execution]["output"] == thread_of(execution)
    assert not kernel.events(execution, "resource.checkpoint_failed")


async def fails(sandbox: SandboxHandle) -> None:
    raise OSError("no network")


async def test_a_create_that_fails_leaves_no_sandbox(kernel: RebunoKernel, repo: Repository, sandboxes: Path) -> None:
    for driver in (
        SandboxDriver(repo, LocalProvider(sandboxes), on_create=[fails]),
        SandboxDriver(repo, LocalProvider(sandboxes), on_open=[fails]),
        SandboxDriver(repo, LocalProvider(sandboxes, on_open=[fails])),
    ):
        with pytest.raises(AssertionError, match="agent_error: OSError: no network"):
            await run(kernel, looking(driver), {"files": 0})
        assert os.listdir(sandboxes) == []


class Slow(LocalProvider):
    """Its creations are told of when the folder is there, and end when they are let."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.there, self.go_on = asyncio.Event(), asyncio.Event()

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        handle = await super().create(spec)
        self.there.set()
        await self.go_on.wait()
        return handle


async def test_a_create_that_is_cancelled_leaves_no_sandbox(
    kernel: RebunoKernel, repo: Repository, sandboxes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.Event()

    async def waits(sandbox: SandboxHandle) -> None:
        waiting.set()
        await asyncio.Event().wait()

    # while it fills the sandbox, then by the hooks of a provider that hang, then in a provider that minds no cancellation
    slow = Slow(sandboxes)
    for driver, there in (
        (SandboxDriver(repo, LocalProvider(sandboxes), on_create=[waits]), waiting),
        (SandboxDriver(repo, LocalProvider(sandboxes, on_create=[waits])), waiting),
        (SandboxDriver(repo, slow), slow.there),
    ):
        monkeypatch.setattr("snapcore.integrations.rebuno.GRACE", 60.0 if there is slow.there else 0.1)
        waiting.clear()
        async with working(kernel, looking(driver)) as worker:
            kernel.create(AGENT, {"files": 0})
            await there.wait()
            assert len(os.listdir(sandboxes)) == 1
            asyncio.get_running_loop().call_later(0.1, slow.go_on.set)
            await worker.agent.close()
        assert os.listdir(sandboxes) == []


async def test_a_fork_of_a_checkpoint_that_was_deleted_fails_by_the_packages_own_error(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, sandboxes: Path
) -> None:
    source = await run(kernel, writing(driver), {"files": 1})
    await repo.delete_head(thread_of(source))
    fork = await run_fork(kernel, looking(driver), source)
    assert fork["status"] == "failed"
    assert fork["failure_reason"].startswith("agent_error: CheckpointUnavailable: The repository has no checkpoint")
    assert len(os.listdir(sandboxes)) == 1


@pytest.mark.parametrize("how", ["gone", "damaged"])
async def test_a_fork_of_a_checkpoint_whose_blobs_are_gone_fails_by_the_packages_own_error(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, sandboxes: Path, tmp_path: Path, how: str
) -> None:
    source = await run(kernel, writing(driver), {"files": 1})
    packs = tmp_path / "repo" / "packs"
    if how == "gone":
        shutil.rmtree(packs)
    else:
        for pack in packs.rglob("*"):
            if pack.is_file():
                pack.chmod(0o600)
                pack.write_bytes(bytes(pack.stat().st_size))
    async with snapcore.open_repository(tmp_path / "repo") as fresh:
        fork = await run_fork(kernel, looking(SandboxDriver(fresh, LocalProvider(sandboxes))), source)
        assert fork["status"] == "failed"
        assert fork["failure_reason"].startswith("agent_error: CheckpointUnavailable: ")
        assert len(os.listdir(sandboxes)) == 1
        assert not await fresh.list(thread_of(fork["id"]))


@pytest.mark.parametrize("reference", ["a-snapshot", "snapcore/1/", "snapcore/1/abc", "snapcore/2/abc/t", "snapcore/1/abc/t"])
async def test_a_reference_that_is_none_of_ours_is_unavailable(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, sandboxes: Path, reference: str
) -> None:
    async def process(files: int) -> None:
        await driver.create(reference)

    with pytest.raises(AssertionError, match="agent_error: CheckpointUnavailable"):
        await run(kernel, process, {"files": 0})
    assert not sandboxes.exists()


async def test_a_capture_that_fails_leaves_the_steps_result_and_is_reported_without_secrets(
    kernel: RebunoKernel, repo: Repository, sandboxes: Path, tmp_path: Path
) -> None:
    secret = "correct horse battery"
    driver = SandboxDriver(repo, LocalProvider(sandboxes), secrets={"TOKEN": secret})

    async def process(files: int) -> str:
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())

        async def write() -> str:
            await sandbox.exec(["mkfifo", f"pipe of {secret}"])
            return "done"

        return str(await rebuno.step("write", write, resources=["workspace"]))

    execution = await run(kernel, process, {"files": 0})
    assert kernel.executions[execution]["output"] == "done"
    failures = kernel.events(execution, "resource.checkpoint_failed")
    assert len(failures) == 2  # after the step, and on completion
    assert "pipe of" in failures[0]["payload"]["error"]
    assert len(kernel.references(execution)) == 1
    assert secret not in (tmp_path / "kernel.json").read_text()


async def test_a_sandbox_that_is_gone_or_of_another_provider_fails_the_execution_and_can_be_forked(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, sandboxes: Path
) -> None:
    source = await run(kernel, writing(driver), {"files": 1}, session="session")
    shutil.rmtree(sandboxes)
    with pytest.raises(AssertionError, match="agent_error: ProviderError: There is no sandbox"):
        await run(kernel, looking(driver), {"files": 0}, session="session")
    assert (await run_fork(kernel, looking(driver), source))["output"] == ["file1"]
    binding = {**kernel.resource(source)["binding"], "provider": "docker"}
    with pytest.raises(ProviderError, match="is of docker") as caught:
        await driver.open(binding)
    assert caught.value.code == Code.NO_SANDBOX


@pytest.mark.parametrize("binding", [None, {}, {"sandbox_id": "x"}, "text"])
async def test_a_binding_of_another_driver_is_refused(driver: SandboxDriver, binding: Any) -> None:
    with pytest.raises(SnapshotError, match="no binding of snapcore's driver"):
        await driver.open(binding)


async def test_a_binding_of_a_later_format_is_refused(driver: SandboxDriver) -> None:
    later = {"format": 2, "thread_id": "thread", "provider": "file", "sandbox_id": "x", "workspace_root": "/x"}
    with pytest.raises(SnapshotError, match="has format 2"):
        await driver.open(later)


async def test_a_driver_over_another_configuration_is_refused_by_the_kernel(
    kernel: RebunoKernel, repo: Repository, sandboxes: Path
) -> None:
    def made(version: int) -> SandboxDriver:
        return SandboxDriver(repo, LocalProvider(sandboxes), configuration={"image": version})

    source = await run(kernel, writing(made(1)), {"files": 1})
    fork = await run_fork(kernel, looking(made(2)), source)
    assert "registered with another driver, configuration" in fork["failure_reason"]
    with pytest.raises(SnapshotError, match="must be JSON"):
        SandboxDriver(repo, LocalProvider(sandboxes), configuration={"image": object()})
