"""Sessions in sandboxes of E2B: they are paused, opened again, and resumed elsewhere."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import snapcore
from snapcore import Repository
from snapcore.errors import CheckpointWriterLostError
from snapcore.providers.e2b import E2BProvider
from snapcore.testing.e2b_server import E2BServer

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


@pytest.fixture
async def repo() -> AsyncIterator[Repository]:
    async with snapcore.open_repository("memory://") as repo:
        yield repo


async def test_a_session_is_paused_opened_again_and_resumed(repo: Repository, provider: E2BProvider) -> None:
    pieces: list[bytes] = []
    old = await repo.session(provider, thread_id="t")
    assert (await old.exec("pwd; echo 1 > a", on_output=lambda _, piece: pieces.append(piece))).stdout == b"/workspace\n"
    assert b"".join(pieces) == b"/workspace\n"
    await old.write_file("deep/b", "2")
    await old.pause()
    checkpoint = await old.checkpoint("paused", native=True)
    assert checkpoint.totals.files == 2
    assert (await old.exec("cat a", affects=False)).stdout == b"1\n"
    await old.pause()

    new = await repo.session(provider, thread_id="t")
    assert new.sandbox_id == old.sandbox_id
    for work in (old.exec("echo x > x"), old.write_file("x", "x"), old.checkpoint()):
        with pytest.raises(CheckpointWriterLostError):
            await work
    await old.close()
    assert (await new.exec("ls")).stdout == b"a\ndeep\n"
    await new.destroy()

    for label in ("paused", None):
        async with await repo.resume("t", label=label) as resumed:
            assert resumed.sandbox_id != old.sandbox_id
            assert resumed.restored is not None
            assert resumed.restored.content_id == checkpoint.content_id
            assert (await resumed.exec("pwd; echo 1 > a")).replayed
            await resumed.write_file("deep/b", "2")
            assert (await resumed.checkpoint("paused")).id == checkpoint.id
            assert (await resumed.exec("cat a deep/b")).stdout == b"1\n2"
            async with await resumed.fork(f"fork of {label}") as fork:
                await fork.exec("rm a")
                await fork.destroy()
            assert (await resumed.exec("ls")).stdout == b"a\ndeep\n"
            if label is None:
                await resumed.destroy()
            else:
                await repo.delete_head("t")  # the fork's own, so that the next resume begins where this one did
                await resumed.destroy()
