"""A sandbox that was given by its address is closed after the work; a handle is its owner's."""

from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import SnapcoreError
from snapcore.providers import local


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders whose handles were closed."""
    roots: list[str] = []
    close = local.LocalSandbox.close

    async def noting(self: local.LocalSandbox) -> None:
        roots.append(self.workspace_root)
        await close(self)

    monkeypatch.setattr(local.LocalSandbox, "close", noting)
    return roots


async def test_an_address_is_closed_and_a_handle_is_not(tmp_path: Path, closed: list[str]) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "file").touch()
    async with snapcore.open_repository("memory://") as repo:
        handle: Any = await snapcore.connect(str(work))
        await repo.capture(handle, thread_id="t")
        await repo.restore(handle, thread_id="t")
        assert closed == []
        await repo.capture(str(work), thread_id="t")
        await repo.restore(work, thread_id="t")
        assert closed == [str(work)] * 2
        with pytest.raises(SnapcoreError):
            await repo.capture(str(tmp_path / "missing"), thread_id="t")
        with pytest.raises(SnapcoreError):
            await repo.restore("/", thread_id="t")
    assert closed[2:] == [str(tmp_path / "missing"), "/"]
