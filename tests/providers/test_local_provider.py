"""Folders of this host by the provider suite, and what only they do."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.providers.local import LocalProvider, LocalSandbox
from snapcore.sandboxes import Binding, Hook, SandboxProvider, SandboxSpec
from snapcore.testing import ProviderTests


class TestLocalProvider(ProviderTests):
    other_user = "nobody" if os.geteuid() == 0 else None

    @pytest.fixture(autouse=True)
    def base(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "sandboxes"

    def make_provider(self, *, on_create: Sequence[Hook] = (), on_open: Sequence[Hook] = ()) -> SandboxProvider:
        return LocalProvider(self.folder, on_create=on_create, on_open=on_open)


async def refused(path: Path, binding: Binding) -> None:
    provider = LocalProvider(path)
    with pytest.raises(ProviderError) as caught:
        await provider.destroy(binding)
    assert caught.value.code == Code.NO_SANDBOX
    with pytest.raises(ProviderError) as caught:
        await provider.open(binding)
    assert caught.value.code == Code.NO_SANDBOX


async def test_only_folders_of_the_provider_are_opened_and_destroyed(tmp_path: Path) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    for folder in (base / "inner" / "deep", other):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    (base / "link").symlink_to(other)
    made = LocalSandbox(base / "inner").binding
    for root in (other, base, tmp_path, Path("/"), base / "inner" / "deep"):
        await refused(base, msgspec.structs.replace(made, workspace_root=str(root)))
    for root_text in (f"{base}/..", f"{base}/", f"{base}/.", f"{base}/inner/..", "", "inner"):
        await refused(base, msgspec.structs.replace(made, workspace_root=root_text))
    await refused(base, msgspec.structs.replace(made, provider="docker"))
    await refused(base, msgspec.structs.replace(made, sandbox_id=f"file://another-host{base}/inner"))
    await LocalProvider(base).destroy(LocalSandbox(base / "link").binding)
    assert (other / "file").exists()
    assert (base / "inner" / "deep" / "file").exists()


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/abs", "a\0b", "x" * 101, "a\n"])
async def test_names_that_could_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        await LocalProvider(tmp_path / "base").create(SandboxSpec(name=name))
    assert caught.value.code == Code.INVALID_REQUEST
    assert os.listdir(tmp_path) == []


async def test_a_name_is_taken_once(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path)
    first = await provider.create(SandboxSpec(name="box"))
    await first.upload(f"{tmp_path}/box/file", b"first")
    with pytest.raises(SnapshotError, match="already"):
        await provider.create(SandboxSpec(name="box"))
    assert (tmp_path / "box" / "file").read_bytes() == b"first"


@pytest.mark.parametrize(
    "asked",
    [{"image": "debian"}, {"snapshot": "s"}, {"cpus": 1.0}, {"memory_bytes": 1}, {"labels": {"a": "b"}}, {"timeout": 9.0}],
)
async def test_what_a_folder_cannot_give_is_refused(tmp_path: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(ProviderError, match=next(iter(asked))) as caught:
        await LocalProvider(tmp_path).create(SandboxSpec(**asked))
    assert caught.value.code == Code.NOT_CAPABLE
    assert os.listdir(tmp_path) == []


async def test_commands_see_nothing_of_the_environment_of_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_TOKEN", "worker-token")
    result = await LocalSandbox(tmp_path).exec(["env"])
    assert b"PATH=" in result.stdout
    assert b"worker-token" not in result.stdout


async def test_a_destroyed_folder_takes_what_runs_there_with_it(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path)
    handle = await provider.create(SandboxSpec())
    started = asyncio.Event()
    running = asyncio.create_task(handle.exec("echo; exec sleep 3000", on_output=lambda *_: started.set()))
    await started.wait()
    await provider.destroy(handle.binding)
    with pytest.raises(ProviderError) as caught:
        await running
    assert caught.value.code == Code.NO_SANDBOX


async def test_what_a_command_started_ends_with_it_when_it_takes_too_long(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path)
    with pytest.raises(ProviderError) as caught:
        await sandbox.exec("sleep 3000 & echo $! > pid; exit 0", timeout=2.0)
    assert caught.value.code == Code.EXEC_TIMEOUT
    pid = (tmp_path / "pid").read_text().strip()
    async with asyncio.timeout(60):
        # not a child of this process, which could be told
        while os.path.exists(f"/proc/{pid}") and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_command_that_is_cancelled_as_it_starts_ends_with_what_it_started(tmp_path: Path) -> None:
    """After any number of turns of the loop; the sleep would go on otherwise, and be waited for."""
    handle = await LocalProvider(tmp_path).create(SandboxSpec())
    for turns in range(40):
        running = asyncio.create_task(handle.exec("sleep 600; true"))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=60)
        assert done, f"after {turns} turns"
        assert running.cancelled()
    await handle.close()


async def test_an_error_of_on_output_ends_the_command(tmp_path: Path) -> None:
    def on_output(stream: str, piece: bytes) -> None:
        raise ValueError("not wanted")

    with pytest.raises(ValueError, match="not wanted"):
        await LocalSandbox(tmp_path).exec("echo; exec sleep 3000", on_output=on_output)


async def test_locked_and_deep_folders_are_destroyed_too(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path)
    handle = await provider.create(SandboxSpec(name="box"))
    folder = os.open(tmp_path / "box", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("f", 0o700, dir_fd=folder)
        inner = os.open("f", os.O_RDONLY, dir_fd=folder)
        os.fchmod(folder, 0o500)
        os.close(folder)
        folder = inner
    os.close(folder)
    await provider.destroy(handle.binding)
    assert os.listdir(tmp_path) == []


async def test_a_destroy_that_was_interrupted_is_finished_by_the_next(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path)
    handle = await provider.create(SandboxSpec())
    (tmp_path / ".destroyed.0123456789abcdef").mkdir()
    await provider.destroy(handle.binding)
    assert os.listdir(tmp_path) == []
