"""Hard links: a group comes back as one file with its names, whatever happened to which of its names."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from snapcore.model import Entry
from snapcore.repository import Repository
from snapcore.selection import FilePolicy
from snapcore.testing.trees import compare_trees

Make = Callable[..., Path]
Settle = Callable[[Path], None]
NAMES = ("a/first", "b/second", "c/third")


@pytest.fixture
def group(make: Make) -> Path:
    """A file with three names, among plain ones in each folder."""
    work = make({"a/first": "linked", "a/plain": "1", "b/plain": "2", "c/plain": "3", "d/": ""})
    for name in NAMES[1:]:
        os.link(work / NAMES[0], work / name)
    return work


async def hardlinks(repo: Repository) -> dict[bytes, bytes]:
    """Of the head of thread `t`: the first member by path, for all other members."""
    checkpoint = await repo.get("t")
    assert checkpoint is not None
    return {entry.path: entry.hardlink async for entry in repo.ls(checkpoint) if entry.hardlink}


async def check(repo: Repository, work: Path, policy: FilePolicy | None = None) -> dict[bytes, Entry]:
    """Capture again, restore beside, compare with a fresh capture of another repository's view: the live tree."""
    checkpoint = await repo.capture(work, thread_id="t", policy=policy)
    target = work.parent / "target"
    await repo.restore(target, thread_id="t", policy=policy)
    if policy is None:
        assert compare_trees(work, target) == []
    return {entry.path: entry async for entry in repo.ls(checkpoint)}


async def test_a_group_is_kept(memory_repo: Repository, group: Path) -> None:
    """Case 17: all names are there, and lead to one file."""
    report = await memory_repo.capture_with_report(group, thread_id="t")
    assert report.files_read == 4  # the linked file once
    await check(memory_repo, group)
    assert await hardlinks(memory_repo) == {b"b/second": b"a/first", b"c/third": b"a/first"}
    inodes = {(group.parent / "target" / name).stat().st_ino for name in NAMES}
    assert len(inodes) == 1


def unlink_first(work: Path) -> None:
    (work / NAMES[0]).unlink()


def unlink_middle(work: Path) -> None:
    (work / NAMES[1]).unlink()


def unlink_last(work: Path) -> None:
    (work / NAMES[2]).unlink()


def leave_one(work: Path) -> None:
    (work / NAMES[0]).unlink()
    (work / NAMES[2]).unlink()


def add_before(work: Path) -> None:
    os.link(work / NAMES[1], work / "a/a-new-first")


def add_after(work: Path) -> None:
    os.link(work / NAMES[0], work / "d/last")


def rename_first_to_last(work: Path) -> None:
    (work / NAMES[0]).rename(work / "d/moved")


def rename_a_folder(work: Path) -> None:
    (work / "a").rename(work / "z")


def split_by_replacing(work: Path) -> None:
    (work / "b/second").unlink()
    (work / "b/second").write_text("linked")


def write_through(work: Path) -> None:
    (work / "c/third").write_text("changed for all three names")


def chmod_through(work: Path) -> None:
    (work / "b/second").chmod(0o700)


def join_a_plain_file(work: Path) -> None:
    (work / "b/plain").unlink()
    os.link(work / "a/first", work / "b/plain")


def regroup(work: Path) -> None:
    (work / "c/third").unlink()
    os.link(work / "a/plain", work / "c/third")


def edit_another_file(work: Path) -> None:
    (work / "b/plain").write_text("nothing to do with the group")


CHANGES = [
    unlink_first,
    unlink_middle,
    unlink_last,
    leave_one,
    add_before,
    add_after,
    rename_first_to_last,
    rename_a_folder,
    split_by_replacing,
    write_through,
    chmod_through,
    join_a_plain_file,
    regroup,
    edit_another_file,
]


@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_group_is_captured_as_it_is(
    memory_repo: Repository, group: Path, settle: Settle, change: Callable[[Path], None]
) -> None:
    """Case 17, incrementally: the second capture knows the first, and sees the group as a fresh one would."""
    settle(group)
    await memory_repo.capture(group, thread_id="t")
    change(group)
    settle(group)
    entries = await check(memory_repo, group)
    fresh = await memory_repo.capture(group, thread_id="fresh", reread=True)
    assert entries == {entry.path: entry async for entry in memory_repo.ls(fresh)}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_restore_brings_a_changed_group_back(
    memory_repo: Repository, group: Path, change: Callable[[Path], None]
) -> None:
    """Case 50: over the changed group, and once more over the restored one, which then changes nothing."""
    checkpoint = await memory_repo.capture(group, thread_id="t")
    change(group)
    await memory_repo.restore(group, thread_id="t", verify="content")
    receipt = await memory_repo.restore(group, thread_id="t", verify="content")
    assert receipt is not None
    assert (receipt.added, receipt.changed, receipt.removed) == (0, 0, 0)
    again = await memory_repo.capture(group, thread_id="again", reread=True)
    assert again.content_id == checkpoint.content_id
    assert len({(group / name).stat().st_ino for name in NAMES}) == 1


