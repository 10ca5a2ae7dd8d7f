"""Sandboxes of deepagents as sandboxes of snapcore, by the provider's and the workspace's suites, over deepagents' own local
shell. What its `execute` says is text with both streams in one, and cut where it is long. Covers case 22: 10,000 paths through a
handle that has commands and transfers only."""

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from deepagents.backends import CompositeBackend, LocalShellBackend, StateBackend
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse

import snapcore
from snapcore.errors import Code, ProviderError
from snapcore.integrations.deepagents import BackendSandbox, sandbox_of
from snapcore.integrations.deepagents_shell import BackendShell
from snapcore.providers.shell import ShellWorkspace
from snapcore.sandboxes import Abilities, Binding, Hook, SandboxHandle, SandboxProvider, SandboxSpec, lacks, run_hooks
from snapcore.testing import ProviderTests
from snapcore.testing.trees import compare_trees, make_tree
from snapcore.testing.workspace_suite import WorkspaceTests


def local_shell(folder: Path, **options: Any) -> LocalShellBackend:
    """A backend as remote ones are: real paths, and an `execute` that runs `sh`."""
    return LocalShellBackend(folder, virtual_mode=False, env={"PATH": os.environ["PATH"]}, **options)


class Provider:
    """Opens a folder behind `execute`, upload and download."""

    name = "deepagents"
    abilities = Abilities(exec=True)

    def __init__(self, on_open: Sequence[Hook]) -> None:
        self._on_open = on_open

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        raise lacks(self.name, "be made")

    async def open(self, binding: Binding) -> SandboxHandle:
        backend = local_shell(Path(binding.workspace_root))
        backend._sandbox_id = binding.sandbox_id.rpartition("/")[2]
        handle = BackendSandbox(backend, binding.workspace_root)
        await run_hooks(self._on_open, handle, handle.close)
        return handle

    async def destroy(self, binding: Binding) -> None:
        raise lacks(self.name, "be destroyed")

    async def pause(self, handle: SandboxHandle) -> None:
        raise lacks(self.name, "be paused")

    async def snapshot(self, handle: SandboxHandle) -> str:
        raise lacks(self.name, "take native snapshots")


class TestProvider(ProviderTests):
    """`exec` shows its output when the command has ended: two tests of the suite that wait for output before are replaced."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.root = tmp_path / "sandbox"
        self.root.mkdir()

    def make_provider(self, *, on_create: Sequence[Hook] = (), on_open: Sequence[Hook] = ()) -> SandboxProvider:
        return Provider(on_open)

    async def existing(self) -> Binding:
        return Binding("deepagents", "deepagents://LocalShellBackend/local-x", str(self.root))

    async def test_output_is_shown_while_the_command_runs(self, handle: SandboxHandle, abilities: Abilities) -> None:
        shown: list[tuple[str, bytes]] = []
        await handle.exec("echo out; echo err >&2", on_output=lambda stream, piece: shown.append((stream, piece)))
        assert shown == [("stdout", b"out\n"), ("stderr", b"err\n")]

    async def test_a_cancelled_command_is_ended(self, handle: SandboxHandle, abilities: Abilities) -> None:
        running = asyncio.create_task(handle.exec("echo $$ >pid.new; mv pid.new pid; sleep 1000; echo"))
        await until((self.root / "pid").exists)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        pid = int((self.root / "pid").read_text())
        await until(lambda: not Path(f"/proc/{pid}").exists())


class TestWorkspace(WorkspaceTests):
    def make_workspace(self, root: Path) -> ShellWorkspace:
        return ShellWorkspace(BackendShell(local_shell(Path("/"))), str(root))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in another process)
            await asyncio.sleep(0.01)


async def remote(tmp_path: Path, **options: Any) -> tuple[BackendSandbox, Path]:
    """A handle over a local shell, and the workspace's folder."""
    root = tmp_path / "workspace"
    root.mkdir()
    return BackendSandbox(local_shell(tmp_path, **options), str(root)), root


async def test_any_names_and_bytes_go_through(tmp_path: Path) -> None:
    handle, root = await remote(tmp_path)
    make_tree(root)
    (root / "bytes").write_bytes(bytes(range(256)) * 5000)
    (root / os.fsdecode(b"not utf-8 \xff\xfe\n")).write_bytes(secrets.token_bytes(3000))
    async with snapcore.open_repository("memory://") as repo:
        await repo.capture(handle, thread_id="thread")
        other = tmp_path / "other"
        receipt = await repo.restore(handle, thread_id="thread", workspace_root=str(other), verify="content")
    assert receipt is not None
    assert compare_trees(root, other) == []


async def test_thousands_of_paths_go_through(tmp_path: Path) -> None:
    handle, root = await remote(tmp_path)
    for i in range(2_500):
        folder = root / f"{'a long name of a folder ' * 3}{i % 50}"
        folder.mkdir(exist_ok=True)
        (folder / f"{'a long name of a file ' * 5}{i}").write_text(str(i))
    async with snapcore.open_repository("memory://") as repo:
        checkpoint = await repo.capture(handle, thread_id="thread")
        assert checkpoint.totals.files == 2_500
        other = tmp_path / "other"
        await repo.restore(handle, thread_id="thread", workspace_root=str(other))
        for path in list(other.rglob("*1")):
            if path.is_file():
                path.unlink()
        await repo.restore(handle, thread_id="thread", workspace_root=str(other))
    assert compare_trees(root, other) == []


