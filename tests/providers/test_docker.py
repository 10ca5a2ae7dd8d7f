"""Running containers, their engine at a distance, broken connections, and what is left of a command that is given up.

Cases 4, 23 and 24 on Docker, through the tools of busybox and of GNU; `test_docker_cases.py` has the others.
"""

import asyncio
import hashlib
import os
import secrets
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import Code, ProviderError, SnapcoreError, SnapshotError
from snapcore.providers.docker import DockerProvider, DockerSandbox, connect, docker
from snapcore.providers.docker_archive import ArchiveWorkspace
from snapcore.providers.docker_shell import DockerShell
from snapcore.providers.shell import ShellWorkspace
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree
from snapcore.testing.workspace_suite import Selecting, scan_all

from .. import docker_engine as engines  # noqa: TID252 (tests are no package that could be named)
from .checkpoint_cases import EVERYTHING, digest
from .docker_fixtures import MakeContainer, Proxy


@pytest.fixture
def bound(tmp_path: Path) -> Path:
    """A folder of this host that a container has at the same path."""
    root = tmp_path / "workspace"
    root.mkdir()
    return root


def at(root: Path) -> dict[str, Any]:
    return {"binds": [f"{root}:{root}"]}


def empty(root: Path) -> None:
    """Leave one file in a folder, which no checkpoint of the tests has."""
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (root / "before").write_text("before")


def differences(a: Path, b: Path, image: str) -> list[str]:
    """How two trees differ. What busybox puts back has times of whole seconds."""
    return [line for line in compare_trees(a, b) if image != "busybox" or "mtime" not in line]


