"""What the scheduler tells while it runs for real, what it keeps to itself, and jobs that are run once."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

import pytest

import snapcore
from snapcore.runs import Outcome
from snapcore.testing.trees import compare_trees, make_tree

from .scheduler import DEADLINE, free_port, get, held, metrics, once, recorded, scheduler, sound, wait_until, write

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------ health and metrics


async def test_metrics_and_health_tell_what_happens(tmp_path: Path, repo: Path, work: Path) -> None:
    port = free_port()
    listen = f'[cron]\nlisten = "127.0.0.1:{port}"\n'
    jobs = '[jobs.one]\nsandbox = "work"\nevery = "1s"\n[jobs.bad]\nsandbox = "missing"\nevery = "1s"\n'
    began = time.time()
    with scheduler(write(tmp_path, listen + jobs)) as running:
        captured = running.wait_for(event="captured", job="one")
        running.wait_for(event="unchanged", job="one")
        running.wait_for(event="failed", job="bad", count=2)
        found = metrics(port)
        assert get(port, "/live") == (200, b"alive\n")
        status, body = get(port, "/health")
        running.end()
    assert found["snapcore_cron_last_success_timestamp_seconds", ("one", "one")] >= began - 1
    assert ("snapcore_cron_last_success_timestamp_seconds", ("bad", "bad")) not in found
    assert found["snapcore_cron_runs_total", ("one", "captured")] == 1
    assert found["snapcore_cron_runs_total", ("one", "unchanged")] >= 1
    assert found["snapcore_cron_runs_total", ("bad", "failed")] >= 2
    assert found["snapcore_cron_failures_total", ("MISSING_WORKSPACE", "bad")] >= 2
    assert found["snapcore_cron_consecutive_failures", ("bad", "bad")] >= 2
    assert found["snapcore_cron_consecutive_failures", ("one", "one")] == 0
    assert found["snapcore_cron_read_bytes_total", ("one",)] == captured["bytes"] > 0
    assert found["snapcore_cron_stored_bytes_total", ("one",)] >= captured["stored"] > 0
    assert found["snapcore_cron_run_duration_seconds_count", ("one",)] >= 2
    assert found["snapcore_cron_last_duration_seconds", ("one", "one")] >= 0
    assert found["snapcore_cron_captures_running", ()] >= 0
    assert found["snapcore_cron_repository_up", ()] == 1
    assert found["snapcore_cron_configuration_ok", ()] == 1
    document = json.loads(body)
    assert status == 503
    assert document["status"] == "degraded"
    assert document["jobs"]["one"]["threads"]["one"]["consecutive_failures"] == 0
    assert document["jobs"]["bad"]["threads"]["bad"]["error"] == "MISSING_WORKSPACE"


async def test_a_port_that_is_in_use_is_told_at_the_start(tmp_path: Path, repo: Path, work: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f'[cron]\nlisten = "127.0.0.1:{taken.getsockname()[1]}"\n'
        file = write(tmp_path, listen + '[jobs.one]\nsandbox = "work"\nevery = "1h"\n')
        running = scheduler(file)
        with running as started:
            assert started.process.wait(DEADLINE) == 1
        assert any("[INVALID_REQUEST]" in line for line in started.noise)
        assert not any("Traceback" in line for line in started.noise)


# ------------------------------------------------------------------------------------------------------------ secrets


async def test_secrets_are_read_again_before_each_run_and_never_told(tmp_path: Path, repo: Path, work: Path) -> None:
    tokens = [f"token-{number}-0123456789" for number in range(2)]
    (tmp_path / "token").write_text(tokens[0])
    (work / "config").write_text(f"use {tokens[0]} then {tokens[1]}")
    text = '[cron]\nhealth-file = "health.json"\n[jobs.one]\nsandbox = "work"\nevery = "1s"\n'
    secrets = 'secrets = { TOKEN = { file = "token" } }\n'
    with scheduler(write(tmp_path, text + secrets)) as running:
        running.wait_for(event="captured")
        (tmp_path / "token").write_text(tokens[1])
        running.wait_for(event="captured", count=2)
        (work / tokens[1]).write_text("a file whose name is a secret")
        assert running.wait_for(event="failed")["code"] == "SECRET_IN_NAME"
        (work / tokens[1]).unlink()
        (tmp_path / "token").unlink()
        assert running.wait_for(event="failed", code="INVALID_REQUEST")
        running.end()
    said = json.dumps(running.events) + (tmp_path / "health.json").read_text() + str(await recorded(repo))
    assert not any(token in said for token in tokens)
    async with snapcore.open_repository(repo, create=False) as opened:
        first, second = await opened.list("one")
        hidden = [bytes(len(token)) for token in tokens]
        assert await opened.read_file(first, b"config") == b"use " + hidden[0] + b" then " + tokens[1].encode()
        assert await opened.read_file(second, b"config") == b"use " + tokens[0].encode() + b" then " + hidden[1]


# --------------------------------------------------------------------------------------------------------------- once


async def test_once_runs_everything_now_and_tells_by_its_code_how_it_went(tmp_path: Path, repo: Path, work: Path) -> None:
    make_tree(tmp_path / "agents" / "a", files=3)
    make_tree(tmp_path / "agents" / "b", files=3)
    good = (
        '[cron.gc]\nevery = "1d"\n[jobs.one]\nsandbox = "work"\ncron = "@yearly"\n'
        '[jobs.agents]\nselect = "folders:agents/*"\nthread = "{name}"\nevery = "1d"\n'
    )
    code, events = once(write(tmp_path, good))
    assert code == 0
    assert sorted(event["thread"] for event in events if event["event"] == "captured") == ["a", "b", "one"]
    assert not [event for event in events if event["event"] == "collected"]

    code, events = once(tmp_path / "jobs.toml", "--job", "one", "--job", "gc")
    assert code == 0
    assert [event["event"] for event in events if event["event"] != "capturing"] == ["unchanged", "collected"]

    os.mkfifo(work / "pipe")
    code, events = once(tmp_path / "jobs.toml")
    assert code == 1
    assert len([event for event in events if event["event"] == "unchanged"]) == 2  # the others are done nevertheless

    code, events = once(write(tmp_path, good + 'policy = { on-unsupported = "skip" }\n'), "--job", "agents")
    assert code == 0
    code, events = once(write(tmp_path, '[policy]\non-unsupported = "skip"\n' + good), "--job", "one")
    assert code == 3
    assert "1 paths were left out" in events[-1]["message"]
    assert {run.outcome for run in await recorded(repo, job="one")} == {"captured", "unchanged", "failed"}
    (work / "pipe").unlink()
    await sound(repo, {"one": work}, tmp_path / "scratch")


def test_once_prints_its_runs_as_json(tmp_path: Path, repo: Path, work: Path) -> None:
    file = write(tmp_path, '[jobs.one]\nsandbox = "work"\nevery = "1d"\n')
    done = subprocess.run(
        [sys.executable, "-m", "snapcore.cli", "cron", "run", str(file), "--once", "--json"], capture_output=True, check=True
    )
    document = json.loads(done.stdout)
    assert document["message_type"] == "cron run"
    assert [(run["job"], run["outcome"]) for run in document["runs"]] == [("one", "captured")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_once_can_be_stopped(tmp_path: Path, repo: Path, work: Path, number: signal.Signals, code: int) -> None:
    text = f'[jobs.one]\nsandbox = "{held(tmp_path, work)}"\nthread = "one"\nevery = "1s"\n'
    with scheduler(write(tmp_path, text), "--once") as running:
        wait_until(tmp_path / "hold.begun")
        running.send(number)
        assert running.process.wait(DEADLINE) == code
        assert running.noise == ["interrupted\n"] or running.noise == []
    (tmp_path / "hold").unlink()
    assert [run.outcome for run in await recorded(repo)] == [Outcome.INTERRUPTED]
    async with snapcore.open_repository(repo, create=False) as opened:
        await opened.capture(work, thread_id="one", wait=0)
        target = tmp_path / "scratch"
        await opened.restore(target, thread_id="one")
    assert compare_trees(work, target) == []