async def test_an_equal_group_stays_where_it_is(memory_repo: Repository, group: Path) -> None:
    await memory_repo.capture(group, thread_id="t")
    before = (group / NAMES[0]).stat().st_ino
    receipt = await memory_repo.restore(group, thread_id="t")
    assert receipt is not None
    assert (receipt.changed, receipt.bytes_written) == (0, 0)
    assert {(group / name).stat().st_ino for name in NAMES} == {before}


async def test_two_equal_groups_stay_two(memory_repo: Repository, make: Make) -> None:
    """Groups of the same content, mode and time are not joined, by capture nor by restore, not even over each other."""
    work = make({"a1": "same", "b1": "same"})
    for name in ("a1", "b1"):
        os.utime(work / name, ns=(1, 1))
    os.link(work / "a1", work / "a2")
    os.link(work / "b1", work / "b2")
    await memory_repo.capture(work, thread_id="t")
    for name in ("a2", "b1", "b2"):
        (work / name).unlink()
        os.link(work / "a1", work / name)
    await memory_repo.restore(work, thread_id="t")
    inodes = [(work / name).stat().st_ino for name in ("a1", "a2", "b1", "b2")]
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]


async def test_names_outside_the_workspace_are_neither_kept_nor_written(memory_repo: Repository, make: Make) -> None:
    """A group that is partly outside: what is inside is a group, or a plain file when it is one name only."""
    work = make({"alone": "x", "pair/1": "y"})
    outside = work.parent / "outside"
    outside.mkdir()
    os.link(work / "alone", outside / "alone")
    os.link(work / "pair/1", work / "pair/2")
    os.link(work / "pair/1", outside / "pair")
    await memory_repo.capture(work, thread_id="t")
    assert await hardlinks(memory_repo) == {b"pair/2": b"pair/1"}
    (outside / "alone").write_text("written from outside, and so inside")
    (outside / "pair").write_text("this too")
    await memory_repo.restore(work, thread_id="t")
    assert (work / "alone").read_text() == "x"
    assert (work / "pair/1").read_text() == (work / "pair/2").read_text() == "y"
    assert (outside / "alone").read_text() == "written from outside, and so inside"
    assert (outside / "pair").read_text() == "this too"


async def test_a_metadata_change_does_not_reach_a_name_outside(memory_repo: Repository, make: Make) -> None:
    """A file that differs in mode only is replaced when it has other names: they belong to somebody else."""
    work = make({"file": "x"})
    await memory_repo.capture(work, thread_id="t")
    outside = work.parent / "outside"
    os.link(work / "file", outside)
    (work / "file").chmod(0o600)
    await memory_repo.restore(work, thread_id="t")
    assert (work / "file").stat().st_mode & 0o777 == 0o644
    assert outside.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("excluded", [*NAMES, "a", "b"])
async def test_an_excluded_name_leaves_the_others_linked(
    memory_repo: Repository, group: Path, settle: Settle, excluded: str
) -> None:
    """The first, a middle, the last name, or its folder is excluded: at the first capture, and at a later one."""
    settle(group)
    policy = FilePolicy.patterns(exclude=["/" + excluded])
    left = [os.fsencode(name) for name in NAMES if name != excluded and not name.startswith(excluded + "/")]
    for order in ([policy], [None, policy], [policy, None, policy]):
        for each in order:
            entries = await check(memory_repo, group, each)
        assert [path for path in entries if path.endswith((b"first", b"second", b"third"))] == left
        assert await hardlinks(memory_repo) == dict.fromkeys(left[1:], left[0])


async def test_a_group_in_the_way_of_plain_files_is_broken_up(memory_repo: Repository, make: Make) -> None:
    """Three equal plain files were linked to each other: a restore gives each its own file again."""
    work = make({"1": "same", "2": "same", "3": "same"})
    for name in "123":
        os.utime(work / name, ns=(5, 5))
    await memory_repo.capture(work, thread_id="t")
    for name in "23":
        (work / name).unlink()
        os.link(work / "1", work / name)
    receipt = await memory_repo.restore(work, thread_id="t")
    assert receipt is not None
    assert receipt.changed == 2
    assert {(work / name).stat().st_nlink for name in "123"} == {1}


async def test_a_large_group_over_many_pages(memory_repo: Repository, make: Make, settle: Settle) -> None:
    """900 names of one file, among as many plain ones: more than a manifest page; then its first name goes."""
    work = make({f"{number:04}/plain": str(number) for number in range(300)})
    (work / "0000/name").write_text("many names")
    for number in range(1, 300):
        os.link(work / "0000/name", work / f"{number:04}/name")
    settle(work)
    await memory_repo.capture(work, thread_id="t")
    assert len(await hardlinks(memory_repo)) == 299
    (work / "0000/name").unlink()
    report = await memory_repo.capture_with_report(work, thread_id="t")
    assert report.files_read <= 300  # its ctime changed under every name; plain files are not read
    assert set((await hardlinks(memory_repo)).values()) == {b"0001/name"}
    await memory_repo.restore(work.parent / "target", thread_id="t")
    assert (work.parent / "target/0299/name").stat().st_nlink == 299
