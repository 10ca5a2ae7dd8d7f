"""What is refused or skipped: special files, unreadable files, files over a limit, roots that cannot be meant."""

import asyncio
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import snapcore
from snapcore.errors import Code, SnapshotError
from snapcore.repository import Repository
from snapcore.selection import FilePolicy

Make = Callable[..., Path]
AsUser = Callable[[Callable[[Path], None]], Path]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # the whole path may be too long for a socket's address
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def device(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser may make devices")
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


def link_out(path: Path) -> None:
    path.symlink_to("/etc")


SPECIAL = {"a FIFO": fifo, "a socket": listener, "a device": device, "a link that leaves the workspace": link_out}


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.parametrize("name", ["odd", "folder/odd", "odd\n\udcff"])
async def test_a_special_file_is_refused_by_name(memory_repo: Repository, make: Make, what: str, name: str) -> None:
    """Cases 8, 9 and 41: typed, naming the path and what to do; a FIFO does not hang the capture."""
    work = make({"folder/file": "x"})
    SPECIAL[what](work / name)
    with pytest.raises(SnapshotError) as caught:
        await asyncio.wait_for(memory_repo.capture(work, thread_id="t"), 20)
    assert caught.value.code == Code.UNSUPPORTED_ENTRY
    assert caught.value.paths == (os.fsencode(name),)
    assert what in str(caught.value)
    assert "on_unsupported" in caught.value.hint
    assert "\n" not in str(caught.value)


async def test_all_offending_paths_are_named_together(memory_repo: Repository, make: Make) -> None:
    work = make({"folder/file": "x"})
    for number, special in enumerate(SPECIAL.values()):
        special(work / "folder" / f"odd-{number}")
        special(work / f"odd-{number}")
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(work, thread_id="t")
    numbers = range(len(SPECIAL))
    assert caught.value.paths == tuple([b"folder/odd-%d" % n for n in numbers] + [b"odd-%d" % n for n in numbers])


@pytest.mark.parametrize("what", SPECIAL)
async def test_skipped_special_files_do_not_block_and_are_never_removed(memory_repo: Repository, make: Make, what: str) -> None:
    """Cases 9, 10, 41: the rest is kept, each skipped path is in the record with its reason, and restore leaves it."""
    work = make({"folder/file": "x", "gone/file": "y"})
    for folder in ("folder", "gone"):
        SPECIAL[what](work / folder / "odd")
    checkpoint = await memory_repo.capture(work, thread_id="t", policy=FilePolicy(on_unsupported="skip"))
    assert [(s.path, s.reason) for s in checkpoint.roots[0].skipped] == [(b"folder/odd", what), (b"gone/odd", what)]
    stored = await memory_repo.get("t")
    assert stored == checkpoint
    before = os.lstat(work / "folder" / "odd").st_ino
    make({"folder/file": "changed", "extra/file": "z"})
    receipt = await memory_repo.restore(work, thread_id="t")
    assert receipt is not None
    assert receipt.kept == (b"folder/odd", b"gone/odd")
    assert os.lstat(work / "folder" / "odd").st_ino == before
    assert sorted(os.listdir(work)) == ["folder", "gone"]
    target = work.parent / "target"
    await memory_repo.restore(target, thread_id="t")
    assert sorted(os.listdir(target / "folder")) == ["file"]


async def test_a_special_file_that_came_later_is_removed_by_a_restore(memory_repo: Repository, make: Make) -> None:
    """It is not in the checkpoint and was not skipped by it: it goes, unopened, like any added file."""
    work = make({"file": "x"})
    await memory_repo.capture(work, thread_id="t")
    os.mkfifo(work / "fifo")
    receipt = await asyncio.wait_for(memory_repo.restore(work, thread_id="t"), 20)
    assert receipt is not None
    assert os.listdir(work) == ["file"]


@pytest.mark.parametrize("kind", ["file", "folder"])
async def test_an_excluded_special_file_is_no_trouble(memory_repo: Repository, make: Make, kind: str) -> None:
    work = make({"file": "x", "run/": ""})
    os.mkfifo(work / "run" / "pipe")
    pattern = "/run" if kind == "folder" else "pipe"
    checkpoint = await memory_repo.capture(work, thread_id="t", policy=FilePolicy.patterns(exclude=[pattern]))
    assert checkpoint.roots[0].skipped == ()


# ---- unreadable files and folders, for a user without rights


def make_unreadable(root: Path) -> None:
    for name in ("fine", "closed", "no-search"):
        (root / name).mkdir()
        (root / name / "file").write_text("x")
    (root / "secret").write_text("y")
    (root / "secret").chmod(0)
    (root / "no-search").chmod(0o444)
    (root / "closed").chmod(0)


UNREADABLE = (b"closed", b"no-search/file", b"secret")


def test_unreadable_files_and_folders_are_refused_and_named(as_user: AsUser) -> None:
    """Case 25: a typed error that says which, not a capture that silently lacks them."""

    def job(root: Path) -> None:
        async def check() -> None:
            make_unreadable(root)
            async with snapcore.open_repository("memory://") as repo:
                with pytest.raises(SnapshotError) as caught:
                    await repo.capture(root, thread_id="t")
                assert caught.value.code == Code.UNREADABLE_ENTRY
                assert set(caught.value.paths) <= set(UNREADABLE)
                assert b"closed" in caught.value.paths
                assert "on_unreadable" in caught.value.hint
                assert await repo.get("t") is None

        asyncio.run(check())

    as_user(job)


def test_unreadable_files_and_folders_are_skipped_listed_and_never_removed(as_user: AsUser) -> None:
    """Case 25: with `skip` the rest is captured; restore leaves the unreadable ones and their folders."""

    def job(root: Path) -> None:
        async def check() -> None:
            make_unreadable(root)
            async with snapcore.open_repository("memory://") as repo:
                report = await repo.capture_with_report(root, thread_id="t", policy=FilePolicy(on_unreadable="skip"))
                assert tuple(s.path for s in report.skipped) == UNREADABLE
                assert all(s.reason == "unreadable" for s in report.skipped)
                (root / "fine" / "file").write_text("changed")
                (root / "added").mkdir()
                receipt = await repo.restore(root, thread_id="t")
                assert receipt is not None
                assert receipt.kept == UNREADABLE
                assert (root / "fine" / "file").read_text() == "x"
                assert sorted(os.listdir(root)) == ["closed", "fine", "no-search", "secret"]
                for name in ("closed", "no-search", "secret"):
                    (root / name).chmod(0o700)
                assert (root / "closed" / "file").read_text() == (root / "no-search" / "file").read_text() == "x"

        asyncio.run(check())

    as_user(job)


def test_a_user_restores_files_that_stay_writable_for_that_user(as_user: AsUser) -> None:
    """Case 13: files captured by the superuser with other owners belong to who restores them."""

    def job(root: Path) -> None:
        async def check() -> None:
            async with snapcore.open_repository(root / "repo") as repo:
                receipt = await repo.restore(root / "target", thread_id="t")
                assert receipt is not None
                (root / "target" / "folder" / "file").write_text("changed")
                (root / "target" / "folder" / "new").write_text("new")
                assert (root / "target" / "folder" / "file").stat().st_uid == os.geteuid()

        asyncio.run(check())

    base = as_user(lambda root: None)
    (base / "work" / "folder").mkdir(parents=True)
    (base / "work" / "folder" / "file").write_text("x")

    async def capture() -> None:
        async with snapcore.open_repository(base / "repo") as repo:
            await repo.capture(base / "work", thread_id="t")

    asyncio.run(capture())
    if os.geteuid() == 0:
        for folder, _, files in os.walk(base / "repo"):
            for path in [folder, *(os.path.join(folder, name) for name in files)]:
                os.chown(path, 65534, 65534)
    as_user(job)


def test_read_only_folders_are_restored_into_and_stay_read_only(as_user: AsUser) -> None:
    """Case 49: as a user for whom a read-only folder is read-only; adding, changing and removing inside it, and a new one."""

    def job(root: Path) -> None:
        async def check() -> None:
            work = root / "work"
            for name in ("sealed", "sealed/inner", "later"):
                (work / name).mkdir(parents=True)
                for file in ("changed", "removed", "same"):
                    (work / name / file).write_text("old")
            for name in ("sealed/inner", "sealed"):
                (work / name).chmod(0o555)
            work.chmod(0o555)
            async with snapcore.open_repository(root / "repo") as repo:
                await repo.capture(work, thread_id="t")
                for path in (work, work / "sealed", work / "sealed/inner"):
                    path.chmod(0o755)
                for name in ("sealed", "sealed/inner"):
                    (work / name / "changed").write_text("new!")
                    (work / name / "removed").unlink()
                    (work / name / "added").write_text("x")
                for file in ("changed", "removed", "same"):
                    (work / "later" / file).unlink()
                (work / "later").rmdir()
                for path in (work / "sealed/inner", work / "sealed", work):
                    path.chmod(0o555)
                for target in (work, root / "target", root / "target"):
                    receipt = await repo.restore(target, thread_id="t", verify="content")
                    assert receipt is not None
                    assert receipt.differences == ()
                    for name in ("sealed", "sealed/inner"):
                        assert sorted(f.name for f in (target / name).iterdir() if f.is_file()) == ["changed", "removed", "same"]
                        assert (target / name / "changed").read_text() == "old"
                        assert stat.S_IMODE((target / name).stat().st_mode) == 0o555
                    assert stat.S_IMODE(target.stat().st_mode) == 0o555

        asyncio.run(check())

    as_user(job)


# ---- limits


LIMITS = {
    "max_file_bytes": FilePolicy(max_file_bytes=100),
    "max_total_bytes": FilePolicy(max_total_bytes=250),
    "max_files": FilePolicy(max_files=3),
}


@pytest.fixture
def sized(make: Make) -> Path:
    return make({"a": "a" * 90, "b/c": "b" * 101, "b/d": "c" * 50, "e": "d" * 100, "empty/": ""})


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_limit_that_is_exceeded_is_a_typed_error(memory_repo: Repository, sized: Path, limit: str) -> None:
    """Case 20: the home folder or a data set by mistake ends early, with the limit's name."""
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(sized, thread_id="t", policy=LIMITS[limit])
    assert caught.value.code == Code.LIMIT_EXCEEDED
    assert limit in str(caught.value)
    assert caught.value.paths
    assert await memory_repo.get("t") is None


@pytest.mark.parametrize(
    ("limit", "left_out"),
    [("max_file_bytes", [b"b/c"]), ("max_total_bytes", [b"e"]), ("max_files", [b"e"])],
)
async def test_files_over_a_limit_can_be_skipped_and_are_never_removed(
    memory_repo: Repository, sized: Path, limit: str, left_out: list[bytes]
) -> None:
    """Case 20, visible skips: each is in the record with its reason, and restore leaves it, as it is now."""
    options = {name: getattr(LIMITS[limit], name) for name in LIMITS}
    report = await memory_repo.capture_with_report(sized, thread_id="t", policy=FilePolicy(on_limit="skip", **options))
    assert [s.path for s in report.skipped] == left_out
    assert all(limit in s.reason for s in report.skipped)
    assert report.checkpoint.totals.files == 4 - len(left_out)
    for path in left_out:
        (sized / os.fsdecode(path)).write_text("grown since")
    (sized / "a").write_text("changed")
    await memory_repo.restore(sized, thread_id="t")
    assert (sized / "a").read_text() == "a" * 90
    for path in left_out:
        assert (sized / os.fsdecode(path)).read_text() == "grown since"


@pytest.mark.parametrize(
    "policy", [FilePolicy(max_file_bytes=101), FilePolicy(max_total_bytes=341), FilePolicy(max_files=4)], ids=list(LIMITS)
)
async def test_exactly_at_a_limit_is_within_it(memory_repo: Repository, sized: Path, policy: FilePolicy) -> None:
    checkpoint = await memory_repo.capture(sized, thread_id="t", policy=policy)
    assert checkpoint.totals.files == 4


async def test_excluded_files_do_not_count_towards_a_limit(memory_repo: Repository, sized: Path) -> None:
    policy = FilePolicy(exclude=["/b"], max_files=2, max_total_bytes=190, max_file_bytes=100)
    assert (await memory_repo.capture(sized, thread_id="t", policy=policy)).totals.bytes == 190


# ---- roots


@pytest.mark.parametrize(
    "root", ["/", "//", "/.", "/tmp/..", "/root", "/home", "/home/", "/home/somebody", "/Users/somebody", "~"]
)
async def test_a_root_of_everything_or_a_home_is_refused(
    memory_repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    """Cases 3 and 20: capture and restore refuse `/` and home folders unless asked for. (The limit and the dry run are for
    the day on which they do not.)"""
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (tmp_path / "me").mkdir()
    (tmp_path / "work").mkdir()
    await memory_repo.capture(tmp_path / "work", thread_id="t")
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(root, thread_id="new", policy=FilePolicy(max_files=1))
    assert caught.value.code == Code.INVALID_WORKSPACE
    assert "allow_any_root" in caught.value.hint
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.restore(root, thread_id="t", dry_run=True)
    assert caught.value.code == Code.INVALID_WORKSPACE


async def test_a_link_to_a_home_is_a_home(memory_repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (tmp_path / "me").mkdir()
    (tmp_path / "disguise").symlink_to("me")
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(tmp_path / "disguise", thread_id="t")
    assert caught.value.code == Code.INVALID_WORKSPACE
    (tmp_path / "me" / "file").write_text("x")
    checkpoint = await memory_repo.capture(tmp_path / "disguise", thread_id="t", allow_any_root=True)
    assert checkpoint.totals.files == 1
    (tmp_path / "me" / "file").unlink()
    await memory_repo.restore(tmp_path / "disguise", thread_id="t", allow_any_root=True)
    assert (tmp_path / "me" / "file").read_text() == "x"


@pytest.mark.parametrize("kind", ["missing", "file", "fifo", "dangling link"])
async def test_a_root_that_is_no_folder_is_refused(memory_repo: Repository, tmp_path: Path, kind: str) -> None:
    root = tmp_path / "root"
    if kind == "file":
        root.write_text("x")
    elif kind == "fifo":
        os.mkfifo(root)
    elif kind == "dangling link":
        root.symlink_to("nowhere")
    with pytest.raises(SnapshotError) as caught:
        await asyncio.wait_for(memory_repo.capture(root, thread_id="t"), 20)
    absent = kind in ("missing", "dangling link")
    assert caught.value.code == (Code.MISSING_WORKSPACE if absent else Code.INVALID_WORKSPACE)
    assert await memory_repo.threads() == []
