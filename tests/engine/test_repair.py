"""Repair makes whole what can be made whole: each kind of damage, made past the engine, is planned for, done, and then gone.

Case 46: a pack that is gone is set aside by repair, and the next capture stores again what was in it, for the older
checkpoints too. Case 47: a store that cannot be read is an error and never a loss.
"""

import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import snapcore
from snapcore.config import CONFIG_KEY, REBUILDING_KEY, RENAMING_KEY
from snapcore.errors import Code, RepositoryError
from snapcore.model import Checkpoint
from snapcore.repository import Repository
from snapcore.stores.local import LocalBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import Crash, Faults, with_faults
from snapcore.testing.trees import make_tree, mutate_tree

from .repair_helpers import everything, found, lose_database, pack_file, pack_of, places, sql

Make = Callable[..., Path]


async def healthy(url: Path) -> bool:
    """Whether every byte verifies and nothing is left to be repaired."""
    async with snapcore.open_repository(url, create=False) as repo:
        whole = (await repo.verify(read_data=True)).ok
    plan = await snapcore.plan_repair(url, read_data=True)
    return whole and not plan.actions


async def planned(url: Path) -> list[str]:
    """What a repair does, after a plan has said the same and changed nothing."""
    before = {p: p.read_bytes() for p in url.rglob("*") if p.is_file() and "snapcore.db" not in p.name}
    plan = await snapcore.plan_repair(url)
    assert {p: p.read_bytes() for p in url.rglob("*") if p.is_file() and "snapcore.db" not in p.name} == before
    report = await snapcore.repair_repository(url)
    assert [a.message for a in report.done[: len(plan.actions)]] == [a.message for a in plan.actions]
    assert before.keys() <= {p for p in url.rglob("*") if p.is_file()}  # no blob is ever deleted
    return [str(action.step) for action in report.done]


@pytest.fixture
async def captured(tmp_path: Path, make: Make) -> tuple[Checkpoint, Checkpoint]:
    """Two checkpoints of thread `t` in `repo`, of a large and a small file that does not change."""
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        first = await repo.capture(make({"a": os.urandom(50_000), "b": "1"}), thread_id="t")
        return first, await repo.capture(make({"b": "2"}), thread_id="t")


async def chunk(repo: Repository, c: Checkpoint, path: bytes) -> bytes:
    (entry,) = [e async for e in repo.ls(c, path)]
    return entry.chunk_ids()[0]


async def test_in_a_sound_repository_there_is_nothing_to_do(tmp_path: Path, work: Path) -> None:
    """Also after a gc that has merged packs, and captures and deletions."""
    make_tree(work, files=60)
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        for n in range(9):
            mutate_tree(work, n)
            c = await repo.capture(work, thread_id="t", secrets={"token": "s3cr3t-value"})
        await repo.delete("t", c.id)
        await repo.gc(grace=0)
    assert await healthy(tmp_path / "repo")
    assert await planned(tmp_path / "repo") == []


async def test_what_a_missing_pack_held_is_stored_again_by_the_next_capture(
    tmp_path: Path, work: Path, captured: tuple[Checkpoint, Checkpoint]
) -> None:
    """Case 46."""
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        pack_file(url, await pack_of(repo, await chunk(repo, captured[0], b"a"))).unlink()
    steps = await planned(url)
    assert steps == ["lose-pack", "write-records"]
    async with snapcore.open_repository(url) as repo:
        hurt = {pair for p in (await repo.verify()).problems for pair in p.checkpoints}
        assert hurt == {("t", captured[0].id), ("t", captured[1].id)}
        (work / "b").write_text("1")
        report = await repo.capture_with_report(work, thread_id="t", skip_unchanged=True)
        assert report.created
        hurt = {pair for p in (await repo.verify()).problems for pair in p.checkpoints}
        assert ("t", captured[1].id) not in hurt
        (work / "b").write_text("2")
        unchanged = await repo.capture_with_report(work, thread_id="t", skip_unchanged=True)
        assert unchanged.bytes_read < 10  # the thread is trusted again


