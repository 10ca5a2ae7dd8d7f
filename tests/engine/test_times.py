"""Modification times at the edge of what a checkpoint can keep."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from snapcore.errors import Code, SnapshotError
from snapcore.repository import Repository
from snapcore.selection import FilePolicy

Make = Callable[..., Path]
BEYOND_NS = 10_413_792_000_000_000_000  # the year 2300


def set_time(path: Path) -> None:
    os.utime(path, ns=(BEYOND_NS, BEYOND_NS))
    if os.stat(path).st_mtime_ns != BEYOND_NS:
        pytest.skip("this file system does not hold such times")


async def test_a_time_that_cannot_be_kept_is_refused_by_name(memory_repo: Repository, make: Make) -> None:
    work = make({"fine": "x", "folder/late": "x"})
    set_time(work / "folder/late")
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(work, thread_id="t")
    assert caught.value.code == Code.UNSUPPORTED_ENTRY
    assert caught.value.paths == (b"folder/late",)
    assert "2262" in str(caught.value)


async def test_such_a_file_can_be_skipped_and_restore_leaves_it(memory_repo: Repository, make: Make) -> None:
    work = make({"fine": "x", "folder/late": "x"})
    set_time(work / "folder/late")
    report = await memory_repo.capture_with_report(work, thread_id="t", policy=FilePolicy(on_unsupported="skip"))
    assert [s.path for s in report.skipped] == [b"folder/late"]
    (work / "fine").write_text("changed")
    await memory_repo.restore(work, thread_id="t")
    assert (work / "fine").read_text() == "x"
    assert (work / "folder/late").read_text() == "x"


async def test_such_a_file_made_later_is_removed(memory_repo: Repository, make: Make) -> None:
    work = make({"fine": "x"})
    await memory_repo.capture(work, thread_id="t")
    (work / "late").write_text("y")
    set_time(work / "late")
    await memory_repo.restore(work, thread_id="t")
    assert not (work / "late").exists()
