"""Workspaces in E2B, with busybox alone, by the workspace suite. The tests' folder is mounted into the sandbox at its own path:
they can look past the workspace. Cases 11, 14, 17, 24, 26, 41 and 49 as the suite has them.
"""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import AsyncSandbox

from snapcore.protocols import Workspace
from snapcore.providers.e2b_shell import E2BConnection, E2BShell
from snapcore.providers.shell import ShellWorkspace
from snapcore.testing.e2b_server import E2BServer
from snapcore.testing.workspace_suite import WorkspaceTests

from .e2b_service import need_server


@pytest.fixture(scope="module")
def server() -> Iterator[E2BServer]:
    need_server()
    with E2BServer() as server:
        yield server


@pytest.fixture(scope="module")
def sandbox(server: E2BServer) -> AsyncSandbox:
    options: Any = server.options
    return asyncio.run(AsyncSandbox.create("busybox", timeout=3600, **options))


class TestE2BWorkspace(WorkspaceTests):
    @pytest.fixture(autouse=True)
    def see_the_sandbox(self, server: E2BServer, sandbox: AsyncSandbox, tmp_path: Path) -> Iterator[None]:
        self.connection = E2BConnection(sandbox, "root", ())
        inside = server.folder(sandbox.sandbox_id) / str(tmp_path)[1:]
        inside.mkdir(parents=True)
        subprocess.run(["mount", "--bind", tmp_path, inside], check=True)
        yield
        subprocess.run(["umount", inside], check=True)
        left = list((server.folder(sandbox.sandbox_id) / "tmp/.snapcore-pipes-0").iterdir())
        assert left == []

    def make_workspace(self, root: Path) -> Workspace:
        return ShellWorkspace(E2BShell(self.connection), str(root))
