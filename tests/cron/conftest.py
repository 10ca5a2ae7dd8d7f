"""What tests of scheduled jobs need."""

from ..providers.docker_fixtures import docker_api, docker_engine, docker_host, make_container  # noqa: TID252

__all__ = ["docker_api", "docker_engine", "docker_host", "make_container"]
