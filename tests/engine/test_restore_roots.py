"""A restore of several roots: all of them, or none."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from snapcore.errors import Code, ProviderError
from snapcore.protocols import Stage
from snapcore.providers.direct import DirectWorkspace
from snapcore.repository import Repository
from snapcore.testing.trees import compare_trees

from .crash_helpers import copy_tree

Make = Callable[..., Path]


class Sealing(DirectWorkspace):
    """A folder whose stage says before it is sealed that it will be, and waits where it is the second."""

    def __init__(self, root: str, sandbox: "Sandbox") -> None:
        super().__init__(root, busy_seconds=0.1)
        self.sandbox = sandbox

    async def open_stage(self) -> Stage:
        stage = await super().open_stage()
        seal = stage.seal
        name = Path(self.root).name
        sandbox = self.sandbox
        sandbox.log.append(f"open {name}")

        async def seal_later(*, durable: bool) -> None:
            sandbox.log.append(f"seal {name}")
            if name == "b":
                sandbox.sealing.set()
                await sandbox.wait.wait()
            await seal(durable=durable)

        object.__setattr__(stage, "seal", seal_later)
        return stage


class Sandbox:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.sealing = asyncio.Event()
        self.wait = asyncio.Event()

    def workspace(self, root: str | None) -> Sealing:
        assert root is not None
        return Sealing(root, self)


@pytest.fixture
async def changed(memory_repo: Repository, make: Make, tmp_path: Path) -> dict[str, str]:
    """Two roots, captured in the opposite order of their paths and changed since; a copy of each beside them."""
    roots = {"first": str(tmp_path / "b"), "second": str(tmp_path / "a")}
    for path in roots.values():
        make({"file": "1", "sub/file": "1"}, base=Path(path))
    await memory_repo.capture(roots["first"], thread_id="t", roots=roots)
    for path in roots.values():
        make({"file": "2", "sub/file": "2", "added": "2"}, base=Path(path))
        copy_tree(Path(path), Path(path + "-before"))
    return roots


def untouched(roots: dict[str, str]) -> bool:
    return all(compare_trees(Path(path), Path(path + "-before")) == [] for path in roots.values())


async def test_when_one_root_cannot_be_sealed_none_is_changed(memory_repo: Repository, changed: dict[str, str]) -> None:
    sandbox = Sandbox()
    sandbox.wait.set()
    async with DirectWorkspace(changed["first"]).hold():
        with pytest.raises(ProviderError) as caught:
            await memory_repo.restore(sandbox, thread_id="t", roots=changed)
    assert caught.value.code == Code.WORKSPACE_BUSY
    assert sandbox.log == ["open a", "open b", "seal a", "seal b"]
    assert untouched(changed)
    # nor later, by whoever comes next
    await memory_repo.capture(changed["first"], thread_id="later", roots=changed)
    assert untouched(changed)


async def test_a_restore_that_is_cancelled_between_two_seals_changes_nothing(
    memory_repo: Repository, changed: dict[str, str]
) -> None:
    sandbox = Sandbox()
    work = asyncio.create_task(memory_repo.restore(sandbox, thread_id="t", roots=changed))
    await sandbox.sealing.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert untouched(changed)
    await memory_repo.capture(changed["first"], thread_id="later", roots=changed)
    assert untouched(changed)
    sandbox.wait.set()
    receipt = await memory_repo.restore(sandbox, thread_id="t", roots=changed)
    assert receipt is not None
    assert receipt.removed == 2
    assert {Path(path, "sub", "file").read_text() for path in changed.values()} == {"1"}
