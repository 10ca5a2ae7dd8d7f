"""Restores that would lose something are refused, and the workspace stays as it was."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import Code, SnapshotError
from snapcore.model import Entry, FileStat, Kind, Note
from snapcore.protocols import ScanSelection
from snapcore.providers.direct import DirectWorkspace
from snapcore.redaction_hooks import RedactionPattern
from snapcore.repository import Repository
from snapcore.restoreplan import link_target
from snapcore.selection import FilePolicy

Make = Callable[..., Path]


def contents(root: Path) -> dict[str, tuple[int, bytes | None]]:
    """Mode, and a file's bytes, of every path."""
    return {
        str(path.relative_to(root)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else None)
        for path in [root, *root.rglob("*")]
    }


# ---- a repository inside the workspace


async def test_a_workspace_that_holds_its_repository_is_neither_captured_nor_restored(
    make: Make, work: Path, tmp_path: Path
) -> None:
    make({"a": "1"})
    (tmp_path / "link").symlink_to(work)
    for place in (work, tmp_path / "link"):
        async with snapcore.open_repository(place / "repo") as repo:
            await repo.capture(make({"a": "1"}, base=tmp_path / "other"), thread_id="t")
            before = {path for path in work.rglob("*") if not path.name.startswith("snapcore.db-")}
            attempts: list[tuple[Callable[..., Awaitable[object]], dict[str, Any]]]
            attempts = [(repo.capture, {}), (repo.restore, {}), (repo.restore, {"dry_run": True})]
            for act, options in attempts:
                with pytest.raises(SnapshotError, match="elsewhere") as caught:
                    await act(work, thread_id="t", **options)
                assert caught.value.code == Code.INVALID_WORKSPACE
            assert {path for path in work.rglob("*") if not path.name.startswith("snapcore.db-")} == before
            assert len(await repo.list("t")) >= 1


async def test_a_database_inside_the_workspace_is_refused_too(make: Make, work: Path, tmp_path: Path) -> None:
    make({"a": "1"})
    (work / "state%20 of?it").mkdir()
    url = f"sqlite:///{work}/state%2520 of%3Fit/snapcore.db"
    async with snapcore.open_repository(tmp_path / "repo", database=url) as repo:
        assert (work / "state%20 of?it" / "snapcore.db").exists()
        with pytest.raises(SnapshotError) as caught:
            await repo.capture(work, thread_id="t")
    assert caught.value.code == Code.INVALID_WORKSPACE


async def test_a_repository_beside_the_workspace_is_fine(make: Make, work: Path, tmp_path: Path) -> None:
    make({"a": "1"})
    async with snapcore.open_repository(tmp_path / "work-repo") as repo:
        await repo.capture(work, thread_id="t")
        assert await repo.restore(work, thread_id="t") is not None


@pytest.mark.parametrize("name", ["a?b", "50%", "a%20b", "a#b", "a b"])
async def test_a_repository_may_have_any_name(name: str, make: Make, tmp_path: Path) -> None:
    work = make({"a": "1"})
    for _ in range(2):
        async with snapcore.open_repository(tmp_path / name / "repo") as repo:
            await repo.capture(work, thread_id="t")
    assert (tmp_path / name / "repo" / "snapcore.db").is_file()
    assert sorted(os.listdir(tmp_path)) == sorted([name, "work"])


# ---- what cannot be read


def test_an_unreadable_folder_blocks_a_restore(as_user: Callable[[Callable[[Path], None]], Path]) -> None:
    """Its entries could neither be compared nor restored: no success may be told."""

    def job(base: Path) -> None:
        work = base / "work"
        (work / "sub").mkdir(parents=True)
        (work / "sub" / "file").write_text("1")
        (work / "top").write_text("1")
        repo = snapcore.blocking.open_repository(base / "repo")
        repo.capture(work, thread_id="t")
        (work / "sub" / "file").write_text("2")
        (work / "top").write_text("2")
        (work / "sub").chmod(0)
        cases: list[dict[str, Any]] = [{}, {"dry_run": True}, {"paths": [b"sub/file"]}]
        for options in cases:
            with pytest.raises(SnapshotError, match="readable") as caught:
                repo.restore(work, thread_id="t", **options)
            assert (caught.value.code, caught.value.paths) == (Code.RESTORE_BLOCKED, (b"sub",))
        assert (work / "top").read_text() == "2"
        repo.restore(work, thread_id="t", paths=[b"top"])
        (work / "sub").chmod(0o700)
        assert ((work / "sub" / "file").read_text(), (work / "top").read_text()) == ("2", "1")
        repo.restore(work, thread_id="t")
        assert (work / "sub" / "file").read_text() == "1"
        repo.close()

    as_user(job)


def test_an_unreadable_folder_that_the_capture_left_out_is_left_alone(as_user: Callable[[Callable[[Path], None]], Path]) -> None:
    def job(base: Path) -> None:
        work = base / "work"
        (work / "sub").mkdir(parents=True)
        (work / "top").write_text("1")
        (work / "sub").chmod(0)
        repo = snapcore.blocking.open_repository(base / "repo")
        repo.capture(work, thread_id="t", policy=FilePolicy(on_unreadable="skip"))
        (work / "top").write_text("2")
        receipt = repo.restore(work, thread_id="t")
        assert receipt is not None
        assert receipt.kept == (b"sub",)
        assert (work / "top").read_text() == "1"
        repo.close()

    as_user(job)


