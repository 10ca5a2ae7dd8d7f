"""Checkpoints of E2B sandboxes, as the template's own user, who is not root: the cases that every sandbox has to hold, cases 4
and 24, and how many requests they take.
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import snapcore
from snapcore import Repository
from snapcore.errors import Code, ProviderError
from snapcore.providers.e2b import E2BProvider
from snapcore.providers.e2b_handle import E2BSandbox
from snapcore.sandboxes import SandboxSpec
from snapcore.testing.e2b_server import E2BServer
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree

from .checkpoint_cases import EVERYTHING, USER, CheckpointCases, digest
from .e2b_service import need_server


@pytest.fixture(scope="module")
def server() -> Iterator[E2BServer]:
    need_server()
    with E2BServer() as server:
        yield server


@pytest.fixture
def provider(server: E2BServer) -> E2BProvider:
    options: dict[str, Any] = server.options
    return E2BProvider(timeout=3600, **options)


@pytest_asyncio.fixture
async def handle(provider: E2BProvider, server: E2BServer) -> AsyncIterator[E2BSandbox]:
    made = await provider.create(SandboxSpec())
    yield made
    await provider.destroy(made.binding)


@pytest_asyncio.fixture
async def repo() -> AsyncIterator[Repository]:
    async with snapcore.open_repository("memory://") as repo:
        yield repo


def inside(server: E2BServer, handle: E2BSandbox, path: str = "workspace") -> Path:
    """A path of the sandbox, looked at from outside."""
    return server.folder(handle.binding.sandbox_id) / path


def give(folder: Path) -> None:
    """All below a folder belongs to the sandbox's user."""
    for place, folders, names in os.walk(os.fsencode(folder)):
        for name in (*folders, *names, b""):
            os.chown(os.path.join(place, name) if name else place, USER, USER, follow_symlinks=False)


async def test_five_times_round_and_equal_each_time(
    repo: Repository, provider: E2BProvider, server: E2BServer, tmp_path: Path
) -> None:
    """Case 4: restored, changed and captured, five times. Case 24: a capture changes nothing."""
    local = tmp_path / "0"
    make_tree(local, files=30)
    await repo.capture(str(local), thread_id="thread", policy=EVERYTHING)
    for number in range(1, 6):
        handle = await provider.create(SandboxSpec())
        receipt = await repo.restore(handle, thread_id="thread")
        assert receipt is not None
        assert not receipt.differences
        assert compare_trees(local, inside(server, handle)) == []
        mutate_tree(inside(server, handle), seed=number)
        give(inside(server, handle))
        before = digest(inside(server, handle))
        taken = await repo.capture(handle, thread_id="thread", policy=EVERYTHING)
        assert digest(inside(server, handle)) == before
        assert not [name for name in os.listdir(inside(server, handle)) if name.startswith(".snapcore")]
        local = tmp_path / str(number)
        await repo.restore(str(local), thread_id="thread")
        assert compare_trees(local, inside(server, handle)) == []
        assert (await repo.capture(str(local), thread_id="copy", policy=EVERYTHING)).content_id == taken.content_id
        await provider.destroy(handle.binding)


class TestE2B(CheckpointCases):
    @pytest.fixture(autouse=True)
    def look_inside(self, server: E2BServer, handle: E2BSandbox) -> None:
        self.server = server
        self.workspace = inside(server, handle)

    def calls(self, handle: E2BSandbox) -> int:
        return self.server.requests.total()


async def test_a_capture_of_few_changes_takes_few_calls(repo: Repository, handle: E2BSandbox, server: E2BServer) -> None:
    await handle.exec("i=0; while [ $i -lt 300 ]; do i=$((i + 1)); echo $i > file-$i; done; touch -d @1000000000 file-*")
    await repo.capture(handle, thread_id="thread")
    await handle.exec("for i in 1 2 3; do echo changed > file-$i; done")
    server.requests.clear()
    await repo.capture(handle, thread_id="thread")
    assert server.requests["Start"] <= 4
    assert server.requests.total() <= 14


@pytest.mark.parametrize("name", ["Start", "read", "write"])
async def test_a_capture_and_a_restore_outlive_dropped_connections(
    repo: Repository, handle: E2BSandbox, server: E2BServer, tmp_path: Path, name: str
) -> None:
    make_tree(tmp_path / "tree", files=30)
    await repo.capture(str(tmp_path / "tree"), thread_id="thread", policy=EVERYTHING)
    server.faults.clear()
    for call in range(2, 40, 3):
        server.faults.cut(name, 100, call)
    try:
        await repo.restore(handle, thread_id="thread", verify="content")
        await repo.capture(handle, thread_id="there", policy=EVERYTHING)
    finally:
        server.faults.clear()
    assert compare_trees(tmp_path / "tree", inside(server, handle)) == []


async def test_a_restore_that_loses_its_sandbox_says_so(repo: Repository, provider: E2BProvider, server: E2BServer) -> None:
    handle = await provider.create(SandboxSpec())
    await handle.exec("echo x > file")
    await repo.capture(handle, thread_id="thread")
    server.expire(handle.binding.sandbox_id)
    with pytest.raises(ProviderError) as caught:
        await repo.restore(handle, thread_id="thread")
    assert caught.value.code == Code.NO_SANDBOX
    with pytest.raises(ProviderError) as caught:
        await repo.capture(handle, thread_id="thread")
    assert caught.value.code == Code.NO_SANDBOX
