"""Containers for pages that use Docker."""

from ..providers.docker_fixtures import docker_api, docker_engine, make_container  # noqa: TID252

__all__ = ["docker_api", "docker_engine", "make_container"]