async def test_a_capture_of_the_same_tree_heals_its_head_and_reads_only_what_is_lost(tmp_path: Path, work: Path) -> None:
    """Case 46."""
    url = tmp_path / "repo"
    for n in range(5):
        (work / f"{n}").write_bytes(os.urandom(20_000))
    async with snapcore.open_repository(url) as repo:
        await repo.capture(work, thread_id="t")
        (work / "new").write_bytes(os.urandom(20_000))
        second = await repo.capture(work, thread_id="t")
        await repo.fork("t", to_thread_id="u")
        pack_file(url, await pack_of(repo, await chunk(repo, second, b"new"))).unlink()
    await snapcore.repair_repository(url)
    async with snapcore.open_repository(url) as repo:
        report = await repo.capture_with_report(work, thread_id="t", skip_unchanged=True)
        assert report.created
    assert await healthy(url)


async def test_the_next_capture_reads_only_the_files_whose_content_is_lost(
    tmp_path: Path, make: Make, settle: Callable[[Path], None]
) -> None:
    """Case 46."""
    url = tmp_path / "repo"
    work = make({f"{n}": os.urandom(5000) for n in range(10)})
    settle(work)
    async with snapcore.open_repository(url) as repo:
        c = await repo.capture(work, thread_id="t")
        (at,) = await places(repo, await chunk(repo, c, b"3"))
    file = pack_file(url, at.pack_id)
    data = bytearray(file.read_bytes())
    data[at.offset] ^= 1
    file.write_bytes(data)
    await snapcore.repair_repository(url, read_data=True)
    async with snapcore.open_repository(url) as repo:
        report = await repo.capture_with_report(work, thread_id="t")
        assert (report.files_read, report.created) == (1, True)
    assert await healthy(url)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "footer"])
async def test_the_sound_records_of_a_damaged_pack_are_kept(
    tmp_path: Path, captured: tuple[Checkpoint, Checkpoint], damage: str
) -> None:
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        pack_id = await pack_of(repo, captured[0].record_id)
        (at,) = await places(repo, await chunk(repo, captured[0], b"a"))
    file = pack_file(url, pack_id)
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        del data[-100:]
    elif damage == "footer":
        data[-50] ^= 1
    else:
        data[at.offset + 10] ^= 1
    file.write_bytes(data)
    async with snapcore.open_repository(url) as repo:
        report = await repo.verify(read_data=True)
        kinds = {"truncated": "pack-size", "flipped": "pack-damaged", "footer": "pack-damaged"}
        assert found(report) == {(kinds[damage], pack_id)}
        hurt = [("t", c.id) for c in captured] if damage == "flipped" else []
        assert report.hurt == sorted(hurt)
    report_after = await snapcore.repair_repository(url, read_data=damage == "flipped")
    assert [str(a.step) for a in report_after.done] == ["salvage-pack"]
    assert report_after.hurt == sorted(hurt)
    assert file.read_bytes() == bytes(data)
    async with snapcore.open_repository(url) as repo:
        assert ("record-missing" in {kind for kind, _ in found(await repo.verify(read_data=True))}) is (damage == "flipped")
        assert await repo.read_file(captured[0], b"b") == b"1"


async def test_a_lost_pack_that_is_put_back_is_used_again(tmp_path: Path, captured: tuple[Checkpoint, Checkpoint]) -> None:
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        file = pack_file(url, await pack_of(repo, captured[0].record_id))
    copy = shutil.copy(file, tmp_path / "copy")
    file.unlink()
    await snapcore.repair_repository(url)
    shutil.copy(copy, file)
    assert await planned(url) == ["adopt-pack"]
    assert await healthy(url)


async def test_rows_that_are_gone_are_found_in_the_packs(tmp_path: Path, captured: tuple[Checkpoint, Checkpoint]) -> None:
    url = tmp_path / "repo"
    assert sql(url, "DELETE FROM chunks") > 5
    assert set(await planned(url)) == {"adopt-pack"}
    assert await healthy(url)


async def test_rows_that_lead_elsewhere_are_corrected(tmp_path: Path, captured: tuple[Checkpoint, Checkpoint]) -> None:
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        moved, swapped = await chunk(repo, captured[0], b"a"), await chunk(repo, captured[0], b"b")
    sql(url, "UPDATE chunks SET offset = offset + 7, stored_size = stored_size - 9 WHERE id = ?", moved)
    sql(url, "UPDATE chunks SET pack_number = pack_number % 2 + 1 WHERE id = ?", swapped)
    async with snapcore.open_repository(url) as repo:
        report = await repo.verify(read_data=True)
        assert found(report) == {("record-misplaced", moved.hex()), ("record-misplaced", swapped.hex())}
        assert ("t", captured[0].id) in report.hurt
    assert set(await planned(url)) == {"adopt-pack", "drop-rows"}
    assert await healthy(url)


