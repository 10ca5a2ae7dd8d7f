"""Containers for pages that use Docker, and no thread that a page leaves."""

import sys
from collections.abc import Iterator

import pytest

from ..providers.docker_fixtures import docker_api, docker_engine, make_container  # noqa: TID252

__all__ = ["docker_api", "docker_engine", "make_container", "threads_end"]


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """The thread of `snapcore.blocking` ends with the page that used it: tests that fork this process need it to be alone."""
    yield
    if "snapcore.blocking" in sys.modules:
        sys.modules["snapcore.blocking"]._loop.stop()
