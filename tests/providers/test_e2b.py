"""E2B's provider by the provider suite, against the test server or, when asked for, against the real service."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import snapcore
from snapcore.errors import Code, ProviderError
from snapcore.providers.e2b import E2BProvider
from snapcore.sandboxes import Binding, Hook, SandboxProvider, SandboxSpec
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


async def test_an_address_leads_to_a_sandbox_and_resumes_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    if service.server is not None:
        for name, value in service.server.environment.items():
            monkeypatch.setenv(name, value)
    provider = E2BProvider(timeout=600)
    made = await provider.create(SandboxSpec(workspace_root="/home/user/a project/"))
    await made.upload("/home/user/a project/file", b"x")
    await provider.pause(made)
    address = f"e2b://{made.binding.sandbox_id}"
    opened = await snapcore.connect(f"{address}/home/user/a%20project")
    assert opened.binding == made.binding
    assert opened.workspace_root == "/home/user/a project"
    assert opened.sandbox_id == address
    async with snapcore.open_repository("memory://") as repo:
        assert (await repo.capture(opened, thread_id="thread")).totals.files == 1
    assert (await snapcore.connect(address)).workspace_root == "/workspace"
    await provider.destroy(made.binding)
    with pytest.raises(ProviderError) as caught:
        await snapcore.connect(address)
    assert caught.value.code == Code.NO_SANDBOX
    with pytest.raises(ProviderError) as caught:
        await provider.open(Binding("docker", made.binding.sandbox_id, "/workspace"))
    assert caught.value.code == Code.NO_SANDBOX


async def test_without_the_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(ProviderError, match=r"pip install 'snapcore\[e2b\]'") as caught:
        await snapcore.connect("e2b://i0123456789")
    assert caught.value.code == Code.MISSING_EXTRA


async def test_without_a_key_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(ProviderError, match="no key") as caught:
        await snapcore.connect("e2b://i0123456789")
    assert caught.value.code == Code.ACCESS_DENIED


async def test_the_client_is_imported_only_when_it_is_used() -> None:
    code = "import snapcore, sys, snapcore.providers.e2b; sys.exit('e2b' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


class TestE2BProvider(ProviderTests):
    other_user = "root"

    @pytest.fixture(autouse=True)
    def take_service(self, service: Service) -> None:
        self.service = service

    def make_provider(self, **hooks: Sequence[Hook]) -> SandboxProvider:
        options: dict[str, Any] = {**self.service.options, **hooks}
        return E2BProvider(timeout=600, **options)
