"""No credential of an address that a user typed is ever told: not in results, errors, tracebacks, logs, or records of runs."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

import snapcore
from snapcore.cron.health import Health
from snapcore.cron.metrics import Metrics

from .conftest import Run

CREDENTIAL: Final = "xKq7canary"
HIDDEN: Final = "***"

# Each leads nowhere: nobody answers, the program is not there, or it makes no sense.
SANDBOXES: Final = (
    f"exec:sh -c 'exit 1; {CREDENTIAL}' /w",
    f"exec:no-such-program -p {CREDENTIAL} /w",
    f"exec:sshpass -p {CREDENTIAL} ssh host",
    f"exec:sshpass -p '{CREDENTIAL} /w",
    f"ssh://dev:{CREDENTIAL}@127.0.0.1:1/w",
    f"docker://dev:{CREDENTIAL}@box/w",
    f"docker://tcp://dev:{CREDENTIAL}@127.0.0.1:1/box",
    f"e2b://key:{CREDENTIAL}@sandbox/w",
    f"e2b://e2b_{CREDENTIAL}@sandbox/w",
    f"https://dev:{CREDENTIAL}@host/w",
    f"file://dev:{CREDENTIAL}@host/w",
)
REPOSITORIES: Final = (
    f"s3://key:{CREDENTIAL}@bucket/x?endpoint=http://127.0.0.1:1",
    f"s3://bucket/x?endpoint=http://key:{CREDENTIAL}@127.0.0.1:1",
    f"s3://bucket/x?secret={CREDENTIAL}",
    f"postgresql://dev:{CREDENTIAL}@127.0.0.1:1/db",
    f"https://dev:{CREDENTIAL}@127.0.0.1:1/x",
    f"exec:sshpass -p {CREDENTIAL} ssh host /w",
    f"file://dev:{CREDENTIAL}@host/x",
)
DATABASES: Final = (
    f"postgresql://dev:{CREDENTIAL}@127.0.0.1:1/db",
    f"postgresql+psycopg://dev@127.0.0.1:1/db?password={CREDENTIAL}",
    f"postgresql://dev:{CREDENTIAL}@127.0.0.1:no-port/db",
    f"postgresql://dev:{CREDENTIAL}@[::1/db",
    f"mysql://dev:{CREDENTIAL}@127.0.0.1:1/db",
)
# "{}" is where the address stands.
WITH_SANDBOX: Final = (
    "capture {} -t t",
    "restore {} -t t",
    "diff one {}",
    "diff {} one",
    "exec {} -- true",
    "exec {} -t t --before -- true",
    "import {} -t t",
    "mcp -t t --sandbox {}",
)
WITH_REPOSITORY: Final = (
    "init --repo {}",
    "list -t t --repo {}",
    "capture . -t t --repo {}",
    "repair --repo {}",
    "config --repo {}",
    "store test {}",
)
WITH_DATABASE: Final = (
    "list -t t --database {}",
    "init --repo other --database {}",
    "repair --yes --database {}",
    "config --database {}",
)
MISPLACED: Final = (
    "{}",
    "list {}",
    "threads -t t {}",
    "capture . {}",
    "capture . {} -t t --repo={}",
    "cron {}",
    "cron run {}",
    "cron status {}",
    "cron install {} --all --dry-run",
    "store {}",
    "help {}",
    "completion {}",
    "show {}",
    "ls {}",
    "cat {}",
    "export one -o {}",
    "export one -o {}",
    "config --config {}",
    "exec {} -t",
    "list -t t --progress {}",
)


def leaks(run: Run, lines: Sequence[str], addresses: Sequence[str]) -> list[tuple[list[str], str]]:
    """The commands, with each of the addresses in its place, that tell the credential, and what they say."""
    found = []
    modes = itertools.cycle(((), ("--json", "--debug")))
    for address, line in itertools.product(addresses, lines):
        words, dashes, after = line.partition(" -- ")
        args = [word.replace("{}", address) for word in words.split()] + [*next(modes), *dashes.split(), *after.split()]
        outcome = run(*args, code=None)
        if CREDENTIAL in outcome.text + outcome.stderr:
            found.append((args, outcome.text + outcome.stderr))
    return found


@pytest.fixture
def here(made: Run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """In the workspace of a thread with checkpoints; no container engine but one that asks for a credential, too."""
    monkeypatch.chdir(tree)
    monkeypatch.setenv("DOCKER_HOST", f"tcp://dev:{CREDENTIAL}@127.0.0.1:1")
    return made


def test_sandboxes_that_cannot_be_reached(here: Run) -> None:
    assert leaks(here, WITH_SANDBOX, SANDBOXES) == []


def test_repositories_that_cannot_be_reached(here: Run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert leaks(here, WITH_REPOSITORY, REPOSITORIES) == []
    for address in REPOSITORIES:
        monkeypatch.setenv("SNAPCORE_REPO", address)
        assert leaks(here, ("list -t t", "config", "config"), ("",)) == []
    assert [path for path in tree.rglob("*") if CREDENTIAL in path.name] == []


def test_databases_that_cannot_be_reached(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert leaks(here, WITH_DATABASE, DATABASES) == []
    for address in DATABASES:
        monkeypatch.setenv("SNAPCORE_DATABASE", address)
        assert leaks(here, ("stats", "config"), ("",)) == []


def test_addresses_that_stand_where_none_belongs(here: Run) -> None:
    quoted = r"exec:sh -c 'a \ b' " + f'"{CREDENTIAL}" /w'
    assert leaks(here, MISPLACED, (REPOSITORIES[0], DATABASES[0], quoted)) == []


# ---- a sandbox that is there


@pytest.fixture
def behind(tree: Path) -> str:
    """An address of the workspace that holds a credential."""
    return f"exec:env PAT={CREDENTIAL} {tree}"


def test_a_sandbox_of_which_results_and_the_log_tell(here: Run, behind: str) -> None:
    here("capture", behind, "-t", "t")
    assert json.loads(here("diff", "one", behind, "--json").stdout)["sandbox"] == f"exec:env {HIDDEN}"
    here("exec", behind, "-t", "t", "--before", "--checkpoint", "--", "true")
    lines = ("log t", "log t", "show latest -t t", "threads", "stats --threads", "list -t t", "restore {} -t t --dry-run")
    assert leaks(here, lines, (behind,)) == []
    assert f"{HIDDEN}" in here("log", "t").text
    sandboxes = {json.loads(line)["sandbox_id"] for line in here("log", "t", "--json").text.splitlines()}
    assert all(each.startswith("exec:") and each.endswith(f":env {HIDDEN}") for each in sandboxes)


def test_a_sandbox_that_is_another_or_that_goes_away(here: Run, behind: str) -> None:
    here("exec", behind, "-t", "t", "--", "true")
    other = behind.replace("exec:env", "exec:env B=1")
    refused = here("exec", other, "-t", "t", "--debug", "--", "true", code=125).stderr
    lost = here("exec", behind, "--debug", "--", "sh", "-c", "kill -KILL 0", code=125).stderr
    assert f"env {HIDDEN}" in refused
    assert f"env {HIDDEN} broke" in lost
    assert CREDENTIAL not in refused + lost


# ---- jobs


@pytest.fixture
def jobs(tmp_path: Path, behind: str) -> str:
    """A file with a job for each of the sandboxes, of which one is there."""
    tables = (
        f"[jobs.job{number}]\nsandbox = {json.dumps(address)}\nthread = 'job{number}'\ncron = '@daily'\n"
        for number, address in enumerate([behind, "docker://box", *SANDBOXES])
    )
    file = tmp_path / "jobs.toml"
    file.write_text("".join(tables))
    return str(file)


def test_jobs_and_all_that_tells_of_their_runs(here: Run, jobs: str, repo: Path) -> None:
    lines = (
        "cron run {} --once -v --log-format text",
        "cron run {} --once -v --log-format json",
        "cron status {}",
        "cron status {}",
        "cron status {} --runs 99",
        "cron status {} --runs 99",
        "cron install {} --all --systemd --user --dry-run",
        "cron install {} --all --crontab --dry-run",
        "config --config {}",
        "config --config {}",
    )
    assert leaks(here, lines, (jobs,)) == []

    async def pages() -> str:
        health, metrics = Health(datetime.now(UTC)), Metrics()
        async with snapcore.open_repository(repo) as opened:
            runs = await opened.checkpoints.runs(limit=99)
        for run in runs:
            health.ran(run)
            metrics.ran(run, health.failures(run.job, run.thread_id))
        assert len(runs) > len(SANDBOXES)
        return repr(runs) + json.dumps(health.document(lambda *_: None)) + metrics.text().decode()

    assert CREDENTIAL not in asyncio.run(pages())


def test_a_file_that_leads_nowhere(here: Run, tmp_path: Path) -> None:
    file = tmp_path / "jobs.toml"
    settings = ("repo", "database", "jobs.a.sandbox", "jobs.a.select", "thread.x", "jobs.a.unknown")
    for setting, address in itertools.product(settings, (REPOSITORIES[0], DATABASES[0])):
        file.write_text(f"{setting} = {json.dumps(address)}\n[jobs.b]\nsandbox = '.'\ncron = '@daily'\n")
        lines = ("cron run {} --once", "list -t t --config {}", "config --config {}")
        assert leaks(here, lines, (str(file),)) == []
