"""File policies in capture and restore: what is left out is not listed, not stored, and never removed."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import Code, SnapshotError
from snapcore.model import Checkpoint
from snapcore.repository import Repository
from snapcore.selection import FilePolicy

from ..disks import disk_at  # noqa: TID252 (tests are no package that could be named)

Make = Callable[..., Path]

DEFAULTS = {
    ".git/config": "1",
    "sub/.git/HEAD": "1",
    "node_modules/left/index.js": "1",
    "sub/node_modules/x": "1",
    ".env": "SECRET",
    ".env.local": "SECRET",
    "sub/.environment/x": "SECRET",
    ".venv/bin/python": "1",
    "venv/pyvenv.cfg": "1",
    "venv/bin/python": "1",
    "sub/__pycache__/x.pyc": "1",
    ".tox/x": "1",
    ".nox/x": "1",
    ".mypy_cache/x": "1",
    ".pytest_cache/x": "1",
    ".ruff_cache/x": "1",
}
ORDINARY = {"main.py": "x", "sub/env.txt": "x", "sub/venv/just-a-name": "x", "gitx": "x", ".gitignore": "*.log\n", "run.log": "x"}


async def files(repo: Repository, checkpoint: Checkpoint) -> set[str]:
    return {os.fsdecode(e.path) async for e in repo.ls(checkpoint) if e.kind == 0}


async def test_default_exclusions_at_any_depth(memory_repo: Repository, make: Make) -> None:
    """And `.gitignore` is a file like any other: it is kept and decides nothing."""
    work = make({**DEFAULTS, **ORDINARY})
    checkpoint = await memory_repo.capture(work, thread_id="t")
    assert await files(memory_repo, checkpoint) == set(ORDINARY)


async def test_what_a_user_excludes_adds_to_the_defaults(memory_repo: Repository, make: Make) -> None:
    """`--exclude '*.log'` never stores `.env`."""
    work = make({**DEFAULTS, **ORDINARY})
    checkpoint = await memory_repo.capture(work, thread_id="t", policy=FilePolicy.patterns(exclude=["*.log"]))
    assert await files(memory_repo, checkpoint) == set(ORDINARY) - {"run.log"}
    by_callable = FilePolicy(exclude=lambda path, kind: path.endswith(".log"))
    assert await files(memory_repo, await memory_repo.capture(work, thread_id="u", policy=by_callable)) == set(ORDINARY) - {
        "run.log"
    }


async def test_presets(memory_repo: Repository, make: Make) -> None:
    work = make({**DEFAULTS, **ORDINARY})

    async def kept(policy: FilePolicy) -> set[str]:
        return await files(memory_repo, await memory_repo.capture(work, thread_id="t", policy=policy)) - set(ORDINARY)

    assert await kept(FilePolicy.default()) == set()
    assert await kept(FilePolicy.everything()) == set(DEFAULTS)
    assert await kept(FilePolicy.with_git()) == {".git/config", "sub/.git/HEAD"}
    rebuildable = {name for name in DEFAULTS if ".git" not in name and "/.env" not in name and not name.startswith(".env")}
    assert await kept(FilePolicy.with_rebuildable()) == rebuildable
    assert await kept(FilePolicy.with_git().with_exclude("config")) == {"sub/.git/HEAD"}
    assert await kept(FilePolicy(defaults=False, exclude=["node_modules"])) == {n for n in DEFAULTS if "node_modules" not in n}


async def test_exclude_wins_over_include(memory_repo: Repository, make: Make) -> None:
    work = make({"src/a.py": "1", "src/b.txt": "2", "src/gen/c.py": "3", "d.py": "4"})
    policy = FilePolicy.patterns(include=["/src"], exclude=["gen", "*.txt"])
    checkpoint = await memory_repo.capture(work, thread_id="t", policy=policy)
    assert await files(memory_repo, checkpoint) == {"src/a.py"}
    chosen = FilePolicy(include=lambda path, kind: path.endswith(".py"), exclude=lambda path, kind: path == "src/gen")
    checkpoint = await memory_repo.capture(work, thread_id="t", policy=chosen)
    assert await files(memory_repo, checkpoint) == {"src/a.py", "d.py"}


@pytest.mark.parametrize("policy", [FilePolicy(), FilePolicy.patterns(exclude=["/data"])], ids=["by name", "by pattern"])
async def test_excluded_folders_are_never_listed(
    memory_repo: Repository, make: Make, monkeypatch: pytest.MonkeyPatch, policy: FilePolicy
) -> None:
    """Case 19: neither by capture nor by restore; not one of their files is looked at."""
    spec = {f"node_modules/p{number}/index.js": "x" for number in range(20)} | {f"data/{number}": "x" for number in range(20)}
    excluded = "data" if policy.record().exclude else "node_modules"
    work = make({"main.js": "x", **{name: "x" for name in spec if name.startswith(excluded)}})
    inodes = {path.stat().st_ino for path in (work / excluded).rglob("*")} | {(work / excluded).stat().st_ino}
    listed: list[int] = []
    scandir, listdir, real_open = os.scandir, os.listdir, os.open

    def watching(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if "dir_fd" not in kwargs:
                listed.append(os.stat(path).st_ino)
            return function(path, *args, **kwargs)

        return call

    def opening(path: Any, *args: Any, **kwargs: Any) -> int:
        fd = real_open(path, *args, **kwargs)
        listed.append(os.fstat(fd).st_ino)
        return fd

    monkeypatch.setattr(os, "scandir", watching(scandir))
    monkeypatch.setattr(os, "listdir", watching(listdir))
    monkeypatch.setattr(os, "open", opening)
    await memory_repo.capture(work, thread_id="t", policy=policy)
    (work / "main.js").write_text("changed")
    await memory_repo.restore(work, thread_id="t")
    assert work.stat().st_ino in listed
    assert inodes.isdisjoint(listed)


def test_unlistable_excluded_folders_do_not_matter(as_user: Callable[[Callable[[Path], None]], Path]) -> None:
    """Case 19, from the other side: a folder that nobody may list is no trouble when it is excluded."""

    def job(root: Path) -> None:
        (root / "node_modules").mkdir(mode=0)
        (root / "data").mkdir(mode=0)
        (root / "file").write_text("x")

        async def check() -> None:
            async with snapcore.open_repository("memory://") as repo:
                report = await repo.capture_with_report(root, thread_id="t", policy=FilePolicy.patterns(exclude=["/data"]))
                assert report.skipped == ()
                (root / "file").write_text("changed")
                await repo.restore(root, thread_id="t")
                assert (root / "file").read_text() == "x"

        asyncio.run(check())

    as_user(job)


# ---- what restore does about them


async def test_excluded_files_survive_a_restore(memory_repo: Repository, make: Make) -> None:
    """With the saved policy: whatever is excluded stays, changed or new, and the folders above it stay."""
    work = make({"main.py": "x", ".env": "TOKEN=1", "node_modules/a/index.js": "x", "sub/x": "1"})
    policy = FilePolicy.patterns(exclude=["*.log", "/cache"])
    await memory_repo.capture(work, thread_id="t", policy=policy)
    kept = make(
        {".env": "TOKEN=2", "new/deep/run.log": "log", "cache/x": "1", "node_modules/b/index.js": "y", "sub/node_modules/z": "1"}
    )
    make({"main.py": "changed", "new/deep/gone": "1", "new/gone": "2", "new/empty/": ""})
    receipt = await memory_repo.restore(kept, thread_id="t")
    assert receipt is not None
    found = {path.relative_to(work).as_posix(): path.read_text() for path in work.rglob("*") if path.is_file()}
    assert found == {
        "main.py": "x",
        "sub/x": "1",
        ".env": "TOKEN=2",
        "new/deep/run.log": "log",
        "cache/x": "1",
        "node_modules/a/index.js": "x",
        "node_modules/b/index.js": "y",
        "sub/node_modules/z": "1",
    }
    assert not (work / "new" / "empty").exists()
    assert set(receipt.kept) == {b".env", b"new/deep/run.log", b"cache", b"node_modules", b"sub/node_modules"}


async def test_the_saved_policy_is_used_and_not_the_trees_ignore_files(memory_repo: Repository, make: Make) -> None:
    """A `.gitignore` that came later protects nothing, and one that was there excluded nothing."""
    work = make({".gitignore": "*.log", "run.log": "1"})
    checkpoint = await memory_repo.capture(work, thread_id="t")
    assert await files(memory_repo, checkpoint) == {".gitignore", "run.log"}
    make({".gitignore": "*.log\nnew", "new": "added", "run.log": "2"})
    await memory_repo.restore(work, thread_id="t")
    assert (work / "run.log").read_text() == "1"
    assert sorted(os.listdir(work)) == [".gitignore", "run.log"]


@pytest.mark.parametrize(
    "policy",
    [FilePolicy(exclude=lambda path, kind: path == "own"), FilePolicy(include=lambda path, kind: path != "own")],
    ids=["exclude", "include"],
)
async def test_a_callable_has_to_be_given_again(memory_repo: Repository, make: Make, policy: FilePolicy) -> None:
    """A callable cannot be saved: restore without it is refused, rather than to remove what it left out."""
    work = make({"own": "mine", "file": "x"})
    await memory_repo.capture(work, thread_id="t", policy=policy)
    make({"file": "changed"})
    for dry_run in (True, False):
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.restore(work, thread_id="t", dry_run=dry_run)
        assert caught.value.code == Code.POLICY_REQUIRED
    assert (work / "file").read_text() == "changed"
    await memory_repo.restore(work, thread_id="t", policy=policy)
    assert ((work / "file").read_text(), (work / "own").read_text()) == ("x", "mine")


async def test_another_policy_at_restore_limits_what_is_touched(memory_repo: Repository, make: Make) -> None:
    """What the given policy excludes is neither written nor removed, although the checkpoint has it."""
    work = make({"a.txt": "1", "b.log": "1", "logs/c": "1"})
    await memory_repo.capture(work, thread_id="t")
    make({"a.txt": "2", "b.log": "2", "logs/c": "2", "d.log": "new", "e.txt": "new"})
    policy = FilePolicy.patterns(exclude=["*.log", "logs"])
    await memory_repo.restore(work, thread_id="t", policy=policy)
    found = {path.relative_to(work).as_posix(): path.read_text() for path in work.rglob("*") if path.is_file()}
    assert found == {"a.txt": "1", "b.log": "2", "logs/c": "2", "d.log": "new"}
    target = work.parent / "target"
    await memory_repo.restore(target, thread_id="t", policy=policy)
    assert os.listdir(target) == ["a.txt"]


async def test_mounts_are_left_alone_and_listed(memory_repo: Repository, make: Make, mounted: Path) -> None:
    """Other file systems inside the root: not captured unless asked for, never emptied, listed with their reason."""
    work = make({"file": "x", "mnt/": ""})
    (mounted / "precious").write_text("x")
    report = await memory_repo.capture_with_report(work, thread_id="t")
    assert [s.path for s in report.skipped] == [b"mnt"]
    assert "file system" in report.skipped[0].reason
    make({"file": "changed"})
    receipt = await memory_repo.restore(work, thread_id="t")
    assert receipt is not None
    assert receipt.kept == (b"mnt",)
    assert (mounted / "precious").read_text() == "x"
    crossed = await memory_repo.capture(work, thread_id="crossed", policy=FilePolicy(cross_mounts=True))
    assert await files(memory_repo, crossed) == {"file", "mnt/precious"}


async def test_a_mount_that_came_later_is_left_alone(memory_repo: Repository, make: Make, mounted: Path) -> None:
    work = make({"file": "x"})
    await memory_repo.capture(work, thread_id="t", policy=FilePolicy.patterns(exclude=["/mnt"]))
    (mounted / "precious").write_text("x")
    receipt = await memory_repo.restore(work, thread_id="t", policy=FilePolicy())
    assert receipt is not None
    assert receipt.kept == (b"mnt",)
    assert (mounted / "precious").read_text() == "x"


@pytest.fixture
def mounted(work: Path) -> Iterator[Path]:
    """A file system mounted at `mnt` in the workspace."""
    with disk_at(work / "mnt") as folder:
        yield folder


@pytest.mark.parametrize("kept", ["excluded", "skipped", "below"])
@pytest.mark.parametrize("wanted", ["file", "link"])
async def test_a_folder_with_kept_files_where_a_file_must_go_is_a_typed_error(
    memory_repo: Repository, make: Make, kept: str, wanted: str
) -> None:
    """In the plan, before anything is touched: the workspace is as it was."""
    work = make({"other": "1"})
    if wanted == "file":
        (work / "thing").write_text("x")
    else:
        (work / "thing").symlink_to("other")
    if kept == "skipped":
        (work / "thing").unlink()
        make({"thing/": ""})
        os.mkfifo(work / "thing" / "pipe")
        first = await memory_repo.capture(work, thread_id="t", policy=FilePolicy(on_unsupported="skip"))
        assert [s.path for s in first.roots[0].skipped] == [b"thing/pipe"]
        policy: FilePolicy | None = FilePolicy.patterns(exclude=["pipe"])
        (work / "thing" / "pipe").unlink()
        (work / "thing").rmdir()
        (work / "thing").write_text("x") if wanted == "file" else (work / "thing").symlink_to("other")
        await memory_repo.capture(work, thread_id="t", policy=policy)
        (work / "thing").unlink()
        make({"thing/pipe": "kept"})
    else:
        policy = None
        await memory_repo.capture(work, thread_id="t")
        (work / "thing").unlink()
        make({"thing/.env": "kept"} if kept == "excluded" else {"thing/deep/er/.env": "kept", "thing/deep/more": "x"})
    make({"other": "changed", "added": "new"})
    before = {path.relative_to(work).as_posix(): path.lstat().st_ino for path in work.rglob("*")}
    for dry_run in (True, False):
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.restore(work, thread_id="t", dry_run=dry_run)
        assert caught.value.code == Code.RESTORE_BLOCKED
        assert caught.value.paths == (b"thing",)
    assert {path.relative_to(work).as_posix(): path.lstat().st_ino for path in work.rglob("*")} == before
    assert (work / "other").read_text() == "changed"
    await memory_repo.restore(work, thread_id="t", policy=FilePolicy.everything())
    assert not (work / "thing").is_dir()


async def test_several_roots_have_their_own_policies(memory_repo: Repository, tmp_path: Path, make: Make) -> None:
    """Named roots in one checkpoint, each with its own rules, also when it is restored."""
    code = make({"main.py": "x", "run.log": "1", ".env": "k"}, base=tmp_path / "code")
    data = make({"a.bin": "x", "run.log": "1", ".env": "k"}, base=tmp_path / "data")
    roots = {"code": (str(code), FilePolicy.patterns(exclude=["*.log"])), "data": (str(data), FilePolicy.everything())}
    checkpoint = await memory_repo.capture(code, thread_id="t", roots=roots)
    assert {r.name: r.totals.files for r in checkpoint.roots} == {"code": 1, "data": 3}
    for root in (code, data):
        make({"run.log": "2", ".env": "new", "added": "x"}, base=root)
    receipt = await memory_repo.restore(code, thread_id="t", roots={"code": str(code), "data": str(data)})
    assert receipt is not None
    assert sorted(os.listdir(code)) == [".env", "main.py", "run.log"]
    assert ((code / "run.log").read_text(), (code / ".env").read_text()) == ("2", "new")
    assert ((data / "run.log").read_text(), (data / ".env").read_text()) == ("1", "k")
    assert sorted(os.listdir(data)) == [".env", "a.bin", "run.log"]
    elsewhere = {"code": str(tmp_path / "c2"), "data": str(tmp_path / "d2")}
    await memory_repo.restore(code, thread_id="t", roots=elsewhere)
    assert (sorted(os.listdir(tmp_path / "c2")), sorted(os.listdir(tmp_path / "d2"))) == (
        ["main.py"],
        [".env", "a.bin", "run.log"],
    )
    only = await memory_repo.restore(code, thread_id="t", roots={"data": str(tmp_path / "d3")})
    assert only is not None
    assert sorted(os.listdir(tmp_path / "d3")) == [".env", "a.bin", "run.log"]
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.restore(code, thread_id="t", workspace_root=str(tmp_path / "c2"))
    assert caught.value.code == Code.INVALID_REQUEST


@pytest.mark.parametrize(
    "roots",
    [{}, {"": "a"}, {"a": "a", "b": "a"}, {"a": "a", "b": "a/sub"}, {"a": "a/sub", "b": "a"}, {"a": "a/../b", "b": "b"}],
    ids=["none", "no name", "twice", "nested", "nesting", "twice by another name"],
)
async def test_roots_that_overlap_or_have_no_name_are_refused(
    memory_repo: Repository, tmp_path: Path, make: Make, roots: dict[str, str]
) -> None:
    make({"a/sub/x": "1", "b/x": "1"}, base=tmp_path)
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(
            tmp_path / "a", thread_id="t", roots={name: str(tmp_path / path) for name, path in roots.items()}
        )
    assert caught.value.code == Code.INVALID_REQUEST
    assert await memory_repo.threads() == []


async def test_a_policy_that_changed_is_not_fooled_by_what_was_captured(memory_repo: Repository, make: Make) -> None:
    """Incremental captures under alternating policies hold exactly what each policy takes."""
    work = make({f"d{n}/{name}": name for n in range(30) for name in ("a.py", "b.log", "c.txt")})
    policies = [None, FilePolicy.patterns(exclude=["*.log"]), FilePolicy.patterns(include=["*.py"]), None]
    sizes = [(await memory_repo.capture(work, thread_id="t", policy=policy)).totals.files for policy in policies]
    assert sizes == [90, 60, 30, 90]