async def output(shell: DockerShell, script: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    async with shell.pipe(script, stdin) as pipe:
        data = b"".join([piece async for piece in pipe.stdout()])
        result = await pipe.wait()
    return result.exit_code, data, result.stderr


def shell_of(handle: DockerSandbox) -> DockerShell:
    return DockerShell(handle.engine, handle.binding.sandbox_id, handle.sandbox_id)


@pytest.mark.parametrize("image", ["busybox", "gnu"])
async def test_five_rounds_through_a_running_container_are_equal_each_time(
    image: str, make_container: MakeContainer, docker_host: str, bound: Path, tmp_path: Path
) -> None:
    """Case 4; and case 24: a capture changes nothing."""
    make_tree(bound, files=60)
    first = await connect(f"docker://{make_container(image, host=at(bound))}{bound}")
    assert isinstance(first.workspace(), ShellWorkspace)
    async with snapcore.open_repository("memory://") as repo:
        for number in range(5):
            before = digest(bound)
            await repo.capture(first, thread_id="t", policy=EVERYTHING)
            assert digest(bound) == before
            copy = tmp_path / f"copy-{number}"
            await repo.restore(str(copy), thread_id="t")
            assert differences(bound, copy, image) == []
            mutate_tree(bound, seed=number)
            await repo.restore(first, thread_id="t")
            assert differences(copy, bound, image) == []
            mutate_tree(bound, seed=100 + number)
    await first.close()


async def test_the_sandbox_is_this_container_on_this_engine(make_container: MakeContainer, docker_host: str) -> None:
    one, two = await connect(f"docker://{make_container()}/tmp"), await connect(f"docker://{make_container()}/tmp")
    again = await connect(f"docker://{one.binding.sandbox_id[:12]}/root")
    assert one.sandbox_id == again.sandbox_id != two.sandbox_id
    assert one.sandbox_id == f"docker://{one.engine.id}/{one.binding.sandbox_id}"
    for handle in (one, two, again):
        await handle.close()


async def test_a_paused_container_is_read_and_stays_paused(
    make_container: MakeContainer, docker_api: Any, docker_host: str, bound: Path
) -> None:
    make_tree(bound, files=10)
    container = make_container(host=at(bound))
    docker_api.pause(container)
    handle = await connect(f"docker://{container}{bound}")
    assert isinstance(handle.workspace(), ArchiveWorkspace)
    async with snapcore.open_repository("memory://") as repo:
        await repo.capture(handle, thread_id="t")
    assert docker_api.inspect_container(container)["State"]["Paused"]
    with pytest.raises(ProviderError, match="paused"):
        await handle.exec(["true"])
    await handle.close()
    docker_api.unpause(container)


@pytest.mark.parametrize(("image", "applet"), [("busybox", []), ("toolless", ["/busybox-sleeper"])])
async def test_commands_start_in_the_workspace_root_once_it_is_there(
    make_container: MakeContainer, docker_host: str, image: str, applet: list[str]
) -> None:
    """Not where the image starts them: that is what they fall back on, to make the root."""
    handle = await connect(f"docker://{make_container(image, working_dir='/elsewhere')}/deep/work space")

    async def place() -> bytes:
        result = await handle.exec([*applet, "pwd"])
        assert (result.exit_code, result.stderr) == (0, b"")
        return result.stdout

    assert await place() == b"/elsewhere\n"
    assert (await handle.exec([*applet, "mkdir", "-p", handle.workspace_root])).exit_code == 0
    assert await place() == b"/deep/work space\n"
    assert (await handle.exec([*applet, "rmdir", handle.workspace_root])).exit_code == 0
    assert await place() == b"/elsewhere\n"
    await handle.close()


async def test_frozen_it_is_read_at_rest_and_runs_again(make_container: MakeContainer, docker_api: Any, docker_host: str) -> None:
    """A writer keeps two files equal; only at rest are they found so every time, and it goes on afterwards."""
    write = "mkdir -p /w; n=0; while :; do n=$((n+1)); echo $n > /w/t; mv /w/t /w/a; echo $n > /w/t; mv /w/t /w/b; done"
    container = make_container(command=["sh", "-c", write])
    handle = await connect(f"docker://{container}/w?freeze=1")
    workspace = handle.workspace()
    assert isinstance(workspace, ArchiveWorkspace)
    numbers: list[int] = []
    async with asyncio.timeout(120):
        while len(set(numbers)) < 3:
            files = {stat.path: stat for stat in await scan_all(workspace)}
            if b"b" not in files:
                continue  # it has hardly begun
            blocks = [block async for batch in workspace.read([files[b"a"], files[b"b"]]) for block in batch]
            a, b = (int(bytes(block.data) or b"0") for block in blocks if block.data or block.last)
            assert a - b in (0, 1)
            numbers.append(a)
            assert not docker_api.inspect_container(container)["State"]["Paused"]
    await handle.close()


async def test_a_cancelled_freeze_leaves_the_container_running(
    make_container: MakeContainer, docker_api: Any, docker_host: str, bound: Path
) -> None:
    (bound / "large").write_bytes(os.urandom(32 << 20))
    container = make_container(host=at(bound))
    handle = await connect(f"docker://{container}{bound}?freeze=1")
    reached, go = threading.Event(), threading.Event()

    class Waiting(Selecting):
        def excludes(self, path: bytes, kind: int) -> bool:
            reached.set()
            assert go.wait(60)
            return False

    scanning = asyncio.create_task(scan_all(handle.workspace(), Waiting()))
    assert await asyncio.to_thread(reached.wait, 60)
    scanning.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await scanning
    assert not docker_api.inspect_container(container)["State"]["Paused"]
    await handle.close()


async def test_a_frozen_container_is_unpaused_after_the_connection_broke(
    make_container: MakeContainer, docker_api: Any, docker_proxy: Proxy, bound: Path
) -> None:
    (bound / "large").write_bytes(os.urandom(32 << 20))
    container = make_container(host=at(bound))
    handle = await connect(f"docker://{container}{bound}?freeze=1")
    docker_proxy.break_after = docker_proxy.received + (4 << 20)

    async def mend() -> None:
        await docker_proxy.broken.wait()
        docker_proxy.mend()

    mending = asyncio.create_task(mend())
    with pytest.raises(ProviderError) as caught:
        await scan_all(handle.workspace())
    await mending
    assert caught.value.code == Code.SANDBOX_UNAVAILABLE
    assert caught.value.retryable
    assert not docker_api.inspect_container(container)["State"]["Paused"]
    await handle.close()


async def test_a_capture_of_many_files_with_few_changes_takes_few_calls(
    make_container: MakeContainer, docker_proxy: Proxy, bound: Path
) -> None:
    for number in range(100):
        folder = bound / f"folder-{number}"
        folder.mkdir()
        for name in range(50):
            (folder / f"file-{name}.txt").write_text(f"{number} {name}\n")
    handle = await connect(f"docker://{make_container(host=at(bound))}{bound}")
    async with snapcore.open_repository("memory://") as repo:
        await repo.capture(handle, thread_id="t")
        changed = [bound / f"folder-{number}" / "file-7.txt" for number in range(0, 90, 6)]
        for path in changed:
            path.write_bytes(os.urandom(20_000))
        del docker_proxy.requests[:]
        received = docker_proxy.received
        await repo.capture(handle, thread_id="t")
        assert len(docker_proxy.calls) <= 4, docker_proxy.calls
        # the scan's own stats, and the changed files
        assert docker_proxy.received - received < 15 * 20_000 + 5_000 * 300
        for path in changed:
            inner = os.fsencode(path.relative_to(bound))
            assert await repo.read_file(await repo.resolve("latest", "t"), inner) == path.read_bytes()
    await handle.close()


async def test_input_ends_and_output_still_comes_at_a_distance_and_through_tls(
    make_container: MakeContainer, docker_engine: engines.Engine, docker_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = make_container()
    data = os.urandom(3 << 20)
    for secure in (False, True):
        if secure:
            monkeypatch.setenv("DOCKER_HOST", docker_engine.tls_host)
            monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
            monkeypatch.setenv("DOCKER_CERT_PATH", docker_engine.certificates)
        handle = await connect(f"docker://{container}/tmp")
        async with asyncio.timeout(120):
            assert await output(shell_of(handle), "sha256sum | cut -c1-8; cat; echo end >&2", data) == (
                0, hashlib.sha256(data).hexdigest()[:8].encode() + b"\n", b"end\n",
            )  # fmt: skip
            code, back, _ = await output(shell_of(handle), "cat; echo more", data)
            assert (code, back) == (0, data + b"more\n")
        await handle.upload("/tmp/file", data)
        assert b"".join([piece async for piece in handle.download("/tmp/file")]) == data
        await handle.close()


async def test_a_command_that_does_not_take_its_input_ends_nevertheless(make_container: MakeContainer, docker_host: str) -> None:
    """More than all buffers on the way hold: the engine takes no more of it once the command has ended."""
    handle = await connect(f"docker://{make_container()}/tmp")
    async with asyncio.timeout(120):
        assert await output(shell_of(handle), "echo done; exit 7", bytes(30 << 20)) == (7, b"done\n", b"")
        assert (await handle.exec("echo done", stdin=bytes(30 << 20))).stdout == b"done\n"
    await handle.close()


async def test_a_pipe_that_is_left_early_ends_its_processes(
    make_container: MakeContainer, docker_api: Any, docker_host: str
) -> None:
    container = make_container()
    handle = await connect(f"docker://{container}/tmp")
    async with shell_of(handle).pipe("sleep 4242 & yes") as pipe:
        async for piece in pipe.stdout():
            assert piece
            break
    async with asyncio.timeout(60):
        while any("4242" in str(line) or "yes" in line[-1] for line in docker_api.top(container)["Processes"]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await handle.close()


async def test_many_pipes_at_once(make_container: MakeContainer, docker_host: str) -> None:
    handle = await connect(f"docker://{make_container()}/tmp")
    shell = shell_of(handle)
    results = await asyncio.gather(*(output(shell, f"cat; exit {number}", b"%d" % number) for number in range(40)))
    assert [(code, data) for code, data, _ in results] == [(number, b"%d" % number) for number in range(40)]
    await handle.close()


@pytest.mark.parametrize("end", ["kill", "remove"])
async def test_a_container_that_ends_in_the_middle_is_told(
    end: str, make_container: MakeContainer, docker_api: Any, docker_host: str
) -> None:
    container = make_container()
    handle = await connect(f"docker://{container}/tmp")

    async def use() -> None:
        async with shell_of(handle).pipe("echo begun; sleep 1000") as pipe:
            async for stream, _ in pipe.output():
                if stream == "stdout":
                    docker_api.kill(container) if end == "kill" else docker_api.remove_container(container, force=True)
            await pipe.wait()

    with pytest.raises(ProviderError) as caught:
        await use()
    told = caught.value
    assert (told.code, told.retryable) == (Code.SANDBOX_UNAVAILABLE if end == "kill" else Code.NO_SANDBOX, False)
    with pytest.raises(SnapcoreError):
        await scan_all(handle.workspace())
    await handle.close()


async def test_a_capture_whose_engine_goes_away_is_a_typed_error_and_the_head_stays(
    make_container: MakeContainer, docker_proxy: Proxy, bound: Path
) -> None:
    make_tree(bound, files=40, big_bytes=16 << 20)
    handle = await connect(f"docker://{make_container(host=at(bound))}{bound}")
    async with snapcore.open_repository("memory://") as repo:
        docker_proxy.break_after = docker_proxy.received + (2 << 20)
        with pytest.raises(ProviderError) as caught:
            await repo.capture(handle, thread_id="t")
        assert caught.value.code == Code.SANDBOX_UNAVAILABLE
        assert caught.value.retryable
        assert list(await repo.list("t")) == []
    await handle.close()


@pytest.mark.parametrize("share", [0.3, 0.7, 0.97])
async def test_a_restore_that_is_cut_off_leaves_the_tree_as_it_was_or_is_finished_by_the_next(
    share: float, make_container: MakeContainer, docker_proxy: Proxy, bound: Path, tmp_path: Path
) -> None:
    """Case 23, on the way in."""
    make_tree(bound, files=40, big_bytes=4 << 20)
    container = make_container("gnu", host=at(bound))
    async with snapcore.open_repository("memory://") as repo:
        await repo.capture(str(bound), thread_id="t", policy=EVERYTHING)
        await repo.restore(str(tmp_path / "target"), thread_id="t")
        handle = await connect(f"docker://{container}{bound}")
        empty(bound)
        sent = docker_proxy.sent
        await repo.restore(handle, thread_id="t")
        whole = docker_proxy.sent - sent
        empty(bound)
        docker_proxy.break_after_sent = docker_proxy.sent + int(share * whole)
        with pytest.raises(ProviderError) as caught:
            await repo.restore(handle, thread_id="t")
        assert docker_proxy.broken.is_set()
        assert (caught.value.code, caught.value.retryable) == (Code.SANDBOX_UNAVAILABLE, True)
        docker_proxy.mend()
        there = sorted(path.name for path in bound.iterdir() if not path.name.startswith(".snapcore"))
        assert there == ["before"] or await handle.workspace().recover() == "finished"
        receipt = await repo.restore(handle, thread_id="t")
        assert receipt is not None
        assert receipt.differences == ()
    assert compare_trees(bound, tmp_path / "target") == []
    await handle.close()


async def test_errors_name_what_is_wrong_and_never_a_value_of_the_environment(
    docker_engine: engines.Engine, docker_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = secrets.token_hex(12)
    provider = DockerProvider()
    image = engines.image(docker_engine, "busybox")
    mine = f"snapcore-test-{secrets.token_hex(6)}"
    bad: list[dict[str, Any]] = [{"user": "no-such-user"}, {"options": {"binds": ["relative:/x:" + secret]}}]
    for fields in bad:
        template = docker(image=image, name=mine, environment={"TOKEN": secret}, **fields)
        with pytest.raises(SnapcoreError) as caught:
            await template.create()
        assert secret not in str(caught.value)
        assert secret not in repr(template.spec)
        await template.close()
    for name in (mine, "snapcore-no-such-container"):  # nothing is left of what could not be made
        with pytest.raises(ProviderError) as missing:
            await connect(f"docker://{name}/w")
        assert missing.value.code == Code.NO_SANDBOX
        assert missing.value.message == f"There is no such Docker container: {name}."
    for address in (
        "docker:///w",
        "docker://a b/w",
        "docker://x/w?frozen=1",
        "docker://x/w?freeze=yes",
        "docker://me:pa55word@x/w",
    ):
        with pytest.raises(SnapshotError) as refused:
            await connect(address)
        assert "pa55word" not in str(refused.value)
        assert refused.value.code == Code.INVALID_REQUEST
    # a port: of a Unix socket that is not there, the package leaves its own one open, which a later test would be blamed for
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(ProviderError) as gone:
        await connect("docker://x/w")
    assert gone.value.code == Code.SANDBOX_UNAVAILABLE
    assert gone.value.retryable
    await provider.close()
