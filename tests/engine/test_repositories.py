"""Repositories: opening, growth, memory, verification, and other processes."""

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import snapcore
from snapcore.errors import Code, ProviderError, RepositoryError
from snapcore.packs import pack_key
from snapcore.repository import Repository
from snapcore.testing import StrictS3Server
from snapcore.testing.trees import compare_trees, make_tree

Make = Callable[..., Path]


def python(script: str, *args: object) -> str:
    """Run a script in a process of its own; what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


# ---- opening


async def test_a_repository_is_created_once_and_found_again(tmp_path: Path) -> None:
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        made = repo.config.repository_id
    again = await snapcore.open_repository(str(tmp_path / "repo"), create=False)
    assert again.config.repository_id == made
    await again.close()
    await again.close()
    with pytest.raises(RepositoryError) as caught:
        await snapcore.init_repository(tmp_path / "repo")
    assert caught.value.code == Code.REPOSITORY_EXISTS


@pytest.mark.parametrize("kind", ["missing", "empty folder", "folder of something else"])
async def test_an_absent_repository_is_told_and_not_made(tmp_path: Path, kind: str) -> None:
    if kind != "missing":
        (tmp_path / "repo").mkdir()
    if kind == "folder of something else":
        (tmp_path / "repo" / "file").write_text("x")
    with pytest.raises(RepositoryError) as caught:
        await snapcore.open_repository(tmp_path / "repo", create=False)
    assert caught.value.code == Code.NO_REPOSITORY
    assert "init" in caught.value.hint
    assert list((tmp_path / "repo").glob("snapcore*")) == []


async def test_the_command_that_makes_an_absent_one_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    for name, argument in (("plain", "plain'"), ("two words", "two words\"'"), ("a?b&c", "a?b&c\"'")):
        with pytest.raises(RepositoryError) as caught:
            await snapcore.open_repository(tmp_path / name, create=False)
        assert caught.value.hint is not None
        assert argument in caught.value.hint


async def test_another_repositorys_database_is_refused(tmp_path: Path, make: Make) -> None:
    """Two databases over one blob store would destroy each other's checkpoints."""
    work = make({"a": "1"})
    for name in ("one", "two"):
        async with snapcore.open_repository(tmp_path / name) as repo:
            await repo.capture(work, thread_id="t")
    with pytest.raises(RepositoryError) as caught:
        await snapcore.open_repository(tmp_path / "one", database=f"sqlite:///{tmp_path}/two/snapcore.db")
    assert caught.value.code == Code.WRONG_DATABASE
    with pytest.raises(RepositoryError) as caught:
        await snapcore.open_repository(tmp_path / "three", database=f"sqlite:///{tmp_path}/two/snapcore.db")
    assert caught.value.code == Code.WRONG_DATABASE


async def test_a_missing_database_is_told_and_not_replaced_by_an_empty_one(tmp_path: Path, make: Make) -> None:
    """An empty one would take the packs for garbage."""
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        await repo.capture(make({"a": "1"}), thread_id="t")
    for path in (tmp_path / "repo").glob("snapcore.db*"):
        path.rename(tmp_path / path.name)
    for create in (True, False):
        with pytest.raises(RepositoryError) as caught:
            await snapcore.open_repository(tmp_path / "repo", create=create)
        assert caught.value.code == Code.WRONG_DATABASE
        assert "--database" in caught.value.hint
    for path in tmp_path.glob("snapcore.db*"):
        path.rename(tmp_path / "repo" / path.name)
    async with snapcore.open_repository(tmp_path / "repo", create=False) as repo:
        assert len(await repo.list("t")) == 1


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"version": 99}', "[1]", "\x00" * 100])
async def test_a_damaged_configuration_is_a_typed_error(tmp_path: Path, text: str) -> None:
    async with snapcore.open_repository(tmp_path / "repo"):
        pass
    (tmp_path / "repo" / "snapcore.json").write_text(text)
    with pytest.raises(RepositoryError) as caught:
        await snapcore.open_repository(tmp_path / "repo")
    assert caught.value.code in (Code.DAMAGED, Code.UNSUPPORTED_FORMAT)


async def test_unknown_schemes_are_typed_errors() -> None:
    with pytest.raises(RepositoryError) as caught:
        await snapcore.open_repository("nosuch://bucket/prefix")
    assert caught.value.code == Code.UNKNOWN_SCHEME
    with pytest.raises(ProviderError) as refused:
        await snapcore.connect("nosuch://sandbox")
    assert refused.value.code == Code.UNKNOWN_SCHEME


async def test_a_database_in_the_place_of_a_repository_is_told_where_it_goes() -> None:
    for address in ("postgresql+psycopg://u@h/db", "postgres://h/db", "sqlite:////tmp/x.db"):
        with pytest.raises(RepositoryError, match="--database"):
            await snapcore.open_repository(address)


