"""Health: what counts as well, and the file that tells it."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from snapcore.cron.health import Health, write_atomically
from snapcore.cron.metrics import Metrics
from snapcore.runs import JobRun, Outcome

START = datetime(2026, 6, 3, tzinfo=UTC)


def run(outcome: str, thread_id: str = "t", **changes: Any) -> JobRun:
    values = {"id": "0" * 32, "job": "web", "thread_id": thread_id, "started_at": 1, "ended_at": 2, "outcome": outcome}
    return JobRun(**{**values, **changes})


def well(*runs: JobRun) -> Health:
    health = Health(START)
    health.fault("repository", None)
    for each in runs:
        health.ran(each)
    return health


@pytest.mark.parametrize(
    ("outcomes", "failures"),
    [
        ([Outcome.CAPTURED], 0),
        ([Outcome.FAILED, Outcome.FAILED], 2),
        ([Outcome.FAILED, Outcome.UNCHANGED], 0),
        ([Outcome.FAILED, Outcome.LOCKED], 1),
        ([Outcome.CAPTURED, Outcome.LOCKED], 0),
        ([Outcome.FAILED, Outcome.INTERRUPTED, Outcome.FAILED], 2),
    ],
)
def test_failures_count_from_the_last_run_that_went_well(outcomes: list[str], failures: int) -> None:
    health = well(*map(run, outcomes))
    assert health.failures("web", "t") == failures
    assert health.ok == (failures == 0)


def test_one_thread_that_fails_is_enough_until_it_is_gone() -> None:
    health = well(run(Outcome.CAPTURED, "a"), run(Outcome.FAILED, "b", error="NO_SANDBOX"))
    assert not health.ok
    assert health.retain("web", {"a"}) == ["b"]
    assert health.ok


def test_what_is_gone_of_one_job_is_kept_of_the_others() -> None:
    health = well(run(Outcome.FAILED, "b"), run(Outcome.FAILED, "b", job="other"))
    assert health.retain("web", set()) == ["b"]
    assert health.failures("other", "b") == 1


def test_a_thread_that_is_gone_leaves_no_metrics_of_its_own() -> None:
    metrics = Metrics()
    metrics.ran(run(Outcome.FAILED, "a", error="NO_SANDBOX"), 1)
    metrics.ran(run(Outcome.CAPTURED, "b"), 0)
    metrics.drop("web", "a")
    metrics.drop("web", "never")
    text = metrics.text().decode()
    assert 'thread="a"' not in text
    assert 'snapcore_cron_consecutive_failures{job="web",thread="b"} 0.0' in text
    assert 'snapcore_cron_failures_total{code="NO_SANDBOX",job="web"} 1.0' in text


def test_it_is_not_well_before_the_repository_was_opened() -> None:
    assert not Health(START).ok


def test_every_job_is_in_the_document_with_its_next_run() -> None:
    health = well(run(Outcome.FAILED, error="STORE_FULL", message="Full."))
    health.jobs = ("web", "never")
    document = health.document(lambda job, thread: START if job == "never" else None)
    assert document["status"] == "degraded"
    assert document["jobs"]["never"] == {"next_run": "2026-06-03T00:00:00Z", "threads": {}}
    told = document["jobs"]["web"]["threads"]["t"]
    assert (told["last_outcome"], told["last_success"], told["error"]) == ("failed", None, "STORE_FULL")


def test_the_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    write_atomically(str(path), {"status": "ok"})
    before = path.stat().st_ino
    with path.open() as reader:
        write_atomically(str(path), {"status": "degraded"})
        assert json.load(reader) == {"status": "ok"}
    assert json.loads(path.read_text()) == {"status": "degraded"}
    assert path.stat().st_ino != before
    assert os.listdir(tmp_path) == ["health.json"]


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for name in ("health.json", f"health.json.{os.getpid()}.new"):
        (tmp_path / name).symlink_to("precious")
    write_atomically(str(tmp_path / "health.json"), {"status": "ok"})
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "health.json").is_symlink()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(str(tmp_path / "missing" / "health.json"), {})
    (tmp_path / "health.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(str(tmp_path / "health.json"), {})
    assert os.listdir(tmp_path) == ["health.json"]
