"""A checkpoint taken in one kind of sandbox restores into another and back, equal each time: contents, modes, links, hard links,
times. What the other side cannot hold is in the receipt. Cases 4, 12, 14, 15, 16 and 17, from provider to provider.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.model import Checkpoint
from snapcore.providers.local import LocalProvider
from snapcore.sandboxes import SandboxHandle, SandboxProvider, SandboxSpec
from snapcore.testing.trees import compare_trees, make_tree

from .. import docker_engine as engines  # noqa: TID252  # the tests are no package that could be named
from .. import services  # noqa: TID252
from .. import ssh_server as servers  # noqa: TID252
from .e2b_service import REAL, need_server

NOBODY = 65534
EVERYTHING = snapcore.FilePolicy.everything()

Given = pytest.FixtureRequest
Opened = AbstractAsyncContextManager[SandboxHandle]


@contextlib.asynccontextmanager
async def made(provider: SandboxProvider, spec: SandboxSpec) -> AsyncIterator[SandboxHandle]:
    """A new sandbox, destroyed in the end."""
    handle = await provider.create(spec)
    try:
        yield handle
    finally:
        await handle.close()
        await provider.destroy(handle.binding)


@contextlib.asynccontextmanager
async def at(address: str) -> AsyncIterator[SandboxHandle]:
    """The sandbox at an address."""
    handle: SandboxHandle = await snapcore.connect(address)
    try:
        yield handle
    finally:
        await handle.close()


def a_local_folder(given: Given) -> Opened:
    return made(LocalProvider(given.getfixturevalue("tmp_path") / "sandboxes"), SandboxSpec())


def by_ssh(given: Given) -> Opened:
    server: servers.SshServer = given.getfixturevalue("shared_ssh_on_path")
    folder = given.getfixturevalue("tmp_path") / "by-ssh"
    folder.mkdir()
    return at(f"ssh://{server.user}@127.0.0.1:{server.port}{folder}")


def need_superuser() -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser can become somebody else, or change the root")


def as_another_user(given: Given) -> Opened:
    need_superuser()
    base: Path = given.getfixturevalue("shared")
    (base / "owned").mkdir()
    os.chown(base / "owned", NOBODY, NOBODY)
    return at(f"exec:setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups {base}/owned")


def busybox_alone(given: Given) -> Opened:
    need_superuser()
    base: Path = given.getfixturevalue("shared")
    program = shutil.which("busybox")
    if program is None:
        reason = "busybox is not installed (Debian: apt-get install busybox-static)"
        if os.environ.get(services.REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)
    for name in ("bin", "dev", "tmp", "work"):
        (base / name).mkdir()
    os.mknod(base / "dev" / "null", 0o020666, os.makedev(1, 3))
    shutil.copy(program, base / "bin" / "busybox")
    subprocess.run(["chroot", base, "/bin/busybox", "--install", "-s", "/bin"], check=True)
    return at(f"exec:chroot {base} /work")


def e2b(given: Given) -> Opened:
    from snapcore.providers.e2b import E2BProvider
    from snapcore.testing.e2b_server import E2BServer

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[SandboxHandle]:
        if REAL:
            async with made(E2BProvider(timeout=600), SandboxSpec()) as handle:
                yield handle
            return
        need_server()
        with E2BServer() as server:
            options: dict[str, Any] = {**server.options}
            async with made(E2BProvider(timeout=600, **options), SandboxSpec()) as handle:
                yield handle

    return opened()


def docker(given: Given) -> Opened:
    from snapcore.providers.docker import DockerProvider

    engine: engines.Engine = given.getfixturevalue("docker_engine")
    given.getfixturevalue("docker_host")
    image = engines.image(engine, "busybox")
    return made(DockerProvider(), SandboxSpec(image=image, user="dev", options={"network_mode": "none"}))


SANDBOXES: list[Callable[[Given], Opened]] = [a_local_folder, by_ssh, as_another_user, busybox_alone, docker, e2b]
PAIRS = list(itertools.combinations(SANDBOXES, 2))


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that any user may go into."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


async def carry(repo: snapcore.Repository, checkpoint: Checkpoint, into: SandboxHandle, thread: str) -> Checkpoint:
    """Restore a checkpoint into a sandbox, and capture what is there then: the same, but for what the receipt names."""
    receipt = await repo.restore(into, thread_id=checkpoint.thread_id, checkpoint_id=checkpoint.id, verify="content")
    assert receipt is not None
    found = await repo.capture(into, thread_id=thread, policy=EVERYTHING)
    named = {path for path, _ in receipt.differences}
    diff = await repo.diff(checkpoint, found)
    assert {entry.path for entry in (*diff.added, *diff.removed, *diff.changed)} <= named
    if not named:
        assert found.content_id == checkpoint.content_id
    return found


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[f"{a.__name__}-{b.__name__}" for a, b in PAIRS])
async def test_a_tree_goes_from_one_into_the_other_and_back(
    first: Callable[[Given], Opened], second: Callable[[Given], Opened], request: Given, tmp_path: Path
) -> None:
    make_tree(tmp_path / "tree", files=25)
    async with snapcore.open_repository("memory://") as repo, first(request) as here, second(request) as there:
        origin = await repo.capture(str(tmp_path / "tree"), thread_id="origin", policy=EVERYTHING)
        one = await carry(repo, origin, here, "here")
        two = await carry(repo, one, there, "there")
        await there.upload(f"{there.workspace_root}/made-there", b"made there\n")
        three = await repo.capture(there, thread_id="there", policy=EVERYTHING)
        assert three.content_id != two.content_id
        four = await carry(repo, three, here, "here")
        assert await repo.read_file(four, b"made-there") == b"made there\n"
        five = await carry(repo, two, here, "here")
        await repo.restore(str(tmp_path / "copy"), thread_id="here", checkpoint_id=five.id)
        if five.content_id == origin.content_id:
            assert compare_trees(tmp_path / "tree", tmp_path / "copy") == []
        assert five.totals == two.totals
