"""snapcore saves the files of an AI agent's sandbox as deduplicated checkpoints, and puts them back into any sandbox.

    async with snapcore.open_repository("~/.snapcore") as repo:
        sandbox = await snapcore.connect("./project")
        checkpoint = await repo.capture(sandbox, thread_id="thread-1")
        await repo.restore(sandbox, thread_id="thread-1")

`snapcore.blocking` offers the same without async.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import blocking
    from .autocheckpoint import AutoCheckpoint, CheckpointEvery
    from .browse import Diff, DiffEntry, NotCompared
    from .capturing import CaptureReport
    from .collecting import Fate, GcReport, PackFate
    from .direct_calls import capture, restore
    from .errors import (
        CheckpointConflictError,
        CheckpointWriterConflictError,
        CheckpointWriterLostError,
        Code,
        ProviderError,
        RecordsMissingError,
        ReplayDivergedError,
        RepositoryError,
        SnapcoreError,
        SnapshotError,
        StepFailedError,
    )
    from .forgetting import ForgetReport, SkippedThread, Verdict
    from .forking import ForkReport, RunAgain, Uncovered
    from .ledger import Event, EventKind
    from .model import Checkpoint, Entry, FileStat, Kind, Progress, Redaction, RootState, Skipped, ThreadInfo, Totals
    from .opening import init_repository, open_repository
    from .patchtext import FilePatch
    from .rebuilding import plan_repair, repair_repository
    from .redaction_hooks import RedactionHook, RedactionPattern
    from .registry import connect
    from .repairing import RepairReport
    from .repairplan import RepairAction, RepairPlan
    from .repository import Repository, RepositoryStats
    from .restoring import Receipt, RestorePlan
    from .sandboxes import SandboxSpec
    from .selection import FilePolicy
    from .session import ExecOutcome, Session
    from .transfer_export import ExportReport
    from .usage import CheckpointUsage, ThreadUsage, Usage
    from .verification import Problem, VerifyReport
    from .workflows import StepResult, Workflow, WorkflowResult, workflow

__version__ = "0.1.0"

_WHERE = {
    "autocheckpoint": (
        "AutoCheckpoint",
        "CheckpointEvery",
    ),
    "browse": ("Diff", "DiffEntry", "NotCompared"),
    "capturing": ("CaptureReport",),
    "collecting": ("Fate", "GcReport", "PackFate"),
    "direct_calls": ("capture", "restore"),
    "errors": (
        "CheckpointConflictError",
        "CheckpointWriterConflictError",
        "CheckpointWriterLostError",
        "Code",
        "ProviderError",
        "RecordsMissingError",
        "ReplayDivergedError",
        "RepositoryError",
        "SnapcoreError",
        "SnapshotError",
        "StepFailedError",
    ),
    "forgetting": ("ForgetReport", "SkippedThread", "Verdict"),
    "forking": (
        "ForkReport",
        "RunAgain",
        "Uncovered",
    ),
    "ledger": ("Event", "EventKind"),
    "model": (
        "Checkpoint",
        "Entry",
        "FileStat",
        "Kind",
        "Progress",
        "Redaction",
        "RootState",
        "Skipped",
        "ThreadInfo",
        "Totals",
    ),
    "opening": ("init_repository", "open_repository"),
    "patchtext": ("FilePatch",),
    "rebuilding": ("plan_repair", "repair_repository"),
    "redaction_hooks": ("RedactionHook", "RedactionPattern"),
    "registry": ("connect",),
    "repairing": ("RepairReport",),
    "repairplan": ("RepairAction", "RepairPlan"),
    "repository": ("Repository", "RepositoryStats"),
    "restoring": ("Receipt", "RestorePlan"),
    "sandboxes": ("SandboxSpec",),
    "selection": ("FilePolicy",),
    "session": ("ExecOutcome", "Session"),
    "transfer_export": ("ExportReport",),
    "usage": ("CheckpointUsage", "ThreadUsage", "Usage"),
    "verification": ("Problem", "VerifyReport"),
    "workflows": (
        "StepResult",
        "Workflow",
        "WorkflowResult",
        "workflow",
    ),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "AutoCheckpoint",
    "CaptureReport",
    "Checkpoint",
    "CheckpointConflictError",
    "CheckpointEvery",
    "CheckpointUsage",
    "CheckpointWriterConflictError",
    "CheckpointWriterLostError",
    "Code",
    "Diff",
    "DiffEntry",
    "Entry",
    "Event",
    "EventKind",
    "ExecOutcome",
    "ExportReport",
    "Fate",
    "FilePatch",
    "FilePolicy",
    "FileStat",
    "ForgetReport",
    "ForkReport",
    "GcReport",
    "Kind",
    "NotCompared",
    "PackFate",
    "Problem",
    "Progress",
    "ProviderError",
    "Receipt",
    "RecordsMissingError",
    "Redaction",
    "RedactionHook",
    "RedactionPattern",
    "RepairAction",
    "RepairPlan",
    "RepairReport",
    "ReplayDivergedError",
    "Repository",
    "RepositoryError",
    "RepositoryStats",
    "RestorePlan",
    "RootState",
    "RunAgain",
    "SandboxSpec",
    "Session",
    "Skipped",
    "SkippedThread",
    "SnapcoreError",
    "SnapshotError",
    "StepFailedError",
    "StepResult",
    "ThreadInfo",
    "ThreadUsage",
    "Totals",
    "Uncovered",
    "Usage",
    "Verdict",
    "VerifyReport",
    "Workflow",
    "WorkflowResult",
    "blocking",
    "capture",
    "connect",
    "init_repository",
    "open_repository",
    "plan_repair",
    "repair_repository",
    "restore",
    "workflow",
]


def __getattr__(name: str) -> Any:
    # names are loaded when they are first used: importing snapcore alone costs next to nothing
    if name == "blocking":
        return importlib.import_module(".blocking", __name__)
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
