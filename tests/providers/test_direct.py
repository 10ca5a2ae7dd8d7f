"""The local workspace passes the conformance suite."""

from pathlib import Path

from snapcore.protocols import Workspace
from snapcore.providers.direct import DirectWorkspace
from snapcore.testing.workspace_suite import WorkspaceTests


class TestDirectWorkspace(WorkspaceTests):
    def make_workspace(self, root: Path) -> Workspace:
        return DirectWorkspace(root)
