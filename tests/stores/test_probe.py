"""`snapcore store test`: what it says of good and of poor stores, and that it leaves nothing behind.

Case 30: a batch delete that is refused is no obstacle.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapcore.errors import Code, RepositoryError, SnapcoreError
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.probe import ProbeReport, probe, probe_store
from snapcore.stores.s3 import S3BlobStore
from snapcore.testing import Faults, StrictS3Server, with_faults

FOLDER = "snapcore-test-0123"


def failed(report: ProbeReport) -> dict[str, bool]:
    """The checks that failed, and whether they matter."""
    return {check.name: check.needed for check in report.checks if not check.works}


async def test_a_strict_service_has_all_that_is_needed(strict_server: StrictS3Server, s3: S3BlobStore) -> None:
    report = await probe_store(s3, FOLDER)
    assert report.ok
    assert failed(report) == {"delete several at once": False, "store only if absent (If-None-Match)": False}
    assert strict_server.buckets["bucket"] == {}
    assert report.put_seconds
    assert report.upload_rate
    assert report.download_rate


@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_other_stores_are_tried_out_too(kind: str, tmp_path: Path) -> None:
    report = await probe(str(tmp_path / "new" / "blobs") if kind == "file" else "memory://")
    assert report.ok
    assert failed(report) == {}
    assert not (tmp_path / "new" / "blobs").exists()


async def test_what_was_in_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "a").write_bytes(b"data")
    assert (await probe(f"file://{tmp_path}")).ok
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "packs"]


@pytest.mark.parametrize(
    ("method", "check", "needed"),
    [
        ("get", "read it back at once", True),
        ("head", "tell its size", True),
        ("list", "list what is there", False),
        ("delete", "delete a blob", True),
    ],
)
async def test_what_a_store_lacks_is_told_and_whether_it_matters(method: str, check: str, needed: bool) -> None:
    store, faults = MemoryBlobStore(), Faults()
    faults.fail(method, 1, RepositoryError("Refused.", code=Code.ACCESS_DENIED))
    report = await probe_store(with_faults(store, faults), FOLDER)
    assert failed(report) == {check: needed}
    assert report.ok is not needed
    assert any("Refused. [ACCESS_DENIED]" in each.seen for each in report.checks)
    assert store.blobs == {}


class Lying(MemoryBlobStore):
    """A store that keeps the first content of a key, and makes up what it does not have."""

    async def put(self, key: str, data: Any) -> None:
        self.blobs.setdefault(key, bytes(data))

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.blobs.get(key, b"")[offset : None if length is None else offset + length]


async def test_a_store_that_lies_is_found_out() -> None:
    report = await probe_store(Lying(), FOLDER)
    assert failed(report) == {"read a part of it": True, "replace it": True, "tell that a blob is missing": True}


async def test_what_cannot_be_removed_again_is_told() -> None:
    store, faults = MemoryBlobStore(), Faults()
    faults.fail("delete", None, RepositoryError("Refused.", code=Code.ACCESS_DENIED))
    report = await probe_store(with_faults(store, faults), FOLDER)
    assert set(report.left_behind) >= set(store.blobs)
    assert not report.ok


async def test_a_clock_that_is_far_off_is_told(strict_server: StrictS3Server, s3: S3BlobStore) -> None:
    strict_server.clock_offset = -3600.0
    report = await probe_store(s3, FOLDER)
    assert failed(report)["the clocks agree"]
    assert any("differ by 3" in check.seen and "clock" in check.seen for check in report.checks)


async def test_a_store_that_takes_nothing_is_an_error(strict_server: StrictS3Server, open_store: Callable[..., Any]) -> None:
    with pytest.raises(SnapcoreError) as caught:
        await probe_store(open_store("nowhere"), FOLDER)
    assert caught.value.code is Code.NO_BUCKET


# ---- the command


@pytest.fixture
def run(strict_server: StrictS3Server) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run_command(*args: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "very-secret"}
        command = [sys.executable, "-m", "snapcore.cli", "store", "test", *args]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)

    return run_command


def test_the_command_prints_a_table_and_a_verdict(strict_server: StrictS3Server, run: Callable[..., Any]) -> None:
    done = run(strict_server.address("bucket/p"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["works", "needed"]
    assert "delete several at once                no     no      refused (NotImplemented); snapcore deletes one by one" in lines
    assert lines[-1] == f"snapcore can keep its blobs here: {strict_server.address('bucket/p')}"
    assert strict_server.buckets["bucket"] == {}


def test_the_command_ends_with_one_when_something_needed_is_lacking(
    strict_server: StrictS3Server, run: Callable[..., Any]
) -> None:
    strict_server.faults.refuse("DELETE", None, status=403, code="AccessDenied")
    done = run(strict_server.address("bucket"), "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["message_type"] == "store test"
    assert answer["ok"] is False
    assert {"name": "store a blob", "needed": True, "works": True, "seen": ""} in answer["checks"]
    assert len(answer["left_behind"]) > 5
    assert "very-secret" not in done.stdout + done.stderr


def test_the_command_tells_the_error_of_a_store_that_takes_nothing(
    strict_server: StrictS3Server, run: Callable[..., Any]
) -> None:
    done = run(strict_server.address("nowhere"))
    assert done.returncode == 1
    assert "[NO_BUCKET]" in done.stderr
    assert done.stdout == ""
