"""Whole repositories in a bucket, on moto's server and on the strict one.

Cases 6, 29 to 33, 45 and 47, as a user meets them: in a capture and a restore.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

import snapcore
from snapcore.config import CONFIG_KEY, CREATING_KEY, new_config
from snapcore.errors import Code, RepositoryError
from snapcore.repository import Repository
from snapcore.testing import StrictS3Server


@pytest.fixture
def keys(no_aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials as users have them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Go to another machine: one with a data folder of its own."""

    def go_to(name: str) -> Path:
        folder = tmp_path / name
        monkeypatch.setenv("XDG_DATA_HOME", str(folder))
        return folder / "snapcore"

    go_to("first")
    return go_to


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["moto", "strict"])
def address(request: pytest.FixtureRequest, keys: None, machine: Any, moto_url: str) -> Iterator[str]:
    """The address of a prefix of an empty bucket on either server."""
    if request.param == "strict":
        with StrictS3Server() as server:
            yield server.address("bucket/agents/one")
        return
    client: Any = boto3.session.Session().client("s3", endpoint_url=moto_url, region_name="us-east-1")
    name = f"bucket-{os.urandom(8).hex()}"
    client.create_bucket(Bucket=name)
    client.close()
    yield f"s3://{name}/agents/one?endpoint={moto_url}"


@pytest.fixture
def strict(strict_server: StrictS3Server, keys: None, machine: Any) -> StrictS3Server:
    return strict_server


@pytest.fixture
async def repo(strict: StrictS3Server, pauses: Any) -> AsyncIterator[Repository]:
    """A repository on the strict server, which does not really wait between two attempts."""
    async with snapcore.open_repository(strict.address("bucket/p")) as opened:
        store: Any = opened.blobs
        store._requests._retry = pauses.policy()
        strict.requests.clear()
        yield opened


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A workspace of some files, one of them large enough for several packs."""
    folder = tmp_path / "work"
    (folder / "src").mkdir(parents=True)
    (folder / "empty").mkdir()
    for number in range(30):
        (folder / "src" / f"{number}.py").write_text(f"print({number})\n" * 100)
    (folder / "data.bin").write_bytes(os.urandom(40 << 20))
    (folder / "link").symlink_to("src/1.py")
    return folder


def contents(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        for path in folder.rglob("*")
    }


async def test_a_workspace_comes_back_from_a_bucket(address: str, work: Path, tmp_path: Path) -> None:
    """Cases 29 and 30: on a server of other people's, and on one that refuses what AWS alone accepts."""
    async with snapcore.open_repository(address) as repo:
        await repo.capture(str(work), thread_id="t")
        (work / "src" / "3.py").write_text("changed")
        (work / "src" / "4.py").unlink()
        second = await repo.capture(str(work), thread_id="t", label="second")
    (tmp_path / "there").mkdir()
    async with snapcore.open_repository(address, create=False) as repo:
        await repo.restore(str(tmp_path / "there"), thread_id="t")
        report = await repo.verify(read_data=True)
        assert [c.id for c in await repo.list("t")][-1] == second.id
    assert contents(tmp_path / "there") == contents(work)
    assert report.ok


async def test_nothing_is_lost_while_the_service_throttles_breaks_off_and_forgets(
    strict: StrictS3Server, repo: Repository, work: Path, tmp_path: Path
) -> None:
    """Cases 31 to 33 and 47."""
    strict.faults.refuse("*", None, every=4)
    strict.faults.lose_response("PUT", 1)
    strict.faults.drop("PUT", 3)
    strict.faults.cut_body("GET", 1000, 1)
    strict.faults.cut_body("GET", 100_000, 3)
    await repo.capture(str(work), thread_id="t")
    (tmp_path / "there").mkdir()
    await repo.restore(str(tmp_path / "there"), thread_id="t", verify="content")
    assert contents(tmp_path / "there") == contents(work)
    assert (await repo.verify(read_data=True)).ok


async def test_a_capture_whose_blobs_are_not_stored_fails_and_leaves_no_checkpoint(
    strict: StrictS3Server, repo: Repository, work: Path
) -> None:
    """Cases 6 and 45."""
    first = await repo.capture(str(work / "src"), thread_id="t")
    before = dict(strict.buckets["bucket"])
    (work / "src" / "new.py").write_text("new")
    for status, code in ((503, "SlowDown"), (403, "AccessDenied")):
        strict.faults.clear()
        strict.faults.refuse("PUT", None, status=status, code=code)
        with pytest.raises(RepositoryError):
            await repo.capture(str(work / "src"), thread_id="t")
    strict.faults.clear()
    assert [c.id for c in await repo.list("t")] == [first.id]
    assert strict.buckets["bucket"] == before
    assert (await repo.verify(read_data=True)).ok
    assert (await repo.capture(str(work / "src"), thread_id="t")).parent_id == first.id


async def test_a_small_capture_is_one_put_and_no_list(strict: StrictS3Server, repo: Repository, work: Path) -> None:
    await repo.capture(str(work / "src"), thread_id="t")
    assert strict.requests["PUT"] == 1
    (work / "src" / "1.py").write_text("changed")
    strict.requests.clear()
    await repo.capture(str(work / "src"), thread_id="t")
    assert strict.requests["PUT"] == 1
    assert strict.requests["LIST"] == 0