async def test_the_size_and_the_state_of_a_needed_pack_are_corrected(
    tmp_path: Path, captured: tuple[Checkpoint, Checkpoint]
) -> None:
    url = tmp_path / "repo"
    sql(url, "UPDATE packs SET size = size + 1 WHERE number = 1")
    sql(url, "UPDATE packs SET state = 'writing' WHERE number = 2")
    assert set(await planned(url)) == {"adopt-pack"}
    assert await healthy(url)


async def test_heads_that_lead_nowhere_are_mended(tmp_path: Path, work: Path, captured: tuple[Checkpoint, Checkpoint]) -> None:
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        await repo.fork("t", to_thread_id="u")
    sql(url, "UPDATE threads SET head_id = 'nowhere' WHERE thread_id = 't'")
    sql(url, "DELETE FROM threads WHERE thread_id = 'u'")
    sql(url, "INSERT INTO threads VALUES ('empty', 'nowhere')")
    async with snapcore.open_repository(url) as repo:
        assert found(await repo.verify()) == {("head", "t"), ("head", "u"), ("head", "empty")}
    assert await planned(url) == ["mend-heads"]
    assert await healthy(url)
    async with snapcore.open_repository(url) as repo:
        assert (await repo.capture(work, thread_id="empty")).parent_id is None


async def test_what_is_nowhere_stays_hurt_and_is_named(tmp_path: Path, captured: tuple[Checkpoint, Checkpoint]) -> None:
    """Rows of a pack that was never seen as missing: the next capture is told to look."""
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        lost = await chunk(repo, captured[1], b"b")
    number = sql(url, "DELETE FROM chunks WHERE id = ?", lost)
    async with snapcore.open_repository(url) as repo:
        pack_id = await pack_of(repo, captured[1].record_id)
    sql(url, "UPDATE packs SET state = 'deleted' WHERE pack_id = ?", pack_id)
    sql(url, "DELETE FROM chunks WHERE pack_number = (SELECT number FROM packs WHERE pack_id = ?)", pack_id)
    pack_file(url, pack_id).unlink()
    report = await snapcore.repair_repository(url)
    assert (number, report.ok, report.hurt) == (1, False, [("t", captured[1].id)])
    assert [str(a.step) for a in report.done] == ["write-records", "distrust-heads"]
    assert not (await snapcore.repair_repository(url)).done
    async with snapcore.open_repository(url) as repo:
        await repo.capture(tmp_path / "work", thread_id="t")
    assert await healthy(url)


# ---- what is out of reach is not lost


