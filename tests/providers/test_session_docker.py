"""Sessions in real containers: system packages after a resume, pausing, and workers that were superseded."""

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore import Repository
from snapcore.errors import CheckpointWriterConflictError, CheckpointWriterLostError, Code, ProviderError, SnapshotError
from snapcore.providers.docker import DockerProvider, DockerSandbox
from snapcore.sandboxes import SandboxHandle, SandboxSpec
from snapcore.session import Session

from .. import docker_engine as engines  # noqa: TID252 (tests are no package that could be named)

INSTALL = "dpkg --install hello.deb"


class Noting(DockerProvider):
    """Remembers what it made, to remove it in the end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.made: list[DockerSandbox] = []
        self.snapshots: list[str] = []

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        made = await super().create(spec)
        self.made.append(made)
        return made

    async def snapshot(self, handle: SandboxHandle) -> str:
        taken = await super().snapshot(handle)
        self.snapshots.append(taken)
        return taken


@pytest.fixture
async def provider(docker_host: str, docker_api: Any) -> AsyncIterator[Noting]:
    noting = Noting()
    yield noting
    for made in noting.made:
        await noting.destroy(made.binding)
    await noting.close()
    for image in noting.snapshots:
        with contextlib.suppress(Exception):
            docker_api.remove_image(image, force=True)


@pytest.fixture
async def repo(tmp_path: Path) -> AsyncIterator[Repository]:
    async with snapcore.open_repository(tmp_path / "repo") as opened:
        yield opened


@pytest.fixture
def debian(docker_engine: engines.Engine) -> SandboxSpec:
    return SandboxSpec(image=engines.image(docker_engine, "gnu"), options={"network_mode": "none"})


@pytest.fixture
def busybox(docker_engine: engines.Engine) -> SandboxSpec:
    return SandboxSpec(image=engines.image(docker_engine, "busybox"), options={"network_mode": "none"})


@pytest.fixture(scope="module")
def package() -> bytes:
    """Debian's package `hello`, kept for the next run; one made here where no mirror can be reached."""
    kept = engines.CACHE / "hello.deb"
    if not kept.exists():
        engines.CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as work:
            got = subprocess.run(["apt-get", "download", "hello"], cwd=work, check=False, capture_output=True)
            if got.returncode:
                _build(Path(work))
            next(Path(work).glob("*.deb")).replace(kept)
    return kept.read_bytes()


def _build(work: Path) -> None:
    tree = work / "hello"
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/hello").write_text("#!/bin/sh\necho 'Hello, world!'\n")
    (tree / "usr/bin/hello").chmod(0o755)
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(
        "Package: hello\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@localhost>\nDescription: says hello\n"
    )
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, work / "hello.deb"], check=True, capture_output=True)


async def install(session: Session, package: bytes, **options: Any) -> bool:
    """Install the package; whether that was replayed."""
    await session.write_file("hello.deb", package)
    done = await session.exec(INSTALL, **options)
    assert done.exit_code == 0, done.stderr
    return done.replayed


async def greets(session: Session) -> bool:
    """Use what was installed."""
    done = await session.exec("hello", affects=False)
    return (done.exit_code, done.stdout) == (0, b"Hello, world!\n")


# ----------------------------------------------------------------------------------------------- outside of the roots


async def test_a_system_package_is_there_after_a_resume_by_a_native_snapshot(
    repo: Repository, provider: Noting, debian: SandboxSpec, package: bytes
) -> None:
    async with await repo.session(provider, thread_id="t", spec=debian) as session:
        assert not await install(session, package)
        await session.checkpoint("installed", native=True)
        await session.write_file("later", "x")
    first = session.sandbox_id
    await session.destroy()
    async with await repo.resume("t", spec=debian) as session:
        assert session.sandbox_id != first
        assert session.warnings == []
        assert await install(session, package)  # replayed: nothing was installed
        await session.checkpoint("installed")
        assert await greets(session)
        # the workspace is the checkpoint's, not the snapshot's
        assert (await session.exec("ls", affects=False)).stdout == b"hello.deb\n"
        await session.checkpoint("plain")
    # of the checkpoint after it there is none, and a warning says so
    async with await repo.resume("t", spec=debian, replay="off") as session:
        assert any("dpkg" in warning for warning in session.warnings)
        assert not await greets(session)


async def test_a_system_package_is_there_after_a_resume_that_installs_it_again(
    repo: Repository, provider: Noting, debian: SandboxSpec, package: bytes
) -> None:
    async with await repo.session(provider, thread_id="t", spec=debian) as session:
        assert not await install(session, package, outside=True)
        await session.checkpoint("installed")
    await session.destroy()
    for _ in range(2):
        async with await repo.resume("t", label="installed", spec=debian) as session:
            assert session.warnings == []
            assert not await install(session, package, outside=True)  # live, in its place
            await session.checkpoint("installed")
            assert session.replaying == 0
            assert await greets(session)