async def test_opening_a_repository_is_one_request(strict: StrictS3Server, repo: Repository) -> None:
    strict.requests.clear()
    async with snapcore.open_repository(strict.address("bucket/p"), create=False):
        assert strict.requests == {"GET": 1}


async def test_a_missing_bucket_is_told_and_not_taken_for_a_missing_repository(strict: StrictS3Server) -> None:
    for create in (True, False):
        with pytest.raises(RepositoryError) as caught:
            async with snapcore.open_repository(strict.address("buckett"), create=create):
                pass
        assert caught.value.code is Code.NO_BUCKET
    assert strict.buckets == {"bucket": {}}


# ---- the database, when none is named


async def test_the_database_is_in_the_users_data_folder_named_by_the_repository(
    strict: StrictS3Server, repo: Repository, machine: Callable[[str], Path], work: Path
) -> None:
    path = machine("first") / f"{repo.config.repository_id}.db"
    assert path.is_file()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    await repo.capture(str(work / "src"), thread_id="t")
    async with snapcore.open_repository(strict.address("bucket/p"), create=False) as again:
        assert len(await again.list("t")) == 1


@pytest.mark.parametrize("create", [True, False])
async def test_a_second_machine_gets_no_database_of_its_own(
    strict: StrictS3Server, repo: Repository, machine: Callable[[str], Path], create: bool
) -> None:
    """Two databases over one bucket would destroy each other's checkpoints."""
    folder = machine("second")
    before = dict(strict.buckets["bucket"])
    with pytest.raises(RepositoryError) as caught:
        async with snapcore.open_repository(strict.address("bucket/p"), create=create):
            pass
    assert caught.value.code is Code.WRONG_DATABASE
    assert "--database" in caught.value.hint
    assert "repair" in caught.value.hint
    assert not folder.exists()
    assert strict.buckets["bucket"] == before
    machine("first")
    async with snapcore.open_repository(strict.address("bucket/p"), create=False):
        pass


async def test_machines_share_a_database_that_is_named(strict: StrictS3Server, machine: Any, tmp_path: Path, work: Path) -> None:
    shared = f"sqlite:///{tmp_path}/shared.db"
    async with snapcore.open_repository(strict.address(), database=shared) as repo:
        first = await repo.capture(str(work / "src"), thread_id="t")
    folder = machine("second")
    async with snapcore.open_repository(strict.address(), database=shared) as repo:
        assert [c.id for c in await repo.list("t")] == [first.id]
    assert not folder.exists()


async def test_a_creation_that_another_machine_began_is_not_gone_on_with(strict: StrictS3Server, machine: Any) -> None:
    """Or both would have a database with the same ids, and neither would ever be refused."""
    from snapcore.config import encode_config

    begun = new_config()
    strict.buckets["bucket"][CREATING_KEY] = encode_config(begun)
    async with snapcore.open_repository(strict.address()) as repo:
        assert repo.config.repository_id != begun.repository_id
        assert repo.config.database_id != begun.database_id
    assert list(strict.buckets["bucket"]) == [CONFIG_KEY]


async def test_a_creation_that_was_cut_short_here_is_gone_on_with(strict: StrictS3Server, machine: Callable[[str], Path]) -> None:
    strict.faults.refuse("PUT", 2, status=403, code="AccessDenied")
    with pytest.raises(RepositoryError):
        async with snapcore.open_repository(strict.address()):
            pass
    assert list(strict.buckets["bucket"]) == [CREATING_KEY]
    (database,) = machine("first").glob("*.db")
    async with snapcore.open_repository(strict.address()) as repo:
        assert database.stem == repo.config.repository_id
    assert list(strict.buckets["bucket"]) == [CONFIG_KEY]


async def test_of_two_machines_that_create_at_once_one_is_refused(
    strict: StrictS3Server, machine: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second looks before the first has put its configuration, and puts its own after it."""
    import asyncio

    sleep = asyncio.sleep
    opened: list[Repository] = []

    async def meanwhile(seconds: float) -> None:
        # while the first waits for whoever may have looked before it, the second comes with what it found: nothing
        monkeypatch.setattr(asyncio, "sleep", sleep)
        machine("second")
        first = strict.buckets["bucket"].pop(CONFIG_KEY)
        opened.append(await snapcore.open_repository(strict.address()))
        machine("first")
        assert strict.buckets["bucket"][CONFIG_KEY] != first

    monkeypatch.setattr(asyncio, "sleep", meanwhile)
    with pytest.raises(RepositoryError) as caught:
        async with snapcore.open_repository(strict.address()):
            pass
    assert caught.value.code is Code.WRONG_DATABASE
    assert "--database" in caught.value.hint
    await opened[0].close()


def test_the_data_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    from snapcore.databases import new_own_database

    made: list[str] = []
    monkeypatch.setattr(os, "makedirs", lambda path, **_: made.append(path))
    monkeypatch.setenv("HOME", "/home/me")
    for given, platform, expected in (
        ("/data", "linux", "/data/snapcore"),
        ("", "linux", "/home/me/.local/share/snapcore"),
        ("relative", "linux", "/home/me/.local/share/snapcore"),
        ("", "darwin", "/home/me/Library/Application Support/snapcore"),
    ):
        monkeypatch.setenv("XDG_DATA_HOME", given)
        monkeypatch.setattr("sys.platform", platform)
        assert new_own_database("0a") == f"sqlite:///{expected}/0a.db"
        assert made.pop() == expected
