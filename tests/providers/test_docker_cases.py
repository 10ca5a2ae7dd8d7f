"""The cases that every sandbox has to hold, in a running container whose user is not root, with the tools of GNU."""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from snapcore.providers.docker import DockerSandbox, connect

from .checkpoint_cases import USER, CheckpointCases
from .docker_fixtures import MakeContainer


class TestContainer(CheckpointCases):
    @pytest_asyncio.fixture
    async def handle(
        self, make_container: MakeContainer, docker_host: str, tmp_path_factory: pytest.TempPathFactory
    ) -> AsyncIterator[DockerSandbox]:
        self.workspace = tmp_path_factory.mktemp("workspace")
        os.chown(self.workspace, USER, USER)
        container = make_container("gnu", user="dev", host={"binds": [f"{self.workspace}:/workspace"]})
        handle = await connect(f"docker://{container}")
        yield handle
        await handle.close()

    def calls(self, handle: DockerSandbox) -> int:
        return handle.engine.traffic.calls
