"""E2B's provider by the provider suite, against the test server or, when asked for, against the real service."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from snapcore.providers.e2b import E2BProvider
from snapcore.sandboxes import Hook, SandboxProvider
from snapcore.testing import ProviderTests
from snapcore.testing.e2b_server import E2BServer

from .e2b_service import REAL, Service, need_server


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    if REAL:
        yield Service(None)
        return
    need_server()
    with E2BServer() as server:
        yield Service(server)


class TestE2BProvider(ProviderTests):
    other_user = "root"

    @pytest.fixture(autouse=True)
    def take_service(self, service: Service) -> None:
        self.service = service

    def make_provider(self, **hooks: Sequence[Hook]) -> SandboxProvider:
        options: dict[str, Any] = {**self.service.options, **hooks}
        return E2BProvider(timeout=600, **options)
