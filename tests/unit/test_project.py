"""What holds the project together: packages, layers, public names, the error tree."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapcore
from snapcore import errors

ROOT = Path(__file__).parents[2]
ADAPTERS = ("stores", "providers", "cli")

# Lower layers first. A module may import its own layer and those below.
LAYERS = (
    ("addresses", "errors", "model"),
    ("ledger", "maintenance", "protocols", "runs", "sandboxes"),
    ("chunking", "packs", "manifest", "config", "durations", "hosts", "idmap", "idset", "sharing"),
    (
        "selection",
        "redaction",
        "redaction_forms",
        "redaction_hooks",
        "redaction_match",
        "redaction_stream",
        "secret_sources",
        "settings",
    ),
    (
        "browse",
        "capturing",
        "collecting",
        "comparing",
        "contents",
        "engine",
        "forgetting",
        "history",
        "ingest",
        "leases",
        "linediff",
        "lineage",
        "operations",
        "outputs",
        "overlay",
        "packcheck",
        "packscan",
        "packwriter",
        "pagestates",
        "patches",
        "patchtext",
        "placement",
        "planned",
        "playback",
        "reachability",
        "recording",
        "records",
        "repacking",
        "repairing",
        "repairplan",
        "replay",
        "restoring",
        "restoreplan",
        "scope",
        "statcache",
        "subset",
        "target",
        "ticking",
        "trails",
        "transfer_export",
        "transfer_output",
        "transfer_tar",
        "treecapture",
        "treecheck",
        "treefilter",
        "treelisting",
        "treeslices",
        "usage",
        "verification",
    ),
    ("registry", "databases", "settings_files", "settings_search"),
    (
        "autocheckpoint",
        "forking",
        "workflow_plans",
        "workflows",
        "blocking",
        "direct_calls",
        "inspecting",
        "opening",
        "rebuilding",
        "repository",
        "sandbox_roots",
        "session",
        "session_attaching",
        "session_opening",
        "session_options",
        "session_spec",
        "sessions",
        "transfer",
    ),
)
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}

PUBLIC = {
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
}

ERROR_TREE = {
    "CheckpointConflictError": "SnapcoreError",
    "CheckpointWriterConflictError": "SnapcoreError",
    "CheckpointWriterLostError": "SnapcoreError",
    "ProviderError": "SnapcoreError",
    "RecordsMissingError": "SnapcoreError",
    "ReplayDivergedError": "SnapcoreError",
    "RepositoryError": "SnapcoreError",
    "SnapcoreError": "Exception",
    "SnapshotError": "SnapcoreError",
    "StepFailedError": "SnapcoreError",
}
# Append only: programs compare these.
CODES = [
    "STALE_HEAD",
    "PARENT_MISMATCH",
    "DUPLICATE_ID",
    "DESTINATION_NOT_EMPTY",
    "SAME_THREAD",
    "WRITER_HELD",
    "WRITER_LOST",
    "RECORDS_MISSING",
    "MISSING_CHECKPOINT",
    "UNSUPPORTED_ENTRY",
    "UNREADABLE_ENTRY",
    "TORN_READ",
    "INVALID_PATH",
    "INVALID_WORKSPACE",
    "MISSING_BLOB",
    "INVALID_BLOB",
    "LIMIT_EXCEEDED",
    "POLICY_REQUIRED",
    "INVALID_ID",
    "INVALID_REQUEST",
    "INVALID_ENTRY",
    "SECRET_IN_NAME",
    "EMPTY_RESTORE",
    "RESTORE_BLOCKED",
    "VERIFY_FAILED",
    "AMBIGUOUS_ID",
    "MISSING_WORKSPACE",
    "INVALID_ARCHIVE",
    "NO_REPOSITORY",
    "REPOSITORY_EXISTS",
    "WRONG_DATABASE",
    "UNSUPPORTED_FORMAT",
    "DAMAGED",
    "READ_ONLY",
    "STORE_UNAVAILABLE",
    "STORE_FULL",
    "ACCESS_DENIED",
    "UNKNOWN_SCHEME",
    "MISSING_EXTRA",
    "MAINTENANCE_LOST",
    "NO_BUCKET",
    "WRONG_REGION",
    "CLOCK_SKEW",
    "NO_SANDBOX",
    "SANDBOX_UNAVAILABLE",
    "SANDBOX_FULL",
    "NOT_CAPABLE",
    "WORKSPACE_BUSY",
    "EXEC_TIMEOUT",
    "MISSING_TOOL",
    "REPLAY_DIVERGED",
    "OPERATION_UNCERTAIN",
    "STEP_FAILED",
]


def imported(path: Path, package: str) -> Iterator[str]:
    """Every module that the file imports anywhere, also inside functions and for type checkers, by its absolute name; relative
    ones begin with the package, a dot where there is none."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            if node.level and not package:
                base = ["."]
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def engine_modules() -> list[Path]:
    return sorted((ROOT / "snapcore").glob("*.py"))


