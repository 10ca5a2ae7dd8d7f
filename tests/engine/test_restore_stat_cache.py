"""What a restore leaves in the stat cache."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from snapcore.providers.direct import DirectWorkspace
from snapcore.repository import Repository

Make = Callable[..., Path]


class Named(DirectWorkspace):
    """A folder of a sandbox whose id is given."""

    def __init__(self, root: Path, sandbox_id: str) -> None:
        super().__init__(root)
        self._given_id = sandbox_id

    @property
    def sandbox_id(self) -> str:
        return self._given_id


def stat_rows(repository: Path) -> int:
    with sqlite3.connect(repository / "snapcore.db") as database:
        (count,) = database.execute("SELECT count(*) FROM stat_rows").fetchone()
        return int(count)


async def test_a_capture_after_a_restore_reads_nothing(
    repo: Repository, make: Make, tmp_path: Path, settle: Callable[[Path], None]
) -> None:
    await repo.capture(make({"a": "1", "sub/b": "2"}), thread_id="t")
    target = Named(tmp_path / "target", "sandbox")
    await repo.restore(target, thread_id="t")
    settle(tmp_path / "target")
    assert (await repo.capture_with_report(target, thread_id="t")).files_read == 0


async def test_a_restored_folder_is_not_taken_for_another_of_the_same_sandbox(
    repo: Repository, make: Make, tmp_path: Path, settle: Callable[[Path], None]
) -> None:
    await repo.capture(make({"a": "1", "b": "2"}), thread_id="t")
    await repo.restore(Named(tmp_path / "one", "sandbox"), thread_id="t")
    settle(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")  # with inodes and ctimes of its files, so that only the path tells
    report = await repo.capture_with_report(Named(tmp_path / "two", "sandbox"), thread_id="t")
    assert report.files_read == 2


@pytest.mark.parametrize(("sandbox_id", "remembers"), [("", False), ("sandbox", True)])
async def test_of_a_sandbox_without_an_id_nothing_is_remembered(
    repo: Repository, make: Make, tmp_path: Path, sandbox_id: str, remembers: bool
) -> None:
    await repo.capture(make({"a": "1"}), thread_id="t")
    before = stat_rows(tmp_path / "repo")
    target = Named(tmp_path / "target", sandbox_id)
    for content in ("1", "2"):
        make({"a": content}, base=tmp_path / "target")
        await repo.restore(target, thread_id="t")
        assert (tmp_path / "target" / "a").read_text() == "1"
    assert (stat_rows(tmp_path / "repo") > before) == remembers
