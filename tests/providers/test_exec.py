"""Sandboxes behind a command of this host, by the provider suite: a real sshd, `env -i`, another user.

Cases 13, 14, 17 and 22 where a sandbox is reached by a command: the suite's checkpoint goes there and back.
"""

import asyncio
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from snapcore.errors import Code, ProviderError
from snapcore.providers.exec import ExecProvider, connect
from snapcore.sandboxes import Binding, ExecResult, Hook, SandboxProvider
from snapcore.testing import ProviderTests

from .. import ssh_server as servers  # noqa: TID252  # the tests are no package that could be named


class CommandTests(ProviderTests):
    """The sandbox's folder is one of this host."""

    scheme = "exec"
    prefix = ""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "work space"
        self.folder.mkdir()

    def make_provider(self, *, on_create: Sequence[Hook] = (), on_open: Sequence[Hook] = ()) -> SandboxProvider:
        return ExecProvider(self.scheme, on_create=on_create, on_open=on_open)

    async def existing(self) -> Binding:
        return (await connect(f"exec:{self.prefix} {shlex.quote(str(self.folder))}")).binding


class TestCleanEnvironment(CommandTests):
    prefix = "env -i PATH=/usr/bin:/bin"


class TestAnotherUser(CommandTests):
    prefix = "setpriv --reuid=65534 --regid=65534 --clear-groups"

    @pytest.fixture(autouse=True)
    def _owned(self, _folder: None, shared: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("only the superuser can become somebody else")
        self.folder = shared / "work"
        self.folder.mkdir()
        os.chown(self.folder, 65534, 65534)


class TestSsh(CommandTests):
    scheme = "ssh"

    @pytest.fixture(autouse=True)
    def _server(self, shared_ssh_on_path: servers.SshServer) -> None:
        self.server = shared_ssh_on_path

    async def existing(self) -> Binding:
        folder = str(self.folder).replace(" ", "%20")
        return (await connect(f"ssh://{self.server.user}@127.0.0.1:{self.server.port}{folder}")).binding


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that any user may go into."""
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


# ---- what is told from what


async def refused(address: str) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        await (await connect(address)).exec(["true"])
    return caught.value


async def test_a_host_that_cannot_be_reached_is_worth_another_try(ssh_on_path: servers.SshServer) -> None:
    error = await refused("ssh://nosuch.invalid/w")
    assert (error.code, error.retryable) == (Code.SANDBOX_UNAVAILABLE, True)
    assert "nosuch.invalid" in str(error)


async def test_an_unknown_host_key_is_refused_and_never_asked_about(ssh_on_path: servers.SshServer) -> None:
    error = await refused("exec:ssh -o BatchMode=yes -o UserKnownHostsFile=/dev/null sandbox /w")
    assert error.code == Code.SANDBOX_UNAVAILABLE
    assert "Host key verification failed" in str(error)


@pytest.mark.parametrize(
    "said",
    ["Error: No such container: box", 'Error from server (NotFound): pods "box" not found', "Error: container 1f is not running"],
)
async def test_a_container_that_is_gone_is_no_sandbox(said: str) -> None:
    script = shlex.quote(f"echo {shlex.quote(said)} >&2; exit 1")
    assert (await refused(f"exec:sh -c {script} /w")).code == Code.NO_SANDBOX


async def test_a_command_that_passes_no_input_on_is_told(tmp_path: Path) -> None:
    error = await refused(f"exec:sh -c 'exec \"$@\" </dev/null' sh {tmp_path}")
    assert error.code == Code.NOT_CAPABLE
    assert "-i" in error.hint


async def test_what_is_no_shell_is_told(tmp_path: Path) -> None:
    for command in ("cat", "sh -c 'exit 127'", f"chroot {tmp_path}", "nosuch-command-here"):
        error = await refused(f"exec:{command} /w")
        assert error.code in (Code.NOT_CAPABLE, Code.SANDBOX_UNAVAILABLE, Code.MISSING_TOOL)
    assert (await refused("exec:nosuch-command-here /w")).code == Code.MISSING_TOOL
    assert (await refused("exec:sh -c 'head -c 500000 /dev/zero' /w")).code == Code.NOT_CAPABLE


async def test_words_of_a_login_script_are_not_taken_for_output(tmp_path: Path) -> None:
    found = await connect(f"exec:sh -c 'echo Welcome!; printf x; exec \"$@\"' sh {tmp_path}")
    assert await found.exec("echo own; exit 5") == ExecResult(5, b"own\n")
    await found.upload(f"{tmp_path}/file", b"content")
    assert [piece async for piece in found.download(f"{tmp_path}/file")] == [b"content"]


async def test_neither_command_nor_environment_shows_in_a_list_of_processes(tmp_path: Path) -> None:
    found = await connect(f"exec:env -i PATH=/usr/bin:/bin {tmp_path}")
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done 2>/dev/null; : \"$HIDDEN\""
    result = await found.exec(["sh", "-c", script], environment={"HIDDEN": "value-of-the-token"})
    assert b"/proc/[0-9]" in result.stdout
    assert b"value-of-the-token" not in result.stdout


async def test_an_upload_that_is_cut_short_does_not_replace_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    found = await connect(f"exec:sh -c 'head -c 4000 | \"$@\"' sh {tmp_path}")
    with pytest.raises(ProviderError, match="whole"):
        await found.upload(f"{tmp_path}/file", bytes(100_000))
    assert (tmp_path / "file").read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


async def test_a_download_that_is_cut_short_is_an_error(ssh_on_path: servers.SshServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    found = await connect(f"ssh://{ssh_on_path.user}@127.0.0.1:{ssh_on_path.port}{tmp_path}")
    pieces = found.download(f"{tmp_path}/file")
    await anext(pieces)
    ssh_on_path.drop_connections()
    with pytest.raises((ProviderError, OSError)):
        [piece async for piece in pieces]


async def test_a_connection_that_drops_is_no_exit_code(ssh_on_path: servers.SshServer, tmp_path: Path) -> None:
    found = await connect(f"ssh://{ssh_on_path.user}@127.0.0.1:{ssh_on_path.port}{tmp_path}")
    started = asyncio.Event()
    running = asyncio.create_task(found.exec("echo; exec sleep 3000", on_output=lambda *_: started.set()))
    await asyncio.wait_for(started.wait(), 60)
    ssh_on_path.drop_connections()
    with pytest.raises(ProviderError) as caught:
        await running
    assert (caught.value.code, caught.value.retryable) == (Code.SANDBOX_UNAVAILABLE, True)