def python_files() -> list[Path]:
    folders = ("snapcore/cron", "snapcore/integrations", "snapcore/testing", *ADAPTERS, "tests", "benchmarks")
    return [*engine_modules(), *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))]


def test_the_package_list_is_what_the_folders_hold() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"snapcore": "snapcore", **{f"snapcore.{name}": name for name in ADAPTERS}}
    for package, folder in list(folders.items()):
        for init in (ROOT / folder).rglob("__init__.py"):
            part = init.parent.relative_to(ROOT / folder)
            folders[".".join([package, *part.parts])] = f"{folder}/{part}" if part.parts else folder
    assert sorted(declared["packages"]) == sorted(folders)
    assert declared["package-dir"] == {f"snapcore.{name}": name for name in ADAPTERS}


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_links_for_static_tools_are_in_place(name: str) -> None:
    assert os.readlink(ROOT / "snapcore" / name) == f"../{name}"


def test_every_adapter_module_is_loaded_as_a_part_of_snapcore() -> None:
    for name in ADAPTERS:
        for path in (ROOT / name).glob("*.py"):
            assert (ROOT / "snapcore" / name / path.name).samefile(path)
    script = "import importlib.util as u; print([n for n in ('stores', 'providers', 'cli') if u.find_spec(n)])"
    found = subprocess.run([sys.executable, "-c", script], cwd="/", capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_nothing_imports_an_adapter_folder_as_a_top_level_package() -> None:
    for path in python_files():
        tops = {name.partition(".")[0] for name in imported(path, "")}
        assert not tops & set(ADAPTERS), path


def test_no_engine_module_imports_an_adapter() -> None:
    outer = tuple(f"snapcore.{name}" for name in (*ADAPTERS, "cron", "integrations", "testing"))
    for path in engine_modules():
        wrong = [name for name in imported(path, "snapcore") if name.startswith(outer)]
        assert not wrong, f"{path.name} imports {wrong}; adapters are found by their entry points"


def test_no_lower_layer_imports_a_higher_one() -> None:
    for path in engine_modules():
        module = path.stem
        if module == "__init__":
            continue
        assert module in LEVEL, f"{module} has no layer: add it to LAYERS"
        for name in imported(path, "snapcore"):
            package, _, target = name.partition(".")
            target = target.partition(".")[0]
            if package == "snapcore" and target in LEVEL:
                assert LEVEL[target] <= LEVEL[module], f"{module} imports {target}, which is above it"


def test_every_layered_module_exists() -> None:
    assert {path.stem for path in engine_modules()} - {"__init__"} == set(LEVEL)


def test_the_command_loads_no_heavy_library_before_it_needs_it() -> None:
    heavy = {"sqlalchemy", "alembic", "rich", "pathspec", "boto3", "docker", "e2b"}
    for path in (ROOT / "cli").glob("*.py"):
        if path.name == "demo.py":
            continue
        body = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {
            name.partition(".")[0]
            for node in body
            for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        }
        assert not names & heavy, path


def test_the_public_names() -> None:
    assert set(snapcore.__all__) == PUBLIC
    assert list(snapcore.__all__) == sorted(snapcore.__all__)
    for name in snapcore.__all__:
        assert getattr(snapcore, name) is not None


@pytest.mark.parametrize("before", ["", "snapcore.open_repository", "from snapcore import *"])
def test_functions_are_not_hidden_by_modules_of_the_same_name(before: str) -> None:
    script = f"import snapcore\n{before}\nfrom snapcore import capture, restore\nprint(callable(capture), callable(restore))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"


def test_importing_snapcore_is_light() -> None:
    script = "import sys, snapcore; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"sqlalchemy", "alembic", "rich", "typer", "pathspec", "zstandard"} & set(loaded)


def test_the_error_tree() -> None:
    found = {
        name: value.__base__.__name__
        for name in errors.__all__
        if isinstance(value := getattr(errors, name), type) and issubclass(value, Exception) and value.__base__
    }
    assert found == ERROR_TREE


def test_error_codes_stay() -> None:
    assert [str(code) for code in errors.Code] == CODES
    assert all(code.name == code.value for code in errors.Code)


def test_every_error_code_is_explained() -> None:
    explained = (ROOT / "docs" / "errors.md").read_text()
    assert [code for code in CODES if f"`{code}`" not in explained] == []