# ---- what is left alone must hide nothing


class Mounted(DirectWorkspace):
    """A folder in which `data` is another file system."""

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        async for batch in super().scan(selection, cross_mounts=cross_mounts):
            if cross_mounts:
                yield batch
                continue
            shown = [s for s in batch if not s.path.startswith(b"data/")]
            yield [FileStat(s.path, s.kind, note=Note.MOUNT) if s.path == b"data" else s for s in shown]


async def test_a_mount_over_captured_files_blocks_a_restore(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "1", "data/file": "1"})
    await memory_repo.capture(work, thread_id="t")
    make({"a": "2", "data/file": "2"})
    before = contents(work)
    for dry_run in (True, False):
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.restore(Mounted(work), thread_id="t", dry_run=dry_run)
        assert (caught.value.code, caught.value.paths) == (Code.RESTORE_BLOCKED, (b"data",))
    assert contents(work) == before
    cases: list[dict[str, Any]] = [{"paths": ["a"]}, {"policy": FilePolicy.patterns(exclude=["/data"])}]
    for options in cases:
        make({"a": "2"})
        await memory_repo.restore(Mounted(work), thread_id="t", **options)
        assert ((work / "a").read_text(), (work / "data" / "file").read_text()) == ("1", "2")


async def test_what_was_captured_across_a_mount_is_restored_across_it(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "1", "data/file": "1"})
    await memory_repo.capture(Mounted(work), thread_id="t", policy=FilePolicy(cross_mounts=True))
    make({"a": "2", "data/file": "2", "data/added": "2"})
    receipt = await memory_repo.restore(Mounted(work), thread_id="t")
    assert receipt is not None
    assert receipt.kept == ()
    assert ((work / "data" / "file").read_text(), (work / "data" / "added").exists()) == ("1", False)


async def test_a_folder_that_has_become_an_environment_blocks_a_restore(memory_repo: Repository, make: Make) -> None:
    """`venv` was captured as plain files; by its new marker the saved policy would leave it alone."""
    work = make({"a": "1", "venv/file": "1"})
    await memory_repo.capture(work, thread_id="t")
    make({"a": "2", "venv/file": "2", "venv/pyvenv.cfg": ""})
    before = contents(work)
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.restore(work, thread_id="t")
    assert (caught.value.code, caught.value.paths) == (Code.RESTORE_BLOCKED, (b"venv",))
    assert contents(work) == before
    # who gives the policy means what it says
    receipt = await memory_repo.restore(work, thread_id="t", policy=FilePolicy.default())
    assert receipt is not None
    assert receipt.kept == (b"venv",)
    assert ((work / "a").read_text(), (work / "venv" / "file").read_text()) == ("1", "2")
    await memory_repo.restore(work, thread_id="t", policy=FilePolicy.everything())
    assert ((work / "venv" / "file").read_text(), (work / "venv" / "pyvenv.cfg").exists()) == ("1", False)


# ---- several roots


