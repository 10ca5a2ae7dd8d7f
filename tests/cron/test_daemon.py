"""The scheduler, run for real with intervals of a second."""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest

import snapcore
from snapcore.hosts import current_holder
from snapcore.runs import JobRun, Outcome
from snapcore.testing.trees import make_tree

from ..disks import disk_at  # noqa: TID252 (tests are no package that could be named)
from ..providers.docker_fixtures import MakeContainer  # noqa: TID252 (tests are no package that could be named)
from .scheduler import (
    DEADLINE,
    Scheduler,
    free_port,
    get,
    held,
    metrics,
    once,
    recorded,
    scheduler,
    sound,
    wait_until,
    wait_until_ended,
    write,
)

T = TypeVar("T")


async def poll_until(look: Callable[[], Awaitable[T]], good: Callable[[T], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not good(found := await look()):
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)


# ------------------------------------------------------------------------------------------------------ what it is for


async def test_two_jobs_are_captured_again_and_again_and_only_what_changed_makes_checkpoints(
    tmp_path: Path, repo: Path, work: Path
) -> None:
    other = tmp_path / "other"
    make_tree(other, files=5, seed=2)
    text = '[jobs.one]\nsandbox = "work"\nevery = "1s"\n[jobs.two]\nsandbox = "other"\ncron = "* * * * *"\nthread = "second"\n'
    (tmp_path / "snapcore.toml").write_text("not toml")  # another than the one that is named
    with scheduler(write(tmp_path, text)) as running:
        running.wait_for(event="captured", job="one")
        running.wait_for(event="unchanged", job="one", count=2)
        (work / "fresh.txt").write_bytes(b"fresh")
        captured = running.wait_for(event="captured", job="one", count=2)
        assert running.end() == 0
    assert captured["thread"] == "one"
    assert captured["sandbox"] == str(work)
    assert captured["bytes"] == 5
    async with snapcore.open_repository(repo, create=False) as opened:
        assert [c.id for c in await opened.list("one")][-1] == captured["checkpoint"]
        assert len(await opened.list("one")) == 2
        # a fixed time that has not come: at most the turn of a minute lies in this test
        assert len(await opened.list("second")) <= 1
    await sound(repo, {"one": work}, tmp_path / "scratch")


async def test_runs_are_recorded(tmp_path: Path, repo: Path, work: Path) -> None:
    with scheduler(write(tmp_path, '[jobs.one]\nsandbox = "work"\nevery = "1s"\n')) as running:
        running.wait_for(event="captured")
        running.wait_for(event="unchanged")
        running.end()
    runs = await recorded(repo, job="one")
    assert [run.outcome for run in runs][-2:] == [Outcome.UNCHANGED, Outcome.CAPTURED]
    assert (runs[-1].thread_id, runs[-1].sandbox) == ("one", str(work))
    assert runs[-1].files_read > 0
    assert runs[-1].bytes_stored > 0
    assert runs[-1].started_at <= runs[-1].ended_at


async def test_retention_and_gc(tmp_path: Path, repo: Path, work: Path) -> None:
    text = '[cron.gc]\nevery = "2s"\ngrace = "0"\n[jobs.one]\nsandbox = "work"\nevery = "1s"\nkeep = { last = 2 }\n'
    with scheduler(write(tmp_path, text)) as running:
        for number in range(4):
            (work / "fresh.bin").write_bytes(random.Random(number).randbytes(100_000))
            running.wait_for(event="captured", count=number + 1)
        running.wait_for_another(event="collected")
        running.end()
    async with snapcore.open_repository(repo, create=False) as opened:
        assert len(await opened.list("one")) == 2
    assert sum(run.forgotten for run in await recorded(repo, job="one")) == 2
    assert (await recorded(repo, job="gc", thread_id=""))[0].outcome == Outcome.COLLECTED
    await sound(repo, {"one": work}, tmp_path / "scratch")


async def test_containers_with_a_label_are_looked_up_again_at_each_run(
    tmp_path: Path, repo: Path, make_container: MakeContainer, docker_api: Any, docker_host: str
) -> None:
    def make(mark: str) -> str:
        name = make_container(labels={"agents": str(tmp_path)})
        done = docker_api.exec_create(name, ["sh", "-c", f"mkdir -p /workspace; echo {mark} > /workspace/mark"])
        docker_api.exec_start(done)
        return name

    first = make("first")
    text = f'[jobs.agents]\nselect = "docker:label=agents={tmp_path}"\nthread = "{{job}}-{{name}}"\nevery = "1s"\n'
    with scheduler(write(tmp_path, text)) as running:
        running.wait_for(event="captured", thread=f"agents-{first}")
        second = make("second")
        running.wait_for(event="captured", thread=f"agents-{second}")
        docker_api.remove_container(first, force=True)
        gone = running.wait_for(event="failed", thread=f"agents-{first}")
        assert gone["code"] == "NO_SANDBOX"
        running.wait_for_another(event="unchanged", thread=f"agents-{second}")
        assert running.end() == 0
    await sound(repo, {}, tmp_path / "scratch")
    async with snapcore.open_repository(repo, create=False) as opened:
        for name, mark in ((first, b"first\n"), (second, b"second\n")):
            head = await opened.get(f"agents-{name}")
            assert head is not None
            assert await opened.read_file(head, b"mark") == mark


# --------------------------------------------------------------------------------------------------- what goes wrong


async def test_a_sandbox_that_vanishes_is_reported_and_stops_nothing(tmp_path: Path, repo: Path, work: Path) -> None:
    health = tmp_path / "health.json"
    agents = tmp_path / "agents"
    for name in ("a", "b"):
        make_tree(agents / name, files=3)
    text = (
        '[cron]\nhealth-file = "health.json"\n[jobs.single]\nsandbox = "work"\nevery = "1s"\n'
        '[jobs.agents]\nselect = "folders:agents/*"\nthread = "{name}"\nevery = "1s"\n'
    )
    with scheduler(write(tmp_path, text)) as running:
        for thread in ("single", "a", "b"):
            running.wait_for(event="captured", thread=thread)
        os.rename(agents / "a", tmp_path / "away")
        assert running.wait_for(event="failed", thread="a")["code"] == "MISSING_WORKSPACE"
        running.wait_for_another(event="unchanged", thread="b")
        running.wait_for_another(event="unchanged", thread="b")
        document = json.loads(health.read_text())
        assert set(document["jobs"]["agents"]["threads"]) == {"b"}  # told once, then forgotten
        assert document["status"] == "ok"
        os.rename(work, tmp_path / "elsewhere")
        running.wait_for(event="failed", thread="single", count=2)
        running.wait_for_another(event="unchanged", thread="b")
        document = json.loads(health.read_text())
        assert document["status"] == "degraded"
        assert document["jobs"]["single"]["threads"]["single"]["error"] == "MISSING_WORKSPACE"
        assert document["jobs"]["single"]["threads"]["single"]["consecutive_failures"] >= 2
        os.rename(tmp_path / "elsewhere", work)
        running.wait_for_another(event="unchanged", thread="single")
        running.wait_for_another(event="unchanged", thread="single")
        assert json.loads(health.read_text())["status"] == "ok"
        assert running.end() == 0
    assert json.loads(health.read_text())["running"] is False
    await sound(repo, {"single": work, "b": agents / "b"}, tmp_path / "scratch")


async def test_a_sandbox_that_vanishes_while_it_is_captured_is_reported_once_and_forgotten(tmp_path: Path, repo: Path) -> None:
    for name in ("a", "b"):
        make_tree(tmp_path / "agents" / name, files=3)
    hold = "touch begun; while [ -e hold ]; do sleep 0.05; done; echo token-0123456789"
    (tmp_path / "hold").touch()
    text = (
        '[cron]\nhealth-file = "health.json"\n[jobs.agents]\nselect = "folders:agents/*"\nthread = "{name}"\nevery = "1s"\n'
        f"secrets = {{ TOKEN = {{ command = ['sh', '-c', '{hold}'] }} }}\n"
    )
    with scheduler(write(tmp_path, text)) as running:
        running.wait_for(event="capturing", count=2)
        os.rename(tmp_path / "agents" / "a", tmp_path / "away")
        running.wait_for_another(event="skipped", thread="b")  # they were looked up again
        running.wait_for_another(event="skipped", thread="b")
        (tmp_path / "hold").unlink()
        gone = running.wait_for(event="failed", thread="a", message="The folder is not there any more.")
        running.wait_for_another(event="unchanged", thread="b")
        running.wait_for_another(event="unchanged", thread="b")
        document = json.loads((tmp_path / "health.json").read_text())
        assert (document["status"], set(document["jobs"]["agents"]["threads"])) == ("ok", {"b"})
        assert running.find(thread="a")[-1] == gone
        assert running.end() == 0
    await sound(repo, {"b": tmp_path / "agents" / "b"}, tmp_path / "scratch")


async def test_a_disk_that_is_not_mounted_is_one_failure_and_no_sandbox_is_taken_for_gone(tmp_path: Path, repo: Path) -> None:
    text = '[cron]\nhealth-file = "health.json"\n[jobs.all]\nselect = "folders:disk/*"\nthread = "{name}"\nevery = "1s"\n'
    with scheduler(write(tmp_path, text)) as running:
        missing = running.wait_for(event="failed", job="all")
        assert (missing["code"], missing.get("thread")) == ("MISSING_WORKSPACE", None)
        make_tree(tmp_path / "disk" / "a", files=3)
        running.wait_for(event="captured", thread="a")
        os.rename(tmp_path / "disk", tmp_path / "unmounted")
        running.wait_for_another(event="failed", job="all", thread=None)
        os.rename(tmp_path / "unmounted", tmp_path / "disk")
        running.wait_for_another(event="unchanged", thread="a")
        running.wait_for_another(event="unchanged", thread="a")
        assert "folder is not there any more" not in json.dumps(running.events)
        assert json.loads((tmp_path / "health.json").read_text())["status"] == "ok"
        assert running.end() == 0
    await sound(repo, {"a": tmp_path / "disk" / "a"}, tmp_path / "scratch")


async def test_what_cannot_be_captured_is_reported_each_time_and_not_tried_in_between(
    tmp_path: Path, repo: Path, work: Path
) -> None:
    os.mkfifo(work / "pipe")
    with scheduler(write(tmp_path, '[jobs.one]\nsandbox = "work"\nevery = "1s"\n')) as running:
        assert running.wait_for(event="failed", count=2)["code"] == "UNSUPPORTED_ENTRY"
        assert running.find(event="retry") == []
        (work / "pipe").unlink()
        running.wait_for(event="captured")
        running.end()
    await sound(repo, {"one": work}, tmp_path / "scratch")


async def test_two_captures_of_one_sandbox_never_overlap(tmp_path: Path, repo: Path, work: Path) -> None:
    text = f'[jobs.one]\nsandbox = "{held(tmp_path, work)}"\nthread = "one"\nevery = "1s"\n'
    with scheduler(write(tmp_path, text)) as running:
        wait_until(tmp_path / "hold.begun")
        running.wait_for(event="skipped", job="one", count=2)
        assert len(running.find(event="capturing")) == 1
        (tmp_path / "hold").unlink()
        running.wait_for(event="captured")
        running.wait_for(event="unchanged")
        running.end()
    await sound(repo, {"one": work}, tmp_path / "scratch")


async def test_a_run_that_takes_too_long_is_given_up(tmp_path: Path, repo: Path, work: Path) -> None:
    text = f'[jobs.one]\nsandbox = "{held(tmp_path, work)}"\nthread = "one"\nevery = "1s"\ntimeout = "1s"\n'
    with scheduler(write(tmp_path, text)) as running:
        assert running.wait_for(event="failed")["code"] == "EXEC_TIMEOUT"
        (tmp_path / "hold").unlink()
        running.wait_for(event="captured")  # nothing holds the thread
        running.end()
    await sound(repo, {"one": work}, tmp_path / "scratch")


async def test_a_thread_that_another_writer_holds_is_left_alone_and_tried_again(tmp_path: Path, repo: Path, work: Path) -> None:
    file = write(tmp_path, '[jobs.one]\nsandbox = "work"\nevery = "2s"\n')
    async with snapcore.open_repository(repo, create=False) as opened:
        grant = await opened.checkpoints.acquire_writer("one", ttl=60, holder=current_holder())
        code, events = once(file)
        assert code == 11
        assert [event["event"] for event in events] == ["capturing", "locked"]
        with scheduler(file) as running:
            running.wait_for(event="locked")
            running.wait_for(event="retry")
            await opened.checkpoints.release_writer(grant.lease)
            running.wait_for(event="captured")
            running.end()
    assert Outcome.LOCKED in [run.outcome for run in await recorded(repo, job="one")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    with disk_at(tmp_path / "disk", "size=4m") as folder:
        yield folder


def fill(disk: Path) -> None:
    """Leave not a byte."""
    with contextlib.suppress(OSError), open(disk / "rest", "wb", buffering=0) as rest:
        while True:
            rest.write(bytes(4096))


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)


async def test_a_full_disk_is_told_and_lived_through(tmp_path: Path, disk: Path, work: Path) -> None:
    async with snapcore.open_repository(disk / "repo"):
        pass
    port = free_port()
    file = tmp_path / "jobs.toml"
    file.write_text(
        f'repo = "disk/repo"\n[cron]\nhealth-file = "disk/health.json"\nlisten = "127.0.0.1:{port}"\n'
        '[jobs.one]\nsandbox = "work"\nevery = "1s"\n'
    )
    with scheduler(file) as running:
        running.wait_for(event="captured")
        (disk / "filler").write_bytes(bytes(2 << 20))
        (work / "big").write_bytes(random.Random(1).randbytes(6 << 20))
        assert running.wait_for(event="failed")["code"] == "STORE_FULL"
        fill(disk)
        running.wait_for(event="unrecorded")
        assert get(port, "/health")[0] == 503
        assert metrics(port)["snapcore_cron_repository_up", ()] == 0
        grow(disk)
        running.wait_for(event="captured", count=2)
        running.wait_for_another(event="unchanged")
        running.wait_for_another(event="unchanged")
        assert get(port, "/health")[0] == 200
        assert metrics(port)["snapcore_cron_repository_up", ()] == 1
        assert running.end() == 0
    await sound(disk / "repo", {"one": work}, tmp_path / "scratch")


async def test_a_repository_that_is_not_there_yet_is_waited_for(tmp_path: Path, work: Path) -> None:
    file = write(tmp_path, '[jobs.one]\nsandbox = "work"\nevery = "1s"\n')
    assert once(file)[0] == 10
    with scheduler(file) as running:
        assert running.wait_for(event="repository-unavailable")["code"] == "NO_REPOSITORY"
        async with snapcore.open_repository(tmp_path / "repo"):
            pass
        running.wait_for(event="captured")
        assert running.end() == 0
    await sound(tmp_path / "repo", {"one": work}, tmp_path / "scratch")


# ------------------------------------------------------------------------------------------------- starts and stops


async def test_killed_in_the_middle_of_a_capture_it_goes_on_where_it_was(tmp_path: Path, repo: Path, work: Path) -> None:
    text = f'[jobs.one]\nsandbox = "{held(tmp_path, work)}"\nthread = "one"\nevery = "1s"\n'
    file = write(tmp_path, text)
    with scheduler(file) as running:
        wait_until(tmp_path / "hold.begun")
        running.kill()
    (tmp_path / "hold").unlink()
    assert await recorded(repo) == []
    with scheduler(file) as running:
        running.wait_for(event="captured")
        assert running.end() == 0
    await sound(repo, {"one": work}, tmp_path / "scratch")


def stamps(tree: Path) -> dict[Path, tuple[int, ...]]:
    """By which a change of anything in the tree shows."""
    stats = {path: path.lstat() for path in [tree, *tree.rglob("*")]}
    return {path: (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats.items()}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_stopped_in_the_middle_of_a_capture_it_leaves_nothing_behind(
    tmp_path: Path, repo: Path, work: Path, number: signal.Signals, code: int
) -> None:
    (work / "big").write_bytes(random.Random(1).randbytes(60 << 20))
    os.utime(work / "big", (1, 1))
    before = stamps(work)
    with scheduler(write(tmp_path, '[jobs.one]\nsandbox = "work"\nevery = "1h"\n')) as running:
        running.wait_for(event="capturing")
        assert running.end(number) == code
        assert running.find(event="interrupted", job="one", thread="one")
    assert stamps(work) == before
    assert [run.outcome for run in await recorded(repo)] == [Outcome.INTERRUPTED]
    async with snapcore.open_repository(repo, create=False) as opened:
        assert await opened.get("one") is None
        await opened.capture(work, thread_id="one", wait=0)  # the lease is free at once
    await sound(repo, {"one": work}, tmp_path / "scratch")


FIRST_PROCESS = ("unshare", "--pid", "--fork", "--kill-child")  # as in a container
ENDS = {
    "second signal": ((), 'stop-timeout = "1h"', -signal.SIGTERM),
    "second signal to the first process": (FIRST_PROCESS, 'stop-timeout = "1h"', 128 + signal.SIGTERM),
    "timeout": ((), 'stop-timeout = "1s"', 128 + signal.SIGTERM),
}


@pytest.mark.parametrize(("before", "cron", "code"), ENDS.values(), ids=ENDS)
async def test_what_does_not_answer_keeps_it_from_ending_until_a_timeout_or_a_second_signal(
    tmp_path: Path, repo: Path, work: Path, before: tuple[str, ...], cron: str, code: int
) -> None:
    if before and os.geteuid() != 0:
        pytest.skip("only the superuser may make a first process")
    jobs = '[jobs.one]\nsandbox = "docker://name/workspace"\nthread = "one"\nevery = "1h"\n'
    file = write(tmp_path, f'[cron]\nhealth-file = "health.json"\n{cron}\n{jobs}')
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(tmp_path / "engine"))
        engine.listen()
        with scheduler(file, env={"DOCKER_HOST": f"unix://{tmp_path}/engine"}, before=before) as running:
            engine.accept()[0].close()  # it is asked for its version first, and asks again
            connection, _ = engine.accept()
            with connection:
                pid = running.process.pid
                number = int(Path(f"/proc/{pid}/task/{pid}/children").read_text()) if before else pid
                os.kill(number, signal.SIGTERM)
                running.wait_for(event="stopping")
                if "1h" in cron:
                    os.kill(number, signal.SIGTERM)
                assert running.code() == code
    told = [event["message"] for event in running.find(event="cut-off")]
    if "1s" in cron:
        assert told == ["What does not answer is waited for no longer. Runs that are cut off: 1."]
        assert json.loads((tmp_path / "health.json").read_text())["running"] is False
    else:
        assert told == []
    async with snapcore.open_repository(repo, create=False) as opened:
        await opened.capture(work, thread_id="one", wait=0)  # its thread is free at once


SLOW_SECRETS = {"pipe": '{ file = "pipe" }', "command": """{ command = ["sh", "-c", 'echo $$ > pid; exec sleep 1000'] }"""}


@pytest.mark.parametrize("source", SLOW_SECRETS.values(), ids=SLOW_SECRETS)
async def test_a_secret_that_never_comes_holds_up_nothing(tmp_path: Path, repo: Path, work: Path, source: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    waits = f'secrets = {{ TOKEN = {source} }}\nevery = "1h"\n'
    text = "[cron]\nparallel = 40\n" + "".join(
        f'[jobs.waits{number}]\nsandbox = "work"\n{waits}timeout = "1s"\n' for number in range(10)
    )
    text += f'[jobs.ever]\nsandbox = "work"\n{waits}[jobs.other]\nselect = "folders:wor*"\nthread = "{{name}}"\nevery = "1s"\n'
    with scheduler(write(tmp_path, text)) as running:
        running.wait_for(event="unchanged", job="other")
        for number in range(10):
            assert running.wait_for(event="failed", job=f"waits{number}")["code"] == "EXEC_TIMEOUT"
        asked = time.monotonic()
        assert running.end() == 0
        assert time.monotonic() - asked < 30
    if (tmp_path / "pid").exists():
        wait_until_ended(tmp_path / "pid")
    assert [run.outcome for run in await recorded(repo, job="ever")] == [Outcome.INTERRUPTED]


async def test_a_log_that_nobody_reads_stops_no_capture(tmp_path: Path, repo: Path, work: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"\n" * 4096)
    os.set_blocking(writing, True)
    file = write(tmp_path, '[jobs.one]\nsandbox = "work"\nevery = "1s"\n')
    command = [sys.executable, "-m", "snapcore.cli", "cron", "run", str(file)]
    process = subprocess.Popen(command, stderr=writing)  # noqa: ASYNC220  # starting is quick
    os.close(writing)
    try:
        await poll_until(lambda: recorded(repo), lambda runs: len(runs) >= 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        os.close(reading)


async def test_a_folder_that_becomes_a_link_is_not_followed(tmp_path: Path, repo: Path, work: Path) -> None:
    """Also when it does so between being found and being captured: a link in the place of a folder above, too."""
    for owner in ("alice", "bob"):
        make_tree(tmp_path / "srv" / owner / "work", files=3)
    address = held(tmp_path, work)
    text = f'[cron]\nparallel = 1\n[jobs.first]\nsandbox = "{address}"\nevery = "1h"\n'
    text += '[jobs.owned]\nselect = "folders:srv/*/work"\nthread = "{name}"\nevery = "1s"\n'
    with scheduler(write(tmp_path, text)) as running:
        running.wait_for(event="capturing", job="first")
        running.wait_for(event="skipped", job="owned", thread="alice/work")  # it waits for its turn
        (tmp_path / "srv" / "alice").rename(tmp_path / "alice")
        (tmp_path / "srv" / "alice").symlink_to("bob")
        (tmp_path / "hold").unlink()
        assert running.wait_for(event="failed", thread="alice/work")["code"] in ("INVALID_WORKSPACE", "MISSING_WORKSPACE")
        running.wait_for(event="captured", thread="bob/work")
        assert running.end() == 0
    async with snapcore.open_repository(repo, create=False) as opened:
        assert await opened.get("alice/work") is None


FAILING = ("sh -c 'exit 7' hunter2", "/nowhere/kubectl hunter2", "ls --hunter2")


async def test_an_address_is_shown_without_what_may_be_a_secret(tmp_path: Path, repo: Path, work: Path) -> None:
    address = f"exec:env -u hunter2-hunter2 {work}"
    text = f'[cron]\nlisten = ":{(port := free_port())}"\n[jobs.one]\nsandbox = "{address}"\nthread = "one"\nevery = "1s"\n'
    for number, command in enumerate(FAILING):
        text += f'[jobs.bad{number}]\nsandbox = "exec:{command} /workspace"\nthread = "bad{number}"\nevery = "1h"\n'
    with scheduler(write(tmp_path, text)) as running:
        running.wait_for(event="unchanged")
        for number in range(len(FAILING)):
            running.wait_for(event="failed", job=f"bad{number}")
        pages = get(port, "/health")[1] + get(port, "/metrics")[1]
        assert running.end() == 0
    told = f"{running.events} {running.noise} {pages!r} {await recorded(repo)}"
    assert "exec:env ***" in told
    assert "hunter2" not in told


async def test_what_was_missed_while_it_was_down_is_caught_up_once(tmp_path: Path, repo: Path, work: Path) -> None:
    yesterday = time.time() - 86_400
    file = write(
        tmp_path,
        '[jobs.daily]\nsandbox = "work"\ncron = "@daily"\n[jobs.yearly]\nsandbox = "work"\ncron = "@yearly"\n'
        '[jobs.never]\nsandbox = "work"\ncron = "@daily"\n[jobs.hours]\nsandbox = "work"\nevery = "30h"\n'
        '[jobs.failed]\nsandbox = "work"\ncron = "@yearly"\n',
    )
    async with snapcore.open_repository(repo, create=False) as opened:
        for number, job in enumerate(("daily", "yearly", "hours", "failed")):
            await opened.checkpoints.record_run(
                JobRun(
                    id=f"{number:032x}",
                    job=job,
                    thread_id=job,
                    started_at=int(yesterday * 1e6),
                    ended_at=int(yesterday * 1e6),
                    outcome=Outcome.FAILED if job == "failed" else Outcome.CAPTURED,
                )
            )
    with scheduler(file) as running:
        running.wait_for(event="captured", job="daily")
        running.wait_for(event="captured", job="failed")
        running.end()
    assert {event["job"] for event in running.find(event="captured")} <= {"daily", "failed", "never"}


def next_run(health: Path, job: str) -> float:
    """When a job runs next, as the health file says once it knows the job."""
    wait_until(health)
    deadline = time.monotonic() + DEADLINE
    while not (found := json.loads(health.read_text())["jobs"].get(job)) or not found["next_run"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return datetime.fromisoformat(found["next_run"]).timestamp()


async def test_a_restart_keeps_the_rhythm(tmp_path: Path, repo: Path, work: Path) -> None:
    began = time.time() - 1800
    async with snapcore.open_repository(repo, create=False) as opened:
        when = int(began * 1e6)
        run = JobRun(id="0" * 32, job="one", thread_id="one", started_at=when, ended_at=when, outcome=Outcome.CAPTURED)
        await opened.checkpoints.record_run(run)
    file = write(tmp_path, '[cron]\nhealth-file = "health.json"\n[jobs.one]\nsandbox = "work"\nevery = "1h"\n')
    with scheduler(file) as running:
        assert abs(next_run(tmp_path / "health.json", "one") - (began + 3600)) <= 2
        assert running.end() == 0
    assert running.find(event="capturing") == []


# ------------------------------------------------------------------------------------------------------- reloading


async def test_sighup_takes_over_what_has_changed(tmp_path: Path, repo: Path, work: Path) -> None:
    make_tree(tmp_path / "other", files=3)
    stays = '[cron]\nhealth-file = "health.json"\n[jobs.stays]\nsandbox = "work"\nevery = "1s"\n'
    file = write(tmp_path, stays + '[jobs.goes]\nsandbox = "other"\nevery = "1s"\n')
    with scheduler(file) as running:
        running.wait_for(event="captured", job="stays")
        running.wait_for(event="captured", job="goes")
        write(tmp_path, stays + '[jobs.comes]\nsandbox = "other"\nevery = "1s"\n')
        running.send(signal.SIGHUP)
        assert running.wait_for(event="reloaded")["message"] == "Jobs: 1 new, 0 changed, 1 gone."
        running.wait_for(event="captured", job="comes")
        ended = len(running.find(job="goes"))
        running.wait_for_another(event="unchanged", job="stays")
        running.wait_for_another(event="unchanged", job="comes")
        assert len(running.find(job="goes")) - ended <= 2  # the capture that ran

        file.write_text("[jobs.stays]\nevery = 'never'\n")
        running.send(signal.SIGHUP)
        assert running.wait_for(event="reload-failed")["code"] == "INVALID_REQUEST"
        running.wait_for_another(event="unchanged", job="comes")
        running.wait_for_another(event="unchanged", job="stays")
        assert json.loads((tmp_path / "health.json").read_text())["status"] == "degraded"

        write(tmp_path, stays.replace("1s", "1h"))
        running.send(signal.SIGHUP)
        running.wait_for(event="reloaded", count=2)
        assert running.end() == 0
    assert json.loads((tmp_path / "health.json").read_text())["status"] == "ok"
    await sound(repo, {"stays": work, "comes": tmp_path / "other"}, tmp_path / "scratch")


async def test_a_sighup_that_comes_while_it_starts_is_heard(tmp_path: Path, repo: Path, work: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))  # as it does itself as soon as it can
    try:
        running = Scheduler(write(tmp_path, '[jobs.one]\nsandbox = "work"\nevery = "1h"\n'))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        running.send(signal.SIGHUP)
        running.wait_for(event="reloaded")
        assert running.end() == 0
    finally:
        running.kill()


async def test_many_sighups_at_once_are_taken_one_after_the_other(tmp_path: Path, repo: Path, work: Path) -> None:
    jobs = '[jobs.one]\nsandbox = "work"\nevery = "1h"\n'
    with scheduler(write(tmp_path, jobs)) as running:
        running.wait_for(event="captured")
        for number in range(1, 6):
            write(tmp_path, f'[cron]\nlisten = ":{(port := free_port())}"\nparallel = {number}\n{jobs}')
            for _ in range(20):
                running.send(signal.SIGHUP)
        running.wait_for_another(event="reloaded")
        running.send(signal.SIGTERM)
        running.send(signal.SIGHUP)
        assert running.code() == 0
    assert running.find(event="reload-failed") == []
    assert running.find(event="error") == []
    assert port


async def test_sighup_moves_to_another_port_unless_that_is_taken(tmp_path: Path, repo: Path, work: Path) -> None:
    jobs = '[jobs.one]\nsandbox = "work"\nevery = "1h"\n'
    first, second = free_port(), free_port()
    with socket.socket() as taken, scheduler(write(tmp_path, f'[cron]\nlisten = ":{first}"\n{jobs}')) as running:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        running.wait_for(event="captured")
        write(tmp_path, f'[cron]\nlisten = ":{taken.getsockname()[1]}"\n{jobs}')
        running.send(signal.SIGHUP)
        running.wait_for(event="reload-failed")
        assert get(first, "/live")[0] == 200
        assert metrics(first)["snapcore_cron_configuration_ok", ()] == 0
        write(tmp_path, f'[cron]\nlisten = ":{second}"\n{jobs}')
        running.send(signal.SIGHUP)
        running.wait_for(event="reloaded")
        assert metrics(second)["snapcore_cron_configuration_ok", ()] == 1
        with pytest.raises(OSError, match="refused"):
            get(first, "/live")
        assert len(running.find(event="capturing")) == 1  # an unchanged job keeps its times
        assert running.end() == 0


def test_it_ends_with_the_terminal_that_it_was_started_from(tmp_path: Path, repo: Path, work: Path) -> None:
    file = write(tmp_path, '[cron]\nhealth-file = "health.json"\n[jobs.one]\nsandbox = "work"\nevery = "1h"\n')
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "snapcore.cli", "cron", "run", str(file)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    try:
        said = b""
        while b" captured " not in said:
            said += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
    assert json.loads((tmp_path / "health.json").read_text())["running"] is False


async def test_no_more_captures_than_allowed_run_at_once(tmp_path: Path, repo: Path, work: Path) -> None:
    address = held(tmp_path, work)
    jobs = "".join(f'[jobs.job{n}]\nsandbox = "{address}"\nthread = "t{n}"\nevery = "1s"\n' for n in range(3))
    with scheduler(write(tmp_path, f"[cron]\nparallel = 2\n{jobs}")) as running:
        running.wait_for(event="capturing", count=2)
        for number in range(3):
            running.wait_for(event="skipped", job=f"job{number}")  # the one that waits for its turn, too
        assert len(running.find(event="capturing")) == 2
        (tmp_path / "hold").unlink()
        for number in range(3):
            running.wait_for(event="captured", job=f"job{number}")
        assert running.end() == 0


async def test_a_job_that_is_taken_out_ends_its_running_capture(tmp_path: Path, repo: Path, work: Path) -> None:
    other = '[jobs.other]\nsandbox = "work"\nevery = "1h"\n'
    text = f'[jobs.one]\nsandbox = "{held(tmp_path, work)}"\nthread = "one"\nevery = "1s"\n'
    with scheduler(write(tmp_path, other + text)) as running:
        wait_until(tmp_path / "hold.begun")
        write(tmp_path, other)
        running.send(signal.SIGHUP)
        running.wait_for(event="reloaded")
        (tmp_path / "hold").unlink()
        running.wait_for(event="captured", job="one")
        running.end()
    await sound(repo, {"one": work}, tmp_path / "scratch")
