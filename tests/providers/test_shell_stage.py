"""Restores through the shell of a sandbox pass the conformance suite, with GNU tools and with busybox alone.

Cases 11, 12, 13, 14, 15, 16, 17, 21, 23, 24, 43, 49 and 50 of the field.
"""

from pathlib import Path

from snapcore.protocols import Workspace
from snapcore.testing.workspace_suite import WorkspaceTests

from .shell_kinds import StagedWorkspace, make_shell


class TestGnu(WorkspaceTests):
    def make_workspace(self, root: Path) -> Workspace:
        return StagedWorkspace(root, make_shell("gnu"))


class TestBash(WorkspaceTests):
    def make_workspace(self, root: Path) -> Workspace:
        return StagedWorkspace(root, make_shell("bash"))


class TestBusybox(WorkspaceTests):
    def make_workspace(self, root: Path) -> Workspace:
        return StagedWorkspace(root, make_shell("busybox"))
