"""`repair` of repositories in buckets and in Postgres databases, as users type it, and two repairs at once.

Cases 45 and 46 on S3 and Postgres: what was put whole is found again, whatever a listing leaves out. Case 38: two processes.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from snapcore.testing import StrictS3Server
from snapcore.testing.trees import compare_trees

from .conftest import Run, spawn

HELD_REPAIR = """
import asyncio, sys
import snapcore
from snapcore.repairing import Repairer

original = Repairer._do
waited = []

async def do(self, actions):
    if not waited:
        waited.append(True)
        print("inside", flush=True)
        sys.stdin.readline()
    await original(self, actions)

Repairer._do = do
try:
    asyncio.run(snapcore.repair_repository(sys.argv[1], database=sys.argv[2] or None))
    print("done", flush=True)
except snapcore.RepositoryError as error:
    print(error.code, flush=True)
"""


@pytest.fixture
def server(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictS3Server]:
    """A strict server with a repository's place in it, which the environment names, for a machine with a data folder."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with StrictS3Server() as strict:
        monkeypatch.setenv("SNAPCORE_REPO", strict.address("bucket/p"))
        yield strict


def databases(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data").rglob("*.db"))


def lose(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "data")


@pytest.fixture
def states(tmp_path: Path) -> dict[str, Path]:
    """Copies of the workspace by the id of the checkpoint that was captured of it."""
    return {}


@pytest.fixture
def fill(run: Run, tree: Path, tmp_path: Path, states: dict[str, Path]) -> Callable[[], None]:
    """Capture three checkpoints and fork a thread."""

    def do() -> None:
        run("init")
        for n in range(3):
            (tree / f"file-{n}").write_text(f"state {n}\n" * 100)
            (tree / "notes.txt").write_text(str(n))
            run("capture", str(tree), "--thread", "t", "--id", f"c{n}", "-q")
            states[f"c{n}"] = tmp_path / f"state-{n}"
            shutil.copytree(tree, states[f"c{n}"], symlinks=True)
        run("fork", "--thread", "t", "--to", "u")

    return do


def all_restored(run: Run, tmp_path: Path, states: dict[str, Path]) -> None:
    """Every checkpoint is there and restores to what was captured."""
    run("verify", "--read-data")
    assert {c["id"] for c in run("list", "--thread", "t", "--json").json} == states.keys()
    (fork,) = run("list", "--thread", "u", "--json").json
    for thread, checkpoint, state in [*(("t", i, state) for i, state in states.items()), ("u", fork["id"], states["c2"])]:
        target = tmp_path / "out" / thread / checkpoint
        target.mkdir(parents=True)
        run("restore", str(target), "--thread", thread, "--checkpoint", checkpoint, "-q")
        assert compare_trees(state, target) == []


@pytest.mark.parametrize("lie", ["", "repeat_tokens", "duplicates"])
def test_the_lost_database_of_a_bucket_is_made_anew_in_this_machines_folder(
    server: StrictS3Server, run: Run, tmp_path: Path, fill: Callable[[], None], states: dict[str, Path], lie: str
) -> None:
    fill()
    lose(tmp_path)
    server.faults.page_size = 2
    if lie:
        setattr(server.faults, lie, True)
    before = dict(server.buckets["bucket"])
    plan = run("repair", code=1)
    assert "would: Create a new database" in plan.text
    assert "would: Enter 3 checkpoints of thread t" in plan.text
    assert (databases(tmp_path), server.buckets["bucket"]) == ([], before)
    run("repair", "--yes")
    assert len(databases(tmp_path)) == 1
    assert before.keys() <= server.buckets["bucket"].keys()
    all_restored(run, tmp_path, states)
    assert run("repair").text == "nothing to do\n"


def test_a_pack_that_a_listing_lacks_is_not_taken_for_lost(
    server: StrictS3Server, run: Run, tmp_path: Path, fill: Callable[[], None], states: dict[str, Path]
) -> None:
    fill()
    server.faults.hidden = {key for key in server.buckets["bucket"] if "/packs/" in key}
    assert len(server.faults.hidden) >= 3
    for options in ([], ["--read-data"], ["--yes"], ["--yes", "--read-data"]):
        assert run("repair", *options).text == "nothing to do\n"
    all_restored(run, tmp_path, states)


def test_what_a_listing_lacked_in_a_rebuild_comes_back_once_it_is_listed(
    server: StrictS3Server, run: Run, tmp_path: Path, fill: Callable[[], None], states: dict[str, Path]
) -> None:
    before = set(server.buckets["bucket"])
    fill()
    lose(tmp_path)
    packs = [key for key in server.buckets["bucket"] if "/packs/" in key and key not in before]
    server.faults.hidden = set(packs[-2:])  # the last of the captures, and the fork
    run("repair", "--yes")
    assert [c["id"] for c in run("list", "--thread", "t", "--json").json] == ["c0", "c1"]
    run("verify", "--read-data")
    server.faults.hidden.clear()
    assert "would: Enter 1 checkpoint of thread t" in run("repair", code=1).text
    run("repair", "--yes")
    all_restored(run, tmp_path, states)
    assert run("repair").text == "nothing to do\n"


# ---- Postgres


def on_postgres(url: str, statement: str) -> None:
    import psycopg

    address = make_url(url)
    schema = str(address.query["schema"])
    plain = address.difference_update_query(["schema"]).set(drivername="postgresql")
    with psycopg.connect(plain.render_as_string(hide_password=False), autocommit=True) as connection:
        connection.execute("SET client_min_messages = error")
        connection.execute(statement.format(schema=schema).encode())


LOSSES = {
    "dropped": "DROP SCHEMA {schema} CASCADE",
    "emptied": "TRUNCATE {schema}.repository, {schema}.threads, {schema}.checkpoints, {schema}.packs, {schema}.chunks",
    "without tables": "DROP SCHEMA {schema} CASCADE; CREATE SCHEMA {schema}",
}


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_postgres_database_that_lost_all_is_made_anew(
    request: pytest.FixtureRequest,
    run: Run,
    tmp_path: Path,
    fill: Callable[[], None],
    states: dict[str, Path],
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    loss: str,
    where: str,
) -> None:
    if where == "bucket":
        request.getfixturevalue("server")
    monkeypatch.setenv("SNAPCORE_DATABASE", postgres_url)
    fill()
    on_postgres(postgres_url, LOSSES[loss])
    assert "would: Create a new database" in run("repair", code=1).text
    assert "would: Create a new database" in run("repair", code=1).text  # the plan has made none
    run("repair", "--yes")
    all_restored(run, tmp_path, states)
    assert run("repair").text == "nothing to do\n"


# ---- two at once


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, repo: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the database, empty for the folder's own."""
    if request.param == "sqlite":
        return ""
    url: str = request.getfixturevalue("postgres_url")
    monkeypatch.setenv("SNAPCORE_DATABASE", url)
    return url


def lose_database(repo: Path, database: str) -> None:
    if database:
        on_postgres(database, LOSSES["dropped"])
    for file in repo.glob("snapcore.db*"):
        file.unlink()


def test_a_repair_that_another_process_overtakes_is_told_and_does_no_harm(
    repo: Path, run: Run, tmp_path: Path, fill: Callable[[], None], states: dict[str, Path], database: str
) -> None:
    fill()
    lose_database(repo, database)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HELD_REPAIR, str(repo), database], stdin=pipe, stdout=pipe, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "inside\n"
        run("repair", "--yes")
        assert first.communicate("\n", timeout=120)[0] == "MAINTENANCE_LOST\n"
    all_restored(run, tmp_path, states)
    assert run("repair").text == "nothing to do\n"


def test_of_several_repairs_at_once_each_ends_or_is_told(
    repo: Path, run: Run, tmp_path: Path, fill: Callable[[], None], states: dict[str, Path], database: str
) -> None:
    fill()
    lose_database(repo, database)
    running = [spawn("repair", "--yes") for _ in range(3)]
    told = [process.communicate(timeout=120) for process in running]
    for process, (_, errors) in zip(running, told, strict=True):
        assert process.returncode == 0 or b"MAINTENANCE_LOST" in errors, errors
    assert 0 in [process.returncode for process in running]
    all_restored(run, tmp_path, states)
    assert run("repair").text == "nothing to do\n"