async def test_where_nobody_said_that_it_reaches_outside_a_warning_says_what_may_lack(
    repo: Repository, provider: Noting, debian: SandboxSpec, package: bytes
) -> None:
    async with await repo.session(provider, thread_id="t", spec=debian) as session:
        await install(session, package)
        await session.checkpoint()
    async with await repo.resume("t", spec=debian) as session:
        assert any(INSTALL in warning and "native=True" in warning for warning in session.warnings)
        assert await install(session, package)
        await session.checkpoint()
        assert not await greets(session)


async def test_a_native_snapshot_that_is_gone_is_made_up_for(
    repo: Repository, provider: Noting, debian: SandboxSpec, package: bytes, docker_api: Any
) -> None:
    async with await repo.session(provider, thread_id="t", spec=debian) as session:
        await install(session, package, outside=True)
        await session.checkpoint("installed", native=True)
    docker_api.remove_image(provider.snapshots[-1], force=True)
    async with await repo.resume("t", spec=debian) as session:
        assert any("snapshot" in warning and "gone" in warning for warning in session.warnings)
        assert not await install(session, package, outside=True)
        await session.checkpoint("installed")
        assert await greets(session)


async def test_a_fork_of_a_live_sandbox_takes_the_system_with_it_when_asked(
    repo: Repository, provider: Noting, debian: SandboxSpec, package: bytes
) -> None:
    async with await repo.session(provider, thread_id="t", spec=debian) as session:
        await install(session, package)
        async with await session.fork("u", native=True) as fork:
            assert await greets(fork)
            await fork.exec("dpkg --purge hello")
            assert not await greets(fork)
        assert await greets(session)


# ------------------------------------------------------------------------------------------------- pausing, and capture


def state(docker_api: Any, session: Session) -> str:
    return str(docker_api.inspect_container(session.binding.sandbox_id)["State"]["Status"])


async def test_a_paused_session_goes_on_with_its_next_operation(
    repo: Repository, provider: Noting, busybox: SandboxSpec, docker_api: Any
) -> None:
    opened: list[str] = []

    async def hook(handle: SandboxHandle) -> None:
        opened.append(handle.sandbox_id)

    async with await repo.session(provider, thread_id="t", spec=busybox, on_open=[hook]) as session:
        await session.exec("echo 1 > a; sleep 1000 > /dev/null 2>&1 & echo $! > number")
        await session.pause()
        await session.pause()
        assert state(docker_api, session) == "paused"
        with pytest.raises(ProviderError, match="paused"):
            _ = session.handle
        assert (await session.exec("cat a; kill -0 $(cat number) && echo alive")).stdout == b"1\nalive\n"  # memory is kept too
        assert state(docker_api, session) == "running"
        assert opened == [session.sandbox_id] * 2
        await session.pause()
    assert state(docker_api, session) == "paused"
    async with await repo.session(provider, thread_id="t") as again:
        assert again.sandbox_id == session.sandbox_id
        assert (await again.exec("cat a")).stdout == b"1\n"
    kinds = [event.kind for event in await repo.events("t")]
    assert kinds == [
        "sandbox.created", "exec.started", "exec.completed", "sandbox.paused", "sandbox.opened", "exec.started", "exec.completed",
        "sandbox.paused", "sandbox.closed", "sandbox.opened", "exec.started", "exec.completed", "sandbox.closed",
    ]  # fmt: skip


async def test_a_paused_sandbox_is_captured_and_paused_again(
    repo: Repository, provider: Noting, busybox: SandboxSpec, docker_api: Any
) -> None:
    async with await repo.session(provider, thread_id="t", spec=busybox) as session:
        await session.write_file("a", "x")
        await session.pause()
        checkpoint = await session.checkpoint("paused")
        assert state(docker_api, session) == "paused"
        with pytest.raises(SnapshotError):
            await session.checkpoint("x", artifacts={"": b""})  # and also when the capture fails
        assert state(docker_api, session) == "paused"
        assert await repo.read_file(checkpoint, b"a") == b"x"
        await session.destroy()
        with pytest.raises(ProviderError) as caught:
            await provider.open(session.binding)
        assert caught.value.code == Code.NO_SANDBOX