async def test_several_roots_go_only_where_the_caller_says(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    """Where they were is data of the checkpoint."""
    one, two = make({"a": "1"}, base=tmp_path / "one"), make({"b": "1"}, base=tmp_path / "two")
    await memory_repo.capture(one, thread_id="t", roots={"one": str(one), "two": str(two)})
    for path in (one / "a", two / "b"):
        path.write_text("precious")
    for place in (tmp_path / "elsewhere", one):
        with pytest.raises(SnapshotError, match="roots=") as caught:
            await memory_repo.restore(place, thread_id="t")
        assert caught.value.code == Code.INVALID_REQUEST
        assert f"one (was {one}), two (was {two})" in caught.value.message
    assert ((one / "a").read_text(), (two / "b").read_text()) == ("precious", "precious")
    await memory_repo.restore(tmp_path / "elsewhere", thread_id="t", roots={"one": "x", "two": "y"})
    assert (tmp_path / "elsewhere" / "x" / "a").read_text() == "1"
    assert (tmp_path / "elsewhere" / "y" / "b").read_text() == "1"


# ---- safety checkpoints


async def test_a_safety_checkpoint_stores_no_secret_that_the_checkpoint_does_not_hold(
    memory_repo: Repository, make: Make
) -> None:
    work = make({"a": "token: s3cr3t-value", "b": "key=abc-000123"})
    patterns = [RedactionPattern("key", r"abc-[0-9]{6}")]
    given: dict[str, Any] = {
        "secrets": {"token": "s3cr3t-value", "pin": "1234"},
        "patterns": patterns,
        "allow_short_secrets": True,
    }
    await memory_repo.capture(work, thread_id="t", **given)
    make({"a": "token: s3cr3t-value, changed", "pin": "1234"})
    others: list[dict[str, Any]] = [{}, {"secrets": {"token": "s3cr3t-value"}}, {**given, "patterns": []}]
    for options in others:
        with pytest.raises(SnapshotError, match="same secrets") as caught:
            await memory_repo.restore(work, thread_id="t", safety_checkpoint=True, **{"allow_short_secrets": True, **options})
        assert caught.value.code == Code.INVALID_REQUEST
    assert (work / "a").read_text() == "token: s3cr3t-value, changed"
    assert len(await memory_repo.list("t")) == 1
    first = (await memory_repo.list("t"))[0]
    await memory_repo.restore(work, thread_id="t", safety_checkpoint=True, **given)
    saved = await memory_repo.get("t", label="before-restore")
    assert saved is not None
    assert saved.redaction == first.redaction
    assert b"s3cr3t" not in await memory_repo.read_file(saved, b"a")
    assert await memory_repo.read_file(saved, b"pin") == bytes(4)
    assert b"123" not in await memory_repo.read_file(saved, b"b")


async def test_a_short_secret_can_be_put_back(memory_repo: Repository, make: Make) -> None:
    work = make({"pin": "1234"})
    given: dict[str, Any] = {"secrets": {"pin": "1234"}, "allow_short_secrets": True}
    await memory_repo.capture(work, thread_id="t", **given)
    (work / "pin").unlink()
    await memory_repo.restore(work, thread_id="t", reinject=True, **given)
    assert (work / "pin").read_text() == "1234"


async def test_a_safety_checkpoint_leaves_out_what_cannot_be_kept(memory_repo: Repository, make: Make) -> None:
    """A FIFO that came since, or was left out before, is no reason not to restore."""
    work = make({"a": "1"})
    os.mkfifo(work / "fifo")
    await memory_repo.capture(work, thread_id="t", policy=FilePolicy(on_unsupported="skip"))
    make({"a": "2"})
    await memory_repo.restore(work, thread_id="t", safety_checkpoint=True)
    assert (work / "a").read_text() == "1"
    saved = await memory_repo.get("t", label="before-restore")
    assert saved is not None
    assert await memory_repo.read_file(saved, b"a") == b"2"
    assert [s.path for s in saved.roots[0].skipped] == [b"fifo"]


# ---- links into the root


@pytest.mark.parametrize(
    ("root", "inside", "target"),
    [(b"/", b"w/d", b"/w/d"), (b"/", b"", b"/"), (b"/srv", b"d", b"/srv/d"), (b"/srv", b"", b"/srv")],
)
def test_a_link_into_the_root_follows_the_root(root: bytes, inside: bytes, target: bytes) -> None:
    assert link_target(Entry(b"link", Kind.LINK, target=inside, in_root=True), root) == target


# ---- a part of a checkpoint


@pytest.mark.parametrize("deep", [False, True])
async def test_restoring_some_paths_changes_nothing_beside_them(memory_repo: Repository, make: Make, deep: bool) -> None:
    work = make({"a/x": "1", "a/y": "1", "b": "1"})
    await memory_repo.capture(work, thread_id="t")
    make({"a/x": "2", "a/y": "2", "a/added": "2", "b": "2"})
    work.chmod(0o700)
    (work / "a").chmod(0o700)
    for folder in (work / "a", work):
        os.utime(folder, ns=(5, 1_000_000_000))
    path = "a/x" if deep else "a/y"
    plan = await memory_repo.restore(work, thread_id="t", paths=[path], dry_run=True)
    assert plan is not None
    assert plan.plan is not None
    assert plan.plan.changes == (path.encode(),)
    await memory_repo.restore(work, thread_id="t", paths=[path])
    told = [(folder.stat().st_mode & 0o777, folder.stat().st_mtime_ns) for folder in (work, work / "a")]
    assert told == [(0o700, 1_000_000_000)] * 2
    assert (work / path).read_text() == "1"
    assert (work / "b").read_text() == (work / "a" / "added").read_text() == "2"


async def test_a_folder_that_has_to_be_made_for_a_path_is_made_as_it_was(memory_repo: Repository, make: Make) -> None:
    work = make({"a/sub/x": "1", "b": "1"})
    (work / "a").chmod(0o750)
    os.utime(work / "a", ns=(5, 1_000_000_000))
    await memory_repo.capture(work, thread_id="t")
    for path in (work / "a" / "sub" / "x", work / "a" / "sub", work / "a"):
        path.unlink() if path.is_file() else path.rmdir()
    await memory_repo.restore(work, thread_id="t", paths=["a/sub/x"])
    assert ((work / "a").stat().st_mode & 0o777, (work / "a").stat().st_mtime_ns) == (0o750, 1_000_000_000)
    assert (work / "a" / "sub" / "x").read_text() == "1"


async def test_a_progress_callback_that_raises_does_not_fail_a_restore(memory_repo: Repository, make: Make) -> None:
    """The change is done by then, and the caller has to know."""
    work = make({"a": "1"})
    await memory_repo.capture(work, thread_id="t")
    make({"a": "2"})
    called = []

    def report(progress: object) -> None:
        called.append(progress)
        raise RuntimeError("a defect of the caller's")

    assert await memory_repo.restore(work, thread_id="t", on_progress=report) is not None
    assert called
    assert (work / "a").read_text() == "1"