@pytest.mark.parametrize("method", ["head", "get", "list"])
async def test_a_store_that_cannot_be_read_stops_a_repair_before_it_changes_anything(
    tmp_path: Path, captured: tuple[Checkpoint, Checkpoint], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 47."""
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        pack_file(url, await pack_of(repo, captured[0].record_id)).unlink()
    faults = Faults()
    with sqlite3.connect(url / "snapcore.db") as database:
        before = list(database.execute("SELECT * FROM packs")) + list(database.execute("SELECT * FROM chunks"))
    for call in range(1 if method != "get" else 2, 9):
        faults.clear()
        faults.fail(method, call)
        with monkeypatch.context() as patch:
            patch.setattr("snapcore.rebuilding.open_blobs", lambda _: with_faults(LocalBlobStore(str(url)), faults))
            try:
                await snapcore.plan_repair(url)
                break  # fewer calls than that
            except RepositoryError:
                faults.calls.clear()
            with pytest.raises(RepositoryError) as caught:
                await snapcore.repair_repository(url)
            assert caught.value.code == Code.STORE_UNAVAILABLE
        with sqlite3.connect(url / "snapcore.db") as database:
            now = list(database.execute("SELECT * FROM packs")) + list(database.execute("SELECT * FROM chunks"))
        assert now == before
    assert call > 1
    assert (url / CONFIG_KEY).exists()
    assert not (url / REBUILDING_KEY).exists()


# ---- crashes


@pytest.mark.parametrize("lost", ["database", "pack", "newer"])
async def test_a_repair_that_dies_after_any_write_is_gone_on_with(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """To die before a write is to die after the one before it: what is only read changes nothing."""
    origin = tmp_path / "origin"
    async with snapcore.open_repository(origin) as repo:
        first = await repo.capture(make({"a": os.urandom(3000)}), thread_id="t")
    shutil.copy(origin / "snapcore.db", tmp_path / "older.db")
    async with snapcore.open_repository(origin) as repo:
        await repo.fork("t", to_thread_id="u")
        before = await everything(repo)
        damaged = await pack_of(repo, first.record_id)
    if lost == "database":
        lose_database(origin)
    elif lost == "newer":
        lose_database(origin)
        shutil.copy(tmp_path / "older.db", origin / "snapcore.db")
    else:
        pack_file(origin, damaged).write_bytes(pack_file(origin, damaged).read_bytes()[:-20])
    methods = ("put", "delete", "initialize", "start_maintenance", "adopt_checkpoints", "adopt_pack", "lose_packs", "mend_heads")
    faults = Faults()

    async def repair(url: Path) -> None:
        shutil.copytree(origin, url)
        with monkeypatch.context() as patch:
            patch.setattr("snapcore.rebuilding.open_blobs", lambda a: with_faults(LocalBlobStore(str(a)), faults))
            patch.setattr("snapcore.rebuilding.open_database", lambda a: with_faults(SqlCheckpointStore(a), faults))
            await snapcore.repair_repository(url)

    await repair(tmp_path / "whole")
    made = Counter(faults.calls)
    crashed = 0
    for method in (*methods, "reserve_maintenance_packs", "rename_database"):
        for call in range(1, min(made[method], 3) + 1):
            url = tmp_path / f"{method}-{call}"
            faults.clear()
            faults.crash(method, call)
            with pytest.raises(Crash):
                await repair(url)
            crashed += 1
            await snapcore.repair_repository(url)
            async with snapcore.open_repository(url, create=False) as repo:
                assert await everything(repo) == before
            assert await healthy(url)
            assert not (url / REBUILDING_KEY).exists()
            assert not (url / RENAMING_KEY).exists()
    assert crashed >= 5


@pytest.mark.parametrize(("method", "call"), [("adopt_pack", 3), ("mend_heads", 1)])
async def test_a_repair_that_was_overtaken_changes_nothing_more(
    tmp_path: Path, captured: tuple[Checkpoint, Checkpoint], monkeypatch: pytest.MonkeyPatch, method: str, call: int
) -> None:
    url = tmp_path / "repo"
    before = {c.id for c in captured}
    lose_database(url)
    faults = Faults()

    async def another() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("snapcore.rebuilding.open_blobs", lambda a: LocalBlobStore(str(a)))
            assert (await snapcore.repair_repository(url)).ok

    faults.run(method, another, call)  # of `adopt_pack`, the plan's two come first, which gather what was found
    with monkeypatch.context() as patch:
        patch.setattr("snapcore.rebuilding.open_database", lambda a: with_faults(SqlCheckpointStore(a), faults))
        with pytest.raises(RepositoryError) as caught:
            await snapcore.repair_repository(url)
    assert caught.value.code == Code.MAINTENANCE_LOST
    async with snapcore.open_repository(url, create=False) as repo:
        assert {c.id for c in await repo.list("t")} == before
    assert await healthy(url)


async def test_captures_go_on_while_a_repair_runs(
    tmp_path: Path, work: Path, captured: tuple[Checkpoint, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "repo"
    assert sql(url, "DELETE FROM chunks") > 5
    faults = Faults()
    async with snapcore.open_repository(url) as repo:

        async def capture() -> None:
            await repo.capture(work, thread_id="other")

        faults.run("pack_contents", capture, 1)
        faults.run("adopt_pack", capture, 1)
        with monkeypatch.context() as patch:
            patch.setattr("snapcore.rebuilding.open_database", lambda a: with_faults(SqlCheckpointStore(a), faults))
            assert (await snapcore.repair_repository(url)).ok
        assert len(await repo.list("other")) == 2
    assert await healthy(url)


def test_without_async_it_is_the_same(tmp_path: Path, make: Make) -> None:
    url = tmp_path / "repo"
    with snapcore.blocking.open_repository(url) as repo:
        repo.capture(str(make({"a": "1"})), thread_id="t")
    lose_database(url)
    assert snapcore.blocking.plan_repair(url).actions
    assert snapcore.blocking.repair_repository(url, read_data=True).ok
    assert not snapcore.blocking.plan_repair(url).actions
