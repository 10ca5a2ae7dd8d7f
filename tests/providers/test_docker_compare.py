"""A checkpoint beside a Docker container: few calls, nothing changed."""

import os
from pathlib import Path

import pytest

import snapcore
from snapcore import connect
from snapcore.errors import Code, ProviderError

from .docker_fixtures import MakeContainer, Proxy


async def test_a_container_is_compared_in_few_calls(make_container: MakeContainer, docker_proxy: Proxy, tmp_path: Path) -> None:
    work = tmp_path / "bound"
    for number in range(60):
        (work / f"folder-{number}").mkdir(parents=True)
        for name in range(20):
            (work / f"folder-{number}" / f"file-{name}.txt").write_text(f"{number} {name}\n")
    binds = {"binds": [f"{work}:{work}"]}
    handle = await connect(f"docker://{make_container(host=binds)}{work}")
    async with snapcore.open_repository("memory://") as repo:
        checkpoint = await repo.capture(handle, thread_id="t")
        (work / "folder-7" / "file-7.txt").write_text("8 8\n")
        (work / "folder-9" / "file-1.txt").unlink()
        (work / "new\n").write_text("new\n")
        os.mkfifo(work / "fifo")
        del docker_proxy.requests[:]
        found = await repo.compare(checkpoint, handle)
        assert len(docker_proxy.calls) <= 4, docker_proxy.calls
        assert [d.path for d in (*found.added, *found.changed, *found.removed)] == [
            b"new\n",
            b"folder-7/file-7.txt",
            b"folder-9/file-1.txt",
        ]
        assert [(s.path, s.reason) for s in found.skipped] == [(b"fifo", "a FIFO")]
        del docker_proxy.requests[:]
        patches = [p async for p in repo.patches(found, checkpoint, handle)]
        assert len(docker_proxy.calls) <= 3, docker_proxy.calls
        assert [p.data.splitlines()[-1] for p in patches] == [b"+8 8", b"-9 1", b"+new"]
        (work / ".snapcore-stage").mkdir()
        (work / ".snapcore-stage" / "journal").write_text("steps")
        with pytest.raises(ProviderError) as caught:
            await repo.compare(checkpoint, handle)
        assert caught.value.code == Code.WORKSPACE_BUSY
        assert (work / ".snapcore-stage" / "journal").read_text() == "steps"
    await handle.close()