async def test_a_bucket_is_never_taken_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with StrictS3Server(access_key="key") as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        address = server.address("bucket/prefix").replace("s3:", "S3:", 1)
        async with snapcore.open_repository(address, database="sqlite:///" + str(tmp_path / "apart.db")):
            assert "prefix/snapcore.json" in server.buckets["bucket"]
    for address in ("s3:bucket", "s3:/bucket/prefix", "S3:bucket"):
        with pytest.raises(RepositoryError) as caught:
            await snapcore.open_repository(address)
        assert caught.value.code == Code.UNKNOWN_SCHEME
    assert {path.name for path in tmp_path.iterdir()} <= {"apart.db", "apart.db-wal", "apart.db-shm"}


async def test_a_folder_may_be_called_like_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with snapcore.open_repository("./s3:folder"):
        assert (tmp_path / "s3:folder" / "snapcore.json").exists()


async def test_a_database_with_tables_of_something_else_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE threads (other)")
    with pytest.raises(RepositoryError) as caught:
        await snapcore.open_repository(tmp_path / "repo", database=f"sqlite:///{tmp_path}/other.db")
    assert caught.value.code == Code.WRONG_DATABASE


async def test_two_that_create_a_repository_at_once_agree(tmp_path: Path, make: Make) -> None:
    work = make({"a": "1"})
    repos = await asyncio.gather(*(snapcore.open_repository(tmp_path / "repo")._open() for _ in range(4)))
    assert len({repo.config.repository_id for repo in repos}) == 1
    await asyncio.gather(*(repo.capture(work, thread_id=f"t{n}") for n, repo in enumerate(repos)))
    assert len(await repos[0].threads()) == 4
    for repo in repos:
        await repo.close()


# ---- other processes


def test_a_fresh_process_restores_by_thread_id(tmp_path: Path) -> None:
    """Case 7: nothing but the repository's address and the thread's id is needed."""
    make_tree(tmp_path / "work", files=30)
    python(
        """
        import sys, snapcore.blocking
        with snapcore.blocking.open_repository(sys.argv[1]) as repo:
            repo.capture(sys.argv[2], thread_id="thread-1")
        """,
        tmp_path / "repo",
        tmp_path / "work",
    )
    shutil.move(tmp_path / "work", tmp_path / "original")
    out = python(
        """
        import sys, snapcore.blocking
        with snapcore.blocking.open_repository(sys.argv[1], create=False) as repo:
            print(repo.restore(sys.argv[2], thread_id="thread-1").files)
        """,
        tmp_path / "repo",
        tmp_path / "work",
    )
    assert int(out) > 30
    assert compare_trees(tmp_path / "original", tmp_path / "work") == []


async def test_a_second_process_continues_where_the_first_ended(
    tmp_path: Path, make: Make, settle: Callable[[Path], None]
) -> None:
    """Incremental across processes: the second reads what changed since the first."""
    work = make({f"f{n}": str(n) for n in range(50)})
    settle(work)
    script = """
        import sys, snapcore.blocking
        with snapcore.blocking.open_repository(sys.argv[1]) as repo:
            print(repo.capture_with_report(sys.argv[2], thread_id="t").files_read)
        """
    read = await asyncio.to_thread(python, script, tmp_path / "repo", work)
    assert int(read) == 50
    (work / "f7").write_text("changed")
    assert int(await asyncio.to_thread(python, script, tmp_path / "repo", work)) == 1


# ---- growth and memory


async def test_fifty_captures_with_one_changing_file_grow_by_that_file(
    repo: Repository, make: Make, settle: Callable[[Path], None]
) -> None:
    """Case 18: bounded growth: 50 times a part of 1 MB, not 50 times the workspace."""
    rng = random.Random(1)
    work = make({f"d{n % 10}/f{n}": rng.randbytes(2_000) for n in range(80)})
    (work / "changing").write_bytes(rng.randbytes(1 << 20))
    settle(work)
    first = await repo.capture_with_report(work, thread_id="t")
    for _ in range(49):
        data = bytearray((work / "changing").read_bytes())
        at = rng.randrange(len(data) - 100)
        data[at : at + 100] = rng.randbytes(100)
        (work / "changing").write_bytes(data)
        report = await repo.capture_with_report(work, thread_id="t")
        assert report.bytes_stored < (1 << 20) + 60_000
        assert report.files_read == 1
    stats = await repo.stats()
    assert stats.checkpoints == 50
    assert stats.stored_bytes < first.bytes_stored + 49 * ((1 << 20) + 60_000)
    assert stats.logical_bytes > 50 * (1 << 20)


