"""The workspace over a shell passes the conformance suite: with GNU's tools under dash and bash, and with busybox alone."""

from pathlib import Path

from snapcore.protocols import Workspace
from snapcore.providers.shell import ShellWorkspace
from snapcore.testing.workspace_suite import WorkspaceTests

from .shell_kinds import make_shell


class TestGnuTools(WorkspaceTests):
    def make_workspace(self, root: Path) -> Workspace:
        return ShellWorkspace(make_shell("gnu"), str(root))


class TestBash(WorkspaceTests):
    def make_workspace(self, root: Path) -> Workspace:
        return ShellWorkspace(make_shell("bash"), str(root))


class TestBusybox(WorkspaceTests):
    def make_workspace(self, root: Path) -> Workspace:
        return ShellWorkspace(make_shell("busybox"), str(root))