async def test_input_and_output_larger_than_a_part_go_through(tmp_path: Path) -> None:
    handle, root = await remote(tmp_path)
    data = secrets.token_bytes(1 << 20) * 19 + b"and a rest"
    (root / "large").write_bytes(data)
    result = await handle.exec("cat; cat large >&2", stdin=data, max_output=32 << 20)
    assert result.stdout == data
    assert result.stderr == data


async def test_a_script_longer_than_an_argument_may_be_goes_through(tmp_path: Path) -> None:
    async with BackendShell(local_shell(tmp_path)).pipe(f"# {'it is long; ' * 30_000}\necho done") as pipe:
        assert b"".join([piece async for piece in pipe.stdout()]) == b"done\n"


async def test_what_execute_cuts_or_mangles_is_not_needed(tmp_path: Path) -> None:
    handle, root = await remote(tmp_path, max_output_bytes=200)
    (root / "file").write_bytes(b"\xff\x00" * 5000)
    result = await handle.exec("cat file; cat file >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == (b"\xff\x00" * 5000, b"\xff\x00" * 5000, 3)


class Lying(LocalShellBackend):
    """Does something else to answers and transfers."""

    cut: int | None = None
    short: list[str] = []
    raises: Exception | None = None

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        if self.raises is not None:
            raise self.raises
        answer = super().execute(command, timeout=timeout)
        return answer if self.cut is None else ExecuteResponse(answer.output[: self.cut], answer.exit_code, truncated=True)

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        found = super().download_files(paths)
        if self.short and paths[0].endswith(self.short[-1]):
            self.short.pop()
            return [FileDownloadResponse(paths[0], (found[0].content or b"")[:-1])]
        return found

    def upload_files(self, files: list[tuple[str, bytes]]) -> Any:
        if self.short == ["up"]:
            files = [(path, data[:-1]) for path, data in files]
        return super().upload_files(files)


def lying(tmp_path: Path) -> tuple[Lying, BackendSandbox]:
    backend = Lying(tmp_path, virtual_mode=False, env={"PATH": os.environ["PATH"]})
    return backend, BackendSandbox(backend, str(tmp_path))


async def test_an_answer_that_was_cut_before_its_end_is_an_error(tmp_path: Path) -> None:
    backend, handle = lying(tmp_path)
    await handle.exec("true")
    backend.cut = 40
    with pytest.raises(ProviderError, match="whether it did all its work is not known") as caught:
        await handle.exec("echo hello")
    assert not caught.value.retryable


async def test_a_download_that_is_cut_short_is_repeated_and_then_an_error(tmp_path: Path) -> None:
    backend, handle = lying(tmp_path)
    backend.short = ["out", "out"]
    assert (await handle.exec("echo hello")).stdout == b"hello\n"
    backend.short = ["out"] * 3
    with pytest.raises(ProviderError, match="another length") as caught:
        await handle.exec("echo hello")
    assert caught.value.retryable


async def test_an_upload_that_is_cut_short_is_an_error_and_the_command_does_not_run(tmp_path: Path) -> None:
    backend, handle = lying(tmp_path)
    backend.short = ["up"]
    with pytest.raises(ProviderError, match="did not arrive whole"):
        await handle.exec("touch ran; cat", stdin=b"input")
    assert not (tmp_path / "ran").exists()


async def test_what_a_backend_raises_is_told_without_its_words(tmp_path: Path) -> None:
    backend, handle = lying(tmp_path)
    backend.raises = KeyError("token-of-somebody")
    with pytest.raises(ProviderError, match="KeyError") as caught:
        await handle.exec("true")
    assert caught.value.code == Code.SANDBOX_UNAVAILABLE
    assert "token-of-somebody" not in str(caught.value)


async def test_nothing_is_left_behind(tmp_path: Path) -> None:
    pipe = BackendShell(local_shell(tmp_path)).pipe("cat; echo $SNAPCORE_PIPE; echo err >&2", b"in ")
    async with pipe:
        said = b"".join([piece async for piece in pipe.stdout()]).decode()
        assert (await pipe.wait()).stderr == b"err\n"
        folder = Path(said.removeprefix("in ").strip())
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    assert os.listdir(tmp_path) == []


async def test_a_root_that_holds_the_temporary_files_is_refused(tmp_path: Path) -> None:
    handle, _ = await remote(tmp_path)
    with pytest.raises(ProviderError) as caught:
        handle.workspace("/tmp")
    assert caught.value.code == Code.NOT_CAPABLE


async def test_local_backends_are_captured_where_they_work(tmp_path: Path) -> None:
    root = tmp_path / "root"
    backend = LocalShellBackend(root)  # its paths are virtual: uploads do not reach what commands see
    assert sandbox_of(backend).workspace_root == str(root)
    assert sandbox_of(CompositeBackend(default=backend, routes={"/memories/": StateBackend()})).workspace_root == str(root)
    backend.write("/hello.txt", "hello")
    async with snapcore.open_repository("memory://") as repo:
        await repo.capture(sandbox_of(backend), thread_id="thread")
        backend.execute("rm hello.txt")
        await repo.restore(sandbox_of(backend), thread_id="thread")
    assert backend.execute("cat hello.txt").output == "hello"


def test_a_backend_without_a_sandbox_is_refused() -> None:
    with pytest.raises(ProviderError, match="StateBackend") as caught:
        sandbox_of(StateBackend())
    assert caught.value.code == Code.NOT_CAPABLE