async def test_captures_of_an_unchanged_tree_store_next_to_nothing(repo: Repository, work: Path) -> None:
    make_tree(work, files=200)
    await repo.capture(work, thread_id="t")
    for _ in range(3):
        report = await repo.capture_with_report(work, thread_id="t")
    assert report.bytes_stored < 2_000


MEMORY = r"""
    import re, sys, snapcore.blocking
    with snapcore.blocking.open_repository(sys.argv[1]) as repo:
        if sys.argv[4] == "capture":
            repo.capture(sys.argv[2], thread_id="t")
        else:
            repo.restore(sys.argv[3], thread_id="t")
    # not getrusage: its number begins with the process that this one was started from
    print(int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) // 1024)
    """


def test_a_file_of_one_gigabyte_needs_little_memory(tmp_path: Path) -> None:
    """Case 21: captured and restored within 250 MB; most of it a hole, which stays one."""
    work = tmp_path / "work"
    work.mkdir()
    size = 1 << 30
    rng = random.Random(3)
    with (work / "large").open("wb") as file:
        file.truncate(size)
        for place in range(0, size, 64 << 20):
            file.seek(place)
            file.write(rng.randbytes(1 << 20))
    for what in ("capture", "restore"):
        used = int(python(MEMORY, tmp_path / "repo", work, tmp_path / "target", what))
        assert used < 250, what
    restored = tmp_path / "target" / "large"
    assert restored.stat().st_size == size
    assert restored.stat().st_blocks * 512 < 128 << 20
    with (work / "large").open("rb") as one, restored.open("rb") as two:
        for place in range(0, size, 64 << 20):
            one.seek(place)
            two.seek(place)
            assert one.read(2 << 20) == two.read(2 << 20)


def test_many_files_need_little_memory(tmp_path: Path) -> None:
    """The same limit for 12,000 names, most of them of a few files."""
    work = tmp_path / "work"
    for folder in range(12):
        (work / str(folder)).mkdir(parents=True)
        (work / str(folder) / "first").write_text(str(folder))
        for number in range(999):
            os.symlink("first", work / str(folder) / f"{number}")
    for what in ("capture", "restore"):
        assert int(python(MEMORY, tmp_path / "repo", work, tmp_path / "target", what)) < 250, what
    assert len(os.listdir(tmp_path / "target" / "11")) == 1000


# ---- verification


async def test_an_empty_repository_is_fine(repo: Repository) -> None:
    """Case 48: verification passes with nothing there, also of the data, and after all was deleted."""
    for read_data in (False, True):
        report = await repo.verify(read_data=read_data)
        assert report.ok
        assert (report.checkpoints, report.packs, report.records) == (0, 0, 0)


async def test_verification_counts_and_passes(repo: Repository, work: Path) -> None:
    make_tree(work, files=30)
    await repo.capture(work, thread_id="t", conversation=[1], artifacts={"a": b"1"})
    await repo.fork("t", to_thread_id="u")
    plain = await repo.verify()
    full = await repo.verify(read_data=True)
    assert plain.ok
    assert full.ok
    assert (plain.checkpoints, plain.packs, plain.bytes_read) == (2, 2, 0)
    assert full.bytes_read == (await repo.stats()).stored_bytes
    await repo.delete_head("t")
    await repo.delete_head("u")
    assert (await repo.verify(read_data=True)).ok


@pytest.mark.parametrize("damage", ["missing", "cut short", "flipped"])
async def test_verification_names_what_is_damaged_and_whom_it_hurts(memory_repo: Repository, make: Make, damage: str) -> None:
    """And changes nothing: what it could not read is still there afterwards."""
    work = make({"a": os.urandom(200_000)})
    hurt = await memory_repo.capture(work, thread_id="t")
    (pack,) = await memory_repo.checkpoints.packs()
    await memory_repo.fork("t", to_thread_id="u")
    fine = await memory_repo.capture(make({"b": "1"}, base=work.parent / "other"), thread_id="fine")
    key = pack_key(pack.pack_id)
    data = await memory_repo.blobs.get(key)
    if damage == "missing":
        await memory_repo.blobs.delete(key)
    elif damage == "cut short":
        await memory_repo.blobs.put(key, data[:100_000])
    else:
        await memory_repo.blobs.put(key, data[:100_000] + bytes([data[100_000] ^ 1]) + data[100_001:])
    report = await memory_repo.verify(read_data=True)
    assert not report.ok
    assert any(pack.pack_id in problem.subject for problem in report.problems)
    named = {pair for problem in report.problems for pair in problem.checkpoints}
    assert ("t", hurt.id) in named
    assert {thread for thread, _ in named} == {"t", "u"}
    assert ("fine", fine.id) not in named
    if damage != "flipped":
        assert not (await memory_repo.verify()).ok
    await memory_repo.blobs.put(key, data)
    assert (await memory_repo.verify(read_data=True)).ok
