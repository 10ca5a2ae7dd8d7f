"""What tests of scheduled jobs need."""

from pathlib import Path

import pytest

import snapcore
from snapcore.testing.trees import make_tree

from ..providers.docker_fixtures import docker_api, docker_engine, docker_host, make_container  # noqa: TID252

__all__ = ["docker_api", "docker_engine", "docker_host", "make_container"]


@pytest.fixture
async def repo(tmp_path: Path) -> Path:
    path = tmp_path / "repo"
    async with snapcore.open_repository(path):
        pass
    return path


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    make_tree(folder, files=20)
    return folder
