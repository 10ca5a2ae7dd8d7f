"""Runs in this process: what is recorded of one, and what the scheduler does by chance, without packages, or again and again."""

import asyncio
import dataclasses
import io
import logging
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import snapcore
from snapcore.capturing import CaptureReport
from snapcore.cron.board import Board
from snapcore.cron.daemon import Daemon
from snapcore.cron.jobs import Job, Plan, make_plan
from snapcore.cron.logs import Events, Scrubber, logging_to
from snapcore.cron.metrics import Metrics
from snapcore.cron.running import Logged, Runner
from snapcore.cron.scheduling import new_scheduler
from snapcore.cron.targets import Target
from snapcore.errors import Code, RepositoryError, SnapcoreError, SnapshotError
from snapcore.repository import Repository
from snapcore.runs import MAX_MESSAGE, JobRun, Outcome
from snapcore.settings_files import load_settings
from snapcore.testing.trees import make_tree

from .scheduler import free_port, get


def plan(folder: Path, text: str) -> Plan:
    (folder / "jobs.toml").write_text(text)
    return make_plan(load_settings(str(folder / "jobs.toml")))


@pytest.fixture
async def repo() -> AsyncIterator[Repository]:
    async with snapcore.open_repository("memory://") as opened:
        yield opened


class Told(Logged):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(Events())
        self.runs: list[JobRun] = []
        self.errors: list[SnapcoreError | None] = []

    def ran(self, run: JobRun) -> None:
        self.runs.append(run)

    def recorded(self, error: SnapcoreError | None) -> None:
        self.errors.append(error)


def runner(repo: Repository, folder: Path) -> tuple[Runner, Told]:
    told = Told()
    return Runner(repo, told, Scrubber(), folder=str(folder), may_run=True), told


def target(job: Job) -> Target:
    assert job.sandbox is not None
    return Target(job, job.sandbox, job.thread_id("work"))


async def test_a_failure_that_names_thousands_of_paths_is_cut(tmp_path: Path, repo: Repository) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for number in range(2000):
        (work / f"link-{number}").symlink_to("/etc/passwd")
    job = plan(tmp_path, '[jobs.one]\nsandbox = "work"\nevery = "1h"\n').jobs["one"]
    running, told = runner(repo, tmp_path)
    ended = await running.capture(target(job))
    assert (ended.run.outcome, ended.run.error, ended.again) == (Outcome.FAILED, Code.UNSUPPORTED_ENTRY, False)
    assert 0 < len(ended.run.message) <= MAX_MESSAGE
    assert told.runs == await repo.checkpoints.runs() == [ended.run]


async def test_retention_that_fails_is_a_warning_of_a_run_that_went_well(tmp_path: Path, repo: Repository) -> None:
    make_tree(tmp_path / "work", files=3)
    text = '[jobs.one]\nsandbox = "work"\nevery = "1h"\nkeep = { labels = ["nobody-has-it"] }\n'
    running, _ = runner(repo, tmp_path)
    run = (await running.capture(target(plan(tmp_path, text).jobs["one"]))).run
    assert (run.outcome, run.warnings, run.forgotten) == (Outcome.CAPTURED, 1, 0)
    assert run.error is not None
    assert run.message.startswith("Retention: ")
    assert run.checkpoint_id is not None


async def test_a_gc_that_another_has_overtaken_has_not_failed(tmp_path: Path, repo: Repository) -> None:
    running, _ = runner(repo, tmp_path)
    gc = plan(tmp_path, '[cron.gc]\nevery = "1d"\n[jobs.one]\nsandbox = "work"\nevery = "1h"\n').gc
    assert (await running.collect(gc)).run.outcome == Outcome.COLLECTED
    first, second = await asyncio.gather(running.collect(gc), running.collect(gc))
    assert {first.run.outcome, second.run.outcome} <= {Outcome.COLLECTED, Outcome.INTERRUPTED}
    assert not first.again
    assert not second.again


async def test_the_same_secret_as_last_read_is_hidden_everywhere(tmp_path: Path, repo: Repository) -> None:
    token = "token-0123456789"
    (tmp_path / "token").write_text(token)
    (tmp_path / token).mkdir()
    text = f'[jobs.one]\nsandbox = "{token}"\nthread = "{{name}}"\nevery = "1h"\nsecrets = {{ T = {{ file = "token" }} }}\n'
    running, told = runner(repo, tmp_path)
    job = plan(tmp_path, text).jobs["one"]
    assert job.sandbox is not None
    run = (await running.capture(Target(job, job.sandbox, token))).run
    assert run.outcome == Outcome.FAILED
    assert token not in str(run) + str(told.runs) + str(await repo.checkpoints.runs())
    assert "{secret:T}" in run.sandbox


