"""`snapcore cron status`."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

import snapcore
from snapcore.cli.output import columns
from snapcore.runs import JobRun, Outcome
from snapcore.testing.run_suite import new_run

from .commands import Command, command


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return tmp_path / "repo"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repo: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    run = command(monkeypatch, repo)
    run("init")
    return run


def record(repo: Path, *runs: JobRun) -> None:
    async def write() -> None:
        async with snapcore.open_repository(repo, create=False) as opened:
            for run in runs:
                await opened.checkpoints.record_run(run)

    asyncio.run(write())


def ago(seconds: float, job: str = "nightly", thread: str = "thread-1", *, took: float = 1.25, **fields: Any) -> JobRun:
    began = time.time_ns() // 1000 - round(seconds * 1_000_000)
    return new_run(began, job, thread, ended_at=began + round(took * 1_000_000), **fields)


FAILED: Final[dict[str, Any]] = {
    "outcome": Outcome.FAILED,
    "error": "STORE_UNAVAILABLE",
    "message": "The store s3://bucket did not answer for 30 seconds, and so the capture was given up; nothing was changed.",
}
JOBS = '[jobs.nightly]\nsandbox = "w"\nthread = "thread-1"\nevery = "1h"\n[jobs.other]\nsandbox = "v"\nevery = "1d"\n'


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_without_runs_there_is_nothing_to_show(run: Command) -> None:
    assert run("cron", "status").text == "No job has run yet.\n"
    for number in (5, 10**30):
        assert run("cron", "status", "--runs", str(number)).text == "No job has run yet.\n"
    assert run("cron", "status", "--json").json == {"message_type": "cron status", "jobs": []}


def test_the_last_run_and_the_last_good_one_are_shown(run: Command, repo: Path) -> None:
    good = ago(7300, outcome=Outcome.CAPTURED, bytes_stored=12_345_678)
    record(repo, good, ago(200, **FAILED), ago(90, "docker", "box", took=75, outcome=Outcome.CAPTURED))
    said = run("cron", "status", code=3).text.splitlines()
    assert cells(said[0]) == ["STATE", "JOB", "THREAD", "LAST RUN", "GOOD", "TOOK", "STORED"]
    assert cells(said[1]) == ["ok", "docker", "box", "captured 1min", "1min", "1min", "0 B"]
    assert cells(said[2]) == ["failed", "nightly", "thread-1", "failed 3min", "2h", "1.2s", "0 B"]
    assert said[3] == ""
    assert " ".join(line.strip() for line in said[4:]) == f"nightly (thread-1): STORE_UNAVAILABLE: {FAILED['message']}"
    assert max(map(len, said)) <= 80


def test_it_is_a_check_for_monitoring(run: Command, repo: Path) -> None:
    record(repo, ago(10))
    run("cron", "status", code=0)
    record(repo, ago(5, **FAILED))
    run("cron", "status", code=3)
    run("cron", "status", "--json", code=3)
    assert run("cron", "status", "-q", code=3).text == ""
    record(repo, ago(3))
    run("cron", "status", code=0)


def test_with_a_file_what_is_overdue_and_what_never_ran_is_shown(run: Command, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(JOBS)
    record(repo, ago(7300), ago(9, "gone", "x", **FAILED))
    run("cron", "status", code=3)
    said = run("cron", "status", "jobs.toml", code=3).text
    assert [cells(line)[:4] for line in said.splitlines()[1:4]] == [
        ["past", "gone", "x", "failed 9s"],
        ["overdue", "nightly", "thread-1", "unchanged 2h"],
        ["waiting", "other", "other", "never"],
    ]
    assert "nightly (thread-1): It should have gone well by " in said
    record(repo, ago(5))
    run("cron", "status", "jobs.toml", code=0)
    os.utime(tmp_path / "jobs.toml", (1, 1))
    assert "other: It should have gone well by 1970-01-02T02:24Z." in run("cron", "status", "jobs.toml", code=3).text


def test_the_settings_file_that_is_found_is_taken(run: Command, repo: Path, tmp_path: Path) -> None:
    record(repo, ago(7300))
    (tmp_path / "snapcore.toml").write_text('thread = "t"\n')
    run("cron", "status", code=0)
    (tmp_path / "snapcore.toml").write_text(JOBS)
    run("cron", "status", code=3)
    run("cron", "status", "--no-config", code=0)
    (tmp_path / "snapcore.toml").write_text(JOBS + 'secrets.KEY.command = "touch ran"\n')
    run("cron", "status", code=3)
    assert not (tmp_path / "ran").exists(), "a file that was only found runs nothing"


def test_single_jobs_can_be_asked_for(run: Command, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(JOBS)
    record(repo, ago(5), ago(6, "bad", **FAILED))
    assert [job["job"] for job in run("cron", "status", "--json", "--job", "nightly").json["jobs"]] == ["nightly"]
    run("cron", "status", "--job", "nightly", "--job", "bad", code=3)
    run("cron", "status", "jobs.toml", "--job", "other")
    error = run("cron", "status", "--job", "nightyl", code=2).stderr
    assert "There is no job 'nightyl'" in error
    assert "There are: bad, nightly." in error


def test_the_last_runs_are_listed(run: Command, repo: Path) -> None:
    runs = [ago(seconds, bytes_read=1000, warnings=int(seconds == 30)) for seconds in (10, 20, 30)]
    record(repo, *runs, ago(15, "other", **FAILED))
    said = run("cron", "status", "--runs", "3", code=3).text.splitlines()
    assert cells(said[0]) == ["AGO", "JOB", "THREAD", "OUTCOME", "TOOK", "READ", "STORED", "ERROR"]
    assert [cells(line)[1:4] for line in said[1:]] == [
        ["nightly", "thread-1", "unchanged"],
        ["other", "thread-1", "failed"],
        ["nightly", "thread-1", "unchanged"],
    ]
    assert cells(said[2])[-1] == "STORE_UNAVAILABLE"
    assert max(map(len, said)) <= 80
    assert "1 warn." in run("cron", "status", "--runs", "9", "--job", "nightly").text.splitlines()[3]
    listed = run("cron", "status", "--runs", "2", "--json", "--job", "nightly", "--job", "other", code=3).json["runs"]
    assert [each["job"] for each in listed] == ["nightly", "other"]
    run("cron", "status", "--runs", "0", code=2)


def test_json_has_all_that_is_known(run: Command, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(JOBS)
    good = new_run(1_700_000_000_000_000, "nightly", "thread-1", ended_at=1_700_000_001_500_000, checkpoint_id="abc")
    bad = new_run(1_700_000_100_000_000, "nightly", "thread-1", **FAILED)
    record(repo, good, bad)
    said = run("cron", "status", "jobs.toml", "--json", "--runs", "1", code=3).json
    nightly, other = said["jobs"]
    assert (nightly["job"], nightly["thread_id"], nightly["state"]) == ("nightly", "thread-1", "failed")
    assert nightly["due"] == "2023-11-14T23:19:21.500000Z"
    assert nightly["last_good_run"] == {
        "id": good.id,
        "job": "nightly",
        "thread_id": "thread-1",
        "sandbox": "",
        "started_at": "2023-11-14T22:13:20.000000Z",
        "ended_at": "2023-11-14T22:13:21.500000Z",
        "seconds": 1.5,
        "outcome": "unchanged",
        "checkpoint_id": "abc",
        "files_read": 0,
        "bytes_read": 0,
        "bytes_stored": 0,
        "forgotten": 0,
        "warnings": 0,
        "error": None,
        "message": "",
    }
    assert nightly["last_run"]["error"] == "STORE_UNAVAILABLE"
    assert said["runs"] == [nightly["last_run"]]
    assert (other["state"], other["last_run"], other["last_good_run"]) == ("waiting", None, None)


def test_what_comes_from_elsewhere_cannot_steer_the_terminal(run: Command, repo: Path) -> None:
    record(repo, ago(5, "jöb", "t", outcome=Outcome.FAILED, error="FAILED", message="\x1b[2J\nx"))
    assert "\\x1b[2J\\nx" in run("cron", "status", code=3).text


@pytest.mark.parametrize("name", ["name", "名前名前名前"])
@pytest.mark.parametrize("width", [80, 120])
def test_a_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, run: Command, repo: Path, width: int, name: str) -> None:
    long = f"a-very-long-{name}-of-a-job-that-somebody-gave"
    record(repo, ago(5, long, f"thread-{long}", **dict(FAILED, outcome=Outcome.INTERRUPTED)), ago(86_400 * 3, "b", "t"))
    monkeypatch.setenv("COLUMNS", str(width))
    on_terminal = command(monkeypatch, repo, terminal=True)
    for args in (("status",), ("status", "--runs", "9")):
        lines = on_terminal("cron", *args).text.splitlines()
        assert max(map(columns, lines)) <= width
        assert "…" in lines[1]
        assert long in run("cron", *args).text, "what a program reads is not cut"


def test_no_repository_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command(monkeypatch, tmp_path / "none")("cron", "status", code=10)


def test_a_jobs_file_that_makes_no_sense_is_told(run: Command, tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(JOBS.replace("1h", "1 fortnight"))
    assert "INVALID_REQUEST" in run("cron", "status", "jobs.toml", code=2).stderr
    run("cron", "status", "missing.toml", code=2)


def test_status_needs_no_scheduler() -> None:
    """The monitoring of a machine that has no extra."""
    import subprocess

    script = (
        "import sys\nfor name in ('apscheduler', 'prometheus_client'):\n    sys.modules[name] = None\n"
        "import snapcore.cron.status, snapcore.cli.cron_status, snapcore.cron.jobs"
    )
    done: Sequence[str] = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).args
    assert done
