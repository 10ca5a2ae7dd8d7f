"""Executions of Rebuno in containers, E2B's sandboxes and folders, and forks that go from one kind to another. Cases 4 and 12."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rebuno

from snapcore.integrations.rebuno import RebunoSandbox, SandboxDriver
from snapcore.providers.docker import DockerProvider
from snapcore.providers.e2b import E2BProvider
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository
from snapcore.sandboxes import SandboxSpec
from snapcore.testing.e2b_server import E2BServer

from .. import docker_engine as engines  # noqa: TID252  # the tests are no package that could be named
from ..providers.e2b_service import need_server  # noqa: TID252
from .rebuno_kernel import RebunoKernel
from .rebuno_worker import kept, run, run_fork


@pytest.fixture
async def local(repo: Repository, tmp_path: Path) -> SandboxDriver:
    return SandboxDriver(repo, LocalProvider(tmp_path / "sandboxes"))


@pytest.fixture
async def docker(repo: Repository, kernel: RebunoKernel, docker_engine: engines.Engine) -> AsyncIterator[SandboxDriver]:
    spec = SandboxSpec(image=engines.image(docker_engine, "busybox"), user="dev", options={"network_mode": "none"})
    provider = DockerProvider(environment={"DOCKER_HOST": docker_engine.host})
    driver = SandboxDriver(repo, provider, spec=spec)
    yield driver
    await destroy_all(kernel, driver, "docker")
    await provider.close()


@pytest.fixture(scope="module")
def e2b_options() -> Iterator[dict[str, Any]]:
    need_server()
    with E2BServer() as server:
        yield {**server.options}


@pytest.fixture
async def e2b(repo: Repository, kernel: RebunoKernel, e2b_options: dict[str, Any]) -> AsyncIterator[SandboxDriver]:
    driver = SandboxDriver(repo, E2BProvider(timeout=600, **e2b_options))
    yield driver
    await destroy_all(kernel, driver, "e2b")


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> SandboxDriver:
    """One of those above, by its name."""
    found: SandboxDriver = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.AbstractEventLoop]:
    """The event loops on which sandboxes are opened again."""
    loops = []
    for kind in (LocalProvider, DockerProvider, E2BProvider):
        original = kind.open

        async def watched(self: Any, binding: Any, original: Any = original) -> Any:
            loops.append(asyncio.get_running_loop())
            return await original(self, binding)

        monkeypatch.setattr(kind, "open", watched)
    return loops


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.AbstractEventLoop]:
    """The event loops that captures run on."""
    loops = []
    original = Repository.capture

    async def watched(self: Repository, sandbox: Any, **options: Any) -> Any:
        loops.append(asyncio.get_running_loop())
        return await original(self, sandbox, **options)

    monkeypatch.setattr(Repository, "capture", watched)
    return loops


async def destroy_all(kernel: RebunoKernel, driver: SandboxDriver, provider: str) -> None:
    """End the sandboxes that executions are bound to."""
    bindings = [r["binding"] for e in kernel.executions.values() for r in e["resources"].values() if r["binding"]]
    for binding in bindings:
        if binding["provider"] == provider:
            await driver.destroy(binding)


async def tree(sandbox: RebunoSandbox) -> str:
    """Modes, names and contents of the files."""
    done = await sandbox.exec("find . -type f | sort | while read f; do ls -l $f | cut -c1-10; echo $f; cat $f; done")
    assert done.exit_code == 0, done.stderr
    return done.stdout.decode()


def adding(driver: SandboxDriver, name: str) -> Callable[[], Any]:
    """An agent that adds a file and tells all that is there."""

    async def process() -> str:
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())

        async def add() -> int:
            done = await sandbox.exec(f"mkdir -p {name} && echo {name} >{name}/file && chmod 750 {name}/file")
            return int(done.exit_code)

        assert await rebuno.step(f"add {name}", add, resources=["workspace"]) == 0
        return await tree(sandbox)

    return process


async def test_a_fork_goes_on_in_any_other_kind_of_sandbox(
    kernel: RebunoKernel, local: SandboxDriver, docker: SandboxDriver, e2b: SandboxDriver, repo: Repository
) -> None:
    source = await run(kernel, adding(local, "local"))
    expected = "-rwxr-x---\n./{0}/file\n{0}\n"
    for driver, kind, found in (
        (docker, "docker", ["docker", "local"]),
        (e2b, "e2b", ["docker", "e2b", "local"]),
        (local, "once-more", ["docker", "e2b", "local", "once-more"]),
        (e2b, "twice", ["docker", "e2b", "local", "once-more", "twice"]),
    ):
        fork = await run_fork(kernel, adding(driver, kind), source)
        assert fork["output"] == "".join(expected.format(name) for name in found), fork["failure_reason"]
        source = fork["id"]
    providers = {e["resources"]["workspace"]["binding"]["provider"] for e in kernel.executions.values()}
    assert providers == {"file", "docker", "e2b"}


@pytest.mark.parametrize("driver", ["docker", "e2b"], indirect=True)
async def test_a_sandbox_paused_at_the_end_is_captured_and_paused_again(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver
) -> None:
    async def process() -> str:
        policy = rebuno.CheckpointPolicy(every_steps=100)
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=policy)

        async def write() -> int:
            return int((await sandbox.exec("echo more >>file")).exit_code)

        await rebuno.step("write", write, resources=["workspace"])
        found = await tree(sandbox)
        await sandbox.pause()
        return found

    first = await run(kernel, process, session="session")
    assert [await kept(repo, reference) for reference in kernel.references(first)] == [[], ["file"]]
    assert await paused(driver, kernel.resource(first)["binding"])
    second = await run(kernel, process, session="session")  # resumed
    assert kernel.executions[second]["output"].endswith("./file\nmore\nmore\n")
    assert await paused(driver, kernel.resource(second)["binding"])


async def paused(driver: SandboxDriver, binding: dict[str, Any]) -> bool:
    """Whether a sandbox is, without opening it."""
    provider: Any = driver._provider
    if binding["provider"] == "docker":
        state = provider._engine.api.inspect_container(binding["sandbox_id"])["State"]
        return bool(state["Paused"])
    import e2b

    info = await e2b.AsyncSandbox.get_info(binding["sandbox_id"], **provider._options)
    return info.state == e2b.SandboxState.PAUSED


@pytest.mark.parametrize("driver", ["local", "docker", "e2b"], indirect=True)
async def test_steps_that_run_on_another_event_loop_are_captured_on_the_sandboxs_own(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, captured: list[asyncio.AbstractEventLoop]
) -> None:
    async def process() -> None:
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy(on_completion=False))

        async def write() -> None:
            await sandbox.on_its_loop(sandbox.upload(f"{sandbox.workspace_root}/file", b"x"))

        def elsewhere() -> None:
            asyncio.run(rebuno.step("write", write, resources=["workspace"]))

        await asyncio.to_thread(elsewhere)

    execution = await run(kernel, process)
    assert not kernel.events(execution, "resource.checkpoint_failed")
    assert captured == [asyncio.get_running_loop()] * 2
    assert [await kept(repo, reference) for reference in kernel.references(execution)] == [[], ["file"]]


@pytest.mark.parametrize("driver", ["local", "docker", "e2b"], indirect=True)
async def test_an_agent_whose_loop_has_ended_is_captured_by_a_connection_of_another(
    kernel: RebunoKernel, repo: Repository, driver: SandboxDriver, opened: list[asyncio.AbstractEventLoop]
) -> None:
    def process() -> None:
        async def work() -> None:
            policy = rebuno.CheckpointPolicy(every_steps=100)
            sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=policy)

            async def write() -> None:
                await sandbox.upload(f"{sandbox.workspace_root}/file", b"x")

            await rebuno.step("write", write, resources=["workspace"])

        asyncio.run(work())  # its loop has ended when the execution's last checkpoint is taken

    execution = await run(kernel, process)
    assert [await kept(repo, reference) for reference in kernel.references(execution)] == [[], ["file"]]
    assert opened == [asyncio.get_running_loop()]


async def test_a_container_that_cannot_be_filled_is_removed(
    kernel: RebunoKernel, docker: SandboxDriver, local: SandboxDriver, tmp_path: Path
) -> None:
    source = await run(kernel, adding(local, "local"))
    before = await docker._provider.list()  # type: ignore[attr-defined]
    for pack in (tmp_path / "repo" / "packs").rglob("*"):
        if pack.is_file():
            pack.unlink()
    fork = await run_fork(kernel, adding(docker, "docker"), source)
    assert "CheckpointUnavailable" in fork["failure_reason"]
    assert await docker._provider.list() == before  # type: ignore[attr-defined]