async def test_a_superseded_worker_neither_pauses_nor_wakes_the_sandbox(
    repo: Repository, provider: Noting, busybox: SandboxSpec, docker_api: Any, tmp_path: Path
) -> None:
    old = await repo.session(provider, thread_id="t", spec=busybox)
    async with snapcore.open_repository(tmp_path / "repo") as other, await other.session(provider, thread_id="t") as new:
        with pytest.raises(CheckpointWriterLostError):
            await old.pause()
        assert state(docker_api, new) == "running"
        with pytest.raises(CheckpointWriterLostError):
            await old.checkpoint(native=True)
        assert provider.snapshots == []
    paused = await repo.session(provider, thread_id="t")
    await paused.pause()
    async with snapcore.open_repository(tmp_path / "repo") as other, await other.session(provider, thread_id="t") as new:
        await new.pause()
        for work in (paused.exec("echo x > x"), paused.write_file("x", "x"), paused.checkpoint(), paused.pause()):
            with contextlib.suppress(CheckpointWriterLostError):
                await work
            assert state(docker_api, new) == "paused"
        assert (await new.exec("ls")).stdout == b""
        await paused.close()
        await old.close()


async def test_a_takeover_waits_for_a_pause_that_has_begun(
    repo: Repository, provider: Noting, busybox: SandboxSpec, docker_api: Any, tmp_path: Path
) -> None:
    session = await repo.session(provider, thread_id="t", spec=busybox)
    pausing, go_on = asyncio.Event(), asyncio.Event()

    async def slow(handle: SandboxHandle) -> None:
        pausing.set()
        await go_on.wait()
        await DockerProvider.pause(provider, handle)

    provider.pause = slow  # type: ignore[method-assign]
    work = asyncio.create_task(session.pause())
    await pausing.wait()
    async with snapcore.open_repository(tmp_path / "repo") as other:
        with pytest.raises(CheckpointWriterConflictError):
            await other.session(provider, thread_id="t")
        taking = asyncio.create_task(other.session(provider, thread_id="t", wait=60))
        go_on.set()
        await work
        async with await taking as new:
            assert state(docker_api, new) == "running"
            assert (await new.exec("echo awake")).stdout == b"awake\n"
    await session.close()


async def test_a_pause_that_is_cancelled_has_paused(
    repo: Repository, provider: Noting, busybox: SandboxSpec, docker_api: Any
) -> None:
    async with await repo.session(provider, thread_id="t", spec=busybox) as session:
        pausing = asyncio.create_task(session.pause())
        while [event.kind for event in await repo.events("t")][-1] != "sandbox.paused":
            pass
        pausing.cancel()
        await asyncio.wait([pausing])
        assert state(docker_api, session) == "paused"
        assert (await session.exec("echo on")).stdout == b"on\n"


async def test_a_container_that_was_removed_is_told_and_resumed(
    repo: Repository, provider: Noting, busybox: SandboxSpec, docker_api: Any
) -> None:
    async with await repo.session(provider, thread_id="t", spec=busybox) as session:
        await session.exec("echo 1 > a")
        await session.checkpoint()
        docker_api.remove_container(session.binding.sandbox_id, force=True)
        with pytest.raises(ProviderError):
            await session.exec("echo 2 > a")
    with pytest.raises(ProviderError, match="resume") as caught:
        await repo.session(provider, thread_id="t")
    assert caught.value.code == Code.NO_SANDBOX
    async with await repo.resume("t", spec=busybox) as session:
        assert len(session.uncertain) == 1
        assert (await session.exec("echo 1 > a")).replayed


async def test_environment_user_and_hooks_reach_the_container(repo: Repository, provider: Noting, busybox: SandboxSpec) -> None:
    async def hook(handle: SandboxHandle) -> None:
        await handle.exec(f"echo by the hook > {handle.workspace_root}/made", user="root")

    spec = SandboxSpec(
        image=busybox.image, user="dev", environment={"A": "1"}, labels={"x": "y"}, options={"network_mode": "none"}
    )
    async with await repo.session(provider, thread_id="t", spec=spec, on_create=[hook]) as session:
        done = await session.exec('id -un; echo "$A $B"; cat made', environment={"B": "2"})
        assert done.stdout == b"dev\n1 2\nby the hook\n"
        assert (await session.exec("id -un", user="root")).stdout == b"root\n"


async def test_bytes_that_are_no_text_are_refused_and_not_replaced(
    repo: Repository, provider: Noting, busybox: SandboxSpec
) -> None:
    async with await repo.session(provider, thread_id="t", spec=busybox) as session:
        attempts: list[tuple[Any, dict[str, Any]]] = [
            (["printf", "a\udcff"], {}),
            ("true", {"environment": {"A": "\udcff"}}),
            ("true", {"cwd": "\udcff"}),
        ]
        for command, options in attempts:
            with pytest.raises(SnapshotError) as raised:
                await session.exec(command, **options)
            assert raised.value.code == Code.INVALID_REQUEST
        assert session.uncertain == ()
        assert (await session.exec("printf '\\377'")).stdout == b"\xff"
