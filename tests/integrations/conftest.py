"""Fixtures that tests of several integrations take: containers, a repository in a folder, a kernel of Rebuno."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import snapcore
from snapcore.repository import Repository

from ..providers.docker_fixtures import (  # noqa: TID252 (tests are no package that could be named)
    docker_api,
    docker_engine,
    docker_host,
    make_container,
)
from .rebuno_kernel import RebunoKernel

__all__ = ["docker_api", "docker_engine", "docker_host", "make_container"]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[RebunoKernel]:
    """A kernel whose state is in the test's folder."""
    with RebunoKernel(tmp_path) as kernel:
        yield kernel


@pytest.fixture
async def repo(tmp_path: Path) -> AsyncIterator[Repository]:
    """A repository in a folder with a SQLite database, as users have it."""
    async with snapcore.open_repository(tmp_path / "repo") as opened:
        yield opened
