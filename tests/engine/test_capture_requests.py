"""What a capture is asked for: refused before anything is read when it makes no sense, and never undone by who only looks on."""

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from snapcore.capturing import guard_root
from snapcore.errors import Code, SnapshotError
from snapcore.model import Progress
from snapcore.protocols import ScanSelection
from snapcore.providers.direct import DirectWorkspace
from snapcore.repository import Repository

Make = Callable[..., Path]


class Untouched(DirectWorkspace):
    """A workspace that must not be looked at."""

    def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Any]:
        raise AssertionError("the workspace was scanned")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"label": "two\nlines"}, Code.INVALID_ENTRY),
        ({"label": ""}, Code.INVALID_ENTRY),
        ({"label": "x" * 513}, Code.INVALID_ENTRY),
        ({"label": "\ud800"}, Code.INVALID_ENTRY),
        ({"label": 7}, Code.INVALID_ENTRY),
        ({"label": "secret-value", "secrets": {"N" * 128: "secret-value"}, "run_id": "\x00"}, Code.INVALID_ENTRY),
        ({"label": "secret-value" * 40, "secrets": {"N" * 128: "secret-value"}}, Code.INVALID_ENTRY),
        ({"run_id": "a\tb"}, Code.INVALID_ENTRY),
        ({"idempotency_key": "\udcff"}, Code.INVALID_ENTRY),
        ({"step": -1}, Code.INVALID_ENTRY),
        ({"step": True}, Code.INVALID_ENTRY),
        ({"step": 1 << 63}, Code.INVALID_ENTRY),
        ({"artifacts": {"\ud800": b""}}, Code.INVALID_ENTRY),
        ({"artifacts": {"a\nb": b""}}, Code.INVALID_ENTRY),
        ({"artifacts": {"": b""}}, Code.INVALID_ENTRY),
        ({"artifacts": {"a": "text"}}, Code.INVALID_REQUEST),
        ({"artifacts": {"secret-value": b""}, "secrets": ["secret-value"]}, Code.SECRET_IN_NAME),
    ],
)
async def test_what_could_not_be_committed_is_refused_before_anything_is_read(
    memory_repo: Repository, work: Path, options: dict[str, Any], code: Code
) -> None:
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(Untouched(work), thread_id="t", **options)
    assert caught.value.code == code


@pytest.mark.parametrize("failing", ["first", "last"])
async def test_a_progress_callback_that_raises_fails_nothing(memory_repo: Repository, make: Make, failing: str) -> None:
    """The checkpoint may be committed by then: the caller must hear of it."""
    calls: list[Progress] = []

    def look_on(progress: Progress) -> None:
        calls.append(progress)
        if failing == "first" or progress.files == 1:
            raise RuntimeError("the display is gone")

    checkpoint = await memory_repo.capture(make({"f": "content"}), thread_id="t", on_progress=look_on)
    assert await memory_repo.get("t") == checkpoint
    assert calls


async def test_the_last_report_tells_all_that_was_read(memory_repo: Repository, make: Make) -> None:
    calls: list[Progress] = []
    await memory_repo.capture(make({"f": "content", "g": "more"}), thread_id="t", on_progress=calls.append)
    assert (calls[-1].files, calls[-1].bytes) == (2, 11)


def test_a_link_to_a_home_folder_is_one(tmp_path: Path) -> None:
    """Whoever's home it is: also when this user's own is another."""
    link = tmp_path / "link"
    for home in ("/home/bob", "/home", "/Users/bob", "/root", "/"):
        os.symlink(home, link)
        with pytest.raises(SnapshotError) as caught:
            guard_root(str(link))
        assert caught.value.code == Code.INVALID_WORKSPACE
        link.unlink()
    os.symlink(tmp_path, link)
    guard_root(str(link))
