"""Planning a restore of a folder that is not there yet."""

from collections.abc import Callable
from pathlib import Path

import pytest

from snapcore.errors import Code, SnapshotError
from snapcore.repository import Repository

Make = Callable[..., Path]


async def test_a_dry_run_plans_for_a_folder_that_does_not_exist(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    work = make({"a": "x", "folder/b": "yy"})
    await memory_repo.capture(work, thread_id="t")
    out = tmp_path / "elsewhere" / "new"
    planned = await memory_repo.restore(out, thread_id="t", dry_run=True)
    assert planned is not None
    assert planned.plan is not None
    assert planned.plan.adds == (b"a", b"folder", b"folder/b")
    assert (planned.plan.removes, planned.plan.changes, planned.plan.bytes) == ((), (), 3)
    assert not out.parent.exists()
    done = await memory_repo.restore(out, thread_id="t")
    assert done is not None
    assert done.added == planned.added == 3


async def test_a_dry_run_does_not_plan_over_what_is_no_folder(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    await memory_repo.capture(make({"a": "x"}), thread_id="t")
    (tmp_path / "file").write_text("x")
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.restore(tmp_path / "file", thread_id="t", dry_run=True)
    assert caught.value.code == Code.INVALID_WORKSPACE
