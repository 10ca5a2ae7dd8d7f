"""The OpenAI Agents SDK's own Docker sessions, on a real engine: stopped, removed, and started in a new container."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("agents")

import docker
from agents.sandbox.sandboxes.docker import DockerSandboxClient, DockerSandboxClientOptions
from agents.sandbox.session.dependencies import Dependencies
from agents.sandbox.session.sandbox_session import SandboxSession

import snapcore
from snapcore.integrations.openai_agents import SnapcoreSnapshotSpec, SnapshotClient

from .. import docker_engine as engines  # noqa: TID252 (tests are no package that could be named)

# the SDK leaves the sockets of its commands to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"),
]

MAKE = """
mkdir -p d/e empty; printf one > d/e/f; printf run > d/run; chmod 751 d/run; chmod 700 empty; ln d/e/f d/same
ln -s e/f d/link; ln -s /workspace/d d/absolute-folder; ln -s /etc/passwd d/out; mkfifo d/pipe
printf x > "$(printf 'd/odd\\n\\377')"
"""


@pytest.fixture
def engine(docker_engine: engines.Engine) -> Iterator[tuple[docker.DockerClient, str]]:
    """A client of the package `docker`, and an image."""
    client = docker.DockerClient(docker_engine.host)
    yield client, engines.image(docker_engine, "gnu")
    client.close()


async def run(session: SandboxSession, script: str) -> str:
    result = await session.exec("sh", "-c", f"cd /workspace && {script}", shell=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode("utf-8", "surrogateescape")


async def read(session: SandboxSession, script: str) -> str:
    """What a script prints that changes nothing. Once in some hundred times on a busy machine, the SDK gives its exit code 0 and
    no output."""
    for _ in range(5):
        if said := await run(session, script):
            return said
    return ""


async def test_a_session_goes_on_in_a_new_container(engine: tuple[docker.DockerClient, str], tmp_path: Path) -> None:
    """Cases 4, 9, 12 and 16: with what the SDK alone could not put back, an absolute link to a folder and one that leads out."""
    service, image = engine
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        snapshots = SnapshotClient(repo, workspace_root="/workspace")
        client = DockerSandboxClient(service, dependencies=Dependencies().bind_value("snapcore", snapshots))
        options = DockerSandboxClientOptions(image=image, network_mode="none")
        session = await client.create(snapshot=SnapcoreSnapshotSpec(client_dependency_key="snapcore"), options=options)
        await session.start()
        await run(session, MAKE)
        for number in range(1, 4):
            await run(session, f"echo {number} >> log")
            await session.stop()
            state = client.serialize_session_state(session.state)
            await client.delete(session)
            session = await client.resume(client.deserialize_session_state(state))
            await session.start()
            assert await read(session, "cat log") == "".join(f"{n}\n" for n in range(1, number + 1))
        assert await read(session, "cat d/link d/absolute-folder/same; readlink d/absolute-folder") == "oneone../d\n"
        assert await read(session, "stat -c %a d/run empty") == "751\n700\n"
        names = (await read(session, "find . -print0")).split("\0")
        assert "./d/odd\n\udcff" in names
        assert "./d/out" not in names
        history = await repo.list(session.state.snapshot.id)
        assert len(history) == 3
        assert [s.path for s in history[0].roots[0].skipped] == [b"d/out"]
        await client.delete(session)