async def test_what_fails_before_a_capture_is_told_without_the_secrets_of_other_jobs(tmp_path: Path, repo: Repository) -> None:
    token = "token-0123456789"
    (tmp_path / "token").write_text(token)
    make_tree(tmp_path / "work", files=1)
    text = '[jobs.one]\nsandbox = "work"\nevery = "1h"\nsecrets = { T = { file = "token" } }\n'
    running, _ = runner(repo, tmp_path)
    await running.capture(target(plan(tmp_path, text).jobs["one"]))
    error = SnapshotError(f"There is no folder /srv/{token}.", code=Code.MISSING_WORKSPACE)
    run = (await running.fail("two", error, sandbox=f"/srv/{token}")).run
    assert (run.message, run.sandbox) == ("There is no folder /srv/{secret:T}.", "/srv/{secret:T}")
    assert (await repo.checkpoints.runs(job="two")) == [run]


async def test_a_warning_is_told_without_the_secrets_of_any_job(
    tmp_path: Path, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "token-0123456789"
    (tmp_path / "token").write_text(token)
    make_tree(tmp_path / "work", files=1)
    text = f'[cron]\nhealth-file = "health.json"\nlisten = ":{(port := free_port())}"\n'
    text += '[jobs.one]\nsandbox = "work"\nevery = "1h"\nsecrets = { T = { file = "token" } }\n'
    made = plan(tmp_path, text + '[jobs.two]\nsandbox = "work"\nevery = "1h"\n')
    capture = repo.capture_with_report

    async def capture_with_warning(*args: Any, **options: Any) -> CaptureReport:
        report = await capture(*args, **options)
        checkpoint = msgspec.structs.replace(report.checkpoint, warnings=(f"{token}.log: kept changing",))
        return dataclasses.replace(report, checkpoint=checkpoint)

    monkeypatch.setattr(repo, "capture_with_report", capture_with_warning)
    log, scrubber = io.StringIO(), Scrubber()
    with logging_to(log, "json", logging.DEBUG, scrubber):
        board = Board(Events(), scrubber, lambda job, thread_id: None)
        board.plan(made)
        await board.listen(made.listen)
        running = Runner(repo, board, scrubber, folder=str(tmp_path), may_run=True)
        runs = [(await running.capture(target(job))).run for job in made.jobs.values()]
        pages = [await asyncio.to_thread(get, port, page) for page in ("/health", "/metrics")]
        await board.close()
    assert [(run.warnings, run.message) for run in runs] == [(1, "{secret:T}.log: kept changing")] * 2
    recorded = await repo.checkpoints.runs()
    assert token not in f"{log.getvalue()} {(tmp_path / 'health.json').read_text()} {pages} {recorded}"
    assert "{secret:T}.log" in log.getvalue()


async def first_run(repo: Repository) -> JobRun:
    """The first run that is recorded, once it is."""
    for _ in range(6000):
        if runs := await repo.checkpoints.runs():
            return runs[-1]
        await asyncio.sleep(0.01)
    raise AssertionError("nothing was run")


class Chance(random.Random):
    """What is drawn is remembered, and the least comes."""

    def __init__(self) -> None:
        super().__init__(1)
        self.drawn: list[tuple[float, float]] = []

    def uniform(self, a: float, b: float) -> float:
        self.drawn.append((a, b))
        return a


async def test_jitter_delays_each_capture_up_to_it(tmp_path: Path, repo: Repository) -> None:
    make_tree(tmp_path / "work", files=3)
    made = plan(tmp_path, '[jobs.one]\nsandbox = "work"\nevery = "1h"\njitter = "10min"\n')
    chance = Chance()

    @asynccontextmanager
    async def opened() -> AsyncIterator[Repository]:
        yield repo

    daemon = asyncio.create_task(Daemon(made, lambda: made, opened, Events(), Scrubber(), chance=chance).run())
    await first_run(repo)
    daemon.cancel()
    with pytest.raises(asyncio.CancelledError):
        await daemon
    assert chance.drawn == [(0, 600)]


@pytest.mark.parametrize(("module", "make"), [("apscheduler.schedulers.asyncio", new_scheduler), ("prometheus_client", Metrics)])
async def test_without_the_extra_it_says_what_to_install(
    module: str, make: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RepositoryError) as caught:
        make()
    assert caught.value.code == Code.MISSING_EXTRA
    assert "snapcore[cron]" in caught.value.hint
