"""Docker passes the suite of providers, on a real engine: containers with busybox, whose user is not root."""

from collections.abc import Sequence
from typing import Any

import pytest

from snapcore.providers.docker import DockerProvider
from snapcore.sandboxes import Hook, SandboxProvider, SandboxSpec
from snapcore.testing.provider_suite import ProviderTests

from .. import docker_engine as engines  # noqa: TID252 (tests are no package that could be named)


class TestDocker(ProviderTests):
    other_user = "root"

    @pytest.fixture(autouse=True)
    def engine(self, docker_engine: engines.Engine, docker_host: str) -> None:
        self.image = engines.image(docker_engine, "busybox")

    def make_provider(self, **hooks: Sequence[Hook]) -> SandboxProvider:
        return DockerProvider(on_create=hooks.get("on_create", ()), on_open=hooks.get("on_open", ()))

    def spec(self, **fields: Any) -> SandboxSpec:
        return SandboxSpec(image=self.image, user="dev", options={"network_mode": "none"}, **fields)
