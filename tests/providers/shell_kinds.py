"""Shells of this host for tests: GNU tools under dash and bash, and busybox alone; a workspace that is restored through one."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from snapcore.model import Capabilities
from snapcore.protocols import Stage
from snapcore.providers.command_shell import CommandShell
from snapcore.providers.direct import DirectWorkspace
from snapcore.providers.shell_stage import ShellStage, open_stage, recover
from snapcore.providers.shell_tools import Tools, find_tools
from snapcore.sandboxes import Shell

from .. import services  # noqa: TID252

__all__ = ["KINDS", "StagedWorkspace", "make_shell", "tool_folder"]

KINDS = ("gnu", "bash", "busybox")

_known: dict[str, Tools] = {}  # by the id of the shell


def tool_folder(kind: str) -> Path:
    """A folder, made once, in which `sh` and the tools of this kind are; anybody may enter it."""
    folder = Path(tempfile.gettempdir()) / f"snapcore-tools-{os.getuid()}-{kind}"
    if (folder / "sh").exists():
        return folder
    making = Path(tempfile.mkdtemp())
    if kind == "busybox":
        busybox = shutil.which("busybox")
        if busybox is None:
            if os.environ.get(services.REQUIRED):
                pytest.fail("busybox is not installed")
            pytest.skip("busybox is not installed")
        subprocess.run([busybox, "--install", "-s", making], check=True)
    else:
        sh = shutil.which("bash" if kind == "bash" else "dash") or shutil.which("sh")
        assert sh is not None
        (making / "sh").symlink_to(sh)
    making.chmod(0o755)
    with contextlib.suppress(OSError):  # another process was first
        making.rename(folder)
    return folder


def make_shell(kind: str, prefix: Sequence[str] = (), first: Path | None = None) -> CommandShell:
    """A shell that finds nothing but the tools of this kind, after those in the folder `first`."""
    path = str(tool_folder(kind))
    if kind != "busybox":
        path += ":/usr/bin:/bin:/usr/sbin:/sbin"
    if first is not None:
        path = f"{first}:{path}"
    return CommandShell([*prefix, "/usr/bin/env", "-i", f"PATH={path}"], f"test:{kind}{prefix}")


class StagedWorkspace(DirectWorkspace):
    """A local folder, scanned and read directly and restored through a shell."""

    def __init__(self, root: Path, shell: Shell) -> None:
        super().__init__(root)
        self._shell = shell
        self._tools: Tools | None = None

    @property
    def capabilities(self) -> Capabilities:
        fine = self._tools is None or (self._tools.tar == "gnu" and self._tools.touch == "ns")
        busybox = "busybox" in self._shell.sandbox_id
        return msgspec.structs.replace(super().capabilities, holds=False, mtimes=fine and not busybox)

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        await self.recover()
        yield

    async def recover(self) -> Literal["", "swept", "finished"]:
        return await recover(self._shell, self.root, await self._found())

    async def open_stage(self) -> Stage:
        return await self.open_shell_stage()

    async def open_shell_stage(self) -> ShellStage:
        return await open_stage(self._shell, self.root, await self._found())

    async def _found(self) -> Tools:
        if self._tools is None:
            kind = self._shell.sandbox_id
            self._tools = _known.get(kind) or await find_tools(self._shell, self.root)
            _known[kind] = self._tools
        return self._tools
