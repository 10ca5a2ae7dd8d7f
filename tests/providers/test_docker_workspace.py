"""Workspaces in a Docker container, with the tools of busybox, by the workspace suite. The tests' folder is mounted into the
container at its own path: they can look past the workspace. Cases 11, 14, 17, 24, 26, 41 and 49 as the suite has them.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapcore.protocols import Workspace
from snapcore.providers.docker import DockerSandbox, connect
from snapcore.testing.workspace_suite import WorkspaceTests

from .. import docker_engine as engines  # noqa: TID252 (tests are no package that could be named)


@pytest.fixture(scope="module")
def container(docker_engine: engines.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One for all tests: it sees the folders of them all."""
    folder = tmp_path_factory.getbasetemp()
    name = f"snapcore-test-{secrets.token_hex(6)}"
    image = engines.image(docker_engine, "busybox")
    with contextlib.closing(docker_engine.client()) as api:
        host = api.create_host_config(network_mode="none", binds=[f"{folder}:{folder}"])
        api.create_container(image, name=name, host_config=host)
        try:
            api.start(name)
            yield name
        finally:
            api.remove_container(name, force=True, v=True)


class TestContainer(WorkspaceTests):
    handle: DockerSandbox

    @pytest.fixture(autouse=True)
    def opened(self, container: str, docker_host: str) -> Iterator[None]:
        self.handle = asyncio.run(connect(f"docker://{container}/"))
        yield
        asyncio.run(self.handle.close())

    def make_workspace(self, root: Path) -> Workspace:
        return self.handle.workspace(str(root))
